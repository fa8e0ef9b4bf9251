"""Folder that an archive is unpacked into. No member is written outside of this folder.

While the archive is read, only folders and regular files are created, below descriptors of their
folders and never through a link. Symbolic links are created after all other members, so no member
can be written through a link.
"""

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from millrace import errors
from millrace.swarm.archives.limits import (
    READ_SIZE,
    UnpackLimits,
    UnpackResult,
    check_link_target,
    make_refusal,
    split_name,
)

FOLDER_MODE = 0o755
"""Permission bits of a folder without bits in the archive."""

_LINK_BYTES = 64 << 20  # bytes of the names and targets of all symbolic links, kept in memory
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_CANNOT_LINK = {errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV}
_LATER = 24 * 3600  # seconds that the clock of another machine may be ahead


class Tree:
    """Members of an archive, as files below a folder.

    Args:
        root: Folder that no member is written outside of.
        limits: Limits of the archive.
        mode: Permission bits of the files; None keeps those of the archive.
        owner: User id and group id of all members; None keeps those of the process.
        on_written: Called with the size of each written block, and with 1 for each member.

    Attributes:
        limits: Limits of the archive.
    """

    def __init__(
        self,
        root: Path,
        limits: UnpackLimits,
        mode: int | None,
        owner: tuple[int, int] | None,
        on_written: Callable[[int], None],
    ) -> None:
        self.limits = limits
        self._on_written = on_written
        self._mode = None if mode is None else mode & 0o777
        self._owner = owner
        self._latest = time.time() + _LATER
        # The folder of the last member, and the descriptors of all folders down to it.
        self._path: list[bytes] = []
        self._descriptors = [os.open(root, _FOLDER_FLAGS)]
        self._links: dict[tuple[bytes, ...], bytes] = {}
        self._link_bytes = 0
        self._members = 0
        self._files = 0
        self._bytes = 0

    def close(self) -> None:
        """Close the open folders."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def add_folder(self, name: bytes, mode: int) -> None:
        """Create a folder."""
        components = self._check_member(name, folder=True)
        if components:  # else the member is the folder of the archive itself
            self._make_folder(components[-1], self._enter(name, components[:-1]))
            self._set_permissions(self._enter(name, components), self._compute_folder_mode(mode))

    def add_file(
        self, name: bytes, body: Iterable[bytes | memoryview], mode: int, mtime: float
    ) -> None:
        """Write a file."""
        components = self._check_member(name)
        self._write_file(name, components, body, self._compute_file_mode(mode), mtime)

    def add_symlink(self, name: bytes, target: bytes) -> None:
        """Note a symbolic link, which `finish` creates."""
        self._count_member()
        components = split_name(name, self.limits)
        self._check_links(name, components[:-1])
        self._plan_symlink(name, components, target)

    def add_hardlink(self, name: bytes, target: bytes) -> None:
        """Create a hard link to an earlier file, or a copy if the file system has no hard links."""
        self._count_member()
        components = split_name(name, self.limits)
        try:
            source = split_name(target, self.limits)
        except errors.ArchiveError as error:
            raise make_refusal(
                name, f"is a hard link whose target cannot be a member. {error}"
            ) from None
        if source in self._links:  # a hard link to a symbolic link is a second symbolic link
            self._check_links(name, components[:-1])
            self._plan_symlink(name, components, self._links[source])
            return
        self._check_links(name, components)
        try:
            at = os.dup(self._enter(name, source[:-1], make=False))
        except FileNotFoundError:
            raise self._make_missing_error(name) from None
        try:
            self._link_file(name, components, at, source[-1])
        finally:
            os.close(at)

    def finish(self) -> UnpackResult:
        """Create the symbolic links, and return the result. No member may follow."""
        for components, target in self._links.items():
            name = b"/".join(components)
            at = self._enter(name, components[:-1])
            try:
                os.symlink(target, components[-1], dir_fd=at)
            except FileExistsError:
                raise self._make_duplicate_error(name) from None
            if self._owner is not None:
                os.chown(components[-1], *self._owner, dir_fd=at, follow_symlinks=False)
        return UnpackResult(self._files + len(self._links), self._bytes)

    def _check_member(self, name: bytes, *, folder: bool = False) -> tuple[bytes, ...]:
        self._count_member()
        components = split_name(name, self.limits, folder=folder)
        self._check_links(name, components)
        return components

    def _count_member(self) -> None:
        self._members += 1
        self._on_written(1)
        if self._members > self.limits.members:
            raise errors.ArchiveError(
                f"The archive has more than {self.limits.members} members: raise the limit if "
                "the archive is correct."
            )

    def _check_links(self, name: bytes, components: tuple[bytes, ...]) -> None:
        if self._links and any(
            components[:end] in self._links for end in range(1, len(components) + 1)
        ):
            raise make_refusal(
                name, "would be written through a link of the archive: pack it without the link."
            )

    def _enter(self, name: bytes, components: tuple[bytes, ...], *, make: bool = True) -> int:
        """Return the descriptor of a folder, valid until the next call. Create missing folders."""
        shared = 0
        for ours, theirs in zip(self._path, components, strict=False):
            if ours != theirs:
                break
            shared += 1
        while len(self._path) > shared:
            self._path.pop()
            os.close(self._descriptors.pop())
        for component in components[shared:]:
            above = self._descriptors[-1]
            made = make and self._make_folder(component, above)
            if made:
                self._count_member()
            try:
                descriptor = os.open(component, _FOLDER_FLAGS, dir_fd=above)
            except OSError as error:
                if error.errno in {errno.ENOTDIR, errno.ELOOP}:
                    raise make_refusal(
                        name, "lies below a file or a link: pack it again."
                    ) from None
                raise
            self._path.append(component)
            self._descriptors.append(descriptor)
            if made:
                self._set_permissions(descriptor, self._compute_folder_mode(FOLDER_MODE))
        return self._descriptors[-1]

    def _make_folder(self, component: bytes, above: int) -> bool:
        try:
            os.mkdir(component, 0o700, dir_fd=above)
        except FileExistsError:
            return False
        return True

    def _write_file(
        self,
        name: bytes,
        components: tuple[bytes, ...],
        body: Iterable[bytes | memoryview],
        mode: int,
        mtime: float,
    ) -> None:
        at = self._enter(name, components[:-1])
        try:
            descriptor = os.open(components[-1], _NEW_FILE_FLAGS, 0o600, dir_fd=at)
        except FileExistsError:
            self._remove(name, at, components[-1])
            descriptor = os.open(components[-1], _NEW_FILE_FLAGS, 0o600, dir_fd=at)
        try:
            for block in body:
                self._write_block(descriptor, block)
            self._set_permissions(descriptor, mode)
            if 0 <= mtime <= self._latest:
                nanoseconds = round(mtime * 1e9)
                os.utime(descriptor, ns=(nanoseconds, nanoseconds))
        finally:
            os.close(descriptor)
        self._files += 1

    def _write_block(self, descriptor: int, block: bytes | memoryview) -> None:
        self._bytes += len(block)
        if self._bytes > self.limits.bytes:
            raise errors.ArchiveError(
                f"The archive holds more than {self.limits.bytes} bytes: raise the limit if the "
                "archive is correct."
            )
        if self.limits.spare:
            disk = os.fstatvfs(descriptor)
            if disk.f_bavail * disk.f_frsize < self.limits.spare + len(block):
                raise errors.NoSpaceError(
                    f"The archive does not fit on the disk: unpacking stopped after {self._bytes} "
                    f"bytes, since {self.limits.spare} must stay free. Free some space, or choose "
                    "another root."
                )
        while block:
            written = os.write(descriptor, block)
            self._on_written(written)
            block = memoryview(block)[written:]

    def _set_permissions(self, descriptor: int, mode: int) -> None:
        if self._owner is not None:
            os.fchown(descriptor, *self._owner)
        os.fchmod(descriptor, mode)

    def _compute_file_mode(self, mode: int) -> int:
        if self._mode is None:
            return mode & 0o755 | 0o600
        return self._mode | _compute_search_bits(self._mode) if mode & 0o100 else self._mode

    def _compute_folder_mode(self, mode: int) -> int:
        """Return the mode of a folder. The owner may always write, since members may follow."""
        if self._mode is None:
            return mode & 0o755 | 0o700
        return self._mode | _compute_search_bits(self._mode) | 0o700

    def _remove(self, name: bytes, at: int, last: bytes) -> None:
        """Remove an earlier file, which a later member of the same name replaces."""
        if not stat.S_ISREG(os.stat(last, dir_fd=at, follow_symlinks=False).st_mode):
            raise self._make_duplicate_error(name)
        os.unlink(last, dir_fd=at)
        self._files -= 1

    def _link_file(
        self, name: bytes, components: tuple[bytes, ...], source_at: int, source: bytes
    ) -> None:
        try:
            found = os.stat(source, dir_fd=source_at, follow_symlinks=False)
        except FileNotFoundError:
            raise self._make_missing_error(name) from None
        if not stat.S_ISREG(found.st_mode):
            raise self._make_missing_error(name)
        at, last = self._enter(name, components[:-1]), components[-1]
        try:
            there = os.stat(last, dir_fd=at, follow_symlinks=False)
        except FileNotFoundError:
            pass
        else:
            if os.path.samestat(there, found):
                return  # tar links a file to itself if the file was packed twice
            self._remove(name, at, last)
        try:
            os.link(source, last, src_dir_fd=source_at, dst_dir_fd=at, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
            mode = stat.S_IMODE(found.st_mode)
            self._write_file(
                name, components, _read_blocks(source, source_at), mode, found.st_mtime
            )
        else:
            self._files += 1

    def _plan_symlink(self, name: bytes, components: tuple[bytes, ...], target: bytes) -> None:
        check_link_target(name, target, len(components) - 1, self.limits)
        self._link_bytes += len(name) + len(target)
        if self._link_bytes > _LINK_BYTES:
            raise make_refusal(
                name, f"exceeds {_LINK_BYTES} bytes of names of links: pack files instead of links."
            )
        self._links[components] = target

    def _make_duplicate_error(self, name: bytes) -> errors.ArchiveError:
        return make_refusal(name, "is in the archive twice, with different types: pack it again.")

    def _make_missing_error(self, name: bytes) -> errors.ArchiveError:
        return make_refusal(
            name, "is a hard link to no earlier file of the archive: pack it again."
        )


def _compute_search_bits(mode: int) -> int:
    return (mode & 0o444) >> 2


def _read_blocks(name: bytes, at: int) -> Iterator[bytes]:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        while block := os.read(descriptor, READ_SIZE):
            yield block
    finally:
        os.close(descriptor)
