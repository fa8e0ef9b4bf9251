"""Unpack an archive while it arrives, without trusting it.

`untar` and `unzip` read the members. `Tree` checks and writes them.
"""

import contextlib
import io
import tarfile
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path

from millrace import errors
from millrace.swarm.archives.folder import Tree
from millrace.swarm.archives.inflate import gunzip, unzstd
from millrace.swarm.archives.limits import READ_SIZE, Reader, UnpackLimits, UnpackResult
from millrace.swarm.archives.untar import untar
from millrace.swarm.archives.unzip import unzip

__all__ = ["Reader", "UnpackLimits", "UnpackResult", "Unpacking", "detect", "unpack"]


class Unpacking(StrEnum):
    """Method of unpacking an archive. For ``auto``, `detect` decides.

    ``gz`` and ``zst`` are for a single compressed file without an archive.
    """

    AUTO = "auto"
    TAR = "tar"
    TAR_GZ = "tar.gz"
    TAR_ZST = "tar.zst"
    ZIP = "zip"
    GZ = "gz"
    ZST = "zst"


SINGLE_FILE_METHODS = {Unpacking.GZ, Unpacking.ZST}
"""Methods whose result is one file, not a folder."""

CONTENT_NAME = "content"
"""Name of the decompressed file in the folder of a single compressed file."""

HEAD_SIZE = 8192
"""Number of first bytes of a file that `detect` needs."""

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
    (0, b"PK\x05\x06", Unpacking.ZIP),  # a zip without members
    (257, b"ustar", Unpacking.TAR),
)
_SINGLE = {Unpacking.TAR_GZ: Unpacking.GZ, Unpacking.TAR_ZST: Unpacking.ZST}
_TAR_BLOCK = 512
_FILE_MODE = 0o644


def detect_by_name(name: str) -> Unpacking | None:
    """Return the method of unpacking for a file name or key; None for an unknown ending."""
    lower = name.lower()
    return next((method for ending, method in _ENDINGS.items() if lower.endswith(ending)), None)


def detect(name: str, head: bytes) -> Unpacking:
    """Return the method of unpacking for an archive, by its name or else by its content.

    A gzip or zstd file without a tar counts as a single compressed file.

    Args:
        name: File name or key of the archive.
        head: First `HEAD_SIZE` bytes of the archive, or all bytes if there are fewer.

    Raises:
        ConfigurationError: The file is no archive that Millrace unpacks.
    """
    if (named := detect_by_name(name)) is not None:
        return named
    for at, magic, method in _MAGIC:
        if head[at : at + len(magic)] == magic:
            single = _SINGLE.get(method)
            return single if single is not None and not _holds_tar(head, method) else method
    raise errors.ConfigurationError(
        f"{name} is no archive that Millrace unpacks ({', '.join(list(Unpacking)[1:])}): "
        "leave `unpack` out, or name its method."
    )


def _holds_tar(head: bytes, method: Unpacking) -> bool:
    """Tell whether compressed bytes begin with the header of a tar's member.

    A tar without members has only zeros, as other files may have. It counts as a single file.
    """
    found = b""
    with contextlib.suppress(errors.ArchiveError):  # the head ends before the archive does
        for block in _iterate_blocks(io.BytesIO(head), method):
            found += block[:_TAR_BLOCK]
            if len(found) >= _TAR_BLOCK:
                break
    try:
        tarfile.TarInfo.frombuf(found[:_TAR_BLOCK], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def unpack(
    archive: Reader | Path,
    method: Unpacking,
    into: Path,
    *,
    limits: UnpackLimits,
    mode: int | None = None,
    owner: tuple[int, int] | None = None,
    on_written: Callable[[int], None] = lambda _: None,
) -> UnpackResult:
    """Unpack an archive while it arrives, into an empty folder.

    A tar is read once, from its first byte to its last. Its members are written (not synced) as
    soon as their bytes have been read. Unpacking needs a few MiB of memory, and up to 300 MiB for
    the worst tar.zst. A zip also needs about 1 KiB for each member.

    A file replaces an earlier file of the same name, as in tar (``tar -r``), and a link an earlier
    link. Other members with the same name are refused, except folders. Modification times are kept
    unless they are in the future; those of a zip are read as UTC. These are not kept: owners,
    extended attributes, the bits setuid, setgid and sticky, and write permission for others.

    Args:
        archive: Source of the archive. The directory of a zip is at its end, so a zip must be
            complete: a path, or an object with ``seek`` and ``tell``.
        method: Method of unpacking, as from `detect`.
        into: Empty folder. After an error it has a part of the members; remove it.
        limits: Limits of the unpacked content.
        mode: Permission bits of the files; None keeps those of the archive. Files that are
            executable in the archive, and folders, are executable for all that may read them.
        owner: User id and group id of all members. Needs root.
        on_written: Called with the size of each written block, and with 1 for each member.

    Raises:
        ArchiveError: The archive is damaged or exceeds the limits, or a member is refused. No file
            outside of the folder was changed.
        ConfigurationError: The method does not fit, or the folder is not empty.
    """
    if method is Unpacking.AUTO:
        raise errors.ConfigurationError(
            "`auto` is no method of unpacking: call `detect`, or name one."
        )
    if any(into.iterdir()):
        raise errors.ConfigurationError(f"{into} is not empty: give a new folder to unpack into.")
    with contextlib.ExitStack() as stack:
        opened = archive
        if isinstance(opened, Path):
            opened = stack.enter_context(opened.open("rb"))
        tree = stack.enter_context(contextlib.closing(Tree(into, limits, mode, owner, on_written)))
        if method is Unpacking.ZIP:
            unzip(opened, tree)
        elif method in SINGLE_FILE_METHODS:
            tree.add_file(CONTENT_NAME.encode(), _iterate_blocks(opened, method), _FILE_MODE, -1)
        else:
            untar(_iterate_blocks(opened, method), tree)
        return tree.finish()


def _iterate_blocks(archive: Reader, method: Unpacking) -> Iterator[bytes]:
    """Yield the decompressed bytes of an archive while it arrives."""
    if method in {Unpacking.TAR_GZ, Unpacking.GZ}:
        return gunzip(archive)
    if method in {Unpacking.TAR_ZST, Unpacking.ZST}:
        return unzstd(archive)
    return iter(lambda: archive.read(READ_SIZE), b"")
