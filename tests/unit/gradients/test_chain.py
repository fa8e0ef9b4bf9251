"""The chain: every window once, none left out, and everybody comes to the same weights."""

import json
import threading
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
import torch

from millrace import errors
from millrace.checkpoints import load
from millrace.checkpoints.saving import PendingSave
from millrace.checkpoints.tensor_copies import BytesCopy
from millrace.gradients import (
    ChainError,
    ChainLink,
    ChainStart,
    ChainStep,
    Codec,
    ExcludedWorker,
    ExclusionReason,
    GatherSettings,
    GatherWindow,
    GradientEncoder,
    Mask,
    MergeRule,
    MergeSettings,
    OuterKind,
    OuterOptimizer,
    Sender,
    Transform,
    WeightState,
    catch_up,
    commit_first_link,
    copy_state,
    encode_gradient,
    gather,
    iterate_links,
    merge_window,
)
from millrace.gradients.backends.local import make_single_shard
from millrace.gradients.codec.merged_chunks import MergedChunks, make_dense
from millrace.gradients.codec.tensors import decode_values, select_values
from millrace.gradients.codec.transform import backward, forward
from millrace.gradients.merging.links import (
    apply_link,
    find_newest_window,
    iterate_updates,
    store_update,
)
from millrace.gradients.state import compute_dense_change
from millrace.keys.gradients import ChainKeys, GradientKeys
from millrace.records import encode_record, fetch
from millrace.schemas.chain import count_reasons
from millrace.storage import Store, copy, delete, list_objects, open_store, put, read
from tests.unit.gradients.test_codec import drawn

SHAPES = {
    "embed": (50, 30),
    "layer.bias": (17,),
    "layer.running_mean": (9,),
    "layer.weight": (70, 65),
    "scale": (),
}
KEYS = ChainKeys("runs/one", "1")
START = ChainStart(run="runs/one", job="job", step=0, root="r", state="")
NOW = datetime.now(UTC)
QUICK = GatherSettings(poll_interval=timedelta(milliseconds=10), quorum=0)


def weights() -> WeightState:
    return copy_state({name: drawn(shape, 50) for name, shape in SHAPES.items()})


def whole(change: torch.Tensor, codec: Codec) -> list[MergedChunks]:
    """Return the weights that one worker alone trains."""
    shape = tuple(change.shape)
    values = forward(change, codec.transform).numpy().reshape(-1)
    return [
        MergedChunks(
            run.chunks,
            np.full(run.chunks.count, run.chunks.k, np.uint16),
            run.indices.ravel(),
            decode_values(run, codec).ravel(),
        )
        for run in select_values(values, shape, codec)
    ]


class Run:
    """A run with three workers, whose windows are aggregated one after another."""

    def __init__(
        self, store: Store, codec: Codec, outer: OuterOptimizer, state: WeightState
    ) -> None:
        self.store, self.codec, self.outer, self.state = store, codec, outer, state
        self.before: ChainStart | ChainLink = commit_first_link(store, KEYS, START)
        self.rule = MergeSettings(rule=MergeRule.MEAN)
        self.workers = 3

    def merge_window(self, number: int, workers: int | None = None) -> ChainLink:
        keys, mask = GradientKeys(KEYS.run, KEYS.version), Mask(KEYS.run, number)
        workers = self.workers if workers is None else workers
        for uid in range(workers):
            bodies = {
                name: GradientEncoder(self.codec.select_for_tensor(name), 1).encode(
                    drawn(shape, 10 * number + uid), mask
                )
                for name, shape in SHAPES.items()
            }
            said = {"run": KEYS.run, "uid": str(uid), "window": number, "base": number - 1}
            said["tokens"] = 7 * uid
            body = encode_gradient(bodies, SHAPES, self.codec, **said)  # pyright: ignore[reportArgumentType]
            put(self.store, keys.make_gradient_key(str(uid), number), body)
        window = GatherWindow(
            keys=keys,
            number=number,
            base=number - 1,
            codec=self.codec,
            shapes=SHAPES,
            opens=NOW - timedelta(hours=1),
            closes=datetime.now(UTC) + timedelta(hours=1 if workers else 0),
        )
        everybody = [Sender(str(uid), self.store) for uid in range(self.workers)]
        found = gather(window, everybody, QUICK)
        step = ChainStep(self.before, number, self.outer, self.rule)
        self.before = merge_window(self.store, window, found, step, self.state)
        return self.before


@pytest.fixture
def store(tmp_path) -> Store:
    return open_store(tmp_path.as_uri())


