"""A store in front of RGW that counts what is asked of each object, and lies about some.

Every request is passed on as it came, with the signature of its sender, to which the host's name
belongs. Of an object that was announced by `Lens.lie`, listings and headers tell another size or
age; its bytes are zeros, as many as the reader takes.
"""

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any, Self
from urllib.parse import unquote

from aiohttp import web

from millrace.testing.upstream import CHUNK, Answer, Upstream, UpstreamError

CONTROL = "/-/"
_ENTITY = re.compile("&(#x?[0-9A-Fa-f]+|amp|lt|gt|quot|apos);")
_ENTITIES = {"amp": "&", "lt": "<", "gt": ">", "quot": '"', "apos": "'"}
_DROPPED = frozenset({"connection", "keep-alive", "transfer-encoding", "expect"})
_LISTED = re.compile(rb"<Contents>.*?<Key>(?P<key>.*?)</Key>.*?</Contents>", re.DOTALL)
_SIZE = re.compile(rb"<Size>[0-9]+</Size>")
_DATE = re.compile(rb"<LastModified>[^<]*</LastModified>")


@dataclass(frozen=True, slots=True)
class Lie:
    """Description that the store gives of an object.

    Attributes:
        size: Size in bytes; None for the true size.
        modified: Time of the last write; None for the true time.
    """

    size: int | None = None
    modified: datetime | None = None


@dataclass
class Asked:
    """Counts of requests, by keys below a bucket.

    Attributes:
        requests: Number of all requests.
        read: Number of reads and descriptions of each object.
        listed: Number of listings with each object.
        sent: Most bytes that one answer sent of it.
    """

    requests: int = 0
    read: Counter[str] = field(default_factory=Counter[str])
    listed: Counter[str] = field(default_factory=Counter[str])
    sent: Counter[str] = field(default_factory=Counter[str])


