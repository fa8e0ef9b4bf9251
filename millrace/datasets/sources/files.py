"""List and read the files of a source, and detect changes of the files."""

import errno
import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn

from millrace import errors
from millrace.datasets.sources.table import FileTable
from millrace.digest import make_local_etag
from millrace.schemas.dataset import FileRef
from millrace.storage import Backend, Store, head, list_objects, read, stream
from millrace.storage.read import BLOCK_SIZE

# Bytes of a local file that are read at a time. A larger block is newly allocated each time, and
# its page faults take longer than the copy.
_LOCAL_BLOCK = 1 << 20
_READ_AHEAD_BYTES = 64 * 1024 * 1024
_NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}  # errors of a link that leads to no file


def list_files(
    store: Store, *, include: Iterable[str] = ("*",), exclude: Iterable[str] = ()
) -> FileTable:
    """List the files of a source, in the order of their paths.

    Consoles make empty objects to show a folder. These objects are left out, and counted.

    Args:
        store: Store of the source.
        include: Patterns of paths to take. ``*.py`` takes such files of every folder.
        exclude: Patterns of paths to leave out.

    Raises:
        NotFoundError: No file matches the patterns.
    """
    include, exclude = list(include), list(exclude)

    def is_included(path: str) -> bool:
        return any(fnmatchcase(path, p) for p in include) and not any(
            fnmatchcase(path, p) for p in exclude
        )

    found = (
        _walk_folder(store.location.bucket, is_included)
        if is_local(store)
        else _iterate_objects(store, is_included)
    )
    files = FileTable.collect(found)
    if not files:
        raise errors.NotFoundError(
            f"{store.url} has no files that match {', '.join(include)}. Correct the source's "
            "url, or its include patterns."
        )
    return files


def read_file(store: Store, file: FileRef) -> bytes:
    """Return the content of a file, as it was when it was listed.

    Raises:
        ChangedError: The file has changed or is gone.
        MillraceError: The file cannot be read.
    """
    try:
        if not is_local(store):
            data = read(store, file.path, etag=file.etag or None, max_size=file.size)
        else:
            with (Path(store.location.bucket) / file.path).open("rb") as opened:
                data = opened.read(file.size + 1)  # a file that grows is not read to its end
                _check_unchanged(store, file, opened.fileno())
    except (errors.NotFoundError, errors.ChangedError, errors.CorruptError):
        raise _diagnose_change(store, file) from None
    except OSError as error:
        raise _translate_read_error(store, file, error) from error
    if len(data) != file.size:
        raise _diagnose_change(store, file)
    return data


def read_ahead(store: Store, files: Iterable[FileRef], *, concurrency: int = 16) -> Iterator[bytes]:
    """Yield the contents of files in order. From a bucket, several files are fetched at once.

    Memory: 64 MiB, or the largest of the files.

    Raises:
        ChangedError: A file has changed or is gone.
    """
    if is_local(store):
        yield from (read_file(store, file) for file in files)
        return
    remaining = deque(files)
    waiting: deque[tuple[int, Future[bytes]]] = deque()
    bytes_left = _READ_AHEAD_BYTES
    with ThreadPoolExecutor(concurrency, thread_name_prefix="files") as pool:
        while remaining or waiting:
            while (
                remaining
                and len(waiting) < concurrency
                and (not waiting or remaining[0].size <= bytes_left)
            ):
                file = remaining.popleft()
                waiting.append((file.size, pool.submit(read_file, store, file)))
                bytes_left -= file.size
            size, fetched = waiting.popleft()
            bytes_left += size
            yield fetched.result()


