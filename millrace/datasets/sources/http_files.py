"""Files of a source behind HTTP. A change shows in a file's ETag, or else in its Last-Modified.

Every answer must have the ETag or the time of the plan, since many servers ignore ``If-Match``. A
server that ignores ``Range`` sends a file from its beginning. Then the bytes before the wanted ones
are read and dropped.
"""

import ipaddress
import random
import re
import socket
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, cast
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError
from urllib3.response import BaseHTTPResponse

from millrace import errors
from millrace.datasets.sources.files import Patterns, describe_difference, make_changed_error
from millrace.datasets.sources.table import FileTable
from millrace.retry_after import parse_retry_after
from millrace.schemas.dataset import FileRef
from millrace.storage import StoreSpec
from millrace.storage.answers import READ_BLOCK_SIZE
from millrace.storage.obstore_clients import CONNECT_TIMEOUT, READ_TIMEOUT

_CONCURRENCY = 8  # connections to one host
_MAX_REDIRECTS = 5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0
_LONGEST_ASKED_PAUSE = 60.0  # seconds of Retry-After that are waited for
TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses of answers after which a request is tried again."""
REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})
_COMPRESSIONS = {"br", "compress", "deflate", "gzip", "x-compress", "x-gzip", "zstd"}
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_TRANSLATED = [
    ipaddress.IPv6Network(one)
    for one in ("::/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48")
]
_RANGE = re.compile(r"bytes (?:(?P<start>\d+)-\d+|\*)/(?P<size>\d+)")
_HEADER = re.compile(r"(?!(?i:range|accept-encoding)$)[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\t -~]+")
_NOT_IN_URLS = re.compile(r"[ \x80-\xff]")  # bytes of a header are decoded as Latin-1
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "millrace"}


def is_web_url(url: str) -> bool:
    """Decide whether a URL is that of a web server."""
    return url.startswith(("http://", "https://"))


class HttpFiles:
    """Files of a web server, which cannot be listed.

    Args:
        spec: URL of the folder of the files, or of the only file. `options` are headers of the
            requests. Redirects to another host do not get them.
        paths: Paths of the files below the URL; None if the URL is that of the only file. Files
            that were described before are read without them.
        allow_private: Whether addresses of private networks and of this machine may be read.

    Attributes:
        unseekable: Paths of the described files of which the server sends no parts.

    Raises:
        ConfigurationError: The URL has credentials or a query in it, or an escaped slash in the
            name of the only file, or a header cannot be sent.
    """

    is_local = False

    def __init__(
        self, spec: StoreSpec, paths: Sequence[str] | None, *, allow_private: bool
    ) -> None:
        parts = urlsplit(spec.url)
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise errors.ConfigurationError(
                f"The URL of {parts.scheme}://{parts.hostname or ''} has credentials or a query in "
                "it: write secrets as headers into `options`, such as {Authorization: Bearer ...}."
            )
        url = spec.url.rstrip("/")
        if paths is None and parts.path.strip("/") and not parts.path.endswith("/"):
            url, _, name = url.rpartition("/")
            paths = [unquote(name)]
            if "/" in paths[0]:
                raise errors.ConfigurationError(
                    f"{spec.url} has an escaped slash in the name of the file, which is requested "
                    "as a plain one. Write `/` for `%2F` if the server takes it, or copy the file "
                    "to a bucket or a folder."
                )
        self._url, self._paths = url, tuple(paths or ())
        self._timeout = spec.retry_timeout.total_seconds()
        self._headers = {name: value.get_secret_value() for name, value in spec.options.items()}
        for name, value in self._headers.items():
            if not (_HEADER.fullmatch(name) and _HEADER_VALUE.fullmatch(value)):
                raise errors.ConfigurationError(
                    f"The header {name!r} in `options` cannot be sent: write it in ASCII, without "
                    "a line break at its end."
                )
        self.unseekable: set[str] = set()
        options: dict[str, Any] = {"ca_certs": str(spec.ca_file)} if spec.ca_file else {}
        self._pool = urllib3.PoolManager(
            8, maxsize=_CONCURRENCY, block=True, retries=False,
            timeout=urllib3.Timeout(
                connect=CONNECT_TIMEOUT.total_seconds(), read=READ_TIMEOUT.total_seconds()
            ),
            **options,
        )  # fmt: skip
        if not allow_private:
            self._pool.pool_classes_by_scheme = {"http": _PublicPool, "https": _PublicTlsPool}

    @property
    def url(self) -> str:
        """URL of the folder of the files."""
        return self._url

    def make_url(self, path: str) -> str:
        """Return the URL of a file."""
        return f"{self._url}/{quote(path)}"

    def collect(self, patterns: Patterns) -> FileTable:
        """Ask the server for the size and the ETag of each file that matches patterns.

        Raises:
            NotFoundError: The server does not have a file.
            ConfigurationError: No file is named, or the server does not tell a file's size, or has
                neither an ETag nor a time for it.
        """
        if not self._paths:
            raise errors.ConfigurationError(
                f"{self._url} cannot be listed: write the files below it into `paths`, or the URL "
                "of one file into `url`."
            )
        wanted = [path for path in dict.fromkeys(self._paths) if patterns.matches(path)]
        with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="http") as pool:
            return FileTable.collect(pool.map(self._describe, wanted))

    def find(self, path: str) -> FileRef | None:
        """Describe a file; None if there is none. One request.

        Raises:
            ConfigurationError: The server does not tell the size, or has no ETag and no time.
        """
        try:
            path, size, etag = self._describe(path)
        except errors.NotFoundError:
            return None
        return FileRef(path=path, size=size, etag=etag)

    def read(self, file: FileRef) -> bytes:
        """Return the content of a file.

        Raises:
            ChangedError: The file has changed or is gone.
        """
        return b"".join(self.iterate_blocks(file, 0, file.size))

    def iterate_blocks(
        self, file: FileRef, start: int, end: int, *, block: int = READ_BLOCK_SIZE
    ) -> Iterator[bytes]:
        """Yield the blocks of a file between two offsets. A cut answer is continued.

        Raises:
            ChangedError: The file has changed or is gone. No block with other content is returned.
            UnavailableError: The server does not answer.
        """
        clock = RetryClock(self._timeout)
        while start < end:
            try:
                with self._open(file.path, (start, end), clock) as answer:
                    self._check_unchanged(file, answer)
                    skipped = 0 if answer.status == 206 else start
                    before = start
                    for data in _iterate_body(answer, skipped, end - start, block):
                        start += len(data)
                        yield data
                        clock.restart()  # the time that the caller took does not count
                if start == before:
                    clock.wait(self._make_unavailable_error(file.path, "it sent no bytes"))
            except errors.NotFoundError:
                raise make_changed_error(self, file, describe_difference(file, None)) from None
            except (HTTPError, OSError) as error:  # within the body
                clock.wait(self._translate_error(file.path, error))

    def _describe(self, path: str) -> tuple[str, int, str]:
        """Return the path, the size and the ETag or time of a file, without reading it."""
        with self._open(path, (0, 1), RetryClock(self._timeout)) as answer:
            found = _Description.read(answer)
            if answer.status == 200:
                self.unseekable.add(path)
        if found.size is None or not found.etag:
            lacks = "does not tell its size"
            if found.size is not None:
                lacks = "has neither an ETag nor a Last-Modified for it, to show a change"
            raise errors.ConfigurationError(
                f"{self.make_url(path)}: the server {lacks}. Copy the file to a bucket or a folder."
            )
        return path, found.size, found.etag

    def _check_unchanged(self, file: FileRef, answer: BaseHTTPResponse) -> None:
        found = _Description.read(answer)
        if found.size is None:
            raise make_changed_error(self, file, "is sent without its size now")
        if found.size != file.size or (file.etag and found.etag != file.etag):
            raise make_changed_error(self, file, describe_difference(file, found.size))

    @contextmanager
    def _open(
        self, path: str, span: tuple[int, int], clock: "RetryClock"
    ) -> Generator[BaseHTTPResponse]:
        """Request a range of a file. Transient errors before the body are retried.

        Raises:
            NotFoundError, DeniedError, ConfigurationError: The server refuses the request.
            UnavailableError: The server does not answer in time.
        """
        while True:
            asked = 0.0
            try:
                answer = self._follow(self.make_url(path), f"bytes={span[0]}-{span[1] - 1}")
            except (HTTPError, OSError) as error:
                reason = self._translate_error(path, error)
            else:
                try:
                    if answer.status not in TRANSIENT_STATUSES:
                        _check_answer(answer, self.make_url(path), span)
                        yield answer
                        return
                finally:
                    release(answer)
                asked = parse_retry_after(answer.headers.get("Retry-After", ""))
                reason = self._make_unavailable_error(path, f"status {answer.status}")
            clock.wait(reason, min(asked, _LONGEST_ASKED_PAUSE))

    def _follow(self, url: str, span: str) -> BaseHTTPResponse:
        """Request a URL and follow redirects, without the headers of the source to other hosts."""
        first = urlsplit(url)
        for _ in range(_MAX_REDIRECTS + 1):
            now = urlsplit(url)
            is_same = (now.scheme, now.netloc) == (first.scheme, first.netloc)
            answer = self._pool.request(
                "GET", url, headers=_HEADERS | {"Range": span} | (self._headers if is_same else {}),
                preload_content=False, redirect=False, decode_content=False,
            )  # fmt: skip
            location = answer.headers.get("Location")
            if answer.status not in REDIRECT_STATUSES or not location:
                return answer
            release(answer)
            url = urljoin(url, encode_location(location))
            if not is_web_url(url) or (now.scheme == "https" and url.startswith("http://")):
                raise errors.ConfigurationError(
                    f"{self.make_url('')} redirects to {_drop_query(url)}, which is not read. "
                    "Write the URL of the file itself."
                )
        raise errors.ConfigurationError(f"{_drop_query(url)} is redirected too often.")

    def _translate_error(self, path: str, error: Exception) -> errors.MillraceError:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise errors.ConfigurationError(
                f"{self.make_url(path)}: the certificate of the server is not trusted. Write the "
                "file of its authority into `ca_file`."
            ) from error
        return self._make_unavailable_error(path, error)

    def _make_unavailable_error(self, path: str, error: object) -> errors.UnavailableError:
        text = str(error)
        return errors.UnavailableError(
            f"{self.make_url(path)}: the server does not answer ({text[:200]}). Run it again when "
            "it does; the run continues."
        )


class _Description(NamedTuple):
    """Size and ETag of a file, from the headers of an answer; an ETag may be a time."""

    size: int | None
    etag: str

    @classmethod
    def read(cls, answer: BaseHTTPResponse) -> "_Description":
        headers = answer.headers
        span = _RANGE.fullmatch(headers.get("Content-Range", ""))
        size = int(span["size"]) if span else _parse_size(headers.get("Content-Length"))
        etag = headers.get("ETag") or headers.get("Last-Modified") or ""
        if size == 0:  # an answer to a range of an empty file often has neither
            etag = etag or "empty"
        return cls(size, etag if etag.isprintable() else "")


class RetryClock:
    """Time for retries, from the last progress on.

    Args:
        timeout: Seconds without progress after which the error is raised.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.restart()

    def restart(self) -> None:
        """Note progress."""
        self._deadline, self._pause = time.monotonic() + self._timeout, _FIRST_PAUSE

    def wait(self, error: errors.MillraceError, asked: float = 0.0) -> None:
        """Wait before the next try, at least as long as the server asks.

        Raises:
            MillraceError: The time is over. This is the given error.
        """
        pause = max(asked, random.uniform(0, self._pause))
        if time.monotonic() + pause > self._deadline:
            raise error
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        time.sleep(pause)


