"""Shards that begin with a table of offsets, as those of LitData and MDS.

A shard is the number of samples, the offset of each sample and of the end, a header of the format,
and the samples. A sample is the sizes of its columns, and then their bytes. All these numbers are
unsigned and little-endian, of 32 bits.
"""

import struct
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import compress
from typing import cast

import numpy as np

from millrace.datasets.field_names import KEY
from millrace.datasets.formats.base import BadSampleError, Fields, copy_file
from millrace.datasets.formats.typed_fields import FieldData, FieldEncoder, encode_all
from millrace.datasets.formats.values import encode_key, encode_keys
from millrace.datasets.sample import LargeFile, RowBatch, Sample
from millrace.errors import ConfigurationError
from millrace.memory import map_anonymous

_MAX_SIZE = (1 << 32) - 1  # bytes of a shard, and the largest offset
_JOINED_PART = 2 << 10  # mean bytes of parts that are joined, which is faster than a copy of each


@dataclass(frozen=True, slots=True)
class Column:
    """A column of every sample: a field, or the key.

    Attributes:
        name: Name of the field, or `KEY`.
        encode: Function that checks the field, and returns its bytes in the shard.
        has_size: Whether samples have the size of this column.
    """

    name: str
    encode: FieldEncoder
    has_size: bool = True


