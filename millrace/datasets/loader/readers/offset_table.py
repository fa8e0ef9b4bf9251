"""Samples of shards that begin with a table of offsets, as those of LitData and MDS.

See `millrace.datasets.formats.offset_table` for the layout.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from millrace.datasets.loader.fetch import OpenShard
from millrace.datasets.loader.readers.base import DecodeRows, LoadedSample, raise_damage

_NUMBER = 4  # bytes of a number of the table
_FIRST_READ = 64 << 10  # bytes with the table of most shards


class StoredColumn(NamedTuple):
    """A column of every sample.

    Attributes:
        name: Name of the field, or of the key.
        decode: Function that returns the value of the column's bytes.
        size: Bytes of the column; None if each sample has the size.
    """

    name: str
    decode: Callable[[memoryview], Any]
    size: int | None = None


class OffsetTableReader:
    """Reader of the samples of a shard with a table of offsets.

    Args:
        shard: Bytes of the shard.
        columns: Columns of every sample, in their order.
        samples: Number of samples of the shard.

    Raises:
        CorruptError: The shard has another number of samples.
    """

    def __init__(self, shard: OpenShard, columns: Sequence[StoredColumn], samples: int) -> None:
        self._shard, self._columns = shard, columns
        end = _NUMBER * (samples + 2)
        head = shard.read_once(0, min(shard.size, max(end, _FIRST_READ)))
        numbers: npt.NDArray[np.int64] = np.frombuffer(head[:end], "<u4").astype(np.int64)
        if numbers[0] != samples:
            raise_damage(shard, f"it has {numbers[0]} samples, not {samples}")
        self._offsets = numbers[1:]
        if (np.diff(self._offsets) < 0).any() or self._offsets[-1] > shard.size:
            raise_damage(shard, "its offsets are not in order")

    def load(self, start: int, end: int) -> DecodeRows:
        """Fetch the bytes of the samples alone."""
        offsets: list[int] = (self._offsets[start : end + 1] - self._offsets[start]).tolist()
        first = int(self._offsets[start])
        self._shard.release(first)
        body = self._shard.read(first, first + offsets[-1])
        return partial(_StoredRows, self._shard, self._columns, body, offsets)

    def close(self) -> None:
        """Close the shard."""
        self._shard.close()


class _StoredRows:
    """Samples that are decoded when they are taken.

    Args:
        shard: Shard of the samples, for messages.
        columns: Columns of every sample.
        body: Bytes of the samples.
        offsets: Offsets of the samples in these bytes, and the end of the last one.
    """

    def __init__(
        self,
        shard: OpenShard,
        columns: Sequence[StoredColumn],
        body: memoryview,
        offsets: list[int],
    ) -> None:
        self._shard, self._columns = shard, columns
        self._body, self._offsets = body, offsets
        self._sizes = struct.Struct(f"<{sum(column.size is None for column in columns)}I")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __iter__(self) -> Iterator[LoadedSample]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int, /) -> LoadedSample:
        body, at, end = self._body, self._offsets[index], self._offsets[index + 1]
        sample: LoadedSample = {}
        field = ""
        try:
            sizes = iter(self._sizes.unpack_from(body, at))
            at += self._sizes.size
            for field, decode, size in self._columns:
                after = at + (next(sizes) if size is None else size)
                sample[field] = decode(body[at:after])
                at = after
        except (ValueError, struct.error) as error:
            raise_damage(self._shard, f"the field {field!r} has a bad value ({error})")
        if at != end:
            raise_damage(self._shard, "a sample has other sizes than its table")
        return sample
