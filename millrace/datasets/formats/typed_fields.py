"""Fields of a type as the bytes that readers of LitData and MDS decode.

Every function takes a field as a source gives it (`FieldType`), and refuses a field that a reader
could not decode. The messages of the refusals follow the name of the field.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from millrace.datasets.formats.base import BadSampleError, read_field
from millrace.datasets.formats.values import (
    check_array,
    check_text,
    check_texts,
    parse_float,
    parse_int,
)
from millrace.datasets.sample import LargeFile

FieldData = bytes | LargeFile
FieldEncoder = Callable[[FieldData], FieldData]

_MAX_DEPTH = 512  # Python's own parser of JSON, which readers use, can fail at about twice that


def keep_bytes(data: FieldData) -> FieldData:
    """Return a field of bytes as it is."""
    return data


def encode_text(data: FieldData) -> bytes:
    """Return a text, checked to be UTF-8."""
    return check_text(data if isinstance(data, bytes) else read_field(data))


def encode_all(encode: FieldEncoder, values: Sequence[bytes]) -> Sequence[FieldData]:
    """Return the fields of one column of many samples, each as its encoder returns it.

    The encoder is not called for bytes and texts, which stay as they are.

    Raises:
        BadSampleError: A field is not of its type.
    """
    if encode is encode_text:
        check_texts(values)
        return values
    return values if encode is keep_bytes else [encode(value) for value in values]


def encode_json(data: FieldData) -> bytes:
    """Return a JSON text, checked to be one that Python's own parser can read."""
    text = read_field(data)
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadSampleError(f"is no JSON: {error}") from error
    if text.count(b"[") + text.count(b"{") > _MAX_DEPTH and _is_deep(value):
        raise BadSampleError(f"is JSON of more than {_MAX_DEPTH} levels")
    return text


def encode_int64(data: FieldData) -> bytes:
    """Return an integer as 8 bytes, little-endian."""
    return struct.pack("<q", parse_int(read_field(data)))


def encode_float64(data: FieldData) -> bytes:
    """Return a number as 8 bytes, little-endian (IEEE 754)."""
    return struct.pack("<d", parse_float(read_field(data)))


def keep_array(data: FieldData, item_size: int) -> FieldData:
    """Return an array, checked to have whole elements."""
    check_array(len(data), item_size)
    return data


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
