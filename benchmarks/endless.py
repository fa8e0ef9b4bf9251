"""A stand-in of a bucket with very many gradients: it lists them, and takes what is put."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast
from urllib.parse import parse_qs, urlsplit

from pydantic import SecretStr

from millrace.storage import Credentials, StoreSpec

_PAGE = 1000
_ENTRY = (
    "<Contents><Key>run/w0/gradient-{n:09d}-w0-v0.2.1.safetensors</Key>"
    "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    "<ETag>&quot;{n:032x}&quot;</ETag><Size>1000</Size></Contents>"
)


class Endless(ThreadingHTTPServer):
    """The server, on a free port of 127.0.0.1.

    Attributes:
        objects: Number of objects in the listing.
    """

    def __init__(self, objects: int) -> None:
        """Listen; `serve_forever` answers."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects = objects


class _Handler(BaseHTTPRequestHandler):
    """Stand-in for the S3 requests of a plan of cleaning: lists, HEAD, PUT, uploads, deletes."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if "/lease/" in query.get("prefix", [""])[0]:
            self._answer(b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
            return
        objects = cast("Endless", self.server).objects
        first = int(query.get("continuation-token", ["0"])[0])
        last = min(objects, first + _PAGE)
        entries = "".join(_ENTRY.format(n=n) for n in range(first, last))
        more = last < objects
        token = f"<NextContinuationToken>{last}</NextContinuationToken>" if more else ""
        self._answer(
            f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}"
            "</ListBucketResult>".encode()
        )

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.send_header("ETag", '"e"')
        self.send_header("Last-Modified", format_datetime(datetime.now(UTC), usegmt=True))
        self.end_headers()

    def do_PUT(self) -> None:
        left = int(self.headers.get("Content-Length", 0))
        while left:
            left -= len(self.rfile.read(min(left, 1 << 16)))
        self._answer(b"", etag=True)

    def do_DELETE(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        if self.path.endswith(("uploads", "uploads=")):
            name = "InitiateMultipartUploadResult"
            said = f"<{name}><UploadId>u</UploadId></{name}>"
        elif "uploadId=" in self.path:
            said = '<CompleteMultipartUploadResult><ETag>"e"</ETag></CompleteMultipartUploadResult>'
        else:
            keys = re.findall(r"<Key>(.*?)</Key>", body)
            gone = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            said = f"<DeleteResult>{gone}</DeleteResult>"
        self._answer(said.encode())

    def _answer(self, body: bytes, *, etag: bool = False) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        if etag:
            self.send_header("ETag", '"e"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@contextmanager
def endless(objects: int) -> Iterator[str]:
    """Run a stand-in for a bucket of so many gradients, and yield its endpoint."""
    server = Endless(objects)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def make_endless_spec(endpoint: str) -> StoreSpec:
    """Return the settings of the stand-in's bucket."""
    credentials = Credentials(access_key_id="a", secret_access_key=SecretStr("s"))
    return StoreSpec(url="s3://bucket", endpoint=endpoint, credentials=credentials)
