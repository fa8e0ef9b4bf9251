"""Gradient of a worker as one safetensors file, and the checks of a received one.

Each tensor of the model is a tensor of bytes in the file (see `tensors`). The metadata of the
header is a `GradientHeader`. A listing shows the size of the object, and the shapes and the codec
limit it, so nothing too large is read. No content is trusted: the run, the worker and the window
must be those of the key, and all other fields those that the aggregator expects.

The digest of a gradient is that of its header, which includes the digest of the tensors' digests.
So several machines can each read some tensors, and their results are checked against the header.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum, sqrt

from pydantic import ValidationError

from millrace import errors
from millrace.digest import compute_digest, dump_canonical_json
from millrace.gradients.codec import kernels
from millrace.gradients.codec.byte_tensors import (
    PARSE_ERRORS,
    ByteTensors,
    compute_largest_header,
    count_header_bytes,
    encode_byte_tensors,
    parse_byte_tensors,
)
from millrace.gradients.codec.shared_indices import Mask
from millrace.gradients.codec.tensors import (
    CodeError,
    SparseChunks,
    compute_largest_size,
    decode_values,
    unpack_tensor,
)
from millrace.schemas.gradient import Codec, ExclusionReason, GradientHeader, find_buffer_range
from millrace.storage import Stat, Store, read_range
from millrace.torchfile import FormatError, read_texts_and_tensors

_KEY = "millrace"

NORM_MOST = 1e18
"""Largest L2 norm at which sums of gradients and of their squares stay within float32."""

Shapes = Mapping[str, tuple[int, ...]]


class GradientError(errors.CorruptError):
    """A gradient is refused, since it fails a check.

    Attributes:
        reason: Kind of the reason.
    """

    def __init__(self, reason: ExclusionReason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason

    def __reduce__(self) -> "tuple[type[GradientError], tuple[ExclusionReason, str]]":
        return GradientError, (self.reason, str(self))


@dataclass(frozen=True, slots=True)
class ExpectedGradient:
    """Conditions that a gradient must meet.

    Attributes:
        run: Name of the run.
        uid: Name of the worker.
        window: Number of the window.
        base: Step of the weights that the gradient changes.
        codec: Settings of the compression.
        shapes: Shapes of the model's tensors by their names.
        max_norm: Largest L2 norm of the gradient; None for `NORM_MOST`.
    """

    run: str
    uid: str
    window: int
    base: int
    codec: Codec
    shapes: Shapes = field(repr=False)
    max_norm: float | None = None

    @property
    def size(self) -> int:
        """Largest size of the object in bytes."""
        codec = self.codec
        bodies = sum(
            compute_largest_size(shape, codec.select_for_tensor(name))
            for name, shape in self.shapes.items()
        )
        return self.header_size + bodies

    @property
    def header_size(self) -> int:
        """Largest size of the header in bytes."""
        return compute_largest_header(self.shapes)


@dataclass(frozen=True, slots=True)
class CheckedGradient:
    """Gradient that passed all checks.

    Attributes:
        header: Header of the gradient.
        tensors: Tensors that this process has, by their names.
        norm: L2 norm without the buffers.
        digest: Digest of the header, which has the digest of everything else.
        size: Size of the object in bytes.
    """

    header: GradientHeader
    tensors: Mapping[str, tuple[SparseChunks, ...]] = field(repr=False)
    norm: float
    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class CheckedHeader:
    """Gradient whose header passed all checks.

    Attributes:
        header: Header of the gradient.
        spans: First byte of each tensor in the object, and the byte after its last one. The
            tensors are contiguous, in the order of their names.
        digest: Digest of the header.
        size: Size of the object in bytes.
    """

    header: GradientHeader
    spans: Mapping[str, tuple[int, int]] = field(repr=False)
    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class CheckedTensors:
    """Some tensors of a gradient, with the results of their checks.

    Attributes:
        sparse: Values of the tensors by their names.
        digests: Digests of the tensors' bytes.
        squares: Sum of the squares of each tensor's values, except for buffers.
        fault: Sentence about a fault of a tensor; empty if there is none.
    """

    sparse: Mapping[str, tuple[SparseChunks, ...]] = field(repr=False)
    digests: Mapping[str, str] = field(repr=False)
    squares: Mapping[str, float] = field(repr=False)
    fault: str = ""


def compute_fingerprint(shapes: Shapes) -> str:
    """Return a fingerprint of a model: the digest of its tensors' names and shapes."""
    return compute_digest(
        dump_canonical_json({name: list(shape) for name, shape in shapes.items()})
    )


