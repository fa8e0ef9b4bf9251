"""The files of a source: a folder or a prefix, listed with what tells a change."""

import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

from millrace import errors
from millrace.datasets.sources.table import FileTable
from millrace.digest import make_local_etag
from millrace.schemas.dataset import FileRef
from millrace.storage import Backend, Store, head, list_objects, read, stream
from millrace.storage.read import BLOCK

# Of a local file at a time: larger blocks are new memory each time, and paging that in takes longer
# than copying the block.
_LOCAL_BLOCK = 1 << 20
_AHEAD = 64 * 1024 * 1024


def list_files(
    store: Store, *, include: Iterable[str] = ("*",), exclude: Iterable[str] = ()
) -> FileTable:
    """List the files of a source, in the order of their paths.

    Empty objects that consoles make to show a folder are left out, and counted.

    Args:
        store: The source's store: its URL is the folder.
        include: Patterns of paths to take (``*.py`` takes it in every folder).
        exclude: Patterns of paths to leave.

    Raises:
        NotFoundError: There is nothing there, or nothing that the patterns take.
    """
    include, exclude = list(include), list(exclude)

    def taken(path: str) -> bool:
        return any(fnmatchcase(path, p) for p in include) and not any(
            fnmatchcase(path, p) for p in exclude
        )

    found = _walk(store.location.bucket, taken) if is_local(store) else _objects(store, taken)
    files = FileTable.collect(found)
    if not files:
        raise errors.NotFoundError(
            f"{store.url} has no files that match {', '.join(include)}. Correct the source's "
            "url, or its include patterns."
        )
    return files


def read_file(store: Store, file: FileRef) -> bytes:
    """Return the whole of a file, as it was when it was listed.

    Raises:
        ChangedError: It is another now, or gone.
    """
    try:
        if not is_local(store):
            data = read(store, file.path, etag=file.etag or None, largest=file.size)
        else:
            with (Path(store.location.bucket) / file.path).open("rb") as opened:
                data = opened.read()
                _check(store, file, opened.fileno())
    except (FileNotFoundError, errors.NotFoundError, errors.ChangedError, errors.CorruptError):
        raise _changed_there(store, file) from None
    if len(data) != file.size:
        raise _changed_there(store, file)
    return data


def read_ahead(store: Store, files: Iterable[FileRef], *, at_once: int = 16) -> Iterator[bytes]:
    """Yield the contents of files in order; from a store, several small ones are fetched at once.

    Memory: 64 MiB, or the largest of the files.

    Raises:
        ChangedError: One is another now, or gone.
    """
    if is_local(store):
        yield from (read_file(store, file) for file in files)
        return
    remaining = deque(files)
    waiting: deque[tuple[int, Future[bytes]]] = deque()
    room = _AHEAD
    with ThreadPoolExecutor(at_once, thread_name_prefix="files") as pool:
        while remaining or waiting:
            while (
                remaining and len(waiting) < at_once and (not waiting or remaining[0].size <= room)
            ):
                file = remaining.popleft()
                waiting.append((file.size, pool.submit(read_file, store, file)))
                room -= file.size
            size, fetched = waiting.popleft()
            room += size
            yield fetched.result()


def file_blocks(
    store: Store, file: FileRef, start: int, end: int, *, block: int = BLOCK
) -> Iterator[bytes]:
    """Yield the blocks of a file between two offsets, as it was when it was listed.

    Raises:
        ChangedError: It is another now, or gone: at the latest before the first block that
            may be of another content is handed on.
    """
    try:
        if not is_local(store):
            yield from stream(
                store, file.path, start=start, end=end, etag=file.etag or None, block=block
            )
            return
        with (Path(store.location.bucket) / file.path).open("rb") as opened:
            opened.seek(start)
            rest = end - start
            while rest > 0:
                data = opened.read(min(block, _LOCAL_BLOCK, rest))
                _check(store, file, opened.fileno())
                if not data:
                    raise _changed_there(store, file)
                rest -= len(data)
                yield data
    except (FileNotFoundError, errors.NotFoundError, errors.ChangedError):
        raise _changed_there(store, file) from None


def of_any_version(file: FileRef) -> FileRef:
    """Return a file that is read as it is now, whatever its ETag or time."""
    return file.model_copy(update={"etag": ""})


def changed(store: Store, file: FileRef, what: str) -> errors.ChangedError:
    """Return the error for a source that is not what the plan says.

    Args:
        store: The source's store.
        file: The file, as the plan has it.
        what: What is different now.
    """
    return errors.ChangedError(
        f"{store.url_of(file.path)} has changed since the plan was made: it {what}. The run has "
        "stopped rather than mix two versions. Put the file back, or shard it under a new dataset "
        "name."
    )


def difference_of(file: FileRef, size: int | None) -> str:
    """Say what is different about a file whose size is this now; None if it is gone."""
    if size is None:
        return "is gone"
    if size != file.size:
        return f"has {size} bytes now, and had {file.size}"
    return "was written again (its size is the same, its ETag or time is not)"


def _changed_there(store: Store, file: FileRef) -> errors.ChangedError:
    """Return the error for a file that was found to be another, after a look at what it is now."""
    try:
        size = head(store, file.path).size
    except errors.NotFoundError:
        size = None
    except errors.MillraceError:
        size = file.size
    return changed(store, file, difference_of(file, size))


def is_local(store: Store) -> bool:
    """Return whether a store is a folder of this machine."""
    return store.location.backend is Backend.FILE


def _check(store: Store, file: FileRef, descriptor: int) -> None:
    if not file.etag:
        return
    now = os.fstat(descriptor)
    if now.st_size != file.size or make_local_etag(now) != file.etag:
        raise changed(store, file, difference_of(file, now.st_size))


def _objects(store: Store, taken: Callable[[str], bool]) -> Iterator[tuple[str, int, str]]:
    for found in list_objects(store, exact=True):
        if not taken(found.key):
            continue
        if found.etag is None:
            raise errors.ConfigurationError(
                f"{store.url_of(found.key)} has no ETag, so a change could not be seen: "
                "copy the source to a store that gives one."
            )
        yield found.key, found.size, found.etag


def _unlisted(error: OSError) -> None:
    raise errors.MillraceError(
        f"{error.filename} cannot be listed ({error.strerror}), and a dataset without it would not "
        "be whole. Make it readable, or start from another folder."
    ) from error


def _first_seen(folder: str, seen: set[tuple[int, int]]) -> bool:
    """Return whether a folder was not met before: links may lead round in a circle."""
    found = os.stat(folder)  # noqa: PTH116 - a Path costs more than the call
    place = found.st_dev, found.st_ino
    if place in seen:
        return False
    seen.add(place)
    return True


def _walk(folder: str, taken: Callable[[str], bool]) -> Iterator[tuple[str, int, str]]:
    seen: set[tuple[int, int]] = set()
    for parent, folders, names in os.walk(folder, onerror=_unlisted, followlinks=True):
        folders[:] = sorted(name for name in folders if _first_seen(f"{parent}/{name}", seen))
        below = os.path.relpath(parent, folder)
        for name in names:
            path = name if below == "." else f"{below}/{name}"
            if not taken(path):
                continue
            try:
                found = os.stat(f"{parent}/{name}")  # noqa: PTH116 - a Path costs more
            except FileNotFoundError:  # a link that leads nowhere is no file
                continue
            if stat.S_ISREG(found.st_mode):
                yield path, found.st_size, make_local_etag(found)
