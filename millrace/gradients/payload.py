"""A worker's gradient as one object: a safetensors file that says what it is, checked wholly.

Each tensor of the model is a tensor of bytes in it (see `tensors`); the header's metadata is a
`GradientHeader`. Its size is known from a listing, and what it may be at most from the shapes and
the codec, so that nothing too large is read. Nothing in it is believed: the run, the worker and the
window are those of its key, and everything else is what the aggregator expects.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson
from pydantic import ValidationError

from millrace import errors
from millrace.digest import canonical, sha256
from millrace.gradients import kernels
from millrace.gradients.shared import Mask
from millrace.gradients.tensors import CodeError, Sparse, largest, unpacked, values_of
from millrace.models.gradient import Codec, GradientHeader, Refusal
from millrace.storage import Stat, Store, read

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


@dataclass(frozen=True, slots=True)
class Expected:
    """What a gradient must be.

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
        bodies = sum(largest(shape, self.codec) for shape in self.shapes.values())
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
        tensors: Its tensors, by their names.
        norm: The L2 norm of all of it.
        sha256: Of the object.
        size: Bytes of it.
    """

    header: GradientHeader
    tensors: Mapping[str, tuple[Sparse, ...]] = field(repr=False)
    norm: float
    sha256: str
    size: int


def fingerprint(shapes: Shapes) -> str:
    """What tells one model from another: the digest of its tensors' names and shapes."""
    return sha256(canonical({name: list(shape) for name, shape in shapes.items()}))


def payload_bytes(
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
    """The object that a worker puts into the bucket. Equal arguments make equal bytes.

    Args:
        bodies: Its compressed tensors, by their names, as of `Encoder` or `Feedback`.
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
    whole = b"".join(bodies[name] for name in names)
    header = GradientHeader(
        run=run,
        uid=uid,
        window=window,
        base=base,
        model=fingerprint(shapes),
        codec=codec,
        shapes=tuple(tuple(shapes[name]) for name in names),
        tokens=tokens,
        samples=samples,
        body=sha256(whole),
    )
    described: dict[str, object] = {"__metadata__": {_KEY: canonical(header.model_dump()).decode()}}
    at = 0
    for name in names:
        size = len(bodies[name])
        described[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = orjson.dumps(described)
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text + whole


def read_payload(store: Store, stat: Stat, expected: Expected) -> Payload:
    """Read a worker's gradient, and check all of it.

    Args:
        store: The worker's bucket.
        stat: The object, as it was listed.
        expected: What it must be.

    Raises:
        PayloadError: It is not; why is said.
    """
    if stat.size > expected.size:
        raise PayloadError(
            Refusal.TOO_LARGE,
            f"{stat.size:,} bytes, where {expected.size:,} are the most there are.",
        )
    try:
        body = read(store, stat.key, etag=stat.etag)
    except (errors.ChangedError, errors.NotFoundError) as error:
        raise PayloadError(Refusal.CHANGED, "It was replaced while it was read.") from error
    except (errors.UnavailableError, errors.DeniedError) as error:
        raise PayloadError(Refusal.UNAVAILABLE, unanswered(error)) from error
    return check_payload(body, expected)


def unanswered(error: errors.MillraceError) -> str:
    """Why a worker's bucket was of no use, in words of ours: its own would be kept for ever."""
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
    header, pieces, data = _taken_apart(memoryview(body), expected.header_size)
    _compare(header, expected)
    if sha256(data) != header.body:
        raise PayloadError(Refusal.DIGEST, "Its bytes are not those that its header names.")
    if set(pieces) != set(expected.shapes):
        raise PayloadError(Refusal.TENSORS, "It has other tensors than the model.")
    mask = Mask(expected.run, expected.window)
    tensors: dict[str, tuple[Sparse, ...]] = {}
    square = 0.0
    for name, shape in expected.shapes.items():
        try:
            runs = unpacked(pieces[name], shape, expected.codec, mask=mask)
        except CodeError as error:
            raise PayloadError(Refusal.CODES, f"{name}: {error}") from error
        tensors[name] = runs
        for run in runs:
            square += kernels.sum_of_squares(values_of(run, expected.codec).reshape(-1))
    norm = square**0.5
    most = NORM_MOST if expected.norm is None else min(expected.norm, NORM_MOST)
    if not norm <= most:
        raise PayloadError(Refusal.NORM, f"Its norm is {norm:.3g}, more than {most:.3g}.")
    return Payload(header, tensors, norm, sha256(body), len(body))


def _compare(header: GradientHeader, expected: Expected) -> None:
    shapes = tuple(expected.shapes[name] for name in sorted(expected.shapes))
    for reason, said, wanted in (
        (Refusal.RUN, header.run, expected.run),
        (Refusal.UID, header.uid, expected.uid),
        (Refusal.WINDOW, header.window, expected.window),
        (Refusal.BASE, header.base, expected.base),
        (Refusal.MODEL, header.model, fingerprint(expected.shapes)),
        (Refusal.MODEL, header.shapes, shapes),
        (Refusal.CODEC, header.codec, expected.codec),
    ):
        if said != wanted:
            raise PayloadError(reason, f"Its {reason} is not the one that is expected here.")


def _taken_apart(
    body: memoryview, most: int
) -> tuple[GradientHeader, dict[str, memoryview], memoryview]:
    """The header, the tensors, and all that comes behind the header."""
    try:
        said, pieces, data = _parsed(body, most)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        sentence = f"It is no safetensors file of ours: {errors.one_line(error)}."
        raise PayloadError(Refusal.FORMAT, sentence) from error
    try:
        return GradientHeader.model_validate_json(said, strict=True), pieces, data
    except (ValidationError, TypeError) as error:
        raise PayloadError(Refusal.HEADER, "Its header does not say what it is.") from error


def _parsed(body: memoryview, most: int) -> tuple[str, dict[str, memoryview], memoryview]:
    (length,) = _LENGTH.unpack_from(body)
    if length > min(len(body) - _LENGTH.size, most):
        raise ValueError("its header is longer than it can be")  # and is not parsed
    described = orjson.loads(body[_LENGTH.size : _LENGTH.size + length])
    said = described.pop("__metadata__")[_KEY]
    data = body[_LENGTH.size + length :]
    pieces: dict[str, memoryview] = {}
    at = 0
    for name, entry in described.items():
        begin, end = entry["data_offsets"]
        if (begin, entry["dtype"], entry["shape"]) != (at, "U8", [end - begin]) or end < begin:
            raise ValueError("its tensors are not bytes, one behind the other")
        pieces[name] = data[begin:end]
        at = end
    if at != len(data):
        raise ValueError("it does not end where its tensors do")
    return said, pieces, data
