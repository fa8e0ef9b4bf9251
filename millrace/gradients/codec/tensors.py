"""Conversion of tensors to compressed bytes and back.

The bytes of each group of equal chunks are, in little-endian order:

- the indices, unless all workers send the same ones: the parameter of the Rice codes in one byte;
  the length of the codes of each block of 256 chunks in four bytes; the codes of each block, padded
  to whole bytes;
- the codes of the values in ``bits`` bits each, from the lowest bit of a byte to its highest;
- the largest magnitude of each chunk as bfloat16, except with 32 bits;
- the smallest magnitude over the largest in 255ths, one byte per chunk, except with 16 and 32 bits.

With 32 bits, the codes are the float32 values. A buffer has all of its values in this form.

Equal values give equal bytes on every machine, and each value has exactly one form. So
`unpack_tensor` accepts only bytes that `pack_tensor` would write.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from millrace import errors
from millrace.gradients.codec import kernels
from millrace.gradients.codec.chunks import Chunks, make_chunks
from millrace.gradients.codec.shared_indices import Indices, Mask
from millrace.schemas.gradient import Codec, Support
from millrace.threads import map_slices

BLOCK = 256
"""Number of chunks of a block, which has one length of Rice codes and one partial sum."""
_RICE_MOST = 12
_U16, _U32 = np.dtype("<u2"), np.dtype("<u4")
_WRONG = {
    kernels.ENDED: "its indices end too early",
    kernels.TOO_FAR: "an index is beyond its chunk",
    kernels.LEFT_OVER: "there are bytes after its indices",
}

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")


class CodeError(errors.CorruptError):
    """Bytes are not a compressed tensor of the expected shape."""


@dataclass(frozen=True, slots=True)
class SparseChunks:
    """Selected values of a group of equal chunks, with their indices.

    Attributes:
        chunks: Group of equal chunks.
        indices: Ascending indices of each chunk: (count, k), uint16.
        high: Largest magnitude of each chunk, as the bits of a bfloat16: (count,), uint16. Empty
            with 32 bits.
        ratio: Smallest magnitude over the largest, in 255ths: (count,), uint8. Empty with 16 and
            32 bits.
        codes: Codes of the values: (count, k). The type is uint8, with 16 bits uint16, and with 32
            bits uint32 (the bits of a float32).
    """

    chunks: Chunks
    indices: npt.NDArray[np.uint16]
    high: npt.NDArray[np.uint16]
    ratio: npt.NDArray[np.uint8]
    codes: npt.NDArray[Any]


def select_values(
    values: npt.NDArray[np.float32],
    shape: tuple[int, ...],
    codec: Codec,
    threads: int = 1,
    mask: Mask | None = None,
) -> tuple[SparseChunks, ...]:
    """Select and quantise the values of each chunk that are sent.

    Args:
        values: Values of the tensor in the order of its chunks, from `transform.forward`.
        shape: Shape of the tensor.
        codec: Settings of the compression.
        threads: Number of threads.
        mask: Mask of the window, if all workers send the same indices.

    Raises:
        ConfigurationError: A value is not finite, or the mask is missing.
    """
    return tuple(
        _select_block(values, chunks, codec, threads, find_shared_indices(chunks, codec, mask))
        for chunks in make_chunks(shape, codec)
    )


def decode_values(sparse: SparseChunks, codec: Codec) -> npt.NDArray[np.float32]:
    """Return the values of the codes: (count, k), float32."""
    if codec.bits == 32:
        return sparse.codes.view(np.float32)
    values = np.empty(sparse.codes.shape, np.float32)
    if codec.bits == 16:
        top = (sparse.high.astype(np.uint32) << 16).view(np.float32)
        np.multiply(sparse.codes.view(np.float16), top[:, None], out=values, dtype=np.float32)
    else:
        levels = 1 << (codec.bits - 1)
        kernels.dequantise(sparse.high, sparse.ratio, sparse.codes, levels, values)
    return values


def fill_dense(
    groups: tuple[SparseChunks, ...], codec: Codec, out: npt.NDArray[np.float32], threads: int = 1
) -> None:
    """Fill a tensor's values in the order of its chunks, with zeros where none was sent."""
    for sparse in groups:
        chunks, sent = sparse.chunks, decode_values(sparse, codec)
        table = out[chunks.first : chunks.first + chunks.values].reshape(chunks.count, chunks.size)

        def fill_rows(
            rows: slice, sparse: SparseChunks = sparse, sent: Any = sent, table: Any = table
        ) -> None:
            kernels.spread(sparse.indices[rows], sent[rows], table[rows])

        map_blocks(fill_rows, chunks.count, threads)


