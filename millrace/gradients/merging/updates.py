"""Updates: the objects from which the weights after a window follow.

An update is a safetensors file with a tensor of bytes for each tensor of the model. The first byte
names the form of the others:

- 0: the compressed tensors of the merged workers, as in their gradients (see `codec.tensors`), in
  the order of the workers' names;
- 1: the merged values, in little-endian order: the number of values of each chunk (uint16), the
  ascending indices of the values within their chunks (uint16), and the values (float32).

The aggregator stores the gradients, from which workers can be scored. It stores the merged values
of buffers, and of all weights of an object, where these are shorter. So an update is never larger
than the merged gradients together. Readers merge the gradients with the code of the aggregator, and
get the same bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from millrace.gradients.codec.byte_tensors import (
    compute_largest_header,
    count_header_bytes,
    parse_byte_tensors,
)
from millrace.gradients.codec.chunks import Chunks, make_chunks
from millrace.gradients.codec.gradient_object import Shapes
from millrace.gradients.codec.merged_chunks import MergedChunks
from millrace.gradients.codec.shared_indices import Mask
from millrace.gradients.codec.tensors import (
    SparseChunks,
    compute_largest_size,
    map_blocks,
    pack_tensor,
    unpack_tensors,
)
from millrace.gradients.merging.merge import (
    GradientsByWorker,
    MergeRequest,
    have_same_indices,
    merge_tensor,
)
from millrace.schemas.gradient import Codec
from millrace.schemas.merge import COORDINATE_WISE_RULES

_GRADIENTS, _MERGED = b"\x00", b"\x01"
_COUNT, _VALUE = 2, 6  # bytes of the number of values of a chunk; of an index and its value


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor of an update, in one of two forms.

    Attributes:
        gradients: Gradients of the workers by their names; empty in the other form.
        merged: Merged values; empty in the other form.
    """

    gradients: Mapping[str, tuple[SparseChunks, ...]] = field(repr=False)
    merged: tuple[MergedChunks, ...] = field(repr=False)

    def merge(
        self, name: str, request: MergeRequest, *, threads: int = 1
    ) -> tuple[MergedChunks, ...]:
        """Return the merged values.

        Args:
            name: Name of the tensor.
            request: Merge that the tensor belongs to.
            threads: Number of threads.
        """
        if not self.gradients:
            return self.merged
        sent = {worker: {name: groups} for worker, groups in self.gradients.items()}
        return merge_tensor(name, sent, request, threads=threads)


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """Tensor of an update, encoded in both forms.

    Attributes:
        gradients: Bytes of the workers' gradients.
        merged: Bytes of the merged values; empty if they are longer.
        merged_size: Number of these bytes.
    """

    gradients: bytes = field(repr=False)
    merged: bytes = field(repr=False)
    merged_size: int

    @property
    def shortest(self) -> bytes:
        """Bytes of the shorter form."""
        return self.merged or self.gradients


def encode_tensor(
    name: str,
    merged: Sequence[MergedChunks],
    gradients: GradientsByWorker,
    request: MergeRequest,
    *,
    threads: int = 1,
) -> EncodedTensor:
    """Encode a tensor of an update. Equal gradients give equal bytes.

    Args:
        name: Name of the tensor.
        merged: Merged values.
        gradients: Gradients of the workers.
        request: Merge that the tensor belongs to.
        threads: Number of threads.
    """
    codec, workers = request.codec.select_for_tensor(name), request.factors.workers

    def pack_one(rows: slice) -> bytes:
        return pack_tensor(gradients[workers[rows.start]][name], codec)

    packed = b"".join((_GRADIENTS, *map_blocks(pack_one, len(workers), threads, 1)))
    size = 1 + _compute_merged_size(
        sum(len(group.counts) for group in merged), sum(len(group.values) for group in merged)
    )
    if len(packed) <= size:
        return EncodedTensor(packed, b"", size)
    counts = [group.counts.astype("<u2").tobytes() for group in merged]
    indices = [group.indices.astype("<u2").tobytes() for group in merged]
    values = [group.values.astype("<f4").tobytes() for group in merged]
    return EncodedTensor(packed, b"".join((_MERGED, *counts, *indices, *values)), size)


def choose_forms(encoded: Mapping[str, EncodedTensor], codec: Codec) -> dict[str, bytes]:
    """Return the bytes of the tensors of an object, each in the form that is stored.

    Args:
        encoded: Tensors of the object by their names.
        codec: Codec of the gradients.
    """
    weights = [one for name, one in encoded.items() if not codec.is_buffer(name)]
    has_gradients = sum(len(one.gradients) for one in weights) <= sum(
        one.merged_size for one in weights
    )
    return {
        name: one.gradients if has_gradients and not codec.is_buffer(name) else one.shortest
        for name, one in encoded.items()
    }


