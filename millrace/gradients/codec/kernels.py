"""Compiled inner loops of the codec, for all values of a chunk.

The loops release the interpreter's lock, so threads run them in parallel on blocks of chunks.
Magnitudes are compared and summed as integers, so every machine gets the same bytes. (The bits of a
float32 without its sign are in the order of the magnitude.)
"""

from typing import Any, cast

import numpy as np
from llvmlite import ir  # pyright: ignore[reportMissingTypeStubs]
from numba import njit, types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from millrace.gradients.codec.compiling import compile_once

_MAGNITUDE = np.int32(0x7FFFFFFF)
_MANTISSA = np.int32(0x007FFFFF)
_HIDDEN = np.int32(0x00800000)
_STEP, _BELOW = np.int32(1 << 20), np.int32(1 << 23)  # an eighth of an exponent, and a whole one
_ONES = np.array([(~byte & (byte + 1)).bit_length() - 1 for byte in range(256)], np.uint8)
_LANES = 16  # values of a streaming store, which is aligned to its size: a line of the cache
_LLOYD = 16  # steps: more than the border needs to settle

_intrinsic: Any = intrinsic
_make_proxy = cast("Any", cgutils).create_struct_proxy

# Faults of encoded bytes; 0 means no fault.
ENDED, TOO_FAR, LEFT_OVER = 1, 2, 3


@njit(nogil=True, inline="always")
def _count_above(bits: Any, size: int, threshold: Any) -> Any:
    count = np.int32(0)  # as wide as the bits, so that the loop is vectorised
    for i in range(size):
        count += np.int32(bits[i] > threshold)
    return count


@compile_once
def select(chunks: Any, k: int, out: Any) -> None:  # noqa: C901, PLR0912 - one loop, compiled
    """Find the indices of the ``k`` largest magnitudes of each chunk, in ascending order.

    Of equal magnitudes, the first ones are selected.

    Args:
        chunks: Bits of float32 values: (chunks, size), int32.
        k: Number of values to select; at most ``size``.
        out: Memory for the indices, which is filled: (chunks, k), uint16.
    """
    rows, size = chunks.shape
    bits = np.empty(size, np.int32)
    near = np.empty(size, np.int32)
    indices = np.empty(size, np.uint16)
    guess = np.int32(0)
    for row in range(rows):
        highest = np.int32(0)
        for i in range(size):
            bits[i] = chunks[row, i] & _MAGNITUDE
            highest = max(highest, bits[i])
        # Find a threshold with k to 2 k values above it, by counts: a loop without a branch, with
        # the chunk in the first cache. The search begins at the threshold of the previous chunk,
        # makes growing steps until it has two bounds, and then halves their distance. The selected
        # values do not depend on the threshold.
        low, high, above, step = np.int32(-1), highest, size, _STEP
        threshold = min(guess, highest - 1) if size > 2 * k else low
        while threshold > low:
            count = _count_above(bits, size, threshold)
            if count >= k:
                low, above = threshold, count
            else:
                high = threshold
            if low < 0:
                threshold = max(high - step, low)
            elif above <= 2 * k:
                break
            else:
                threshold = low + min(step, (high - low) // 2)
            step = min(2 * step, _BELOW)
        guess = max(low, 0)
        found = 0
        for i in range(size):
            if bits[i] > low:
                near[found] = bits[i]
                indices[found] = i
                found += 1
        # Find the k-th largest value by bisection: k values are not smaller, fewer are larger.
        while high - low > 1:
            threshold = low + (high - low) // 2
            if _count_above(near, found, threshold) >= k:
                low = threshold
            else:
                high = threshold
        least = high
        ties = k - _count_above(near, found, least)
        taken = 0
        for i in range(found):
            if near[i] > least or (near[i] == least and ties > 0):
                ties -= near[i] == least
                out[row, taken] = indices[i]
                taken += 1


@compile_once
def pick_values(chunks: Any, indices: Any, out: Any) -> None:
    """Copy the values at some indices of each chunk to ``out``: (chunks, k)."""
    for row in range(indices.shape[0]):
        for j in range(indices.shape[1]):
            out[row, j] = chunks[row, indices[row, j]]


@compile_once
def subtract(chunks: Any, indices: Any, values: Any) -> None:
    """Subtract values at some indices of each chunk."""
    for row in range(indices.shape[0]):
        for j in range(indices.shape[1]):
            chunks[row, indices[row, j]] -= values[row, j]


@compile_once
def spread(indices: Any, values: Any, out: Any) -> None:
    """Fill ``out`` with zeros, and with values at some indices of each chunk: (chunks, size)."""
    out[:, :] = 0.0
    for row in range(indices.shape[0]):
        for j in range(indices.shape[1]):
            out[row, indices[row, j]] = values[row, j]


@njit(nogil=True, inline="always")
def _round_to_bfloat16(bits: Any) -> Any:
    """Round a float32 to the nearest bfloat16, ties to even. Both are given by their bits."""
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> 16)


