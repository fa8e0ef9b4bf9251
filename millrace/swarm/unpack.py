"""Unpack an archive that is still arriving, without trusting it.

Only folders and regular files are made while the archive is read, each below descriptors of the
folders above it, and never through a link. Symbolic links are written down, and made when all
else is there: so no member can be written through one. ``tarfile.extract`` is not used: its
``data`` filter could be led out of the folder (CVE-2024-12718, CVE-2025-4517) in the Pythons in
use, and it reads extended headers of any length into memory. Only its parser of the 512 bytes of
a header is (ustar and pax: POSIX.1-2001; GNU's long names).
"""

import contextlib
import errno
import os
import re
import stat
import struct
import tarfile
import time
import zipfile
import zlib
from calendar import timegm
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol, cast

import zstandard

from millrace import errors

_READ = 1 << 20  # bytes asked of the archive at a time
_TAR_BLOCK = 512
_END = bytes(_TAR_BLOCK)
_REGULAR = {tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE}
_LONGEST_EXTENDED = 1 << 20  # bytes of an extended header: access lists fit, and no memory is eaten
_EXTENDED_IN_A_ROW = 16
_LONGEST_PADDING = 64 << 20  # zeros after a tar's end
_LONGEST_PART = 255  # bytes of a name between two slashes, on every file system in use
_LINK_BYTES = 64 << 20  # names and targets of symbolic links, which wait in memory
_ZIP_DIRECTORY = 512 << 20

# A decoder is given so little at a time that the most it can become stays small: deflate makes at
# most 1032 bytes of one, zstd a block of 128 KiB of four.
_GZIP_FEED = 4 << 10
_ZSTD_FEED = 1 << 10
_ZSTD_WINDOW = 128 << 20

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_MODE, _FOLDER_MODE = 0o644, 0o755
_CANNOT_LINK = {errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV}
_LATER = 24 * 3600  # seconds that another machine's clock may be ahead

_UNIX = {3, 19}  # systems of a zip's maker whose attributes are Unix modes: Unix and macOS
_ZIP_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}  # of others zipfile bounds no memory
_UTF_8 = 0x800
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ENTRY = b"PK\x01\x02"


class Unpacking(StrEnum):
    """How an archive is unpacked; ``auto`` is for `detect` to decide."""

    AUTO = "auto"
    TAR = "tar"
    TAR_GZ = "tar.gz"
    TAR_ZST = "tar.zst"
    ZIP = "zip"