def encode_gradient(
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
    """Encode a gradient as the object that a worker uploads. Equal arguments give equal bytes.

    Args:
        bodies: Compressed tensors by their names, from `GradientEncoder` or `ErrorFeedback`.
        shapes: Shapes of the tensors.
        codec: Settings of the compression.
        run: Name of the run.
        uid: Name of the worker.
        window: Number of the window.
        base: Step of the weights that the gradient changes.
        tokens: Number of tokens that the worker trained on.
        samples: Digest of the samples that the worker trained on.
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
        body=_digest_tensors(compute_digest(bodies[name]) for name in names),
    )
    whole = header.model_copy(update={"digest": _digest_header(header)})
    return encode_byte_tensors(bodies, {_KEY: dump_canonical_json(whole.model_dump()).decode()})


def read_gradient(store: Store, stat: Stat, expected: ExpectedGradient) -> CheckedGradient:
    """Read a worker's gradient, and check all of it.

    Args:
        store: Bucket of the worker.
        stat: Description of the object from a listing.
        expected: Conditions that the gradient must meet.

    Raises:
        GradientError: The gradient cannot be read, or does not meet the conditions.
    """
    checked = read_header(store, stat, expected)
    tensors = read_tensors(store, stat, checked, sorted(expected.shapes), expected)
    return assemble_gradient(checked, [tensors], expected)


def read_header(store: Store, stat: Stat, expected: ExpectedGradient) -> CheckedHeader:
    """Read the header of a worker's gradient, and check it.

    Args:
        store: Bucket of the worker.
        stat: Description of the object from a listing.
        expected: Conditions that the gradient must meet.

    Raises:
        GradientError: The header cannot be read, or does not meet the conditions.
    """
    if stat.size > expected.size:
        raise GradientError(
            ExclusionReason.TOO_LARGE,
            f"{stat.size:,} bytes, where {expected.size:,} are the most there are.",
        )
    if is_torch_file(stat.key):
        body = _from_torch(store, stat, expected)
        return replace(check_header(memoryview(body), len(body), expected), size=stat.size)
    head = read_untrusted_range(
        store, stat, 0, min(stat.size, count_header_bytes(expected.header_size))
    )
    return check_header(memoryview(head), stat.size, expected)


def read_tensors(
    store: Store,
    stat: Stat,
    checked: CheckedHeader,
    names: Sequence[str],
    expected: ExpectedGradient,
) -> CheckedTensors:
    """Read some tensors of a worker's gradient, and check them.

    Args:
        store: Bucket of the worker.
        stat: Description of the object from a listing.
        checked: Checked header of the gradient.
        names: Names of contiguous tensors, in their order.
        expected: Conditions that the gradient must meet.

    Raises:
        GradientError: The tensors cannot be read.
    """
    if not names:
        return CheckedTensors({}, {}, {})
    if is_torch_file(stat.key):  # such a file cannot be read in parts
        body = memoryview(_from_torch(store, stat, expected))
        return check_tensors(body, 0, checked, names, expected)
    begin, end = checked.spans[names[0]][0], checked.spans[names[-1]][1]
    body = memoryview(read_untrusted_range(store, stat, begin, end))
    return check_tensors(body, begin, checked, names, expected)


def is_torch_file(key: str) -> bool:
    """Decide from its key whether an object is a file of ``torch.save``."""
    return key.endswith(".pt")


def _from_torch(store: Store, stat: Stat, expected: ExpectedGradient) -> bytes:
    """Read a file of ``torch.save``, and return a safetensors file with the same content."""
    body = read_untrusted_range(store, stat, 0, stat.size)
    try:
        texts, tensors = read_texts_and_tensors(
            body, most=len(expected.shapes), head=expected.header_size
        )
    except FormatError as error:
        sentence = f"It is not a file of torch.save with a gradient: {error}."
        raise GradientError(ExclusionReason.FORMAT, sentence) from error
    if set(texts) != {_KEY}:
        raise GradientError(ExclusionReason.HEADER, f"It has no header, as text under {_KEY!r}.")
    return encode_byte_tensors(tensors, {_KEY: texts[_KEY]})


def read_untrusted_range(store: Store, stat: Stat, begin: int, end: int) -> bytes:
    """Read a range of a worker's object.

    Args:
        store: Bucket of the worker.
        stat: Description of the object from a listing.
        begin: Offset of the first byte.
        end: Offset after the last byte.

    Raises:
        GradientError: The range cannot be read, or the object was replaced.
    """
    try:
        return read_range(store, stat.key, begin, end, etag=stat.etag)
    except (errors.ChangedError, errors.NotFoundError) as error:
        raise GradientError(
            ExclusionReason.CHANGED, "It was replaced while it was read."
        ) from error
    except (errors.UnavailableError, errors.DeniedError) as error:
        raise GradientError(ExclusionReason.UNAVAILABLE, explain_failure(error)) from error
    except errors.MillraceError as error:  # another try would fail, too
        sentence = (
            "It cannot be read: it is archived, encrypted, or has metadata that no client reads, "
            "or its store gives an invalid answer."
        )
        raise GradientError(ExclusionReason.FORMAT, sentence) from error


def explain_failure(error: errors.MillraceError) -> str:
    """Return a sentence for an error of a worker's bucket, without text from outside."""
    match error:
        case errors.DeniedError():
            return "Its bucket refuses to be read."
        case errors.NotFoundError():
            return "Its bucket is not there."
        case errors.UnavailableError(status=int(status)):
            return f"Its bucket answers {status}."
        case _:
            return "Its bucket gives an invalid answer."


def check_gradient(body: bytes, expected: ExpectedGradient) -> CheckedGradient:
    """Check all of a gradient.

    Args:
        body: Bytes of the object, from any source.
        expected: Conditions that the gradient must meet.

    Raises:
        GradientError: The gradient does not meet the conditions.
    """
    view = memoryview(body)
    checked = check_header(view, len(body), expected)
    tensors = check_tensors(view, 0, checked, sorted(expected.shapes), expected)
    return assemble_gradient(checked, [tensors], expected)


def check_header(head: memoryview, size: int, expected: ExpectedGradient) -> CheckedHeader:
    """Check the header of a gradient.

    Args:
        head: Beginning of the object, with the whole header.
        size: Size of the object in bytes.
        expected: Conditions that the gradient must meet.

    Raises:
        GradientError: The header does not meet the conditions.
    """
    header, found = _make_header(head, size, expected.header_size)
    _compare(header, expected)
    if set(found.spans) != set(expected.shapes):
        raise GradientError(ExclusionReason.TENSORS, "It has other tensors than the model.")
    return CheckedHeader(header, found.spans, compute_digest(head[: found.begins]), size)


def check_tensors(
    body: memoryview,
    at: int,
    checked: CheckedHeader,
    names: Sequence[str],
    expected: ExpectedGradient,
) -> CheckedTensors:
    """Check some tensors of a gradient.

    Args:
        body: Bytes of the object that include the tensors.
        at: Offset of these bytes in the object.
        checked: Checked header of the gradient.
        names: Names of the tensors, in their order.
        expected: Conditions that the gradient must meet.
    """
    codec, mask = expected.codec, Mask(expected.run, expected.window)
    tensors: dict[str, tuple[SparseChunks, ...]] = {}
    digests: dict[str, str] = {}
    squares: dict[str, float] = {}
    fault = ""
    for name in names:
        begin, end = checked.spans[name]
        piece = body[begin - at : end - at]
        digests[name] = compute_digest(piece)
        try:
            groups = unpack_tensor(
                piece, expected.shapes[name], codec.select_for_tensor(name), mask=mask
            )
            if codec.is_buffer(name):
                _check_range(name, groups, codec.select_for_tensor(name))
        except CodeError as error:
            fault = fault or f"{name}: {error}"
            continue
        tensors[name] = groups
        if codec.is_buffer(name):  # a buffer is a value, not a change: the norm excludes it
            continue
        each = (kernels.sum_squares(decode_values(sparse, codec).reshape(-1)) for sparse in groups)
        squares[name] = fsum(each)  # `sum` differs between versions of Python
    return CheckedTensors(tensors, digests, squares, fault)


def _check_range(name: str, groups: Sequence[SparseChunks], codec: Codec) -> None:
    """Check the values of a buffer, such as a variance that cannot be negative.

    Raises:
        CodeError: A value is out of the buffer's range.
    """
    least, most = find_buffer_range(name)
    for sparse in groups:
        values = decode_values(sparse, codec)
        if (values < least).any() or (values > most).any():
            raise CodeError(f"A value is not between {least:g} and {most:g}.")


def assemble_gradient(
    checked: CheckedHeader, parts: Sequence[CheckedTensors], expected: ExpectedGradient
) -> CheckedGradient:
    """Return a gradient from its header and its checked tensors.

    Args:
        checked: Checked header of the gradient.
        parts: Results of the checks on all machines, in the order of the tensors' names.
        expected: Conditions that the gradient must meet.

    Raises:
        GradientError: A tensor has a fault, the digests do not match the header, or the norm is too
            large.
    """
    if (
        _digest_tensors(digest for part in parts for digest in part.digests.values())
        != checked.header.body
    ):
        raise GradientError(
            ExclusionReason.DIGEST, "Its bytes are not those that its header names."
        )
    for part in parts:
        if part.fault:
            raise GradientError(ExclusionReason.CODES, part.fault)
    norm = sqrt(fsum(square for part in parts for square in part.squares.values()))
    most = NORM_MOST if expected.max_norm is None else min(expected.max_norm, NORM_MOST)
    if not norm <= most:
        raise GradientError(ExclusionReason.NORM, f"Its norm is {norm:.3g}, more than {most:.3g}.")
    tensors = {name: groups for part in parts for name, groups in part.sparse.items()}
    return CheckedGradient(checked.header, tensors, norm, checked.digest, checked.size)


def _digest_tensors(digests: Iterable[str]) -> str:
    """Return the digest of tensors' digests, in the order of their names."""
    return compute_digest("".join(digests).encode())


def _digest_header(header: GradientHeader) -> str:
    """Return the digest of all other fields of a header."""
    return compute_digest(dump_canonical_json(header.model_dump(mode="json", exclude={"digest"})))


def _compare(header: GradientHeader, expected: ExpectedGradient) -> None:
    if header.digest != _digest_header(header):
        raise GradientError(
            ExclusionReason.DIGEST, "Its header was changed: it does not match its digest."
        )
    shapes = tuple(expected.shapes[name] for name in sorted(expected.shapes))
    for reason, said, wanted in (
        (ExclusionReason.RUN, header.run, expected.run),
        (ExclusionReason.UID, header.uid, expected.uid),
        (ExclusionReason.WINDOW, header.window, expected.window),
        (ExclusionReason.BASE, header.base, expected.base),
        (ExclusionReason.MODEL, header.model, compute_fingerprint(expected.shapes)),
        (ExclusionReason.MODEL, header.shapes, shapes),
        (ExclusionReason.CODEC, header.codec, expected.codec),
    ):
        if said != wanted:
            raise GradientError(reason, f"Its {reason} is not the expected one.")


def _make_header(head: memoryview, size: int, most: int) -> tuple[GradientHeader, ByteTensors]:
    """Return the header, and the spans of the tensors."""
    try:
        found = parse_byte_tensors(head, size, most)
        said = found.metadata[_KEY]
    except PARSE_ERRORS as error:
        sentence = f"It is not a safetensors file of a gradient: {errors.format_error(error)}."
        raise GradientError(ExclusionReason.FORMAT, sentence) from error
    try:
        return GradientHeader.model_validate_json(said, strict=True), found
    except (ValidationError, TypeError) as error:
        raise GradientError(
            ExclusionReason.HEADER, "Its header has no metadata of a gradient."
        ) from error