@njit(nogil=True, inline="always")
def _compute_level(high: Any, ratio: Any, code: Any, most: Any) -> Any:
    """Return the magnitude of a code, in equal steps from ``high * ratio / 255`` to ``high``."""
    low = high * (ratio / 255.0)
    return low + (high - low) * (code / most)


@compile_once
def _fit_two_levels(bits: Any, sizes: Any) -> tuple[Any, Any]:
    """Return the two magnitudes that represent those of a chunk with least squares (Lloyd 1982).

    The border between the two groups begins at the mean. Each step moves it to the middle of the
    means of the two groups. The sums are of integers, in units of the last bit of the largest
    magnitude.
    """
    k = bits.size
    exponent = np.int32(1)
    for j in range(k):
        exponent = max(exponent, (bits[j] & _MAGNITUDE) >> np.int32(23))
    total = np.int64(0)
    for j in range(k):
        magnitude = bits[j] & _MAGNITUDE
        its = magnitude >> np.int32(23)
        size = np.int64(magnitude & _MANTISSA)
        if its > 0:
            size |= np.int64(_HIDDEN)
        sizes[j] = size >> np.int64(min(exponent - max(its, np.int32(1)), np.int32(40)))
        total += sizes[j]
    unit = 2.0 ** np.float64(exponent - 150)
    border = high = low = np.float64(total) / k
    for _ in range(_LLOYD):
        upper, count = np.int64(0), np.int64(0)
        for j in range(k):
            if np.float64(sizes[j]) > border:
                upper += sizes[j]
                count += 1
        if count == 0:  # all magnitudes are equal
            break
        high, low = np.float64(upper) / count, np.float64(total - upper) / (k - count)
        if (high + low) / 2.0 == border:
            break
        border = (high + low) / 2.0
    return high * unit, low * unit


@compile_once
def quantise(values: Any, levels: int, high: Any, ratio: Any, codes: Any) -> None:
    """Replace each value by its sign and the nearest of some magnitudes (levels) of its chunk.

    Args:
        values: Bits of finite float32 values: (chunks, k), int32.
        levels: Number of levels. Two levels are those of `_fit_two_levels`. More have equal steps
            from the smallest to the largest magnitude.
        high: Memory for the largest level of each chunk, as bfloat16: (chunks,), uint16.
        ratio: Memory for the smallest level over the largest, in 255ths: (chunks,), uint8.
        codes: Memory for the codes: (chunks, k), uint8. A code has the number of the level in its
            lower bits and the sign above.
    """
    rows, k = values.shape
    sizes = np.empty(k, np.int64)
    word = np.empty(1, np.uint32)
    most = levels - 1
    for row in range(rows):
        if levels == 2:
            upper, lower = _fit_two_levels(values[row], sizes)
        else:
            word[0] = 0
            least = _MAGNITUDE
            for j in range(k):
                word[0] = max(word[0], np.uint32(values[row, j] & _MAGNITUDE))
                least = min(least, values[row, j] & _MAGNITUDE)
            upper = np.float64(word.view(np.float32)[0])
            word[0] = least
            lower = np.float64(word.view(np.float32)[0])
        word.view(np.float32)[0] = upper
        high[row] = min(_round_to_bfloat16(word[0]), np.uint16(0x7F7F))  # the largest finite value
        word[0] = np.uint32(high[row]) << np.uint32(16)
        top = np.float64(word.view(np.float32)[0])
        ratio[row] = np.uint8(min(255.0, np.floor(lower / top * 255.0 + 0.5)) if top > 0 else 0.0)
        low = _compute_level(top, np.float64(ratio[row]), 0.0, 1.0)
        step = (top - low) / most
        for j in range(k):
            word[0] = np.uint32(values[row, j] & _MAGNITUDE)
            size = np.float64(word.view(np.float32)[0])
            code = np.floor((size - low) / step + 0.5) if step > 0 else 0.0
            code = min(max(code, 0.0), np.float64(most))
            sign = levels if values[row, j] < 0 else 0
            codes[row, j] = np.uint8(code) + np.uint8(sign)


