"""The inner loops of the codec, compiled: what is done to each chunk, without the interpreter.

They hold no lock of the interpreter's, so that threads run them side by side, each on some blocks
of chunks. Magnitudes are compared and summed as integers (the bits of a float32 without its sign
are in the order of its magnitude), so that every machine comes to the same bytes.
"""

from typing import Any

import numpy as np
from numba import njit

from millrace.gradients.codec.compiling import compile_once

_MAGNITUDE = np.int32(0x7FFFFFFF)
_MANTISSA = np.int32(0x007FFFFF)
_HIDDEN = np.int32(0x00800000)
_STEP, _BELOW = np.int32(1 << 20), np.int32(1 << 23)  # an eighth, and one exponent less
_ONES = np.array([(~byte & (byte + 1)).bit_length() - 1 for byte in range(256)], np.uint8)  # lowest
_LLOYD = 16  # steps: the border stands still before

# What is wrong with encoded bytes; 0 is nothing.
ENDED, TOO_FAR, LEFT_OVER = 1, 2, 3


@njit(nogil=True, inline="always")
def _count_above(bits: Any, size: int, threshold: Any) -> Any:
    count = np.int32(0)  # as wide as what is compared, so that many are at a time
    for i in range(size):
        count += np.int32(bits[i] > threshold)
    return count


@compile_once
def select(chunks: Any, k: int, out: Any) -> None:  # noqa: C901, PLR0912 - one loop, compiled
    """Return the places of the ``k`` largest magnitudes of each chunk, ascending.

    Of equals the first.

    Args:
        chunks: (chunks, size), int32: the bits of float32.
        k: How many; at most size.
        out: (chunks, k), uint16: filled.
    """
    rows, size = chunks.shape
    bits = np.empty(size, np.int32)
    near = np.empty(size, np.int32)
    places = np.empty(size, np.uint16)
    guess = np.int32(0)
    for row in range(rows):
        highest = np.int32(0)
        for i in range(size):
            bits[i] = chunks[row, i] & _MAGNITUDE
            highest = max(highest, bits[i])
        # A threshold that k to 2 k values are above, by counting: the loop has no branch, and the
        # chunk lies in the first cache. It begins where that of the chunk before was, steps ever
        # further until it lies between two, and then halves. What is chosen does not depend on it.
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
                places[found] = i
                found += 1
        # The k-th largest: what k are at least, and fewer are above. Between low and high, again.
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
                out[row, taken] = places[i]
                taken += 1


@compile_once
def gather(chunks: Any, places: Any, out: Any) -> None:
    """Return the values at places of each chunk: (chunks, k)."""
    for row in range(places.shape[0]):
        for j in range(places.shape[1]):
            out[row, j] = chunks[row, places[row, j]]


@compile_once
def subtract(chunks: Any, places: Any, values: Any) -> None:
    """Take values away from places of each chunk."""
    for row in range(places.shape[0]):
        for j in range(places.shape[1]):
            chunks[row, places[row, j]] -= values[row, j]


@compile_once
def spread(places: Any, values: Any, out: Any) -> None:
    """Put values at places of each chunk, and zeros elsewhere: (chunks, size)."""
    out[:, :] = 0.0
    for row in range(places.shape[0]):
        for j in range(places.shape[1]):
            out[row, places[row, j]] = values[row, j]


@njit(nogil=True, inline="always")
def _bfloat16(bits: Any) -> Any:
    """Return the bfloat16 nearest to a float32, by their bits; of two equally near the even one."""
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> 16)


@njit(nogil=True, inline="always")
def _level(high: Any, ratio: Any, code: Any, most: Any) -> Any:
    """Return the magnitude of a code: ``high * ratio / 255`` to ``high`` in equal steps."""
    low = high * (ratio / 255.0)
    return low + (high - low) * (code / most)


