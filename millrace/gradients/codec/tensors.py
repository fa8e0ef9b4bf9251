"""A tensor as compressed bytes, and back.

The bytes of each run of equal chunks, little-endian:

- unless all workers send the same places, those: the parameter of the Rice codes, one byte; the
  length of each block's Rice codes, four bytes a block of 256 chunks; the Rice codes of the places,
  block by block, each ending with a byte;
- the values' codes of ``bits`` bits, from the lowest bit of a byte to its highest;
- but for 32 bits, the largest magnitude of each chunk, as bfloat16;
- but for 16 and 32 bits, the smallest over the largest in 255ths, one byte a chunk.

With 32 bits the codes are the values themselves, as float32. A buffer is all of its values so.

Equal values make equal bytes, on every machine, and every value has one way to be written: bytes
that `unpack_tensor` takes are those that `pack_tensor` makes of what it returns.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from millrace import errors
from millrace.gradients.codec import kernels
from millrace.gradients.codec.chunks import Chunks, make_chunks
from millrace.gradients.codec.shared_indices import Mask, Places
from millrace.schemas.gradient import Codec, Support

BLOCK = 256
"""Chunks whose Rice codes have one length, and whose sums are one."""
_RICE_MOST = 12
_U16, _U32 = np.dtype("<u2"), np.dtype("<u4")
_WRONG = {
    kernels.ENDED: "its places end too early",
    kernels.TOO_FAR: "a place is beyond its chunk",
    kernels.LEFT_OVER: "something is left over behind its places",
}

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")


class CodeError(errors.CorruptError):
    """Bytes that are no compressed tensor of this shape."""


@dataclass(frozen=True, slots=True)
class Sparse:
    """The values of a run of equal chunks that were chosen, and where they stand.

    Attributes:
        chunks: The run.
        places: (count, k), uint16, ascending in each chunk.
        high: (count,), uint16: the largest magnitude of each chunk, the bits of a bfloat16; empty
            for 32 bits.
        ratio: (count,), uint8: the smallest over it, in 255ths; empty for 16 and 32 bits.
        codes: (count, k), uint8; uint16 for 16 bits; uint32, the bits of a float32, for 32 bits.
    """

    chunks: Chunks
    places: npt.NDArray[np.uint16]
    high: npt.NDArray[np.uint16]
    ratio: npt.NDArray[np.uint8]
    codes: npt.NDArray[Any]


def select_values(
    values: npt.NDArray[np.float32],
    shape: tuple[int, ...],
    codec: Codec,
    threads: int = 1,
    mask: Mask | None = None,
) -> tuple[Sparse, ...]:
    """Return the values of each chunk that are sent, quantised.

    Args:
        values: Of the tensor, in the order of its chunks, as `transform.forward` returns them.
        shape: Of the tensor.
        codec: How.
        threads: How many work side by side.
        mask: Of the window, if all workers send the same places.

    Raises:
        ConfigurationError: A value is not finite, or the mask is missing.
    """
    return tuple(
        _select_block(values, run, codec, threads, find_shared_indices(run, codec, mask))
        for run in make_chunks(shape, codec)
    )


def decode_values(sparse: Sparse, codec: Codec) -> npt.NDArray[np.float32]:
    """Return the values that codes mean: (count, k), float32."""
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
    runs: tuple[Sparse, ...], codec: Codec, out: npt.NDArray[np.float32], threads: int = 1
) -> None:
    """Fill all values of a tensor in the order of its chunks: those that were sent, and zeros."""
    for run in runs:
        chunks, sent = run.chunks, decode_values(run, codec)
        table = out[chunks.first : chunks.first + chunks.values].reshape(chunks.count, chunks.size)

        def part(rows: slice, run: Sparse = run, sent: Any = sent, table: Any = table) -> None:
            kernels.spread(run.places[rows], sent[rows], table[rows])

        map_blocks(part, chunks.count, threads)


def pack_tensor(runs: tuple[Sparse, ...], codec: Codec) -> bytes:
    """Pack a tensor into bytes."""
    return b"".join(piece for run in runs for piece in _pack_runs(run, codec))


def unpack_tensor(
    body: bytes | memoryview,
    shape: tuple[int, ...],
    codec: Codec,
    threads: int = 1,
    mask: Mask | None = None,
) -> tuple[Sparse, ...]:
    """Unpack the bytes of `pack_tensor`. Everything in them is checked; nothing is assumed.

    Args:
        body: The bytes.
        shape: Of the tensor.
        codec: How it was compressed.
        threads: How many work side by side.
        mask: Of the window, if all workers send the same places.

    Raises:
        CodeError: They are no compressed tensor of this shape.
    """
    rest = np.frombuffer(body, np.uint8)
    found: list[Sparse] = []
    for run in make_chunks(shape, codec):
        sparse, rest = _unpack_run(rest, run, codec, threads, find_shared_indices(run, codec, mask))
        found.append(sparse)
    if rest.size:
        raise CodeError(f"{rest.size:,} bytes are left over.")
    return tuple(found)


def compute_largest_size(shape: tuple[int, ...], codec: Codec) -> int:
    """Bytes that a compressed tensor of a shape has at most."""
    places = codec.support is Support.LARGEST
    return sum(
        places * (1 + 5 * -(-run.count // BLOCK) + -(-run.sent * (_RICE_MOST + 1) // 8))
        + -(-run.sent * codec.bits // 8)
        + (_count_high_bytes(codec) + _count_ratio_bytes(codec)) * run.count
        for run in make_chunks(shape, codec)
    )


def _count_high_bytes(codec: Codec) -> int:
    """Return how many bytes the largest magnitude of a chunk has."""
    return 0 if codec.bits == 32 else 2


def _count_ratio_bytes(codec: Codec) -> int:
    """Return how many bytes the ratio of a chunk's smallest and largest magnitude has."""
    return 0 if codec.bits >= 16 else 1