def run_of(store: Store, *, transform: Transform = Transform.NONE, kind: str = "sgd") -> Run:
    outer = OuterOptimizer(kind=OuterKind(kind), lr=0.5)
    return Run(store, Codec(transform=transform, k=256), outer, weights())


@pytest.mark.parametrize("transform", Transform)
@pytest.mark.parametrize("kind", OuterKind)
def test_whoever_comes_late_has_the_same_weights(store, transform, kind):
    assert_late_ones_agree(run_of(store, transform=transform, kind=kind))


def assert_late_ones_agree(run: Run) -> None:
    """Merge some windows, and catch up with them."""
    for number in (1, 2, 3):
        run.merge_window(number)
    late = weights()
    last = catch_up(run.store, KEYS, late)
    assert last == run.before
    assert late.digest() == run.state.digest() == run.before.state
    assert find_newest_window(run.store, KEYS) == 3
    assert [link.window for link in iterate_links(run.store, KEYS, after=1)] == [2, 3]


def test_a_late_one_can_begin_in_the_middle(store):
    run = run_of(store, kind="nesterov")
    run.merge_window(1)
    middle = WeightState(
        {name: tensor.copy() for name, tensor in run.state.weights.items()},
        {name: tensor.copy() for name, tensor in run.state.moments.items()},
    )
    run.merge_window(2)
    run.merge_window(3)
    catch_up(store, KEYS, middle, after=1)
    assert middle.digest() == run.state.digest()


def test_the_outer_step_is_that_of_torch():
    codec, shape = Codec(k=4096, bits=8), (40, 30)
    changes = [drawn(shape, seed) for seed in range(3)]
    for kind in (OuterKind.SGD, OuterKind.NESTEROV):
        weight = torch.nn.Parameter(drawn(shape, 9))
        state = copy_state({"w": weight})
        nesterov = kind is OuterKind.NESTEROV
        momentum = 0.9 if nesterov else 0.0
        optimizer = torch.optim.SGD([weight], lr=0.5, momentum=momentum, nesterov=nesterov)
        for change in changes:
            merged = whole(change, codec)
            weight.grad = torch.from_numpy(make_dense(merged, shape)).view(shape)
            optimizer.step()
            state.step_tensor("w", merged, codec, OuterOptimizer(kind=kind, lr=0.5, momentum=0.9))
        torch.testing.assert_close(torch.from_numpy(state.weights["w"]), weight.detach())


@pytest.mark.parametrize("shape", [(70, 65), (131, 64), (17,), (3, 50, 20)])
def test_the_inverse_in_one_order_is_the_inverse(shape):
    codec = Codec(transform=Transform.DCT, k=4096, bits=16)
    merged = whole(drawn(shape), codec)
    wanted = backward(torch.from_numpy(make_dense(merged, shape)), shape, Transform.DCT)
    torch.testing.assert_close(torch.from_numpy(compute_dense_change(merged, shape, codec)), wanted)


def test_a_window_with_nobody_is_a_link_too(store):
    run = run_of(store)
    run.merge_window(1)
    before = run.state.digest()
    link = run.merge_window(2, workers=0)
    assert (link.updates, link.taken, link.state) == ((), {}, before)
    assert set(link.excluded) == {"0", "1", "2"}
    run.merge_window(3)
    late = weights()
    catch_up(store, KEYS, late)
    assert late.digest() == run.state.digest()


def test_a_window_is_merged_once_though_two_try(store):
    run = run_of(store)
    again = Run(store, run.codec, run.outer, weights())
    first = run.merge_window(1)
    assert again.merge_window(1) == first  # the same gradients: the same link
    other = Run(store, run.codec, run.outer, weights())
    run.merge_window(2)
    catch_up(store, KEYS, other.state)
    late = Run(store, run.codec, OuterOptimizer(kind=OuterKind.SGD, lr=0.1), weights())
    with pytest.raises(errors.ConflictError, match="merged window 1 of runs/one differently"):
        late.merge_window(1)
    assert [link.window for link in iterate_links(store, KEYS)] == [1, 2]


def test_weights_that_are_not_those_of_the_link_before_are_not_merged_into(store):
    run = run_of(store)
    run.merge_window(1)
    run.state.weights["scale"] += np.float32(1)
    with pytest.raises(ChainError, match="After window 1 of runs/one the weights do not match"):
        run.merge_window(2)
    assert find_newest_window(store, KEYS) == 1