def compute_largest_update(shapes: Shapes, codec: Codec, workers: int) -> int:
    """Return the largest size in bytes of an update.

    Args:
        shapes: Shapes of the tensors in the update by their names.
        codec: Codec of the workers' gradients.
        workers: Number of workers whose gradients are merged.
    """
    buffers = sent_weights = merged_weights = 0
    for name, shape in shapes.items():
        its = codec.select_for_tensor(name)
        rows = sum(chunks.count for chunks in make_chunks(shape, its))
        sent = workers * compute_largest_size(shape, its)
        merged = _compute_merged_size(rows, prod(shape))
        if codec.is_buffer(name):
            buffers += min(sent, merged)
        else:
            sent_weights, merged_weights = sent_weights + sent, merged_weights + merged
    bodies = len(shapes) + buffers + min(sent_weights, merged_weights)
    return count_header_bytes(compute_largest_header(shapes)) + bodies


def parse_update(
    body: bytes,
    shapes: Shapes,
    request: MergeRequest,
    mask: Mask,
    *,
    names: Sequence[str],
    threads: int = 1,
) -> dict[str, StoredTensor]:
    """Parse some tensors of an update, and check all of their bytes.

    Args:
        body: Bytes of the update.
        shapes: Shapes of all tensors in the update by their names.
        request: Merge that the update belongs to.
        mask: Mask of the window.
        names: Names of the tensors to parse.
        threads: Number of threads.

    Raises:
        CodeError: The bytes of a tensor are not those of gradients.
        Exception: One of `PARSE_ERRORS`, if the bytes have another fault.
    """
    view = memoryview(body)
    spans = parse_byte_tensors(view, len(body), compute_largest_header(shapes)).spans
    if list(spans) != sorted(shapes):
        raise ValueError("it has other tensors than its link")
    return {
        name: _parse_tensor(name, view[slice(*spans[name])], shapes[name], request, mask, threads)
        for name in names
    }


def _compute_merged_size(rows: int, values: int) -> int:
    """Return the number of bytes of the merged values of a tensor."""
    return _COUNT * rows + _VALUE * values


def _parse_tensor(
    name: str,
    piece: memoryview,
    shape: tuple[int, ...],
    request: MergeRequest,
    mask: Mask,
    threads: int,
) -> StoredTensor:
    codec, workers = request.codec.select_for_tensor(name), request.factors.workers
    form, rest = bytes(piece[:1]), piece[1:]
    if form == _MERGED:
        return StoredTensor({}, _parse_merged(rest, make_chunks(shape, codec)))
    if form != _GRADIENTS:
        raise ValueError("a tensor has an unknown form")
    sent = unpack_tensors(rest, len(workers), shape, codec, threads, mask)
    judges = request.settings.rule in COORDINATE_WISE_RULES
    if judges and not all(have_same_indices(groups) for groups in zip(*sent, strict=True)):
        raise ValueError("its workers sent different indices, and its rule needs the same")
    return StoredTensor(dict(zip(workers, sent, strict=True)), ())


def _parse_merged(rest: memoryview, groups: Sequence[Chunks]) -> tuple[MergedChunks, ...]:
    rows = sum(chunks.count for chunks in groups)
    number, left = divmod(len(rest) - _compute_merged_size(rows, 0), _VALUE)
    if number < 0 or left:
        raise ValueError("its values do not fit the tensors")
    counts, indices, values = (
        np.frombuffer(rest, dtype, count, offset).astype(dtype[1:])
        for dtype, count, offset in (
            ("<u2", rows, 0),
            ("<u2", number, _COUNT * rows),
            ("<f4", number, _COUNT * (rows + number)),
        )
    )
    found: list[MergedChunks] = []
    at = row = 0
    for chunks in groups:
        its = counts[row : row + chunks.count]
        size = int(its.sum(dtype=np.int64))
        group = MergedChunks(chunks, its, indices[at : at + size], values[at : at + size])
        _check_group(group, size)
        found.append(group)
        at, row = at + size, row + chunks.count
    if at != number:
        raise ValueError("its values do not fit the tensors")
    return tuple(found)


def _check_group(group: MergedChunks, size: int) -> None:
    if len(group.values) != size:
        raise ValueError("its values do not fit the tensors")
    ascends = np.diff(group.indices.astype(np.int32)) > 0
    begins = np.cumsum(group.counts.astype(np.int64))[:-1]
    ascends[begins[(begins > 0) & (begins < size)] - 1] = True
    beyond, finite = group.indices >= group.chunks.size, np.isfinite(group.values)
    if beyond.any() or not ascends.all() or not finite.all():
        raise ValueError("an index is beyond its chunk or repeated, or a value is not finite")
