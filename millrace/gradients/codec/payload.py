"""A worker's gradient as one object: a safetensors file that says what it is, checked wholly.

Each tensor of the model is a tensor of bytes in it (see `tensors`); the header's metadata is a
`GradientHeader`. Its size is known from a listing, and what it may be at most from the shapes and
the codec, so that nothing too large is read. Nothing in it is believed: the run, the worker and the
window are those of its key, and everything else is what the aggregator expects.

Its digest is that of its header, which names the digest of its tensors' digests. So each of several
machines can read some of the tensors, and what they found is held against the header together.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import orjson
from pydantic import ValidationError

from millrace import errors
from millrace.digest import compute_sha256, dump_canonical_json
from millrace.gradients.codec import kernels
from millrace.gradients.codec.shared_indices import Mask
from millrace.gradients.codec.tensors import (
    CodeError,
    Sparse,
    compute_largest_size,
    decode_values,
    unpack_tensor,
)
from millrace.gradients.codec.torchfile import FormatError, read_texts_and_tensors
from millrace.schemas.gradient import Codec, GradientHeader, Refusal, range_of
from millrace.storage import Stat, Store, read_range

_LENGTH = struct.Struct("<Q")
_KEY = "millrace"
_HEADER_FOR_ALL, _HEADER_FOR_EACH = 4096, 1024  # bytes, and longer names cost more

NORM_MOST = 1e18
"""The L2 norm beyond which sums of gradients and their squares leave float32."""

Shapes = Mapping[str, tuple[int, ...]]


class PayloadError(errors.CorruptError):
    """A gradient that is not taken.

    Attributes:
        reason: Why, in a word.
    """

    def __init__(self, reason: Refusal, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason

    def __reduce__(self) -> "tuple[type[PayloadError], tuple[Refusal, str]]":
        return PayloadError, (self.reason, str(self))


@dataclass(frozen=True, slots=True)
class Expected:
    """Conditions that a gradient must meet.

    Attributes:
        run: For which run.
        uid: Whose.
        window: For which window.
        base: The step of the weights that it changes.
        codec: How it is compressed.
        shapes: Of the model's tensors, by their names.
        norm: The L2 norm of all of it that nobody honest exceeds; None for `NORM_MOST`.
    """

    run: str
    uid: str
    window: int
    base: int
    codec: Codec
    shapes: Shapes = field(repr=False)
    norm: float | None = None

    @property
    def size(self) -> int:
        """Bytes that it has at most."""
        codec = self.codec
        bodies = sum(
            compute_largest_size(shape, codec.for_tensor(name))
            for name, shape in self.shapes.items()
        )
        return self.header_size + bodies

    @property
    def header_size(self) -> int:
        """Bytes that its header has at most."""
        names = sum(len(name.encode()) * 8 + _HEADER_FOR_EACH for name in self.shapes)
        return _HEADER_FOR_ALL + names


@dataclass(frozen=True, slots=True)
class Payload:
    """A gradient that is what it should be.

    Attributes:
        header: What it says of itself.
        tensors: Those of its tensors that are here, by their names.
        norm: The L2 norm of all of it but the buffers.
        sha256: Of its header, which names that of all else.
        size: Bytes of it.
    """

    header: GradientHeader
    tensors: Mapping[str, tuple[Sparse, ...]] = field(repr=False)
    norm: float
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Opened:
    """A gradient whose header is what it should be.

    Attributes:
        header: What it says of itself.
        spans: Where each tensor begins and ends in the object: in the order of their names, one
            behind the other.
        sha256: Of its header.
        size: Bytes of it.
    """

    header: GradientHeader
    spans: Mapping[str, tuple[int, int]] = field(repr=False)
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Tensors:
    """Some of the tensors of a gradient.

    Attributes:
        sparse: By their names.
        digests: Of their bytes.
        squares: The sums of their values' squares; of buffers none.
        fault: What is wrong with one of them; empty if nothing is.
    """

    sparse: Mapping[str, tuple[Sparse, ...]] = field(repr=False)
    digests: Mapping[str, str] = field(repr=False)
    squares: Mapping[str, float] = field(repr=False)
    fault: str = ""


def compute_fingerprint(shapes: Shapes) -> str:
    """Return a fingerprint of a model: the digest of its tensors' names and shapes."""
    return compute_sha256(
        dump_canonical_json({name: list(shape) for name, shape in shapes.items()})
    )


