"""Unpack an archive that is still arriving, without trusting it.

Nothing here writes: `untar` and `unzip` read the members, and `tree` makes them, or refuses to.
"""

import contextlib
import io
import tarfile
from collections.abc import Iterator
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
    """Method of unpacking an archive; ``auto`` is for `detect` to decide.

    ``gz`` and ``zst`` are for one compressed file, which is not an archive.
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
"""Name of the file that a compressed file becomes in the folder it is unpacked into."""

HEAD_SIZE = 8192
"""First bytes of a file that tell what it is."""

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
_SINGLE = {Unpacking.TAR_GZ: Unpacking.GZ, Unpacking.TAR_ZST: Unpacking.ZST}
_TAR_BLOCK = 512
_FILE_MODE = 0o644


def detect_by_name(name: str) -> Unpacking | None:
    """Return how an archive is to be unpacked, by its name or key; None if that does not say."""
    lower = name.lower()
    return next((method for ending, method in _ENDINGS.items() if lower.endswith(ending)), None)


def detect(name: str, head: bytes) -> Unpacking:
    """Decide how an archive is to be unpacked, by its name, else by its content.

    A gzip or zstd that holds no tar is one compressed file.

    Args:
        name: Its file name or key.
        head: Its first bytes: `HEAD_SIZE` of them, where there are as many.

    Raises:
        ConfigurationError: It is none that Millrace unpacks.
    """
    if (named := detect_by_name(name)) is not None:
        return named
    for at, magic, method in _MAGIC:
        if head[at : at + len(magic)] == magic:
            single = _SINGLE.get(method)
            return single if single is not None and not _holds_tar(head, method) else method
    raise errors.ConfigurationError(
        f"{name} is no archive that Millrace unpacks ({', '.join(list(Unpacking)[1:])}): "
        "leave unpack out, or say which of them it is."
    )


def _holds_tar(head: bytes, method: Unpacking) -> bool:
    """Tell whether compressed bytes begin with the header of a tar's member.

    A tar without members is zeros, as is many a file that is no tar: it counts as one file.
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
) -> UnpackResult:
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
        tree = stack.enter_context(contextlib.closing(Tree(into, limits, mode, owner)))
        if method is Unpacking.ZIP:
            unzip(opened, tree)
        elif method in SINGLE_FILE_METHODS:
            tree.add_file(CONTENT_NAME.encode(), _iterate_blocks(opened, method), _FILE_MODE, -1)
        else:
            untar(_iterate_blocks(opened, method), tree)
        return tree.finish()


def _iterate_blocks(archive: Reader, method: Unpacking) -> Iterator[bytes]:
    """Decompress an archive, as many bytes at a time as have arrived."""
    if method in {Unpacking.TAR_GZ, Unpacking.GZ}:
        return gunzip(archive)
    if method in {Unpacking.TAR_ZST, Unpacking.ZST}:
        return unzstd(archive)
    return iter(lambda: archive.read(READ_SIZE), b"")
