"""Parts that all methods of unpacking share: the source, the limits, and the checks of names."""

from dataclasses import dataclass
from typing import Protocol

from millrace import errors

READ_SIZE = 1 << 20
"""Bytes that are read from an archive at a time."""

_LONGEST_COMPONENT = 255  # bytes of a file name, the limit of common file systems


@dataclass(frozen=True, slots=True)
class UnpackLimits:
    """Limits on an archive. They count written bytes and files, not the numbers in its headers.

    Attributes:
        bytes: Unpacked bytes of all members.
        members: Members, with the folders that their names imply.
        name_bytes: Bytes of a member's name, or of a link's target.
        depth: Components of a name.
        spare: Bytes of the disk that stay free.
    """

    bytes: int = 1 << 40
    members: int = 2_000_000
    name_bytes: int = 2048
    depth: int = 64
    spare: int = 0


@dataclass(frozen=True, slots=True)
class UnpackResult:
    """Result of unpacking an archive.

    Attributes:
        files: Number of files and links, without folders.
        bytes: Bytes of all files.
    """

    files: int
    bytes: int


class Reader(Protocol):
    """Source of an archive, which is read once from the first byte to the last."""

    def read(self, size: int, /) -> bytes:
        """Wait for the next bytes, and return up to `size` of them; none at the end."""
        ...


def make_refusal(name: bytes, reason: str) -> errors.ArchiveError:
    """Return the error for a member that is not unpacked."""
    shown = repr(name[:200].decode("utf-8", "backslashreplace"))
    return errors.ArchiveError(f"The archive's member {shown} {reason}")


def make_truncation_error() -> errors.ArchiveError:
    """Return the error for an archive without its end."""
    return errors.ArchiveError("The archive is cut off: upload it again.")


def split_name(name: bytes, limits: UnpackLimits, *, folder: bool = False) -> tuple[bytes, ...]:
    """Split a name at its slashes, and check it. Remove ``.`` and empty components.

    Raises:
        ArchiveError: The name leads out of the folder, is too long or too deep, or names no file.
    """
    components = name.split(b"/")
    if name.startswith(b"/"):
        raise make_refusal(name, "has an absolute name: pack it with a relative one.")
    if b".." in components:
        raise make_refusal(name, "has '..' in its name: pack it from the folder that it is in.")
    if b"\0" in name or b"\\" in name:
        raise make_refusal(name, "has a NUL or a backslash in its name: rename it.")
    longest = max(map(len, components))
    if len(name) > limits.name_bytes or longest > _LONGEST_COMPONENT:
        raise make_refusal(name, "has a name that is too long: rename it.")
    found = tuple(each for each in components if each not in {b"", b"."})
    if len(found) > limits.depth:
        raise make_refusal(name, f"lies more than {limits.depth} folders deep: pack it again.")
    if folder:
        if not name:
            raise make_refusal(name, "is a folder without a name: pack it again.")
    elif not found or components[-1] in {b"", b"."}:
        raise make_refusal(
            name, "is a file without a name, or with the name of a folder: rename it."
        )
    return found


def check_link_target(name: bytes, target: bytes, depth: int, limits: UnpackLimits) -> None:
    """Refuse a symbolic link that could lead out of the folder of the archive.

    ``..`` is allowed only at the beginning of the target, up to the folder of the archive. A link
    is in a real folder, so these steps lead to real folders. The steps down may pass other links,
    which were checked themselves. ``..`` after a name could lead out, since the name may be a link:
    ``a/b/c -> ../..`` and ``d -> a/b/c/..``.

    Args:
        name: Name of the link.
        target: Target of the link.
        depth: Number of folders above the link, below the folder of the archive.
        limits: Limits of the archive.

    Raises:
        ArchiveError: The target could lead out, or is empty, too long or not printable.
    """
    if b"\0" in target or b"\\" in target or not 0 < len(target) <= limits.name_bytes:
        raise make_refusal(
            name, "is a link whose target is empty, too long, or has a NUL or a backslash."
        )
    steps = [step for step in target.split(b"/") if step not in {b"", b"."}]
    climbs = next((i for i, step in enumerate(steps) if step != b".."), len(steps))
    if target.startswith(b"/") or climbs > depth or b".." in steps[climbs:]:
        raise make_refusal(
            name, "is a link that may lead out of the archive: pack its target instead."
        )
