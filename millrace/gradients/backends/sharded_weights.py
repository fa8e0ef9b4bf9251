"""Weights of a run in shards, on this machine or on the nodes of a Ray cluster.

`ShardedWeights` calls all shards and combines their results. Ray sends the bucket's credentials to
the nodes, so use a cluster with token authentication.
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
    ExpectedGradient,
    Payload,
    PayloadError,
    Shapes,
    assemble_payload,
    read_header,
)
from millrace.gradients.state import WeightState, combine_digests
from millrace.gradients.sync.chain import check_link_tensors, check_state
from millrace.gradients.sync.gather import GatherWindow
from millrace.gradients.sync.merge import Gradients, MergeRequest, Vector, group_tensors
from millrace.keys.gradients import ChainKeys
from millrace.progress import Progress, ignore_event
from millrace.schemas.chain import ChainLink, ChainStart, OuterOptimizer, Update
from millrace.schemas.checkpoint import Checkpoint
from millrace.schemas.gradient import Codec
from millrace.storage import Stat, Store

_AT_ONCE = 64  # largest number of gradients that a node reads at once
_READING, _CALLS = "reading", 4

P = ParamSpec("P")
T = TypeVar("T")


class ShardCall(Protocol):
    """Caller of the methods of a shard on any machine."""

    def __call__(
        self, method: Callable[Concatenate[WeightShard, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Call a method of the shard.

        The future raises `WorkerError` if the shard is lost, and otherwise the method's error.
        """
        ...


