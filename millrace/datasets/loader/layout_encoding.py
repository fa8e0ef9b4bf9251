"""Encode the layout of a column in few bytes, and decode it.

A layout in a file of parquet takes about 14 bytes a page, and is decoded field by field. Here the
numbers are arrays of differences, compressed by zstd with a checksum: about 3 bytes a page, which
NumPy decodes at once. Checksums take four bytes more.
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
    first_rows = [part.first_rows for part in parts if part.first_rows is not None]
    checksums = [part.checksums for part in parts if part.checksums is not None]
    arrays: Sequence[Any] = (
        np.diff(layout.starts),
        [len(group) for group in layout.groups],
        chosen,
        [-1 if part.first_rows is None else len(part.first_rows) for part in parts],
        [part.bounds[0] for part in parts],
        _join([np.diff(part.bounds) for part in parts]),
        _join([np.diff(rows, prepend=0) for rows in first_rows]),
        _join(checksums),
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
    rows, counts, chosen, page_counts, begins, lengths, first_rows, checksums = map(
        _decode_array, blocks[1:]
    )
    sizes = np.where(page_counts < 0, 2, page_counts + 1)  # the first one is of the dictionary
    if (
        len(rows) != len(counts)
        or not len(chosen) == len(begins) == len(page_counts) == counts.sum()
        or len(first_rows) != np.maximum(page_counts, 0).sum()
        or len(lengths) != sizes.sum()
        or len(checksums) not in {0, len(lengths)}
        or min(map(_find_least, (rows, counts - 1, chosen, begins, lengths, first_rows))) < 0
    ):
        raise ValueError("a layout has numbers that do not fit each other")
    schema: list[Fields] = described[_SCHEMA].content
    parts: list[ColumnPart] = []
    ends, row_ends = np.cumsum(sizes), np.cumsum(np.maximum(page_counts, 0))
    numbers = np.stack([chosen, begins, sizes, ends, page_counts, row_ends], axis=1)
    described_parts: list[list[int]] = numbers.tolist()
    for kind, begin, size, end, count, row_end in described_parts:
        parts.append(
            ColumnPart(
                metadata[kind],
                np.cumsum(np.concatenate([[begin], lengths[end - size : end]])),
                None if count < 0 else np.cumsum(first_rows[row_end - count : row_end]),
                checksums[end - size : end] if len(checksums) else None,
            )
        )
    remaining = iter(parts)
    groups = [[next(remaining) for _ in range(count)] for count in counts.tolist()]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows)])
    return ColumnLayout(schema, groups, starts, estimate_layout_size(groups))


def _find_least(numbers: Numbers) -> int:
    return int(numbers.min()) if len(numbers) else 0


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
