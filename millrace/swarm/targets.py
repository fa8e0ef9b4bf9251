"""Paths of the files of a run: partial and final names. No path leads out of the root."""

import ctypes
import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.errors import FULL_DISK, ConfigurationError, CorruptError, NoSpaceError
from millrace.swarm.cache_index import is_unchanged, read_identity
from millrace.swarm.catalogue import Catalogue, File
from millrace.swarm.journal import compute_object_id

SPARE_BYTES = 64 << 20
"""Bytes of the disk that stay free."""

_MAX_SINGLE_SYNCS = 8  # files that are synced one by one; for more, the file system is synced
_NEEDED_MODE = 0o600  # permission bits that the agent needs
# Readable, since `posix_fallocate` reads the existing bytes if the file system cannot allocate.
_PARTIAL_FLAGS = os.O_RDWR | os.O_NOFOLLOW
_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


@dataclass(frozen=True, slots=True)
class Target:
    """Paths of one file.

    Attributes:
        file: File of the catalogue.
        final: Path of the complete file.
        partial: Path of the incomplete file.
        folder: Folder of both paths.
        object: Id of the object's content in the journal (`compute_object_id`).
    """

    file: File
    final: Path
    partial: Path
    folder: Path
    object: str


class Targets:
    """Paths of a catalogue's files.

    Args:
        root: Folder that no file is written outside of; resolved.
        catalogue: Files of the run.

    Attributes:
        by_file: Paths of each file, by its number.
    """

    def __init__(self, root: Path, catalogue: Catalogue) -> None:
        self._root = root
        self._made: set[Path] = set()  # folders that exist, and are below the root
        self._created: set[Path] = set()  # partial files that exist
        self.by_file = [self._make_target(file) for file in catalogue.files]

    def _make_target(self, file: File) -> Target:
        final = self._root / file.path
        folder = final.parent
        name = hashlib.sha256(file.path.encode()).hexdigest()[:16]
        content = compute_object_id(file)
        return Target(file, final, folder / f".{name}.{content}.part", folder, content)

    def iterate_paths(self, target: Target) -> Iterator[tuple[str, Path]]:
        """Yield the destinations of a file, each with its path."""
        for name in (target.file.path, *target.file.links):
            yield name, self._root / name

    def check_space(self, targets: Iterable[Target]) -> None:
        """Check that each disk has space for its files without a partial file.

        Raises:
            NoSpaceError: A disk has too little space.
        """
        for folder, free, needed in self._measure_space(targets):
            if needed and needed + SPARE_BYTES > free:
                raise NoSpaceError(
                    f"{folder} has {free} bytes free, and the files need {needed}, with "
                    f"{SPARE_BYTES} to spare: free some space, or choose another root."
                )

    def measure_spare_room(self, targets: Iterable[Target]) -> int:
        """Return the free bytes of the fullest disk that the incomplete files do not need."""
        return min(free - needed for _, free, needed in self._measure_space(targets)) - SPARE_BYTES

    def _measure_space(self, targets: Iterable[Target]) -> Iterator[tuple[Path, int, int]]:
        """Yield a folder on each disk, its free bytes, and those that its targets need."""
        for folder, group in self._group_by_disk(targets):
            needed = sum(target.file.size for target in group if not target.partial.exists())
            yield folder, shutil.disk_usage(folder).free, needed

    def _group_by_disk(self, targets: Iterable[Target]) -> list[tuple[Path, list[Target]]]:
        """Return a folder and the targets of each disk: others may be mounted below the root."""
        found: dict[Path, tuple[Path, int]] = {}
        grouped = {_find_disk(self._root)[1]: (self._root, list[Target]())}
        for target in targets:
            if target.folder not in found:
                found[target.folder] = _find_disk(target.folder)
            folder, disk = found[target.folder]
            grouped.setdefault(disk, (folder, []))[1].append(target)
        return list(grouped.values())

    def preallocate(self, target: Target) -> None:
        """Create a partial file of the full size.

        Raises:
            NoSpaceError: The disk is full.
        """
        descriptor = self.create(target)
        try:
            os.posix_fallocate(descriptor, 0, target.file.size)
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            raise NoSpaceError(
                f"The disk has no space for the {target.file.size} bytes of {target.partial} "
                f"({error.strerror}): free some space, or choose another root."
            ) from error
        finally:
            os.close(descriptor)

    def create(self, target: Target) -> int:
        """Open a partial file for writing, and set its owner and mode.

        An incomplete file is writable for the agent, whatever its final mode is.

        Raises:
            CorruptError: Another program has removed the file since this run created or found it.
        """
        self.make_folder(target.folder)
        # A file that was created again would lack the bytes that were written before.
        flags = _PARTIAL_FLAGS | (0 if target.partial in self._created else os.O_CREAT)
        try:
            descriptor = os.open(target.partial, flags, _NEEDED_MODE)
        except FileNotFoundError as error:
            raise CorruptError(
                f"{target.partial} was removed by another program during the run: let no program "
                "clean the root, and run again."
            ) from error
        except PermissionError:  # a kill, or a dropped piece, after the file had its final mode
            if target.partial.is_symlink():
                raise
            target.partial.chmod(_NEEDED_MODE)
            descriptor = os.open(target.partial, flags, _NEEDED_MODE)
        self._created.add(target.partial)
        try:
            os.fchmod(descriptor, target.file.mode | _NEEDED_MODE)
            if target.file.owner is not None:
                os.fchown(descriptor, *target.file.owner)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def adopt(self, target: Target, path: Path) -> None:
        """Take over a partial file of an earlier run, which may have had another destination."""
        if path != target.partial:
            self.make_folder(target.folder)
            path.rename(target.partial)
        os.close(self.create(target))  # sets the mode and owner of this run

    def make_folder(self, folder: Path) -> None:
        """Create a folder below the root.

        Raises:
            ConfigurationError: The folder is outside of the root, through a link.
        """
        if folder in self._made:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._check_folder(folder)
        self._made.add(folder)

    def check_folders(self, targets: Iterable[Target]) -> None:
        """Check the folders of files, before any of these files is written or renamed.

        Raises:
            ConfigurationError: A folder is outside of the root, through a link.
        """
        for folder in {target.folder for target in targets}:
            self._check_folder(folder)

    def _check_folder(self, folder: Path) -> None:
        if not folder.resolve().is_relative_to(self._root):
            raise ConfigurationError(
                f"{folder} leads out of {self._root} through a link. Nothing was written there: "
                "remove the link."
            )

    def sync_partials(self, targets: list[Target]) -> None:
        """Sync partial files to the disk: a few one by one, many with the whole file system."""
        for target in targets:
            if target.file.mode & _NEEDED_MODE != _NEEDED_MODE:
                target.partial.chmod(target.file.mode)
        for folder, group in self._group_by_disk(targets):
            if len(group) > _MAX_SINGLE_SYNCS:
                sync_file_system(folder)
                continue
            for target in group:
                sync(target.partial)

    def make_final(self, target: Target, existing: tuple[int, ...] | None) -> None:
        """Give a complete partial file its final name.

        Args:
            target: Paths of the file.
            existing: Identity of the file that is replaced (`read_identity`); None if the run has
                found no file at the destination.

        Raises:
            ConfigurationError: Another file is at the destination.
        """
        _place(target.partial, target.final, existing)
        self._created.discard(target.partial)

    def make_partial(self, target: Target, existing: tuple[int, ...]) -> None:
        """Make a final file partial again.

        Args:
            target: Paths of the file.
            existing: Identity of the final file (`read_identity`).

        Raises:
            ConfigurationError: Another file has the final name now, or no file has it.
        """
        if not is_unchanged(target.final, existing):
            raise _make_conflict(target.final)
        target.final.rename(target.partial)
        self._created.add(target.partial)
        target.partial.chmod(target.file.mode | _NEEDED_MODE)

    def link(
        self,
        target: Target,
        existing: Mapping[str, tuple[int, ...] | None],
        links: dict[str, tuple[int, ...]],
    ) -> None:
        """Create the further destinations of a file: hard links, or copies if links are impossible.

        Args:
            target: Paths of the file.
            existing: Files of Millrace that the run has found at these destinations: the identity
                of a file that is replaced (`read_identity`); None for a file that is right.
            links: Receives the identity of the file at each further destination, by its name.

        Raises:
            ConfigurationError: Another file is at a destination.
        """
        for name in target.file.links:
            link = self._root / name
            self.make_folder(link.parent)
            identity = existing.get(name)
            is_right = name in existing and identity is None
            if os.path.lexists(link) and (is_right or _is_same(link, target.final)):
                links[name] = read_identity(link)
                continue
            hashed = hashlib.sha256(name.encode()).hexdigest()[:16]
            partial = link.with_name(f".{hashed}.{target.object}.part")
            partial.unlink(missing_ok=True)  # of a killed run
            try:
                os.link(target.final, partial)
            except OSError:
                shutil.copy2(target.final, partial)
                sync(partial)
            try:
                _place(partial, link, identity)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            links[name] = read_identity(link)

    def unlink(self, target: Target, links: Mapping[str, tuple[int, ...]]) -> None:
        """Remove the further destinations of a file whose bytes were wrong.

        A file that another program has put there stays.

        Args:
            target: Paths of the file.
            links: Identities of the files at these destinations, by their names (`link`).
        """
        for name, identity in links.items():
            link = self._root / name
            if is_unchanged(link, identity) or _is_same(link, target.partial):
                link.unlink()


