"""Heads of HTTP messages: read strictly, and with limits on their size.

`http.client` and `http.server` parse headers with the package `email`, which takes longer than the
rest of a request for a small piece. That parser also repairs malformed headers, and another reader
may repair them differently. Here a malformed head is an error.

The functions take heads without the empty line at the end. Agents import this module, so it needs
only the standard library.
"""

import http.client
import re
from collections.abc import Iterable
from dataclasses import dataclass
from io import BufferedIOBase
from typing import NoReturn

Headers = dict[str, str]
"""Headers of a message, with names in lower case."""

_EXCERPT = 60  # characters of a malformed line in an error
_MAX_DIGITS = 15  # of a ``Content-Length``
_REQUEST = re.compile(r"([A-Z]+) (/[!-~]*) (HTTP/[0-9]\.[0-9])")
_STATUS = re.compile(r"HTTP/1\.1 ([1-5][0-9]{2})(?: [\t -~\x80-\xff]*)?")
_NAME = r"([!#$%&'*+.^_`|~0-9A-Za-z-]+)"


class HeadError(http.client.HTTPException):
    """The head of a message is malformed, or larger than its limits.

    Attributes:
        status: HTTP status with which a server refuses such a request.
    """

    def __init__(self, reason: str, status: int = http.client.BAD_REQUEST) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class HeadLimits:
    """Limits of a head, and the form of its headers.

    Attributes:
        max_size: Bytes of the head at most.
        max_line: Bytes of a line at most.
        max_headers: Headers at most.
        header: Form of a header: its name, and its value.
        repeats: Whether a header may be repeated. The values are joined by commas.
    """

    max_size: int
    max_line: int
    max_headers: int
    header: re.Pattern[str]
    repeats: bool


NODE_LIMITS = HeadLimits(
    max_size=16 * 1024,
    max_line=4 * 1024,
    max_headers=32,
    header=re.compile(_NAME + r":[\t ]*([\t -~]*)"),
    repeats=False,
)
"""Rules of messages between driver and nodes: ASCII only, and each header once."""

STORE_LIMITS = HeadLimits(
    max_size=256 * 1024,
    max_line=64 * 1024,
    max_headers=100,
    header=re.compile(_NAME + r":[\t ]*([\t -~\x80-\xff]*)"),
    repeats=True,
)
"""Rules of the answers of stores, which may have headers with the metadata of an object."""


@dataclass(frozen=True, slots=True)
class RequestHead:
    """Head of a request.

    Attributes:
        method: HTTP method.
        path: Path with its query.
        headers: Headers.
    """

    method: str
    path: str
    headers: Headers


def parse_response(head: bytes, limits: HeadLimits) -> tuple[int, Headers]:
    """Return the status and the headers of an answer.

    Raises:
        http.client.BadStatusLine: The answer does not begin with a status line of HTTP/1.1.
        HeadError: A header is malformed, or the head is larger than its limits.
    """
    first, *rest = head.decode("latin-1").split("\r\n")
    found = _STATUS.fullmatch(first)
    if found is None:
        raise http.client.BadStatusLine(first[:_EXCERPT])
    return int(found[1]), _parse_headers(rest, limits)


def parse_request(head: bytes, limits: HeadLimits = NODE_LIMITS) -> RequestHead:
    """Return the parts of the head of a request.

    Raises:
        HeadError: The head is malformed, or larger than its limits.
    """
    first, *rest = head.decode("latin-1").split("\r\n")
    found = _REQUEST.fullmatch(first)
    if found is None:
        _refuse_line("request line", first)
    method, path, version = found.groups()
    if version != "HTTP/1.1":
        raise HeadError(
            f"a request of {version}: this server takes HTTP/1.1",
            http.client.HTTP_VERSION_NOT_SUPPORTED,
        )
    headers = _parse_headers(rest, limits)
    if "expect" in headers:
        raise HeadError(
            "the header Expect is not supported: send the body without waiting",
            http.client.EXPECTATION_FAILED,
        )
    return RequestHead(method, path, headers)


def read_request(file: BufferedIOBase, limits: HeadLimits = NODE_LIMITS) -> RequestHead | None:
    """Read the head of a request; return None if the connection ends before it.

    Raises:
        HeadError: The head is malformed, is larger than its limits, or is cut off.
        OSError: The connection broke, or timed out.
    """
    lines: list[bytes] = []
    size = 0
    while (line := file.readline(limits.max_line + 2)) != b"\r\n" or not lines:
        if not line and not lines:
            return None
        size += len(line)
        if not line.endswith(b"\r\n"):
            if len(line) == limits.max_line + 2:
                _refuse_size(f"a line has more than {limits.max_line} bytes")
            if not line.endswith(b"\n"):
                raise HeadError("the head of the request is cut off")
            _refuse_line("line end", line.decode("latin-1"))
        if size > limits.max_size or len(lines) > limits.max_headers:
            _refuse_size(f"more than {limits.max_size} bytes, or {limits.max_headers} headers")
        lines.append(line)
    return parse_request(b"".join(lines)[:-2], limits)


def get_length(headers: Headers) -> int | None:
    """Return the number of bytes of a body; None without ``Content-Length``.

    Raises:
        HeadError: The number is none, or is contradicted by a ``Transfer-Encoding``.
    """
    if "transfer-encoding" in headers:
        raise HeadError(
            f"the body has the transfer encoding {headers['transfer-encoding'][:_EXCERPT]!r}: send "
            "it unchanged, with a Content-Length",
            http.client.NOT_IMPLEMENTED,
        )
    length = headers.get("content-length")
    if length is None:
        return None
    if not (length.isascii() and length.isdecimal()) or len(length) > _MAX_DIGITS:
        raise HeadError(f"the Content-Length is {length[:_EXCERPT]!r}, which is not a size")
    return int(length)


def keeps_alive(headers: Headers) -> bool:
    """Tell whether the connection stays open after a message of HTTP/1.1."""
    connection = headers.get("connection")
    return connection is None or "close" not in re.split(r"[\t ,]+", connection.lower())


def _parse_headers(lines: Iterable[str], limits: HeadLimits) -> Headers:
    headers: Headers = {}
    for count, line in enumerate(lines, 1):
        if len(line) > limits.max_line:
            _refuse_size(f"a header has more than {limits.max_line} bytes")
        if count > limits.max_headers:
            _refuse_size(f"more than {limits.max_headers} headers")
        found = limits.header.fullmatch(line)
        if found is None:
            _refuse_line("header", line)
        name, value = found[1].lower(), found[2].rstrip("\t ")
        if name in headers:
            if not limits.repeats:
                raise HeadError(f"the header {name[:_EXCERPT]} is repeated")
            value = f"{headers[name]}, {value}"
        headers[name] = value
    return headers


def _refuse_line(kind: str, line: str) -> NoReturn:
    raise HeadError(f"a {kind} is malformed: {line[:_EXCERPT]!r}")


def _refuse_size(reason: str) -> NoReturn:
    raise HeadError(f"the head is too large: {reason}", http.client.REQUEST_HEADER_FIELDS_TOO_LARGE)