def require_public(connection: Any, opened: socket.socket) -> socket.socket:
    """Refuse a connection to an address of a private network, before anything is sent.

    Raises:
        ConfigurationError: The address is not public.
    """
    try:
        check_public(connection.host, opened.getpeername()[0])
    except errors.ConfigurationError:
        opened.close()
        raise
    return opened


def check_public(host: str, address: str) -> None:
    """Check that an address of a host is not one of a private network or of this machine.

    Raises:
        ConfigurationError: The address is not public.
    """
    address = address.partition("%")[0]
    if not all(map(_is_public, _list_addresses(ipaddress.ip_address(address)))):
        raise errors.ConfigurationError(
            f"{host} is {address}, an address of a private network or of this machine. "
            "If it is meant, set `allow_private: true` in `source`."
        )


def _is_public(address: _Address) -> bool:
    is_site_local = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    return address.is_global and not is_site_local and not address.is_multicast


def _list_addresses(address: _Address) -> list[_Address]:
    """Return an address, and the IPv4 address that a network translates it to."""
    found: list[_Address] = [address]
    if isinstance(address, ipaddress.IPv6Address):
        embedded = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if any(address in network for network in _TRANSLATED):
            embedded.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        found += [one for one in embedded if one is not None]
    return found


class _PublicConnection(HTTPConnection):
    def _new_conn(self) -> socket.socket:
        return require_public(self, super()._new_conn())


