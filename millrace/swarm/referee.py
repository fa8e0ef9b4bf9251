"""Read from the store for the driver itself, what nodes do not agree on or cannot prove."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from millrace.swarm.pieces import Catalogue, digest_of
from millrace.swarm.protocol import ConnectionPool
from millrace.swarm.transfer import BufferPool, FetchError, StoreReader, hash_segments

_CONCURRENCY = 4
_PAUSE = 0.5  # seconds before a piece is read again
_STALL_TIMEOUT = 10.0  # seconds without a byte after which a read has failed


@dataclass(frozen=True, slots=True)
class FileAudit:
    """A file that the driver has read.

    Attributes:
        file: Its number.
        digest: Of the whole, of the kind that is known of it.
        parts: `digest_of` its segments.
        pieces: The digest of each piece that it is in.
    """

    file: int
    digest: str
    parts: str
    pieces: dict[int, str]


class Referee:
    """Reads pieces and whole files, in threads of its own.

    Args:
        catalogue: What the pieces are of.
        sources: For each file, the signed URL that reads it, or its path in a folder.
        ca: Certificate authorities to trust for TLS, PEM.
        is_open: Told a piece that is to be read; whether that is still of use.
        is_doubted: The same of a file.
        settled: Told the digest of a piece.
        audited: Told of a file.
        failed: Told of a piece that could not be read, and will be tried again.
        fault: Told of a fault of ours.

    Attributes:
        received: Bytes read.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        sources: list[str],
        ca: str | None,
        *,
        is_open: Callable[[int], bool],
        is_doubted: Callable[[int], bool],
        settled: Callable[[int, str], None],
        audited: Callable[[FileAudit], None],
        failed: Callable[[int, FetchError], None],
        fault: Callable[[BaseException], None],
    ) -> None:
        self._catalogue = catalogue
        self._is_open, self._is_doubted = is_open, is_doubted
        self._settled, self._audited = settled, audited
        self._failed, self._fault = failed, fault
        self._connections = ConnectionPool(_STALL_TIMEOUT, ca=ca)
        self._reader = StoreReader(catalogue, sources, self._connections, lambda _: None)
        self._sizes = catalogue.list_piece_sizes()
        self._buffers = BufferPool(max(self._sizes, default=0))
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._pending: set[tuple[str, int]] = set()
        self.received = 0
        self._pool = ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="referee")

    @property
    def is_busy(self) -> bool:
        """True if something is still to be read."""
        return bool(self._pending)

    def read(self, piece: int) -> None:
        """Read a piece, unless it is being read."""
        self._submit("piece", piece, self._read_piece)

    def audit(self, file: int) -> None:
        """Read a file, unless it is being read."""
        self._submit("file", file, self._read_file)

    def close(self) -> None:
        """Break off what is being read, and start nothing more."""
        self._closing.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._reader.close()
        self._connections.close()

    def _submit(self, kind: str, number: int, work: Callable[[int], None]) -> None:
        with self._lock:
            if (kind, number) in self._pending or self._closing.is_set():
                return
            self._pending.add((kind, number))

        def run() -> None:
            try:
                work(number)
            except Exception as error:  # noqa: BLE001 - told to the driver, whose run ends
                if not self._closing.is_set():
                    self._fault(error)
            finally:
                with self._lock:
                    self._pending.discard((kind, number))

        self._pool.submit(run)

    def _read_piece(self, number: int) -> None:
        if not self._is_open(number):
            return
        with self._buffers.borrow(self._sizes[number]) as data:
            if self._fill(number, data):
                self._settled(
                    number, digest_of(hash_segments(self._catalogue.pieces[number], data))
                )

    def _read_file(self, number: int) -> None:
        """Read a file; and a second time if it is not what its digest says."""
        if not self._is_doubted(number):
            return
        found = self._audit_once(number)
        if found is not None and found.digest != self._catalogue.files[number].digest:
            found = self._audit_once(number)
        if found is not None:
            self._audited(found)

    def _audit_once(self, number: int) -> FileAudit | None:
        whole = self._catalogue.files[number].make_hasher()
        parts, pieces = list[bytes](), dict[int, str]()
        for piece, segments in enumerate(self._catalogue.pieces):
            if all(segment.file != number for segment in segments):
                continue
            if not self._is_doubted(number):  # who said that it is wrong is lost
                return None
            with self._buffers.borrow(self._sizes[piece]) as data:
                if not self._fill(piece, data):
                    return None
                found = hash_segments(segments, data)
                pieces[piece] = digest_of(found)
                at = 0
                for segment, digest in zip(segments, found, strict=True):
                    if segment.file == number:
                        whole.update(data[at : at + segment.size])
                        parts.append(digest)
                    at += segment.size
        return FileAudit(number, whole.hexdigest(), digest_of(parts), pieces)

    def _fill(self, number: int, data: memoryview) -> bool:
        """Read a piece until it is there; False if that was broken off."""
        while not self._closing.is_set():
            try:
                self._reader.read_piece(number, data)
            except FetchError as error:
                if self._closing.is_set():
                    return False
                self._failed(number, error)
                self._closing.wait(_PAUSE)
            except RuntimeError:  # the pool of the reader is closed
                return False
            else:
                with self._lock:
                    self.received += len(data)
                return True
        return False
