"""Limit on the uploads of an agent, so that no node keeps the others from it.

Each upload has a thread and open files. All nodes of a run sign with the same key, so only their
addresses tell them apart.
"""

import contextlib
import resource
import socket
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from millrace.swarm import tls

_MAX_DESCRIPTORS = 2304  # connections and files of all uploads: 64 uploads of pieces of 32 files
_SHARE = 3 / 8  # part of the descriptors of the process that uploads may use; idle ones have half


class UploadLimiter:
    """Ends an upload to the address with most uploads if there are too many.

    Nodes may share an address, so no address has a limit of its own: only all uploads together.

    Args:
        max_descriptors: Largest number of descriptors of all uploads.
    """

    def __init__(self, max_descriptors: int | None = None) -> None:
        allowed = int(_SHARE * resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._max_descriptors = max_descriptors or min(_MAX_DESCRIPTORS, allowed)
        # connection → its address and the number of its descriptors, oldest first
        self._uploads: dict[socket.socket, tuple[str, int]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def track(self, connection: socket.socket, address: str, files: int) -> Generator[None]:
        """Count an upload until the block ends. Over the limit, end the oldest of one address.

        Args:
            connection: Connection of the upload.
            address: Address of the receiver.
            files: Number of open files of the upload.
        """
        with self._lock:
            self._uploads[connection] = address, 1 + files
            while self._count_descriptors() > self._max_descriptors and len(self._uploads) > 1:
                self._end_one()
        try:
            yield
        finally:
            with self._lock:
                self._uploads.pop(connection, None)

    def _count_descriptors(self) -> int:
        return sum(count for _, count in self._uploads.values())

    def _end_one(self) -> None:
        """End the oldest upload to the address that has most of the descriptors."""
        used: Counter[str] = Counter()
        for address, count in self._uploads.values():
            used[address] += count
        most = max(used.values())
        for connection, (address, _) in self._uploads.items():
            if used[address] == most:
                del self._uploads[connection]
                with contextlib.suppress(OSError):
                    tls.shut(connection, socket.SHUT_RDWR)  # the thread of the upload closes it
                return
