"""A gradient as an object: what is expected, or refused with a reason; never believed."""

import io
import math
import pickle
import re
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import orjson
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from millrace.errors import CorruptError, DeniedError, MillraceError, UnavailableError
from millrace.gradients import (
    CheckedGradient,
    Codec,
    ExclusionReason,
    ExpectedGradient,
    GradientEncoder,
    GradientError,
    GradientHeader,
    check_gradient,
    decode,
    encode_gradient,
    read_gradient,
)
from millrace.gradients.codec import gradient_object
from millrace.gradients.codec.gradient_object import compute_fingerprint
from millrace.gradients.codec.tensors import compute_largest_size
from millrace.keys.gradients import GradientKeys
from millrace.storage import Stat, Store, StoreSpec, delete, head, open_store, put
from millrace.torchfile import FormatError, read_texts_and_tensors
from tests.support.examples import scale_examples
from tests.unit.gradients.test_codec import drawn

SHAPES = {"embed": (50, 30), "layer.bias": (17,), "layer.weight": (64, 64), "scale": ()}
CODEC = Codec()
KEYS = GradientKeys("runs/one", "1")
EXPECTED = ExpectedGradient(run="runs/one", uid="7", window=3, base=120, codec=CODEC, shapes=SHAPES)


def bodies(codec: Codec = CODEC, seed: int = 0) -> dict[str, bytes]:
    encoder = GradientEncoder(codec, 1)
    return {name: encoder.encode(drawn(shape, seed)) for name, shape in SHAPES.items()}


def made(**changes: object) -> bytes:
    said: dict[str, object] = {"run": "runs/one", "uid": "7", "window": 3, "base": 120}
    parts = {"bodies": bodies(), "shapes": SHAPES, "codec": CODEC, **said, **changes}
    return encode_gradient(**parts)  # pyright: ignore[reportArgumentType]


def reason_of(body: bytes, expected: ExpectedGradient = EXPECTED) -> ExclusionReason:
    with pytest.raises(GradientError) as caught:
        check_gradient(body, expected)
    assert str(caught.value).endswith(".")
    return caught.value.reason


def test_what_is_expected_is_taken():
    body = made(tokens=4096, samples="abc")
    assert body == made(tokens=4096, samples="abc")
    found = check_gradient(body, EXPECTED)
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
        (ExclusionReason.RUN, {"run": "runs/two"}),
        (ExclusionReason.UID, {"uid": "8"}),
        (ExclusionReason.WINDOW, {"window": 2}),
        (ExclusionReason.BASE, {"base": 90}),
        (ExclusionReason.CODEC, {"codec": Codec(k=32), "bodies": bodies(Codec(k=32))}),
        (ExclusionReason.MODEL, {"shapes": {**SHAPES, "scale": (1,)}}),
        (ExclusionReason.MODEL, {"shapes": {"scale": ()}, "bodies": {"scale": bodies()["scale"]}}),
        (ExclusionReason.CODES, {"bodies": {**bodies(), "scale": b"\0" * 9}}),
        (ExclusionReason.CODES, {"bodies": {**bodies(), "embed": bodies()["layer.weight"]}}),
    ],
)
def test_what_is_another_is_refused_with_a_reason(reason, changes):
    assert reason_of(made(**changes)) is reason


@pytest.mark.parametrize(
    ("field", "value"), [("tokens", 10**9), ("samples", "others"), ("digest", ""), ("uid", "8")]
)
def test_a_header_of_which_a_field_was_changed_is_refused(field, value):
    def edit(described: dict[str, object]) -> None:
        said = described["__metadata__"]
        assert isinstance(said, dict)
        said["millrace"] = orjson.dumps({**orjson.loads(said["millrace"]), field: value}).decode()

    assert reason_of(changed(edit)) is ExclusionReason.DIGEST