class _PublicTlsConnection(HTTPSConnection):
    def _new_conn(self) -> socket.socket:
        return require_public(self, super()._new_conn())


class _PublicPool(urllib3.HTTPConnectionPool):
    ConnectionCls = cast("Any", _PublicConnection)


class _PublicTlsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = cast("Any", _PublicTlsConnection)


def _check_answer(answer: BaseHTTPResponse, url: str, span: tuple[int, int]) -> None:
    status = answer.status
    if is_compressed(answer):
        raise errors.ConfigurationError(
            f"{url}: the server compresses its answers although it is asked not to. Copy the file "
            "to a bucket or a folder."
        )
    if status == 206:
        found = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if found is None or found["start"] != str(span[0]):
            raise errors.ConfigurationError(
                f"{url}: the server sends another range than was requested. Copy the file to a "
                "bucket or a folder."
            )
    elif status in {401, 403}:
        raise errors.DeniedError(
            f"{url}: the server refuses the request ({status}). Write what it asks for as a header "
            "into `options`, such as {Authorization: Bearer ...}."
        )
    elif status in {404, 410}:
        raise errors.NotFoundError(f"There is no {url}. Correct `url` or `paths`.")
    elif status != 200 and not (status == 416 and span == (0, 1)):  # 416: an empty file
        raise errors.ConfigurationError(f"{url}: the server answers with status {status}.")


