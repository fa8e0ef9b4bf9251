"""Backend with the weights on the nodes of a Ray cluster.

Ray sends the bucket's credentials to the nodes, so use a cluster with token authentication.
"""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from millrace import cluster, errors
from millrace.gradients.backends.sharded_weights import (
    AllocateWeights,
    ShardedWeights,
    divide_tensors,
)
from millrace.gradients.backends.weight_shard import WeightShard
from millrace.gradients.codec.gradient_object import Shapes
from millrace.gradients.merging.merge import group_tensors

_READING, _CALLS = "reading", 4
_SPARE_READS = 64  # threads for late reads of earlier windows, and for a larger concurrency later

P = ParamSpec("P")
T = TypeVar("T")


class RayShards:
    """Backend whose shards are actors of Ray.

    Args:
        ray: Module ``ray``, which is connected to the cluster.
        actors: Actors of `WeightShard`, in the order of their tensors' names.
    """

    def __init__(self, ray: Any, actors: Sequence[Any]) -> None:
        self._ray, self._actors = ray, tuple(actors)

    def call_all(
        self, method: Callable[Concatenate[WeightShard, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call a method of all shards: see `WeightBackend.call_all`."""
        asked = [self._call_actor(actor, method, *args, **kwargs) for actor in self._actors]
        late = set(asked)
        while late:
            done, late = wait(late, return_when=FIRST_COMPLETED)
            for one in done:
                if isinstance(one.exception(), errors.WorkerError):
                    one.result()
        return [one.result() for one in asked]

    def _call_actor(
        self,
        actor: Any,
        method: Callable[Concatenate[WeightShard, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Future[T]:
        """Call a method of the shard in an actor.

        The future raises `WorkerError` if the shard is lost, and otherwise the method's error.
        """
        remote = getattr(actor, method.__name__)
        group = _READING if method.__name__ == WeightShard.receive_gradient.__name__ else None
        asked = (remote.options(concurrency_group=group) if group else remote).remote(
            *args, **kwargs
        )
        answer: Future[T] = Future()

        def tell(done: Future[T]) -> None:
            error = done.exception()
            if error is None:
                answer.set_result(done.result())
            elif isinstance(error, self._ray.exceptions.RayTaskError):
                answer.set_exception(cast("Any", error).cause or error)  # the error of the method
            else:
                answer.set_exception(_make_lost_error(error))

        asked.future().add_done_callback(tell)
        return answer


@contextmanager
def allocate_on_ray(
    address: str, *, weights_per_object: int, reads: int, threads: int | None = None
) -> Generator[AllocateWeights]:
    """Yield a function that allocates a shard on each living node with a CPU of a Ray cluster.

    The end of the block frees the weights.

    Args:
        address: Address of the cluster; ``auto`` for the cluster of this machine.
        weights_per_object: Number of weights per object, as for `group_tensors`. Each object is on
            one node.
        reads: Largest number of gradients of a window that are read at once. Each node has a
            thread for each, so that reads which stall delay no others.
        threads: Number of threads on each node; by default one per processor.

    Raises:
        ConfigurationError: There is no such cluster, or one of its nodes lacks Millrace or torch.
    """
    actors: list[Any] = []
    with cluster.connect(address) as ray:
        living = cluster.list_living_nodes(ray)
        wanted = [node for node in living if node["Resources"].get("CPU")] or living
        nodes = cluster.list_answering_nodes(ray, wanted, _import_shard)
        if not nodes:
            raise errors.ConfigurationError(
                f"No node of the Ray cluster {address} answers: start nodes with `ray start`."
            )

        # Stalled reads must not delay other calls.
        holder = ray.remote(concurrency_groups={_READING: reads + _SPARE_READS})(WeightShard)

        def allocate(shapes: Shapes) -> ShardedWeights:
            shares = divide_tensors(shapes, group_tensors(shapes, weights_per_object), len(nodes))
            begun = len(actors)
            for number, (node, names) in enumerate(zip(nodes, shares, strict=False)):
                options = {"max_concurrency": _CALLS, **cluster.make_node_options(node)}
                actor = holder.options(**options)
                rank = (number, len(shares))
                actors.append(actor.remote(names, rank=rank, threads=threads))
            return ShardedWeights(shapes, RayShards(ray, actors[begun:]))

        try:
            yield allocate
        finally:
            for actor in actors:
                ray.kill(actor)


def _import_shard() -> None:
    """Do nothing: a node that runs this function has imported all that `WeightShard` needs."""


def _make_lost_error(error: BaseException) -> errors.WorkerError:
    return errors.WorkerError(
        f"A node with some of the weights is lost ({errors.format_error(error)}): start the "
        "aggregator again, it goes on from the chain."
    )