def iterate_file_blocks(
    store: Store, file: FileRef, start: int, end: int, *, block: int = BLOCK_SIZE
) -> Iterator[bytes]:
    """Yield the blocks of a file between two offsets, as it was when it was listed.

    Raises:
        ChangedError: The file has changed or is gone. No block with other content is returned.
        MillraceError: The file cannot be read.
    """
    try:
        if not is_local(store):
            yield from stream(
                store, file.path, start=start, end=end, etag=file.etag or None, block_size=block
            )
            return
        with (Path(store.location.bucket) / file.path).open("rb") as opened:
            opened.seek(start)
            rest = end - start
            while rest > 0:
                data = opened.read(min(block, _LOCAL_BLOCK, rest))
                _check_unchanged(store, file, opened.fileno())
                if not data:
                    raise _diagnose_change(store, file)
                rest -= len(data)
                yield data
    except (errors.NotFoundError, errors.ChangedError):
        raise _diagnose_change(store, file) from None
    except OSError as error:
        raise _translate_read_error(store, file, error) from error


def drop_etag(file: FileRef) -> FileRef:
    """Return a reference without an ETag, by which any version of the file is read."""
    return file.model_copy(update={"etag": ""})


def make_changed_error(store: Store, file: FileRef, difference: str) -> errors.ChangedError:
    """Return the error for a source that differs from the plan.

    Args:
        store: Store of the source.
        file: File as the plan has it.
        difference: Description of the difference.
    """
    return errors.ChangedError(
        f"{store.make_url(file.path)} has changed since the plan was made: it {difference}. The "
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


def _diagnose_change(store: Store, file: FileRef) -> errors.ChangedError:
    """Read the present size of a changed file, and return the error."""
    try:
        size = head(store, file.path).size
    except errors.NotFoundError:
        size = None
    except errors.MillraceError:
        size = file.size
    return make_changed_error(store, file, describe_difference(file, size))


def _translate_read_error(store: Store, file: FileRef, error: OSError) -> errors.MillraceError:
    if error.errno in _NO_FILE:
        return make_changed_error(store, file, describe_difference(file, None))
    return errors.MillraceError(
        f"{store.make_url(file.path)} cannot be read ({error.strerror}). Make the file readable, "
        "then run again."
    )


def is_local(store: Store) -> bool:
    """Return whether a store is a folder of this machine."""
    return store.location.backend is Backend.FILE


def _check_unchanged(store: Store, file: FileRef, descriptor: int) -> None:
    if not file.etag:
        return
    now = os.fstat(descriptor)
    if now.st_size != file.size or make_local_etag(now) != file.etag:
        raise make_changed_error(store, file, describe_difference(file, now.st_size))


def _iterate_objects(
    store: Store, is_included: Callable[[str], bool]
) -> Iterator[tuple[str, int, str]]:
    for found in list_objects(store, exact=True):
        if not is_included(found.key):
            continue
        if found.etag is None:
            raise errors.ConfigurationError(
                f"{store.make_url(found.key)} has no ETag, so a change could not be seen: "
                "copy the source to a store that gives one."
            )
        yield found.key, found.size, found.etag


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


def _is_first_visit(folder: str, seen: set[tuple[int, int]]) -> bool:
    """Return whether a folder is visited for the first time, since links may form a cycle."""
    found = _try_stat(folder)
    if found is None:
        return False
    identity = found.st_dev, found.st_ino
    if identity in seen:
        return False
    seen.add(identity)
    return True


def _walk_folder(folder: str, is_included: Callable[[str], bool]) -> Iterator[tuple[str, int, str]]:
    seen: set[tuple[int, int]] = set()
    _is_first_visit(folder, seen)  # a link may lead to the folder itself
    for parent, folders, names in os.walk(folder, onerror=_raise_unlistable, followlinks=True):
        folders[:] = sorted(name for name in folders if _is_first_visit(f"{parent}/{name}", seen))
        below = os.path.relpath(parent, folder)
        for name in names:
            path = name if below == "." else f"{below}/{name}"
            if not is_included(path):
                continue
            found = _try_stat(f"{parent}/{name}")
            if found is not None and stat.S_ISREG(found.st_mode):
                yield path, found.st_size, make_local_etag(found)
