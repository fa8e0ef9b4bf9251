"""A run whose weights are in portions comes to the same bytes as one that is on one machine."""

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.checkpoints import iterate_checkpoints
from millrace.gradients import (
    AggregationSettings,
    AggregatorSettings,
    ChainLink,
    Codec,
    ExclusionReason,
    GatherSettings,
    GatherWindow,
    GradientEncoder,
    GradientError,
    MergeRule,
    MergeSettings,
    OuterKind,
    OuterOptimizer,
    RunSettings,
    Sender,
    Support,
    Transform,
    WeightState,
    begin_run,
    catch_up,
    copy_state,
    encode_gradient,
    iterate_links,
    load_newest_state,
    merge_windows,
)
from millrace.gradients.backends.local import LocalShards
from millrace.gradients.backends.sharded_weights import ShardedWeights, divide_tensors
from millrace.gradients.backends.weight_shard import WeightShard
from millrace.gradients.codec.gradient_object import Shapes
from millrace.gradients.codec.shared_indices import Mask
from millrace.gradients.merging.merge import group_tensors
from millrace.schemas.chain import TakenGradient
from millrace.storage import Store, head, list_objects, open_store, put, read
from tests.ray_cluster import RayCluster
from tests.unit.gradients.test_codec import drawn
from tests.unit.gradients.test_gradient_object import as_torch

SHAPES = {
    "embed": (50, 30),
    "head": (30, 50),
    "layer.bias": (17,),
    "layer.running_mean": (17,),
    "layer.weight": (70, 65),
}
UIDS = ("a", "b", "c", "d", "e", "f")
WEIGHTS_PER_OBJECT = 2000  # the tensors make three
WINDOWS = 2


def settings_of(rule: MergeRule, outer: OuterKind, codec: Codec) -> RunSettings:
    return RunSettings(
        run="runs/one",
        codec=codec,
        outer=OuterOptimizer(kind=outer, lr=0.5),
        merge=MergeSettings(rule=rule, faulty=1, weights_per_object=WEIGHTS_PER_OBJECT),
        gather=GatherSettings(poll_interval=timedelta(milliseconds=10), quorum=0, wanted=len(UIDS)),
        window_length=timedelta(hours=1),
        steps=5,
    )


def weights() -> WeightState:
    return copy_state({name: drawn(shape, 50) for name, shape in SHAPES.items()})


def gradient(
    run: RunSettings, uid: str, window: int, shapes: Shapes = SHAPES, cut: str = ""
) -> bytes:
    mask = Mask(run.name, window)
    bodies = {
        name: GradientEncoder(run.codec.select_for_tensor(name), 1).encode(
            drawn(shape, 100 * window + ord(uid)), mask
        )
        for name, shape in shapes.items()
    }
    if cut:
        bodies[cut] = bodies[cut][:-3]
    said: dict[str, Any] = {"run": run.name, "uid": uid, "window": window, "tokens": 9}
    return encode_gradient(bodies, shapes, run.codec, base=(window - 1) * run.steps, **said)


def send(store: Store, run: RunSettings, window: int) -> None:
    """One of them a file of torch's, and one, which counts nowhere, that is none's."""
    for uid in UIDS:
        body, key = gradient(run, uid, window), run.gradient_keys.make_gradient_key(uid, window)
        if uid == "b":
            body, key = as_torch(body), key.replace(".safetensors", ".pt")
        put(store, key, body)
    put(store, run.gradient_keys.make_gradient_key("bad", window), gradient(run, "a", window))


def in_portions(state: WeightState, names: list[list[str]]) -> ShardedWeights:
    portions = []
    for number, some in enumerate(names):
        its = WeightState({name: state.weights[name] for name in some})
        portions.append(WeightShard(some, its, rank=(number, len(names))))
    return ShardedWeights(SHAPES, LocalShards(portions))