def decode_tensor(
    body: bytes | memoryview,
    shape: tuple[int, ...],
    codec: Codec,
    out: npt.NDArray[np.float32],
    threads: int = 1,
    mask: Mask | None = None,
) -> None:
    """Fill a tensor's values in the order of its chunks from the bytes of `pack_tensor`.

    All bytes are checked as by `unpack_tensor`. With at most 8 bits and own indices of the worker,
    there is one pass without other memory.

    Args:
        body: Bytes of the compressed tensor.
        shape: Shape of the tensor.
        codec: Settings of the compression.
        out: Memory for the values, which is filled. After an error, its values are arbitrary.
        threads: Number of threads.
        mask: Mask of the window, if all workers send the same indices.

    Raises:
        CodeError: The bytes are not a compressed tensor of this shape.
    """
    if codec.support is not Support.LARGEST or codec.bits >= 16:
        fill_dense(unpack_tensor(body, shape, codec, threads, mask), codec, out, threads)
        return
    rest = np.frombuffer(body, np.uint8)
    for chunks in make_chunks(shape, codec):
        rest = _decode_group(rest, chunks, codec, threads, out)
    _check_end(rest)


def pack_tensor(groups: tuple[SparseChunks, ...], codec: Codec, threads: int = 1) -> bytes:
    """Pack a tensor into bytes, on several threads."""
    return b"".join(piece for sparse in groups for piece in _pack_group(sparse, codec, threads))


def unpack_tensor(
    body: bytes | memoryview,
    shape: tuple[int, ...],
    codec: Codec,
    threads: int = 1,
    mask: Mask | None = None,
) -> tuple[SparseChunks, ...]:
    """Unpack the bytes of `pack_tensor`, and check all of them.

    Args:
        body: Bytes of the compressed tensor.
        shape: Shape of the tensor.
        codec: Settings of the compression.
        threads: Number of threads.
        mask: Mask of the window, if all workers send the same indices.

    Raises:
        CodeError: The bytes are not a compressed tensor of this shape.
    """
    return unpack_tensors(body, 1, shape, codec, threads, mask)[0]


def unpack_tensors(
    body: bytes | memoryview,
    count: int,
    shape: tuple[int, ...],
    codec: Codec,
    threads: int = 1,
    mask: Mask | None = None,
) -> list[tuple[SparseChunks, ...]]:
    """Unpack the joined bytes of several results of `pack_tensor`, and check all of them.

    Args:
        body: Bytes of the compressed tensors.
        count: Number of compressed tensors.
        shape: Shape of each tensor.
        codec: Settings of the compression.
        threads: Number of threads.
        mask: Mask of the window, if all workers send the same indices.

    Raises:
        CodeError: The bytes are not so many compressed tensors of this shape.
    """
    rest = np.frombuffer(body, np.uint8)
    groups = make_chunks(shape, codec)
    shared = [find_shared_indices(chunks, codec, mask) for chunks in groups]
    found: list[tuple[SparseChunks, ...]] = []
    for _ in range(count):
        tensor: list[SparseChunks] = []
        for chunks, indices in zip(groups, shared, strict=True):
            sparse, rest = _unpack_group(rest, chunks, codec, threads, indices)
            tensor.append(sparse)
        found.append(tuple(tensor))
    _check_end(rest)
    return found


