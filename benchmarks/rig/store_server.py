"""The process of the rig's store. Run by `benchmarks.rig.store`; see there for what it promises."""

import base64
import contextlib
import hashlib
import json
import os
import re
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl, quote, unquote
from xml.sax.saxutils import escape

from benchmarks.rig.store_faults import BODY, Fault, FaultKind, Faults
from benchmarks.rig.store_objects import Objects, Stored, opened
from millrace.testing import sigv4
from millrace.testing.key import Key

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
A_SEND = 1 << 20  # bytes: often enough for counts that are read meanwhile
SEND_TIMEOUT = 120  # seconds in which a client takes nothing
SKEW = timedelta(minutes=15)
SHA256 = re.compile(r"[0-9a-f]{64}")
RANGE = re.compile(r"bytes=(\d*)-(\d*)")


@lru_cache(maxsize=64)
def moment(stamp: str) -> datetime:
    """Return the time at which a request was signed."""
    return datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)


@lru_cache(maxsize=64)
def http_date(seconds: int) -> str:
    """Return a time as HTTP writes it."""
    return formatdate(seconds, usegmt=True)


class RefusedError(Exception):
    """Answer that refuses a request."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(message or code)
        self.status, self.code = status, code


@dataclass(slots=True)
class Counts:
    """Counts of requests and of sent bytes; used by many threads."""

    requests: Counter[str] = field(default_factory=Counter)
    gets: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def asked(self, operation: str, key: str) -> None:
        """Count a request."""
        with self.lock:
            self.requests[operation] += 1
            self.gets[key] += operation == "GetObject"

    def add(self, key: str, size: int) -> None:
        """Count bytes of an object's body."""
        with self.lock:
            self.sent[key] += size

    def clear(self) -> None:
        """Begin anew."""
        with self.lock:
            for counter in (self.requests, self.gets, self.sent):
                counter.clear()

    def shown(self) -> dict[str, Any]:
        """As JSON."""
        with self.lock:
            objects = {
                key: {"gets": self.gets[key], "bytes": self.sent[key]}
                for key in sorted({*+self.gets, *+self.sent})
            }
            return {
                "requests": dict(self.requests),
                "bytes": self.sent.total(),
                "objects": objects,
            }


class Server(ThreadingHTTPServer):
    """Serves one bucket.

    Args:
        address: Where to listen.
        folder: Of the objects.
        bucket: Its name.
        key: What requests must be signed with.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, address: str, folder: Path, bucket: str, key: Key) -> None:
        super().__init__((address, 0), Handler)
        self.bucket, self.key = bucket, key
        self.objects = Objects(folder)
        self.counts, self.faults = Counts(), Faults()
        self.release = threading.Event()  # ends the stalls of before a reset

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that is gone; of all else, what the base class says."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError | BlockingIOError):
            super().handle_error(request, client_address)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, taken apart."""

    operation: str
    key: str
    query: Mapping[str, str]


