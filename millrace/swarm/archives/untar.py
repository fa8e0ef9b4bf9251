"""Read a tar while it arrives, without trusting it.

``tarfile.extract`` is not used. Its ``data`` filter let members out of the folder in current
versions of Python (CVE-2024-12718, CVE-2025-4517), and it reads extended headers of any length into
memory. Only the parser of ``tarfile`` for the 512 bytes of a header is used. Formats: ustar and pax
(POSIX.1-2001), and the long names of GNU tar.
"""

import contextlib
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

from millrace import errors
from millrace.swarm.archives.folder import Tree
from millrace.swarm.archives.limits import READ_SIZE, make_refusal, make_truncation_error

_TAR_BLOCK = 512
_END = bytes(_TAR_BLOCK)
_REGULAR = {tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE}
_LONGEST_EXTENDED = 1 << 20  # bytes of an extended header, enough for access lists
_EXTENDED_IN_A_ROW = 16
_LONGEST_PADDING = 64 << 20  # zeros after a tar's end


class _TarStream:
    """Bytes of a tar, in order."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = memoryview(b"")
        self.at = 0

    def read_some(self, size: int) -> memoryview:
        """Return up to `size` of the next bytes; none at the end."""
        if not self._rest:
            self._rest = memoryview(next(self._blocks, b""))
        found, self._rest = self._rest[:size], self._rest[size:]
        self.at += len(found)
        return found

    def iterate_body(self, size: int) -> Iterator[memoryview]:
        """Yield the next `size` bytes, and skip the padding of their last block."""
        left = size
        while left:
            found = self.read_some(left)
            if not found:
                raise make_truncation_error()
            left -= len(found)
            yield found
        left = -size % _TAR_BLOCK
        while left:
            found = self.read_some(left)
            if not found:
                raise make_truncation_error()
            left -= len(found)

    def read_whole(self, size: int) -> bytes:
        return b"".join(self.iterate_body(size))


@dataclass(frozen=True, slots=True)
class _TarMember:
    name: bytes
    kind: bytes
    size: int
    target: bytes
    mode: int
    mtime: float


def untar(blocks: Iterator[bytes], tree: Tree) -> None:
    """Unpack a tar from its first byte to its last."""
    stream = _TarStream(blocks)
    shared: dict[bytes, bytes] = {}
    while (member := _read_member(stream, shared)) is not None:
        if member.kind in _REGULAR:
            tree.add_file(member.name, stream.iterate_body(member.size), member.mode, member.mtime)
        elif member.kind == tarfile.DIRTYPE:
            tree.add_folder(member.name, member.mode)
        elif member.kind == tarfile.SYMTYPE:
            tree.add_symlink(member.name, member.target)
        elif member.kind == tarfile.LNKTYPE:
            tree.add_hardlink(member.name, member.target)
        else:
            raise make_refusal(
                member.name,
                f"is neither file nor folder nor link, but of tar's type {ascii(member.kind)[1:]} "
                "(a device, a pipe, a sparse file ...): pack it again without it.",
            )
    padding = 0
    while found := stream.read_some(READ_SIZE):
        padding += len(found)
        if bytes(found).count(0) < len(found) or padding > _LONGEST_PADDING:
            raise errors.ArchiveError(
                "The file has further bytes after the end of the tar: if it has several tars, "
                "upload each on its own."
            )


def _read_member(stream: _TarStream, shared: dict[bytes, bytes]) -> _TarMember | None:
    """Return the header of the next member, with the values of extended headers before it.

    Returns:
        None at the end of the tar.
    """
    own: dict[bytes, bytes] = {}
    for _ in range(_EXTENDED_IN_A_ROW):
        at = stream.at
        block = stream.read_whole(_TAR_BLOCK)
        if block == _END:
            return None
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise errors.ArchiveError(
                f"The archive is no tar, or damaged at byte {at} of its content: {error}."
            ) from error
        if info.type in {tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK}:
            key = b"path" if info.type == tarfile.GNUTYPE_LONGNAME else b"linkpath"
            own[key] = _read_extended(stream, info).rstrip(b"\0")
        elif info.type == tarfile.XHDTYPE:
            own |= _parse_records(_read_extended(stream, info))
        elif info.type == tarfile.XGLTYPE:
            found = _parse_records(_read_extended(stream, info))
            if found.keys() - {b"mtime"}:
                raise errors.ArchiveError(
                    "The archive has a header with one name or size for all members: pack it again."
                )
            shared |= found
        else:
            return _make_member(info, shared | own)
    raise errors.ArchiveError(
        f"The archive is damaged: more than {_EXTENDED_IN_A_ROW} extended headers in a row, up to "
        f"byte {stream.at} of its content."
    )


def _read_extended(stream: _TarStream, info: tarfile.TarInfo) -> bytes:
    if not 0 <= info.size <= _LONGEST_EXTENDED:
        raise errors.ArchiveError(
            f"The archive has an extended header of {info.size} bytes, above the limit of "
            f"{_LONGEST_EXTENDED}: pack it again."
        )
    return stream.read_whole(info.size)


def _parse_records(data: bytes) -> dict[bytes, bytes]:
    """Return the used records of a pax header. Each record is a line: ``length key=value``."""
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(data) and data[at]:
        space = data.find(b" ", at, at + 9)
        length = data[at : max(space, at)]
        end = at + int(length) if length.isdigit() else 0
        if not at < space < end <= len(data) or data[end - 1] != ord("\n"):
            raise errors.ArchiveError("The archive is damaged: an extended header is malformed.")
        key, _, value = data[space + 1 : end - 1].partition(b"=")
        if key.startswith(b"GNU.sparse."):
            raise errors.ArchiveError("The archive holds a sparse file: pack it without --sparse.")
        if key in {b"path", b"linkpath", b"size", b"mtime"}:
            records[key] = value
        at = end
    return records


def _make_member(info: tarfile.TarInfo, records: dict[bytes, bytes]) -> _TarMember:
    name = records.get(b"path", info.name.encode("utf-8", "surrogateescape"))
    size = info.size
    if b"size" in records:
        size = int(records[b"size"]) if re.fullmatch(rb"\d{1,19}", records[b"size"]) else -1
    if size < 0:
        raise make_refusal(name, "has a malformed size: the archive is damaged.")
    mtime = float(info.mtime)
    with contextlib.suppress(ValueError):  # not a number: the time of the header is used
        mtime = float(records.get(b"mtime", mtime))
    return _TarMember(
        name=name,
        kind=info.type,
        size=size,
        target=records.get(b"linkpath", info.linkname.encode("utf-8", "surrogateescape")),
        mode=info.mode,
        mtime=mtime,
    )