def test_a_norm_that_is_too_large_is_refused():
    norm = check_gradient(made(), EXPECTED).norm
    check_gradient(made(), replace(EXPECTED, max_norm=norm * 1.001))
    assert reason_of(made(), replace(EXPECTED, max_norm=norm * 0.999)) is ExclusionReason.NORM
    huge = GradientEncoder(CODEC, 1).encode(
        torch.full((17,), 3e38)
    )  # whose sums would not be finite
    assert reason_of(made(bodies={**bodies(), "layer.bias": huge})) is ExclusionReason.NORM


def changed(change: Callable[[dict[str, object]], None]) -> bytes:
    """A gradient whose header says something else."""
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
        (ExclusionReason.FORMAT, lambda said: said.pop("__metadata__")),
        (ExclusionReason.FORMAT, lambda said: said.pop("scale")),
        (ExclusionReason.FORMAT, lambda said: said["scale"].update(dtype="F32")),
        (ExclusionReason.FORMAT, lambda said: said["scale"].update(data_offsets=[0, -1])),
        (ExclusionReason.FORMAT, lambda said: said["scale"].update(data_offsets="ab")),
        (ExclusionReason.FORMAT, lambda said: said.update(scale=[])),
        (ExclusionReason.HEADER, lambda said: said["__metadata__"].update(millrace="{}")),
        (ExclusionReason.HEADER, lambda said: said["__metadata__"].update(millrace=[1])),
        (ExclusionReason.HEADER, lambda said: with_tokens(said, 1 << 64)),
        (ExclusionReason.HEADER, lambda said: with_tokens(said, -1)),
        (ExclusionReason.FORMAT, lambda said: said["__metadata__"].update(padding="x" * 100_000)),
        (ExclusionReason.TENSORS, lambda said: said.update(other=said.pop("scale"))),
    ],
)
def test_a_header_that_does_not_fit_is_refused(reason, change):
    assert reason_of(changed(change)) is reason


@pytest.mark.parametrize(
    "body", [b"", b"\0" * 7, b"\xff" * 8, b"\0" * 8, b"\1\0\0\0\0\0\0\0{", b"\2\0\0\0\0\0\0\0[]"]
)
def test_what_is_no_file_is_refused(body):
    assert reason_of(body) is ExclusionReason.FORMAT


def test_a_pickle_is_refused_and_not_run(tmp_path):
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (open, (str(tmp_path / "ran"), "w"))

    file = io.BytesIO()
    torch.save({"w": torch.ones(1)}, file)
    assert reason_of(file.getvalue()) is ExclusionReason.FORMAT
    assert reason_of(pickle.dumps(Bomb())) is ExclusionReason.FORMAT
    assert not (tmp_path / "ran").exists()


# -- in a store


@pytest.fixture
def store(tmp_path) -> Store:
    spec = StoreSpec(url=tmp_path.as_uri(), retry_timeout=timedelta(seconds=0.1))
    return open_store(spec)


def stored(store: Store, body: bytes) -> Stat:
    key = KEYS.make_gradient_key("7", 3)
    put(store, key, body)
    return head(store, key)


def test_what_is_too_large_is_not_read(store):
    stat = stored(store, made() + b"\0" * EXPECTED.size)
    delete(store, [stat.key])  # to read it would be another reason
    with pytest.raises(GradientError) as caught:
        read_gradient(store, stat, EXPECTED)
    assert caught.value.reason is ExclusionReason.TOO_LARGE


def test_what_was_replaced_since_it_was_listed_is_refused(store):
    stat = stored(store, made())
    assert read_gradient(store, stat, EXPECTED).header.uid == "7"
    put(store, stat.key, made(tokens=1))
    with pytest.raises(GradientError) as caught:
        read_gradient(store, stat, EXPECTED)
    assert caught.value.reason is ExclusionReason.CHANGED


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CorruptError("It is archived."), ExclusionReason.FORMAT),
        (MillraceError("Its metadata is not ASCII."), ExclusionReason.FORMAT),
        (DeniedError("The credentials are refused."), ExclusionReason.UNAVAILABLE),
        (UnavailableError("There is no answer."), ExclusionReason.UNAVAILABLE),
    ],
)
def test_an_object_that_nobody_can_read_is_the_fault_of_its_worker(
    store, monkeypatch, error, reason
):
    def fail(*_arguments: object, **_options: object) -> bytes:
        raise error

    stat = stored(store, made())
    monkeypatch.setattr(gradient_object, "read_range", fail)
    with pytest.raises(GradientError) as caught:
        read_gradient(store, stat, EXPECTED)
    assert caught.value.reason is reason
    assert str(error) not in str(caught.value)


