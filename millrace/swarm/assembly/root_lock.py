"""Lock of a root: one run at a time writes files below the root."""

import fcntl
import os
from pathlib import Path

from millrace.errors import ConflictError


class RootLock:
    """Lock of a root. The kernel releases the lock when the process ends.

    Args:
        root: Folder that all destinations are below.
        path: Path of the lock file.
    """

    def __init__(self, root: Path, path: Path) -> None:
        self._root, self._path = root, path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            ConflictError: Another agent uses this root.
        """
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConflictError(
                f"Another agent is putting files into {self._root}: wait for it, or end it."
            ) from None
        self._descriptor = descriptor

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
