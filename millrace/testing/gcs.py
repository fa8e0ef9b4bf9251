"""Stand-in of Google Cloud Storage: the part of its XML API that obstore's ``GCSStore`` uses.

The server is a separate process on 127.0.0.1. It stores objects in memory, and requires no
authentication until a service account is created. It implements objects (whole, by range, with
conditions on the ETag and the generation, decompressed if their ``Content-Encoding`` is gzip),
listings, multipart uploads and copies. Permissions can be denied, and tested by the JSON API.

Sources: "XML API", "Transcoding of gzip-compressed files" and "Buckets: testIamPermissions" of the
Cloud Storage documentation, and the ``gcp`` module of the crate ``object_store``.

``python -m millrace.testing.gcs --bucket NAME`` runs a server.
"""

import argparse
import asyncio
import base64
import contextlib
import gzip
import hashlib
import itertools
import json
import re
import time
import xml.etree.ElementTree as ET
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any, Self, TypedDict
from urllib.parse import unquote
from urllib.request import ProxyHandler, Request, build_opener
from xml.sax.saxutils import escape

from aiohttp import web

from millrace.testing.google_tokens import GoogleAuthority, UnauthorizedError, make_key
from millrace.testing.process import Child, start_module

__all__ = ["GCSRequestRecord", "GCSServer"]

MIN_PART = 5 << 20
PAGE = 1000
REMEMBERED_REQUESTS = 100_000
CONTROL = "/-/requests"
DENIED = "/-/denied"
AUTHORITY = "/-/authority"
GRANTS = frozenset({"/token", "/v1/token"})
TEST_PERMISSIONS = re.compile(r"/storage/v1/b/([^/]+)/iam/testPermissions")
STORED_HEADERS = frozenset(
    {
        "cache-control", "content-disposition", "content-encoding", "content-language",
        "content-type",
    }
)  # fmt: skip

_local = build_opener(ProxyHandler({}))


class GCSRequestRecord(TypedDict):
    """Request that the server received."""

    method: str
    path: str
    """Encoded path of the request line, with the query."""
    arrived: float
    """Time of arrival by ``time.monotonic()``, a clock that all processes of a machine share."""
    status: int
    received: int
    """Bytes of the body received from the client."""
    sent: int
    """Bytes of the body sent to the client."""