@pytest.mark.parametrize("bits", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("k", [1, 64, 1000, 4096])
def test_nothing_is_larger_than_the_most_it_can_be(bits, k):
    codec = Codec(k=k, bits=bits)
    for shape in ((), (5,), (300, 41), (4096,)):
        ends = torch.zeros(shape).flatten()
        ends[-k:] = 1.0  # the longest distances
        for tensor in (drawn(shape), ends.view(shape)):
            assert len(GradientEncoder(codec, 1).encode(tensor)) <= compute_largest_size(
                shape, codec
            )


def test_the_fingerprint_tells_models_apart():
    assert compute_fingerprint({"a": (2, 3), "b": ()}) == compute_fingerprint(
        {"b": (), "a": (2, 3)}
    )
    assert compute_fingerprint({"a": (2, 3)}) != compute_fingerprint({"a": (3, 2)})


# -- whatever stands there: refused or right, and one good peer before and after


def good() -> None:
    assert check_gradient(made(), EXPECTED).header.uid == "7"


@settings(
    max_examples=scale_examples(500), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
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
    with suppress(GradientError):
        found = check_gradient(bytes(body), EXPECTED)
        # Only what no digest covers can have changed: the padding, the tokens, the samples.
        assert found.header.model_copy(update={"tokens": 0, "samples": ""}) == (
            check_gradient(made(), EXPECTED).header
        )
    good()


@settings(max_examples=scale_examples(300), deadline=None)
@given(name=st.sampled_from(sorted(SHAPES)), data=st.data())
def test_changed_codes_under_a_right_digest_are_refused_or_right(name, data):
    changed = bytearray(bodies()[name])
    for _ in range(data.draw(st.integers(1, 5))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    with suppress(GradientError):
        found = check_gradient(made(bodies={**bodies(), name: bytes(changed)}), EXPECTED)
        assert math.isfinite(found.norm)
        for run in found.tensors[name]:
            assert run.indices.max() < run.chunks.size


# -- what torch.save wrote


def as_torch(body: bytes, **more: object) -> bytes:
    """The same gradient as a file of torch's."""
    opened = safetensors.torch.load(body)
    (length,) = struct.unpack_from("<Q", body)
    said = orjson.loads(body[8 : 8 + length])["__metadata__"]["millrace"]
    return torch_file({"millrace": said, **opened, **more})


def torch_file(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def texts_of(body: bytes, head: int = 4096) -> list[str]:
    return list(read_texts_and_tensors(body, most=len(SHAPES), head=head)[0].values())


def from_torch(store: Store, body: bytes) -> CheckedGradient:
    key = KEYS.make_gradient_key("7", 3).replace(".safetensors", ".pt")
    assert KEYS.parse(key) == ("7", 3)
    put(store, key, body)
    return read_gradient(store, head(store, key), EXPECTED)


def torch_refusal(store: Store, body: bytes) -> tuple[ExclusionReason, str]:
    with pytest.raises(GradientError) as caught:
        from_torch(store, body)
    return caught.value.reason, str(caught.value)


def test_a_gradient_may_be_a_file_of_torchs(store):
    whole, found = check_gradient(made(), EXPECTED), from_torch(store, as_torch(made()))
    assert (found.header, found.norm, found.digest) == (whole.header, whole.norm, whole.digest)
    assert found.size > whole.size
    for name, runs in whole.tensors.items():
        for one, other in zip(runs, found.tensors[name], strict=True):
            assert one.codes.tobytes() == other.codes.tobytes()


def test_it_has_the_same_checks(store):
    assert torch_refusal(store, as_torch(made(window=2)))[0] is ExclusionReason.WINDOW
    assert torch_refusal(store, as_torch(made(uid="8")))[0] is ExclusionReason.UID
    more = {"another": torch.zeros(3, dtype=torch.uint8)}
    assert torch_refusal(store, as_torch(made(), **more))[0] is ExclusionReason.FORMAT
    (said,) = texts_of(as_torch(made()))
    renamed = {f"{name}s": torch.tensor([*body]).byte() for name, body in bodies().items()}
    assert (
        torch_refusal(store, torch_file({"millrace": said, **renamed}))[0]
        is ExclusionReason.TENSORS
    )
    other = torch.zeros(len(bodies()["scale"]), dtype=torch.uint8)
    assert torch_refusal(store, as_torch(made(), scale=other))[0] is ExclusionReason.DIGEST
    assert torch_refusal(store, torch_file({"said": "x"}))[0] is ExclusionReason.HEADER


class Evil:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return open, ("/tmp/millrace-was-here", "w")


one_byte = torch.zeros(1, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"millrace": Evil()}, "builds values other than tensors"),
        ({"millrace": bytearray(9)}, "builds values other than tensors"),
        ({"millrace": "x", "a": torch.zeros(3)}, "a storage is not of bytes"),
        ({"millrace": "x", "a": torch.zeros(2, 2, dtype=torch.uint8)}, "not a vector of bytes"),
        ({"millrace": "x", "a": one_byte.expand(1 << 40)}, "not a vector of bytes"),
        ({"millrace": "x", "a": one_byte, "b": one_byte}, "share a storage"),
        ({"millrace": ["x"]}, "has an opcode that no tensor needs"),
        ({1: "x"}, "a name is not a text"),
        (["x"], "has an opcode that no tensor needs"),
        ("x", "it is not a dict"),
    ],
    ids=[*"abcdefghij"],
)
def test_what_else_torch_can_save_is_refused_and_not_executed(store, content, why):
    reason, sentence = torch_refusal(store, torch_file(content))
    assert reason is ExclusionReason.FORMAT
    assert re.search(why, sentence), sentence
    assert not Path("/tmp/millrace-was-here").exists()


def rezipped(body: bytes, change: Callable[[str, bytes], bytes], method: int = 0) -> bytes:
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(body)) as origin,
        zipfile.ZipFile(file, "w", compression=method) as made,
    ):
        for name in origin.namelist():
            made.writestr(name, change(name, origin.read(name)))
    return file.getvalue()


