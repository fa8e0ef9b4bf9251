"""Fields of a type, as the bytes that readers decode: text, JSON, numbers and arrays.

Every function takes a field as a source gives it (`FieldType`), and refuses a field that a reader
could not decode. The messages of the refusals follow the name of the field.
"""

import struct
from collections.abc import Callable
from typing import Any

import orjson

from millrace.datasets.formats.base import BadSampleError, read_field
from millrace.datasets.sample import LargeFile, Sample

FieldData = bytes | LargeFile
FieldEncoder = Callable[[FieldData], FieldData]

KEY = "__key__"
"""Field of a read sample that has its key, as in webdataset."""

_MIN_INT, _MAX_INT = -(1 << 63), (1 << 63) - 1
_MAX_DEPTH = 512  # Python's own parser of JSON, which readers use, can fail at about twice that


def encode_key(sample: Sample) -> bytes:
    """Return the key of a sample in UTF-8."""
    try:
        return sample.key.encode()
    except UnicodeEncodeError as error:
        raise BadSampleError(f"its key is no UTF-8 text: {error}") from error


def keep_bytes(data: FieldData) -> FieldData:
    """Return a field of bytes as it is."""
    return data


def encode_text(data: FieldData) -> bytes:
    """Return a text, checked to be UTF-8."""
    text = data if isinstance(data, bytes) else read_field(data)
    if not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise BadSampleError(f"is no UTF-8 text: {error}") from error
    return text


def encode_json(data: FieldData) -> bytes:
    """Return a JSON text, checked to be one that Python's own parser can read."""
    text = read_field(data)
    value = _parse(text)
    if text.count(b"[") + text.count(b"{") > _MAX_DEPTH and _is_deep(value):
        raise BadSampleError(f"is JSON of more than {_MAX_DEPTH} levels")
    return text


def encode_int64(data: FieldData) -> bytes:
    """Return an integer as 8 bytes, little-endian."""
    value = _parse(read_field(data))
    if type(value) is not int or not _MIN_INT <= value <= _MAX_INT:
        raise BadSampleError("is no integer of 64 bits")
    return struct.pack("<q", value)


def encode_float64(data: FieldData) -> bytes:
    """Return a number as 8 bytes, little-endian (IEEE 754)."""
    value = _parse(read_field(data))
    if type(value) not in {int, float}:
        raise BadSampleError("is no number")
    return struct.pack("<d", value)


def check_array(data: FieldData, item_size: int) -> FieldData:
    """Return an array, checked to have whole elements."""
    if len(data) % item_size:
        raise BadSampleError(
            f"has {len(data)} bytes, which are no whole elements of {item_size} bytes"
        )
    return data


def _parse(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadSampleError(f"is no JSON: {error}") from error


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
    return bool(level)
