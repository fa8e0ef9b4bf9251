"""Interface of a reader of shards, and the values of fields that sources give as bytes."""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, Protocol, cast

import numpy as np
import numpy.typing as npt
import orjson

from millrace.datasets.formats import FieldType
from millrace.datasets.loader.fetch import OpenShard
from millrace.errors import CorruptError

_LOW, _HIGH = -(1 << 63), 1 << 64  # orjson reads the integers between them as they are
_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_LONG_RUN = b"0" * 19  # digits of the shortest integers beyond 64 bits

LoadedSample = dict[str, Any]
"""A sample as a trainer gets it: values by the names of the fields."""


class FetchedRows(Protocol):
    """Samples whose bytes were fetched. Each is decoded when it is taken, unless in columns."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> LoadedSample: ...

    def __iter__(self) -> Iterator[LoadedSample]: ...


DecodeRows = Callable[[], FetchedRows]
"""Function that returns the samples of bytes that were fetched before. It makes no request."""


class SampleReader(Protocol):
    """Reader of the samples of one shard. One thread at a time uses a reader."""

    def load(self, start: int, end: int) -> DecodeRows:
        """Fetch the bytes of samples, and return a function that decodes the samples.

        Args:
            start: Number of the first sample in the shard.
            end: Number after the last one.

        Raises:
            CorruptError: The shard is damaged.
            ChangedError: The shard was replaced.
        """
        ...

    def close(self) -> None:
        """Close the shard."""
        ...


def decode_text(data: memoryview) -> str:
    """Return a text in UTF-8."""
    return str(data, "utf-8")


def decode_int(data: memoryview) -> int:
    """Return an integer in decimal digits."""
    return int(bytes(data))


def decode_float(data: memoryview) -> float:
    """Return a number in decimal digits."""
    return float(bytes(data))


def decode_uint16(data: memoryview) -> npt.NDArray[np.uint16]:
    """Return an array of little-endian integers, as a copy."""
    return np.frombuffer(data, "<u2").astype(np.uint16)


def decode_uint32(data: memoryview) -> npt.NDArray[np.uint32]:
    """Return an array of little-endian integers, as a copy."""
    return np.frombuffer(data, "<u4").astype(np.uint32)


def decode_json(data: memoryview | bytes) -> Any:
    """Return the value of a JSON text, with integers of any size.

    orjson reads integers beyond 64 bits as floats, and refuses NaN, infinities and lone surrogates,
    which Python writes. Then `json` parses the text again, which takes ten times as long.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        with contextlib.suppress(RecursionError, ValueError):
            return json.loads(bytes(data))
        raise
    if _may_have_changed(value, data):
        with contextlib.suppress(RecursionError):  # orjson reads more levels
            return json.loads(bytes(data))
    return value


def _may_have_changed(value: Any, data: memoryview | bytes) -> bool:
    """Decide whether orjson may have read an integer as a float.

    The values of a dict are looked at. If there are others below them, the text is searched for a
    long integer, which is faster than a look at all values.
    """
    is_dict = type(value) is dict
    values: Iterable[Any] = cast("dict[str, Any]", value).values() if is_dict else (value,)
    for one in values:
        kind = cast("type[Any]", type(one))
        if kind is float and not _LOW < one < _HIGH:
            return True
        if kind is list or kind is dict:
            return _has_long_integer(bytes(data))
    return False


def _has_long_integer(text: bytes) -> bool:
    """Decide whether a text has 19 digits in a row that do not follow a decimal point."""
    digits = text.translate(_DIGITS)
    at = digits.find(_LONG_RUN)
    while at > 0 and text[at - 1] == ord("."):
        at = digits.find(_LONG_RUN, at + len(_LONG_RUN))
    return at >= 0


DECODERS: Mapping[FieldType, Callable[[memoryview], Any]] = {
    FieldType.BYTES: bytes,
    FieldType.STR: decode_text,
    FieldType.JSON: decode_json,
    FieldType.INT: decode_int,
    FieldType.FLOAT: decode_float,
    FieldType.UINT16_ARRAY: decode_uint16,
    FieldType.UINT32_ARRAY: decode_uint32,
}
"""Function of each type that decodes a field as a source gives it."""


def raise_damage(shard: OpenShard, reason: str) -> NoReturn:
    """Raise the error of a shard whose bytes have their digest, and cannot be read.

    Raises:
        CorruptError: Always.
    """
    raise CorruptError(
        f"{shard.name} cannot be read: {reason}. Its bytes are those that were written, so another "
        "version of Millrace or another program wrote them. Shard the dataset again."
    )
