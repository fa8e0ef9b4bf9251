"""Files of a source in a folder of this machine. A change shows in a file's size and time."""

import errno
import os
import stat
from collections.abc import Iterator, Set
from pathlib import Path
from typing import NoReturn

from millrace import errors
from millrace.datasets.sources.files import (
    Patterns,
    describe_difference,
    make_changed_error,
)
from millrace.datasets.sources.table import FileTable
from millrace.digest import make_local_etag
from millrace.schemas.dataset import FileRef
from millrace.storage.answers import READ_BLOCK_SIZE

# Bytes of a file that are read at a time. A larger block is newly allocated each time, and its page
# faults take longer than the copy.
_BLOCK = 1 << 20
_NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}  # errors of a link that leads to no file


class LocalFiles:
    """Files of a folder.

    Args:
        folder: Path of the folder.
    """

    unseekable: Set[str] = frozenset()
    is_local = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def url(self) -> str:
        """URL of the folder."""
        return self._folder.as_uri()

    def make_url(self, path: str) -> str:
        """Return the URL of a file, for messages."""
        return f"{self.url}/{path}"

    def collect(self, patterns: Patterns) -> FileTable:
        """List the files that match patterns, also those behind links.

        Raises:
            MillraceError: A folder or a link cannot be read.
        """
        return FileTable.collect(_walk_folder(str(self._folder), patterns))

    def find(self, path: str) -> FileRef | None:
        """Describe a file; None if there is none.

        Raises:
            MillraceError: The file cannot be described.
        """
        found = _try_stat(str(self._folder / path))
        if found is None or not stat.S_ISREG(found.st_mode):
            return None
        return FileRef(path=path, size=found.st_size, etag=make_local_etag(found))

    def read(self, file: FileRef) -> bytes:
        """Return the content of a file.

        Raises:
            ChangedError: The file has changed or is gone.
            MillraceError: The file cannot be read.
        """
        try:
            with (self._folder / file.path).open("rb") as opened:
                data = opened.read(file.size + 1)  # a file that grows is not read to its end
                self._check_unchanged(file, opened.fileno())
        except OSError as error:
            raise self._translate_error(file, error) from error
        if len(data) != file.size:
            raise self._make_changed_error(file)
        return data

    def iterate_blocks(
        self, file: FileRef, start: int, end: int, *, block: int = READ_BLOCK_SIZE
    ) -> Iterator[bytes]:
        """Yield the blocks of a file between two offsets.

        Raises:
            ChangedError: The file has changed or is gone. No block with other content is returned.
            MillraceError: The file cannot be read.
        """
        try:
            with (self._folder / file.path).open("rb") as opened:
                opened.seek(start)
                rest = end - start
                while rest > 0:
                    data = opened.read(min(block, _BLOCK, rest))
                    self._check_unchanged(file, opened.fileno())
                    if not data:
                        raise self._make_changed_error(file)
                    rest -= len(data)
                    yield data
        except OSError as error:
            raise self._translate_error(file, error) from error

    def _check_unchanged(self, file: FileRef, descriptor: int) -> None:
        if not file.etag:
            return
        now = os.fstat(descriptor)
        if now.st_size != file.size or make_local_etag(now) != file.etag:
            raise make_changed_error(self, file, describe_difference(file, now.st_size))

    def _make_changed_error(self, file: FileRef) -> errors.ChangedError:
        """Return the error for a file that has other bytes, with its present size."""
        try:
            size = (self._folder / file.path).stat().st_size
        except OSError as error:
            size = None if error.errno in _NO_FILE else file.size
        return make_changed_error(self, file, describe_difference(file, size))

    def _translate_error(self, file: FileRef, error: OSError) -> errors.MillraceError:
        if error.errno in _NO_FILE:
            return make_changed_error(self, file, describe_difference(file, None))
        return errors.MillraceError(
            f"{self.make_url(file.path)} cannot be read ({error.strerror}). Make the file "
            "readable, then run again."
        )


def _raise_unlistable(error: OSError) -> NoReturn:
    raise errors.MillraceError(
        f"{error.filename} cannot be listed ({error.strerror}), and a dataset without it would be "
        "incomplete. Make it readable, or start from another folder."
    ) from error


def _try_stat(path: str) -> os.stat_result | None:
    """Return the status of a file or folder; None for a link that leads to none.

    Raises:
        MillraceError: The system refuses to follow the link, or to read the folder.
    """
    try:
        return os.stat(path)  # noqa: PTH116 - a Path costs more than the call
    except OSError as error:
        if error.errno in _NO_FILE:
            return None
        _raise_unlistable(error)


def _walk_folder(folder: str, patterns: Patterns) -> Iterator[tuple[str, int, str]]:
    """Yield each file that matches patterns, by one of its paths. Also follows links to folders.

    A folder may have several paths. They are visited in this order: the path without links, then
    links in the order of their names, then links that were found behind links. A file is yielded by
    the first of them that matches. A folder is not visited below itself, and links in it are
    followed from its first path only: so the visits end.
    """
    visited: dict[tuple[int, int], list[str]] = {}
    links = [""]
    while links:
        pending = sorted(links, reverse=True)
        links.clear()
        while pending:
            prefix = pending.pop()
            parent = f"{folder}/{prefix}".removesuffix("/")
            earlier = visited.setdefault(_identify(parent), [])
            if any(map(prefix.startswith, earlier)):
                continue
            folders: list[str] = []
            for name, is_folder, is_link in _list_folder(parent):
                if is_folder and not is_link:
                    folders.append(f"{prefix}{name}/")
                elif is_folder and not earlier:
                    links.append(f"{prefix}{name}/")
                elif not is_folder and _is_first_match(name, prefix, earlier, patterns):
                    found = _try_stat(f"{parent}/{name}")
                    if found is not None and stat.S_ISREG(found.st_mode):
                        yield f"{prefix}{name}", found.st_size, make_local_etag(found)
            earlier.append(prefix)
            pending += sorted(folders, reverse=True)


def _identify(folder: str) -> tuple[int, int]:
    try:
        found = os.stat(folder)  # noqa: PTH116 - as above
    except OSError as error:
        _raise_unlistable(error)
    return found.st_dev, found.st_ino


def _list_folder(folder: str) -> Iterator[tuple[str, bool, bool]]:
    """Yield the name of each entry, and whether the entry is or leads to a folder, and is a link.

    Raises:
        MillraceError: The folder cannot be listed.
    """
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                yield entry.name, _is_folder(entry), entry.is_symlink()
    except OSError as error:
        _raise_unlistable(error)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # a link that cannot be followed, which `_try_stat` explains


def _is_first_match(name: str, prefix: str, earlier: list[str], patterns: Patterns) -> bool:
    """Decide whether a file matches by this path of its folder, and by no earlier path."""
    return patterns.matches(f"{prefix}{name}") and not any(
        patterns.matches(f"{one}{name}") for one in earlier
    )