def encode_payload(
    bodies: Mapping[str, bytes],
    shapes: Shapes,
    codec: Codec,
    *,
    run: str,
    uid: str,
    window: int,
    base: int,
    tokens: int = 0,
    samples: str = "",
) -> bytes:
    """Encode the object that a worker puts into the bucket. Equal arguments make equal bytes.

    Args:
        bodies: Its compressed tensors, by their names, as of `GradientEncoder` or `Feedback`.
        shapes: Theirs.
        codec: How they were compressed.
        run: For which run.
        uid: Whose.
        window: For which window.
        base: The step of the weights that it changes.
        tokens: That it was made of.
        samples: The digest of the samples that it was made of.
    """
    names = sorted(bodies)
    header = GradientHeader(
        run=run,
        uid=uid,
        window=window,
        base=base,
        model=compute_fingerprint(shapes),
        codec=codec,
        shapes=tuple(tuple(shapes[name]) for name in names),
        tokens=tokens,
        samples=samples,
        body=_digest_tensors(compute_sha256(bodies[name]) for name in names),
    )
    whole = header.model_copy(update={"digest": _digest_header(header)})
    return _encode_safetensors(dump_canonical_json(whole.model_dump()).decode(), bodies)


def _encode_safetensors(said: str, bodies: Mapping[str, bytes]) -> bytes:
    """Return a file of tensors of bytes, in the order of their names."""
    described: dict[str, object] = {"__metadata__": {_KEY: said}}
    names, at = sorted(bodies), 0
    for name in names:
        size = len(bodies[name])
        described[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = orjson.dumps(described)
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text + b"".join(bodies[name] for name in names)


def read_payload(store: Store, stat: Stat, expected: Expected) -> Payload:
    """Read a worker's gradient, and check all of it.

    Args:
        store: The worker's bucket.
        stat: The object, as it was listed.
        expected: What it must be.

    Raises:
        PayloadError: It is not; why is said.
    """
    opened = read_header(store, stat, expected)
    tensors = read_tensors(store, stat, opened, sorted(expected.shapes), expected)
    return assemble_payload(opened, [tensors], expected)


def read_header(store: Store, stat: Stat, expected: Expected) -> Opened:
    """Read the header of a worker's gradient, and check it.

    Args and raises: as `read_payload`.
    """
    if stat.size > expected.size:
        raise PayloadError(
            Refusal.TOO_LARGE,
            f"{stat.size:,} bytes, where {expected.size:,} are the most there are.",
        )
    if is_torch_file(stat.key):
        body = _from_torch(store, stat, expected)
        return replace(open_payload(memoryview(body), len(body), expected), size=stat.size)
    head = _read(store, stat, 0, min(stat.size, _LENGTH.size + expected.header_size))
    return open_payload(memoryview(head), stat.size, expected)


def read_tensors(
    store: Store, stat: Stat, opened: Opened, names: Sequence[str], expected: Expected
) -> Tensors:
    """Read some tensors of a worker's gradient, and check them.

    Args:
        store: The worker's bucket.
        stat: The object, as it was listed.
        opened: Its header.
        names: Which: neighbours, in their order.
        expected: What it must be.

    Raises:
        PayloadError: They cannot be read.
    """
    if not names:
        return Tensors({}, {}, {})
    if is_torch_file(stat.key):  # which is read wholly or not at all
        body = memoryview(_from_torch(store, stat, expected))
        return check_tensors(body, 0, opened, names, expected)
    begin, end = opened.spans[names[0]][0], opened.spans[names[-1]][1]
    body = memoryview(_read(store, stat, begin, end))
    return check_tensors(body, begin, opened, names, expected)


def is_torch_file(key: str) -> bool:
    """Tell whether an object is one that ``torch.save`` wrote."""
    return key.endswith(".pt")


def _from_torch(store: Store, stat: Stat, expected: Expected) -> bytes:
    """Convert a file of ``torch.save`` into the safetensors file that it could have been."""
    body = _read(store, stat, 0, stat.size)
    try:
        texts, tensors = read_texts_and_tensors(
            body, most=len(expected.shapes), head=expected.header_size
        )
    except FormatError as error:
        sentence = f"It is no file of torch's with a gradient: {error}."
        raise PayloadError(Refusal.FORMAT, sentence) from error
    if set(texts) != {_KEY}:
        raise PayloadError(Refusal.HEADER, f"It does not say what it is, as text under {_KEY!r}.")
    return _encode_safetensors(texts[_KEY], tensors)


def _read(store: Store, stat: Stat, begin: int, end: int) -> bytes:
    try:
        return read_range(store, stat.key, begin, end, etag=stat.etag)
    except (errors.ChangedError, errors.NotFoundError) as error:
        raise PayloadError(Refusal.CHANGED, "It was replaced while it was read.") from error
    except (errors.UnavailableError, errors.DeniedError, errors.CorruptError) as error:
        raise PayloadError(Refusal.UNAVAILABLE, explain_failure(error)) from error


def explain_failure(error: errors.MillraceError) -> str:
    """Return the reason why a worker's bucket was of no use, in words of ours."""
    match error:
        case errors.DeniedError():
            return "Its bucket refuses to be read."
        case errors.NotFoundError():
            return "Its bucket is not there."
        case errors.UnavailableError(status=int(status)):
            return f"Its bucket answers {status}."
        case _:
            return "Its bucket does not answer as one."


def check_payload(body: bytes, expected: Expected) -> Payload:
    """Check all of a gradient.

    Args:
        body: Of the object, from whomever.
        expected: What it must be.

    Raises:
        PayloadError: It is not; why is said.
    """
    view = memoryview(body)
    opened = open_payload(view, len(body), expected)
    tensors = check_tensors(view, 0, opened, sorted(expected.shapes), expected)
    return assemble_payload(opened, [tensors], expected)


def open_payload(head: memoryview, size: int, expected: Expected) -> Opened:
    """Check the header of a gradient.

    Args:
        head: The beginning of the object, with all of its header.
        size: Bytes of the object.
        expected: What it must be.

    Raises:
        PayloadError: It is not; why is said.
    """
    header, spans, begins = _make_header(head, size, expected.header_size)
    _compare(header, expected)
    if set(spans) != set(expected.shapes):
        raise PayloadError(Refusal.TENSORS, "It has other tensors than the model.")
    return Opened(header, spans, compute_sha256(head[:begins]), size)


def check_tensors(
    body: memoryview, at: int, opened: Opened, names: Sequence[str], expected: Expected
) -> Tensors:
    """Check some tensors of a gradient.

    Args:
        body: Bytes of the object in which they are.
        at: Where these begin in the object.
        opened: Its header.
        names: Which, in their order.
        expected: What it must be.
    """
    codec, mask = expected.codec, Mask(expected.run, expected.window)
    tensors: dict[str, tuple[Sparse, ...]] = {}
    digests: dict[str, str] = {}
    squares: dict[str, float] = {}
    fault = ""
    for name in names:
        begin, end = opened.spans[name]
        piece = body[begin - at : end - at]
        digests[name] = compute_sha256(piece)
        try:
            runs = unpack_tensor(piece, expected.shapes[name], codec.for_tensor(name), mask=mask)
            if codec.is_buffer(name):
                _check_range(name, runs, codec.for_tensor(name))
        except CodeError as error:
            fault = fault or f"{name}: {error}"
            continue
        tensors[name] = runs
        if codec.is_buffer(name):  # a value and no change: no part of the gradient's norm
            continue
        each = (kernels.sum_squares(decode_values(run, codec).reshape(-1)) for run in runs)
        squares[name] = float(sum(each))
    return Tensors(tensors, digests, squares, fault)


def _check_range(name: str, runs: Sequence[Sparse], codec: Codec) -> None:
    """Refuse a buffer with a value that it cannot have.

    Raises:
        CodeError: It has one.
    """
    least, most = range_of(name)
    for run in runs:
        values = decode_values(run, codec)
        if (values < least).any() or (values > most).any():
            raise CodeError(f"A value is not between {least:g} and {most:g}.")


def assemble_payload(opened: Opened, parts: Sequence[Tensors], expected: Expected) -> Payload:
    """Return a gradient, all of whose tensors were checked.

    Args:
        opened: Its header.
        parts: Its tensors, wherever they were checked, in the order of their names.
        expected: What it must be.

    Raises:
        PayloadError: They are not what its header names, or one of them is none; why is said.
    """
    if (
        _digest_tensors(digest for part in parts for digest in part.digests.values())
        != opened.header.body
    ):
        raise PayloadError(Refusal.DIGEST, "Its bytes are not those that its header names.")
    for part in parts:
        if part.fault:
            raise PayloadError(Refusal.CODES, part.fault)
    norm = sum(square for part in parts for square in part.squares.values()) ** 0.5
    most = NORM_MOST if expected.norm is None else min(expected.norm, NORM_MOST)
    if not norm <= most:
        raise PayloadError(Refusal.NORM, f"Its norm is {norm:.3g}, more than {most:.3g}.")
    tensors = {name: runs for part in parts for name, runs in part.sparse.items()}
    return Payload(opened.header, tensors, norm, opened.sha256, opened.size)


def compute_identity(body: bytes) -> str:
    """Return the digest of a gradient: of its header, which has the digests of all else."""
    (length,) = _LENGTH.unpack_from(body)
    return compute_sha256(memoryview(body)[: _LENGTH.size + length])


def _digest_tensors(digests: Iterable[str]) -> str:
    """Return the digest of tensors' digests, in the order of their names."""
    return compute_sha256("".join(digests).encode())


def _digest_header(header: GradientHeader) -> str:
    """Return the digest of all fields of a header but itself."""
    return compute_sha256(dump_canonical_json(header.model_dump(mode="json", exclude={"digest"})))


def _compare(header: GradientHeader, expected: Expected) -> None:
    if header.digest != _digest_header(header):
        raise PayloadError(Refusal.DIGEST, "Its header is not the one that was written.")
    shapes = tuple(expected.shapes[name] for name in sorted(expected.shapes))
    for reason, said, wanted in (
        (Refusal.RUN, header.run, expected.run),
        (Refusal.UID, header.uid, expected.uid),
        (Refusal.WINDOW, header.window, expected.window),
        (Refusal.BASE, header.base, expected.base),
        (Refusal.MODEL, header.model, compute_fingerprint(expected.shapes)),
        (Refusal.MODEL, header.shapes, shapes),
        (Refusal.CODEC, header.codec, expected.codec),
    ):
        if said != wanted:
            raise PayloadError(reason, f"Its {reason} is not the one that is expected here.")


def _make_header(
    head: memoryview, size: int, most: int
) -> tuple[GradientHeader, dict[str, tuple[int, int]], int]:
    """Return the header, the offsets of the tensors in the object, and where they begin."""
    try:
        said, spans, begins = _parse(head, size, most)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        sentence = f"It is no safetensors file of ours: {errors.format_error(error)}."
        raise PayloadError(Refusal.FORMAT, sentence) from error
    try:
        return GradientHeader.model_validate_json(said, strict=True), spans, begins
    except (ValidationError, TypeError) as error:
        raise PayloadError(Refusal.HEADER, "Its header does not say what it is.") from error


def _parse(head: memoryview, size: int, most: int) -> tuple[str, dict[str, tuple[int, int]], int]:
    (length,) = _LENGTH.unpack_from(head)
    begins = _LENGTH.size + length
    if length > most or begins > min(size, len(head)):
        raise ValueError("its header is longer than it can be")  # and is not parsed
    described = orjson.loads(head[_LENGTH.size : begins])
    said = described.pop("__metadata__")[_KEY]
    if list(described) != sorted(described):
        raise ValueError("its tensors are not in the order of their names")
    spans: dict[str, tuple[int, int]] = {}
    at = 0
    for name, entry in described.items():
        begin, end = entry["data_offsets"]
        if type(end) is not int or (begin, entry["dtype"]) != (at, "U8"):
            raise ValueError("its tensors are not bytes, one behind the other")
        if entry["shape"] != [end - at] or end < at:
            raise ValueError("its tensors are not bytes, one behind the other")
        spans[name] = (begins + at, begins + end)
        at = end
    if begins + at != size:
        raise ValueError("it does not end where its tensors do")
    return said, spans, begins