def run_windows(store: Store, run: RunSettings, names: list[list[str]]) -> list[ChainLink]:
    """Aggregate windows whose gradients come while they are open."""
    begin_run(store, run.chain_keys, weights())
    model = in_portions(weights(), names)
    made: list[ChainLink] = []
    send(store, run, 1)
    workers = [Sender(uid, store) for uid in ("bad", *UIDS)]
    for link in merge_windows(store, run, workers, model, until=WINDOWS):
        made.append(link)
        send(store, run, link.window + 1)
    assert model.digest() == made[-1].state
    return made


def updates(store: Store, run: RunSettings) -> dict[str, bytes]:
    prefix = run.chain_keys.prefix
    found = (
        stat.key for stat in list_objects(store, prefix) if "/" not in stat.key.removeprefix(prefix)
    )
    return {key: read(store, key) for key in found}


def drop_times(link: ChainLink) -> dict[str, TakenGradient]:
    """Return the merged workers of a link without the times of their uploads."""
    return {uid: one.model_copy(update={"written": None}) for uid, one in link.taken.items()}


@pytest.mark.parametrize(
    ("rule", "outer", "codec"),
    [
        (MergeRule.MEAN, OuterKind.NESTEROV, Codec(k=256, transform=Transform.DCT)),
        (MergeRule.SENDERS, OuterKind.SIGN, Codec(k=256)),
        (MergeRule.CENTERED_CLIP, OuterKind.SGD, Codec(k=256)),
        (MergeRule.MULTI_KRUM, OuterKind.SGD, Codec(k=256, bits=16)),
        (MergeRule.TRIMMED, OuterKind.SGD, Codec(k=256, support=Support.SHARED)),
    ],
)
def test_the_number_of_portions_does_not_change_a_byte(tmp_path, rule, outer, codec):
    run = settings_of(rule, outer, codec)
    whole = open_store((tmp_path / "whole").as_uri())
    alone = run_windows(whole, run, [sorted(SHAPES)])
    assert all(set(link.taken) == set(UIDS) for link in alone)
    assert {link.excluded["bad"].reason for link in alone} == {ExclusionReason.UID}
    assert [len(link.updates) for link in alone] == [3, 3]
    for nodes, count in ((2, 2), (8, 3)):
        store = open_store((tmp_path / str(count)).as_uri())
        shares = divide_tensors(SHAPES, group_tensors(SHAPES, WEIGHTS_PER_OBJECT), nodes)
        assert len(shares) == count
        made = run_windows(store, run, shares)
        assert [link.state for link in made] == [link.state for link in alone]
        assert [drop_times(link) for link in made] == [drop_times(link) for link in alone]
        assert [link.excluded for link in made] == [link.excluded for link in alone]
        assert updates(store, run) == updates(whole, run)
        late = weights()
        catch_up(store, run.chain_keys, late)
        assert late.digest() == made[-1].state


def test_a_gradient_is_refused_for_the_same_reason_wherever_its_tensors_are_read(tmp_path):
    run = settings_of(MergeRule.MEAN, OuterKind.SGD, Codec(k=256))
    store, key = open_store(tmp_path.as_uri()), run.gradient_keys.make_gradient_key("a", 1)
    now, codec = datetime.now(UTC), run.codec
    expected = GatherWindow(
        run.gradient_keys, 1, 0, codec, SHAPES, opens=now, closes=now
    ).make_expected("a")
    models = [
        in_portions(weights(), names)
        for names in ([sorted(SHAPES)], [[name] for name in sorted(SHAPES)])
    ]

    def refused(body: bytes) -> tuple[ExclusionReason, str]:
        put(store, key, body)
        said: list[tuple[ExclusionReason, str]] = []
        for model in models:
            with pytest.raises(GradientError) as caught:
                model.read_gradient("a", store, head(store, key), expected)
            said.append((caught.value.reason, str(caught.value)))
        assert said[0] == said[1]
        return said[0]

    good = gradient(run, "a", 1)
    begins = 8 + int.from_bytes(good[:8], "little")
    for at in np.random.default_rng(3).integers(begins, len(good), 40).tolist():
        body = bytearray(good)
        body[at] ^= 1
        assert refused(bytes(body))[0] is ExclusionReason.DIGEST
    shapes = SHAPES | {"layer.bias": (18,)}  # one tensor is another, and its digest is right
    other = gradient(run, "a", 1, shapes)
    assert refused(other)[0] is ExclusionReason.MODEL
    assert refused(gradient(run, "b", 1))[0] is ExclusionReason.UID
    bad = gradient(run, "a", 1, cut="layer.weight")
    assert refused(bad) == (ExclusionReason.CODES, "layer.weight: It ends too early.")

    put(store, key, good)
    found = [model.read_gradient("a", store, head(store, key), expected) for model in models]
    assert found[0].norm == found[1].norm > 0
    assert found[0].digest == found[1].digest