def test_a_reason_is_told_by_its_name_and_keeps_its_stored_form():
    told = {reason: reason.label for reason in ExclusionReason if reason.value != reason.label}
    assert told == {ExclusionReason.INDICES: "indices"}
    excluded = ExcludedWorker(reason=ExclusionReason.INDICES, sentence="Others sent others.")
    stored = excluded.model_dump_json()
    assert stored == '{"reason":"places","sentence":"Others sent others."}'
    assert ExcludedWorker.model_validate_json(stored) == excluded
    assert count_reasons([excluded]) == "1 indices"


def test_too_few_for_the_rule_is_a_window_that_changes_nothing(store):
    run = run_of(store)
    run.rule = MergeSettings(rule=MergeRule.MULTI_KRUM, faulty=1)
    link = run.merge_window(1)
    assert (link.updates, link.taken, link.state) == ((), {}, weights().digest())
    assert {one.reason for one in link.excluded.values()} == {ExclusionReason.QUORUM}
    assert (
        "multi-krum bears 1 Byzantine workers (`faulty`) among at least 5"
        in link.excluded["0"].sentence
    )


def test_who_sends_other_places_is_out_where_the_rule_needs_the_same_of_all(store):
    run = Run(store, Codec(k=4096, bits=8), OuterOptimizer(), weights())
    run.rule = MergeSettings(rule=MergeRule.MEDIAN)
    assert set(run.merge_window(1).taken) == {"0", "1", "2"}  # all send all places
    other = Run(open_store(f"{store.url}/other"), Codec(k=64), OuterOptimizer(), weights())
    other.rule = run.rule
    link = other.merge_window(1)
    assert len(link.taken) == 1
    assert [one.reason for one in link.excluded.values()] == [ExclusionReason.INDICES] * 2


def test_another_beginning_is_refused(store):
    run_of(store)
    with pytest.raises(errors.ConflictError, match="begins with step 0 of job"):
        commit_first_link(store, KEYS, START.model_copy(update={"step": 5}))


def test_killed_between_the_update_and_its_link_it_goes_on(store):
    run = run_of(store)
    run.merge_window(1)
    delete(store, [KEYS.make_link_key(1)])  # as if it had died right before
    again = Run(store, run.codec, run.outer, weights())
    link = again.merge_window(1)
    assert link.state == run.before.state
    assert link.updates == fetch(store, KEYS.make_link_key(1), ChainLink).updates
    beside = (stat.key for stat in list_objects(store, KEYS.prefix))
    updates = [key for key in beside if "/" not in key.removeprefix(KEYS.prefix)]
    assert updates == [update.key for update in link.updates]


def test_weights_are_changed_only_after_a_save_has_read_them(store, monkeypatch):
    link = run_of(store).merge_window(1)
    is_awaited = threading.Event()
    wait_for_state, run = PendingSave.wait_for_state, BytesCopy.run

    def wait(save: PendingSave) -> None:
        is_awaited.set()
        wait_for_state(save)

    def run_late(copy: BytesCopy) -> None:
        assert is_awaited.wait(60)
        run(copy)

    monkeypatch.setattr(PendingSave, "wait_for_state", wait)
    monkeypatch.setattr(BytesCopy, "run", run_late)
    changed = make_single_shard(weights(), threads=1)
    changed.save(store, "job", step=5, window=0)
    changed.apply_link(store, link)
    assert changed.wait_for_save() is not None
    changed.close()
    assert changed.digest() == link.state
    assert copy_state(load(store, "job").state["weights"]).digest() == weights().digest()


# -- what is broken


@pytest.fixture
def broken(store) -> Run:
    run = run_of(store)
    for number in (1, 2, 3):
        run.merge_window(number)
    return run


def refused(run: Run, sentence: str) -> WeightState:
    late = weights()
    with pytest.raises(ChainError, match=sentence):
        catch_up(run.store, KEYS, late)
    return late


def test_a_missing_link_is_an_error_with_its_number(broken):
    delete(broken.store, [KEYS.make_link_key(2)])
    late = refused(broken, "Window 2 of runs/one is missing")
    assert late.digest() == fetch(broken.store, KEYS.make_link_key(1), ChainLink).state


def test_a_link_of_another_window_is_an_error(broken):
    delete(broken.store, [KEYS.make_link_key(2)])
    copy(broken.store, KEYS.make_link_key(3), KEYS.make_link_key(2))
    refused(broken, "Window 2 of runs/one does not follow the previous one")


def test_a_link_that_is_no_record_is_an_error(broken):
    put(broken.store, KEYS.make_link_key(2), b"{}")
    refused(broken, "Window 2 of runs/one: .* is not a record")


