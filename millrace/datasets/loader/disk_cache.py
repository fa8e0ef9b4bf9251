"""Cache of files on the disk of a node, which all processes of the node share.

A file has its digest as its name. Each name has a lock, which a process that fetches, verifies or
removes the file holds alone. It waits for nothing that takes long while it holds a file: readers
hold a shared lock of the file itself, and a file that is lent is not removed. The kernel releases
the locks of a process that is killed. So one of several processes fetches a file, no file is
removed under a reader, and processes that read each other's next files do not wait for each other.

The lock file has a mark: the boot of the machine in which the file was verified, and the file's
size, inode and time. Without a mark of this boot, as after a crash, the file is hashed before it is
used. The lock's time of modification is the last use. So there is no index, and no flush to disk.

A damaged file stays until a new file has its name, so that the download can take its intact blocks.
"""

import fcntl
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from millrace.digest import (
    DigestError,
    check_digest,
    compute_digest,
    compute_file_digest,
    get_algorithm,
)
from millrace.errors import FULL_DISK, ConfigurationError

logger = logging.getLogger(__name__)

Download = Callable[[int, Path | None], object]
"""Function that writes a file through a descriptor, and verifies its digest.

It also gets the path of a damaged copy of which blocks can be taken; None without one.
"""

_MAX_MARK = 4096  # bytes


