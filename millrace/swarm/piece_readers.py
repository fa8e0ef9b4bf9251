"""Read pieces into buffers: from the store by ranges, or from another node."""

import http.client
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

from millrace.digest import hash_blocks, make_local_etag
from millrace.swarm.catalogue import Catalogue, Segment
from millrace.swarm.protocol import AUTH_HEADER, ConnectionPool, Endpoint, HttpStatusError, sign

logger = logging.getLogger(__name__)

_CONCURRENCY = 16  # concurrent reads from the store for the small files of one piece
_TRIES = 4
_REST = 30.0  # seconds for which a server comes last after a failed read
_PAUSE = 0.1  # longest pause before the second try, in seconds; it doubles with each try
FINAL_STATUSES = {http.client.NOT_FOUND, http.client.GONE, http.client.PRECONDITION_FAILED}
"""Statuses with which a store refuses a changed object. A retry would get the same answer."""


class FetchError(Exception):
    """A piece could not be read from its source.

    Attributes:
        status: HTTP status of the refusal; 0 if there was none.
    """

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


class StoreReader:
    """Reads pieces from the store.

    Args:
        catalogue: Files and pieces of the run.
        sources: Signed URL of each file, or its path in a folder.
        connections: Connections to the store.
        on_retry: Called with the reason of each failed read that is tried again.
        mirrors: Signed URLs of further copies with the same ETag, by the number of the file. After
            a failed read, its server comes last for a while.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        sources: list[str],
        connections: ConnectionPool,
        on_retry: Callable[[str], None],
        mirrors: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        self._catalogue, self._sources = catalogue, sources
        self._connections, self._on_retry = connections, on_retry
        self._mirrors = {number: tuple(urls) for number, urls in (mirrors or {}).items()}
        self._resting_until: dict[Endpoint, float] = {}
        self._from_mirrors: dict[int, set[str]] = {}  # piece → mirrors that have sent parts of it
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="small")

    def read_piece(self, number: int, into: memoryview, turn: int | None = None) -> None:
        """Read a piece into a buffer of its size.

        Args:
            number: Piece.
            into: Buffer.
            turn: Offset of the turns that the store and its mirrors take. None: mirrors are read
                only after a failed read of the store itself.

        Raises:
            FetchError: The read failed, or an object has another ETag.
        """
        segments = self._catalogue.pieces[number]
        ends = [0]
        for segment in segments:
            ends.append(ends[-1] + segment.size)
        buffers = [into[a:b] for a, b in pairwise(ends)]
        sources: set[str] = set()
        if len(segments) == 1:
            sources.add(self._read_segment(segments[0], buffers[0], turn))
        else:
            self._read_segments(segments, buffers, turn, sources)
        if self._mirrors:
            own = {self._sources[segment.file] for segment in segments}
            self._from_mirrors[number] = sources - own

    def leave_out_mirrors(self, number: int) -> bool:
        """Read the files of a piece no more from the mirrors that have sent parts of the piece.

        Args:
            number: Piece whose bytes were wrong, or which no other node confirms.

        Returns:
            Whether a mirror has sent parts of the piece.
        """
        wrong = self._from_mirrors.pop(number, set())
        for file in {segment.file for segment in self._catalogue.pieces[number]} if wrong else ():
            urls = self._mirrors.get(file, ())
            self._mirrors[file] = tuple(url for url in urls if url not in wrong)
            for url in wrong.intersection(urls):
                logger.warning(
                    "The mirror at %s is no longer read for %s: it has sent wrong bytes, or bytes "
                    "that no other node confirms.",
                    Endpoint.parse_url(url)[0].netloc, self._catalogue.files[file].origin,
                )  # fmt: skip
        return bool(wrong)

    def close(self) -> None:
        """Start no further reads."""
        self._closing.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read_segments(
        self,
        segments: Sequence[Segment],
        buffers: Sequence[memoryview],
        turn: int | None,
        sources: set[str],
    ) -> None:
        """Read segments in several threads, and add the URLs that they were read from.

        After an error, wait for all threads, since the buffer is used again for another piece.
        """
        remaining = deque(zip(segments, buffers, strict=True))

        def take() -> tuple[Segment, memoryview] | None:
            try:
                return remaining.popleft()
            except IndexError:
                return None

        def read_some() -> None:
            try:
                while (found := take()) is not None:
                    sources.add(self._read_segment(*found, turn))
            except BaseException:
                remaining.clear()
                raise

        count = min(len(segments), _CONCURRENCY)
        started = [self._pool.submit(read_some) for _ in range(count)]
        for each in started:
            with suppress(CancelledError):
                each.exception()  # waits, which `concurrent.futures.wait` does not end if cancelled
        for each in started:
            each.result()

    def _read_segment(self, segment: Segment, into: memoryview, turn: int | None) -> str:
        """Read a segment, and return its URL.

        A read is tried again: else one of many segments would often fail the piece.
        """
        for failed in range(_TRIES):
            source = self._choose_source(segment, failed, turn)
            try:
                self._read_once(source, segment, into)
            except FetchError as error:
                last = failed == _TRIES - 1
                is_final = error.status in FINAL_STATUSES
                if segment.file in self._mirrors:
                    is_final = self._note_failure(source, segment.file, is_final=is_final)
                if last or is_final or self._closing.is_set():
                    # A mirror that lacks an object does not mean that the object has changed.
                    if source != self._sources[segment.file]:
                        raise FetchError(str(error)) from error
                    raise
                self._on_retry(str(error))
                self._closing.wait(random.uniform(0.0, _PAUSE * 2.0**failed))
            else:
                return source
        raise AssertionError  # the last try returns or raises

    def _choose_source(self, segment: Segment, failed: int, turn: int | None) -> str:
        """Return the URL for a try to read a segment: in turns, and those that rest last."""
        primary, mirrors = self._sources[segment.file], self._mirrors.get(segment.file)
        if not mirrors or (turn is None and not failed):
            return primary
        urls = (primary, *mirrors)
        first = failed
        if turn is not None:
            first += _find_first(segment, self._catalogue.piece_size, turn)
        turns = [urls[(first + n) % len(urls)] for n in range(len(urls))]
        now = time.monotonic()
        return min(turns, key=lambda url: max(now, self._find_rest(url)))

    def _find_rest(self, url: str) -> float:
        return self._resting_until.get(Endpoint.parse_url(url)[0], 0.0)

    def _note_failure(self, source: str, file: int, *, is_final: bool) -> bool:
        """Let the server of a source rest, or forget the copy of a mirror that has changed.

        Returns:
            Whether the object itself has changed or is gone.
        """
        if not is_final:
            self._resting_until[Endpoint.parse_url(source)[0]] = time.monotonic() + _REST
            return False
        if source == self._sources[file]:
            return True
        self._mirrors[file] = tuple(url for url in self._mirrors[file] if url != source)
        return False

    def _read_once(self, source: str, segment: Segment, into: memoryview) -> None:
        if not segment.size:
            return
        try:
            if source.startswith("/"):
                self._read_local(Path(source), segment, into)
            else:
                self._read_remote(source, segment, into)
        except HttpStatusError as error:
            raise FetchError(str(error), error.status) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise FetchError(f"{type(error).__name__}: {error}") from error

    def _read_remote(self, url: str, segment: Segment, into: memoryview) -> None:
        file = self._catalogue.files[segment.file]
        endpoint, target = Endpoint.parse_url(url)
        headers = {
            "If-Match": file.etag,
            "Range": f"bytes={segment.start}-{segment.start + segment.size - 1}",
        }
        answer = self._connections.read_into(endpoint, target, headers, into)
        if answer.get("etag", file.etag) != file.etag:
            raise FetchError("the object was replaced", http.client.PRECONDITION_FAILED)

    def _read_local(self, path: Path, segment: Segment, into: memoryview) -> None:
        file = self._catalogue.files[segment.file]
        with path.open("rb", buffering=0) as opened:
            _check_etag(opened.fileno(), file.etag)
            at = 0
            while at < len(into):
                got = os.preadv(opened.fileno(), [into[at:]], segment.start + at)
                if not got:
                    raise FetchError("the file was truncated")
                at += got
            _check_etag(opened.fileno(), file.etag)  # the file may have been written meanwhile


def begins_at_mirror(
    catalogue: Catalogue, mirrors: Mapping[int, Sequence[str]], number: int, turn: int
) -> bool:
    """Tell whether a read of a piece in turn asks a mirror first, for any of the files."""
    return any(
        _find_first(segment, catalogue.piece_size, turn) % (1 + len(mirrors[segment.file]))
        for segment in catalogue.pieces[number]
        if segment.file in mirrors
    )


def _find_first(segment: Segment, piece_size: int, turn: int) -> int:
    """Return the first location of a read in turn, modulo the number of locations.

    The store itself is location 0.
    """
    return segment.file + segment.start // piece_size + turn


def _check_etag(descriptor: int, etag: str) -> None:
    if make_local_etag(os.fstat(descriptor)) != etag:
        raise FetchError("the object was replaced", http.client.PRECONDITION_FAILED)


class PeerReader:
    """Reads pieces from other nodes.

    Args:
        run: Name of the run.
        key: Key that nodes sign their requests to each other with.
        peers: Endpoint of each agent, by the id of its node; agents may be added.
        connections: Connections to these agents.
    """

    def __init__(
        self, run: str, key: bytes, peers: dict[str, Endpoint], connections: ConnectionPool
    ) -> None:
        self._run, self._key, self._peers = run, key, peers
        self._connections = connections

    def read_piece(
        self, number: int, source: str, into: memoryview, is_over: Callable[[], bool]
    ) -> None:
        """Read a piece from a node into a buffer of its size.

        Args:
            number: Piece.
            source: Id of the node.
            into: Buffer.
            is_over: Called when bytes have arrived; true ends the read, since another source was
                faster.

        Raises:
            FetchError: The read failed, or was ended.
        """
        endpoint, path = self._peers[source], f"/runs/{self._run}/pieces/{number}"

        def sign_headers() -> dict[str, str]:
            return {AUTH_HEADER: sign(self._key, "GET", path, to=endpoint.identity)}

        try:
            self._connections.read_into(endpoint, path, sign_headers, into, is_over=is_over)
        except HttpStatusError as error:
            raise FetchError(str(error), error.status) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise FetchError(f"{type(error).__name__}: {error}") from error


def hash_segments(segments: tuple[Segment, ...], data: memoryview) -> list[bytes]:
    """Return the joined digests of the blocks of each segment of a piece."""
    found: list[bytes] = []
    at = 0
    for segment in segments:
        found.append(hash_blocks(data[at : at + segment.size]))
        at += segment.size
    return found


class BufferPool:
    """Buffers that are used again, since the allocation of new memory is slower than a copy.

    Args:
        size: Bytes of each buffer.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[bytearray] = []

    @contextmanager
    def borrow(self, size: int) -> Generator[memoryview]:
        """Lend a buffer of `size` bytes until the block ends."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = bytearray(self._size)
        try:
            yield memoryview(buffer)[:size]
        finally:
            self._free.append(buffer)
