"""Samples of tar files, as `millrace.datasets.formats.webdataset` writes them.

The offset of a sample is known only after the headers of the samples before it. The manifest has
the offsets of a few samples of each shard. A reader that begins in the middle of a shard reads on
from the last of these before its first sample.
"""

import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any, NoReturn

from millrace.datasets.field_names import KEY
from millrace.datasets.formats import Fields
from millrace.datasets.formats.base import guess_type
from millrace.datasets.loader.fetch import OpenShard
from millrace.datasets.loader.readers.base import (
    DECODERS,
    DecodeRows,
    LoadedSample,
    raise_damage,
)
from millrace.datasets.loader.sample_offsets import SampleOffsets
from millrace.datasets.sources.decoder import DamageError
from millrace.datasets.sources.tar_headers import TarHeaders
from millrace.errors import ConfigurationError
from millrace.schemas.dataset import TAR_BLOCK

_SKIP = 100  # samples that are skipped before their memory is freed
_HEADER = struct.Struct("<100s24x11s21xc")  # name, size in octal digits, type


Member = tuple[str, str, int, int]
"""Key of a sample, name of a field, and offsets of its data in the shard."""


class TarSampleReader:
    """Reader of the samples of a tar file.

    Args:
        shard: Bytes of the shard.
        fields: Types of the fields; a field without a type has that of its extension.
        samples: Number of samples of the shard.
        decode: Whether fields are decoded. Otherwise they are bytes.
        offsets: Offsets of samples, from the manifest and from readers of this process.
    """

    def __init__(
        self,
        shard: OpenShard,
        fields: Fields,
        samples: int,
        *,
        decode: bool,
        offsets: SampleOffsets,
    ) -> None:
        self._offsets = offsets
        self._shard, self._fields, self._samples = shard, fields, samples
        self._decoders = _Decoders(fields, decode=decode)
        self._row = 0  # number of the sample at `_offset`
        self._offset = 0
        self._view, self._view_start, self._view_end = memoryview(b""), 0, -1

    def load(self, start: int, end: int) -> DecodeRows:
        """Walk the headers up to the end of the samples, and keep the bytes of the samples."""
        if start != self._row:
            row, offset = self._offsets.find(self._shard.name, start)
            if start < self._row or row > self._row:
                self._row, self._offset = row, offset
        while self._row < start:
            self._walk(min(_SKIP, start - self._row))
            self._shard.release(self._offset)
        first = self._offset
        self._shard.release(first)
        members, firsts = self._walk(end - start)
        views = self._shard.read_views(first, self._offset)
        make = partial(_StoredMembers, self._explain, self._decoders)
        return partial(make, members, firsts, views, first)

    def close(self) -> None:
        """Close the shard."""
        self._shard.close()

    def _walk(self, count: int) -> tuple[list[Member], list[int]]:
        """Go on by a number of samples.

        Returns:
            Members of the samples, and the index of the first member of each sample.
        """
        found, firsts = list[Member](), list[int]()
        offset, key, rows = self._offset, "", 0
        view, view_start, last = self._view, self._view_start, self._view_end
        unpack = _HEADER.unpack_from
        while count:
            if not view_start <= offset <= last:
                view, view_start, last = self._look(offset)
            raw, digits, kind = unpack(view, offset - view_start)
            if kind == b"0" and not raw[99]:
                try:
                    name, size = str(raw.rstrip(b"\0"), "utf-8"), int(digits, 8)
                except ValueError:
                    raise_damage(self._shard, f"the header at {offset} is damaged")
                start = offset + TAR_BLOCK
            elif not raw[0] and kind == b"\0":
                break
            else:
                name, start, size = self._read_long_header(offset)
            dot = name.find(".", name.rfind("/") + 1)
            end = start + size
            if dot < 0 or end > self._shard.size:
                raise_damage(
                    self._shard, f"the member at {offset} is cut short or has no extension"
                )
            if name[:dot] != key:
                if rows == count:
                    break
                key, rows = name[:dot], rows + 1
                firsts.append(len(found))
            found.append((key, name[dot + 1 :], start, end))
            offset = end + -size % TAR_BLOCK
        if rows != count:
            raise_damage(self._shard, f"it has {self._row + rows} samples, not {self._samples}")
        self._offsets.note(self._shard.name, self._row + count, offset)
        self._row, self._offset = self._row + count, offset
        return found, firsts

    def _look(self, offset: int) -> tuple[memoryview, int, int]:
        """Return bytes from a header on, the offset of the first, and that of the last header."""
        if offset + TAR_BLOCK > self._shard.size:
            raise_damage(self._shard, "it has no end")
        view = self._shard.read_on(offset)
        if len(view) < TAR_BLOCK:
            view = self._shard.read(offset, offset + TAR_BLOCK)
        self._view, self._view_start = view, offset
        self._view_end = offset + len(view) - TAR_BLOCK
        return view, offset, self._view_end

    def _read_long_header(self, offset: int) -> tuple[str, int, int]:
        """Return the name, the offset and the size of a member with several headers."""
        headers = TarHeaders(
            lambda start, size: bytes(self._shard.read(start, min(start + size, self._shard.size))),
            self._shard.size,
            offset,
        )
        try:
            member = next(headers.iterate_members())
        except (DamageError, StopIteration) as error:
            raise_damage(self._shard, f"the header at {offset} is damaged ({error})")
        return member.name, member.offset, member.size

    def _explain(self, key: str, field: str, error: ValueError) -> NoReturn:
        """Raise the error of a field whose value cannot be decoded."""
        reason = f"the field {field!r} of {key!r} has a bad value ({error})"
        if field in self._fields:
            raise_damage(self._shard, reason)
        raise ConfigurationError(
            f"{self._shard.name} cannot be decoded: {reason}. The dataset was sharded "
            "without `types`, so each field has the type of its extension. Load the bytes "
            "of the fields by `decode=False`."
        ) from None