@njit(nogil=True, forceinline=True)
def _fill_levels(high: Any, ratio: Any, levels: int, word: Any, table: Any) -> None:
    """Fill a table with the float32 value of each code of a chunk.

    Args:
        high: Largest level of the chunk, as the bits of a bfloat16.
        ratio: Smallest level over the largest, in 255ths.
        levels: Number of levels.
        word: Memory for one value: (1,), uint32.
        table: Memory for the values: (2 * levels,), float32.
    """
    word[0] = np.uint32(high) << np.uint32(16)
    top = np.float64(word.view(np.float32)[0])
    most = np.float64(levels - 1)
    for code in range(levels):
        level = np.float32(_compute_level(top, np.float64(ratio), np.float64(code), most))
        table[code] = level
        table[levels + code] = -level


@compile_once
def dequantise(high: Any, ratio: Any, codes: Any, levels: int, values: Any) -> None:
    """Fill ``values`` with the float32 values of codes: (chunks, k)."""
    rows, k = codes.shape
    word = np.empty(1, np.uint32)
    table = np.empty(2 * levels, np.float32)
    for row in range(rows):
        _fill_levels(high[row], ratio[row], levels, word, table)
        for j in range(k):
            values[row, j] = table[codes[row, j]]


@compile_once
def count_gaps(indices: Any, counts: Any) -> None:
    """Add the number of each distance between two indices of a chunk to ``counts``."""
    for row in range(indices.shape[0]):
        before = -1
        for j in range(indices.shape[1]):
            index = np.int64(indices[row, j])
            counts[index - before - 1] += 1
            before = index


@compile_once
def write_gaps(indices: Any, rice: int, out: Any) -> int:
    """Write the distances between indices as Rice codes, and return the number of bytes.

    A code has the distance over ``2 ** rice`` as a number of ones and a zero, then the remainder in
    ``rice`` bits. Bits begin with the lowest of a byte.

    Source: Rice and Plaunt 1971.

    Args:
        indices: Ascending indices of each chunk: (chunks, k), uint16.
        rice: Parameter of the codes, from 0 to 12.
        out: Memory for the codes, long enough: uint8.
    """
    waiting, held, at = np.uint64(0), np.uint64(0), 0
    one = np.uint64(1)
    width = np.uint64(rice)
    mask = (one << width) - one
    for row in range(indices.shape[0]):
        before = -1
        for j in range(indices.shape[1]):
            index = np.int64(indices[row, j])
            gap = np.uint64(index - before - 1)
            before = index
            ones = gap >> width
            while ones >= np.uint64(16):
                waiting |= np.uint64(0xFFFF) << held
                held += np.uint64(16)
                ones -= np.uint64(16)
                while held >= np.uint64(8):
                    out[at] = np.uint8(waiting & np.uint64(0xFF))
                    at += 1
                    waiting >>= np.uint64(8)
                    held -= np.uint64(8)
            waiting |= ((one << ones) - one) << held
            held += ones + one
            waiting |= (gap & mask) << held
            held += width
            while held >= np.uint64(8):
                out[at] = np.uint8(waiting & np.uint64(0xFF))
                at += 1
                waiting >>= np.uint64(8)
                held -= np.uint64(8)
    if held > np.uint64(0):
        out[at] = np.uint8(waiting & np.uint64(0xFF))
        at += 1
    return at


@njit(nogil=True, forceinline=True)
def _read_gap(body: Any, width: Any, size: int, waiting: Any, held: Any, at: int) -> Any:
    """Read one code of `write_gaps`.

    Args:
        body: Bytes of the codes: uint8.
        width: Parameter of the codes: uint64.
        size: Number of values of a chunk.
        waiting: Bits that were taken from the bytes and not read: uint64.
        held: Number of these bits: uint64.
        at: Index of the next byte.

    Returns:
        Distance, or a fault as a negative number; then the three positions after it.
    """
    one = np.uint64(1)
    ones = np.int64(0)
    while True:
        while held <= np.uint64(48) and at < body.size:
            waiting |= np.uint64(body[at]) << held
            held += np.uint64(8)
            at += 1
        if held == np.uint64(0):
            return np.int64(-ENDED), waiting, held, at
        run = np.uint64(_ONES[waiting & np.uint64(0xFF)])
        ones += np.int64(run)
        if ones > size:
            return np.int64(-TOO_FAR), waiting, held, at
        if run < held and run < np.uint64(8):  # the run of ones ends with a zero
            waiting >>= run + one
            held -= run + one
            break
        waiting >>= run
        held -= run
    if held < width:
        while held <= np.uint64(48) and at < body.size:
            waiting |= np.uint64(body[at]) << held
            held += np.uint64(8)
            at += 1
        if held < width:
            return np.int64(-ENDED), waiting, held, at
    rest = np.int64(waiting & ((one << width) - one))
    return (ones << np.int64(width)) + rest, waiting >> width, held - width, at


