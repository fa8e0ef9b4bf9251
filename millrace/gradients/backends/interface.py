"""Interface of the backends, which hold the shards of the weights of a run."""

from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from millrace.gradients.backends.weight_shard import WeightShard

P = ParamSpec("P")
T = TypeVar("T")


class WeightBackend(Protocol):
    """Holder of the shards of the weights of a run.

    Each shard has some tensors, in the order of their names.
    """

    def call_all(
        self, method: Callable[Concatenate[WeightShard, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call a method of all shards, and return the results in the order of the shards.

        An error of a shard is raised after all shards have ended. Only the loss of a shard is
        raised at once, since other shards may wait for the lost one.

        Args:
            method: Method of `WeightShard`.
            args: Arguments of the method, the same for all shards.
            kwargs: Likewise, by their names.

        Raises:
            WorkerError: A shard is lost.
        """
        ...
