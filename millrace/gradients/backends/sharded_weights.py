"""The weights of a run, on this machine or spread over the nodes of a Ray cluster.

Whoever follows a run asks all portions of its weights and puts their answers together. The bucket's
credentials travel to the nodes over Ray: a cluster that asks for its token is the place for them.
"""

import secrets
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from math import prod
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from millrace import cluster, errors
from millrace.gradients.backends.weight_shard import WeightShard
from millrace.gradients.codec.payload import (
    Expected,
    Payload,
    PayloadError,
    Shapes,
    assemble_payload,
    read_header,
)
from millrace.gradients.state import WeightState, combine_digests
from millrace.gradients.sync.chain import check_state, check_tensors
from millrace.gradients.sync.gather import Window
from millrace.gradients.sync.merge import Gradients, MergeRequest, Vector, group_tensors
from millrace.keys import ChainKeys
from millrace.progress import Progress, ignore_event
from millrace.schemas.chain import ChainLink, ChainStart, OuterOptimizer, Update
from millrace.schemas.checkpoint import Checkpoint
from millrace.schemas.gradient import Codec
from millrace.storage import Stat, Store

_AT_ONCE = 64  # gradients that a node reads, at most
_READING, _CALLS = "reading", 4

P = ParamSpec("P")
T = TypeVar("T")


