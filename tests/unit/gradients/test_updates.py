"""Updates: no larger than the gradients, merged to the same weights, and refused if not right."""

import random
import tracemalloc
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load as load_safetensors

from millrace.gradients import (
    ChainError,
    ChainLink,
    Codec,
    CodeError,
    Mask,
    MergeRule,
    MergeSettings,
    OuterKind,
    OuterOptimizer,
    Support,
    Transform,
)
from millrace.gradients.codec.byte_tensors import PARSE_ERRORS, encode_byte_tensors
from millrace.gradients.merging.links import (
    apply_link,
    iterate_updates,
    make_merge_request,
    store_update,
)
from millrace.gradients.merging.updates import compute_largest_update, parse_update
from millrace.keys.gradients import GradientKeys
from millrace.storage import Store, open_store, read
from tests.unit.gradients.test_chain import (
    KEYS,
    SHAPES,
    Run,
    assert_late_ones_agree,
    weights,
)

WEIGHT, MEAN = "layer.weight", "layer.running_mean"
DENSE = Codec(k=4096, bits=16)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path.as_uri())


def run_of(
    store: Store,
    codec: Codec,
    rule: MergeRule = MergeRule.MEAN,
    kind: OuterKind = OuterKind.SGD,
) -> Run:
    run = Run(store, codec, OuterOptimizer(kind=kind, lr=0.5), weights())
    run.rule, run.workers = MergeSettings(rule=rule, faulty=1), 6
    return run


def tensors_of(store: Store, link: ChainLink) -> dict[str, bytes]:
    """The tensors of a link's updates, by another reader."""
    parts = [load_safetensors(read(store, update.key)) for update in link.updates]
    return {name: body.tobytes() for part in parts for name, body in part.items()}


def gradient(store: Store, uid: int, window: int) -> dict[str, bytes]:
    key = GradientKeys(KEYS.run, KEYS.version).make_gradient_key(str(uid), window)
    return {name: body.tobytes() for name, body in load_safetensors(read(store, key)).items()}


SHARED = Codec(k=256, support=Support.SHARED)
CASES = [
    *((rule, Codec(k=64)) for rule in MergeRule if rule not in {"median", "trimmed mean"}),
    (MergeRule.CENTERED_CLIP, Codec(k=64, transform=Transform.DCT)),
    (MergeRule.MULTI_KRUM, Codec(k=64, bits=8)),
    *((rule, SHARED) for rule in MergeRule),
    *((rule, DENSE) for rule in MergeRule),
]


@pytest.mark.parametrize(("rule", "codec"), CASES)
def test_an_update_is_no_larger_than_the_gradients_and_gives_the_same_weights(store, rule, codec):
    run = run_of(store, codec, rule, OuterKind.NESTEROV)
    assert_late_ones_agree(run)
    link = run.before
    assert isinstance(link, ChainLink)
    assert len(link.taken) == 6
    assert link.merge == run.rule
    assert link.size <= sum(one.size for one in link.taken.values())


def test_an_update_has_the_bytes_that_the_workers_sent(store):
    run = run_of(store, Codec(k=64))
    link = run.merge_window(1)
    stored, sent = tensors_of(store, link), [gradient(store, uid, 1) for uid in range(6)]
    assert set(stored) == set(SHAPES)
    for name in set(SHAPES) - {MEAN}:  # also a bias, whose merged values are shorter
        assert stored[name] == b"\x00" + b"".join(one[name] for one in sent)
    # Six workers send 24 bytes of each value of a buffer; merged, the value needs six and a count.
    assert len(stored[MEAN]) == 1 + 2 + 6 * 9
    assert stored[MEAN][:1] == b"\x01"


def test_merged_values_are_stored_where_they_are_shorter(store):
    link = run_of(store, DENSE).merge_window(1)
    assert {body[:1] for body in tensors_of(store, link).values()} == {b"\x01"}


def test_a_worker_that_the_rule_leaves_out_is_not_in_the_update(store):
    link = run_of(store, Codec(k=64), MergeRule.MULTI_KRUM).merge_window(1)
    used = [int(uid) for uid, one in link.taken.items() if one.share]
    assert len(used) == 5
    sent = [gradient(store, uid, 1)[WEIGHT] for uid in used]
    assert tensors_of(store, link)[WEIGHT] == b"\x00" + b"".join(sent)


# -- updates with other bytes, under their right digest


def forged(store: Store, link: ChainLink, tensors: dict[str, bytes]) -> ChainLink:
    body = encode_byte_tensors(tensors)
    update = store_update(store, KEYS, 9, body, len(link.names))
    return link.model_copy(update={"updates": (update,)})


