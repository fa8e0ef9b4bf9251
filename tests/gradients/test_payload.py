"""A gradient as an object: what is expected, or refused with a reason; never believed."""

import io
import math
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import orjson
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from millrace.gradients import (
    Codec,
    Encoder,
    Expected,
    GradientHeader,
    PayloadError,
    Refusal,
    check_payload,
    decode,
    payload_bytes,
    read_payload,
)
from millrace.gradients.payload import fingerprint
from millrace.gradients.tensors import largest
from millrace.keys import GradientKeys
from millrace.storage import Stat, Store, StoreSpec, delete, head, open_store, put
from tests.gradients.test_codec import drawn

SHAPES = {"embed": (50, 30), "layer.bias": (17,), "layer.weight": (64, 64), "scale": ()}
CODEC = Codec()
KEYS = GradientKeys("runs/one", "1")
EXPECTED = Expected(run="runs/one", uid="7", window=3, base=120, codec=CODEC, shapes=SHAPES)


def bodies(codec: Codec = CODEC, seed: int = 0) -> dict[str, bytes]:
    encoder = Encoder(codec, 1)
    return {name: encoder.encode(drawn(shape, seed)) for name, shape in SHAPES.items()}


def made(**changes: object) -> bytes:
    said: dict[str, object] = {"run": "runs/one", "uid": "7", "window": 3, "base": 120}
    parts = {"bodies": bodies(), "shapes": SHAPES, "codec": CODEC, **said, **changes}
    return payload_bytes(**parts)  # pyright: ignore[reportArgumentType]


def reason_of(body: bytes, expected: Expected = EXPECTED) -> Refusal:
    with pytest.raises(PayloadError) as caught:
        check_payload(body, expected)
    assert str(caught.value).endswith(".")
    return caught.value.reason


def test_what_is_expected_is_taken():
    body = made(tokens=4096, samples="abc")
    assert body == made(tokens=4096, samples="abc")
    found = check_payload(body, EXPECTED)
    assert (found.header.tokens, found.header.samples) == (4096, "abc")
    whole = [decode(bodies()[name], shape, CODEC) for name, shape in SHAPES.items()]
    assert found.norm == pytest.approx(torch.cat([one.flatten() for one in whole]).norm().item())
    assert len(body) <= EXPECTED.size


def test_any_reader_of_safetensors_reads_it(tmp_path):
    (tmp_path / "one").write_bytes(made())
    with safe_open(tmp_path / "one", "pt") as file:
        assert set(file.keys()) == set(SHAPES)
        assert bytes(file.get_tensor("scale").numpy()) == bodies()["scale"]
        header = GradientHeader.model_validate_json(file.metadata()["millrace"])
    assert header.shapes == tuple(SHAPES[name] for name in sorted(SHAPES))


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        (Refusal.RUN, {"run": "runs/two"}),
        (Refusal.UID, {"uid": "8"}),
        (Refusal.WINDOW, {"window": 2}),
        (Refusal.BASE, {"base": 90}),
        (Refusal.CODEC, {"codec": Codec(k=32), "bodies": bodies(Codec(k=32))}),
        (Refusal.MODEL, {"shapes": {**SHAPES, "scale": (1,)}}),
        (Refusal.MODEL, {"shapes": {"scale": ()}, "bodies": {"scale": bodies()["scale"]}}),
        (Refusal.CODES, {"bodies": {**bodies(), "scale": b"\0" * 9}}),
        (Refusal.CODES, {"bodies": {**bodies(), "embed": bodies()["layer.weight"]}}),
    ],
)
def test_what_is_another_is_refused_with_a_reason(reason, changes):
    assert reason_of(made(**changes)) is reason


def test_a_norm_that_is_too_large_is_refused():
    norm = check_payload(made(), EXPECTED).norm
    check_payload(made(), replace(EXPECTED, norm=norm * 1.001))
    assert reason_of(made(), replace(EXPECTED, norm=norm * 0.999)) is Refusal.NORM
    huge = Encoder(CODEC, 1).encode(torch.full((17,), 3e38))  # whose sums would not be finite
    assert reason_of(made(bodies={**bodies(), "layer.bias": huge})) is Refusal.NORM


def changed(change: Callable[[dict[str, object]], None]) -> bytes:
    """A payload whose header says something else."""
    body = made()
    length = int.from_bytes(body[:8], "little")
    described = orjson.loads(body[8 : 8 + length])
    change(described)
    text = orjson.dumps(described)
    return len(text).to_bytes(8, "little") + text + body[8 + length :]