class ShardedWeights:
    """Weights of a run in shards.

    Args:
        shapes: Shapes of all tensors by their names.
        shards: Callers of the shards. Each shard has some tensors, in the order of their names.
    """

    def __init__(self, shapes: Shapes, shards: Sequence[ShardCall]) -> None:
        self.shapes = {name: shapes[name] for name in sorted(shapes)}
        self._shards = shards
        self._attempt = secrets.token_hex(8)

    def _call_all(
        self, method: Callable[Concatenate[WeightShard, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call a method of all shards, and return the results in the order of the shards.

        An error of a shard is raised after all shards have ended. Only the loss of a shard is
        raised at once, since other shards may wait for the lost one.
        """
        asked = [ask(method, *args, **kwargs) for ask in self._shards]
        late = set(asked)
        while late:
            done, late = wait(late, return_when=FIRST_COMPLETED)
            for one in done:
                if isinstance(one.exception(), errors.WorkerError):
                    one.result()
        return [one.result() for one in asked]

    # -- the weights

    def load_state(self, store: Store, job: str, step: int) -> None:
        """Load all tensors from a checkpoint of the run: see `WeightShard.load_state`."""
        self._call_all(WeightShard.load_state, store, job, step)

    def load_weights(self, store: Store, job: str, step: int, prefix: str) -> None:
        """Load all tensors from any checkpoint: see `WeightShard.load_weights`."""
        self._call_all(WeightShard.load_weights, store, job, step, prefix)

    def digest(self) -> str:
        """Return the digest of the weights: see `WeightState.digest`."""
        digests = self._call_all(WeightShard.compute_digests)
        return combine_digests({name: one for part in digests for name, one in part.items()})

    def check(self, link: ChainStart | ChainLink) -> None:
        """Check that the weights have the digest of a link.

        Raises:
            ChainError: The weights have another digest.
        """
        if link.state:
            check_state(link, self.digest())

    def replay(self, store: Store, link: ChainLink) -> None:
        """Apply a link, and check that the weights then have its digest.

        Raises:
            ChainError: The link is missing or broken, or the weights have another digest.
        """
        check_link_tensors(link, self.shapes)
        self._call_all(WeightShard.fetch, store, link)
        self._call_all(WeightShard.apply, link)
        self.check(link)

    # -- a window

    def open(self, window: GatherWindow) -> None:
        """Begin a window, and drop the gradients of other windows."""
        self._call_all(WeightShard.open, window.number)

    def read(self, uid: str, store: Store, stat: Stat, expected: ExpectedGradient) -> Payload:
        """Read a worker's gradient. Each shard reads and keeps its own tensors.

        Raises:
            PayloadError: The gradient does not meet the conditions.
        """
        checked = read_header(store, stat, expected)
        try:
            parts = self._call_all(WeightShard.receive, uid, store, stat, checked, expected)
            return assemble_payload(checked, parts, expected)
        except PayloadError:
            self._call_all(WeightShard.forget, uid)
            raise

    def list_index_digests(self, workers: Sequence[str]) -> dict[str, list[str]]:
        """Return the digests of the indices that each worker sent, in the order of the tensors."""
        answers = self._call_all(WeightShard.list_index_digests, workers)
        return {worker: [one for part in answers for one in part[worker]] for worker in workers}

    def compute_products(self, workers: Sequence[str], codec: Codec) -> list[Vector]:
        """Return inner products of the gradients for each tensor: see `merge.compute_products`."""
        return [
            one
            for part in self._call_all(WeightShard.compute_products, workers, codec)
            for one in part
        ]

    def merge_and_apply(
        self,
        store: Store,
        keys: ChainKeys,
        step: int,
        request: MergeRequest,
        outer: OuterOptimizer,
    ) -> tuple[Update, ...]:
        """Merge, store and apply the gradients of all shards: see `WeightShard.merge_and_apply`."""
        parts = self._call_all(WeightShard.merge_and_apply, store, keys, step, request, outer)
        return tuple(update for part in parts for update in part)

    # -- checkpoints

    def save(self, store: Store, job: str, *, step: int, window: int) -> None:
        """Begin to save the weights after a window, and return when they are copied.

        Args:
            store: Store to save to, the same in all calls.
            job: Job of the checkpoint, the same in all calls.
            step: Step of the weights.
            window: Number of the window.
        """
        self._call_all(WeightShard.save, store, job, self._attempt, step, window, self.shapes)

    def wait_for_save(self) -> Checkpoint | None:
        """Wait for the save in progress, and return its checkpoint; None without a save."""
        return next((found for found in self._call_all(WeightShard.wait_for_save) if found), None)

    def close(self) -> None:
        """Wait for the save in progress, and free its memory."""
        self._call_all(WeightShard.close)

    def collect_state(self) -> WeightState:
        """Return a state with the tensors of all shards."""
        whole = WeightState({})
        for part in self._call_all(WeightShard.get_state):
            whole.weights.update(part.weights)
            whole.moments.update(part.moments)
        return whole


def make_single_shard(
    state: WeightState, gradients: Gradients | None = None, *, threads: int | None = None
) -> ShardedWeights:
    """Return weights of this process as one shard.

    Args:
        state: Weights, which are changed in place.
        gradients: Gradients of the next merge by the workers' names, if they were read before.
        threads: Number of threads; by default one per processor.
    """
    shapes = {name: weight.shape for name, weight in state.weights.items()}
    shard = WeightShard(sorted(shapes), state, gradients, threads=threads)
    return ShardedWeights(shapes, [hold_locally(shard)])


AllocateWeights = Callable[[Shapes], ShardedWeights]
"""Function that allocates weights from their shapes."""


def allocate_locally(
    *, threads: int | None = None, progress: Progress = ignore_event
) -> AllocateWeights:
    """Return a function that allocates weights on this machine.

    Args:
        threads: Number of threads; by default one per processor.
        progress: Receives the events of `Saver`.
    """

    def allocate(shapes: Shapes) -> ShardedWeights:
        shard = WeightShard(sorted(shapes), threads=threads, progress=progress)
        return ShardedWeights(shapes, [hold_locally(shard)])

    return allocate


@contextmanager
def allocate_on_ray(
    address: str, *, values: int, threads: int | None = None
) -> Generator[AllocateWeights]:
    """Yield a function that allocates a shard on each living node with a CPU of a Ray cluster.

    The end of the block frees the weights.

    Args:
        address: Address of the cluster; ``auto`` for the cluster of this machine.
        values: Number of values per object, as for `group_tensors`. Each object is on one node.
        threads: Number of threads on each node; by default one per processor.

    Raises:
        ConfigurationError: There is no such cluster.
    """
    actors: list[Any] = []
    with cluster.connect(address) as ray:
        answering = cluster.list_answering_nodes(ray)
        nodes = [node for node in answering if node["Resources"].get("CPU")] or answering
        if not nodes:
            raise errors.ConfigurationError(
                f"No node of the Ray cluster {address} answers: start nodes with `ray start`."
            )

        # Stalled reads must not delay other calls.
        holder = ray.remote(concurrency_groups={_READING: _AT_ONCE})(WeightShard)

        def allocate(shapes: Shapes) -> ShardedWeights:
            shares = divide_tensors(shapes, group_tensors(shapes, values), len(nodes))
            shards: list[ShardCall] = []
            for number, (node, names) in enumerate(zip(nodes, shares, strict=False)):
                options = {"max_concurrency": _CALLS, **cluster.make_node_options(node)}
                actor = holder.options(**options)
                rank = (number, len(shares))
                actors.append(actor.remote(names, rank=rank, threads=threads))
                shards.append(_hold_in_actor(ray, actors[-1]))
            return ShardedWeights(shapes, shards)

        try:
            yield allocate
        finally:
            for actor in actors:
                ray.kill(actor)


def divide_tensors(
    shapes: Shapes, objects: Sequence[tuple[str, ...]], count: int
) -> list[list[str]]:
    """Divide tensors between at most ``count`` nodes, with about equal numbers of values.

    Args:
        shapes: Shapes of the tensors by their names.
        objects: Groups of tensors from `group_tensors`, which are not divided.
        count: Number of nodes.

    Returns:
        Names of the tensors of each node, in the order of ``objects``.
    """
    sizes = [sum(prod(shapes[name]) for name in names) for names in objects]
    whole, before = max(sum(sizes), 1), 0
    shares: list[list[str]] = [[] for _ in range(count)]
    for names, size in zip(objects, sizes, strict=True):
        middle = before + size / 2
        shares[min(count - 1, int(middle * count / whole))] += names
        before += size
    return [share for share in shares if share]


def hold_locally(shard: WeightShard) -> ShardCall:
    """Return a caller of a shard of this process, which runs methods in the calling thread."""

    def ask(
        method: Callable[Concatenate[WeightShard, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        answer: Future[T] = Future()
        try:
            answer.set_result(method(shard, *args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised when all shards have ended
            answer.set_exception(error)
        return answer

    return ask


def _hold_in_actor(ray: Any, actor: Any) -> ShardCall:
    """Return a caller of a shard in an actor of Ray."""

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
                answer.set_exception(cast("Any", error).cause or error)  # the error of the method
            else:
                answer.set_exception(_make_lost_error(error))

        asked.future().add_done_callback(tell)
        return answer

    return ask


def _make_lost_error(error: BaseException) -> errors.WorkerError:
    return errors.WorkerError(
        f"A node with some of the weights is lost ({errors.format_error(error)}): start the "
        "aggregator again, it goes on from the chain."
    )
