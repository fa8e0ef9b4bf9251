"""An S3 endpoint in this process, which keeps objects in memory and refuses what a test names."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from millrace.storage import Credentials, Store, open_store


@dataclass
class Refusal:
    """Answer to some requests instead of the operation.

    Attributes:
        method: HTTP method of the requests; empty for all requests.
        status: Status of the answer.
        code: Code in the body of the answer.
        message: Message in the body of the answer.
        times: Number of requests that are still to be refused.
        body: Body of the answer; by default an error with the code and the message.
        key: End of the keys of the requests; empty for all of them.
    """

    method: str
    status: int
    code: str
    message: str = ""
    times: int = 1
    body: bytes = b""
    key: str = ""

    def takes(self, request: "Request") -> bool:
        """Decide whether this is the answer to a request."""
        is_of_key = urlsplit(request.path).path.endswith(self.key)
        return bool(self.times) and self.method in {"", request.method} and is_of_key


@dataclass(frozen=True)
class Request:
    """Request that the endpoint has received."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class S3Endpoint:
    """S3 endpoint with one bucket, made by `serve_s3`.

    Attributes:
        url: URL of the endpoint.
        objects: Bodies of the objects, by their keys.
        requests: Received requests.
        refusals: Answers to the next requests.
        lost: Number of PUTs that are still to be done without an answer.
        has_create: Whether the endpoint heeds ``If-None-Match``.
        etag: ETag of every object; empty for none. The endpoint ignores ``If-Match``.
        modified: ``Last-Modified`` of every object.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.objects = dict[str, bytes]()
        self.requests = list[Request]()
        self.refusals = list[Refusal]()
        self.lost = 0
        self.has_create = True
        self.etag = '"1"'
        self.modified = "Mon, 01 Jan 2024 00:00:00 GMT"

    def open(self, *, path: str = "", retry_timeout: timedelta = timedelta(minutes=1)) -> Store:
        """Return a store at this endpoint, with a path after its host."""
        return open_store(
            "s3://bucket",
            endpoint=self.url + path,
            credentials=Credentials(access_key_id="id", secret_access_key="secret"),
            region="us-east-1",
            retry_timeout=retry_timeout,
        )

    def list_headers(self, request: Request) -> dict[str, str]:
        """Return further headers of the answer to a request."""
        return {"ETag": self.etag} if self.etag else {}

    def answer(self, request: Request) -> tuple[int, bytes] | None:
        """Return the status and the body of an answer; None if it is lost."""
        self.requests.append(request)
        if request.method == "PUT" and self.lost:
            self.lost -= 1
            self._do(request)
            return None
        for refusal in self.refusals:
            if refusal.takes(request):
                refusal.times -= 1
                body = refusal.body or _make_error(refusal.code, refusal.message)
                return refusal.status, body
        return self._do(request)

    def _do(self, request: Request) -> tuple[int, bytes]:
        parts = urlsplit(request.path)
        key = unquote(parts.path).partition("/bucket")[2].removeprefix("/")
        match request.method:
            case "PUT":
                is_create = "if-none-match" in request.headers and self.has_create
                if is_create and key in self.objects:
                    return 412, _make_error("PreconditionFailed")
                self.objects[key] = request.body
                return 200, b""
            case "POST" | "DELETE":
                keys = re.findall("<Key>(.*?)</Key>", request.body.decode()) or [key]
                for deleted in keys:
                    self.objects.pop(deleted, None)
                answers = (f"<Deleted><Key>{deleted}</Key></Deleted>" for deleted in keys)
                return 200, f"<DeleteResult>{''.join(answers)}</DeleteResult>".encode()
            case _ if "list-type=2" in parts.query:
                return 200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
            case _:
                found = self.objects.get(key)
                return (404, _make_error("NoSuchKey")) if found is None else (200, found)


EndpointT = TypeVar("EndpointT", bound=S3Endpoint)


def _make_error(code: str, message: str = "") -> bytes:
    return f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


@contextmanager
def serve_s3(kind: type[EndpointT] = S3Endpoint) -> Iterator[EndpointT]:
    """Serve an S3 endpoint of a class until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline(65537)
            if not self.raw_requestline or not self.parse_request():
                self.close_connection = True
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Request(self.command, self.path, headers, body)
            answer = endpoint.answer(request)
            if answer is None:
                self.close_connection = True
                return
            status, body = answer
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("range", ""))
            shown = ""
            if asked and status == 200:
                first, size = int(asked[1]), len(body)
                status, body = 206, body[first : int(asked[2]) + 1]
                shown = f"bytes {first}-{first + len(body) - 1}/{size}"
            self.send_response(status)
            if shown:
                self.send_header("Content-Range", shown)
            self.send_header("Content-Length", str(len(body)))
            for name, value in endpoint.list_headers(request).items():
                self.send_header(name, value)
            self.send_header("Last-Modified", endpoint.modified)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    endpoint = kind(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