@compile_once
def _two_means(bits: Any, sizes: Any) -> tuple[Any, Any]:
    """Two magnitudes that stand for those of a chunk, by least squares (Lloyd 1982).

    From the mean on, the border between them goes to the middle of the means on its two sides. The
    sums are of integers, in units of the largest one's last place.
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
        if count == 0:  # they are all alike
            break
        high, low = np.float64(upper) / count, np.float64(total - upper) / (k - count)
        if (high + low) / 2.0 == border:
            break
        border = (high + low) / 2.0
    return high * unit, low * unit


@compile_once
def quantise(values: Any, levels: int, high: Any, ratio: Any, codes: Any) -> None:
    """Stand for each value by its sign and the nearest of some magnitudes of its chunk.

    Args:
        values: (chunks, k), int32: the bits of float32, all finite.
        levels: How many magnitudes: two are where `_two_means` says, more are in equal steps from
            the smallest to the largest.
        high: (chunks,), uint16: filled with the largest of them, as bfloat16.
        ratio: (chunks,), uint8: with the smallest over the largest, in 255ths.
        codes: (chunks, k), uint8: with the signs, and below them the magnitudes' numbers.
    """
    rows, k = values.shape
    sizes = np.empty(k, np.int64)
    word = np.empty(1, np.uint32)
    most = levels - 1
    for row in range(rows):
        if levels == 2:
            upper, lower = _two_means(values[row], sizes)
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
        high[row] = min(_bfloat16(word[0]), np.uint16(0x7F7F))  # the largest that is finite
        word[0] = np.uint32(high[row]) << np.uint32(16)
        top = np.float64(word.view(np.float32)[0])
        ratio[row] = np.uint8(min(255.0, np.floor(lower / top * 255.0 + 0.5)) if top > 0 else 0.0)
        low = _level(top, np.float64(ratio[row]), 0.0, 1.0)
        step = (top - low) / most
        for j in range(k):
            word[0] = np.uint32(values[row, j] & _MAGNITUDE)
            size = np.float64(word.view(np.float32)[0])
            code = np.floor((size - low) / step + 0.5) if step > 0 else 0.0
            code = min(max(code, 0.0), np.float64(most))
            sign = levels if values[row, j] < 0 else 0
            codes[row, j] = np.uint8(code) + np.uint8(sign)


@compile_once
def dequantise(high: Any, ratio: Any, codes: Any, levels: int, values: Any) -> None:
    """Return the float32 that codes mean: (chunks, k)."""
    rows, k = codes.shape
    word = np.empty(1, np.uint32)
    table = np.empty(2 * levels, np.float32)
    most = np.float64(levels - 1)
    for row in range(rows):
        word[0] = np.uint32(high[row]) << np.uint32(16)
        top = np.float64(word.view(np.float32)[0])
        for code in range(levels):
            level = np.float32(_level(top, np.float64(ratio[row]), np.float64(code), most))
            table[code] = level
            table[levels + code] = -level
        for j in range(k):
            values[row, j] = table[codes[row, j]]


@compile_once
def count_gaps(places: Any, counts: Any) -> None:
    """Return how often each distance between two places of a chunk occurs: added to ``counts``."""
    for row in range(places.shape[0]):
        before = -1
        for j in range(places.shape[1]):
            place = np.int64(places[row, j])
            counts[place - before - 1] += 1
            before = place


@compile_once
def write_gaps(places: Any, rice: int, out: Any) -> int:
    """Write the distances between places as Rice codes; bytes that it took.

    Each is the distance over ``2 ** rice`` as so many ones and a zero, then the rest in ``rice``
    bits, from the lowest bit of a byte to its highest (Rice and Plaunt 1971).

    Args:
        places: (chunks, k), uint16, ascending.
        rice: Of 0 to 12.
        out: uint8, long enough.
    """
    waiting, held, at = np.uint64(0), np.uint64(0), 0
    one = np.uint64(1)
    width = np.uint64(rice)
    mask = (one << width) - one
    for row in range(places.shape[0]):
        before = -1
        for j in range(places.shape[1]):
            place = np.int64(places[row, j])
            gap = np.uint64(place - before - 1)
            before = place
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


@compile_once
def read_gaps(body: Any, rice: int, size: int, places: Any) -> int:  # noqa: C901 - one loop, compiled
    """Read what `write_gaps` wrote, all of it; what is wrong, or 0.

    Args:
        body: uint8: these bytes and no others.
        rice: As written.
        size: Values of a chunk: every place is below.
        places: (chunks, k), uint16: filled.
    """
    waiting, held, at = np.uint64(0), np.uint64(0), 0
    one, zero, width = np.uint64(1), np.uint64(0), np.uint64(rice)
    mask = (one << width) - one
    for row in range(places.shape[0]):
        before = np.int64(-1)
        for j in range(places.shape[1]):
            ones = np.int64(0)
            while True:
                while held <= np.uint64(48) and at < body.size:
                    waiting |= np.uint64(body[at]) << held
                    held += np.uint64(8)
                    at += 1
                if held == zero:
                    return ENDED
                run = np.uint64(_ONES[waiting & np.uint64(0xFF)])
                ones += np.int64(run)
                if ones > size:
                    return TOO_FAR
                if run < held and run < np.uint64(8):  # and a zero
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
                    return ENDED
            place = before + 1 + (ones << np.int64(rice)) + np.int64(waiting & mask)
            waiting >>= width
            held -= width
            if place >= size:
                return TOO_FAR
            places[row, j] = place
            before = place
    if at < body.size or held >= np.uint64(8) or waiting != zero:
        return LEFT_OVER
    return 0


@compile_once
def sum_squares(values: Any) -> float:
    """Sum the squares of values in one order, so that all machines have the same sum."""
    total = 0.0
    for value in values:
        total += np.float64(value) * np.float64(value)
    return total


@compile_once
def compute_inner_products(places: Any, values: Any, size: int, out: Any) -> None:
    """Add the inner product of every two senders to a matrix of them, its lower half.

    Args:
        places: (senders, chunks, k), uint16.
        values: (senders, chunks, k), float32.
        size: Values of a chunk.
        out: (senders, senders), float64: added to.
    """
    senders, rows, k = places.shape
    row_of = np.zeros(size, np.float64)
    for row in range(rows):
        for one in range(senders):
            for j in range(k):
                row_of[places[one, row, j]] = values[one, row, j]
            for other in range(one + 1):
                total = 0.0
                for j in range(k):
                    total += row_of[places[other, row, j]] * np.float64(values[other, row, j])
                out[one, other] += total
            for j in range(k):
                row_of[places[one, row, j]] = 0.0


@compile_once
def compute_weighted_sums(
    places: Any,
    values: Any,
    weights: Any,
    size: int,
    by_senders: bool,  # noqa: FBT001 - compiled functions have no keyword-only arguments
    counts: Any,
    out: Any,
) -> int:
    """Add up what senders have at each place, in their order, and leave the places that are sent.

    Args:
        places: (senders, chunks, k), uint16.
        values: (senders, chunks, k), float32.
        weights: (senders,), float64.
        size: Values of a chunk.
        by_senders: Divide each place's sum by how many sent it.
        counts: (chunks,), uint16: filled with how many places each chunk has.
        out: (2, senders * chunks * k), float32 and long enough: the places and the values.

    Returns:
        How many places there are.
    """
    senders, rows, k = places.shape
    sums = np.zeros(size, np.float64)
    senders_of = np.zeros(size, np.int32)
    at = 0
    for row in range(rows):
        for one in range(senders):
            for j in range(k):
                place = places[one, row, j]
                sums[place] += weights[one] * np.float64(values[one, row, j])
                senders_of[place] += 1
        first = at
        for place in range(size):
            if senders_of[place]:
                out[0, at] = place
                out[1, at] = sums[place] / senders_of[place] if by_senders else sums[place]
                at += 1
                sums[place] = 0.0
                senders_of[place] = 0
        counts[row] = at - first
    return at


@compile_once
def inverse_tiles(stack: Any, down: Any, across: Any, columns: int, out: Any) -> None:
    """Return the inverse of the DCT of tiles, in one order of additions.

    Args:
        stack: (tiles, height, width), float32: coefficients.
        down: (height, height), float32: the basis.
        across: (width, width), float32: the basis.
        columns: Tiles in each row of them.
        out: The matrix from the first tile on, float32: filled.
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
