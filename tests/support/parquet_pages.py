"""Pages of a parquet file, read one by one by the page index, which pyarrow only writes."""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zstandard

ReadRange = Callable[[int, int], bytes]
"""Function that returns the bytes from an offset to another."""


@dataclass(frozen=True)
class Page:
    """Location of a page.

    Attributes:
        first_row: Number of the first row, in the file.
        rows: Number of rows.
        start: Offset of the header.
        end: Offset after the page.
    """

    first_row: int
    rows: int
    start: int
    end: int


def read_footer(read_range: ReadRange, size: int) -> dict[int, Any]:
    """Return the footer (FileMetaData) by the numbers of its fields."""
    tail = read_range(size - 8, size)
    length = int.from_bytes(tail[:4], "little")
    return read_struct(read_range(size - 8 - length, size - 8), 0)[0]


def list_pages(read_range: ReadRange, size: int, column: str) -> list[Page]:
    """Return the pages of a column by the offset index of each row group."""
    pages: list[Page] = []
    first = 0
    for group in read_footer(read_range, size)[4]:
        rows = group[3]
        for chunk in group[1]:
            if b".".join(chunk[3][3]).decode() == column:
                index = read_struct(read_range(chunk[4], chunk[4] + chunk[5]), 0)[0]
                starts = [location[3] for location in index[1]]
                pages += [
                    Page(first + start, after - start, location[1], location[1] + location[2])
                    for location, start, after in zip(
                        index[1], starts, [*starts[1:], rows], strict=True
                    )
                ]
        first += rows
    return pages


def read_texts(read_range: ReadRange, page: Page) -> list[str]:
    """Return the texts of a page without nulls (version 1, plain encoding, zstd)."""
    data = read_range(page.start, page.end)
    header, at = read_struct(data, 0)
    raw = zstandard.ZstdDecompressor().decompress(data[at:], max_output_size=header[2])
    at = 4 + int.from_bytes(raw[:4], "little")  # definition levels
    texts: list[str] = []
    for _ in range(header[5][1]):
        (length,) = struct.unpack_from("<I", raw, at)
        texts.append(raw[at + 4 : at + 4 + length].decode())
        at += 4 + length
    return texts


def read_struct(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """Return a struct of Thrift's compact protocol by the numbers of its fields, and its end."""
    fields: dict[int, Any] = {}
    number = 0
    while data[at]:
        delta, kind = data[at] >> 4, data[at] & 15
        at += 1
        if delta:
            number += delta
        else:
            number, at = _read_integer(data, at)
        if kind in {1, 2}:
            fields[number] = kind == 1
        else:
            fields[number], at = _read_value(data, at, kind)
    return fields, at + 1


def _read_value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    match kind:
        case 1 | 2 | 3:
            return data[at], at + 1
        case 4 | 5 | 6:
            return _read_integer(data, at)
        case 7:
            return data[at : at + 8], at + 8
        case 8:
            size, at = _read_varint(data, at)
            return data[at : at + size], at + size
        case 9:
            count, kind = data[at] >> 4, data[at] & 15
            at += 1
            if count == 15:
                count, at = _read_varint(data, at)
            values: list[Any] = []
            for _ in range(count):
                value, at = _read_value(data, at, kind)
                values.append(value)
            return values, at
        case 12:
            return read_struct(data, at)
        case _:
            raise ValueError(f"type {kind} of Thrift")


def _read_integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _read_varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