class Lens:
    """A running server. Made by `Lens.start`; a context manager that stops it.

    Attributes:
        endpoint: Its address, ``http://127.0.0.1:PORT``.
    """

    def __init__(self, upstream: str, bucket: str) -> None:
        self._url, self._bucket = upstream, bucket
        self._lies: dict[str, Lie] = {}
        self._log: list[tuple[str, str, str, int]] = []  # site, what, key, bytes
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lens", daemon=True)
        self.endpoint = ""

    @classmethod
    def start(cls, upstream: str, bucket: str) -> Self:
        """Start a server in a thread; it serves when this returns."""
        lens = cls(upstream, bucket)
        lens._thread.start()
        lens._ready.wait()
        return lens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def lie(self, lies: Mapping[str, Lie]) -> None:
        """Tell, from now on, other things of objects, by their keys."""
        with self._lock:
            self._lies.update(lies)

    def take(self, site: str, *, lies: bool = True) -> Asked:
        """Return what was asked below a prefix, and forget it, with the lies by default."""
        found = Asked()
        with self._lock:
            mine = [entry for entry in self._log if entry[0] == site]
            self._log = [entry for entry in self._log if entry[0] != site]
            if lies:
                self._lies = {k: v for k, v in self._lies.items() if not k.startswith(site)}
        for _, what, key, size in mine:
            match what:
                case "listed":
                    found.listed[key] += 1
                case "read":
                    found.read[key] += 1
                    found.sent[key] = max(found.sent[key], size)
                case _:
                    found.requests += 1
        return found

    def _note(self, what: str, key: str, size: int = 0) -> None:
        with self._lock:
            self._log.append((key.partition("/")[0] + "/", what, key, size))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _serve(self) -> None:
        self._upstream = Upstream(self._url)
        self._runner = web.ServerRunner(web.Server(self._handle))
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.endpoint = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _end(self) -> None:
        await self._runner.cleanup()
        self._upstream.close()
        await asyncio.sleep(0)  # aborted connections are closed by the loop's next turn

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path, _, query = request.raw_path.partition("?")
        if path.startswith(CONTROL):
            return await self._control(path.removeprefix(CONTROL), await request.json())
        bucket, _, key = unquote(path[1:]).partition("/")
        scope = key or unquote(
            next((w[7:] for w in query.split("&") if w.startswith("prefix=")), "")
        )
        if bucket == self._bucket:
            self._note("request", scope)
        headers = [(n, v) for n, v in request.headers.items() if n.lower() not in _DROPPED]
        lie = self._lies.get(key) if "uploadId=" not in query else None
        try:
            if request.method in {"GET", "HEAD"} and lie is not None and lie.size is not None:
                return await self._zeros(request, key, lie)
            body = request.content.iter_chunked(CHUNK) if request.can_read_body else None
            answer = await self._upstream.send(request.method, request.raw_path, headers, body)
            if request.method not in {"GET", "HEAD"}:
                self._lies.pop(key, None)  # there is another object by now
            if request.method == "GET" and not key and answer.status == 200:
                return await self._listing(request, answer)
            return await self._passed(request, answer, key, lie)
        except (UpstreamError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=502)

    async def _control(self, verb: str, body: Any) -> web.Response:
        """Do what a process of ours asks: take lies, or forget what was asked so far."""
        if verb == "lie":
            now = datetime.now(UTC)
            self.lie({
                key: Lie(size, now + timedelta(seconds=shift) if shift else None)
                for key, size, shift in body
            })  # fmt: skip
        else:
            self.take(body, lies=False)
        return web.json_response({})

    async def _passed(
        self, request: web.BaseRequest, answer: Answer, key: str, lie: Lie | None
    ) -> web.StreamResponse:
        told = web.StreamResponse(status=answer.status, reason=answer.reason)
        for name, value in answer.headers:
            if name.lower() not in _DROPPED:
                told.headers[name] = value
        if lie is not None and lie.modified:
            told.headers["Last-Modified"] = format_datetime(lie.modified, usegmt=True)
        if answer.chunked:
            told.enable_chunked_encoding()
        await told.prepare(request)
        size = 0
        async for piece in answer.read_chunks():
            size += len(piece)
            await told.write(piece)
        await told.write_eof()
        if request.method in {"GET", "HEAD"}:
            self._note("read", key, size)
        return told

    async def _zeros(self, request: web.BaseRequest, key: str, lie: Lie) -> web.StreamResponse:
        """Answer with as many zeros as are asked for, and count those that were taken."""
        size = lie.size or 0
        first, last = 0, size - 1
        asked = re.fullmatch(r"bytes=([0-9]*)-([0-9]*)", request.headers.get("Range", ""))
        if asked and asked[1]:
            first, last = int(asked[1]), min(last, int(asked[2] or last))
        elif asked and asked[2]:
            first = max(0, size - int(asked[2]))
        told = web.StreamResponse(status=206 if asked else 200)
        told.content_length = last + 1 - first
        told.headers["ETag"] = '"0123456789abcdef0123456789abcdef"'
        told.headers["Last-Modified"] = format_datetime(
            lie.modified or datetime.now(UTC), usegmt=True
        )
        if asked:
            told.headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        await told.prepare(request)
        sent = 0
        try:
            while request.method == "GET" and first + sent <= last:
                piece = bytes(min(CHUNK, last + 1 - first - sent))
                await told.write(piece)
                sent += len(piece)
            await told.write_eof()
        finally:
            self._note("read", key, sent)
        return told

    async def _listing(self, request: web.BaseRequest, answer: Answer) -> web.StreamResponse:
        body, encoded = await answer.read(), b"<EncodingType>url"
        quoted = encoded in body

        def told(match: re.Match[bytes]) -> bytes:
            text = _ENTITY.sub(_character, match["key"].decode(errors="replace"))
            key = unquote(text.replace("+", " ")) if quoted else text
            self._note("listed", key)
            lie, entry = self._lies.get(key), match.group()
            if lie is not None and lie.size is not None:
                entry = _SIZE.sub(f"<Size>{lie.size}</Size>".encode(), entry)
            if lie is not None and lie.modified:
                when = f"{lie.modified:%Y-%m-%dT%H:%M:%S.000Z}"
                entry = _DATE.sub(f"<LastModified>{when}</LastModified>".encode(), entry)
            return entry

        body = _LISTED.sub(told, body)
        return web.Response(body=body, content_type="application/xml")


def _character(match: re.Match[str]) -> str:
    name = match[1]
    if name.startswith("#"):
        return chr(int(name[2:], 16) if name[1] in "xX" else int(name[1:]))
    return _ENTITIES[name]
