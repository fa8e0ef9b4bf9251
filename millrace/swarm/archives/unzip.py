"""Read a complete zip, without trusting its directory."""

import contextlib
import stat
import struct
import zipfile
import zlib
from calendar import timegm
from collections.abc import Generator, Iterator
from typing import Protocol, cast

from millrace import errors
from millrace.swarm.archives.folder import FOLDER_MODE, Tree
from millrace.swarm.archives.limits import READ_SIZE, Reader, make_refusal

_FILE_MODE = 0o644
_LONGEST_DIRECTORY = 512 << 20  # bytes
_UNIX = {3, 19}  # systems that write Unix modes into a zip: Unix and macOS
_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}  # zipfile limits no memory for others
_UTF_8 = 0x800
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ENTRY = b"PK\x01\x02"


class _Seekable(Reader, Protocol):
    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def tell(self) -> int: ...


class _ZipSource:
    """Bytes of a zip for zipfile, with limits on its directory, which zipfile does not have."""

    def __init__(self, source: _Seekable, members: int) -> None:
        self._source = source
        self._members = members
        self.opened = False

    def read(self, size: int = -1, /) -> bytes:
        if size > _LONGEST_DIRECTORY:
            raise errors.ArchiveError(
                f"The archive is damaged: its directory has more than {_LONGEST_DIRECTORY} bytes."
            )
        # Without a size, zipfile reads the end of the file: 64 KiB.
        data = self._source.read(size if size >= 0 else READ_SIZE)
        # zipfile creates an object for each entry, so the entries are counted before.
        if not self.opened and data.count(_ENTRY) > self._members:
            raise errors.ArchiveError(
                f"The archive has more than {self._members} members: raise the limit if the "
                "archive is correct."
            )
        return data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        if whence == 0 and offset < 0:
            raise zipfile.BadZipFile("an offset before its beginning")
        return self._source.seek(offset, whence)

    def tell(self) -> int:
        return self._source.tell()

    def seekable(self) -> bool:
        return True


def unzip(archive: Reader, tree: Tree) -> None:
    """Unpack a zip, in the order of its bytes. The source needs ``seek`` and ``tell``."""
    if not (hasattr(archive, "seek") and hasattr(archive, "tell")):
        raise errors.ConfigurationError(
            "A zip is unpacked when it is complete, since its directory is at its end: give the "
            "path of the complete file."
        )
    source = _ZipSource(cast("_Seekable", archive), tree.limits.members)
    with contextlib.ExitStack() as stack:
        with _translate_errors():
            opened = stack.enter_context(zipfile.ZipFile(source))
        source.opened = True
        end = 0
        for info in sorted(opened.infolist(), key=lambda info: info.header_offset):
            with _translate_errors():
                if info.header_offset < end:
                    raise zipfile.BadZipFile("members overlap")
                source.seek(info.header_offset)
                magic, name, extra = _LOCAL_HEADER.unpack(source.read(_LOCAL_HEADER.size))
                end = info.header_offset + _LOCAL_HEADER.size + name + extra + info.compress_size
                if magic != b"PK\x03\x04":
                    raise zipfile.BadZipFile("a member is not at its offset in the directory")
            _unzip_member(opened, info, tree)


def _unzip_member(opened: zipfile.ZipFile, info: zipfile.ZipInfo, tree: Tree) -> None:
    name = _decode_name(info)
    mode = info.external_attr >> 16 if info.create_system in _UNIX else 0
    kind = stat.S_IFMT(mode)
    if info.flag_bits & 1 or info.compress_type not in _METHODS:
        raise make_refusal(
            name, "is encrypted, or compressed other than by deflate: pack it again."
        )
    if kind not in {0, stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK}:
        raise make_refusal(name, "is neither file nor folder nor link: pack it again without it.")
    if kind == stat.S_IFLNK:
        if info.file_size > tree.limits.name_bytes:
            raise make_refusal(name, "is a link whose target is too long.")
        tree.add_symlink(name, b"".join(_iterate_body(opened, info, name)))
    elif kind == stat.S_IFDIR or name.endswith(b"/"):
        tree.add_folder(name, mode or FOLDER_MODE)
    else:
        tree.add_file(
            name, _iterate_body(opened, info, name), mode or _FILE_MODE, _parse_time(info)
        )


def _decode_name(info: zipfile.ZipInfo) -> bytes:
    """Return the name of a member. Accept UTF-8 without its flag, as from Info-ZIP and macOS."""
    name = info.orig_filename  # `filename` would be cut at a NUL
    if not info.flag_bits & _UTF_8:
        with contextlib.suppress(UnicodeError):
            raw = name.encode("cp437")
            raw.decode("utf-8")
            return raw
    return name.encode("utf-8", "surrogateescape")


def _iterate_body(opened: zipfile.ZipFile, info: zipfile.ZipInfo, name: bytes) -> Iterator[bytes]:
    left = info.file_size
    with _translate_errors(), opened.open(info) as file:
        while data := file.read(READ_SIZE):
            left -= len(data)
            yield data
    if left:
        raise make_refusal(
            name, "has another length than the directory states: the archive is damaged."
        )


def _parse_time(info: zipfile.ZipInfo) -> float:
    try:
        return timegm((*info.date_time, 0, 1, 0))
    except ValueError:  # an invalid date
        return -1


@contextlib.contextmanager
def _translate_errors() -> Generator[None]:
    """Raise an `ArchiveError` for each kind of error that zipfile raises for a damaged archive."""
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
            f"The archive is damaged, or no zip: {errors.format_error(error).rstrip('.')}."
        ) from error