_ENDINGS = {
    ".tar": Unpacking.TAR,
    ".tar.gz": Unpacking.TAR_GZ,
    ".tgz": Unpacking.TAR_GZ,
    ".tar.zst": Unpacking.TAR_ZST,
    ".tzst": Unpacking.TAR_ZST,
    ".zip": Unpacking.ZIP,
}
_MAGIC = (
    (0, b"\x1f\x8b", Unpacking.TAR_GZ),
    (0, b"\x28\xb5\x2f\xfd", Unpacking.TAR_ZST),
    (0, b"PK\x03\x04", Unpacking.ZIP),
    (0, b"PK\x05\x06", Unpacking.ZIP),  # one without members
    (257, b"ustar", Unpacking.TAR),
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What an archive may become: of what is really written, not of what its headers say.

    Attributes:
        bytes: Unpacked bytes in all.
        members: Members, and folders that they imply.
        name_bytes: Bytes of a member's name, or of a link's target.
        depth: Parts of a name.
    """

    bytes: int = 1 << 40
    members: int = 2_000_000
    name_bytes: int = 2048
    depth: int = 64


@dataclass(frozen=True, slots=True)
class Unpacked:
    """What an archive became.

    Attributes:
        files: Files and links, not folders.
        bytes: Bytes written into them.
    """

    files: int
    bytes: int


class Reader(Protocol):
    """What an archive is read from: from its first byte to its last, once."""

    def read(self, size: int, /) -> bytes:
        """The next bytes, at most so many; waits for the first of them. Empty at the end."""
        ...


class _Seekable(Reader, Protocol):
    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def tell(self) -> int: ...


class _Decoder(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def detect(name: str, head: bytes) -> Unpacking:
    """How an archive is to be unpacked, by its name, and if that does not say, by its content.

    Args:
        name: Its file name or key.
        head: Its first bytes; 262 are enough.

    Raises:
        ConfigurationError: It is none that Millrace unpacks.
    """
    lower = name.lower()
    for ending, method in _ENDINGS.items():
        if lower.endswith(ending):
            return method
    for at, magic, method in _MAGIC:
        if head[at : at + len(magic)] == magic:
            return method
    raise errors.ConfigurationError(
        f"{name} is no archive that Millrace unpacks ({', '.join(list(Unpacking)[1:])}): "
        "leave unpack out, or say which of them it is."
    )


def unpack(
    archive: Reader | Path,
    method: Unpacking,
    into: Path,
    *,
    limits: Limits,
    mode: int | None = None,
    owner: tuple[int, int] | None = None,
) -> Unpacked:
    """Unpack an archive while it arrives, into a folder that nobody else uses yet.

    A tar is read once, in order and to its last byte; its members are on the disk (not synced)
    as soon as their bytes have been read. It takes some MiB of memory, and for the worst tar.zst
    below 300 MiB; a zip takes about 1 KiB for each member besides.

    A file of the same name as an earlier one replaces it, as in tar (``tar -r``), and so does a
    link an earlier link; other things that are there twice are refused, folders aside. Times of
    files are kept where they are not in the future, a zip's read as UTC. Not kept are owners,
    extended attributes, the bits setuid, setgid and sticky, and write permission for others.

    Args:
        archive: Where its bytes come from. A zip's directory is at its end: it needs a path, or
            an object with ``seek`` and ``tell`` that is whole.
        method: What it is; `detect` tells.
        into: An empty folder. After an error it holds a part, and is to be thrown away.
        limits: What the archive may become.
        mode: Permission bits of the files; those that are executable in the archive are so for
            whoever may read them, and so are folders. None keeps the archive's.
        owner: User and group id to give everything to; needs root.

    Raises:
        ArchiveError: It is damaged, or larger than the limits, or a member is refused. Nothing
            outside the folder was touched.
        ConfigurationError: The method does not fit, or the folder is not empty.
    """
    if method is Unpacking.AUTO:
        raise errors.ConfigurationError("How to unpack is not decided: ask detect, or name it.")
    if any(into.iterdir()):
        raise errors.ConfigurationError(f"{into} is not empty: give a new folder to unpack into.")
    with contextlib.ExitStack() as stack:
        opened = archive
        if isinstance(opened, Path):
            opened = stack.enter_context(opened.open("rb"))
        tree = stack.enter_context(contextlib.closing(_Tree(into, limits, mode, owner)))
        if method is Unpacking.ZIP:
            _unzip(opened, tree)
        else:
            _untar(_Stream(_blocks(opened, method)), tree)
        return tree.finish()


def _refused(name: bytes, why: str) -> errors.ArchiveError:
    shown = repr(name[:200].decode("utf-8", "backslashreplace"))
    return errors.ArchiveError(f"The archive's member {shown} {why}")


class _Tree:
    """The folder that is unpacked into: all that is ever written is written here."""

    def __init__(
        self, root: Path, limits: Limits, mode: int | None, owner: tuple[int, int] | None
    ) -> None:
        self.limits = limits
        self._mode = None if mode is None else mode & 0o777
        self._owner = owner
        self._latest = time.time() + _LATER
        # The folder of the last member, and the descriptors of all folders down to it.
        self._path: list[bytes] = []
        self._descriptors = [os.open(root, _FOLDER)]
        self._links: dict[tuple[bytes, ...], bytes] = {}
        self._link_bytes = 0
        self._members = 0
        self._files = 0
        self._bytes = 0

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def folder(self, name: bytes, mode: int) -> None:
        parts = self._begin(name, folder=True)
        if parts:  # else it is the folder itself, which is the caller's
            self._make_folder(parts[-1], self._enter(name, parts[:-1]))
            self._permit(self._enter(name, parts), self._folder_mode(mode))

    def file(
        self, name: bytes, body: Iterable[bytes | memoryview], mode: int, mtime: float
    ) -> None:
        parts = self._begin(name)
        self._fill(name, parts, body, self._file_mode(mode), mtime)

    def symlink(self, name: bytes, target: bytes) -> None:
        """Write a link down, to be made when all else is there.

        Its target may go up to the folder that is unpacked into, and then only down. A link lies
        in a real folder, so going up from there leads to real folders; and going down through
        other links leads to where these lead, all of them inside. To go up behind a name, which
        may be a link, is what leads out: ``a/b/c -> ../..`` and ``d -> a/b/c/..``.
        """
        self._count()
        parts = self._parts(name)
        self._check_links(name, parts[:-1])
        self._plan(name, parts, target)

    def hardlink(self, name: bytes, target: bytes) -> None:
        """Link an earlier file of the archive; copy it where the file system cannot."""
        self._count()
        parts = self._parts(name)
        try:
            source = self._parts(target)
        except errors.ArchiveError as error:
            raise _refused(name, f"links to what is no member. {error}") from None
        if source in self._links:  # a link has the same text under either name
            self._check_links(name, parts[:-1])
            self._plan(name, parts, self._links[source])
            return
        self._check_links(name, parts)
        try:
            at = os.dup(self._enter(name, source[:-1], make=False))
        except FileNotFoundError:
            raise self._no_earlier(name) from None
        try:
            self._link(name, parts, at, source[-1])
        finally:
            os.close(at)

    def finish(self) -> Unpacked:
        """Make the links; nothing is written after them."""
        for parts, target in self._links.items():
            name = b"/".join(parts)
            at = self._enter(name, parts[:-1])
            try:
                os.symlink(target, parts[-1], dir_fd=at)
            except FileExistsError:
                raise self._twice(name) from None
            if self._owner is not None:
                os.chown(parts[-1], *self._owner, dir_fd=at, follow_symlinks=False)
        return Unpacked(self._files + len(self._links), self._bytes)

    def _begin(self, name: bytes, *, folder: bool = False) -> tuple[bytes, ...]:
        self._count()
        parts = self._parts(name, folder=folder)
        self._check_links(name, parts)
        return parts

    def _count(self) -> None:
        self._members += 1
        if self._members > self.limits.members:
            raise errors.ArchiveError(
                f"The archive has more than {self.limits.members} members: raise the limit if it "
                "is meant to."
            )

    def _parts(self, name: bytes, *, folder: bool = False) -> tuple[bytes, ...]:
        """A name between its slashes, without ``.`` and empty parts; those of a file end in one."""
        parts = name.split(b"/")
        if name.startswith(b"/"):
            raise _refused(name, "has an absolute name: pack it with a relative one.")
        if b".." in parts:
            raise _refused(name, "has '..' in its name: pack it from the folder that it is in.")
        if b"\0" in name or b"\\" in name:
            raise _refused(name, "has a NUL or a backslash in its name: rename it.")
        longest = max(map(len, parts))
        if len(name) > self.limits.name_bytes or longest > _LONGEST_PART:
            raise _refused(name, "has a name that is too long: rename it.")
        found = tuple(part for part in parts if part not in {b"", b"."})
        if len(found) > self.limits.depth:
            raise _refused(name, f"lies more than {self.limits.depth} folders deep.")
        if folder:
            if not name:
                raise _refused(name, "is a folder without a name.")
        elif not found or parts[-1] in {b"", b"."}:
            raise _refused(name, "is a file without a name, or with that of a folder: rename it.")
        return found

    def _check_links(self, name: bytes, parts: tuple[bytes, ...]) -> None:
        if self._links and any(parts[:end] in self._links for end in range(1, len(parts) + 1)):
            raise _refused(name, "would be written through a link of the archive: pack it again.")

    def _enter(self, name: bytes, parts: tuple[bytes, ...], *, make: bool = True) -> int:
        """The descriptor of a folder, valid until the next call. What is missing is made."""
        shared = 0
        for ours, theirs in zip(self._path, parts, strict=False):
            if ours != theirs:
                break
            shared += 1
        while len(self._path) > shared:
            self._path.pop()
            os.close(self._descriptors.pop())
        for part in parts[shared:]:
            above = self._descriptors[-1]
            made = make and self._make_folder(part, above)
            if made:
                self._count()
            try:
                descriptor = os.open(part, _FOLDER, dir_fd=above)
            except OSError as error:
                if error.errno in {errno.ENOTDIR, errno.ELOOP}:
                    raise _refused(name, "lies below a file or a link.") from None
                raise
            self._path.append(part)
            self._descriptors.append(descriptor)
            if made:
                self._permit(descriptor, self._folder_mode(_FOLDER_MODE))
        return self._descriptors[-1]

    def _make_folder(self, part: bytes, above: int) -> bool:
        try:
            os.mkdir(part, 0o700, dir_fd=above)
        except FileExistsError:
            return False
        return True

    def _fill(
        self,
        name: bytes,
        parts: tuple[bytes, ...],
        body: Iterable[bytes | memoryview],
        mode: int,
        mtime: float,
    ) -> None:
        at = self._enter(name, parts[:-1])
        try:
            descriptor = os.open(parts[-1], _NEW_FILE, 0o600, dir_fd=at)
        except FileExistsError:
            self._remove(name, at, parts[-1])
            descriptor = os.open(parts[-1], _NEW_FILE, 0o600, dir_fd=at)
        try:
            for block in body:
                self._write(descriptor, block)
            self._permit(descriptor, mode)
            if 0 <= mtime <= self._latest:
                nanoseconds = round(mtime * 1e9)
                os.utime(descriptor, ns=(nanoseconds, nanoseconds))
        finally:
            os.close(descriptor)
        self._files += 1

    def _write(self, descriptor: int, block: bytes | memoryview) -> None:
        self._bytes += len(block)
        if self._bytes > self.limits.bytes:
            raise errors.ArchiveError(
                f"The archive holds more than {self.limits.bytes} bytes: raise the limit if it is "
                "meant to."
            )
        while block:
            block = memoryview(block)[os.write(descriptor, block) :]

    def _permit(self, descriptor: int, mode: int) -> None:
        if self._owner is not None:
            os.fchown(descriptor, *self._owner)
        os.fchmod(descriptor, mode)

    def _file_mode(self, mode: int) -> int:
        if self._mode is None:
            return mode & 0o755 | 0o600
        return self._mode | _searchable(self._mode) if mode & 0o100 else self._mode

    def _folder_mode(self, mode: int) -> int:
        """Of a folder; its owner may always write, for members may still come."""
        if self._mode is None:
            return mode & 0o755 | 0o700
        return self._mode | _searchable(self._mode) | 0o700

    def _remove(self, name: bytes, at: int, last: bytes) -> None:
        """Make place for a later member of the same name."""
        if not stat.S_ISREG(os.stat(last, dir_fd=at, follow_symlinks=False).st_mode):
            raise self._twice(name)
        os.unlink(last, dir_fd=at)
        self._files -= 1

    def _link(self, name: bytes, parts: tuple[bytes, ...], source_at: int, source: bytes) -> None:
        try:
            found = os.stat(source, dir_fd=source_at, follow_symlinks=False)
        except FileNotFoundError:
            raise self._no_earlier(name) from None
        if not stat.S_ISREG(found.st_mode):
            raise self._no_earlier(name)
        at, last = self._enter(name, parts[:-1]), parts[-1]
        try:
            there = os.stat(last, dir_fd=at, follow_symlinks=False)
        except FileNotFoundError:
            pass
        else:
            if os.path.samestat(there, found):
                return  # tar links a file to itself that it was told to pack twice
            self._remove(name, at, last)
        try:
            os.link(source, last, src_dir_fd=source_at, dst_dir_fd=at, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
            mode = stat.S_IMODE(found.st_mode)
            self._fill(name, parts, _content(source, source_at), mode, found.st_mtime)
        else:
            self._files += 1

    def _plan(self, name: bytes, parts: tuple[bytes, ...], target: bytes) -> None:
        if b"\0" in target or b"\\" in target or not 0 < len(target) <= self.limits.name_bytes:
            raise _refused(name, "is a link whose target is empty, too long or oddly named.")
        steps = [step for step in target.split(b"/") if step not in {b"", b"."}]
        up = next((i for i, step in enumerate(steps) if step != b".."), len(steps))
        if target.startswith(b"/") or up > len(parts) - 1 or b".." in steps[up:]:
            raise _refused(
                name, "is a link that may lead out of the archive: pack what it leads to instead."
            )
        self._link_bytes += len(name) + len(target)
        if self._link_bytes > _LINK_BYTES:
            raise _refused(name, "is one link too many: pack files instead of links.")
        self._links[parts] = target

    def _twice(self, name: bytes) -> errors.ArchiveError:
        return _refused(name, "is in it twice, as different kinds of thing: pack it again.")

    def _no_earlier(self, name: bytes) -> errors.ArchiveError:
        return _refused(name, "is a hard link to what is no earlier file of it: pack it again.")


def _searchable(mode: int) -> int:
    return (mode & 0o444) >> 2


def _content(name: bytes, at: int) -> Iterator[bytes]:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        while block := os.read(descriptor, _READ):
            yield block
    finally:
        os.close(descriptor)


def _blocks(archive: Reader, method: Unpacking) -> Iterator[bytes]:
    """A tar's bytes, as many at a time as have arrived."""
    if method is Unpacking.TAR_GZ:
        return _inflated(archive, lambda: zlib.decompressobj(wbits=31), _GZIP_FEED)
    if method is Unpacking.TAR_ZST:
        zstd = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        # Cast: zstandard's stubs know only bytes-like types that Python has since dropped.
        return _inflated(archive, lambda: cast("_Decoder", zstd.decompressobj()), _ZSTD_FEED)
    return iter(lambda: archive.read(_READ), b"")


def _inflated(archive: Reader, new: Callable[[], _Decoder], feed: int) -> Iterator[bytes]:
    """What compressed frames hold, one frame after another; zeros may stand between them."""
    decoder = new()
    while data := archive.read(_READ):
        for at in range(0, len(data), feed):
            piece = data[at : at + feed]
            while piece:
                if decoder.eof:
                    piece = piece.lstrip(b"\0")
                    if not piece:
                        break
                    decoder = new()
                try:
                    found = decoder.decompress(piece)
                except (zlib.error, zstandard.ZstdError) as error:
                    raise errors.ArchiveError(
                        f"The archive is damaged, or not compressed as was said: {error}."
                    ) from error
                piece = decoder.unused_data if decoder.eof else b""
                if found:
                    yield found
    if not decoder.eof:
        raise _cut()


def _cut() -> errors.ArchiveError:
    return errors.ArchiveError("The archive ends before its end: upload it again.")


class _Stream:
    """A tar's bytes, in order."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = memoryview(b"")
        self.at = 0

    def some(self, size: int) -> memoryview:
        """The next bytes, at most so many; empty at the end."""
        if not self._rest:
            self._rest = memoryview(next(self._blocks, b""))
        found, self._rest = self._rest[:size], self._rest[size:]
        self.at += len(found)
        return found

    def body(self, size: int) -> Iterator[memoryview]:
        """The so many next bytes, and past what fills up their last block."""
        left = size
        while left:
            found = self.some(left)
            if not found:
                raise _cut()
            left -= len(found)
            yield found
        left = -size % _TAR_BLOCK
        while left:
            found = self.some(left)
            if not found:
                raise _cut()
            left -= len(found)

    def whole(self, size: int) -> bytes:
        return b"".join(self.body(size))


@dataclass(frozen=True, slots=True)
class _Member:
    name: bytes
    kind: bytes
    size: int
    target: bytes
    mode: int
    mtime: float


def _untar(stream: _Stream, tree: _Tree) -> None:
    shared: dict[bytes, bytes] = {}
    while (member := _next_member(stream, shared)) is not None:
        if member.kind in _REGULAR:
            tree.file(member.name, stream.body(member.size), member.mode, member.mtime)
        elif member.kind == tarfile.DIRTYPE:
            tree.folder(member.name, member.mode)
        elif member.kind == tarfile.SYMTYPE:
            tree.symlink(member.name, member.target)
        elif member.kind == tarfile.LNKTYPE:
            tree.hardlink(member.name, member.target)
        else:
            raise _refused(
                member.name,
                f"is neither file nor folder nor link, but of tar's type {ascii(member.kind)[1:]} "
                "(a device, a pipe, a sparse file ...): pack it again without it.",
            )
    padding = 0
    while found := stream.some(_READ):
        padding += len(found)
        if bytes(found).count(0) < len(found) or padding > _LONGEST_PADDING:
            raise errors.ArchiveError(
                "Something follows the archive's end: if tars were joined to one file, upload "
                "them apart."
            )


def _next_member(stream: _Stream, shared: dict[bytes, bytes]) -> _Member | None:
    """The next member's header, with all that extended headers before it say; None at the end."""
    own: dict[bytes, bytes] = {}
    for _ in range(_EXTENDED_IN_A_ROW):
        at = stream.at
        block = stream.whole(_TAR_BLOCK)
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
            own[key] = _extended(stream, info).rstrip(b"\0")
        elif info.type == tarfile.XHDTYPE:
            own |= _records(_extended(stream, info))
        elif info.type == tarfile.XGLTYPE:
            found = _records(_extended(stream, info))
            if found.keys() - {b"mtime"}:
                raise errors.ArchiveError("The archive gives all its members one name or size.")
            shared |= found
        else:
            return _member(info, shared | own)
    raise errors.ArchiveError(
        f"The archive is damaged: extended headers without end at byte {stream.at}."
    )


def _extended(stream: _Stream, info: tarfile.TarInfo) -> bytes:
    if not 0 <= info.size <= _LONGEST_EXTENDED:
        raise errors.ArchiveError(
            f"The archive has an extended header of {info.size} bytes, more than any is long: "
            "pack it again."
        )
    return stream.whole(info.size)


def _records(data: bytes) -> dict[bytes, bytes]:
    """The records of a pax header that say something to us: ``length key=value``, a line each."""
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(data) and data[at]:
        space = data.find(b" ", at, at + 9)
        length = data[at : max(space, at)]
        end = at + int(length) if length.isdigit() else 0
        if not at < space < end <= len(data) or data[end - 1] != ord("\n"):
            raise errors.ArchiveError("The archive is damaged: an extended header is not one.")
        key, _, value = data[space + 1 : end - 1].partition(b"=")
        if key.startswith(b"GNU.sparse."):
            raise errors.ArchiveError("The archive holds a sparse file: pack it without --sparse.")
        if key in {b"path", b"linkpath", b"size", b"mtime"}:
            records[key] = value
        at = end
    return records


def _member(info: tarfile.TarInfo, records: dict[bytes, bytes]) -> _Member:
    name = records.get(b"path", info.name.encode("utf-8", "surrogateescape"))
    size = info.size
    if b"size" in records:
        size = int(records[b"size"]) if re.fullmatch(rb"\d{1,19}", records[b"size"]) else -1
    if size < 0:
        raise _refused(name, "has a size that is none: the archive is damaged.")
    mtime = float(info.mtime)
    with contextlib.suppress(ValueError):  # no number: the header's then
        mtime = float(records.get(b"mtime", mtime))
    return _Member(
        name=name,
        kind=info.type,
        size=size,
        target=records.get(b"linkpath", info.linkname.encode("utf-8", "surrogateescape")),
        mode=info.mode,
        mtime=mtime,
    )


class _ZipSource:
    """A zip's bytes, for zipfile, which itself would read a directory of any length."""

    def __init__(self, source: _Seekable, members: int) -> None:
        self._source = source
        self._members = members
        self.opened = False

    def read(self, size: int = -1, /) -> bytes:
        if size > _ZIP_DIRECTORY:
            raise errors.ArchiveError(
                "The archive is damaged: its directory is longer than any is."
            )
        data = self._source.read(size if size >= 0 else _READ)  # all of its end: of 64 KiB
        # zipfile makes an object of each entry, before anybody can count them.
        if not self.opened and data.count(_ENTRY) > self._members:
            raise errors.ArchiveError(
                f"The archive has more than {self._members} members: raise the limit if it is "
                "meant to."
            )
        return data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        if whence == 0 and offset < 0:
            raise zipfile.BadZipFile("a place before its beginning")
        return self._source.seek(offset, whence)

    def tell(self) -> int:
        return self._source.tell()

    def seekable(self) -> bool:
        return True


def _unzip(archive: Reader, tree: _Tree) -> None:
    if not (hasattr(archive, "seek") and hasattr(archive, "tell")):
        raise errors.ConfigurationError(
            "A zip's directory is at its end: give its path once it has arrived."
        )
    source = _ZipSource(cast("_Seekable", archive), tree.limits.members)
    with contextlib.ExitStack() as stack:
        with _reading_zip():
            opened = stack.enter_context(zipfile.ZipFile(source))
        source.opened = True
        end = 0
        for info in sorted(opened.infolist(), key=lambda info: info.header_offset):
            with _reading_zip():
                if info.header_offset < end:
                    raise zipfile.BadZipFile("members overlap")
                source.seek(info.header_offset)
                magic, name, extra = _LOCAL_HEADER.unpack(source.read(_LOCAL_HEADER.size))
                end = info.header_offset + _LOCAL_HEADER.size + name + extra + info.compress_size
                if magic != b"PK\x03\x04":
                    raise zipfile.BadZipFile("a member is not where it should be")
            _unzip_member(opened, info, tree)


def _unzip_member(opened: zipfile.ZipFile, info: zipfile.ZipInfo, tree: _Tree) -> None:
    name = _zip_name(info)
    mode = info.external_attr >> 16 if info.create_system in _UNIX else 0
    kind = stat.S_IFMT(mode)
    if info.flag_bits & 1 or info.compress_type not in _ZIP_METHODS:
        raise _refused(name, "is encrypted, or compressed other than by deflate: pack it again.")
    if kind not in {0, stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK}:
        raise _refused(name, "is neither file nor folder nor link: pack it again without it.")
    if kind == stat.S_IFLNK:
        if info.file_size > tree.limits.name_bytes:
            raise _refused(name, "is a link whose target is too long.")
        tree.symlink(name, b"".join(_zip_body(opened, info, name)))
    elif kind == stat.S_IFDIR or name.endswith(b"/"):
        tree.folder(name, mode or _FOLDER_MODE)
    else:
        tree.file(name, _zip_body(opened, info, name), mode or _FILE_MODE, _zip_time(info))


def _zip_name(info: zipfile.ZipInfo) -> bytes:
    """A member's name: UTF-8 also where the flag is missing, as Info-ZIP and macOS leave it."""
    name = info.orig_filename  # filename is cut at a NUL
    if not info.flag_bits & _UTF_8:
        with contextlib.suppress(UnicodeError):
            raw = name.encode("cp437")
            raw.decode("utf-8")
            return raw
    return name.encode("utf-8", "surrogateescape")


def _zip_body(opened: zipfile.ZipFile, info: zipfile.ZipInfo, name: bytes) -> Iterator[bytes]:
    left = info.file_size
    with _reading_zip(), opened.open(info) as file:
        while data := file.read(_READ):
            left -= len(data)
            yield data
    if left:
        raise _refused(name, "is not as long as is said of it: the archive is damaged.")


def _zip_time(info: zipfile.ZipInfo) -> float:
    try:
        return timegm((*info.date_time, 0, 1, 0))
    except ValueError:  # a day that is none
        return -1


@contextlib.contextmanager
def _reading_zip() -> Generator[None]:
    """Say what zipfile says of a damaged archive, in any of its ways, in ours."""
    try:
        yield
    except (
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        EOFError,
        LookupError,
        RuntimeError,
        ValueError,
        OverflowError,
    ) as error:
        raise errors.ArchiveError(
            f"The archive is damaged, or no zip: {errors.one_line(error).rstrip('.')}."
        ) from error
