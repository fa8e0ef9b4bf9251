"""The HTTP server of the rig's store. `benchmarks.rig.store` runs it, and describes its API."""

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

from benchmarks.rig.store_faults import BODY_FAULTS, FaultKind, RigFault, RigFaults
from benchmarks.rig.store_objects import Objects, StoredObject, open_object
from millrace.testing import sigv4
from millrace.testing.key import Key

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
SEND_BYTES = 1 << 20  # per call of sendfile, so that the counts are updated often
SEND_TIMEOUT = 120  # seconds without progress
SKEW = timedelta(minutes=15)
SHA256 = re.compile(r"[0-9a-f]{64}")
RANGE = re.compile(r"bytes=(\d*)-(\d*)")


@lru_cache(maxsize=64)
def parse_timestamp(stamp: str) -> datetime:
    """Parse the time of a signature."""
    return datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)


@lru_cache(maxsize=64)
def format_http_date(seconds: int) -> str:
    """Format a time for an HTTP header."""
    return formatdate(seconds, usegmt=True)


class RefusedError(Exception):
    """A request was refused.

    Attributes:
        status: HTTP status of the response.
        code: Code of S3's error response.
    """

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(message or code)
        self.status, self.code = status, code


@dataclass(slots=True)
class Counters:
    """Counters of requests and of sent bytes, for many threads.

    Attributes:
        requests: Number of requests by operation.
        gets: Number of GetObject requests by key.
        sent: Number of sent bytes of bodies by key.
        lock: Lock of the counters.
    """

    requests: Counter[str] = field(default_factory=Counter)
    gets: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add_request(self, operation: str, key: str) -> None:
        """Count a request."""
        with self.lock:
            self.requests[operation] += 1
            self.gets[key] += operation == "GetObject"

    def add_bytes(self, key: str, size: int) -> None:
        """Count bytes of an object's body."""
        with self.lock:
            self.sent[key] += size

    def clear(self) -> None:
        """Set all counters to zero."""
        with self.lock:
            for counter in (self.requests, self.gets, self.sent):
                counter.clear()

    def make_json(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
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
    """HTTP server of one bucket.

    Args:
        address: Address to listen on.
        folder: Folder of the objects.
        bucket: Name of the bucket.
        key: Access key of the signatures.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, address: str, folder: Path, bucket: str, key: Key) -> None:
        super().__init__((address, 0), Handler)
        self.bucket, self.key = bucket, key
        self.objects = Objects(folder)
        self.counters, self.faults = Counters(), RigFaults()
        self.release = threading.Event()  # ends the stalls at a reset

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of closed connections, and report all others."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError | BlockingIOError):
            super().handle_error(request, client_address)


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """Parsed S3 request.

    Attributes:
        operation: S3 operation, or ``Unknown``.
        key: Key of the object, or an empty string.
        query: Parameters of the query.
    """

    operation: str
    key: str
    query: Mapping[str, str]


class Handler(BaseHTTPRequestHandler):
    """Handler of one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def setup(self) -> None:
        super().setup()
        limit = struct.pack("ll", SEND_TIMEOUT, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def do_GET(self) -> None:
        self._respond(self._handle_control if self.path.startswith("/_") else self._handle_s3)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def date_time_string(self, timestamp: float | None = None) -> str:
        """Return the text for the Date header, which is cached for one second."""
        return format_http_date(int(time.time() if timestamp is None else timestamp))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing."""

    def _respond(self, handle: Callable[[], None]) -> None:
        """Handle a request, and send the response of an error."""
        self._unread = int(self.headers.get("Content-Length", 0))
        try:
            handle()
        except RefusedError as refused:
            # The unread body would be parsed as the next request.
            self.close_connection |= bool(self._unread)
            text = f"<Error><Code>{refused.code}</Code><Message>{escape(str(refused))}</Message>"
            self._send_response(refused.status, f"{text}</Error>".encode(), "application/xml")

    # S3 requests

    def _handle_s3(self) -> None:
        """Handle an S3 request."""
        path, _, query = self.path.partition("?")
        request = self._parse_request(path, dict(parse_qsl(query, keep_blank_values=True)))
        self.server.counters.add_request(request.operation, request.key)
        self._check_signature(path, query)
        match request.operation:
            case "GetObject" | "HeadObject":
                self._send_object(request)
            case "ListObjectsV2":
                self._apply_fault(request.operation, request.query.get("prefix", ""))
                self._send_listing(request.query)
            case "PutObject":
                self._apply_fault(request.operation, request.key)
                self._store_object(request.key)
            case "DeleteObject":
                self.server.objects.delete(request.key)
                self._send_response(204, b"", "application/xml")
            case "DeleteObjects":
                raise RefusedError(405, "MethodNotAllowed", "Delete one object at a time.")
            case _:
                raise RefusedError(501, "NotImplemented")

    def _parse_request(self, path: str, query: Mapping[str, str]) -> ParsedRequest:
        """Parse the operation, the key and the query of an S3 request."""
        bucket, _, key = unquote(path.removeprefix("/")).partition("/")
        if bucket != self.server.bucket:
            raise RefusedError(404, "NoSuchBucket")
        if not key:
            listed = self.command == "GET" and query.get("list-type") == "2"
            several = self.command == "POST" and "delete" in query
            operation = "DeleteObjects" if several else "ListObjectsV2" if listed else "Unknown"
            return ParsedRequest(operation, "", query)
        operations = {
            "GET": "GetObject",
            "HEAD": "HeadObject",
            "PUT": "PutObject",
            "DELETE": "DeleteObject",
        }
        plain = not {"uploads", "uploadId", "partNumber", "acl", "tagging"} & query.keys()
        operation = operations.get(self.command, "Unknown") if plain else "Unknown"
        return ParsedRequest(operation, key, query)

    def _check_signature(self, path: str, query: str) -> None:
        """Check the signature and its time."""
        headers = cast("Mapping[str, str]", self.headers)
        try:
            signature = sigv4.find_signature(headers, query)
        except sigv4.MalformedError as error:
            raise RefusedError(400, "AuthorizationHeaderMalformed", str(error)) from error
        if signature is None:
            raise RefusedError(403, "AccessDenied", "The request is not signed.")
        if signature.access_key_id != self.server.key.access_key_id:
            raise RefusedError(403, "InvalidAccessKeyId")
        expected = sigv4.compute(
            self.server.key.secret_access_key,
            method=self.command,
            path=path,
            query=query,
            headers=headers,
            signature=signature,
        )
        if expected != signature.value:
            raise RefusedError(403, "SignatureDoesNotMatch")
        fields = dict(parse_qsl(query)) if signature.presigned else {}
        stamp = fields.get("X-Amz-Date") or headers.get("x-amz-date", "")
        signed = parse_timestamp(stamp)
        lifetime = timedelta(seconds=int(fields.get("X-Amz-Expires", SKEW.total_seconds())))
        if not signed - SKEW <= datetime.now(UTC) <= signed + lifetime:
            raise RefusedError(403, "AccessDenied", "Request has expired.")

    def _apply_fault(self, operation: str, key: str) -> None:
        """Refuse or delay a request without a body in its response, if a fault was chosen."""
        fault = self.server.faults.choose(operation, key)
        if fault is not None:
            self._raise_fault(fault)

    def _raise_fault(self, fault: RigFault) -> None:
        """Raise the error of a fault, or wait for a delay."""
        if fault.kind is FaultKind.DELAY:
            self.server.release.wait(fault.seconds)
            return
        if fault.kind is FaultKind.DENY:
            raise RefusedError(403, "AccessDenied", "This is an injected fault.")
        raise RefusedError(500, "InternalError", "This is an injected fault.")

    def _send_object(self, request: ParsedRequest) -> None:
        """Respond to GetObject or HeadObject."""
        stored, file = self._open_object(request.key)
        try:
            self._check_etag(stored)
            start, end, part = self._parse_range(stored)
            fault = self.server.faults.choose(request.operation, request.key, start, end)
            if fault is not None and fault.kind not in BODY_FAULTS:
                self._raise_fault(fault)
                fault = None
            self.send_response(206 if part else 200)
            if part:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{stored.size}")
            self.send_header("Content-Length", str(end - start))
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", stored.etag)
            if stored.sha256 and self.headers.get("x-amz-checksum-mode") == "ENABLED":
                self.send_header("x-amz-checksum-sha256", stored.sha256)
            self.send_header("Last-Modified", format_http_date(int(stored.modified.timestamp())))
            self.end_headers()
            if request.operation == "GetObject":
                self._send_body(_BodySender(self, request.key, file, start, end), fault)
        finally:
            os.close(file)

    def _open_object(self, key: str) -> tuple[StoredObject, int]:
        """Return the current version of an object, and the descriptor of its open file."""
        while (stored := self.server.objects.get(key)) is not None:
            with contextlib.suppress(FileNotFoundError):  # replaced by another request
                return stored, open_object(stored)
        raise RefusedError(404, "NoSuchKey")

    def _check_etag(self, stored: StoredObject) -> None:
        """Check the header If-Match."""
        wanted = self.headers.get("If-Match", "*")
        if wanted != "*" and stored.etag not in [one.strip() for one in wanted.split(",")]:
            raise RefusedError(412, "PreconditionFailed")

    def _parse_range(self, stored: StoredObject) -> tuple[int, int, bool]:
        """Return the first byte, the end, and whether the request has a range."""
        match = RANGE.fullmatch(self.headers.get("Range", ""))
        if match is None or not any(match.groups()):  # none or several: S3 returns all
            return 0, stored.size, False
        first, last = match.groups()
        if not first:
            start, end = max(0, stored.size - int(last)), stored.size
        else:
            start, end = int(first), min(int(last or stored.size) + 1, stored.size)
        if start >= end:
            raise RefusedError(416, "InvalidRange")
        return start, end, True

    def _send_body(self, body: "_BodySender", fault: RigFault | None) -> None:
        """Send a body, with a fault if there is one."""
        if fault is None:
            body.send(body.end)
            return
        try:
            body.send(fault.compute_offset(body.start, body.end))
            self._inject_fault(fault, body)
        except BaseException:
            self.server.faults.restore(fault)
            raise
        if not self.close_connection:
            body.send(body.end)

    def _inject_fault(self, fault: RigFault, body: "_BodySender") -> None:
        """Inject the fault at the current position of a body."""
        match fault.kind:
            case FaultKind.FLIP:
                body.send_flipped()
            case FaultKind.TRUNCATE:
                self.close_connection = True
            case _:
                self.server.release.wait(fault.seconds)

    def _send_listing(self, query: Mapping[str, str]) -> None:
        """Respond to ListObjectsV2."""
        limit = min(int(query.get("max-keys", 1000)), 1000)
        after = query.get("continuation-token") or query.get("start-after", "")
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        page = self.server.objects.list_page(prefix, delimiter, after, limit)
        encoded = query.get("encoding-type") == "url"
        rows = [
            ("Name", self.server.bucket),
            ("Prefix", quote(prefix) if encoded else prefix),
            ("KeyCount", str(len(page.objects) + len(page.prefixes))),
            ("MaxKeys", str(limit)),
            ("IsTruncated", "true" if page.after else "false"),
        ]
        if encoded:
            rows.append(("EncodingType", "url"))
        if page.after:
            rows.append(("NextContinuationToken", page.after))
        text = "".join(_format_element(name, value) for name, value in rows)
        for key, stored in page.objects:
            text += "<Contents>" + "".join(
                _format_element(name, value)
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
            shown = _format_element("Prefix", quote(name) if encoded else name)
            text += f"<CommonPrefixes>{shown}</CommonPrefixes>"
        document = f'<ListBucketResult xmlns="{NAMESPACE}">{text}</ListBucketResult>'
        self._send_response(200, document.encode(), "application/xml")

    def _store_object(self, key: str) -> None:
        """Respond to PutObject."""
        claimed = self.headers.get("x-amz-content-sha256", "")
        if claimed.startswith("STREAMING"):
            raise RefusedError(501, "NotImplemented", "Bodies in signed chunks are not read.")
        body = self._read_body()
        if SHA256.fullmatch(claimed) and hashlib.sha256(body).hexdigest() != claimed:
            raise RefusedError(400, "XAmzContentSHA256Mismatch")
        checksum = self.headers.get("x-amz-checksum-sha256", "")
        if checksum and base64.b64encode(hashlib.sha256(body).digest()).decode() != checksum:
            raise RefusedError(400, "BadDigest")
        absent = self.headers.get("If-None-Match") == "*"
        objects = self.server.objects
        stored = (objects.create if absent else objects.put)(key, [body], checksum)
        if stored is None:
            raise RefusedError(412, "PreconditionFailed")
        self.send_response(200)
        self.send_header("ETag", stored.etag)
        self.send_header("Content-Length", "0")
        self.end_headers()

    # Control requests

    def _handle_control(self) -> None:
        """Handle a control request of `benchmarks.rig.store`."""
        path, _, query = self.path.partition("?")
        server, body = self.server, self._read_body()
        match self.command, path:
            case "GET", "/_counts":
                fired, pending = dict(server.faults.fired), server.faults.count_pending()
                self._send_json({**server.counters.make_json(), "fired": fired, "pending": pending})
            case "POST", "/_faults":
                fault = json.loads(body)
                server.faults.add(RigFault(**{**fault, "kind": FaultKind(fault["kind"])}))
                self._send_json({})
            case "POST", "/_generate":
                self._send_head(server.objects.generate(**json.loads(body)))
            case "PUT", "/_object":
                self._send_head(server.objects.put(dict(parse_qsl(query))["key"], [body]))
            case "GET", "/_object":
                self._send_head(server.objects.get(dict(parse_qsl(query))["key"]))
            case "POST", "/_reset":
                server.counters.clear()
                server.faults.clear()
                server.release.set()
                server.release = threading.Event()
                self._send_json({})
            case _:
                raise RefusedError(404, "NoSuchControl")

    def _send_head(self, stored: StoredObject | None) -> None:
        """Send the size and the ETag of an object as JSON."""
        if stored is None:
            raise RefusedError(404, "NoSuchKey")
        self._send_json({"size": stored.size, "etag": stored.etag})

    def _send_json(self, value: Any) -> None:
        self._send_response(200, json.dumps(value).encode(), "application/json")

    def _read_body(self) -> bytes:
        """Read the whole body of the request."""
        body = self.rfile.read(self._unread)
        if len(body) < self._unread:
            raise ConnectionAbortedError("The client closed while it was sending.")
        self._unread = 0
        return body

    def _send_response(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _BodySender:
    """Sender of the bytes of an object from ``start`` to ``end``, which counts them.

    Attributes:
        start: Offset of the first byte.
        end: Offset after the last byte.
    """

    def __init__(self, handler: Handler, key: str, file: int, start: int, end: int) -> None:
        self.start, self.end = start, end
        self._at = start
        self._handler, self._key, self._file = handler, key, file

    def send(self, until: int) -> None:
        """Send the bytes before the offset ``until``."""
        out = self._handler.connection.fileno()
        while self._at < until:
            size, sent = min(SEND_BYTES, until - self._at), 0
            self._count(size)  # before sendfile, so that no client has bytes that are not counted
            try:
                sent = os.sendfile(out, self._file, self._at, size)
            finally:
                self._count(sent - size)
            if not sent:
                raise ConnectionAbortedError("The file is shorter than it was.")
            self._at += sent

    def send_flipped(self) -> None:
        """Send the next byte with its lowest bit inverted."""
        byte = os.pread(self._file, 1, self._at)
        self._count(1)
        self._at += 1
        self._handler.connection.sendall(bytes([byte[0] ^ 1]))

    def _count(self, size: int) -> None:
        self._handler.server.counters.add_bytes(self._key, size)


def _format_element(name: str, value: str) -> str:
    return f"<{name}>{escape(value)}</{name}>"