def _find_disk(folder: Path) -> tuple[Path, int]:
    """Return a folder or the nearest one above it that exists, and the disk that it is on."""
    while not folder.exists():
        folder = folder.parent
    return folder, folder.stat().st_dev


def _is_same(link: Path, final: Path) -> bool:
    return link.is_file() and not link.is_symlink() and final.exists() and link.samefile(final)


def _place(source: Path, final: Path, existing: tuple[int, ...] | None) -> None:
    """Rename a file, and replace at most the file with the given identity."""
    if existing is not None and is_unchanged(final, existing):
        source.rename(final)
        return
    try:
        _rename_new(source, final)
    except FileExistsError as error:
        raise _make_conflict(final) from error


def _rename_new(source: Path, final: Path) -> None:
    """Rename a file to a name that no file has.

    Raises:
        FileExistsError: A file has this name.
    """
    names = os.fsencode(source), os.fsencode(final)
    if hasattr(_LIBC, "renameat2"):
        if _LIBC.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_NOREPLACE) == 0:
            return
        code = ctypes.get_errno()
        if code not in {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}:
            raise OSError(code, os.strerror(code), str(source), None, str(final))
    # The file system, such as NFS, cannot refuse to replace a file: a short race remains.
    if os.path.lexists(final):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
    source.rename(final)


def _make_conflict(path: Path) -> ConfigurationError:
    return ConfigurationError(
        f"{path} was created, changed or removed by another program during the run. Millrace did "
        "not change it: move it away if it exists, and run again."
    )


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file_system(folder: Path) -> None:
    """Sync a whole file system, which is far faster than many calls of fsync."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if _LIBC.syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), "syncfs failed", str(folder))
    finally:
        os.close(descriptor)
