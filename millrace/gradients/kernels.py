"""The inner loops of the codec, compiled: what is done to each chunk, without the interpreter.

They hold no lock of the interpreter's, so that threads run them side by side, each on some blocks
of chunks. Magnitudes are compared and summed as integers (the bits of a float32 without its sign
are in the order of its magnitude), so that every machine comes to the same bytes.
"""

from typing import Any

import numpy as np
from numba import njit

_MAGNITUDE = np.int32(0x7FFFFFFF)
_MANTISSA = np.int32(0x007FFFFF)
_HIDDEN = np.int32(0x00800000)
_BELOW = np.int32(1 << 23)  # one exponent less

# What is wrong with encoded bytes; 0 is nothing.
ENDED, TOO_FAR, LEFT_OVER = 1, 2, 3


@njit(cache=True, nogil=True, inline="always")
def _count_above(bits: Any, threshold: Any) -> int:
    count = 0
    for i in range(bits.size):
        count += bits[i] > threshold
    return count


@njit(cache=True, nogil=True)
def select(chunks: Any, k: int, out: Any) -> None:  # noqa: C901, PLR0912 - one loop, compiled
    """The places of the ``k`` largest magnitudes of each chunk, ascending; of equals the first.

    Args:
        chunks: (chunks, size), int32: the bits of float32.
        k: How many; at most size.
        out: (chunks, k), uint16: filled.
    """
    rows, size = chunks.shape
    bits = np.empty(size, np.int32)
    near = np.empty(size, np.int32)
    places = np.empty(size, np.uint16)
    for row in range(rows):
        highest = np.int32(0)
        for i in range(size):
            bits[i] = chunks[row, i] & _MAGNITUDE
            highest = max(highest, bits[i])
        # A threshold that k to 2 k values are above, by counting: the loop has no branch, and the
        # chunk lies in the first cache.
        low, above = np.int32(-1), size
        if size > 2 * k:
            high, threshold = highest, highest - _BELOW
            while threshold >= 0 and low < 0:
                count = _count_above(bits, threshold)
                if count >= k:
                    low, above = threshold, count
                else:
                    high = threshold
                    threshold -= _BELOW
            while above > 2 * k and high - low > 1:
                threshold = low + (high - low) // 2
                count = _count_above(bits, threshold)
                if count >= k:
                    low, above = threshold, count
                else:
                    high = threshold
        found = 0
        for i in range(size):
            if bits[i] > low:
                near[found] = bits[i]
                places[found] = i
                found += 1
        least = np.sort(near[:found])[found - k]
        ties = k
        for i in range(found):
            ties -= near[i] > least
        taken = 0
        for i in range(found):
            if near[i] > least or (near[i] == least and ties > 0):
                ties -= near[i] == least
                out[row, taken] = places[i]
                taken += 1


@njit(cache=True, nogil=True)
def gather(chunks: Any, places: Any, out: Any) -> None:
    """The values at places of each chunk: (chunks, k)."""
    for row in range(places.shape[0]):
        for j in range(places.shape[1]):
            out[row, j] = chunks[row, places[row, j]]


@njit(cache=True, nogil=True)
def subtract(chunks: Any, places: Any, values: Any) -> None:
    """Take values away from places of each chunk."""
    for row in range(places.shape[0]):
        for j in range(places.shape[1]):
            chunks[row, places[row, j]] -= values[row, j]


@njit(cache=True, nogil=True)
def spread(places: Any, values: Any, out: Any) -> None:
    """Put values at places of each chunk, and zeros elsewhere: (chunks, size)."""
    out[:, :] = 0.0
    for row in range(places.shape[0]):
        for j in range(places.shape[1]):
            out[row, places[row, j]] = values[row, j]


@njit(cache=True, nogil=True, inline="always")
def _bfloat16(bits: Any) -> Any:
    """The bfloat16 nearest to a float32, by their bits; of two equally near the even one."""
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> 16)


@njit(cache=True, nogil=True, inline="always")
def _level(high: Any, ratio: Any, code: Any, most: Any) -> Any:
    """The magnitude that a code means: from ``high * ratio / 255`` to ``high`` in equal steps."""
    low = high * (ratio / 255.0)
    return low + (high - low) * (code / most)


@njit(cache=True, nogil=True)
def _two_means(bits: Any, sizes: Any) -> tuple[Any, Any]:
    """The two magnitudes that stand best for those of a chunk, by least squares.

    Exact in one dimension: the sorted magnitudes are parted where the sum of squared sums, each
    over its count, is largest. The sums are of integers, in units of the largest one's last place.
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
    sizes.sort()
    best, at, below, lower = -1.0, 0, np.int64(0), np.int64(0)
    for j in range(1, k):
        below += sizes[j - 1]
        above = np.float64(total - below)
        score = np.float64(below) * np.float64(below) / j + above * above / (k - j)
        if score > best:
            best, at, lower = score, j, below
    unit = 2.0 ** np.float64(exponent - 150)
    high = np.float64(total - lower) / (k - at) * unit
    return high, (np.float64(lower) / at * unit if at else high)


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def dequantise(high: Any, ratio: Any, codes: Any, levels: int, values: Any) -> None:
    """The float32 that codes mean: (chunks, k)."""
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


@njit(cache=True, nogil=True)
def count_gaps(places: Any, counts: Any) -> None:
    """How often each distance between two places of a chunk occurs: added to ``counts``."""
    for row in range(places.shape[0]):
        before = -1
        for j in range(places.shape[1]):
            place = np.int64(places[row, j])
            counts[place - before - 1] += 1
            before = place


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
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
                bit = waiting & one
                waiting >>= one
                held -= one
                if bit == zero:
                    break
                ones += 1
                if ones > size:
                    return TOO_FAR
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