@_intrinsic
def _stream_line(_typing: Any, target: Any, index: Any, source: Any, first: Any) -> Any:
    """Copy 16 values to aligned memory, past the cache.

    A usual store first reads the line that it overwrites, so this one takes half of the traffic.

    Args:
        target: Aligned array, contiguous: float32.
        index: Index of the first copy in the flat target, a multiple of 16.
        source: Contiguous vector: float32.
        first: Index of the first value in the vector, at which its memory is aligned.
    """
    if target.layout != "C" or source.layout != "C":
        raise TypingError("Lines are copied between contiguous arrays.")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.FloatType(), _LANES).as_pointer()

        def find_line(number: int) -> Any:
            array = _make_proxy(signature.args[number])
            begin = array(context, builder, arguments[number]).data
            return builder.bitcast(builder.gep(begin, [arguments[number + 1]]), line)

        values = builder.load(find_line(2), align=4 * _LANES)
        store = builder.store(values, find_line(0), align=4 * _LANES)
        one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        store.set_metadata("nontemporal", one)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp), generate


@_intrinsic
def _finish_streams(_typing: Any) -> Any:
    """Wait until other threads see all lines of `_stream_line`."""

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@njit(nogil=True, forceinline=True)
def _has_left_over(body: Any, waiting: Any, held: Any, at: int) -> bool:
    """Decide whether bits of the codes are left over after the last distance."""
    return at < body.size or held >= np.uint64(8) or waiting != np.uint64(0)


@compile_once
def read_gaps(body: Any, rice: int, size: int, indices: Any) -> int:
    """Read all codes of `write_gaps`, and return a fault or 0.

    Args:
        body: Bytes of the codes, without other bytes: uint8.
        rice: Parameter of the codes.
        size: Number of values of a chunk, which is above every index.
        indices: Memory for the indices, which is filled: (chunks, k), uint16.
    """
    waiting, held, at, width = np.uint64(0), np.uint64(0), 0, np.uint64(rice)
    for row in range(indices.shape[0]):
        index = np.int64(-1)
        for j in range(indices.shape[1]):
            gap, waiting, held, at = _read_gap(body, width, size, waiting, held, at)
            if gap < 0:
                return -gap
            index += 1 + gap
            if index >= size:
                return TOO_FAR
            indices[row, j] = index
    return LEFT_OVER if _has_left_over(body, waiting, held, at) else 0


