"""Interface of a reader of shards, and the values of fields that sources give as bytes."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from millrace.datasets.formats import FieldType
from millrace.datasets.loader.fetch import OpenShard
from millrace.errors import CorruptError

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


DECODERS: Mapping[FieldType, Callable[[memoryview], Any]] = {
    FieldType.BYTES: bytes,
    FieldType.STR: decode_text,
    FieldType.JSON: orjson.loads,
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
