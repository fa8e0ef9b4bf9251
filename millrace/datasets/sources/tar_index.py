"""Index of a tar file: its samples in the order of their first members, with all members of each.

Members with one key are one sample wherever they are in the file, so all headers are read before
the first sample. A run stores the index, so that a run that continues reads no header again.
"""

import contextlib
import heapq
import math
import struct
from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import orjson

from millrace import errors
from millrace.datasets.sources.decoder import DamageError
from millrace.datasets.sources.files import SourceFiles
from millrace.datasets.sources.folder import MAX_SAMPLE_BYTES
from millrace.datasets.sources.sample_table import (
    SKIPPED_NAME,
    find_extension_fault,
    split_name,
)
from millrace.datasets.sources.table import (
    decode_path,
    encode_path,
    escape_path,
    find_unreadable_reason,
)
from millrace.datasets.sources.tar_headers import Read, TarHeaders, TarMember
from millrace.digest import compute_digest
from millrace.schemas.dataset import FileRef, MemberRange
from millrace.storage import Store, create, read

_MAX_INDEX_BYTES = 256 << 20  # memory of the members of one tar file; about two million of them
_MEMBER_OVERHEAD = 64  # bytes of memory for a member, besides its name
_MAX_NAMED = 3  # members without a key that are named
_SHOWN = 300  # characters of a name in the reason of a bad row
_NUL = b"\0"
_PLACE = struct.Struct(">QQ")  # offset of the header and of the data


class MemberData(NamedTuple):
    """Data of one member of a sample.

    Attributes:
        extension: Extension of the member, the name of the field.
        offset: Offset of the data in the tar file.
        size: Bytes of the data.
    """

    extension: str
    offset: int
    size: int


class TarSample(NamedTuple):
    """One sample of a tar file, or one bad row.

    Attributes:
        position: Offset of the header of the first member.
        next_position: Position of the next sample; the size of the file after the last one.
        key: Key of the sample; the location of a bad row.
        reason: Reason why there is no sample; empty for a good one.
        members: Members, in the order of their extensions.
        size: Bytes of all members.
    """

    position: int
    next_position: int
    key: str
    reason: str
    members: tuple[MemberData, ...]
    size: int


def build_index(
    files: SourceFiles, file: FileRef, read_bytes: Read, end: float = math.inf
) -> bytes:
    """Return the index of a tar file, whose headers are read.

    The first line describes the file, and has the digest of the others. Each other line is a
    sample. Memory: up to 256 MiB, and the index.

    Args:
        files: Files of the source.
        file: The tar file.
        read_bytes: Function that reads the file.
        end: Offset from which on the next sample ends the index. By default the index has all
            samples.

    Raises:
        ConfigurationError: The file is no tar file, is damaged or cut short, or has more members
            than memory should hold.
    """
    headers = TarHeaders(read_bytes, file.size)
    members = _MemberTable()
    last: TarMember | None = None
    try:
        for member in headers.iterate_members():
            if member.header >= end and last and not _have_one_key(last, member):
                break
            last = member
            members.add(member)
            if members.memory > _MAX_INDEX_BYTES:
                raise errors.ConfigurationError(
                    f"{files.make_url(file.path)} has more than {members.count:,} members, whose "
                    "names take more memory than a worker should use. Divide the file, or leave it "
                    "out with `exclude`."
                )
    except DamageError as error:
        raise errors.ConfigurationError(
            f"{files.make_url(file.path)} cannot be read as a tar file at byte "
            f"{headers.position}: {error}. Shard the source under another dataset name, with the "
            "file replaced (a compressed one decompressed), or left out with `exclude`."
        ) from None
    bad = members.list_unnamed()
    if headers.end_fault:
        bad.append((file.size - 1, "end", headers.end_fault))
    lines = heapq.merge(members.iterate_samples(), map(_encode_bad_row, bad))
    body = b"\n".join(line for _, line in lines)
    return b"\n".join((_encode_description(file, body), body))


def _have_one_key(first: TarMember, second: TarMember) -> bool:
    """Decide whether two members are of one sample."""
    keys = [(split_name(member.name) or ("",))[0] for member in (first, second)]
    return keys[0] == keys[1]