class OffsetTableEncoder:
    """Encoder of shards with a table of offsets, in a buffer.

    The table is in front of the samples, and its size is known only at the end. So the samples
    begin at a distance from the start of the buffer. The distance grows when the table needs it.

    Args:
        columns: Columns of every sample, in their order. One is the key.
        header: Bytes between the table and the samples.
        capacity: Initial bytes of the buffer. A larger sample enlarges the buffer until `reset`.
    """

    sample_offsets: Sequence[tuple[int, int]] = ()  # a shard has its own table

    def __init__(self, columns: Sequence[Column], *, header: bytes, capacity: int) -> None:
        self._header = header
        self._encoders = [(column.name, column.encode) for column in columns]
        self._names: Set[str] = {column.name for column in columns} - {KEY}
        self._has_size = [column.has_size for column in columns]
        self._sizes = struct.Struct(f"<{sum(self._has_size)}I")
        self._capacity = capacity
        self._front = self._measure_front(capacity >> 10)
        self._buffer = map_anonymous(self._front + capacity)
        self._prepared: list[FieldData] = []
        self._prepared_size = 0
        self._batch: list[FieldData] = []  # parts of the prepared batch, in their order
        self._batch_ends: list[int] = []  # of the samples of the batch
        self._ends: list[int] = []  # of the samples, from the start of the first one
        self._end = 0
        self.samples = 0

    @property
    def size(self) -> int:
        """Bytes of the shard if it were closed now."""
        return self._measure_front(self.samples) + self._end

    def prepare(self, sample: Sample) -> int:
        """Check and encode the fields of a sample, and return the size of the shard with them.

        The bytes of a large file are copied only by `append`, except those of a text or a number.

        Raises:
            BadSampleError: A field is missing, unknown or not of its type, or the sample is too
                large for offsets of 32 bits.
        """
        self._prepared = []
        if sample.fields.keys() != self._names:
            raise BadSampleError(_describe_fields(sample, self._names))
        values = {**sample.fields, KEY: encode_key(sample)}
        parts: list[FieldData] = []
        name = ""
        try:
            for name, encode in self._encoders:
                parts.append(encode(values[name]))
        except BadSampleError as error:
            raise BadSampleError(f"the field {name!r} {error}") from error
        sizes = [*map(len, parts)]
        size = self._sizes.size + sum(sizes)
        if self._measure_front(1) + size > _MAX_SIZE:
            raise BadSampleError(f"its {size} bytes are too many for the format, which has 4 GiB")
        self._prepared = [self._sizes.pack(*compress(sizes, self._has_size)), *parts]
        self._prepared_size = size
        return self._measure_front(self.samples + 1) + self._end + size

    def append(self) -> None:
        """Append the prepared sample.

        Raises:
            ValueError: No sample is prepared, or the shard would be too large for its offsets.
        """
        end = self._end + self._prepared_size
        if not self._prepared:
            raise ValueError("Prepare a sample before it is appended.")
        self._reserve(self.samples + 1, end)
        at, buffer = self._front + self._end, self._buffer
        for part in self._prepared:
            after = at + len(part)
            if isinstance(part, LargeFile):
                copy_file(part, memoryview(buffer)[at:after])
            else:
                buffer[at:after] = part
            at = after
        self._ends.append(end)
        self._end = end
        self._prepared = []
        self.samples += 1

    def prepare_batch(self, batch: RowBatch) -> Sequence[int]:
        """Check and encode the fields of samples, and return the size of the shard after each.

        Only functions of C run for each sample, where the columns are bytes or texts of ASCII.

        Raises:
            BadSampleError: A field of a sample is missing, unknown or not of its type.
        """
        self._batch, self._batch_ends = [], []
        if batch.columns.keys() != self._names:
            raise BadSampleError("the fields of a sample are not those of the dataset")
        step = 1 + len(self._encoders)
        parts: list[FieldData] = [b""] * (step * len(batch))
        totals = np.full(len(batch), self._sizes.size)
        sized: list[list[int]] = []
        for number, (name, encode) in enumerate(self._encoders):
            values = encode_keys(batch.keys) if name == KEY else batch.columns[name]
            encoded = encode_all(encode, values)
            parts[1 + number :: step] = encoded
            sizes = [*map(len, encoded)]
            totals += sizes
            if self._has_size[number]:
                sized.append(sizes)
        if sized:
            parts[::step] = map(self._sizes.pack, *sized)
        ends = self._end + np.cumsum(totals)
        self._batch, self._batch_ends = parts, ends.tolist()
        front = self._measure_front(self.samples + 1)
        return (ends + np.arange(front, front + 4 * len(batch), 4)).tolist()

    def append_batch(self, count: int) -> None:
        """Append the first samples of the prepared batch.

        Raises:
            ValueError: So many samples are not prepared, or the shard would be too large for its
                offsets.
        """
        if not 0 < count <= len(self._batch_ends):
            raise ValueError("Prepare a batch before its samples are appended.")
        ends = self._batch_ends[:count]
        self._reserve(self.samples + count, ends[-1])
        self._buffer.seek(self._front + self._end)
        parts = cast("list[bytes]", self._batch[: count * (1 + len(self._encoders))])
        if ends[-1] - self._end <= _JOINED_PART * len(parts):
            parts = [b"".join(parts)]
        written = sum(map(self._buffer.write, parts))
        assert self._end + written == ends[-1], "the parts of a batch have other sizes"
        self._ends += ends
        self._end = ends[-1]
        self._batch, self._batch_ends = [], []
        self.samples += count

    def close(self) -> memoryview:
        """Write the table in front of the samples, and return the bytes of the shard."""
        front = self._measure_front(self.samples)
        offsets = np.array([self.samples, front, *self._ends])
        offsets[2:] += front
        head = offsets.astype("<u4").tobytes() + self._header
        start = self._front - front
        self._buffer[start : self._front] = head
        return memoryview(self._buffer)[start : self._front + self._end]

    def reset(self) -> None:
        """Begin the next shard in the same buffer, and free the memory of a large sample."""
        if len(self._buffer) > self._front + self._capacity:
            self._buffer = map_anonymous(self._front + self._capacity)
        self._prepared = []
        self._batch, self._batch_ends = [], []
        self._ends = []
        self._end = 0
        self.samples = 0

    def _measure_front(self, samples: int) -> int:
        """Return the bytes before the samples."""
        return 4 * (samples + 2) + len(self._header)

    def _reserve(self, samples: int, end: int) -> None:
        """Make room for a number of samples that end at an offset from the first one.

        Raises:
            ValueError: The shard would be too large for its offsets.
        """
        front = self._measure_front(samples)
        if front + end > _MAX_SIZE:
            raise ValueError(
                "The samples do not fit in 4 GiB: close a shard before it is so large."
            )
        if front > self._front or self._front + end > len(self._buffer):
            self._enlarge(front, end)

    def _enlarge(self, front: int, end: int) -> None:
        """Make a larger buffer, for the bytes before the samples and for those of the samples."""
        # The old buffer is not resized, since an upload may still read it.
        old, begin = self._buffer, self._front
        if front > begin:
            self._front = 2 * front
        room = len(old) - begin
        self._buffer = map_anonymous(self._front + (room if end <= room else max(end, 2 * room)))
        self._buffer[self._front : self._front + self._end] = old[begin : begin + self._end]


def check_names(fields: Fields, shard_format: str) -> None:
    """Refuse a field whose name is that of the column with the key.

    Raises:
        ConfigurationError: There is such a field.
    """
    if KEY in fields:
        raise ConfigurationError(
            f"The format {shard_format} stores the key of a sample as {KEY!r}, and the samples "
            "have a field of this name: rename or leave out the field."
        )


def _describe_fields(sample: Sample, names: Set[str]) -> str:
    expected = ", ".join(sorted(names)) or "none"
    found = ", ".join(sorted(sample.fields)) or "none"
    return f"its fields are {found}, and those of the dataset are {expected}"
