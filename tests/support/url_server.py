"""A web server on this machine whose answers are functions."""

import ssl
import threading
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[["UrlHandler"], None]


class UrlHandler(BaseHTTPRequestHandler):
    """Handler of a request. An answer is a function that gets the handler."""

    protocol_version = "HTTP/1.1"
    site: "UrlSite"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.close_connection = True
        site = self.site
        with site.lock:
            site.requests[self.path] += 1
            site.active += 1
            site.most_active = max(site.most_active, site.active)
        try:
            site.answer(self)
        except OSError:
            pass  # the client has closed the connection
        finally:
            with site.lock:
                site.active -= 1

    def send(
        self, body: bytes = b"", status: int = 200, *, length: int | None = None, **headers: str
    ) -> None:
        """Send an answer. Headers have underscores instead of hyphens.

        Args:
            body: Body of the answer.
            status: Status of the answer.
            length: Length that the server declares; by default that of the body.
            headers: Other headers.
        """
        self.send_response(status)
        declared = len(body) if length is None else length
        for name, value in {"Content-Length": str(declared), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)


class UrlSite:
    """A server, and what it was asked.

    Args:
        answer: Function that answers each request.

    Attributes:
        requests: Number of requests by path.
        active: Number of present requests.
        most_active: Largest number of requests at a time.
        url: URL of the server.
        is_closing: Set at the end, so that answers that wait can end.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.lock = threading.Lock()
        self.requests: Counter[str] = Counter()
        self.active = self.most_active = 0
        self.url = ""
        self.is_closing = threading.Event()


class _Server(ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """Say nothing of a client that has closed its connection."""


@contextmanager
def serve_urls(answer: Answer, context: ssl.SSLContext | None = None) -> Generator[UrlSite]:
    """Serve answers on all addresses of this machine until the end of the context.

    Args:
        answer: Function that answers each request.
        context: Certificate of the server; None for a server without TLS.
    """
    site = UrlSite(answer)
    handler = type("SiteHandler", (UrlHandler,), {"site": site})
    with _Server(("0.0.0.0", 0), handler) as server:
        if context:
            server.socket = context.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        site.url = f"http{'s' * bool(context)}://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield site
        finally:
            site.is_closing.set()
            server.shutdown()
            thread.join()
