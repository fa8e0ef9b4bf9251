"""Samples of tar files, as `millrace.datasets.formats.webdataset` writes them.

The offset of a sample is known only after the headers of the samples before it. The manifest has
the offsets of a few samples of each shard. A reader that begins in the middle of a shard reads on
from the last of these before its first sample.
"""

import struct
from collections.abc import Callable, Iterator
from functools import partial
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
from millrace.datasets.loader.shard_parts import join_views
from millrace.datasets.sources.decoder import DamageError
from millrace.datasets.sources.tar_headers import TarHeaders
from millrace.errors import ConfigurationError
from millrace.schemas.dataset import TAR_BLOCK

_SKIP = 100  # samples that are skipped before their memory is freed
_HEADER = struct.Struct("<100s24x11s21xc")  # name, size in octal digits, type


Member = tuple[str, str, memoryview | list[memoryview], int, int]
"""Key of a sample, name of a field, bytes of the shard, and offsets of the field's data in them.

Data in several parts is a list of views, and the offsets are the first and the last of them.
"""


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
        self._shard.release(self._offset)
        return partial(_StoredSamples, *self._walk(end - start), self._decoders, self._explain)

    def close(self) -> None:
        """Close the shard."""
        self._shard.close()

    def _walk(self, count: int) -> tuple[list[Member], list[int]]:
        """Go on by a number of samples.

        Returns:
            Members of the samples, and the index of the first member of each sample.
        """
        found, firsts = list[Member](), list[int]()
        rows, key = 0, ""
        view, view_start, last = self._view, self._view_start, self._view_end
        offset, at, shard_size = self._offset, self._offset - view_start, self._shard.size
        unpack = _HEADER.unpack_from
        while count:
            if not 0 <= at <= last:
                view, view_start, last = self._look(offset)
                at = 0
            raw, digits, kind = unpack(view, at)
            if kind == b"0" and not raw[99]:
                try:
                    name, size = raw.rstrip(b"\0").decode(), int(digits, 8)
                except ValueError:
                    raise_damage(self._shard, f"the header at {offset} is damaged")
                start = at + TAR_BLOCK
            elif not raw[0] and kind == b"\0":
                break
            else:
                name, start, size = self._read_long_header(offset)
                start -= view_start
            its_key, dot, field = name.partition(".") if "/" not in name else _split_path(name)
            end = start + size
            if not dot or view_start + end > shard_size:
                raise_damage(
                    self._shard, f"the member at {offset} is cut short or has no extension"
                )
            if its_key != key or not rows:
                if rows == count:
                    break
                key, rows = its_key, rows + 1
                firsts.append(len(found))
            if end <= last + TAR_BLOCK:
                found.append((its_key, field, view, start, end))
            else:
                views = self._shard.read_views(view_start + start, view_start + end)
                found.append((its_key, field, views, 0, len(views)))
            at = end + -size % TAR_BLOCK
            offset = view_start + at
        if rows != count:
            raise_damage(self._shard, f"it has {self._row + rows} samples, not {self._samples}")
        self._offsets.note(self._shard.name, self._row + count, offset)
        self._row, self._offset = self._row + count, offset
        return found, firsts

    def _look(self, offset: int) -> tuple[memoryview, int, int]:
        """Return bytes from a header on, the offset of the first, and the last place of a header.

        The place is relative to the first byte.
        """
        if offset + TAR_BLOCK > self._shard.size:
            raise_damage(self._shard, "it has no end")
        view = self._shard.read_on(offset)
        if len(view) < TAR_BLOCK:
            view = self._shard.read(offset, offset + TAR_BLOCK)
        self._view, self._view_start, self._view_end = view, offset, len(view) - TAR_BLOCK
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


def _split_path(path: str) -> tuple[str, str, str]:
    """Return the key, the dot and the field of a member in a folder."""
    folder, slash, name = path.rpartition("/")
    key, dot, field = name.partition(".")
    return folder + slash + key, dot, field


class _Decoders(dict[str, Callable[[memoryview], Any]]):
    """Functions that decode the fields, by their names."""

    def __init__(self, fields: Fields, *, decode: bool) -> None:
        self._fields, self._has_types = fields, decode

    def __missing__(self, field: str) -> Callable[[memoryview], Any]:
        kind = self._fields.get(field) or guess_type(field)
        self[field] = found = DECODERS[kind] if self._has_types else bytes
        return found


class _StoredSamples:
    """Samples that are decoded when they are taken.

    Args:
        members: Members of all samples.
        firsts: Index of the first member of each sample.
        decoders: Functions that decode the fields.
        explain: Called with the key of a sample, the name of a field, and the error of its value.
    """

    def __init__(
        self,
        members: list[Member],
        firsts: list[int],
        decoders: _Decoders,
        explain: Callable[[str, str, ValueError], NoReturn],
    ) -> None:
        self._members, self._firsts = members, [*firsts, len(members)]
        self._decoders, self._explain = decoders, explain

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __iter__(self) -> Iterator[LoadedSample]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int, /) -> LoadedSample:
        first, last = self._firsts[index], self._firsts[index + 1]
        key = field = self._members[first][0]
        sample: LoadedSample = {KEY: key}
        try:
            for _, field, source, start, end in self._members[first:last]:
                data = source[start:end]
                whole = data if type(data) is memoryview else join_views(data)
                sample[field] = self._decoders[field](whole)
        except ValueError as error:
            self._explain(key, field, error)
        return sample
