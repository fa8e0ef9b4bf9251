"""Safetensors files of tensors of bytes: the form of gradients and of updates.

No content of a file is trusted: its tensors are contiguous, in the order of their names, and fill
the file.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import orjson

_LENGTH = struct.Struct("<Q")
_HEADER_FOR_ALL, _HEADER_FOR_EACH = 4096, 1024  # bytes, without the names of tensors

PARSE_ERRORS = (struct.error, ValueError, KeyError, TypeError, AttributeError)
"""Errors of `parse_byte_tensors` for a file with other content."""

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ByteTensors:
    """Header of a file of tensors of bytes.

    Attributes:
        metadata: Metadata of the file.
        spans: First byte of each tensor in the file, and the byte after its last one. The tensors
            are contiguous, in the order of their names.
        begins: Offset of the first tensor.
    """

    metadata: Mapping[str, str]
    spans: Mapping[str, Span] = field(repr=False)
    begins: int


def encode_byte_tensors(
    bodies: Mapping[str, bytes], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return a safetensors file of tensors of bytes, in the order of their names."""
    described: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    names, at = sorted(bodies), 0
    for name in names:
        size = len(bodies[name])
        described[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = orjson.dumps(described)
    text += b" " * (-len(text) % 8)
    return b"".join((_LENGTH.pack(len(text)), text, *(bodies[name] for name in names)))


def compute_largest_header(names: Iterable[str]) -> int:
    """Return the largest size in bytes of the header of a file with tensors of some names."""
    return _HEADER_FOR_ALL + sum(len(name.encode()) * 8 + _HEADER_FOR_EACH for name in names)


def count_header_bytes(most: int) -> int:
    """Return the number of bytes that have the header, if the header has at most ``most``."""
    return _LENGTH.size + most


def parse_byte_tensors(head: memoryview, size: int, most: int) -> ByteTensors:
    """Parse the header of a file of tensors of bytes.

    Args:
        head: Beginning of the file, with the whole header.
        size: Size of the file in bytes.
        most: Largest size of the header in bytes. A longer header is not parsed.

    Raises:
        Exception: One of `PARSE_ERRORS`, if the file has another form.
    """
    (length,) = _LENGTH.unpack_from(head)
    begins = _LENGTH.size + length
    if length > most or begins > min(size, len(head)):
        raise ValueError("its header is too long")  # refused before it is parsed
    described = orjson.loads(head[_LENGTH.size : begins])
    metadata = described.pop("__metadata__", {})
    if list(described) != sorted(described):
        raise ValueError("its tensors are not in the order of their names")
    spans: dict[str, Span] = {}
    at = 0
    for name, entry in described.items():
        begin, end = entry["data_offsets"]
        if type(end) is not int or (begin, entry["dtype"]) != (at, "U8"):
            raise ValueError("its tensors are not contiguous bytes")
        if entry["shape"] != [end - at] or end < at:
            raise ValueError("its tensors are not contiguous bytes")
        spans[name] = (begins + at, begins + end)
        at = end
    if begins + at != size:
        raise ValueError("there are bytes after its tensors")
    return ByteTensors(metadata, spans, begins)