def find_shared_indices(run: Chunks, codec: Codec, mask: Mask | None) -> Places | None:
    """Return the indices that all workers send of each chunk; None if each sends its own."""
    if codec.support is Support.LARGEST:
        return None
    if run.k == run.size:
        return np.arange(run.size, dtype=np.uint16)
    if mask is None:
        raise errors.ConfigurationError(
            "The places that all workers send are those of a window: say of which (a Mask)."
        )
    return mask.select_indices(run.size, run.k)


def _select_block(
    values: npt.NDArray[np.float32],
    run: Chunks,
    codec: Codec,
    threads: int,
    shared: Places | None,
) -> Sparse:
    table = values[run.first : run.first + run.values].view(np.int32).reshape(run.count, run.size)
    places = np.empty((run.count, run.k), np.uint16)
    picked = np.empty((run.count, run.k), np.int32)

    def part(rows: slice) -> None:
        if shared is None:
            kernels.select(table[rows], run.k, places[rows])
        else:
            places[rows] = shared
        kernels.gather(table[rows], places[rows], picked[rows])
        # What is not finite is the largest; elsewhere it may hide.
        seen = picked[rows] if shared is None else table[rows]
        if not np.isfinite(seen.view(np.float32)).all():
            raise make_not_finite_error()

    map_blocks(part, run.count, threads)
    return quantise_sparse(run, places, picked, codec, threads)


def make_not_finite_error() -> errors.ConfigurationError:
    """Return the error for a gradient that cannot be compressed."""
    return errors.ConfigurationError(
        "A gradient has values that are not finite: leave this step out."
    )


def quantise_sparse(
    run: Chunks,
    places: npt.NDArray[np.uint16],
    picked: npt.NDArray[np.int32],
    codec: Codec,
    threads: int,
) -> Sparse:
    """Values that were chosen, as codes.

    Args:
        run: The chunks.
        places: (count, k): where they stand, ascending in each chunk.
        picked: (count, k): the bits of float32, all finite.
        codec: How.
        threads: How many work side by side.
    """
    if codec.bits == 32:
        none = np.empty(0, np.uint16), np.empty(0, np.uint8)
        return Sparse(run, places, *none, picked.view(np.uint32))
    high = np.empty(run.count, np.uint16)
    half = codec.bits == 16
    ratio = np.empty(0 if half else run.count, np.uint8)
    codes = np.empty((run.count, run.k), np.uint16 if half else np.uint8)

    def part(rows: slice) -> None:
        if half:
            _halve(picked[rows].view(np.float32), high[rows], codes[rows])
        else:
            levels = 1 << (codec.bits - 1)
            kernels.quantise(picked[rows], levels, high[rows], ratio[rows], codes[rows])

    map_blocks(part, run.count, threads)
    return Sparse(run, places, high, ratio, codes)


def _halve(
    values: npt.NDArray[np.float32], high: npt.NDArray[np.uint16], codes: npt.NDArray[Any]
) -> None:
    """Values as float16, over the power of two below the largest of their chunk."""
    top = np.abs(values).max(axis=1).view(np.uint32) & np.uint32(0x7F800000)
    high[:] = (top >> 16).astype(np.uint16)
    scale = top.view(np.float32)
    unit = np.where(scale > 0, scale, np.float32(1))
    codes[:] = (values / unit[:, None]).astype(np.float16).view(np.uint16)


