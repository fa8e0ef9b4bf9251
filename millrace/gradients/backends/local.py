"""Backend with the weights in this process."""

from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from millrace.gradients.backends.sharded_weights import AllocateWeights, ShardedWeights
from millrace.gradients.backends.weight_shard import WeightShard
from millrace.gradients.codec.gradient_object import Shapes
from millrace.gradients.merging.merge import GradientsByWorker
from millrace.gradients.state import WeightState
from millrace.progress import Progress, ignore_event

P = ParamSpec("P")
T = TypeVar("T")


class LocalShards:
    """Backend whose shards are in this process. The calling thread runs their methods.

    Args:
        shards: Shards in the order of their tensors' names.
    """

    def __init__(self, shards: Sequence[WeightShard]) -> None:
        self._shards = tuple(shards)

    def call_all(
        self, method: Callable[Concatenate[WeightShard, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call a method of all shards: see `WeightBackend.call_all`."""
        results: list[T] = []
        failed: list[Exception] = []
        for shard in self._shards:
            try:
                results.append(method(shard, *args, **kwargs))
            except Exception as error:  # noqa: BLE001 - raised when all shards have ended
                failed.append(error)
        if failed:
            raise failed[0]
        return results


def make_single_shard(
    state: WeightState, gradients: GradientsByWorker | None = None, *, threads: int | None = None
) -> ShardedWeights:
    """Return weights of this process as one shard.

    Args:
        state: Weights, which are changed in place.
        gradients: Gradients of the next merge by the workers' names, if they were read before.
        threads: Number of threads; by default one per processor.
    """
    shapes = {name: weight.shape for name, weight in state.weights.items()}
    shard = WeightShard(sorted(shapes), state, gradients, threads=threads)
    return ShardedWeights(shapes, LocalShards([shard]))


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
        return ShardedWeights(shapes, LocalShards([shard]))

    return allocate
