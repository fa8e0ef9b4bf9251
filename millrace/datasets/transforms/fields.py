"""Conversion between the bytes of a sample's fields and the values that a function works with.

The declared type of a field, or else its extension, decides the type of its values. Extensions
decide by the rules of webdataset's decoder and writer.
"""

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

from millrace.datasets.field_names import KEY, BadFieldError, check_distinct, check_field_name
from millrace.datasets.formats.base import BadSampleError, FieldType, guess_type, read_field
from millrace.datasets.formats.values import encode_array, is_array
from millrace.datasets.sample import LargeFile, Sample

_INTEGER = re.compile(rb"-?[0-9]+")
_PLAIN_INTEGER = re.compile(rb"-?(?:0|[1-9][0-9]*)")  # as it is written again
_SPACES = b" \t\r\n"
NO_TYPES: Mapping[str, str] = MappingProxyType({})
"""Types of the fields of a dataset that declares none."""


def decode_fields(sample: Sample, types: Mapping[str, str] = NO_TYPES) -> dict[str, Any]:
    """Return the values of a sample's fields, and its key as ``__key__``. Large files are read.

    A field that is declared as text or bytes is so. The extension of any other field decides its
    type (`guess_type`). Most fields stay bytes. A field with the extension of an integer, such as
    ``id``, is text if it is not declared as ``int``, and is no plain integer, such as ``007``.

    Args:
        sample: The sample.
        types: Declared types of fields, by their names.

    Raises:
        BadFieldError: The bytes of a field are not of its type.
        ChangedError: A large file has changed.
    """
    values: dict[str, Any] = {KEY: sample.key}
    for name, data in sample.fields.items():
        values[name] = _decode_field(name, read_field(data), types)
    return values


def _decode_field(name: str, data: bytes, types: Mapping[str, str]) -> Any:
    kind = _decide_type(name, types)
    try:
        match kind:
            case FieldType.STR:
                return data.decode()
            case FieldType.JSON:
                return json.loads(data)  # exact also for integers of more than 64 bits
            case FieldType.INT:
                return _decode_integer(data, is_declared=types.get(name) == FieldType.INT)
            case _:
                return data
    except (ValueError, RecursionError):
        expected = {FieldType.STR: "text in UTF-8", FieldType.JSON: "JSON"}.get(kind, "integer")
        raise BadFieldError(f"the field {name!r} is no valid {expected}") from None


def _decode_integer(data: bytes, *, is_declared: bool) -> int | str:
    """Return the integer of a field, which spaces may surround.

    Without a declaration, an integer with leading zeros and anything else is returned as text.
    """
    digits = data.strip(_SPACES)
    if _PLAIN_INTEGER.fullmatch(digits) or (is_declared and _INTEGER.fullmatch(digits)):
        return int(digits)
    if is_declared:
        raise ValueError("no integer")
    return data.decode()


def _decide_type(name: str, types: Mapping[str, str]) -> FieldType:
    """Return the type of a field's values within a function.

    Other declared types are those of the result: the function may make them of any bytes.
    """
    declared = types.get(name)
    if declared in {FieldType.STR, FieldType.BYTES}:
        return FieldType(declared)
    return guess_type(name)


def encode_fields(
    values: Mapping[Any, Any],
    types: Mapping[str, str] = NO_TYPES,
    original: Mapping[str, bytes | LargeFile] = MappingProxyType({}),
) -> dict[str, bytes]:
    """Return the bytes of values by their names. The key ``__key__`` is left out.

    Bytes stay as they are. Text is encoded in UTF-8, and JSON in a ``json`` field. Numbers, lists
    and dicts are encoded as JSON. In a field that is declared as an array, lists and arrays of
    integers become its items. An integer that did not change keeps its bytes.

    Args:
        values: Values by the names of their fields.
        types: Declared types of fields, by their names.
        original: Fields of the sample that the values were made of.

    Raises:
        BadFieldError: There is no field, or a name or a value cannot be written.
    """
    fields: dict[str, bytes] = {}
    for name, value in values.items():
        if name == KEY:
            continue
        if not isinstance(name, str):
            raise BadFieldError(f"the name of a field is not text but {type(name).__name__}")
        check_field_name(name)
        before = original.get(name)
        if (
            type(value) is int
            and isinstance(before, bytes)
            and type(old := _decode_field(name, before, types)) is int
            and old == value
        ):
            fields[name] = before
        else:
            fields[name] = _encode_value(name, value, types)
    if not fields:
        raise BadFieldError("a sample without fields cannot be written")
    check_distinct(fields)
    return fields


def _encode_value(name: str, value: Any, types: Mapping[str, str]) -> bytes:
    if is_array(types.get(name)):
        try:
            return encode_array(value, types[name])
        except BadSampleError as error:
            raise BadFieldError(f"the field {name!r} {error}") from None
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(cast("bytes", value))
    is_json = _decide_type(name, types) is FieldType.JSON
    try:
        if isinstance(value, str) and not is_json:
            return value.encode()
        if is_json or isinstance(value, int | float | dict | list | tuple):
            # An integer of more than 64 bits stays exact, and NaN is refused: JSON has no NaN.
            return json.dumps(
                value, ensure_ascii=False, separators=(",", ":"), allow_nan=False
            ).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise BadFieldError(f"the field {name!r} cannot be encoded: {error}") from None
    raise BadFieldError(
        f"the field {name!r} is a {type(value).__name__}: return bytes, str, int, float, dict or "
        "list"
    )


_SUFFIXED = re.compile(r"--\d{4,}-*$")


def make_part_key(key: str, number: int | None) -> str:
    """Return the key of one of the samples that a sample becomes. Different parts have other keys.

    Args:
        key: Key of the sample.
        number: Number of the part; None if the sample becomes one sample. The key of that one is
            the key of the sample. If it looks like the key of a part, it gets a hyphen more.
    """
    if number is None:
        return f"{key}-" if _SUFFIXED.search(key) else key
    return f"{key}--{number:04d}"
