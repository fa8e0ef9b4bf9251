"""Encode the layout of a column in few bytes, and decode it.

A layout in a file of parquet takes about 14 bytes a page, and is decoded field by field. Here the
numbers are arrays of differences, compressed by zstd with a checksum: about 3 bytes a page, which
NumPy decodes at once.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from millrace.datasets import thrift
from millrace.datasets.loader.column import (
    ColumnLayout,
    ColumnPart,
    Fields,
    Pages,
    estimate_layout_size,
)
from millrace.datasets.thrift import Value

Numbers = npt.NDArray[np.int64]

_MAX_DECODED = 256 << 20
_SCHEMA, _METADATA = 1, 2  # fields of the struct before the arrays
_ARRAYS = 8
_SHORT, _LONG = np.dtype("<u4"), np.dtype("<i8")


def encode_layout(layout: ColumnLayout) -> bytes:
    """Return the bytes of a layout."""
    kinds: dict[bytes, int] = {}
    metadata: list[Fields] = []
    parts = [part for group in layout.groups for part in group]
    chosen: list[int] = []
    for part in parts:
        encoded = thrift.encode_struct(part.metadata)
        if encoded not in kinds:
            kinds[encoded] = len(metadata)
            metadata.append(part.metadata)
        chosen.append(kinds[encoded])
    described = thrift.encode_struct(
        {
            _SCHEMA: Value(thrift.LIST, layout.schema, thrift.STRUCT),
            _METADATA: Value(thrift.LIST, metadata, thrift.STRUCT),
        }
    )
    paged = [part.pages for part in parts if part.pages is not None]
    arrays: Sequence[Any] = (
        np.diff(layout.starts),
        [len(group) for group in layout.groups],
        chosen,
        _interleave(parts),
        [-1 if part.pages is None else len(part.pages.offsets) for part in parts],
        _join([np.diff(pages.offsets, prepend=0) for pages in paged]),
        _join([pages.ends - pages.offsets for pages in paged]),
        _join([np.diff(pages.first_rows, prepend=0) for pages in paged]),
    )
    blocks = [described, *(_encode_array(np.asarray(one, np.int64)) for one in arrays)]
    sizes = np.array([len(block) for block in blocks], _SHORT).tobytes()
    return zstandard.ZstdCompressor(level=9, write_checksum=True).compress(
        b"".join([sizes, *blocks])
    )


def decode_layout(data: bytes) -> ColumnLayout:
    """Return the layout of some bytes.

    Raises:
        ValueError: The bytes are no layout, or were damaged.
    """
    try:
        # zstandard allocates the size that the frame announces.
        if not 0 <= (size := zstandard.frame_content_size(data)) <= _MAX_DECODED:
            raise ValueError(f"a layout announces {size} bytes")
        return _decode(zstandard.ZstdDecompressor().decompress(data))
    except (zstandard.ZstdError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"a layout is damaged: {error}") from error


def _decode(raw: bytes) -> ColumnLayout:
    head = (_ARRAYS + 1) * _SHORT.itemsize
    sizes = np.frombuffer(raw[:head], _SHORT).astype(np.int64)
    bounds = [head, *(head + np.cumsum(sizes)).tolist()]
    if len(sizes) != _ARRAYS + 1 or bounds[-1] != len(raw):
        raise ValueError("a layout has other parts than its sizes say")
    blocks = [raw[start:end] for start, end in pairwise(bounds)]
    described, _ = thrift.decode_struct(blocks[0])
    metadata: list[Fields] = described[_METADATA].content
    rows, counts, chosen, places, page_counts, offsets, lengths, first_rows = map(
        _decode_array, blocks[1:]
    )
    part_places: list[list[int]] = np.cumsum(places.reshape(-1, 3), axis=1).tolist()
    page_ends: list[int] = np.cumsum(np.maximum(page_counts, 0)).tolist()
    if (
        len(rows) != len(counts)
        or not len(chosen) == len(part_places) == len(page_counts) == counts.sum()
        or not len(offsets) == len(lengths) == len(first_rows)
        or len(offsets) != (page_ends[-1] if page_ends else 0)
        or min(map(_find_least, (rows, counts - 1, chosen, places, lengths - 1, first_rows))) < 0
    ):
        raise ValueError("a layout has numbers that do not fit each other")
    schema: list[Fields] = described[_SCHEMA].content
    parts: list[ColumnPart] = []
    kinds: list[int] = chosen.tolist()
    for number, ((start, data, end), kind, page_end) in enumerate(
        zip(part_places, kinds, page_ends, strict=True)
    ):
        pages = None
        if page_counts[number] >= 0:
            chosen_pages = slice(page_end - int(page_counts[number]), page_end)
            begins = np.cumsum(offsets[chosen_pages])
            ends = begins + lengths[chosen_pages]
            pages = Pages(begins, ends, np.cumsum(first_rows[chosen_pages]))
        parts.append(ColumnPart(metadata[kind], start, data, end, pages))
    remaining = iter(parts)
    groups = [[next(remaining) for _ in range(count)] for count in counts.tolist()]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows)])
    return ColumnLayout(schema, groups, starts, estimate_layout_size(groups))


def _find_least(numbers: Numbers) -> int:
    return int(numbers.min()) if len(numbers) else 0


def _interleave(parts: Sequence[ColumnPart]) -> Numbers:
    """Return start, length of the dictionary and length of the data of each part."""
    places = [(part.start, part.data - part.start, part.end - part.data) for part in parts]
    return np.array(places, np.int64).reshape(-1)


def _join(arrays: Sequence[Numbers]) -> Numbers:
    return np.concatenate([np.zeros(0, np.int64), *arrays])


def _encode_array(numbers: Numbers) -> bytes:
    """Return numbers of 32 bits if they fit, and of 64 bits otherwise, after their size."""
    is_short = not len(numbers) or (numbers.min() >= 0 and numbers.max() < 1 << 32)
    dtype = _SHORT if is_short else _LONG
    return bytes([dtype.itemsize]) + numbers.astype(dtype).tobytes()


def _decode_array(data: bytes) -> Numbers:
    dtype = {_SHORT.itemsize: _SHORT, _LONG.itemsize: _LONG}[data[0]]
    return np.frombuffer(data[1:], dtype).astype(np.int64)