names_and_sizes = st.dictionaries(st.text("abc", min_size=1), st.integers(0, 9), min_size=1)


@given(names_and_sizes, st.integers(1, 20), st.integers(1, 5))
def test_each_tensor_is_in_one_object_of_one_share(sizes, values, count):
    shapes = {name: (size,) for name, size in sizes.items()}
    objects = group_tensors(shapes, values)
    assert [name for names in objects for name in names] == sorted(shapes)
    assert all(len(names) == 1 or sum(sizes[n] for n in names) <= values for names in objects)
    shares = divide_tensors(shapes, objects, count)
    assert [name for names in shares for name in names] == sorted(shapes)
    assert 1 <= len(shares) <= count
    # What a share makes of its tensors alone are the same objects.
    assert [o for s in shares for o in group_tensors({n: shapes[n] for n in s}, values)] == objects


# -- on the nodes of a cluster

AGGREGATE = """
import sys
from millrace.gradients import AggregatorSettings, aggregate_run
for link in aggregate_run(AggregatorSettings.model_validate_json(sys.argv[1])):
    print(link.window, flush=True)
"""


def aggregator(cluster: RayCluster, settings: AggregatorSettings) -> subprocess.Popen[str]:
    """In a process of its own: Ray lets one connect to one cluster only."""
    return subprocess.Popen(
        [sys.executable, "-c", AGGREGATE, settings.model_dump_json()],
        env=os.environ | cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.soak
def test_on_a_cluster_a_run_comes_to_the_same_and_goes_on_when_a_node_has_died(
    ray_cluster: RayCluster, tmp_path: Path
):
    run = settings_of(MergeRule.CENTERED_CLIP, OuterKind.NESTEROV, Codec(k=256))
    alone = run_windows(open_store((tmp_path / "alone").as_uri()), run, [sorted(SHAPES)])

    store = open_store((tmp_path / "cluster").as_uri())
    settings = AggregatorSettings(
        run=run,
        store=store.spec,
        workers=("bad", *UIDS),
        max_windows=WINDOWS,
        aggregation=AggregationSettings(ray=ray_cluster.address, every=1),
    )
    begin_run(store, run.chain_keys, weights())
    send(store, run, 1)
    with aggregator(ray_cluster, settings) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "1\n"
        ray_cluster.kill_actor("WeightShard")
        send(store, run, 2)
        _, said = first.communicate()
    assert first.returncode == 1
    assert "WorkerError: A node with some of the weights is lost" in said
    assert [link.state for link in iterate_links(store, run.chain_keys)] == [alone[0].state]

    with aggregator(ray_cluster, settings.model_copy(update={"max_windows": 1})) as second:
        _, said = second.communicate()
    assert second.returncode == 0, said
    made = list(iterate_links(store, run.chain_keys))
    assert [link.state for link in made] == [link.state for link in alone]
    assert [link.excluded for link in made] == [link.excluded for link in alone]
    state, window = load_newest_state(store, run.chain_keys)
    assert (window, state.digest()) == (2, alone[1].state)
    saved = next(iterate_checkpoints(store, run.chain_keys.job))
    assert len(saved.parts) >= 3  # of two nodes, and what holds them together