def test_a_link_of_an_earlier_version_is_refused_with_a_sentence(broken):
    envelope = json.loads(read(broken.store, KEYS.make_link_key(2))) | {"version": 3}
    put(broken.store, KEYS.make_link_key(2), json.dumps(envelope).encode())
    refused(
        broken,
        "Window 2 of runs/one: .* holds a chain-link of version 3. This Millrace reads version 7",
    )


def test_a_link_is_applied_wholly_or_not_at_all(store):
    run = run_of(store)
    run.rule = MergeSettings(rule=MergeRule.MEAN, weights_per_object=2000)
    link = run.merge_window(1)
    assert len(link.updates) > 1
    key = link.updates[-1].key
    body = read(store, key)
    delete(store, [key])
    late = weights()
    with pytest.raises(ChainError, match=r"\.safetensors is missing"):
        catch_up(store, KEYS, late)
    assert late.digest() == weights().digest()
    put(store, key, body)
    catch_up(store, KEYS, late)
    assert late.digest() == link.state


def test_a_missing_update_is_an_error(broken):
    delete(broken.store, [fetch(broken.store, KEYS.make_link_key(3), ChainLink).updates[0].key])
    refused(broken, r"Window 3 of runs/one: .*\.safetensors is missing")


@pytest.mark.parametrize("key", ["", "/", "a//b", "../../x", "a\x01"])
def test_an_update_whose_name_is_no_key_is_an_error_that_names_the_run(broken, key):
    link = fetch(broken.store, KEYS.make_link_key(3), ChainLink)
    update = link.updates[0].model_copy(update={"key": key})
    forged = link.model_copy(update={"updates": (update, *link.updates[1:])})
    put(broken.store, KEYS.make_link_key(3), encode_record(forged, "nonce"))
    refused(broken, "Window 3 of runs/one names an update .* which cannot be a key")


def test_a_changed_update_is_an_error(broken):
    key = fetch(broken.store, KEYS.make_link_key(2), ChainLink).updates[0].key
    body = bytearray(read(broken.store, key))
    body[len(body) // 2] ^= 1
    put(broken.store, key, bytes(body))
    refused(broken, "Window 2 of runs/one: .* has other bytes than were committed")


@pytest.mark.parametrize("body", [b"no zip", b"PK\x05\x06" + bytes(18)])
def test_an_update_that_is_none_is_an_error_though_its_digest_is_right(broken, body):
    link = broken.before
    assert isinstance(link, ChainLink)
    update = store_update(broken.store, KEYS, 4, body, len(link.names))
    with pytest.raises(ChainError, match="is not an update"):
        list(iterate_updates(broken.store, link.model_copy(update={"updates": (update,)})))


def test_an_update_that_is_larger_than_its_tensors_is_not_read(broken):
    link = broken.before
    assert isinstance(link, ChainLink)
    update = link.updates[0].model_copy(update={"size": 5 << 30})
    changed = link.model_copy(update={"updates": (update,)})
    with pytest.raises(ChainError, match=r"5,368,709,120 bytes according.*was not read"):
        list(iterate_updates(broken.store, changed))


def test_a_link_of_other_tensors_is_refused_before_its_updates_are_read(broken):
    names = (*broken.before.names[:-1], "other")
    shapes = (*broken.before.shapes[:-1], (10**6, 10**6))
    for change in ({"names": names}, {"shapes": shapes}, {"shapes": shapes[:-1]}):
        with pytest.raises(ChainError, match="has other tensors than the weights"):
            apply_link(broken.store, broken.before.model_copy(update=change), weights())


def test_what_stands_beside_the_links_is_no_window(store):
    run = run_of(store)
    run.merge_window(1)
    arabic = "\u0660" * 8 + "\u0669"
    beside = ("7.json", "000000008x.json", f"{arabic}.json", "0000000000009.json", "000000009/a")
    for name in beside:
        put(store, f"{KEYS.links}{name}", b"{}")
    assert find_newest_window(store, KEYS) == 1


def test_other_weights_than_the_aggregators_are_noticed(broken):
    late = weights()
    late.weights["scale"] += np.float32(1)
    with pytest.raises(ChainError, match=r"After window 1 .* the weights do not match the digest"):
        catch_up(broken.store, KEYS, late)


def test_a_run_that_has_not_begun_says_so(store):
    with pytest.raises(errors.NotFoundError, match="has not begun"):
        catch_up(store, KEYS, weights())