class Handler(BaseHTTPRequestHandler):
    """One connection of a client's."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def setup(self) -> None:
        super().setup()
        limit = struct.pack("ll", SEND_TIMEOUT, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def do_GET(self) -> None:
        self._guarded(self._control if self.path.startswith("/_") else self._s3)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def date_time_string(self, timestamp: float | None = None) -> str:
        """Return the same text for all requests of one second."""
        return http_date(int(time.time() if timestamp is None else timestamp))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing: requests are counted."""

    def _guarded(self, answer: Callable[[], None]) -> None:
        self._unread = int(self.headers.get("Content-Length", 0))
        try:
            answer()
        except RefusedError as refused:
            # Its status says what it is; a body that was not taken would be read as a request.
            self.close_connection |= bool(self._unread)
            text = f"<Error><Code>{refused.code}</Code><Message>{escape(str(refused))}</Message>"
            self._say(refused.status, f"{text}</Error>".encode(), "application/xml")

    # S3

    def _s3(self) -> None:
        path, _, query = self.path.partition("?")
        asked = self._taken_apart(path, dict(parse_qsl(query, keep_blank_values=True)))
        self.server.counts.asked(asked.operation, asked.key)
        self._judge(path, query)
        match asked.operation:
            case "GetObject" | "HeadObject":
                self._get(asked)
            case "ListObjectsV2":
                self._maybe_refuse(asked.operation, asked.query.get("prefix", ""))
                self._list(asked.query)
            case "PutObject":
                self._maybe_refuse(asked.operation, asked.key)
                self._put(asked.key)
            case "DeleteObject":
                self.server.objects.delete(asked.key)
                self._say(204, b"", "application/xml")
            case "DeleteObjects":
                raise RefusedError(405, "MethodNotAllowed", "Delete one object at a time.")
            case _:
                raise RefusedError(501, "NotImplemented")

    def _taken_apart(self, path: str, query: Mapping[str, str]) -> Asked:
        bucket, _, key = unquote(path.removeprefix("/")).partition("/")
        if bucket != self.server.bucket:
            raise RefusedError(404, "NoSuchBucket")
        if not key:
            listed = self.command == "GET" and query.get("list-type") == "2"
            several = self.command == "POST" and "delete" in query
            operation = "DeleteObjects" if several else "ListObjectsV2" if listed else "Unknown"
            return Asked(operation, "", query)
        named = {
            "GET": "GetObject",
            "HEAD": "HeadObject",
            "PUT": "PutObject",
            "DELETE": "DeleteObject",
        }
        plain = not {"uploads", "uploadId", "partNumber", "acl", "tagging"} & query.keys()
        operation = named.get(self.command, "Unknown") if plain else "Unknown"
        return Asked(operation, key, query)

    def _judge(self, path: str, query: str) -> None:
        """Check the signature, and its time."""
        headers = cast("Mapping[str, str]", self.headers)
        try:
            signature = sigv4.find_signature(headers, query)
        except sigv4.MalformedError as error:
            raise RefusedError(400, "AuthorizationHeaderMalformed", str(error)) from error
        if signature is None:
            raise RefusedError(403, "AccessDenied", "The request is not signed.")
        if signature.access_key_id != self.server.key.access_key_id:
            raise RefusedError(403, "InvalidAccessKeyId")
        due = sigv4.compute(
            self.server.key.secret_access_key,
            method=self.command,
            path=path,
            query=query,
            headers=headers,
            signature=signature,
        )
        if due != signature.value:
            raise RefusedError(403, "SignatureDoesNotMatch")
        fields = dict(parse_qsl(query)) if signature.presigned else {}
        stamp = fields.get("X-Amz-Date") or headers.get("x-amz-date", "")
        signed = moment(stamp)
        lasts = timedelta(seconds=int(fields.get("X-Amz-Expires", SKEW.total_seconds())))
        if not signed - SKEW <= datetime.now(UTC) <= signed + lasts:
            raise RefusedError(403, "AccessDenied", "Request has expired.")

    def _maybe_refuse(self, operation: str, key: str) -> None:
        fault = self.server.faults.choose(operation, key)
        if fault is not None:
            self._refuse(fault)

    def _refuse(self, fault: Fault) -> None:
        if fault.kind is FaultKind.DENY:
            raise RefusedError(403, "AccessDenied", "This is an injected fault.")
        raise RefusedError(500, "InternalError", "This is an injected fault.")

    def _get(self, asked: Asked) -> None:
        stored, file = self._opened(asked.key)
        try:
            self._check(stored)
            start, end, part = self._range(stored)
            fault = self.server.faults.choose(asked.operation, asked.key, start, end)
            if fault is not None and fault.kind not in BODY:
                self._refuse(fault)
            self.send_response(206 if part else 200)
            if part:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{stored.size}")
            self.send_header("Content-Length", str(end - start))
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", stored.etag)
            if stored.sha256 and self.headers.get("x-amz-checksum-mode") == "ENABLED":
                self.send_header("x-amz-checksum-sha256", stored.sha256)
            self.send_header("Last-Modified", http_date(int(stored.modified.timestamp())))
            self.end_headers()
            if asked.operation == "GetObject":
                self._send(_Body(self, asked.key, file, start, end), fault)
        finally:
            os.close(file)

    def _opened(self, key: str) -> tuple[Stored, int]:
        while (stored := self.server.objects.get(key)) is not None:
            with contextlib.suppress(FileNotFoundError):  # replaced just now
                return stored, opened(stored)
        raise RefusedError(404, "NoSuchKey")

    def _check(self, stored: Stored) -> None:
        wanted = self.headers.get("If-Match", "*")
        if wanted != "*" and stored.etag not in [one.strip() for one in wanted.split(",")]:
            raise RefusedError(412, "PreconditionFailed")

    def _range(self, stored: Stored) -> tuple[int, int, bool]:
        """Return the first byte that is asked for, the one after the last, and if it is a range."""
        match = RANGE.fullmatch(self.headers.get("Range", ""))
        if match is None or not any(match.groups()):  # none, or several: as S3, the whole
            return 0, stored.size, False
        first, last = match.groups()
        if not first:
            start, end = max(0, stored.size - int(last)), stored.size
        else:
            start, end = int(first), min(int(last or stored.size) + 1, stored.size)
        if start >= end:
            raise RefusedError(416, "InvalidRange")
        return start, end, True

    def _send(self, body: "_Body", fault: Fault | None) -> None:
        if fault is None:
            body.send(body.end)
            return
        try:
            body.send(fault.place(body.start, body.end))
            self._befall(fault, body)
        except BaseException:
            self.server.faults.give_back(fault)
            raise
        if not self.close_connection:
            body.send(body.end)

    def _befall(self, fault: Fault, body: "_Body") -> None:
        match fault.kind:
            case FaultKind.FLIP:
                body.send_flipped()
            case FaultKind.TRUNCATE:
                self.close_connection = True
            case _:
                self.server.release.wait(fault.seconds)

    def _list(self, query: Mapping[str, str]) -> None:
        most = min(int(query.get("max-keys", 1000)), 1000)
        after = query.get("continuation-token") or query.get("start-after", "")
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        page = self.server.objects.page(prefix, delimiter, after, most)
        encoded = query.get("encoding-type") == "url"
        rows = [
            ("Name", self.server.bucket),
            ("Prefix", quote(prefix) if encoded else prefix),
            ("KeyCount", str(len(page.objects) + len(page.prefixes))),
            ("MaxKeys", str(most)),
            ("IsTruncated", "true" if page.after else "false"),
        ]
        if encoded:
            rows.append(("EncodingType", "url"))
        if page.after:
            rows.append(("NextContinuationToken", page.after))
        text = "".join(_element(name, value) for name, value in rows)
        for key, stored in page.objects:
            text += "<Contents>" + "".join(
                _element(name, value)
                for name, value in (
                    ("Key", quote(key) if encoded else key),
                    ("LastModified", f"{stored.modified:%Y-%m-%dT%H:%M:%S.000Z}"),
                    ("ETag", stored.etag),
                    ("Size", str(stored.size)),
                    ("StorageClass", "STANDARD"),
                )
            )
            text += "</Contents>"
        for name in page.prefixes:
            shown = _element("Prefix", quote(name) if encoded else name)
            text += f"<CommonPrefixes>{shown}</CommonPrefixes>"
        whole = f'<ListBucketResult xmlns="{NAMESPACE}">{text}</ListBucketResult>'
        self._say(200, whole.encode(), "application/xml")

    def _put(self, key: str) -> None:
        claimed = self.headers.get("x-amz-content-sha256", "")
        if claimed.startswith("STREAMING"):
            raise RefusedError(501, "NotImplemented", "Bodies in signed chunks are not read.")
        body = self._body()
        if SHA256.fullmatch(claimed) and hashlib.sha256(body).hexdigest() != claimed:
            raise RefusedError(400, "XAmzContentSHA256Mismatch")
        kept = self.headers.get("x-amz-checksum-sha256", "")
        if kept and base64.b64encode(hashlib.sha256(body).digest()).decode() != kept:
            raise RefusedError(400, "BadDigest")
        absent = self.headers.get("If-None-Match") == "*"
        objects = self.server.objects
        stored = (objects.create if absent else objects.put)(key, [body], kept)
        if stored is None:
            raise RefusedError(412, "PreconditionFailed")
        self.send_response(200)
        self.send_header("ETag", stored.etag)
        self.send_header("Content-Length", "0")
        self.end_headers()

    # Control

    def _control(self) -> None:
        path, _, query = self.path.partition("?")
        server, body = self.server, self._body()
        match self.command, path:
            case "GET", "/_counts":
                fired, pending = dict(server.faults.fired), server.faults.pending()
                self._json({**server.counts.shown(), "fired": fired, "pending": pending})
            case "POST", "/_faults":
                asked = json.loads(body)
                server.faults.order(Fault(**{**asked, "kind": FaultKind(asked["kind"])}))
                self._json({})
            case "POST", "/_generate":
                self._head(server.objects.generate(**json.loads(body)))
            case "PUT", "/_object":
                self._head(server.objects.put(dict(parse_qsl(query))["key"], [body]))
            case "GET", "/_object":
                self._head(server.objects.get(dict(parse_qsl(query))["key"]))
            case "POST", "/_reset":
                server.counts.clear()
                server.faults.clear()
                server.release.set()
                server.release = threading.Event()
                self._json({})
            case _:
                raise RefusedError(404, "NoSuchControl")

    def _head(self, stored: Stored | None) -> None:
        if stored is None:
            raise RefusedError(404, "NoSuchKey")
        self._json({"size": stored.size, "etag": stored.etag})

    def _json(self, value: Any) -> None:
        self._say(200, json.dumps(value).encode(), "application/json")

    def _body(self) -> bytes:
        body = self.rfile.read(self._unread)
        if len(body) < self._unread:
            raise ConnectionAbortedError("The client closed while it was sending.")
        self._unread = 0
        return body

    def _say(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Body:
    """The bytes of an object from ``start`` to ``end``, on their way; counted as they go."""

    def __init__(self, handler: Handler, key: str, file: int, start: int, end: int) -> None:
        self.start, self.end = start, end
        self._at = start
        self._handler, self._key, self._file = handler, key, file

    def send(self, until: int) -> None:
        """Send what comes before ``until``."""
        out = self._handler.connection.fileno()
        while self._at < until:
            size, sent = min(A_SEND, until - self._at), 0
            self._add(size)  # before: no client has what is not counted
            try:
                sent = os.sendfile(out, self._file, self._at, size)
            finally:
                self._add(sent - size)
            if not sent:
                raise ConnectionAbortedError("The file is shorter than it was.")
            self._at += sent

    def send_flipped(self) -> None:
        """Send the next byte with its lowest bit turned."""
        byte = os.pread(self._file, 1, self._at)
        self._add(1)
        self._at += 1
        self._handler.connection.sendall(bytes([byte[0] ^ 1]))

    def _add(self, size: int) -> None:
        self._handler.server.counts.add(self._key, size)


def _element(name: str, value: str) -> str:
    return f"<{name}>{escape(value)}</{name}>"