def test_a_file_that_would_grow_or_lies_of_its_length_is_refused(store):
    body = as_torch(made())
    packed = rezipped(body, lambda _, content: content, zipfile.ZIP_DEFLATED)
    assert "is compressed" in torch_refusal(store, packed)[1]
    short = rezipped(body, lambda name, content: content[:-1] if "/data/" in name else content)
    assert "shorter than its declared length" in torch_refusal(store, short)[1]
    long = rezipped(body, lambda name, content: content + b"x" if "/data/" in name else content)
    assert "in it is too long" in torch_refusal(store, long)[1]
    with pytest.raises(FormatError, match="in it is too long"):
        texts_of(body, 500)
    crowd = as_torch(made(), **{f"{n}": torch.full((1,), n).byte() for n in range(30)})
    with pytest.raises(FormatError, match="more files in it"):
        texts_of(crowd, 1 << 20)


@pytest.mark.parametrize(
    ("size", "shift", "is_right"), [(44, 0, True), (44, -1, False), (45, 0, False)]
)
def test_a_directory_is_where_every_version_of_python_looks_for_it(size, shift, is_right):
    body = rezipped(as_torch(made()), lambda _, content: content)
    entries, length, start = struct.unpack_from("<10xHII", body, len(body) - 22)
    larger = struct.pack("<4sQHHII4Q", b"PK\6\6", size, 45, 45, 0, 0, *[entries] * 2, length, start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, len(body) - 22 + shift, 1)
    changed = body[:-22] + larger + locator + body[-22:]
    if is_right:
        assert texts_of(changed, 1 << 20) == texts_of(body, 1 << 20)
    else:
        with pytest.raises(FormatError, match="its directory is damaged"):
            texts_of(changed, 1 << 20)


