"""Headers of tar files: ustar (POSIX.1-1988), pax (POSIX.1-2001) and GNU, with long names.

A member's data lies between its header and the next one, so headers are read one after the other.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from millrace.datasets.sources.decoder import DamageError
from millrace.schemas.dataset import TAR_BLOCK

_MAX_EXTENSION = 1 << 20  # bytes of a long name, or of the pax records of one member
_END_CHECK = 1 << 20  # bytes after the end of an archive that are looked at
_OCTAL = re.compile(rb"[ \0]*([0-7]*)[ \0]*")
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ\0", b"\x04\x22\x4d\x18")
_FILE_TYPES = b"0\x007"
_FOLDER_TYPES = b"5DV"  # folders, and the label of a volume
_FAULTS = {
    b"1": "is a link",
    b"2": "is a link",
    b"3": "is a device",
    b"4": "is a device",
    b"6": "is a pipe",
    b"S": "is sparse",
}
_WITHOUT_DATA = b"123456"  # whatever their size is, as POSIX says and tarfile reads them

Read = Callable[[int, int], bytes]
"""Function that returns bytes of a file from an offset on: as many as wanted, or up to the end."""


class TarMember(NamedTuple):
    """A member of a tar file that is no folder.

    Attributes:
        name: Name of the member. Bytes that are not UTF-8 are lone surrogates.
        header: Offset of the member's own header, after those of its long name.
        offset: Offset of the data.
        size: Bytes of the data.
        fault: Reason why the member is no plain file, after its name; empty for a plain file.
    """

    name: str
    header: int
    offset: int
    size: int
    fault: str


@dataclass(slots=True)
class _Extension:
    """Values from the headers before a member's own."""

    name: bytes | None = None
    size: int | None = None
    is_sparse: bool = False
    is_empty: bool = True

    def set_name(self, name: bytes) -> None:
        """Set the member's name."""
        self.name, self.is_empty = name, False

    def apply_pax(self, body: bytes) -> None:
        """Set the values of pax records.

        Raises:
            DamageError: The records cannot be read.
        """
        self.is_empty = False
        for keyword, value in _iterate_pax_records(body):
            if keyword in {b"path", b"GNU.sparse.name"} and value:
                self.name = value
            elif keyword == b"size" and value:
                if not value.isdigit() or len(value) > 20:
                    raise DamageError("a size is no number")
                self.size = int(value)
            self.is_sparse = self.is_sparse or keyword.startswith(b"GNU.sparse.")


