"""The contract of the backends: the same weights, whichever backend holds the shards."""

from collections.abc import Callable

import pytest
import torch

from millrace.errors import MillraceError, NotFoundError, UnavailableError, WorkerError
from millrace.gradients import ChainError, WeightState, copy_state
from millrace.gradients.backends.interface import WeightBackend
from millrace.gradients.backends.local import LocalShards, make_single_shard
from millrace.gradients.backends.rank_group import RankGroup
from millrace.gradients.backends.ranks import RankedWeights, RankShards
from millrace.gradients.backends.sharded_weights import ShardedWeights, divide_tensors
from millrace.gradients.backends.weight_shard import WeightShard
from millrace.schemas.chain import ChainStart

SHAPES = {"a": (3, 5), "b": (7,), "c": (2, 2, 2), "d": (1,)}


def state() -> WeightState:
    dice = torch.Generator().manual_seed(1)
    return copy_state({name: torch.randn(shape, generator=dice) for name, shape in SHAPES.items()})


def in_one_shard() -> ShardedWeights:
    return make_single_shard(state(), threads=1)


def in_three_shards() -> ShardedWeights:
    whole = state()
    shards = [
        WeightShard(names, WeightState({name: whole.weights[name] for name in names}), threads=1)
        for names in (["a"], ["b", "c"], ["d"])
    ]
    return ShardedWeights(SHAPES, LocalShards(shards))


def on_one_rank() -> ShardedWeights:
    return RankedWeights(SHAPES, RankGroup(), state(), threads=1)


@pytest.mark.parametrize("make", [in_one_shard, in_three_shards, on_one_rank])
def test_the_shards_are_the_weights(make: Callable[[], ShardedWeights]):
    weights, whole = make(), state()
    assert weights.shapes == SHAPES
    assert weights.digest() == whole.digest()
    assert weights.collect_state().digest() == whole.digest()
    link = ChainStart(run="r", job="j", step=0, root="", state=whole.digest())
    weights.check(link)
    with pytest.raises(ChainError, match="do not match the digest"):
        weights.check(link.model_copy(update={"state": "another"}))


def made(backend: str) -> tuple[WeightBackend, list[WeightShard]]:
    count = 3 if backend == "local" else 1
    shards = [WeightShard([name], threads=1) for name in "abc"[:count]]
    if backend == "local":
        return LocalShards(shards), shards
    return RankShards(RankGroup(), shards[0]), shards


@pytest.mark.parametrize("backend", ["local", "ranks"])
def test_all_shards_are_called_in_their_order(backend):
    shards, each = made(backend)
    called: list[WeightShard] = []

    def call(shard: WeightShard, number: int, *, more: int) -> int:
        called.append(shard)
        return 10 * number + more + len(called)

    assert shards.call_all(call, 4, more=1) == [41 + number for number in range(1, len(each) + 1)]
    assert called == each


@pytest.mark.parametrize("backend", ["local", "ranks"])
@pytest.mark.parametrize("error", [NotFoundError, WorkerError, UnavailableError])
def test_an_error_of_a_shard_is_raised_when_all_shards_have_ended(backend, error):
    shards, each = made(backend)
    called: list[WeightShard] = []

    def fail(shard: WeightShard) -> None:
        called.append(shard)
        raise error(f"the {len(called)}st")

    with pytest.raises(MillraceError, match="the 1st") as caught:
        shards.call_all(fail)
    assert type(caught.value) is error
    assert called == each


def test_ranks_share_the_tensors_by_their_sizes():
    weights = RankedWeights(SHAPES, RankGroup(), state(), threads=1)
    assert weights.owners == dict.fromkeys(SHAPES, 0)
    assert weights.held.digest() == state().digest()
    shares = divide_tensors(SHAPES, [(name,) for name in sorted(SHAPES)], 2)
    assert shares == [["a"], ["b", "c", "d"]]