def compute_largest_size(shape: tuple[int, ...], codec: Codec) -> int:
    """Return the largest number of bytes of a compressed tensor of a shape."""
    indices = codec.support is Support.LARGEST
    return sum(
        indices * (1 + 5 * -(-chunks.count // BLOCK) + -(-chunks.sent * (_RICE_MOST + 1) // 8))
        + -(-chunks.sent * codec.bits // 8)
        + (_count_high_bytes(codec) + _count_ratio_bytes(codec)) * chunks.count
        for chunks in make_chunks(shape, codec)
    )


def _count_high_bytes(codec: Codec) -> int:
    """Return the number of bytes for the largest magnitude of a chunk."""
    return 0 if codec.bits == 32 else 2


def _count_ratio_bytes(codec: Codec) -> int:
    """Return the number of bytes for the ratio of a chunk's smallest and largest magnitude."""
    return 0 if codec.bits >= 16 else 1


def find_shared_indices(chunks: Chunks, codec: Codec, mask: Mask | None) -> Indices | None:
    """Return the indices that all workers send of each chunk; None if workers select their own."""
    if codec.support is Support.LARGEST:
        return None
    if chunks.k == chunks.size:
        return np.arange(chunks.size, dtype=np.uint16)
    if mask is None:
        raise errors.ConfigurationError(
            "The indices that all workers send depend on the window: give its Mask."
        )
    return mask.select_indices(chunks.size, chunks.k)


def _select_block(
    values: npt.NDArray[np.float32],
    chunks: Chunks,
    codec: Codec,
    threads: int,
    shared: Indices | None,
) -> SparseChunks:
    table = values[chunks.first : chunks.first + chunks.values].view(np.int32)
    table = table.reshape(chunks.count, chunks.size)
    indices = np.empty((chunks.count, chunks.k), np.uint16)
    picked = np.empty((chunks.count, chunks.k), np.int32)

    def process_rows(rows: slice) -> None:
        if shared is None:
            kernels.select(table[rows], chunks.k, indices[rows])
        else:
            indices[rows] = shared
        kernels.pick_values(table[rows], indices[rows], picked[rows])
        # Values that are not finite have the largest magnitudes. With shared indices, all values
        # must be checked.
        seen = picked[rows] if shared is None else table[rows]
        if not np.isfinite(seen.view(np.float32)).all():
            raise make_not_finite_error()

    map_blocks(process_rows, chunks.count, threads)
    return quantise_sparse(chunks, indices, picked, codec, threads)


def make_not_finite_error() -> errors.ConfigurationError:
    """Return the error for a gradient that cannot be compressed."""
    return errors.ConfigurationError(
        "A gradient has values that are not finite: leave this step out."
    )


def quantise_sparse(
    chunks: Chunks,
    indices: npt.NDArray[np.uint16],
    picked: npt.NDArray[np.int32],
    codec: Codec,
    threads: int,
) -> SparseChunks:
    """Quantise selected values.

    Args:
        chunks: Group of equal chunks.
        indices: Ascending indices of each chunk: (count, k).
        picked: Bits of the finite float32 values: (count, k).
        codec: Settings of the compression.
        threads: Number of threads.
    """
    if codec.bits == 32:
        none = np.empty(0, np.uint16), np.empty(0, np.uint8)
        return SparseChunks(chunks, indices, *none, picked.view(np.uint32))
    high = np.empty(chunks.count, np.uint16)
    half = codec.bits == 16
    ratio = np.empty(0 if half else chunks.count, np.uint8)
    codes = np.empty((chunks.count, chunks.k), np.uint16 if half else np.uint8)

    def process_rows(rows: slice) -> None:
        if half:
            _halve(picked[rows].view(np.float32), high[rows], codes[rows])
        else:
            levels = 1 << (codec.bits - 1)
            kernels.quantise(picked[rows], levels, high[rows], ratio[rows], codes[rows])

    map_blocks(process_rows, chunks.count, threads)
    return SparseChunks(chunks, indices, high, ratio, codes)


def _halve(
    values: npt.NDArray[np.float32], high: npt.NDArray[np.uint16], codes: npt.NDArray[Any]
) -> None:
    """Write values as float16, divided by a power of two just below the largest of their chunk."""
    top = np.abs(values).max(axis=1).view(np.uint32) & np.uint32(0x7F800000)
    high[:] = (top >> 16).astype(np.uint16)
    scale = top.view(np.float32)
    unit = np.where(scale > 0, scale, np.float32(1))
    codes[:] = (values / unit[:, None]).astype(np.float16).view(np.uint16)


def _find_shortest_code(counts: npt.NDArray[np.int64], sent: int) -> int:
    """Return the parameter of the shortest Rice codes.

    Args:
        counts: Number of each distance between two indices.
        sent: Number of the indices.
    """
    gaps = np.arange(counts.size)
    costs = [
        int(((gaps >> rice) * counts).sum()) + (rice + 1) * sent for rice in range(_RICE_MOST + 1)
    ]
    return int(np.argmin(costs))


def _count_gaps(indices: Indices, chunks: Chunks) -> npt.NDArray[np.int64]:
    """Return the number of each distance between two indices."""
    counts = np.zeros(chunks.size, np.int64)
    kernels.count_gaps(indices, counts)
    return counts


def _pack_group(sparse: SparseChunks, codec: Codec, threads: int) -> Iterator[bytes]:
    if codec.support is Support.LARGEST:
        yield from _pack_indices(sparse, threads)
    yield _pack_codes(sparse.codes.reshape(-1), codec.bits)
    yield sparse.high.astype(_U16).tobytes()
    yield sparse.ratio.tobytes()


def _pack_indices(sparse: SparseChunks, threads: int) -> Iterator[bytes]:
    chunks = sparse.chunks
    rice = _find_shortest_code(_count_gaps(sparse.indices, chunks), chunks.sent)
    longest = chunks.k * (rice + 1) + (chunks.size >> rice)  # bits of a chunk

    def pack_block(rows: slice) -> bytes:
        room = np.empty((rows.stop - rows.start) * longest // 8 + 2, np.uint8)
        return room[: kernels.write_gaps(sparse.indices[rows], rice, room)].tobytes()

    blocks = map_blocks(pack_block, chunks.count, threads, BLOCK)
    yield bytes([rice])
    yield np.array(list(map(len, blocks)), _U32).tobytes()
    yield from blocks


def _unpack_group(
    rest: Bytes, chunks: Chunks, codec: Codec, threads: int, shared: Indices | None
) -> tuple[SparseChunks, Bytes]:
    if shared is None:
        indices, rest = _unpack_indices(rest, chunks, threads)
        packed, rest = _take_values(rest, chunks, codec)
    else:
        packed, rest = _take_values(rest, chunks, codec)  # before memory for all indices
        indices = np.tile(shared, (chunks.count, 1))
    codes = _unpack_codes(packed.codes, chunks.sent, codec.bits).reshape(chunks.count, chunks.k)
    return SparseChunks(chunks, indices, packed.high, packed.ratio.copy(), codes), rest


@dataclass(frozen=True, slots=True)
class _PackedValues:
    """Packed values of a group of chunks: see `SparseChunks`, but with packed codes."""

    high: npt.NDArray[np.uint16]
    ratio: npt.NDArray[np.uint8]
    codes: Bytes


def _take_values(rest: Bytes, chunks: Chunks, codec: Codec) -> tuple[_PackedValues, Bytes]:
    """Return the packed values at the begin of some bytes, and the other bytes."""
    codes, rest = _take_bytes(rest, -(-chunks.sent * codec.bits // 8))
    raw, rest = _take_bytes(rest, _count_high_bytes(codec) * chunks.count)
    high = np.frombuffer(raw.tobytes(), _U16).astype(np.uint16)
    ratio, rest = _take_bytes(rest, _count_ratio_bytes(codec) * chunks.count)
    if (high > 0x7F7F).any() or (codec.bits == 16 and (high & 0x7F).any()):
        raise CodeError("A magnitude is negative, not finite, or no power of two.")
    used = chunks.sent * codec.bits % 8  # bits of the last byte
    if used and codes[-1] >> np.uint8(used):
        raise CodeError("There are bytes after its values.")
    return _PackedValues(high, ratio, codes), rest


@dataclass(frozen=True, slots=True)
class _PackedIndices:
    """Packed indices of a group of chunks.

    Attributes:
        rice: Parameter of the Rice codes.
        gaps: Codes of all blocks.
        ends: Index of the byte after the codes of each block; before the first one, 0.
    """

    rice: int
    gaps: Bytes
    ends: npt.NDArray[np.int64]

    def get_block(self, number: int) -> Bytes:
        """Return the codes of a block."""
        return self.gaps[self.ends[number] : self.ends[number + 1]]


def _take_indices(rest: Bytes, chunks: Chunks) -> tuple[_PackedIndices, Bytes]:
    """Return the packed indices at the begin of some bytes, and the other bytes."""
    blocks = -(-chunks.count // BLOCK)
    head, rest = _take_bytes(rest, 1)
    rice = int(head[0])
    if rice > _RICE_MOST:
        raise CodeError(f"Its Rice codes have the parameter {rice}; at most {_RICE_MOST} is known.")
    raw, rest = _take_bytes(rest, 4 * blocks)
    ends = np.zeros(blocks + 1, np.int64)
    np.cumsum(np.frombuffer(raw.tobytes(), _U32), out=ends[1:])
    gaps, rest = _take_bytes(rest, int(ends[-1]))
    if 8 * gaps.size < (rice + 1) * chunks.sent:  # before there is memory for all indices
        raise CodeError("Its indices end too early.")
    return _PackedIndices(rice, gaps, ends), rest


def _unpack_indices(rest: Bytes, chunks: Chunks, threads: int) -> tuple[Indices, Bytes]:
    packed, rest = _take_indices(rest, chunks)
    indices = np.empty((chunks.count, chunks.k), np.uint16)

    def process_rows(rows: slice) -> None:
        for number in range(rows.start // BLOCK, -(-rows.stop // BLOCK)):
            some = indices[number * BLOCK : (number + 1) * BLOCK]
            _raise_fault(
                number, kernels.read_gaps(packed.get_block(number), packed.rice, chunks.size, some)
            )

    map_blocks(process_rows, chunks.count, threads)
    _check_shortest(packed.rice, _count_gaps(indices, chunks), chunks)
    return indices, rest


def _decode_group(
    rest: Bytes, chunks: Chunks, codec: Codec, threads: int, out: npt.NDArray[np.float32]
) -> Bytes:
    """Fill the values of a group of chunks from its bytes, and return the other bytes."""
    packed, rest = _take_indices(rest, chunks)
    values, rest = _take_values(rest, chunks, codec)
    table = out[chunks.first : chunks.first + chunks.values].reshape(chunks.count, chunks.size)

    def process_rows(rows: slice) -> npt.NDArray[np.int64]:
        counts = np.zeros(chunks.size, np.int64)
        for number in range(rows.start // BLOCK, -(-rows.stop // BLOCK)):
            first, last = number * BLOCK, (number + 1) * BLOCK
            _raise_fault(
                number,
                kernels.decode_chunks(
                    packed.get_block(number),
                    packed.rice,
                    values.codes,
                    codec.bits,
                    first * chunks.k,
                    values.high[first:last],
                    values.ratio[first:last],
                    chunks.k,
                    counts,
                    table[first:last],
                ),
            )
        return counts

    counts = np.sum(map_blocks(process_rows, chunks.count, threads), axis=0)
    _check_shortest(packed.rice, counts, chunks)
    return rest


def _raise_fault(block: int, fault: int) -> None:
    if fault:
        raise CodeError(f"In block {block:,} {_WRONG[fault]}.")


def _check_shortest(rice: int, counts: npt.NDArray[np.int64], chunks: Chunks) -> None:
    if _find_shortest_code(counts, chunks.sent) != rice:
        raise CodeError("Its Rice codes are longer than necessary.")


def _check_end(rest: Bytes) -> None:
    if rest.size:
        raise CodeError(f"{rest.size:,} bytes are left over.")


def _take_bytes(rest: Bytes, count: int) -> tuple[Bytes, Bytes]:
    if count > rest.size:
        raise CodeError("It ends too early.")
    return rest[:count], rest[count:]


def _pack_codes(codes: npt.NDArray[Any], bits: int) -> bytes:
    if bits >= 16:
        return codes.astype(_U16 if bits == 16 else _U32).tobytes()
    each = 8 // bits
    padded = np.zeros(-(-codes.size // each) * each, np.uint8)
    padded[: codes.size] = codes
    out = padded[::each].copy()
    for index in range(1, each):
        out |= padded[index::each] << np.uint8(index * bits)
    return out.tobytes()


def _unpack_codes(packed: Bytes, count: int, bits: int) -> npt.NDArray[Any]:
    if bits == 16:
        codes = np.frombuffer(packed.tobytes(), _U16).astype(np.uint16)
        if not (np.abs(codes.view(np.float16)) <= 2.0).all():
            raise CodeError("A value is not finite, or more than its chunk's largest.")
        return codes
    if bits == 32:
        codes = np.frombuffer(packed.tobytes(), _U32).astype(np.uint32)
        if not np.isfinite(codes.view(np.float32)).all():
            raise CodeError("A value is not finite.")
        return codes
    each, mask = 8 // bits, np.uint8((1 << bits) - 1)
    out = np.empty(packed.size * each, np.uint8)
    for index in range(each):
        out[index::each] = (packed >> np.uint8(index * bits)) & mask
    return out[:count]


def map_blocks(
    function: Callable[[slice], T], count: int, threads: int, step: int | None = None
) -> list[T]:
    """Call a function for blocks of rows on several threads, and return the results in order.

    Args:
        function: Function to call with a slice of rows.
        count: Number of rows.
        threads: Number of threads.
        step: Number of rows per call; by default four calls per thread, of whole blocks.
    """
    step = step or -(-count // (4 * threads * BLOCK)) * BLOCK
    return map_slices(function, count, step=step, threads=threads)