class LentFile:
    """A file that the cache does not remove until it is closed.

    Args:
        path: Path of the file.
        lock: The file, locked; None for a file of another folder, which the cache never removes.

    Attributes:
        path: Path of the file.
    """

    def __init__(self, path: Path, lock: "_LockFile | None" = None) -> None:
        self.path = path
        self._close = None if lock is None else weakref.finalize(self, lock.close)

    def close(self) -> None:
        """Allow the removal of the file. A file that is open elsewhere can be read to its end."""
        if self._close is not None:
            self._close()

    def __enter__(self) -> Self:
        """Return the file."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()


class _LockFile:
    """Open file of a lock, which the child of a fork closes.

    The child would hold the lock until its own end, whatever this process does.

    Args:
        open_file: Function that opens the file, and returns the descriptor.

    Attributes:
        descriptor: Descriptor of the file.
    """

    def __init__(self, open_file: Callable[[], int]) -> None:
        with _fork_lock:
            self.descriptor = open_file()
            _lock_files.add(self)

    def close(self) -> None:
        """Close the file. The lock ends with the last descriptor of it."""
        with _fork_lock:
            if self in _lock_files:
                _lock_files.remove(self)
                os.close(self.descriptor)


# No process is forked between the opening of a file and its entry, or between its removal and the
# close. A finalizer may run while this thread has the lock.
_fork_lock = threading.RLock()
_lock_files = set[_LockFile]()


def _close_in_child() -> None:
    while _lock_files:
        os.close(_lock_files.pop().descriptor)
    _fork_lock.release()


os.register_at_fork(
    before=_fork_lock.acquire, after_in_parent=_fork_lock.release, after_in_child=_close_in_child
)


@dataclass(frozen=True, slots=True)
class _CachedFile:
    """A file in the cache.

    Attributes:
        name: Name of the file, and of its lock.
        size: Size in bytes.
        used_at: Time of the last use.
    """

    name: str
    size: int
    used_at: int


class DiskCache:
    """Files in a folder up to a number of bytes. Those that were used last are kept.

    Only files that the cache has fetched are removed, and none that is lent to a process. Processes
    and threads share a folder. If the disk is full, files are not cached, after one warning.

    Args:
        folder: Folder on a local disk. Files of other programs in it stay, and are not counted.
        max_bytes: Largest size of all files, with those that are being fetched.

    Attributes:
        folder: Folder of the cache.
        max_bytes: Largest size of all files.

    Raises:
        ConfigurationError: The folder cannot be made.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._files, self._locks, self._parts = (
            folder / name for name in ("files", "locks", "parts")
        )
        self._has_warned = False
        self._rejected: set[str] = set()  # descriptions of files of other folders
        self._lock = threading.Lock()
        try:
            for each in (self._files, self._locks, self._parts):
                each.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"The folder {folder} of the cache cannot be made ({error.strerror}). Choose a "
                "folder on a local disk."
            ) from error

    @property
    def held_bytes(self) -> int:
        """Bytes of all files, with those that are being fetched."""
        with self._hold_all():  # no room is made meanwhile
            return sum(max(0, _measure(entry.path)) for entry in self._iterate_entries())

    def lend(self, digest: str, size: int, download: Download) -> LentFile | None:
        """Return a file, which is fetched if it is not there.

        Args:
            digest: Digest of the file.
            size: Size of the file in bytes.
            download: Function that fetches the file. One process calls it; the others wait.

        Returns:
            The file; None if it cannot be cached, since the disk is full or the other files are in
            use.

        Raises:
            MillraceError: The download failed.
        """
        name = _make_name(digest)
        path = self._files / name
        try:
            with self._hold(name, fcntl.LOCK_SH) as lock:
                if self._is_usable(lock, path, size):
                    return _lend_locked(path)
            with self._hold(name, fcntl.LOCK_EX) as lock:
                if (
                    self._is_usable(lock, path, size)
                    or _check_file(lock, path, digest, size)
                    or self._fetch(lock, name, size, download)
                ):
                    return _lend_locked(path)
        except OSError as error:
            self._warn(error)
        return None

    def lend_from(self, path: Path, digest: str, size: int) -> LentFile | None:
        """Return a file of another folder, which is verified once in each boot of the machine.

        The file is neither copied nor removed.

        Returns:
            The file; None if there is none, if it has other bytes, or if it cannot be read.
        """
        described = ""
        with suppress(OSError):  # it may be removed meanwhile
            if _measure(path) == size:
                described = f"{path} {digest} {_describe_file(path)}"
        if not described or described in self._rejected:
            return None
        place = compute_digest(os.fsencode(path.absolute())).rpartition(":")[2][:16]
        name = f"{_make_name(digest)}-{place}"
        fault = f"does not have the digest {digest}, and is not used. Replace or delete it."
        try:
            with self._hold(name, fcntl.LOCK_SH) as lock:
                if self._is_usable(lock, path, size):
                    return LentFile(path)
            with self._hold(name, fcntl.LOCK_EX) as lock:
                is_equal = _is_checked(lock, path, size)
                if not is_equal:
                    try:
                        is_equal = _has_digest(path, digest, size)
                    except OSError as error:
                        fault = (
                            f"cannot be read ({error.strerror}), and is not used. Allow this "
                            "process to read it, or delete it."
                        )
                    if is_equal:
                        _write_mark(lock, path)
                if is_equal:
                    return LentFile(path)
        except OSError as error:
            self._warn(error)
            return None
        self._rejected.add(described)
        logger.warning("%s %s", path, fault)
        return None

    def _is_usable(self, lock: int, path: Path, size: int) -> bool:
        """Decide whether a file may be used, and note its use."""
        if not _is_checked(lock, path, size):
            return False
        now = time.time_ns()  # the clock of the file system has steps of 4 ms
        os.utime(lock, ns=(now, now))
        return True

    def _fetch(self, lock: int, name: str, size: int, download: Download) -> bool:
        """Fetch a file while its lock is held; return False if there is no room for it."""
        path, part = self._files / name, self._parts / name
        with self._hold_all():
            file = self._reserve(part, size)
        if file is None:
            return False
        try:
            download(file, path if path.exists() else None)
            part.rename(path)
            _write_mark(lock, path)
        except BaseException as error:
            part.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in FULL_DISK:
                self._warn(error)
                return False
            raise
        finally:
            os.close(file)
        return True

    def _reserve(self, part: Path, size: int) -> int | None:
        """Make room, and return the open file whose bytes are reserved; None without room.

        The caller holds the lock of the cache, and that of the file. A damaged copy of the file is
        removed if there is no room for both.
        """
        file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            fetched = self._measure_parts(part.name)  # first: a file that is done then counts twice
            entries = sorted(
                self._list_files(), key=lambda one: (one.name == part.name, one.used_at)
            )
            held = sum(one.size for one in entries) + fetched
            while True:
                if held + size <= self.max_bytes:
                    try:
                        if size:
                            os.posix_fallocate(file, 0, size)
                    except OSError as error:
                        if error.errno not in FULL_DISK or not entries:
                            raise
                    else:
                        return file
                elif not entries:
                    self._warn(None)
                    break
                oldest = entries.pop(0)
                if oldest.name == part.name:
                    (self._files / part.name).unlink(missing_ok=True)
                    held -= oldest.size
                elif self._remove(oldest.name):
                    held -= oldest.size
        except BaseException:
            os.close(file)
            part.unlink(missing_ok=True)
            raise
        os.close(file)
        part.unlink(missing_ok=True)
        return None

    def _remove(self, name: str) -> bool:
        """Remove a file that no process uses; return False if one does."""
        try:
            with self._hold(name, fcntl.LOCK_EX | fcntl.LOCK_NB):
                with suppress(FileNotFoundError):  # another program may have removed it
                    _lock_file(self._files / name, fcntl.LOCK_EX | fcntl.LOCK_NB).close()
                (self._files / name).unlink(missing_ok=True)
                (self._locks / name).unlink(missing_ok=True)
        except BlockingIOError:
            return False
        return True

    def _list_files(self) -> list[_CachedFile]:
        found: list[_CachedFile] = []
        for entry in _scan(self._files):
            with suppress(FileNotFoundError):
                size = entry.stat().st_size
                found.append(_CachedFile(entry.name, size, _find_use(self._locks / entry.name)))
        return found

    def _measure_parts(self, own: str) -> int:
        """Return the bytes of files that are being fetched; remove those of killed processes."""
        size = 0
        for entry in _scan(self._parts):
            if entry.name == own:
                continue
            try:
                with self._hold(entry.name, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    Path(entry.path).unlink(missing_ok=True)
            except BlockingIOError:
                size += max(0, _measure(entry.path))
        return size

    def _iterate_entries(self) -> "Iterator[os.DirEntry[str]]":
        yield from _scan(self._files)
        yield from _scan(self._parts)

    def _hold(self, name: str, mode: int) -> AbstractContextManager[int]:
        """Hold the lock of a file; the value is its descriptor.

        Raises:
            BlockingIOError: Another one holds the lock, and the mode does not wait.
        """
        return _hold_lock(self._locks / name, mode)

    def _hold_all(self) -> AbstractContextManager[int]:
        """Hold the lock of the cache, with which room is made for one file at a time."""
        return _hold_lock(self.folder / "lock", fcntl.LOCK_EX)

    def _warn(self, error: OSError | None) -> None:
        """Warn once that files are not cached."""
        with self._lock:
            if self._has_warned:
                return
            self._has_warned = True
        why = "all files in it are in use" if error is None else error.strerror or str(error)
        remedy = "Correct the folder or its permissions, or choose a folder on another disk."
        if error is None or error.errno in FULL_DISK:
            remedy = f"Make more room, or allow more bytes than {self.max_bytes}."
        logger.warning("Files are read without the cache in %s: %s. %s", self.folder, why, remedy)


def _make_name(digest: str) -> str:
    """Return the name of a file with a digest.

    Raises:
        DigestError: The text is no digest, which could name any file.
    """
    return check_digest(digest).replace(":", "-")


def _scan(folder: Path) -> "Iterator[os.DirEntry[str]]":
    """Yield the files of a folder that the cache has named. Those of other programs stay."""
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                check_digest(entry.name.replace("-", ":", 1))
            except DigestError:
                continue
            yield entry


def _lock_file(path: Path, mode: int) -> _LockFile:
    """Open and lock a file of the cache.

    Raises:
        BlockingIOError: Another one holds the lock, and the mode does not wait.
    """
    # Over a network, an exclusive lock needs a file that is open for writing.
    flags = os.O_RDWR if mode & fcntl.LOCK_EX else os.O_RDONLY
    file = _LockFile(lambda: os.open(path, flags))
    try:
        fcntl.flock(file.descriptor, mode)
    except BaseException:
        file.close()
        raise
    return file


def _lend_locked(path: Path) -> LentFile:
    """Return a file that is not removed. The caller holds the lock of its name."""
    return LentFile(path, _lock_file(path, fcntl.LOCK_SH))


@contextmanager
def _hold_lock(path: Path, mode: int) -> Generator[int]:
    """Open and lock a file, which another process may remove meanwhile; yield the descriptor."""
    while True:
        file = _LockFile(lambda: os.open(path, os.O_RDWR | os.O_CREAT, 0o644))
        try:
            fcntl.flock(file.descriptor, mode)
            if _is_at(path, file.descriptor):
                yield file.descriptor
                return
        finally:
            file.close()


def _is_at(path: Path, file: int) -> bool:
    """Decide whether an open file still has its path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file))
    return False


def _measure(path: Path | str) -> int:
    """Return the size of a file; -1 if there is none, and 0 for a folder of files."""
    try:
        return os.stat(path).st_size  # noqa: PTH116 - of both types
    except OSError:
        return -1


def _find_use(lock: Path) -> int:
    try:
        return lock.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


@cache
def _read_boot() -> str:
    """Return the name of the present boot of the machine; a name of its own if it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.urandom(16).hex()


def _describe_file(path: Path) -> dict[str, Any]:
    found = path.stat()
    return {
        "boot": _read_boot(),
        "size": found.st_size,
        "inode": found.st_ino,
        "modified": found.st_mtime_ns,
    }


def _is_checked(lock: int, path: Path, size: int) -> bool:
    """Decide whether a file has its size, and was verified in this boot of the machine."""
    try:
        mark = json.loads(os.pread(lock, _MAX_MARK, 0))
        found = _describe_file(path)
    except (ValueError, OSError):
        return False
    return mark == found and found["size"] == size


def _write_mark(lock: int, path: Path) -> None:
    """Note that a file is verified. The mark of a killed process is no JSON, and so none."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(_describe_file(path)).encode(), 0)


def _has_digest(path: Path, digest: str, size: int) -> bool:
    return _measure(path) == size and compute_file_digest(path, get_algorithm(digest)) == digest


def _check_file(lock: int, path: Path, digest: str, size: int) -> bool:
    """Hash a file without a mark, and mark it if it is intact."""
    if is_intact := _has_digest(path, digest, size):
        _write_mark(lock, path)
    return is_intact
