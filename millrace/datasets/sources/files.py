"""Interface of the files of a source, and the detection of their changes."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Protocol, TypeVar

from millrace import errors
from millrace.datasets.sources.table import FileTable
from millrace.schemas.dataset import FileRef
from millrace.storage.answers import READ_BLOCK_SIZE
from millrace.threads import DaemonThreadPool

READ_AHEAD_BYTES = 64 * 1024 * 1024
"""Limit of the bytes that are fetched at once."""
T = TypeVar("T")
R = TypeVar("R")


class SourceFiles(Protocol):
    """The files of a source. They are read as they were when they were listed.

    Attributes:
        is_local: Whether the files are in a folder of this machine.
    """

    is_local: bool

    @property
    def url(self) -> str:
        """URL of the source."""
        ...

    @property
    def unseekable(self) -> Set[str]:
        """Paths of the files of which no part can be read without all bytes before it.

        They are known after `collect`.
        """
        ...

    def make_url(self, path: str) -> str:
        """Return the URL of a file, for messages."""
        ...

    def collect(self, patterns: "Patterns") -> FileTable:
        """List the files that match patterns. Objects that only show a folder are left out.

        Raises:
            ConfigurationError: A file has nothing by which a change could be seen.
        """
        ...

    def read(self, file: FileRef) -> bytes:
        """Return the content of a file.

        Raises:
            ChangedError: The file has changed or is gone.
            MillraceError: The file cannot be read.
        """
        ...

    def iterate_blocks(
        self, file: FileRef, start: int, end: int, *, block: int = READ_BLOCK_SIZE
    ) -> Iterator[bytes]:
        """Yield the blocks of a file between two offsets.

        Raises:
            ChangedError: The file has changed or is gone. No block with other content is returned.
            MillraceError: The file cannot be read.
        """
        ...


class LocatedFiles(SourceFiles, Protocol):
    """The files of a source at one location."""

    def find(self, path: str) -> FileRef | None:
        """Describe a file as it is now; None if there is none.

        Raises:
            ConfigurationError: The file has nothing by which a change could be seen.
        """
        ...


class Patterns:
    """Patterns that choose files by their paths. ``*.py`` takes such files of every folder.

    Args:
        include: Patterns of paths to take.
        exclude: Patterns of paths to leave out.

    Attributes:
        left_out: First path that was left out since no pattern takes it; None without one.
    """

    def __init__(self, include: Iterable[str] = ("*",), exclude: Iterable[str] = ()) -> None:
        self._include, self._exclude = list(include), list(exclude)
        self.left_out: str | None = None

    def matches(self, path: str) -> bool:
        """Decide whether a path is taken."""
        if any(fnmatchcase(path, p) for p in self._exclude):
            return False
        is_taken = any(fnmatchcase(path, p) for p in self._include)
        if not is_taken and self.left_out is None:
            self.left_out = path
        return is_taken

    def __str__(self) -> str:
        return ", ".join(self._include)


class ExactPaths(Patterns):
    """Patterns that choose files by their whole paths.

    Args:
        paths: Paths to take.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        super().__init__()
        self._paths = frozenset(paths)

    def matches(self, path: str) -> bool:
        """Decide whether a path is taken."""
        return path in self._paths

    def __str__(self) -> str:
        return f"the {len(self._paths)} named paths"


def list_files(files: SourceFiles, patterns: Patterns) -> FileTable:
    """List the files of a source, in the order of their paths.

    Args:
        files: Files of the source.
        patterns: Patterns that choose the files.

    Raises:
        NotFoundError: No file matches the patterns.
    """
    found = files.collect(patterns)
    if not found:
        raise errors.NotFoundError(
            f"{files.url} has no files that match {patterns}. Correct the source's url, or its "
            "include patterns."
        )
    return found


def read_ahead(
    files: SourceFiles, wanted: Iterable[FileRef], *, concurrency: int = 16
) -> Iterator[bytes]:
    """Yield the contents of files in order. From elsewhere, several files are fetched at once.

    Memory: 64 MiB, or the largest of the files.

    Raises:
        ChangedError: A file has changed or is gone.
    """
    sized = ((file, file.size) for file in wanted)
    for _, data in fetch_ahead(files.read, sized, 0 if files.is_local else concurrency):
        yield data


def fetch_ahead(
    fetch: Callable[[T], R],
    wanted: Iterable[tuple[T, int]],
    concurrency: int,
    *,
    pool: DaemonThreadPool | None = None,
) -> Iterator[tuple[T, R]]:
    """Yield items with what is fetched for them, in order. Several are fetched at once.

    Memory: 64 MiB, or the largest of the fetched values.

    Args:
        fetch: Function that fetches the value of an item.
        wanted: Items, each with the bytes of its value.
        concurrency: Concurrent calls; 0 calls the function in this thread when the value is used.
        pool: Threads of the calls, which the caller shuts down. None takes threads that take less
            processor time for small values, and waits at the end for the calls under way.
    """
    if not concurrency:
        yield from ((item, fetch(item)) for item, _ in wanted)
        return
    remaining = iter(wanted)
    first, second = next(remaining, None), next(remaining, None)
    if first and not second:  # one item needs no threads
        yield first[0], fetch(first[0])
        return
    remaining = chain([second] if second else [], remaining)
    following = first
    waiting: deque[tuple[T, int, Future[R]]] = deque()
    bytes_left = READ_AHEAD_BYTES
    with nullcontext(pool) if pool else ThreadPoolExecutor(concurrency, "files") as threads:
        while following or waiting:
            while (
                following
                and len(waiting) < concurrency
                and (not waiting or following[1] <= bytes_left)
            ):
                item, size = following
                waiting.append((item, size, threads.submit(fetch, item)))
                bytes_left -= size
                following = next(remaining, None)
            item, size, fetched = waiting.popleft()
            bytes_left += size
            yield item, fetched.result()


def drop_etag(file: FileRef) -> FileRef:
    """Return a reference without an ETag, by which any version of the file is read."""
    return replace(file, etag="")


def make_changed_error(files: SourceFiles, file: FileRef, difference: str) -> errors.ChangedError:
    """Return the error for a source that differs from the plan.

    Args:
        files: Files of the source.
        file: File as the plan has it.
        difference: Description of the difference.
    """
    return errors.ChangedError(
        f"{files.make_url(file.path)} has changed since the plan was made: it {difference}. The "
        "run has stopped, so that two versions are not mixed. Restore the file, or shard it under "
        "a new dataset name."
    )


def describe_difference(file: FileRef, size: int | None) -> str:
    """Describe the change of a file.

    Args:
        file: File as the plan has it.
        size: Present size of the file; None if the file is gone.
    """
    if size is None:
        return "is gone"
    if size != file.size:
        return f"has {size} bytes now, and had {file.size}"
    return "was written again (its size is the same, its ETag or time is not)"
