"""Wait on a node until a file has its final name, so that training can start before the end."""

import ctypes
import os
import select
import time
from datetime import timedelta
from pathlib import Path

from millrace.errors import UnavailableError

_CREATE, _MOVED_TO, _DELETE_SELF, _MOVE_SELF = 0x100, 0x80, 0x400, 0x800
_WATCHED = _CREATE | _MOVED_TO | _DELETE_SELF | _MOVE_SELF


def wait_for_path(path: Path | str, *, timeout: timedelta | None = None) -> Path:
    """Wait until a file, or the folder of an archive, has its final name.

    A file with its final name is complete, since a rename gives this name. The wait uses inotify(7)
    and needs neither the driver nor the agent.

    Args:
        path: Destination on this node.
        timeout: Longest time to wait; by default without limit.

    Returns:
        The same path.

    Raises:
        UnavailableError: The file has no final name when the time is over.
    """
    path = Path(path)
    end = None if timeout is None else time.monotonic() + timeout.total_seconds()
    descriptor = _call_libc("inotify_init1", os.O_CLOEXEC)
    try:
        events = select.poll()
        events.register(descriptor, select.POLLIN)
        while not path.exists():
            folder = _find_nearest_folder(path)
            try:
                watch = _call_libc("inotify_add_watch", descriptor, os.fsencode(folder), _WATCHED)
            except (FileNotFoundError, NotADirectoryError):
                continue  # the folder was removed before the watch
            if path.exists() or _find_nearest_folder(path) != folder:
                continue  # the path appeared before the watch
            rest = None if end is None else 1000 * (end - time.monotonic())
            if (rest is not None and rest <= 0) or not events.poll(rest):
                raise UnavailableError(
                    f"{path} did not exist after {timeout}. Check that a prewarm of this node "
                    "runs, and wait again."
                )
            os.read(descriptor, 1 << 16)
            _remove_watch(descriptor, watch)
    finally:
        os.close(descriptor)
    return path


def _find_nearest_folder(path: Path) -> Path:
    """Return the nearest existing folder above a path."""
    return next(parent for parent in path.absolute().parents if parent.is_dir())


def _call_libc(name: str, *arguments: int | bytes) -> int:
    result: int = getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name} failed")
    return result


def _remove_watch(descriptor: int, watch: int) -> None:
    ctypes.CDLL(None).inotify_rm_watch(
        descriptor, watch
    )  # fails if the folder was removed, which ends the watch too