def with_tokens(said: dict[str, dict[str, str]], tokens: int) -> None:
    metadata = said["__metadata__"]
    metadata["millrace"] = metadata["millrace"].replace('"tokens":0', f'"tokens":{tokens}')


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        (Refusal.FORMAT, lambda said: said.pop("__metadata__")),
        (Refusal.FORMAT, lambda said: said.pop("scale")),
        (Refusal.FORMAT, lambda said: said["scale"].update(dtype="F32")),
        (Refusal.FORMAT, lambda said: said["scale"].update(data_offsets=[0, -1])),
        (Refusal.FORMAT, lambda said: said["scale"].update(data_offsets="ab")),
        (Refusal.FORMAT, lambda said: said.update(scale=[])),
        (Refusal.HEADER, lambda said: said["__metadata__"].update(millrace="{}")),
        (Refusal.HEADER, lambda said: said["__metadata__"].update(millrace=[1])),
        (Refusal.HEADER, lambda said: with_tokens(said, 1 << 64)),
        (Refusal.HEADER, lambda said: with_tokens(said, -1)),
        (Refusal.FORMAT, lambda said: said["__metadata__"].update(padding="x" * 100_000)),
        (Refusal.TENSORS, lambda said: said.update(other=said.pop("scale"))),
    ],
)
def test_a_header_that_does_not_fit_is_refused(reason, change):
    assert reason_of(changed(change)) is reason


@pytest.mark.parametrize(
    "body", [b"", b"\0" * 7, b"\xff" * 8, b"\0" * 8, b"\1\0\0\0\0\0\0\0{", b"\2\0\0\0\0\0\0\0[]"]
)
def test_what_is_no_file_is_refused(body):
    assert reason_of(body) is Refusal.FORMAT


def test_a_pickle_is_refused_and_not_run(tmp_path):
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (open, (str(tmp_path / "ran"), "w"))

    file = io.BytesIO()
    torch.save({"w": torch.ones(1)}, file)
    assert reason_of(file.getvalue()) is Refusal.FORMAT
    assert reason_of(pickle.dumps(Bomb())) is Refusal.FORMAT
    assert not (tmp_path / "ran").exists()


# -- in a store


@pytest.fixture
def store(tmp_path) -> Store:
    spec = StoreSpec(url=tmp_path.as_uri(), patience=timedelta(seconds=0.1))
    return open_store(spec)


def stored(store: Store, body: bytes) -> Stat:
    key = KEYS.gradient("7", 3)
    put(store, key, body)
    return head(store, key)


def test_what_is_too_large_is_not_read(store):
    stat = stored(store, made() + b"\0" * EXPECTED.size)
    delete(store, [stat.key])  # to read it would be another reason
    with pytest.raises(PayloadError) as caught:
        read_payload(store, stat, EXPECTED)
    assert caught.value.reason is Refusal.TOO_LARGE


def test_what_was_replaced_since_it_was_listed_is_refused(store):
    stat = stored(store, made())
    assert read_payload(store, stat, EXPECTED).header.uid == "7"
    put(store, stat.key, made(tokens=1))
    with pytest.raises(PayloadError) as caught:
        read_payload(store, stat, EXPECTED)
    assert caught.value.reason is Refusal.CHANGED


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
@pytest.mark.parametrize("k", [1, 64, 1000, 4096])
def test_nothing_is_larger_than_the_most_it_can_be(bits, k):
    codec = Codec(k=k, bits=bits)
    for shape in ((), (5,), (300, 41), (4096,)):
        ends = torch.zeros(shape).flatten()
        ends[-k:] = 1.0  # the longest distances
        for tensor in (drawn(shape), ends.view(shape)):
            assert len(Encoder(codec, 1).encode(tensor)) <= largest(shape, codec)


def test_the_fingerprint_tells_models_apart():
    assert fingerprint({"a": (2, 3), "b": ()}) == fingerprint({"b": (), "a": (2, 3)})
    assert fingerprint({"a": (2, 3)}) != fingerprint({"a": (3, 2)})


# -- whatever stands there: refused or right, and one good peer before and after


def good() -> None:
    assert check_payload(made(), EXPECTED).header.uid == "7"


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_changed_bytes_are_refused_or_right(data):
    body = bytearray(made())
    kind = data.draw(st.sampled_from(["header", "body", "anywhere", "cut", "longer"]))
    length = 8 + int.from_bytes(body[:8], "little")
    span = {"header": (0, length), "body": (length, len(body))}.get(kind, (0, len(body)))
    good()
    for _ in range(data.draw(st.integers(1, 5))):
        body[data.draw(st.integers(span[0], span[1] - 1))] = data.draw(st.integers(0, 255))
    if kind == "cut":
        del body[data.draw(st.integers(0, len(body))) :]
    if kind == "longer":
        body += data.draw(st.binary(max_size=50))
    with suppress(PayloadError):
        found = check_payload(bytes(body), EXPECTED)
        # Only what no digest covers can have changed: the padding, the tokens, the samples.
        assert found.header.model_copy(update={"tokens": 0, "samples": ""}) == (
            check_payload(made(), EXPECTED).header
        )
    good()


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(sorted(SHAPES)), data=st.data())
def test_changed_codes_under_a_right_digest_are_refused_or_right(name, data):
    changed = bytearray(bodies()[name])
    for _ in range(data.draw(st.integers(1, 5))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    with suppress(PayloadError):
        found = check_payload(made(bodies={**bodies(), name: bytes(changed)}), EXPECTED)
        assert math.isfinite(found.norm)
        for run in found.tensors[name]:
            assert run.places.max() < run.chunks.size