class _MemberTable:
    """Members of a tar file, grouped by their keys.

    Attributes:
        memory: Approximate bytes of memory.
        count: Number of members.
    """

    def __init__(self) -> None:
        self._rows: list[bytes] = []  # key NUL extension NUL place size, whose order is by key
        self._faults: dict[bytes, str] = {}
        self._unnamed: list[TarMember] = []
        self._unnamed_count = 0
        self.memory = self.count = 0

    def add(self, member: TarMember) -> None:
        """Add a member, except those that readers of WebDataset skip."""
        if SKIPPED_NAME.match(member.name):
            return
        self.count += 1
        parts = split_name(member.name)
        if parts is None:
            self._unnamed_count += 1
            if len(self._unnamed) < _MAX_NAMED:
                self._unnamed.append(member)
            return
        key, extension = map(encode_path, parts)
        place = _PLACE.pack(member.header, member.offset)
        row = b"%b\0%b\0%b%d" % (key, extension, place, member.size)
        self._rows.append(row)
        self.memory += len(row) + _MEMBER_OVERHEAD
        fault = find_unreadable_reason(member.name, local=True)
        if not fault and member.fault:
            fault = f"its member {escape_path(member.name[:_SHOWN])} {member.fault}"
        if fault and key not in self._faults:
            self._faults[key] = fault
            self.memory += len(key) + len(fault) + 4 * _MEMBER_OVERHEAD

    def list_unnamed(self) -> list[tuple[int, str, str]]:
        """Return one bad row for all members without a key: position, location, reason."""
        if not self._unnamed:
            return []
        shown = ", ".join(escape_path(member.name[:_SHOWN]) for member in self._unnamed)
        more = self._unnamed_count - len(self._unnamed)
        shown += f" and {more} more" if more else ""
        reason = f"members without a key by WebDataset's rule: {shown}"
        return [(self._unnamed[0].header, "names", reason)]

    def iterate_samples(self) -> Iterator[tuple[int, bytes]]:
        """Yield the position and the encoded line of each sample, in the order of positions."""
        self._rows.sort()
        starts, firsts = array("Q"), array("Q")
        before = None
        for index, row in enumerate(self._rows):
            key, _, rest = row.split(_NUL, 2)
            header = _PLACE.unpack_from(rest)[0]
            if key != before:
                before = key
                starts.append(index)
                firsts.append(header)
            firsts[-1] = min(firsts[-1], header)
        starts.append(len(self._rows))
        for number in sorted(range(len(firsts)), key=firsts.__getitem__):
            rows = self._rows[starts[number] : starts[number + 1]]
            yield firsts[number], self._encode_sample(firsts[number], rows)

    def _encode_sample(self, position: int, rows: Iterable[bytes]) -> bytes:
        packed_key, members = b"", list[MemberData]()
        for row in rows:
            packed_key, extension, rest = row.split(_NUL, 2)
            offset, size = _PLACE.unpack_from(rest)[1], int(rest[_PLACE.size :])
            members.append(MemberData(decode_path(extension), offset, size))
        key = decode_path(packed_key)
        reason = self._faults.get(packed_key, "")
        reason = reason or find_extension_fault([member.extension for member in members])
        size = sum(member.size for member in members)
        if not reason and size > MAX_SAMPLE_BYTES:
            reason = f"a sample of {size} bytes is larger than a shard can be ({MAX_SAMPLE_BYTES})"
        if reason:
            return _encode_bad_row((position, f"sample {escape_path(key[:_SHOWN])}", reason))[1]
        return orjson.dumps([position, key, "", list(map(tuple, members))])


def _encode_bad_row(row: tuple[int, str, str]) -> tuple[int, bytes]:
    position, where, reason = row
    return position, orjson.dumps([position, where, reason, []])


def iterate_samples(index: bytes, start: int, end: int, file_size: int) -> Iterator[TarSample]:
    """Yield the samples of an index whose positions are from `start` to before `end`.

    Args:
        index: The index.
        start: First position.
        end: Position after the last one.
        file_size: Bytes of the tar file.
    """
    pending: TarSample | None = None
    at = index.find(b"\n") + 1
    while at < len(index):
        stop = index.find(b"\n", at)
        stop = len(index) if stop < 0 else stop
        position = int(index[at + 1 : index.find(b",", at)])
        if position >= start:
            if pending is not None:
                yield pending._replace(next_position=position)
                pending = None
            if position >= end:
                return
            _, key, reason, members = orjson.loads(index[at:stop])
            data = tuple(MemberData(*member) for member in members)
            sample_size = sum(member.size for member in data)
            pending = TarSample(position, file_size, key, reason, data, sample_size)
        at = stop + 1
    if pending is not None:
        yield pending


def read_index(store: Store, source_range: MemberRange) -> bytes | None:
    """Return the stored index of a tar file; None if there is none that fits the file."""
    # Another process may have deleted the index. A damaged one is as if there were none.
    with contextlib.suppress(errors.NotFoundError, errors.CorruptError):
        index = read(store, source_range.index, max_size=_MAX_INDEX_BYTES)
        description, _, body = index.partition(b"\n")
        if description == _encode_description(source_range.file, body):
            return index
    return None


def store_index(store: Store, source_range: MemberRange, index: bytes) -> None:
    """Store the index of a tar file, unless there is one."""
    with contextlib.suppress(errors.ExistsError):
        create(store, source_range.index, index)


def _encode_description(file: FileRef, body: bytes) -> bytes:
    return orjson.dumps(["tar-index-2", file.path, file.size, file.etag, compute_digest(body)])
