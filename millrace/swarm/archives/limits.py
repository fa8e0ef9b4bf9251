"""Parts that all methods of unpacking share: source, limits, and names that are taken."""

from dataclasses import dataclass
from typing import Protocol

from millrace import errors

READ_SIZE = 1 << 20
"""Bytes asked of an archive at a time."""

_LONGEST_PART = 255  # bytes of a name between two slashes, on every file system in use


@dataclass(frozen=True, slots=True)
class UnpackLimits:
    """Limits on an archive: on what is really written, not on what its headers say.

    Attributes:
        bytes: Unpacked bytes in all.
        members: Members, and folders that they imply.
        name_bytes: Bytes of a member's name, or of a link's target.
        depth: Parts of a name.
        spare: Bytes that it leaves free on the disk.
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
        files: Files and links, not folders.
        bytes: Bytes written into them.
    """

    files: int
    bytes: int


class Reader(Protocol):
    """Source of an archive: read from its first byte to its last, once."""

    def read(self, size: int, /) -> bytes:
        """Return the next bytes, at most so many; waits for the first of them. Empty at the end."""
        ...


def make_refusal(name: bytes, why: str) -> errors.ArchiveError:
    """Return the error that says why a member is not unpacked."""
    shown = repr(name[:200].decode("utf-8", "backslashreplace"))
    return errors.ArchiveError(f"The archive's member {shown} {why}")


def make_truncation_error() -> errors.ArchiveError:
    """Return the error for an archive of which the end is missing."""
    return errors.ArchiveError("The archive ends before its end: upload it again.")


def split_name(name: bytes, limits: UnpackLimits, *, folder: bool = False) -> tuple[bytes, ...]:
    """Split a name at its slashes, without ``.`` and empty parts; those of a file end in one."""
    parts = name.split(b"/")
    if name.startswith(b"/"):
        raise make_refusal(name, "has an absolute name: pack it with a relative one.")
    if b".." in parts:
        raise make_refusal(name, "has '..' in its name: pack it from the folder that it is in.")
    if b"\0" in name or b"\\" in name:
        raise make_refusal(name, "has a NUL or a backslash in its name: rename it.")
    longest = max(map(len, parts))
    if len(name) > limits.name_bytes or longest > _LONGEST_PART:
        raise make_refusal(name, "has a name that is too long: rename it.")
    found = tuple(part for part in parts if part not in {b"", b"."})
    if len(found) > limits.depth:
        raise make_refusal(name, f"lies more than {limits.depth} folders deep.")
    if folder:
        if not name:
            raise make_refusal(name, "is a folder without a name.")
    elif not found or parts[-1] in {b"", b"."}:
        raise make_refusal(name, "is a file without a name, or with that of a folder: rename it.")
    return found


def check_link_target(name: bytes, target: bytes, depth: int, limits: UnpackLimits) -> None:
    """Refuse a symbolic link that could lead out; it lies so many folders deep.

    Its target may go up to the folder that is unpacked into, and then only down. A link lies
    in a real folder, so going up from there leads to real folders; and going down through
    other links leads to where these lead, all of them inside. To go up behind a name, which
    may be a link, is what leads out: ``a/b/c -> ../..`` and ``d -> a/b/c/..``.
    """
    if b"\0" in target or b"\\" in target or not 0 < len(target) <= limits.name_bytes:
        raise make_refusal(name, "is a link whose target is empty, too long or oddly named.")
    steps = [step for step in target.split(b"/") if step not in {b"", b"."}]
    up = next((i for i, step in enumerate(steps) if step != b".."), len(steps))
    if target.startswith(b"/") or up > depth or b".." in steps[up:]:
        raise make_refusal(
            name, "is a link that may lead out of the archive: pack what it leads to instead."
        )