@dataclass(slots=True)
class TarHeaders:
    """Headers of a tar file.

    Attributes:
        read: Function that reads the file.
        size: Bytes of the file.
        position: Offset that was reached, for messages.
        end_fault: Reason why the file may not be whole; empty if there is none. The reason is known
            after all members.
    """

    read: Read
    size: int
    position: int = 0
    end_fault: str = field(default="", init=False)

    def iterate_members(self) -> Iterator[TarMember]:
        """Yield the members in the order of the file, up to the end of the archive.

        Raises:
            DamageError: A header is damaged, or the file is cut short, so that the position of the
                next member is not known.
        """
        extension = _Extension()
        while (block := self._read_header(extension)) is not None:
            kind, size = block[156:157], _parse_number(block[124:136])
            data = self.position + TAR_BLOCK
            if kind in b"xXgLK":
                if kind != b"g" and size > _MAX_EXTENSION:
                    raise DamageError(f"a name or its records have {size} bytes")
                if data + size > self.size:
                    raise DamageError("the file is cut short")
                if kind in b"xX":
                    extension.apply_pax(self.read(data, size))
                elif kind == b"L":
                    extension.set_name(self.read(data, size).partition(b"\0")[0])
                self.position = data + _round_up(size)
                continue
            member = self._make_member(block, kind, size, extension)
            extension = _Extension()
            if member is not None:
                yield member

    def _make_member(
        self, block: bytes, kind: bytes, size: int, extension: _Extension
    ) -> TarMember | None:
        """Return the member of a header, and go to the next header; None for a folder."""
        name, header, data = extension.name, self.position, self.position + TAR_BLOCK
        own_name = block[:100].partition(b"\0")[0]
        is_old_folder = kind == b"\0" and own_name.endswith(b"/")  # of a tar of Unix V7
        if name is None:
            name = own_name
            prefix = block[345:500].partition(b"\0")[0]
            if prefix and block[257:263] == b"ustar\0":
                name = prefix + b"/" + name
        if kind == b"S":
            more = block[482:483] != b"\0"
            while more:  # each block has further parts of a sparse file
                part = self.read(data, TAR_BLOCK)
                if len(part) < TAR_BLOCK:
                    raise DamageError("the file is cut short")
                more, data = part[504:505] != b"\0", data + TAR_BLOCK
        if extension.size is not None:
            size = extension.size
        if kind in _WITHOUT_DATA or is_old_folder:
            size = 0
        shown = name.decode("utf-8", "surrogateescape")
        if data + size > self.size:
            lacking = data + size - self.size
            raise DamageError(f"the file is cut short: its last member lacks {lacking} bytes")
        self.position = data + _round_up(size)
        if kind in _FOLDER_TYPES or (kind in _FILE_TYPES and shown.endswith("/")):
            return None
        fault = _FAULTS.get(kind, "")
        if kind in _FILE_TYPES:
            fault = "is sparse" if extension.is_sparse else ""
        elif not fault:
            fault = f"has the unknown type {kind!r}"
        return TarMember(shown, header, data, size, fault)

    def _read_header(self, extension: _Extension) -> bytes | None:
        """Return the header at the position; None at the end of the archive."""
        block = self.read(self.position, TAR_BLOCK)
        if not block.strip(b"\0"):
            if not extension.is_empty:
                raise DamageError("the file is cut short")
            if len(block) < TAR_BLOCK:
                self.end_fault = "the tar file has no end, and may be cut short"
            elif self.read(self.position, _END_CHECK).strip(b"\0"):
                self.end_fault = (
                    "the tar file goes on after its end, where readers stop: join the members of "
                    "tar files by `tar --concatenate`"
                )
            return None
        if self.position == 0 and block.startswith(_COMPRESSED):
            raise DamageError("the file is compressed")
        if len(block) < TAR_BLOCK:
            raise DamageError("the file is cut short")
        if not _has_checksum(block):
            raise DamageError("a header is damaged" if self.position else "it is none")
        return block


def _round_up(size: int) -> int:
    return -(-size // TAR_BLOCK) * TAR_BLOCK


def _has_checksum(block: bytes) -> bool:
    wanted = _OCTAL.fullmatch(block[148:156])
    if wanted is None or not wanted[1]:
        return False
    value, field_sum = int(wanted[1], 8), 8 * ord(" ") - sum(block[148:156])
    if sum(block) + field_sum == value:
        return True
    # Some old programs summed signed bytes.
    negative = sum(1 for byte in block[:148] + block[156:] if byte > 127)
    return sum(block) + field_sum - 256 * negative == value


def _parse_number(value: bytes) -> int:
    """Return a number of a header, in octal digits or in base 256.

    Raises:
        DamageError: The bytes are no size.
    """
    if value[0] & 0x80:
        if value[0] & 0x40:
            raise DamageError("a size is negative")
        return int.from_bytes(bytes([value[0] & 0x7F]) + value[1:], "big")
    digits = _OCTAL.fullmatch(value.partition(b"\0")[0])
    if digits is None:
        raise DamageError("a size is no number")
    return int(digits[1] or b"0", 8)


def _iterate_pax_records(body: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keywords and values of pax records, each ``LENGTH KEYWORD=VALUE NEWLINE``."""
    at = 0
    while at < len(body) and body[at]:
        digits = body[at : at + 20].partition(b" ")[0]
        end = at + int(digits) if digits.isdigit() else 0
        record = body[at + len(digits) + 1 : end]
        keyword, equals, value = record.partition(b"=")
        if end > len(body) or not equals or not value.endswith(b"\n"):
            raise DamageError("the pax records of a member cannot be read")
        yield keyword, value[:-1]
        at = end