class Ask(Protocol):
    """A portion that can be asked, wherever it is."""

    def __call__(
        self, method: Callable[Concatenate[WeightShard, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Ask for something.

        A `WorkerError` says that the portion is gone; other errors are as if raised here.
        """
        ...


class ShardedWeights:
    """The weights of a run, in portions.

    Args:
        shapes: Of all tensors, by their names.
        portions: Each has some of them, in the order of their names.
    """

    def __init__(self, shapes: Shapes, portions: Sequence[Ask]) -> None:
        self.shapes = {name: shapes[name] for name in sorted(shapes)}
        self._portions = portions
        self._attempt = secrets.token_hex(8)

    def _all(
        self, method: Callable[Concatenate[WeightShard, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Return all answers, when all have come: none is still at work when an error is raised.

        A portion that is gone is not waited for, nor are those that may wait for it.
        """
        asked = [ask(method, *args, **kwargs) for ask in self._portions]
        late = set(asked)
        while late:
            done, late = wait(late, return_when=FIRST_COMPLETED)
            for one in done:
                if isinstance(one.exception(), errors.WorkerError):
                    one.result()
        return [one.result() for one in asked]

    # -- the weights

    def load_state(self, store: Store, job: str, step: int) -> None:
        """As `WeightShard.load_state`."""
        self._all(WeightShard.load_state, store, job, step)

    def load_weights(self, store: Store, job: str, step: int, prefix: str) -> None:
        """As `Portion.load_weights`."""
        self._all(WeightShard.load_weights, store, job, step, prefix)

    def digest(self) -> str:
        """As `WeightState.digest`."""
        digests = self._all(WeightShard.digests)
        return combine_digests({name: one for part in digests for name, one in part.items()})

    def check(self, link: ChainStart | ChainLink) -> None:
        """Prove that the weights are those that a link leads to.

        Raises:
            ChainError: They are not.
        """
        if link.state:
            check_state(link, self.digest())

    def replay(self, store: Store, link: ChainLink) -> None:
        """Apply a link, and prove that the weights are those it leads to.

        Raises:
            ChainError: It is missing or broken, or they are not.
        """
        check_tensors(link, self.shapes)
        self._all(WeightShard.fetch, store, link)
        self._all(WeightShard.apply, link)
        self.check(link)

    # -- a window

    def open(self, window: Window) -> None:
        """Forget the gradients of other windows."""
        self._all(WeightShard.open, window.number)

    def read(self, uid: str, store: Store, stat: Stat, expected: Expected) -> Payload:
        """Read a worker's gradient, each portion its tensors: they stay where they are read.

        Raises:
            PayloadError: It is not what it must be; why is said.
        """
        opened = read_header(store, stat, expected)
        try:
            parts = self._all(WeightShard.receive, uid, store, stat, opened, expected)
            return assemble_payload(opened, parts, expected)
        except PayloadError:
            self._all(WeightShard.forget, uid)
            raise

    def places(self, workers: Sequence[str]) -> dict[str, list[str]]:
        """Return the digests of the indices that each worker has sent of each tensor."""
        answers = self._all(WeightShard.places, workers)
        return {worker: [one for part in answers for one in part[worker]] for worker in workers}

    def products(self, workers: Sequence[str], codec: Codec) -> list[Vector]:
        """Return inner products of workers' gradients for each tensor: see `compute_products`."""
        return [one for part in self._all(WeightShard.products, workers, codec) for one in part]

    def merge(
        self,
        store: Store,
        keys: ChainKeys,
        step: int,
        request: MergeRequest,
        outer: OuterOptimizer,
    ) -> tuple[Update, ...]:
        """As `WeightShard.merge`."""
        parts = self._all(WeightShard.merge, store, keys, step, request, outer)
        return tuple(update for part in parts for update in part)

    # -- checkpoints

    def save(self, store: Store, job: str, *, step: int, window: int) -> None:
        """Begin to save the weights after a window; returns as soon as they are copied.

        Args:
            store: Where to: always the same.
            job: Whose checkpoint it is: always the same.
            step: That they are at.
            window: That they are after.
        """
        self._all(WeightShard.save, store, job, self._attempt, step, window, self.shapes)

    def saved(self) -> Checkpoint | None:
        """Return the checkpoint whose save was begun, once it is there.

        None if none was since the last time.
        """
        return next((found for found in self._all(WeightShard.saved) if found), None)

    def close(self) -> None:
        """Wait for what is being saved, and let go of its memory."""
        self._all(WeightShard.close)

    def state(self) -> WeightState:
        """All of it, brought here."""
        whole = WeightState({})
        for part in self._all(WeightShard.state):
            whole.weights.update(part.weights)
            whole.moments.update(part.moments)
        return whole


def hold_here(
    state: WeightState, gradients: Gradients | None = None, *, threads: int | None = None
) -> ShardedWeights:
    """Weights that are here, and gradients that were read already.

    Args:
        state: The weights; changed in place.
        gradients: Of the window that is merged next, by the workers' names.
        threads: How many work side by side; by default one a processor.
    """
    shapes = {name: weight.shape for name, weight in state.weights.items()}
    portion = WeightShard(sorted(shapes), state, gradients, threads=threads)
    return ShardedWeights(shapes, [hold_locally(portion)])


Placing = Callable[[Shapes], ShardedWeights]
"""Makes room for weights, by their shapes."""


def place_here(*, threads: int | None = None, progress: Progress = ignore_event) -> Placing:
    """Room on this machine.

    Args:
        threads: How many work side by side.
        progress: As of `Saver`.
    """

    def place(shapes: Shapes) -> ShardedWeights:
        portion = WeightShard(sorted(shapes), threads=threads, progress=progress)
        return ShardedWeights(shapes, [hold_locally(portion)])

    return place


@contextmanager
def place_on_ray(address: str, *, values: int, threads: int | None = None) -> Generator[Placing]:
    """Room on the living nodes of a Ray cluster that have a CPU: a portion on each.

    It is theirs as long as the block lasts.

    Args:
        address: Of the cluster; ``auto`` for the one this machine is in.
        values: As of `objects_of`: no object's tensors are on two nodes.
        threads: How many work side by side on each; by default one a processor.

    Raises:
        ConfigurationError: There is no such cluster.
    """
    actors: list[Any] = []
    with cluster.connect(address) as ray:
        answering = cluster.list_answering_nodes(ray)
        nodes = [node for node in answering if node["Resources"].get("CPU")] or answering
        if not nodes:
            raise errors.ConfigurationError("No node of the Ray cluster answers: start some.")

        # Reads that hang hold up nothing else.
        holder = ray.remote(concurrency_groups={_READING: _AT_ONCE})(WeightShard)

        def place(shapes: Shapes) -> ShardedWeights:
            shares = divide_tensors(shapes, group_tensors(shapes, values), len(nodes))
            portions: list[Ask] = []
            for number, (node, names) in enumerate(zip(nodes, shares, strict=False)):
                options = {"max_concurrency": _CALLS, **cluster.make_node_options(node)}
                actor = holder.options(**options)
                rank = (number, len(shares))
                actors.append(actor.remote(names, rank=rank, threads=threads))
                portions.append(_hold_in_actor(ray, actors[-1]))
            return ShardedWeights(shapes, portions)

        try:
            yield place
        finally:
            for actor in actors:
                ray.kill(actor)


def divide_tensors(
    shapes: Shapes, objects: Sequence[tuple[str, ...]], count: int
) -> list[list[str]]:
    """Return the tensors of each of so many nodes at most: neighbours, about as many values each.

    Args:
        shapes: Of the tensors, by their names.
        objects: As of `objects_of`: none is cut.
        count: How many nodes there are.
    """
    sizes = [sum(prod(shapes[name]) for name in names) for names in objects]
    whole, before = max(sum(sizes), 1), 0
    shares: list[list[str]] = [[] for _ in range(count)]
    for names, size in zip(objects, sizes, strict=True):
        middle = before + size / 2
        shares[min(count - 1, int(middle * count / whole))] += names
        before += size
    return [share for share in shares if share]


def hold_locally(portion: WeightShard) -> Ask:
    """Hold a shard of the weights on this machine: the caller does the work."""

    def ask(
        method: Callable[Concatenate[WeightShard, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        answer: Future[T] = Future()
        try:
            answer.set_result(method(portion, *args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised when all have answered
            answer.set_exception(error)
        return answer

    return ask


def _hold_in_actor(ray: Any, actor: Any) -> Ask:
    """Hold a shard of the weights in an actor of Ray."""

    def ask(
        method: Callable[Concatenate[WeightShard, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        remote = getattr(actor, method.__name__)
        group = _READING if method.__name__ == WeightShard.receive.__name__ else None
        asked = (remote.options(concurrency_group=group) if group else remote).remote(
            *args, **kwargs
        )
        answer: Future[T] = Future()

        def tell(done: Future[T]) -> None:
            error = done.exception()
            if error is None:
                answer.set_result(done.result())
            elif isinstance(error, ray.exceptions.RayTaskError):
                answer.set_exception(cast("Any", error).cause or error)  # as if raised here
            else:
                answer.set_exception(_make_lost_error(error))

        asked.future().add_done_callback(tell)
        return answer

    return ask


def _make_lost_error(error: BaseException) -> errors.WorkerError:
    return errors.WorkerError(
        f"A node that has some weights is gone ({errors.format_error(error)}): start the "
        "aggregator again, it goes on from the chain."
    )
