"""Unchanged forwarding of HTTP/1.1 requests to another server, streamed in both directions."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

CHUNK = 256 * 1024
IDLE_SECONDS = 10.0


class UpstreamError(Exception):
    """The upstream server did not answer."""


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    idle_since: float = 0.0

    def is_usable(self) -> bool:
        fresh = time.monotonic() - self.idle_since < IDLE_SECONDS
        return fresh and not self.reader.at_eof() and not self.writer.transport.is_closing()


class Answer:
    """Headers of an answer, and its body as a stream."""

    def __init__(
        self, pool: "Upstream", connection: _Connection, head: bytes, *, method: str, sent: bool
    ) -> None:
        """Parse the status line and the headers."""
        first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        _, status, self.reason = (first + " ").split(" ", 2)
        self.status = int(status)
        pairs = (line.partition(":") for line in lines)
        self.headers = [(name.strip(), value.strip()) for name, _, value in pairs]
        known = {name.lower(): value for name, value in self.headers}
        self.chunked = "chunked" in known.get("transfer-encoding", "")
        self.bodiless = method == "HEAD" or self.status in (204, 304)
        self.length = None if self.chunked else int(known.get("content-length", 0))
        self._pool = pool
        self._connection = connection
        self._ended = False
        self._reusable = sent and known.get("connection", "").lower() != "close"

    def find(self, name: str) -> str:
        """Return the value of a header; empty if the header is missing."""
        return next((value for given, value in self.headers if given.lower() == name), "")

    async def read_chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body in pieces of at most `CHUNK` bytes.

        The connection is reused after the last piece, and closed if the iteration stops earlier.
        """
        try:
            async for piece in self._read_pieces():
                yield piece
        except (OSError, EOFError, ValueError) as error:
            raise UpstreamError("The body of the answer ended early.") from error
        finally:
            if not self._ended:
                self.close()
        if self._reusable:
            self._pool.give_back(self._connection)
        else:
            self.close()

    async def _read_pieces(self) -> AsyncIterator[bytes]:
        reader = self._connection.reader
        if self.chunked and not self.bodiless:
            while size := int((await reader.readline()).split(b";")[0], 16):
                async for piece in _read_exactly(reader, size):
                    yield piece
                await reader.readexactly(2)
            await reader.readline()
        elif not self.bodiless:
            async for piece in _read_exactly(reader, self.length or 0):
                yield piece
        self._ended = True

    async def read(self) -> bytes:
        """Return the whole body, which must be small."""
        return b"".join([piece async for piece in self.read_chunks()])

    def close(self) -> None:
        """Close the connection."""
        self._connection.writer.transport.abort()


class Upstream:
    """Upstream server, with a pool of idle connections."""

    def __init__(self, url: str) -> None:
        """Parse the URL of the server, ``http://HOST:PORT``."""
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None or parts.port is None:
            raise ValueError(f"The upstream must be http://HOST:PORT, not {url}.")
        self.host, self.port = parts.hostname, parts.port
        self._idle: list[_Connection] = []

    async def send(
        self,
        method: str,
        target: str,
        headers: Iterable[tuple[str, str]],
        body: AsyncIterator[bytes] | None = None,
    ) -> Answer:
        """Send a request, and return its answer when the headers have arrived.

        The answer may arrive before the end of ``body``. The rest of the body is then still sent,
        or read and discarded if the server no longer receives it.

        Raises:
            UpstreamError: The server could not be reached, or closed the connection.
            Exception: An error of ``body``. The request then stays incomplete: the connection is
                closed before its last byte.
        """
        head = "".join(f"{name}: {value}\r\n" for name, value in headers)
        try:
            connection = await self._connect()
            connection.writer.write(f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode("latin-1"))
            await connection.writer.drain()
        except OSError as error:
            raise UpstreamError(f"{self.host}:{self.port} is not reachable.") from error
        reading = asyncio.ensure_future(_read_head(connection.reader))
        try:
            sent = True if body is None else await _pump(body, connection.writer)
            answered = await reading
        except BaseException as error:
            reading.cancel()
            connection.writer.transport.abort()
            with contextlib.suppress(asyncio.CancelledError, OSError, EOFError):
                await reading
            if isinstance(error, OSError | EOFError):
                raise UpstreamError("The connection closed before the answer.") from error
            raise
        return Answer(self, connection, answered, method=method, sent=sent)

    def give_back(self, connection: _Connection) -> None:
        """Keep a connection for the next request."""
        connection.idle_since = time.monotonic()
        self._idle.append(connection)

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.writer.transport.abort()
        self._idle.clear()

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable():
                return connection
            connection.writer.transport.abort()
        return _Connection(*await asyncio.open_connection(self.host, self.port, limit=CHUNK))


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 100"):
            return head


async def _pump(body: AsyncIterator[bytes], writer: asyncio.StreamWriter) -> bool:
    """Write a body, and return whether the server received all of it."""
    taken = True
    async for piece in body:
        if taken:
            try:
                writer.write(piece)
                await writer.drain()
            except OSError:
                taken = False
    return taken


async def _read_exactly(reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
    while size:
        piece = await reader.read(min(size, CHUNK))
        if not piece:
            raise EOFError
        size -= len(piece)
        yield piece
