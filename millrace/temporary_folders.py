"""Temporary folders that are also removed after the process that made them was killed."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def make_temporary_folder(prefix: str) -> Generator[Path]:
    """Make a temporary folder, and remove it at the end of the block.

    Before, folders of this user with the same prefix are removed if their processes have ended.
    A process holds a lock on its folder. The kernel releases the lock when the process ends, also
    by SIGKILL, and also if the process was in another container with the same temporary folder.

    Args:
        prefix: Beginning of the folder's name, which no other program uses.
    """
    _remove_abandoned(prefix)
    folder, descriptor = _make_locked(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _make_locked(prefix: str) -> tuple[Path, int]:
    """Return a new folder, and the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        descriptor = _open_folder(folder)
        if descriptor is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists():  # otherwise another process has removed it before it was locked
                return folder, descriptor
            os.close(descriptor)


def _remove_abandoned(prefix: str) -> None:
    """Remove the folders that no process has locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        descriptor = _open_folder(folder)
        if descriptor is None:
            continue
        try:
            if os.fstat(descriptor).st_uid == os.getuid():
                with suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def _open_folder(folder: Path) -> int | None:
    """Return a descriptor of a folder; None if it is gone, is no folder, or cannot be opened."""
    with suppress(OSError):
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    return None