class _Decoders(dict[str, Callable[[memoryview], Any]]):
    """Functions that decode the fields, by their names."""

    def __init__(self, fields: Fields, *, decode: bool) -> None:
        self._fields, self._has_types = fields, decode

    def __missing__(self, field: str) -> Callable[[memoryview], Any]:
        kind = self._fields.get(field) or guess_type(field)
        self[field] = found = DECODERS[kind] if self._has_types else bytes
        return found


class _StoredMembers:
    """Samples that are decoded when they are taken.

    Args:
        explain: Called with the key of a sample, the name of a field, and the error of its value.
        decoders: Functions that decode the fields.
        members: Members of all samples.
        firsts: Index of the first member of each sample.
        views: Bytes of the samples, in consecutive views. Only members of two views are copied.
        start: Offset of the first of these bytes in the shard.
    """

    def __init__(
        self,
        explain: Callable[[str, str, ValueError], NoReturn],
        decoders: _Decoders,
        members: list[Member],
        firsts: list[int],
        views: list[memoryview],
        start: int,
    ) -> None:
        self._explain, self._decoders = explain, decoders
        self._members, self._firsts, self._views = members, [*firsts, len(members)], views
        self._ends = list(accumulate(map(len, views), initial=start))[1:]

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __iter__(self) -> Iterator[LoadedSample]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int, /) -> LoadedSample:
        first, last = self._firsts[index], self._firsts[index + 1]
        decoders, take = self._decoders, self._slice
        key = field = self._members[first][0]
        sample: LoadedSample = {KEY: key}
        try:
            for _, field, start, end in self._members[first:last]:
                sample[field] = decoders[field](take(start, end))
        except ValueError as error:
            self._explain(key, field, error)
        return sample

    def _slice(self, start: int, end: int) -> memoryview:
        """Return the bytes between two offsets in the shard."""
        number = bisect_left(self._ends, end)
        view, at = self._views[number], self._ends[number] - len(self._views[number])
        if start >= at:
            return view[start - at : end - at]
        parts = [view[: end - at]]
        while start < at:
            number -= 1
            view, at = self._views[number], at - len(self._views[number])
            parts.insert(0, view[max(0, start - at) :])
        return memoryview(b"".join(parts))
