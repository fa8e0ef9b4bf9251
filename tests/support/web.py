"""A web server on this machine that behaves as it is told."""

import re
import ssl
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from millrace.testing.faults import Fault, FaultBox


@dataclass
class Site:
    """Files of a server, its behaviour, and the requests that it got.

    Attributes:
        files: Bytes by path, as in a URL.
        has_ranges: Whether it sends parts of files.
        headers: Headers of every answer to a GET.
        etags: ETag by path, instead of that of `headers`.
        token: Header Authorization that it demands.
        statuses: Statuses of the next answers, each with headers.
        cut_after: Bytes after which the next answers are cut off.
        dies_after: Bytes after which an answer is cut off, and the server refuses all others.
        piece: Bytes of a body that it sends at once, with a pause after each; None sends all.
        redirects: URL by path.
        box: Faults at random, and how often they fired.
        requests: Path and header Range of each request.
        authorizations: Header Authorization of each request.
        url: URL of the server while it serves.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    has_ranges: bool = True
    headers: dict[str, str] = field(default_factory=lambda: {"ETag": '"1"'})
    etags: dict[str, str] = field(default_factory=dict)
    token: str = ""
    statuses: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    cut_after: list[int] = field(default_factory=list)
    dies_after: int | None = None
    piece: int | None = None
    redirects: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    box: FaultBox = field(default_factory=FaultBox)
    url: str = ""


_STATUSES = {Fault.ERROR500: 500, Fault.ERROR503: 503, Fault.ERROR429: 429}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Site
    is_cut = False

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        site = self.site
        site.requests.append((self.path, self.headers.get("Range")))
        site.authorizations.append(self.headers.get("Authorization"))
        if site.dies_after is not None and site.dies_after <= 0:
            self.answer(503, {}, b"")
            return
        if self.inject_fault():
            return
        if site.statuses:
            status, headers = site.statuses.pop(0)
            self.answer(status, headers, b"")
        elif self.path in site.redirects:
            self.answer(302, {"Location": site.redirects[self.path]}, b"")
        elif site.token and self.headers.get("Authorization") != site.token:
            self.answer(401, {}, b"")
        elif self.path not in site.files:
            self.answer(404, {}, b"")
        else:
            self.send_file(site.files[self.path])

    def inject_fault(self) -> bool:
        """Fail if the site has a fault for this request. False if the request is to be answered."""
        box = self.site.box
        plan = box.choose("GET", "", self.path, set(Fault) - {Fault.DAMAGE})
        self.is_cut = plan is not None and plan.kind is Fault.CUT
        if plan is None:
            return False
        box.fire(plan)
        if status := _STATUSES.get(plan.kind):
            self.answer(status, {}, b"")
        elif plan.kind is not Fault.CUT:
            if plan.kind is Fault.STALL:
                time.sleep(plan.stall_seconds)
            self.close_connection = True
        return not self.is_cut

    def send_file(self, body: bytes) -> None:
        site = self.site
        headers = dict(site.headers)
        if etag := site.etags.get(self.path):
            headers["ETag"] = etag
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not (span and site.has_ranges):
            self.answer(200, headers, body)
        elif int(span[1]) >= len(body):
            self.answer(416, {**headers, "Content-Range": f"bytes */{len(body)}"}, b"")
        else:
            start, end = int(span[1]), min(int(span[2]) + 1, len(body))
            shown = {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(body)}"}
            self.answer(206, shown, body[start:end])

    def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.is_cut:
            body = body[: len(body) // 2]
            self.close_connection = True
        elif len(body) > 1 and self.site.cut_after:
            body = body[: self.site.cut_after.pop(0)]
            self.close_connection = True
        if self.site.dies_after is not None:
            body = body[: max(0, self.site.dies_after)]
            self.site.dies_after -= len(body)
            self.close_connection |= self.site.dies_after <= 0
        piece = self.site.piece or len(body) or 1
        try:
            for at in range(0, len(body), piece):
                self.wfile.write(body[at : at + piece])
                if self.site.piece:
                    time.sleep(0.001)
        except ConnectionError:
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Say nothing of a client that has closed its connection."""


@contextmanager
def serve(site: Site, context: ssl.SSLContext | None = None) -> Generator[Site]:
    """Serve a site until the end of the context."""
    handler = type("SiteHandler", (_Handler,), {"site": site})
    with _Server(("127.0.0.1", 0), handler) as server:
        if context:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        site.url = f"http{'s' * bool(context)}://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()
