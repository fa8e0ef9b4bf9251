"""The contract of the backends: the same weights, whichever backend holds the shards."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from millrace.errors import MillraceError, NotFoundError, UnavailableError, WorkerError
from millrace.gradients import (
    ChainError,
    Codec,
    ExclusionReason,
    GatherWindow,
    GradientEncoder,
    GradientError,
    WeightState,
    copy_state,
    encode_gradient,
)
from millrace.gradients.backends import weight_shard
from millrace.gradients.backends.interface import WeightBackend
from millrace.gradients.backends.local import LocalShards, make_single_shard
from millrace.gradients.backends.rank_group import RankGroup
from millrace.gradients.backends.ranks import RankedWeights, RankShards
from millrace.gradients.backends.sharded_weights import ShardedWeights, divide_tensors
from millrace.gradients.backends.weight_shard import WeightShard
from millrace.gradients.codec.gradient_object import CheckedTensors, read_tensors
from millrace.keys.gradients import GradientKeys
from millrace.schemas.chain import ChainStart
from millrace.storage import head, open_store, put

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


@pytest.mark.parametrize("make", [in_one_shard, in_three_shards, on_one_rank])
def test_a_read_that_fails_in_a_later_window_leaves_the_gradient_of_that_window(
    make: Callable[[], ShardedWeights], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    weights, store, keys = make(), open_store(tmp_path.as_uri()), GradientKeys("runs/one", "1")
    now = datetime.now(UTC)
    first, second = (
        GatherWindow(
            keys=keys, number=number, base=0, codec=Codec(), shapes=SHAPES,
            opens=now, closes=now + timedelta(hours=1),
        )
        for number in (1, 2)
    )  # fmt: skip
    encoder = GradientEncoder(Codec(), 1)
    bodies = {name: encoder.encode(torch.ones(shape)) for name, shape in SHAPES.items()}

    def read(window: GatherWindow) -> None:
        key = keys.make_gradient_key("x", window.number)
        body = encode_gradient(
            bodies, SHAPES, Codec(), run="runs/one", uid="x", window=window.number, base=0
        )
        put(store, key, body)
        weights.read_gradient("x", store, head(store, key), window.make_expected("x"))

    def stall(*_: object) -> CheckedTensors:
        """Fail when the next window is open, and its gradient was read."""
        monkeypatch.setattr(weight_shard, "read_tensors", read_tensors)
        weights.begin_window(second)
        read(second)
        raise GradientError(ExclusionReason.UNAVAILABLE, "It did not arrive.")

    weights.begin_window(first)
    monkeypatch.setattr(weight_shard, "read_tensors", stall)
    with pytest.raises(GradientError, match="did not arrive"):
        read(first)
    assert len(weights.list_index_digests(["x"])["x"]) == len(SHAPES)


def test_ranks_share_the_tensors_by_their_sizes():
    weights = RankedWeights(SHAPES, RankGroup(), state(), threads=1)
    assert weights.owners == dict.fromkeys(SHAPES, 0)
    assert weights.held.digest() == state().digest()
    shares = divide_tensors(SHAPES, [(name,) for name in sorted(SHAPES)], 2)
    assert shares == [["a"], ["b", "c", "d"]]