def text(value: str) -> bytes:
    encoded = value.encode(errors="surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def storage(key: str, size: int) -> bytes:
    said = text("storage") + b"ctorch\nByteStorage\n" + text(key) + text("cpu")
    return b"(" + said + b"J" + struct.pack("<i", size) + b"tQ"


def tensor(key: str, size: int, stride: bytes = b"K\x01\x85") -> bytes:
    args = storage(key, size) + b"K\x00J" + struct.pack("<i", size) + b"\x85" + stride
    ordered = b"ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + args + b"\x89" + ordered + b"tR"


def archive(items: dict[str, bytes], records: dict[str, bytes] | None = None) -> bytes:
    """A file as torch's are, of a pickle that it would not write."""
    inside = b"".join(text(name) + value for name, value in items.items())
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("archive/data.pkl", b"\x80\x02}(" + inside + b"u.")
        for name, content in (records or {}).items():
            made.writestr(f"archive/data/{name}", content)
    return file.getvalue()


def test_archives_and_pickles_that_torch_would_not_write_are_refused(store):
    right = archive({"a": tensor("0", 3), "millrace": text("x")}, {"0": b"abc"})
    assert read_texts_and_tensors(right, most=1, head=999) == ({"millrace": "x"}, {"a": b"abc"})

    def refused(body: bytes, why: str) -> None:
        with pytest.raises(FormatError, match=why) as caught:
            read_texts_and_tensors(body, most=4, head=1 << 20)
        assert len(str(caught.value)) < 100  # it is kept in the chain

    refused(archive({"millrace": text("\ud800")}), "or it is damaged")
    refused(archive({"\udfff": tensor("0", 1)}, {"0": b"x"}), "or it is damaged")
    refused(archive({"a": tensor("k" * 100_000, 1)}), "or it is damaged")
    refused(archive({"a": tensor("0", 1 << 30)}, {"0": b"x"}), "longer than the file")
    refused(archive({"a": tensor("0", -1)}, {"0": b"x"}), "exceeds its storage")
    refused(
        archive({"a": tensor("0", 1, stride=b"K\x00\x85")}, {"0": b"x"}), "not a vector of bytes"
    )
    refused(archive({"a": b"K\x01"}), "values other than texts and tensors")
    refused(archive({"a": b"cos\nsystem\n" + text("true") + b"\x85R"}), "values other than tensors")
    refused(archive({"a": b"I" + b"9" * 5000 + b"\n"}), "damaged|that no tensor needs")
    refused(archive({"a": b"h\x07"}), "or it is damaged")
    refused(archive({"a": b"ctorch\n\\z\n"}), "or it is damaged")
    refused(archive({"a": b"t"}), "or it is damaged")
    refused(archive({}, {str(n): b"x" for n in range(60)}), "more files in it")
    refused(right + b"x", "or it is damaged")
    refused(right[:-30] + right[-22:], "or it is damaged")
    refused(b"", "or it is damaged")


def test_files_that_overlap_do_not_make_more_of_it(store):
    """Each tensor's file holds those of all behind it: the sum would be many times the whole."""
    items = {str(n): tensor(str(n), 4000) for n in range(4)}
    body = archive(items, {"0": bytes(4000)})
    with pytest.raises(FormatError, match="longer than the file"):
        read_texts_and_tensors(body, most=4, head=4096)


@settings(
    max_examples=scale_examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(data=st.data())
def test_changed_bytes_of_it_are_refused_or_right(data):
    store = open_store("memory://torch")
    body = bytearray(as_torch(made()))
    for _ in range(data.draw(st.integers(1, 5))):
        place = data.draw(st.integers(0, 1200) | st.integers(0, len(body) - 1))
        body[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del body[data.draw(st.integers(0, len(body))) :]
    good()
    with suppress(GradientError):
        assert (
            from_torch(store, bytes(body)).header.body
            == check_gradient(made(), EXPECTED).header.body
        )
    good()
