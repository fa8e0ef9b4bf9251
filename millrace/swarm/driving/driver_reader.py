"""Read pieces and whole files from the store for the driver.

The driver compares its own reads with the reports of nodes: it decides between nodes that
disagree, and checks reports that no other node can confirm.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from millrace import errors
from millrace.digest import combine_blocks, make_hasher
from millrace.swarm.catalogue import Catalogue, can_combine, combine_segment_blocks
from millrace.swarm.piece_readers import BufferPool, FetchError, StoreReader, hash_segments
from millrace.swarm.protocol import ConnectionPool

_CONCURRENCY = 4
_PAUSE = 0.5  # seconds before a failed read is tried again
_MAX_READS = 5  # of the same piece or file, if the bytes differ each time
_STALL_TIMEOUT = 10.0  # seconds without a byte after which a read has failed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FileDigests:
    """Digests of a file that the driver has read.

    Attributes:
        file: Number of the file.
        digest: Digest of the whole file, of the kind of `File.digest`.
        combined: Combined digest of the segments of the file (`combine_segment_blocks`).
        pieces: Digest of each piece that has a segment of the file, by the number of the piece.
    """

    file: int
    digest: str
    combined: str
    pieces: dict[int, str]


class PieceRequester(Protocol):
    """Owner of the requests for pieces, which uses their digests."""

    def is_useful(self, number: int) -> bool:
        """Tell whether the digest of a piece is still needed."""
        ...

    def is_expected(self, number: int, digest: str) -> bool:
        """Tell whether a digest is the known or decided one of a piece, or a vote."""
        ...

    def handle_digest(self, number: int, digest: str) -> None:
        """Use the digest of a piece that the driver has read."""
        ...

    def handle_failure(self, number: int, error: FetchError) -> None:
        """Note that a read of a piece has failed. The reader tries again after a pause."""
        ...


class FileRequester(Protocol):
    """Owner of the requests for whole files, which uses their digests."""

    def is_doubted(self, number: int) -> bool:
        """Tell whether the digests of a file are still needed."""
        ...

    def handle_digests(self, found: FileDigests) -> None:
        """Use the digests of a file that the driver has read.

        Raises:
            MillraceError: The store does not tell whether they are right. The run ends.
        """
        ...


class RetryingReader:
    """Reads pieces from the store, and tries again until a read succeeds or the reader is closed.

    Args:
        catalogue: Files of the run.
        sources: Signed URL of each file, or its path in a folder.
        ca: Certificate authorities to trust for TLS, PEM; None for those of the system.
        on_failure: Called with a piece and the error of a read that is tried again.
        mirrors: Signed URLs of further copies, by the number of the file.

    Attributes:
        received: Bytes of all pieces that were read.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        sources: list[str],
        ca: str | None,
        on_failure: Callable[[int, FetchError], None],
        mirrors: Mapping[int, list[str]],
    ) -> None:
        self._on_failure = on_failure
        self._connections = ConnectionPool(_STALL_TIMEOUT, ca=ca)
        self._reader = StoreReader(
            catalogue, sources, self._connections, lambda _: None, mirrors=mirrors
        )
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self.received = 0

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._closing.is_set()

    def close(self) -> None:
        """Stop the reads that are under way, and start no further one."""
        self._closing.set()
        self._reader.close()
        self._connections.close()

    def read(self, number: int, into: memoryview) -> bool:
        """Read a piece into a buffer; return False if the reader was closed before."""
        while not self._closing.is_set():
            try:
                self._reader.read_piece(number, into)
            except FetchError as error:
                if self._closing.is_set():
                    return False
                self._on_failure(number, error)
                self._closing.wait(_PAUSE)
            except RuntimeError:  # the thread pool of the reader is closed
                return False
            else:
                with self._lock:
                    self.received += len(into)
                return True
        return False