class GCSServer:
    """Running server, started by `GCSServer.start`. As a context manager, it stops at the exit.

    Attributes:
        endpoint: URL of the server, ``http://127.0.0.1:PORT``.
    """

    def __init__(self, child: Child, port: int) -> None:
        """Represent a server that is already running. Use `start` to start one."""
        self.endpoint = f"http://127.0.0.1:{port}"
        self._child = child

    @classmethod
    def start(cls, folder: Path, *, buckets: Iterable[str] = ("bucket",), page: int = PAGE) -> Self:
        """Start a server, and return when it accepts requests, after about half a second.

        Args:
            folder: Folder of the log. It is created if missing.
            buckets: Names of buckets to create.
            page: Largest number of keys on a page of a listing.
        """
        folder.mkdir(parents=True, exist_ok=True)
        named = [word for name in buckets for word in ("--bucket", name)]
        child = start_module(
            "millrace.testing.gcs", *named, "--page", str(page), log=folder / "gcs.log"
        )
        return cls(child, child.read_announcement()["port"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def log(self) -> Path:
        """Return the path of the log, which has the errors of the process."""
        return self._child.log

    def make_store_config(self) -> dict[str, Any]:
        """Return options for ``GCSStore(bucket, **gcs.make_store_config())`` with this server.

        ``gcs_base_url`` in the key of a service account is the URL of this server. With
        ``disable_oauth``, obstore requests no token from Google. ``allow_http`` permits plain HTTP.
        The shorter ``base_url`` with ``skip_signature`` is not enough: obstore 0.12.1 then requests
        a token from the metadata server of Google Cloud for each write.
        """
        key = {
            "gcs_base_url": self.endpoint,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        return {
            "config": {"service_account_key": json.dumps(key)},
            "client_options": {"allow_http": True},
        }

    def create_bucket(self, name: str) -> str:
        """Create a bucket unless it exists, and return its name."""
        with contextlib.closing(_local.open(Request(f"{self.endpoint}/{name}", method="PUT"))):
            return name

    def deny(self, *permissions: str) -> None:
        """Deny permissions from now on, instead of those denied before."""
        body = json.dumps(permissions).encode()
        request = Request(self.endpoint + DENIED, data=body, method="PUT")
        with contextlib.closing(_local.open(request)):
            pass

    def create_service_account(self, name: str = "one@project.example") -> str:
        """Create a service account, and return its key as JSON. All requests now need a token."""
        key, public_key = make_key(name, self.endpoint)
        self.configure_tokens(account=name, public_key=public_key)
        return json.dumps(key)

    def configure_tokens(self, **settings: Any) -> None:
        """Set the ``lifetime`` of new tokens in seconds, or revoke all tokens (``revoke=True``)."""
        body = json.dumps(settings).encode()
        request = Request(self.endpoint + AUTHORITY, data=body, method="PUT")
        with contextlib.closing(_local.open(request)):
            pass

    def list_requests(self) -> list[GCSRequestRecord]:
        """Return the last 100,000 requests, in the order of arrival."""
        with contextlib.closing(_local.open(self.endpoint + CONTROL)) as answer:
            return json.load(answer)

    def stop(self) -> None:
        """Stop the server. Its objects are lost."""
        self._child.stop()

    def kill(self) -> None:
        """Kill the server with SIGKILL. Its objects are lost."""
        self._child.kill()


@dataclass(slots=True)
class _Seen:
    method: str
    path: str
    arrived: float
    status: int = 0
    received: int = 0
    sent: int = 0


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    etag: str
    generation: int
    modified: float
    headers: dict[str, str]


@dataclass(slots=True)
class _Upload:
    key: str
    headers: dict[str, str]
    parts: dict[int, tuple[str, bytes]] = field(default_factory=dict[int, tuple[str, bytes]])


@dataclass(slots=True)
class _Bucket:
    objects: dict[str, _Object] = field(default_factory=dict[str, _Object])
    uploads: dict[str, _Upload] = field(default_factory=dict[str, _Upload])


class _Error(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code


class _GCSApplication:
    def __init__(self, buckets: Iterable[str], page: int) -> None:
        self.buckets = {name: _Bucket() for name in buckets}
        self.page = page
        self.denied: set[str] = set()
        self.authority = GoogleAuthority()
        self.seen: deque[_Seen] = deque(maxlen=REMEMBERED_REQUESTS)
        self.generations = itertools.count(int(time.time() * 1e6))

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.raw_path == CONTROL:
            return web.json_response([asdict(seen) for seen in self.seen])
        seen = _Seen(request.method, request.raw_path, time.monotonic())
        self.seen.append(seen)
        try:
            body = await request.content.read()
        except (web.RequestPayloadError, ConnectionError):  # the client disconnected
            return web.Response(status=400)
        if request.raw_path == DENIED:
            self.denied = set(json.loads(body))
            return web.Response()
        if request.raw_path == AUTHORITY:
            self.authority.configure(json.loads(body))
            return web.Response()
        if request.raw_path in GRANTS:
            return self.authority.grant(request.raw_path, body)
        seen.received = len(body)
        try:
            answer = self._answer(request, body)
        except _Error as error:
            answer = _make_xml_response(
                f"<Error><Code>{error.code}</Code><Message>{error.code}</Message></Error>",
                status=error.status,
            )
        seen.status = answer.status
        if request.method != "HEAD" and isinstance(answer.body, bytes):
            seen.sent = len(answer.body)
        return answer

    def _answer(self, request: web.BaseRequest, body: bytes) -> web.Response:
        path = request.raw_path.partition("?")[0]
        if asked := TEST_PERMISSIONS.fullmatch(path):
            return self._test_permissions(unquote(asked[1]), request)
        name, _, key = unquote(path).removeprefix("/").partition("/")
        if request.method == "PUT" and name and not key:
            self.buckets.setdefault(name, _Bucket())
            return web.Response()
        bucket = self.buckets.get(name)
        if bucket is None:
            raise _Error(404, "NoSuchBucket")
        query = request.query
        self._check_allowed(request, name, bucket, key)
        match request.method:
            case "GET" if not key:
                answer = self._list(bucket, dict(query))
            case "POST" if "uploads" in query:
                answer = self._begin_upload(bucket, name, key, request)
            case "PUT" | "POST" | "DELETE" if "uploadId" in query:
                answer = self._upload(bucket, key, request, body)
            case "PUT" if "x-goog-copy-source" in request.headers:
                answer = self._copy(bucket, key, request)
            case "PUT":
                _check_generation(bucket.objects.get(key), request)
                answer = _describe_stored(self._store(bucket, key, body, _select_headers(request)))
            case "GET" | "HEAD":
                answer = _read(_get_existing(bucket, key), request)
            case "DELETE":
                _check_generation(_get_existing(bucket, key), request)
                del bucket.objects[key]
                answer = web.Response(status=204)
            case _:
                raise _Error(405, "MethodNotAllowed")
        return answer

    def _test_permissions(self, name: str, request: web.BaseRequest) -> web.Response:
        if name not in self.buckets:
            raise _Error(404, "NoSuchBucket")
        allowed = set(request.query.getall("permissions", [])) - self.denied
        return web.json_response({"permissions": sorted(allowed)} if allowed else {})

    def _check_allowed(
        self, request: web.BaseRequest, name: str, bucket: _Bucket, key: str
    ) -> None:
        needed = _list_needed_permissions(request, bucket, key)
        if self.denied & needed:
            raise _Error(403, "AccessDenied")
        if not self.authority.is_asked:
            return
        try:
            rules = self.authority.find_rules(request)
        except UnauthorizedError:
            raise _Error(401, "AuthenticationRequired") from None
        prefix = request.query.get("prefix", "")
        for permission in needed if rules is not None else ():
            if not any(rule.allows(permission, name, key, prefix) for rule in rules or ()):
                raise _Error(403, "AccessDenied")

    def _store(
        self, bucket: _Bucket, key: str, data: bytes, headers: dict[str, str], etag: str = ""
    ) -> _Object:
        etag = etag or f'"{hashlib.md5(data).hexdigest()}"'
        stored = _Object(data, etag, next(self.generations), time.time(), headers)
        bucket.objects[key] = stored
        return stored

    def _copy(self, bucket: _Bucket, key: str, request: web.BaseRequest) -> web.Response:
        where = unquote(request.headers["x-goog-copy-source"]).removeprefix("/")
        source_name, _, source_key = where.partition("/")
        if source_name not in self.buckets:
            raise _Error(404, "NoSuchBucket")
        source = _get_existing(self.buckets[source_name], source_key)
        _check_generation(source, request, "x-goog-copy-source-if-generation-match")
        wanted = request.headers.get("x-goog-copy-source-if-match")
        unwanted = request.headers.get("x-goog-copy-source-if-none-match")
        if not _matches_etag(wanted, source, default=True) or _matches_etag(unwanted, source):
            raise _Error(412, "PreconditionFailed")
        _check_generation(bucket.objects.get(key), request)
        copied = self._store(bucket, key, source.data, source.headers, source.etag)
        answer = _make_xml_response(
            f"<CopyObjectResult><LastModified>{_format_time(copied.modified)}</LastModified>"
            f"<ETag>{escape(copied.etag)}</ETag></CopyObjectResult>"
        )
        answer.headers["x-goog-generation"] = str(copied.generation)
        return answer

    def _begin_upload(
        self, bucket: _Bucket, name: str, key: str, request: web.BaseRequest
    ) -> web.Response:
        upload = f"upload-{next(self.generations)}"
        bucket.uploads[upload] = _Upload(key, _select_headers(request))
        return _make_xml_response(
            f"<InitiateMultipartUploadResult><Bucket>{escape(name)}</Bucket>"
            f"<Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
            "</InitiateMultipartUploadResult>"
        )

    def _upload(
        self, bucket: _Bucket, key: str, request: web.BaseRequest, body: bytes
    ) -> web.Response:
        upload = bucket.uploads.get(request.query["uploadId"])
        if upload is None or upload.key != key:
            raise _Error(404, "NoSuchUpload")
        if request.method == "PUT":
            etag = f'"{hashlib.md5(body).hexdigest()}"'
            upload.parts[int(request.query["partNumber"])] = (etag, body)
            return web.Response(headers={"ETag": etag})
        if request.method == "DELETE":
            del bucket.uploads[request.query["uploadId"]]
            return web.Response(status=204)
        _check_generation(bucket.objects.get(key), request)
        parts = _select_parts(upload, body)
        etag = hashlib.md5(b"".join(hashlib.md5(part).digest() for part in parts)).hexdigest()
        stored = self._store(bucket, key, b"".join(parts), upload.headers, f'"{etag}-{len(parts)}"')
        del bucket.uploads[request.query["uploadId"]]
        answer = _make_xml_response(
            f"<CompleteMultipartUploadResult><Key>{escape(key)}</Key>"
            f"<ETag>{escape(stored.etag)}</ETag></CompleteMultipartUploadResult>"
        )
        answer.headers["x-goog-generation"] = str(stored.generation)
        return answer

    def _list(self, bucket: _Bucket, query: dict[str, str]) -> web.Response:
        if query.get("list-type") != "2":
            raise _Error(501, "NotImplemented")
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        limit = min(int(query.get("max-keys", self.page)), self.page)
        token = query.get("continuation-token")
        after = base64.urlsafe_b64decode(token).decode() if token else query.get("start-after", "")
        entries: dict[str, str] = {}
        for key in sorted(name for name in bucket.objects if name.startswith(prefix)):
            entry = _make_entry_name(key, prefix, delimiter)
            if entry > after and entry not in entries:
                if len(entries) == limit:
                    break
                entries[entry] = _format_entry(entry, None if entry != key else bucket.objects[key])
        else:
            return _make_xml_response(_format_listing("".join(entries.values()), None))
        last = base64.urlsafe_b64encode(next(reversed(entries)).encode()).decode()
        return _make_xml_response(_format_listing("".join(entries.values()), last))


def _list_needed_permissions(request: web.BaseRequest, bucket: _Bucket, key: str) -> set[str]:
    """Return the permissions that a request needs.

    Source: "IAM permissions for XML requests".
    """
    objects, multipart = "storage.objects", "storage.multipartUploads"
    match request.method:
        case "GET" | "HEAD":
            return {f"{objects}.get" if key else f"{objects}.list"}
        case "DELETE":
            by_upload = "uploadId" in request.query
            return {f"{multipart}.abort" if by_upload else f"{objects}.delete"}
        case _:
            needed = {f"{objects}.create"}
            if key in bucket.objects:
                needed.add(f"{objects}.delete")
            if {"uploads", "uploadId"} & request.query.keys():
                needed.add(f"{multipart}.create")
            return needed


def _get_existing(bucket: _Bucket, key: str) -> _Object:
    stored = bucket.objects.get(key)
    if stored is None:
        raise _Error(404, "NoSuchKey")
    return stored


def _select_headers(request: web.BaseRequest) -> dict[str, str]:
    """Return the headers that are stored with an object."""
    return {
        name: value
        for name, value in request.headers.items()
        if name.lower() in STORED_HEADERS or name.lower().startswith("x-goog-meta-")
    }


def _check_generation(
    stored: _Object | None, request: web.BaseRequest, header: str = "x-goog-if-generation-match"
) -> None:
    wanted = request.headers.get(header)
    if wanted is not None and int(wanted) != (stored.generation if stored else 0):
        raise _Error(412, "PreconditionFailed")


def _matches_etag(wanted: str | None, stored: _Object, *, default: bool = False) -> bool:
    if wanted is None:
        return default
    return wanted == "*" or stored.etag in [tag.strip() for tag in wanted.split(",")]


def _describe_stored(stored: _Object) -> web.Response:
    return web.Response(headers={"ETag": stored.etag, "x-goog-generation": str(stored.generation)})


def _read(stored: _Object, request: web.BaseRequest) -> web.Response:
    headers = {
        **stored.headers,
        "ETag": stored.etag,
        "Last-Modified": formatdate(stored.modified, usegmt=True),
        "x-goog-generation": str(stored.generation),
        "Accept-Ranges": "bytes",
    }
    wanted = request.query.get("generation")
    if wanted is not None and int(wanted) != stored.generation:
        raise _Error(404, "NoSuchKey")
    if not _matches_etag(request.headers.get("If-Match"), stored, default=True):
        raise _Error(412, "PreconditionFailed")
    _check_generation(stored, request)
    if _matches_etag(request.headers.get("If-None-Match"), stored):
        return web.Response(status=304, headers=headers)
    if _is_transcoded(stored, request):
        return _transcode(stored, headers)
    size = len(stored.data)
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("Range", ""))
    if asked is None or request.method == "HEAD":
        headers["Content-Length"] = str(size)  # aiohttp omits it for an empty body
        return web.Response(headers=headers, body=stored.data)
    first, last = asked.groups()
    start = int(first) if first else max(size - int(last), 0)
    end = min(int(last) + 1, size) if first and last else size
    if start >= end:
        raise _Error(416, "InvalidRange")
    headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    return web.Response(status=206, headers=headers, body=stored.data[start:end])


def _is_transcoded(stored: _Object, request: web.BaseRequest) -> bool:
    """Decide whether Google decompresses an object for a request. It then ignores the range."""
    about = {name.lower(): value.lower() for name, value in stored.headers.items()}
    return (
        about.get("content-encoding") == "gzip"
        and "no-transform" not in about.get("cache-control", "")
        and "gzip" not in request.headers.get("Accept-Encoding", "")
    )


def _transcode(stored: _Object, headers: dict[str, str]) -> web.Response:
    """Return an answer with the decompressed object, without its length."""
    shown = {name: value for name, value in headers.items() if name.lower() != "content-encoding"}
    shown |= {
        "x-goog-stored-content-encoding": "gzip",
        "x-goog-stored-content-length": str(len(stored.data)),
    }
    answer = web.Response(headers=shown, body=gzip.decompress(stored.data))
    answer.enable_chunked_encoding()
    return answer


def _select_parts(upload: _Upload, completion: bytes) -> list[bytes]:
    """Return the parts in the completion of an upload, in order."""
    parts: list[bytes] = []
    previous = 0
    for part in ET.fromstring(completion).iter():
        if part.tag.rpartition("}")[2] != "Part":
            continue
        texts = {one.tag.rpartition("}")[2]: one.text or "" for one in part}
        number = int(texts["PartNumber"])
        etag, data = upload.parts.get(number, ("", b""))
        if number <= previous:
            raise _Error(400, "InvalidPartOrder")
        if not etag or etag.strip('"') != texts["ETag"].strip('"'):
            raise _Error(400, "InvalidPart")
        previous = number
        parts.append(data)
    if not parts:
        raise _Error(400, "MalformedXML")
    if any(len(data) < MIN_PART for data in parts[:-1]):
        raise _Error(400, "EntityTooSmall")
    return parts


def _make_entry_name(key: str, prefix: str, delimiter: str) -> str:
    """Return the entry of a key in a listing: the key itself or its common prefix."""
    head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
    return prefix + head + found if found else key


def _format_entry(name: str, stored: _Object | None) -> str:
    if stored is None:
        return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
    return (
        f"<Contents><Key>{escape(name)}</Key><Generation>{stored.generation}</Generation>"
        f"<LastModified>{_format_time(stored.modified)}</LastModified><ETag>{escape(stored.etag)}</ETag>"
        f"<Size>{len(stored.data)}</Size></Contents>"
    )


def _format_listing(entries: str, token: str | None) -> str:
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    truncated = "true" if token else "false"
    return (
        '<ListBucketResult xmlns="http://doc.s3.amazonaws.com/2006-03-01">'
        f"<IsTruncated>{truncated}</IsTruncated>{more}{entries}</ListBucketResult>"
    )


def _format_time(at: float) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(at))}.{int(at * 1000) % 1000:03d}Z"


def _make_xml_response(body: str, *, status: int = 200) -> web.Response:
    text = f"<?xml version='1.0' encoding='UTF-8'?>{body}"
    return web.Response(status=status, text=text, content_type="application/xml")


def main() -> None:
    """Run a server until the process ends. A line of JSON on stdout has its port."""
    parser = argparse.ArgumentParser(
        prog="python -m millrace.testing.gcs", description=main.__doc__
    )
    parser.add_argument("--bucket", action="append", default=[], help="bucket to create")
    parser.add_argument(
        "--page", type=int, default=PAGE, help="largest number of keys on a page of a listing"
    )
    parser.add_argument("--port", type=int, default=0, help="0 means any free port")
    options = parser.parse_args()

    async def run() -> None:
        server = web.Server(
            _GCSApplication(options.bucket, options.page).handle,
            access_log=None,
            auto_decompress=False,
        )
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(server, "127.0.0.1", options.port, backlog=512)
        print(json.dumps({"port": listening.sockets[0].getsockname()[1]}), flush=True)
        await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


if __name__ == "__main__":
    main()