def _iterate_body(answer: BaseHTTPResponse, skipped: int, size: int, block: int) -> Iterator[bytes]:
    """Yield up to `size` bytes of a body, after the bytes that are skipped."""
    while skipped > 0 and (data := answer.read(min(block, skipped))):
        skipped -= len(data)
    while size > 0 and (data := answer.read(min(block, size))):
        size -= len(data)
        yield data


def _parse_size(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _drop_query(url: str) -> str:
    return urlunsplit(urlsplit(url)._replace(query="", fragment=""))


def is_compressed(answer: BaseHTTPResponse) -> bool:
    """Decide whether a server has compressed the body of an answer.

    Other codings change no byte. Stores send such as ``aws-chunked`` or ``utf-8`` after an upload
    with that header.
    """
    codings = answer.headers.get("Content-Encoding", "").lower().split(",")
    return any(one.strip() in _COMPRESSIONS for one in codings)


def encode_location(location: str) -> str:
    """Return the header `Location` of an answer as a URL in ASCII, as browsers do.

    Many servers send names in UTF-8 or with spaces. Each such byte is written as ``%XX``.
    """
    return _NOT_IN_URLS.sub(lambda found: f"%{ord(found[0]):02X}", location)


def release(answer: BaseHTTPResponse) -> None:
    """Close the connection, unless the body was read to its end."""
    answer.close()
    answer.release_conn()