RICE = b"\x00\x00" + b"\xff" * 4  # the form, the parameter, and one length of 4 GiB


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "a tensor has an unknown form"),
        (b"\x02", "a tensor has an unknown form"),
        (b"\x00", "It ends too early"),
        (RICE, "It ends too early"),
        (b"\x00\x00" + bytes(4), "Its indices end too early"),
        (b"\x01", "its values do not fit the tensors"),
        (b"\x01" + bytes(4), "its values do not fit the tensors"),
        (b"\x01\x01\x00", "its values do not fit the tensors"),
        (b"\x01\x00\x00" + bytes(6), "its values do not fit the tensors"),
        (b"\x01\x01\x00\x11\x00" + bytes(4), "an index is beyond its chunk"),
        (b"\x01\x02\x00" + bytes(12), "an index is beyond its chunk or repeated"),
        (b"\x01\x01\x00\x00\x00\x00\x00\x80\x7f", "an index .*, or a value is not finite"),
    ],
)
def test_a_tensor_of_another_form_is_refused(store, body, sentence):
    link = run_of(store, Codec(k=64)).merge_window(1)
    changed = forged(store, link, tensors_of(store, link) | {"layer.bias": body})
    late = weights()
    with pytest.raises(ChainError, match=f"Window 1 of runs/one: .* is not an update: {sentence}"):
        apply_link(store, changed, late)
    assert late.digest() == weights().digest()


def test_fewer_or_more_gradients_than_the_link_names_are_refused(store):
    link = run_of(store, Codec(k=64)).merge_window(1)
    tensors = tensors_of(store, link)
    for body in (tensors[WEIGHT][:-3], tensors[WEIGHT] + gradient(store, 0, 1)[WEIGHT]):
        changed = forged(store, link, tensors | {WEIGHT: body})
        with pytest.raises(ChainError, match=r"is not an update: .*(too early|left over)"):
            list(iterate_updates(store, changed))
    less = link.model_copy(update={"taken": dict(list(link.taken.items())[1:])})
    with pytest.raises(ChainError, match=r"is not an update: .*left over"):
        list(iterate_updates(store, less))
    nobody = link.model_copy(update={"taken": {}})
    with pytest.raises(ChainError, match="has fewer workers than its rule needs"):
        list(iterate_updates(store, nobody))


def test_other_tensors_than_those_of_the_link_are_refused(store):
    link = run_of(store, Codec(k=64)).merge_window(1)
    tensors = tensors_of(store, link)
    tensors["other"] = tensors.pop("embed")
    with pytest.raises(ChainError, match="is not an update: it has other tensors than its link"):
        list(iterate_updates(store, forged(store, link, tensors)))


def test_different_indices_are_refused_where_the_rule_needs_the_same(store):
    link = run_of(store, Codec(k=64)).merge_window(1)
    changed = link.model_copy(update={"merge": MergeSettings(rule=MergeRule.MEDIAN)})
    with pytest.raises(ChainError, match="is not an update: its workers sent different indices"):
        list(iterate_updates(store, changed))


def test_factors_of_workers_are_limited(store):
    link = run_of(store, Codec(k=64)).merge_window(1)
    for name in ("scale", "sum_factor", "share"):
        changed = link.model_dump(mode="json")
        changed["taken"]["0"][name] = 1e30
        with pytest.raises(ValueError, match="less than or equal to"):
            ChainLink.model_validate(changed)


def test_a_short_update_takes_no_memory_for_the_values_that_it_claims(store):
    shapes = {"w": (1 << 28,)}
    run = run_of(store, Codec())
    request = make_merge_request(run.merge_window(1))
    blocks = -(-(1 << 28) // 4096) // 256
    many = encode_byte_tensors({"w": b"\x00\x00" + bytes(4 * blocks)})
    none = encode_byte_tensors({"w": b"\x01" + bytes(100)})
    tracemalloc.start()
    for body in (many, none):
        with pytest.raises((CodeError, ValueError), match=r"too early|do not fit"):
            parse_update(body, shapes, request, Mask("r", 1), names=["w"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


# -- any bytes


class Fuzzed:
    """An update whose bytes are changed, and what becomes of them: for `tests.soak.fuzz`, too."""

    def __init__(self) -> None:
        self._store = open_store("memory://fuzzed-updates")
        self._link = run_of(self._store, Codec(k=64)).merge_window(1)
        self.tensors = tensors_of(self._store, self._link)
        self.body = read(self._store, self._link.updates[0].key)
        self._request = make_merge_request(self._link)
        self._most = compute_largest_update(SHAPES, Codec(k=64), 6)
        assert len(self.body) <= self._most

    def check(self, body: bytes) -> bool:
        """Return whether bytes are an update. If so, they must merge into finite values."""
        with suppress(CodeError, *PARSE_ERRORS):
            found = parse_update(
                body, SHAPES, self._request, Mask(KEYS.run, 1), names=sorted(SHAPES)
            )
            for name, stored in found.items():
                for group in stored.merge(name, self._request):
                    assert len(group.counts) == group.chunks.count
                    assert (group.indices < group.chunks.size).all()
                    assert not np.isnan(group.values).any()
            return True
        return False


def test_changed_bytes_are_refused_or_merged():
    fuzzed, dice = Fuzzed(), random.Random(5)
    assert fuzzed.check(fuzzed.body)
    verdicts: list[bool] = []
    for _ in range(150):
        body = bytearray(fuzzed.body)
        at = dice.randrange(len(body))
        body[at : at + 1] = dice.randbytes(dice.choice([1, 1, 1, 2, 0]))
        verdicts.append(fuzzed.check(bytes(body)))
        name = dice.choice(sorted(SHAPES))
        piece = bytearray(fuzzed.tensors[name])
        piece[dice.randrange(len(piece))] ^= 1 << dice.randrange(8)
        verdicts.append(fuzzed.check(encode_byte_tensors({**fuzzed.tensors, name: bytes(piece)})))
    assert set(verdicts) == {True, False}
