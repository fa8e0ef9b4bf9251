"""Backend with the weights on the ranks of a worker."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from millrace.gradients.backends.rank_group import RankGroup
from millrace.gradients.backends.sharded_weights import ShardedWeights, divide_tensors
from millrace.gradients.backends.weight_shard import WeightShard
from millrace.gradients.codec.gradient_object import Shapes
from millrace.gradients.state import WeightState

P = ParamSpec("P")
T = TypeVar("T")


class RankShards:
    """Backend with one shard on each rank. All ranks call its methods together.

    Args:
        ranks: Group of the worker's ranks.
        shard: Shard of this rank.
    """

    def __init__(self, ranks: RankGroup, shard: WeightShard) -> None:
        self._ranks, self._shard = ranks, shard

    def call_all(
        self, method: Callable[Concatenate[WeightShard, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call a method of all shards: see `WeightBackend.call_all`.

        Results are sent as JSON, so methods that return tensors, such as `get_state`, are called on
        the shard of a rank only.
        """
        return self._ranks.gather_results(partial(method, self._shard, *args, **kwargs))


class RankedWeights(ShardedWeights):
    """Weights of a run, with some tensors on each rank of a worker.

    Args:
        shapes: Shapes of all tensors by their names.
        ranks: Group of the worker's ranks.
        state: All weights, of which this rank keeps some; by default none until they are loaded.
        threads: Number of threads; by default one per processor.

    Attributes:
        owners: Rank of each tensor, by the tensors' names.
    """

    def __init__(
        self,
        shapes: Shapes,
        ranks: RankGroup,
        state: WeightState | None = None,
        *,
        threads: int | None = None,
    ) -> None:
        names = divide_tensors(shapes, [(name,) for name in sorted(shapes)], ranks.world)
        self.owners = {name: rank for rank, some in enumerate(names) for name in some}
        mine = [name for name, owner in self.owners.items() if owner == ranks.rank]
        self._shard = WeightShard(mine, state and _select_state(state, mine), threads=threads)
        super().__init__(shapes, RankShards(ranks, self._shard))

    @property
    def held(self) -> WeightState:
        """Weights of this rank."""
        return self._shard.get_state()


def _select_state(state: WeightState, names: Sequence[str]) -> WeightState:
    kinds = (state.weights, state.moments)
    return WeightState(*({name: kind[name] for name in names if name in kind} for kind in kinds))
