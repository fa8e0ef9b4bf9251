"""A run's files on the disk: their partial and final names, below a root that nothing leaves."""

import ctypes
import hashlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from millrace.errors import ConfigurationError, NoSpaceError
from millrace.swarm.journal import object_id_of
from millrace.swarm.pieces import Catalogue, File

SPARE_BYTES = 64 << 20
"""Bytes left free on the disk."""

_MAX_SINGLE_SYNCS = 8  # files that are brought onto the disk one by one
_NEEDED_MODE = 0o600  # permission bits that we need
_NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class Target:
    """Paths of one file.

    Attributes:
        file: What it is.
        final: Its path when it is whole.
        partial: Its path until then.
        folder: Of both.
        object: Name of the content, in the journal.
    """

    file: File
    final: Path
    partial: Path
    folder: Path
    object: str


class Targets:
    """Paths of a catalogue's files.

    Args:
        root: The folder that no file is written outside of; resolved.
        catalogue: The files.

    Attributes:
        of: Those of each file, by its number.
    """

    def __init__(self, root: Path, catalogue: Catalogue) -> None:
        self._root = root
        self._made: set[Path] = set()  # folders that are there, and below the root
        self.of = [self._make_target(file) for file in catalogue.files]

    def _make_target(self, file: File) -> Target:
        final = self._root / file.path
        folder = final.parent
        name = hashlib.sha256(file.path.encode()).hexdigest()[:16]
        content = object_id_of(file)
        return Target(file, final, folder / f".{name}.{content}.part", folder, content)

    def check_space(self, places: Iterable[Target]) -> None:
        """See that there is room for files of which nothing is there yet.

        Raises:
            NoSpaceError: There is not.
        """
        free, needed = self._measure_space(places)
        if needed and needed + SPARE_BYTES > free:
            raise NoSpaceError(
                f"{self._root} has {free} bytes free, and {needed} (and {SPARE_BYTES} to spare) "
                "are to come: free some, or choose another root."
            )

    def measure_spare_room(self, places: Iterable[Target]) -> int:
        """Return the free bytes of the disk that files which are to come do not need."""
        free, needed = self._measure_space(places)
        return free - needed - SPARE_BYTES

    def _measure_space(self, places: Iterable[Target]) -> tuple[int, int]:
        needed = sum(place.file.size for place in places if not place.partial.exists())
        return shutil.disk_usage(self._root).free, needed

    def preallocate(self, place: Target) -> None:
        """Make a partial file of its full size.

        Raises:
            NoSpaceError: The disk is full.
        """
        descriptor = self.create(place)
        try:
            os.posix_fallocate(descriptor, 0, place.file.size)
        except OSError as error:
            raise NoSpaceError(
                f"{place.partial}: no room for {place.file.size} bytes ({error.strerror})."
            ) from error
        finally:
            os.close(descriptor)

    def create(self, place: Target) -> int:
        """Open a new partial file for writing, with the owner and mode asked for.

        Until it is whole we may write it, whatever its mode will be.
        """
        self.make_folder(place.folder)
        descriptor = os.open(place.partial, _NEW_FILE_FLAGS, 0o600)
        try:
            os.fchmod(descriptor, place.file.mode | _NEEDED_MODE)
            if place.file.owner is not None:
                os.fchown(descriptor, *place.file.owner)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def adopt(self, place: Target, path: Path) -> None:
        """Go on with a partial file that an earlier run has left, there or elsewhere."""
        if path != place.partial:
            self.make_folder(place.folder)
            path.rename(place.partial)
        os.close(self.create(place))  # of this run's mode and owner

    def make_folder(self, folder: Path) -> None:
        """Make a folder below the root.

        Raises:
            ConfigurationError: It lies elsewhere, through a link.
        """
        if folder in self._made:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if not folder.resolve().is_relative_to(self._root):
            raise ConfigurationError(
                f"{folder} leads out of {self._root} through a link: nothing was written there."
            )
        self._made.add(folder)

    def sync_partials(self, places: list[Target]) -> None:
        """Bring partial files onto the disk: one by one, or many with all that is there."""
        for place in places:
            if place.file.mode & _NEEDED_MODE != _NEEDED_MODE:
                place.partial.chmod(place.file.mode)
        if len(places) > _MAX_SINGLE_SYNCS:
            _sync_file_system(self._root)
            return
        for place in places:
            sync(place.partial)

    def make_partial(self, place: Target) -> None:
        """Make a file partial again: what is good of it is kept."""
        place.final.rename(place.partial)
        place.partial.chmod(place.file.mode | _NEEDED_MODE)

    def link(self, place: Target) -> None:
        """Make a file's further destinations: the same file where the file system can, or a copy.

        Raises:
            ConfigurationError: Something else is there.
        """
        for name in place.file.links:
            link = self._root / name
            self.make_folder(link.parent)
            if os.path.lexists(link):
                if link.is_file() and link.samefile(place.final):
                    continue
                raise ConfigurationError(
                    f"{link} is there already: move it away. It was not touched."
                )
            try:
                os.link(place.final, link)
            except OSError:
                shutil.copy2(place.final, link)


def sync(path: Path) -> None:
    """Bring one file, or a folder's names, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_file_system(folder: Path) -> None:
    """Bring everything of a file system onto its disk: by far quicker than many fsyncs."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), "syncfs failed", str(folder))
    finally:
        os.close(descriptor)
