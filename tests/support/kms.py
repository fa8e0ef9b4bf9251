"""A bucket whose ETags are no MD5s, as those of S3 with SSE-KMS, with uploads in parts."""

import hashlib
import itertools
import re
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.support.s3 import Request, S3Endpoint


@dataclass
class Upload:
    """Upload in parts.

    Attributes:
        key: Key of the object.
        metadata: Headers with the metadata of the object.
        parts: Bodies of the parts, by their numbers.
    """

    key: str
    metadata: dict[str, str]
    parts: dict[int, bytes] = field(default_factory=dict[int, bytes])


class KmsEndpoint(S3Endpoint):
    """Endpoint with one bucket, made by ``serve_s3(KmsEndpoint)``.

    Attributes:
        metadata: Headers with the metadata of each object.
        parts: Sizes of the parts of each object that was uploaded in parts.
        uploads: Unfinished uploads by their identifiers.
        damaged: Number of uploads in parts that are still to be damaged when they are completed.
        tells: Whether answers name the encryption.
        salt: Text that the ETags depend on, besides the bytes.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.metadata = dict[str, dict[str, str]]()
        self.parts = dict[str, list[int]]()
        self.uploads = dict[str, Upload]()
        self.damaged = 0
        self.tells = True
        self.salt = url
        self._numbers = itertools.count(1)

    def list_headers(self, request: Request) -> dict[str, str]:
        """Return the headers of the answer to a request."""
        key, query = _parse_path(request.path)
        encryption = {"x-amz-server-side-encryption": "aws:kms"} if self.tells else {}
        if "partNumber" in query and request.method == "PUT":
            etag = self._make_etag(query["partNumber"], self._read_source(request))
            return {"ETag": f'"{etag}"'}
        if key not in self.objects or query.keys() - {"partNumber", "x-id"}:
            return {}
        return {"ETag": f'"{self.make_etag(key)}"', **encryption, **self.metadata.get(key, {})}

    def make_etag(self, key: str) -> str:
        """Return the ETag of an object, without quotes."""
        suffix = f"-{len(self.parts[key])}" if key in self.parts else ""
        return self._make_etag(key, self.objects[key]) + suffix

    def _make_etag(self, name: str, body: bytes) -> str:
        return hashlib.sha256(f"{self.salt} {name}".encode() + body).hexdigest()[:32]

    def _do(self, request: Request) -> tuple[int, bytes]:
        key, query = _parse_path(request.path)
        if not key and request.method == "GET":
            return 200, self._list_uploads() if "uploads" in query else self._list(query)
        if "uploads" in query or "uploadId" in query:
            return self._do_upload(request, key, query)
        if request.method == "GET" and "range" in request.headers:
            return super()._do(request)
        if request.method == "HEAD" and "partNumber" in query and key in self.parts:
            return 206, bytes(self.parts[key][0])
        if request.method == "PUT":
            self.metadata[key] = _select_metadata(request)
        return super()._do(request)

    def _do_upload(self, request: Request, key: str, query: dict[str, str]) -> tuple[int, bytes]:
        if "uploads" in query:
            name = f"upload-{next(self._numbers)}"
            self.uploads[name] = Upload(key, _select_metadata(request))
            return 200, _make_xml("InitiateMultipartUploadResult", UploadId=name)
        name = query["uploadId"]
        if name not in self.uploads:
            return 404, b"<Error><Code>NoSuchUpload</Code></Error>"
        upload = self.uploads[name]
        match request.method:
            case "PUT":
                body = self._read_source(request)
                upload.parts[int(query["partNumber"])] = body
                etag = self._make_etag(query["partNumber"], body)
                return 200, _make_xml("CopyPartResult", ETag=etag)
            case "GET":
                parts = (
                    f"<Part><PartNumber>{number}</PartNumber><Size>{len(body)}</Size>"
                    f"<ETag>{self._make_etag(str(number), body)}</ETag></Part>"
                    for number, body in sorted(upload.parts.items())
                )
                return 200, f"<ListPartsResult>{''.join(parts)}</ListPartsResult>".encode()
            case "DELETE":
                del self.uploads[name]
                return 204, b""
            case _:
                del self.uploads[name]
                self._complete(upload)
                return 200, _make_xml("CompleteMultipartUploadResult", ETag=self.make_etag(key))

    def _complete(self, upload: Upload) -> None:
        bodies = [upload.parts[number] for number in sorted(upload.parts)]
        body = b"".join(bodies)
        if self.damaged:
            self.damaged -= 1
            body = bytes([body[0] ^ 1]) + body[1:]
        self.objects[upload.key] = body
        self.parts[upload.key] = [len(one) for one in bodies]
        self.metadata[upload.key] = upload.metadata

    def _read_source(self, request: Request) -> bytes:
        """Return the body of a request, or the bytes that the bucket is to copy."""
        named = request.headers.get("x-amz-copy-source")
        if named is None:
            return request.body
        source = self.objects[unquote(named).partition("bucket/")[2]]
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers["x-amz-copy-source-range"])
        assert asked
        return source[int(asked[1]) : int(asked[2]) + 1]

    def _list(self, query: dict[str, str]) -> bytes:
        found = (
            f"<Contents><Key>{escape(key)}</Key><Size>{len(body)}</Size>"
            f"<ETag>&quot;{self.make_etag(key)}&quot;</ETag>"
            "<LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, body in sorted(self.objects.items())
            if key.startswith(query.get("prefix", ""))
        )
        return (
            f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(found)}</ListBucketResult>"
        ).encode()

    def _list_uploads(self) -> bytes:
        found = (
            f"<Upload><Key>{escape(one.key)}</Key><UploadId>{name}</UploadId>"
            "<Initiated>2024-01-01T00:00:00.000Z</Initiated></Upload>"
            for name, one in self.uploads.items()
        )
        return f"<ListMultipartUploadsResult>{''.join(found)}</ListMultipartUploadsResult>".encode()


def _parse_path(path: str) -> tuple[str, dict[str, str]]:
    parts = urlsplit(path)
    query = {name: one[0] for name, one in parse_qs(parts.query, keep_blank_values=True).items()}
    return unquote(parts.path).partition("/bucket")[2].removeprefix("/"), query


def _select_metadata(request: Request) -> dict[str, str]:
    return {name: one for name, one in request.headers.items() if name.startswith("x-amz-meta-")}


def _make_xml(name: str, **texts: str) -> bytes:
    inside = "".join(f"<{tag}>{text}</{tag}>" for tag, text in texts.items())
    return f"<{name}>{inside}</{name}>".encode()