@compile_once
def decode_chunks(
    body: Any,
    rice: int,
    packed: Any,
    bits: int,
    first: int,
    high: Any,
    ratio: Any,
    k: int,
    counts: Any,
    out: Any,
) -> int:
    """Read the indices and the values of chunks, and fill the chunks in the same pass.

    Args:
        body: Bytes of the indices' codes from `write_gaps`, without other bytes: uint8.
        rice: Parameter of these codes.
        packed: Packed codes of the values, long enough: uint8.
        bits: Bits of such a code: 2, 4 or 8.
        first: Number of the codes in ``packed`` before those of the first chunk.
        high: Largest level of each chunk, as for `quantise`.
        ratio: Smallest level over the largest, as for `quantise`.
        k: Number of values of each chunk.
        counts: Number of each distance between two indices, which is added to: (size,), int64.
        out: Memory for the chunks, which is filled: (chunks, size), float32.

    Returns:
        A fault or 0. After a fault, ``out`` has arbitrary values.
    """
    rows, size = out.shape
    waiting, held, at, width = np.uint64(0), np.uint64(0), 0, np.uint64(rice)
    levels = 1 << (bits - 1)
    mask = np.int64((1 << bits) - 1)
    word = np.empty(1, np.uint32)
    table = np.empty(2 * levels, np.float32)
    bit = np.int64(first) * bits
    # A chunk is filled in the first cache, then copied, and is all zeros again.
    chunk = np.zeros(size + _LANES, np.float32)
    start = (-chunk.ctypes.data // 4) % _LANES
    taken = np.empty(k, np.uint16)
    is_aligned = size % _LANES == 0 and out.ctypes.data % (4 * _LANES) == 0
    for row in range(rows):
        _fill_levels(high[row], ratio[row], levels, word, table)
        index = np.int64(-1)
        for j in range(k):
            gap, waiting, held, at = _read_gap(body, width, size, waiting, held, at)
            if gap < 0:
                return -gap
            index += 1 + gap
            if index >= size:
                return TOO_FAR
            counts[gap] += 1
            taken[j] = index
            chunk[start + index] = table[(np.int64(packed[bit >> 3]) >> (bit & 7)) & mask]
            bit += bits
        if is_aligned:
            for i in range(0, size, _LANES):
                _stream_line(out, row * size + i, chunk, start + i)
        else:
            out[row, :] = chunk[start : start + size]
        for j in range(k):
            chunk[start + taken[j]] = 0.0
    _finish_streams()
    return LEFT_OVER if _has_left_over(body, waiting, held, at) else 0


@compile_once
def sum_squares(values: Any) -> float:
    """Return the sum of squares of values, in one order on all machines."""
    total = 0.0
    for value in values:
        total += np.float64(value) * np.float64(value)
    return total


@compile_once
def compute_inner_products(indices: Any, values: Any, size: int, out: Any) -> None:
    """Add the inner product of every two senders to the lower triangle of a matrix.

    Args:
        indices: Indices of the sent values: (senders, chunks, k), uint16.
        values: Sent values: (senders, chunks, k), float32.
        size: Number of values of a chunk.
        out: Matrix to add to: (senders, senders), float64.
    """
    senders, rows, k = indices.shape
    row_of = np.zeros(size, np.float64)
    for row in range(rows):
        for one in range(senders):
            for j in range(k):
                row_of[indices[one, row, j]] = values[one, row, j]
            for other in range(one + 1):
                total = 0.0
                for j in range(k):
                    total += row_of[indices[other, row, j]] * np.float64(values[other, row, j])
                out[one, other] += total
            for j in range(k):
                row_of[indices[one, row, j]] = 0.0


@compile_once
def compute_weighted_sums(
    indices: Any,
    values: Any,
    weights: Any,
    size: int,
    by_senders: bool,  # noqa: FBT001 - compiled functions have no keyword-only arguments
    counts: Any,
    out: Any,
) -> int:
    """Add the weighted values of all senders at each index, in the order of the senders.

    Args:
        indices: Indices of the sent values: (senders, chunks, k), uint16.
        values: Sent values: (senders, chunks, k), float32.
        weights: Weights of the senders: (senders,), float64.
        size: Number of values of a chunk.
        by_senders: Whether to divide each sum by the number of senders of its index.
        counts: Memory for the number of sums of each chunk: (chunks,), uint16.
        out: Memory for the indices and the sums, long enough: (2, senders * chunks * k), float32.

    Returns:
        Number of sums.
    """
    senders, rows, k = indices.shape
    sums = np.zeros(size, np.float64)
    senders_of = np.zeros(size, np.int32)
    at = 0
    for row in range(rows):
        for one in range(senders):
            for j in range(k):
                index = indices[one, row, j]
                sums[index] += weights[one] * np.float64(values[one, row, j])
                senders_of[index] += 1
        first = at
        for index in range(size):
            if senders_of[index]:
                out[0, at] = index
                out[1, at] = sums[index] / senders_of[index] if by_senders else sums[index]
                at += 1
                sums[index] = 0.0
                senders_of[index] = 0
        counts[row] = at - first
    return at


@compile_once
def invert_tiles(stack: Any, down: Any, across: Any, columns: int, out: Any) -> None:
    """Invert the DCT of tiles, with additions in one order.

    Args:
        stack: Coefficients of the tiles: (tiles, height, width), float32.
        down: Basis for the columns: (height, height), float32.
        across: Basis for the rows: (width, width), float32.
        columns: Number of tiles in each row of tiles.
        out: Matrix from the first tile on, which is filled: float32.
    """
    tiles, height, width = stack.shape
    half = np.empty((height, width), np.float32)
    for tile in range(tiles):
        top, left = tile // columns * height, tile % columns * width
        half[:, :] = 0.0
        for u in range(height):
            for v in range(width):
                value = stack[tile, u, v]
                if value != 0.0:
                    for x in range(width):
                        half[u, x] += value * across[v, x]
        for y in range(height):
            for x in range(width):
                out[top + y, left + x] = 0.0
            for u in range(height):
                factor = down[u, y]
                for x in range(width):
                    out[top + y, left + x] += factor * half[u, x]
