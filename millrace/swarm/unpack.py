"""Unpack an archive that is still arriving, without trusting it.

Nothing here writes: `untar` and `unzip` read the members, and `tree` makes them, or refuses to.
"""

import contextlib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from millrace import errors
from millrace.swarm.inflate import gunzip, unzstd
from millrace.swarm.terms import READ, Limits, Reader, Unpacked
from millrace.swarm.tree import Tree
from millrace.swarm.untar import untar
from millrace.swarm.unzip import unzip

__all__ = ["Limits", "Reader", "Unpacked", "Unpacking", "detect", "unpack"]


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
        tree = stack.enter_context(contextlib.closing(Tree(into, limits, mode, owner)))
        if method is Unpacking.ZIP:
            unzip(opened, tree)
        else:
            untar(_blocks(opened, method), tree)
        return tree.finish()


def _blocks(archive: Reader, method: Unpacking) -> Iterator[bytes]:
    """A tar's bytes, as many at a time as have arrived."""
    if method is Unpacking.TAR_GZ:
        return gunzip(archive)
    if method is Unpacking.TAR_ZST:
        return unzstd(archive)
    return iter(lambda: archive.read(READ), b"")