def _find_shortest_code(places: npt.NDArray[np.uint16], chunks: Chunks) -> tuple[int, int]:
    """Return the parameter of the Rice codes that makes them shortest, and their number of bits."""
    counts = np.zeros(chunks.size, np.int64)
    kernels.count_gaps(places, counts)
    gaps = np.arange(chunks.size)
    costs = [
        int(((gaps >> rice) * counts).sum()) + (rice + 1) * chunks.sent
        for rice in range(_RICE_MOST + 1)
    ]
    rice = int(np.argmin(costs))
    return rice, costs[rice]


def _pack_runs(run: Sparse, codec: Codec) -> Iterator[bytes]:
    if codec.support is Support.LARGEST:
        yield from _pack_indices(run)
    yield _pack_codes(run.codes.reshape(-1), codec.bits)
    yield run.high.astype(_U16).tobytes()
    yield run.ratio.tobytes()


def _pack_indices(run: Sparse) -> Iterator[bytes]:
    rice, bits = _find_shortest_code(run.places, run.chunks)
    room = np.empty(bits // 8 + 2 * -(-run.chunks.count // BLOCK), np.uint8)
    lengths: list[int] = []
    at = 0
    for row in range(0, run.chunks.count, BLOCK):
        length = int(kernels.write_gaps(run.places[row : row + BLOCK], rice, room[at:]))
        lengths.append(length)
        at += length
    yield bytes([rice])
    yield np.array(lengths, _U32).tobytes()
    yield room[:at].tobytes()


def _unpack_run(
    rest: Bytes, run: Chunks, codec: Codec, threads: int, shared: Places | None
) -> tuple[Sparse, Bytes]:
    if shared is None:
        places, rest = _unpack_indices(rest, run, threads)
    else:
        places = np.tile(shared, (run.count, 1))
    packed, rest = _take_bytes(rest, -(-run.sent * codec.bits // 8))
    raw, rest = _take_bytes(rest, _count_high_bytes(codec) * run.count)
    high = np.frombuffer(raw.tobytes(), _U16).astype(np.uint16)
    ratio, rest = _take_bytes(rest, _count_ratio_bytes(codec) * run.count)
    if (high > 0x7F7F).any() or (codec.bits == 16 and (high & 0x7F).any()):
        raise CodeError("A magnitude is negative, not finite, or no power of two.")
    codes = _unpack_codes(packed, run.sent, codec.bits).reshape(run.count, run.k)
    return Sparse(run, places, high, ratio.copy(), codes), rest


def _unpack_indices(rest: Bytes, run: Chunks, threads: int) -> tuple[Places, Bytes]:
    blocks = -(-run.count // BLOCK)
    head, rest = _take_bytes(rest, 1)
    rice = int(head[0])
    if rice > _RICE_MOST:
        raise CodeError(f"Its Rice codes have the parameter {rice}; at most {_RICE_MOST} is known.")
    raw, rest = _take_bytes(rest, 4 * blocks)
    lengths = np.frombuffer(raw.tobytes(), _U32).astype(np.int64)
    gaps, rest = _take_bytes(rest, int(lengths.sum()))
    places = np.empty((run.count, run.k), np.uint16)
    ends = np.cumsum(lengths)

    def block(rows: slice) -> None:
        for number in range(rows.start // BLOCK, -(-rows.stop // BLOCK)):
            body = gaps[ends[number] - lengths[number] : ends[number]]
            wrong = kernels.read_gaps(
                body, rice, run.size, places[number * BLOCK : (number + 1) * BLOCK]
            )
            if wrong:
                raise CodeError(f"In block {number:,} {_WRONG[wrong]}.")

    map_blocks(block, run.count, threads)
    if _find_shortest_code(places, run)[0] != rice:
        raise CodeError("Its Rice codes are longer than they need be.")
    return places, rest


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
    for place in range(1, each):
        out |= padded[place::each] << np.uint8(place * bits)
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
    for place in range(each):
        out[place::each] = (packed >> np.uint8(place * bits)) & mask
    if out[count:].any():
        raise CodeError("Something is left over behind its values.")
    return out[:count]


def map_blocks(
    part: Callable[[slice], T], count: int, threads: int, step: int | None = None
) -> list[T]:
    """Do a part for some chunks at a time, on several threads; what each returns, in their order.

    Args:
        part: What to do for some rows.
        count: How many rows there are.
        threads: How many work side by side.
        step: Rows of each part; by default four parts a thread, of whole blocks.
    """
    step = step or -(-count // (4 * threads * BLOCK)) * BLOCK
    rows = [slice(at, min(at + step, count)) for at in range(0, count, step)]
    if threads == 1 or len(rows) == 1:
        return [part(one) for one in rows]
    with ThreadPoolExecutor(threads, thread_name_prefix="codec") as pool:
        return list(pool.map(part, rows))
