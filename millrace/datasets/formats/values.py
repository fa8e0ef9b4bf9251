"""Check and read the values of fields, for formats whose fields have types.

Every function refuses a value that a reader could not decode. The messages follow the name of the
field, as in ``the field 'cls' is no integer of 64 bits``.
"""

import operator
import re
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import filterfalse
from types import MappingProxyType
from typing import Any, cast

from millrace.datasets.formats.base import BadSampleError, Fields, FieldType
from millrace.datasets.sample import Sample

_INT = re.compile(rb"-?[0-9]{1,19}")
_MAX_NUMBER_BYTES = 400  # the longest decimal text of a float64 that JSON encoders write is shorter
_SPACES = b" \t\r\n"
_TYPE_CODES: Mapping[str, str] = MappingProxyType(
    {FieldType.UINT16_ARRAY: "H", FieldType.UINT32_ARRAY: "I"}
)


def check_names(sample: Sample, fields: Fields) -> None:
    """Refuse a sample with a field that has no type.

    Raises:
        BadSampleError: The sample has such a field.
    """
    if not sample.fields.keys() <= fields.keys():
        name = min(sample.fields.keys() - fields.keys())
        raise BadSampleError(
            f"the field {name!r} has no type: give it a type, or leave it out of the samples"
        )


def encode_key(sample: Sample) -> bytes:
    """Return the key of a sample in UTF-8.

    Raises:
        BadSampleError: The key has characters that UTF-8 cannot hold.
    """
    try:
        return sample.key.encode()
    except UnicodeEncodeError as error:
        raise BadSampleError(f"the key is no UTF-8 text: {error}") from error


def encode_keys(keys: Sequence[str]) -> Sequence[bytes]:
    """Return the keys of samples in UTF-8.

    Raises:
        BadSampleError: A key has characters that UTF-8 cannot hold.
    """
    try:
        return [*map(str.encode, keys)]
    except UnicodeEncodeError as error:
        raise BadSampleError(f"a key is no UTF-8 text: {error}") from error


def check_text(data: bytes) -> bytes:
    """Return a text as it is.

    Raises:
        BadSampleError: The bytes are no UTF-8.
    """
    if not data.isascii():
        try:
            data.decode()
        except UnicodeDecodeError as error:
            raise BadSampleError(f"is no UTF-8 text: {error}") from error
    return data


def check_texts(texts: Iterable[bytes]) -> None:
    """Check many texts. No Python code runs for those of ASCII.

    Raises:
        BadSampleError: A text is no UTF-8.
    """
    for text in filterfalse(bytes.isascii, texts):
        check_text(text)


def parse_int(data: bytes) -> int:
    """Return an integer of 64 bits. Spaces and line ends around the digits are allowed.

    Raises:
        BadSampleError: The bytes are no such integer.
    """
    digits = data[:_MAX_NUMBER_BYTES].strip(_SPACES)
    value = int(digits) if _INT.fullmatch(digits) else None
    if value is None or len(data) > _MAX_NUMBER_BYTES or not -(1 << 63) <= value < 1 << 63:
        raise BadSampleError(f"is no integer of 64 bits: {_show(data)}")
    return value


def parse_float(data: bytes) -> float:
    """Return a floating-point number. Spaces and line ends around the number are allowed.

    Raises:
        BadSampleError: The bytes are no number.
    """
    is_plain = len(data) <= _MAX_NUMBER_BYTES and b"_" not in data  # Python allows "1_000"
    try:
        return float(data if is_plain else b"")
    except ValueError as error:
        raise BadSampleError(f"is no number: {_show(data)}") from error


def check_array(size: int, item_size: int) -> None:
    """Refuse an array of bytes that are no whole number of items.

    Raises:
        BadSampleError: The size is no multiple of the item's size.
    """
    if size % item_size:
        raise BadSampleError(f"has {size} bytes, which is no multiple of {item_size}")


def is_array(kind: str | None) -> bool:
    """Decide whether the type of a field is that of an array of integers."""
    return kind in _TYPE_CODES


def encode_array(value: Any, kind: str) -> bytes:
    """Return integers as little-endian bytes. Bytes stay as they are.

    Args:
        value: List of integers, array of integers of NumPy or another library, or bytes.
        kind: Type of the field, ``uint16[]`` or ``uint32[]``.

    Raises:
        BadSampleError: The value is none of these, or the type cannot hold one of its integers.
    """
    if isinstance(value, bytes | bytearray) or getattr(value, "format", "") == "B":
        return bytes(value)
    to_list = getattr(value, "tolist", None)
    given: Any = value if to_list is None else to_list()
    if not isinstance(given, list | tuple):
        raise BadSampleError(f"is a {type(value).__name__}, and {kind} takes a list of integers")
    given = cast("Sequence[Any]", given)
    numbers = given if set(map(type, given)) <= {int} else [*map(_read_integer, given)]
    code = _TYPE_CODES[kind]
    try:
        packed = array(code, cast("Sequence[int]", numbers))
    except (OverflowError, TypeError):
        most = (1 << 8 * array(code).itemsize) - 1
        index = next(i for i, one in enumerate(numbers) if one is None or not 0 <= one <= most)
        raise BadSampleError(
            f"has {given[index]!r:.40} at index {index}, and {kind} holds integers from 0 to {most}"
        ) from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _read_integer(value: Any) -> int | None:
    """Return an integer, also one of NumPy; None for another value."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _show(data: bytes) -> str:
    text = data[:40].decode("utf-8", "backslashreplace")
    return repr(text + "..." if len(data) > 40 else text)