class DriverReader:
    """Reads pieces and whole files for the driver, in threads of its own.

    Args:
        catalogue: Files of the run.
        sources: Signed URL of each file, or its path in a folder.
        ca: Certificate authorities to trust for TLS, PEM; None for those of the system.
        pieces: Owner of the requests for pieces.
        files: Owner of the requests for files.
        on_fault: Called with an unexpected error, which ends the run.
        mirrors: Signed URLs of further copies, by the number of the file.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        sources: list[str],
        ca: str | None,
        *,
        pieces: PieceRequester,
        files: FileRequester,
        on_fault: Callable[[BaseException], None],
        mirrors: Mapping[int, list[str]],
    ) -> None:
        self._catalogue = catalogue
        self._pieces, self._files, self._on_fault = pieces, files, on_fault
        self._reader = RetryingReader(catalogue, sources, ca, pieces.handle_failure, mirrors)
        self._sizes = catalogue.list_piece_sizes()
        self._buffers = BufferPool(max(self._sizes, default=0))
        self._lock = threading.Lock()
        self._pending: set[tuple[str, int]] = set()
        self._pool = ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="driver-reader")

    @property
    def received(self) -> int:
        """Bytes that the driver has read from the store."""
        return self._reader.received

    @property
    def is_busy(self) -> bool:
        """True if a requested read is not over."""
        return bool(self._pending)

    def request_piece(self, number: int) -> None:
        """Start to read a piece, unless a read of the piece is under way."""
        self._submit("piece", number, self._read_piece)

    def request_file(self, number: int) -> None:
        """Start to read a file, unless a read of the file is under way."""
        self._submit("file", number, self._read_file)

    def close(self) -> None:
        """Stop the reads that are under way, and start no further one."""
        self._reader.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, kind: str, number: int, work: Callable[[int], None]) -> None:
        with self._lock:
            if (kind, number) in self._pending or self._reader.is_closed:
                return
            self._pending.add((kind, number))

        def run() -> None:
            try:
                work(number)
            except Exception as error:  # noqa: BLE001 - the driver ends its run with the error
                if not self._reader.is_closed:
                    self._on_fault(error)
            finally:
                with self._lock:
                    self._pending.discard((kind, number))

        self._pool.submit(run)

    def _read_piece(self, number: int) -> None:
        """Read a piece; read it again if no node expects its digest."""
        if not self._pieces.is_useful(number):
            return
        digest = _read_until_equal(
            lambda: self._hash_piece(number),
            lambda digest: self._pieces.is_expected(number, digest),
            self._catalogue.files[self._catalogue.pieces[number][0].file].origin,
        )
        if digest is not None:
            self._pieces.handle_digest(number, digest)

    def _hash_piece(self, number: int) -> str | None:
        """Read a piece, and return its digest; None if the reader was closed before."""
        with self._buffers.borrow(self._sizes[number]) as data:
            if not self._reader.read(number, data):
                return None
            return combine_segment_blocks(hash_segments(self._catalogue.pieces[number], data))

    def _read_file(self, number: int) -> None:
        """Read a file; read it again if the bytes do not have the digest of the file."""
        if not self._files.is_doubted(number):
            return
        file = self._catalogue.files[number]
        found = _read_until_equal(
            lambda: self._hash_file(number), lambda found: found.digest == file.digest, file.origin
        )
        if found is not None:
            self._files.handle_digests(found)

    def _hash_file(self, number: int) -> FileDigests | None:
        """Read all pieces of a file; return None if the digests are no longer needed."""
        file = self._catalogue.files[number]
        is_combined = can_combine(file, self._catalogue.piece_size)
        whole = None if is_combined else make_hasher(file.algorithm)
        block_digests, pieces = list[bytes](), dict[int, str]()
        for piece, segments in enumerate(self._catalogue.pieces):
            if all(segment.file != number for segment in segments):
                continue
            if not self._files.is_doubted(number):  # the nodes that doubted the file are lost
                return None
            with self._buffers.borrow(self._sizes[piece]) as data:
                if not self._reader.read(piece, data):
                    return None
                found = hash_segments(segments, data)
                pieces[piece] = combine_segment_blocks(found)
                at = 0
                for segment, digest in zip(segments, found, strict=True):
                    if segment.file == number:
                        if whole is not None:
                            whole.update(data[at : at + segment.size])
                        block_digests.append(digest)
                    at += segment.size
        digest = whole.compute() if whole else combine_blocks(b"".join(block_digests))
        return FileDigests(number, digest, combine_segment_blocks(block_digests), pieces)


def _read_until_equal(
    read_once: Callable[[], T | None], is_expected: Callable[[T], bool], origin: str
) -> T | None:
    """Read until the result is the expected one, or equals that of an earlier read.

    The driver decides, so one wrong read of its own must not be enough.

    Args:
        read_once: Reads, and returns None if no result is needed any more.
        is_expected: Tells whether nodes, or a digest of the object, have the same result.
        origin: Object, for the error.

    Raises:
        CorruptError: All results differ.
    """
    found: list[T] = []
    for _ in range(_MAX_READS):
        result = read_once()
        if result is None or is_expected(result) or result in found:
            return result
        found.append(result)
    raise errors.CorruptError(
        f"{origin} has had other bytes in each of {_MAX_READS} reads on the driver's machine. "
        "Check the memory of this machine, and the store, and run it again."
    )
