"""Samples of tar files, as `millrace.datasets.formats.webdataset` writes them.

The offset of a sample is known only after the headers of all samples before it. So a reader that
begins in the middle of a shard reads the shard from its beginning.
"""

import struct
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from millrace.datasets.field_names import KEY
from millrace.datasets.formats import Fields
from millrace.datasets.formats.base import guess_type
from millrace.datasets.loader.fetch import OpenShard
from millrace.datasets.loader.readers.base import (
    DECODERS,
    LoadedSample,
    LoadRows,
    raise_damage,
)
from millrace.datasets.sources.decoder import DamageError
from millrace.datasets.sources.tar_headers import TarHeaders

_BLOCK = 512
_STEP = 1 << 20  # bytes that are looked at once for headers
_SKIP = 100  # samples that are skipped before their memory is freed
_HEADER = struct.Struct("<100s24x11s21xc")  # name, size in octal digits, type


class _Member(NamedTuple):
    """A member of a sample in the bytes that were fetched.

    Attributes:
        key: Key of the sample.
        field: Name of the field.
        start: Offset of the data in the shard.
        end: Offset after the data.
    """

    key: str
    field: str
    start: int
    end: int


class TarSampleReader:
    """Reader of the samples of a tar file.

    Args:
        shard: Bytes of the shard.
        fields: Types of the fields; a field without a type has that of its extension.
        samples: Number of samples of the shard.
    """

    def __init__(self, shard: OpenShard, fields: Fields, samples: int) -> None:
        self._shard, self._fields, self._samples = shard, fields, samples
        self._decoders: dict[str, Callable[[memoryview], Any]] = {}
        self._row = 0  # number of the sample at `_offset`
        self._offset = 0
        self._view, self._view_start = memoryview(b""), 0

    def load(self, start: int, end: int) -> LoadRows:
        """Walk the headers up to the end of the samples, and keep the bytes of the samples."""
        if start < self._row:
            self._row = self._offset = 0
        while self._row < start:
            self._walk(min(_SKIP, start - self._row))
            self._shard.release(self._offset)
        first = self._offset
        self._shard.release(first)
        members = self._walk(end - start)
        body = self._read(first, self._offset)
        return partial(self._decode, members, body, first)

    def close(self) -> None:
        """Close the shard."""
        self._shard.close()

    def _walk(self, count: int) -> list[_Member]:
        """Go on by a number of samples, and return their members."""
        found: list[_Member] = []
        key = ""
        row = self._row - 1
        until = self._row + count
        while count:
            member, offset = self._read_member(self._offset)
            if member is None:
                row += 1
                break
            if member.key != key:
                key, row = member.key, row + 1
                if row == until:
                    break
            found.append(member)
            self._offset = offset
        if count and row != until:
            raise_damage(self._shard, f"it has {row} samples, not {self._samples}")
        self._row = until
        return found

    def _read_member(self, offset: int) -> tuple[_Member | None, int]:
        """Return the member at an offset, and the offset of the next one; None at the end."""
        at = offset - self._view_start
        if at < 0 or at + _BLOCK > len(self._view):
            self._view_start = offset
            self._view = self._read(offset, min(offset + _STEP, self._shard.size))
            at = 0
        raw, digits, kind = _HEADER.unpack_from(self._view, at)
        if kind == b"0" and raw[99] == 0:
            try:
                name, size = raw.rstrip(b"\0").decode(), int(digits, 8)
            except ValueError:
                raise_damage(self._shard, f"the header at {offset} is damaged")
            start = offset + _BLOCK
        elif not raw[0] and kind == b"\0":
            return None, offset
        else:
            name, start, size = self._read_long_header(offset)
        end = start + size
        if end > self._shard.size:
            raise_damage(self._shard, f"the member at {offset} is cut short")
        dot = name.find(".", name.rfind("/") + 1)
        if dot < 0:
            raise_damage(self._shard, f"the member {name!r} has no extension")
        member = _Member(name[:dot], name[dot + 1 :], start, end)
        return member, end + -size % _BLOCK

    def _read_long_header(self, offset: int) -> tuple[str, int, int]:
        """Return the name, the offset and the size of a member with several headers."""
        headers = TarHeaders(
            lambda start, size: bytes(self._read(start, min(start + size, self._shard.size))),
            self._shard.size,
            offset,
        )
        try:
            member = next(headers.iterate_members())
        except (DamageError, StopIteration) as error:
            raise_damage(self._shard, f"the header at {offset} is damaged ({error})")
        return member.name, member.offset, member.size

    def _read(self, start: int, end: int) -> memoryview:
        return self._shard.read(start, end)

    def _decode(self, members: list[_Member], body: memoryview, first: int) -> list[LoadedSample]:
        samples: list[LoadedSample] = []
        sample: LoadedSample = {}
        last = None
        decoders = self._decoders
        for key, field, start, end in members:
            if key != last:
                last, sample = key, {KEY: key}
                samples.append(sample)
            decode = decoders.get(field)
            if decode is None:
                kind = self._fields.get(field) or guess_type(field)
                decode = decoders[field] = DECODERS[kind]
            try:
                sample[field] = decode(body[start - first : end - first])
            except ValueError as error:
                raise_damage(
                    self._shard, f"the field {field!r} of {key!r} has a bad value ({error})"
                )
        return samples
