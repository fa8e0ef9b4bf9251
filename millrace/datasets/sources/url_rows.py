"""Samples from the URLs of a list. The body of each answer becomes the field of one sample.

The list is read as any other source, so cursors and ranges are those of its kind. Another download
of a URL may give other bytes: the source is not reproducible.
"""

import re
import resource
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit, urlunsplit

import orjson

from millrace import errors
from millrace.datasets.formats.base import is_json
from millrace.datasets.sample import BadRow, Row, Sample
from millrace.datasets.sources.base import Source
from millrace.datasets.sources.csv_rows import CsvSource
from millrace.datasets.sources.files import SourceFiles
from millrace.datasets.sources.host_limits import HostLimits
from millrace.datasets.sources.jsonl import JsonLinesSource
from millrace.datasets.sources.ranges import FileRange, iterate_unreadable
from millrace.datasets.sources.settings import (
    MAX_BODY_BYTES,
    DownloadSettings,
    SourceSettings,
    UrlSettings,
)
from millrace.datasets.sources.table import FileTable, escape_path, unpack_row
from millrace.datasets.sources.text_files import TextFiles, TextRange, divide_files
from millrace.datasets.sources.url_download import Body, Contact, Failure, UrlDownloader
from millrace.keys.datasets import DatasetKeys
from millrace.schemas.dataset import RowRange, SourceRange
from millrace.storage import Store

_ROW_BYTES = 128  # assumed bytes of a row of a list, to divide the list
_WINDOW = 8  # rows that are read ahead, for each concurrent request
_FILES_PER_REQUEST = 4  # a socket, its copy, and two locks of its host
_OTHER_FILES = 128  # of the program, the list and the uploads
_SHOWN = 200  # characters of a URL in messages
_MAX_BAD_BYTES = 64 << 10  # bytes of a value of a bad row that are kept
_ANY_HOST = "*"  # name under which it is noted that some host has answered
_URL = ""  # field of the URL in a row of the list, which is no field of a sample
_EXTENSION = re.compile(r".*\.([A-Za-z0-9]{1,8})")
_EXTENSIONS = {
    "application/gzip": "gz", "application/json": "json", "application/pdf": "pdf",
    "application/xml": "xml", "application/zip": "zip", "audio/aac": "aac", "audio/flac": "flac",
    "audio/mp4": "m4a", "audio/mpeg": "mp3", "audio/ogg": "ogg", "audio/wav": "wav",
    "audio/webm": "weba", "audio/x-wav": "wav", "image/avif": "avif", "image/bmp": "bmp",
    "image/gif": "gif", "image/jpeg": "jpg", "image/jpg": "jpg", "image/png": "png",
    "image/svg+xml": "svg", "image/tiff": "tif", "image/webp": "webp", "text/csv": "csv",
    "text/html": "html", "text/plain": "txt", "text/xml": "xml", "video/mp4": "mp4",
    "video/mpeg": "mpg", "video/quicktime": "mov", "video/webm": "webm",
}  # fmt: skip


def divide_url_lists(
    files: SourceFiles,
    table: FileTable,
    keys: DatasetKeys,
    settings: SourceSettings,
    partition_urls: int,
) -> list[FileRange]:
    """Divide lists of URLs into ranges of about equal size.

    Args:
        files: Files of the lists.
        table: Table of these files.
        keys: Names of the dataset.
        settings: Settings of the source.
        partition_urls: Approximate number of URLs in a range.

    Raises:
        ConfigurationError: A list has no column of URLs, or cannot be read.
    """
    size = partition_urls * _ROW_BYTES
    columns = _select_columns(settings.columns, settings.urls, whole=False)
    paths: dict[str, str] = {}
    for row in table.rows:
        path = unpack_row(row).path
        paths.setdefault(_find_kind(path), path)
    if len(paths) > 1:
        raise errors.ConfigurationError(
            f"{files.url} has lists of several kinds, such as {' and '.join(paths.values())}. "
            "Choose those of one kind by `include`."
        )
    match next(iter(paths)):
        case "parquet":
            # pyarrow is imported only for what needs it.
            from millrace.datasets.sources.parquet import divide_row_groups  # noqa: PLC0415

            with _name_url_field(settings.urls):
                taken = [columns] if settings.columns else [columns, None]
                return divide_row_groups(files, table, size, *taken)
        case "csv":
            ranges = divide_files(files, table, size, keys, whole=True)
            with _name_url_field(settings.urls):
                CsvSource(files, None, columns, None, None).check_headers(ranges)
            return ranges
        case "text" if settings.columns:
            raise errors.ConfigurationError(
                f"{files.make_url(next(iter(paths.values())))} is a list of plain text, which has "
                "no columns. Remove `columns`, or name the list .csv, .jsonl or .parquet."
            )
        case _:
            return divide_files(files, table, size, keys)


def _check_open_files(requests: int) -> None:
    """Check that a process may open the sockets and locks of requests at a time.

    Without this check, a good URL could fail for want of a file, and would be quarantined.

    Raises:
        ConfigurationError: The limit is too low.
    """
    wanted = _FILES_PER_REQUEST * requests + _OTHER_FILES
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        raise errors.ConfigurationError(
            f"{requests} requests at a time need {wanted} open files, and a process of this "
            f"machine may have {allowed}. Raise this limit (`ulimit -n {wanted}`), or lower "
            "`requests` in `downloads`."
        )


@contextmanager
def _name_url_field(urls: UrlSettings) -> Generator[None]:
    """Add the setting to the error for a list that lacks the column of the URLs.

    Raises:
        ConfigurationError: A list cannot be divided.
    """
    try:
        yield
    except errors.ConfigurationError as error:
        if f"no column {urls.url_field!r}." not in str(error):
            raise
        raise errors.ConfigurationError(
            f"{error} For the column of the URLs, correct `url_field` in `urls`."
        ) from None


def _find_kind(path: str) -> str:
    """Return the kind of a list by its name."""
    name = path.lower().removesuffix(".gz").removesuffix(".zst")
    if name.endswith((".csv", ".tsv", ".tab")):
        return "csv"
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return "jsonl"
    return "parquet" if name.endswith(".parquet") else "text"


def _select_columns(
    columns: Mapping[str, str] | None, urls: UrlSettings, *, whole: bool = True
) -> dict[str, str] | None:
    """Return the column of each field of a row, with the URL; None to read whole rows.

    Args:
        columns: Columns of the settings.
        urls: Settings with the column of the URLs.
        whole: Whether rows without columns are read whole.
    """
    if columns is None and whole:
        return None
    return {**(columns or {}), _URL: urls.url_field}


class _TextLines:
    """The lines of plain text, as rows with one column.

    Args:
        files: Files of the source.
        url_field: Name of the column.
    """

    def __init__(self, files: TextFiles, url_field: str) -> None:
        self._files, self._url_field = files, url_field

    def iterate_rows(self, source_range: SourceRange, cursor: int) -> Iterator[Row]:
        """Yield the lines that begin within a range of a file's bytes, from a cursor on."""
        if not isinstance(source_range, TextRange):
            raise errors.ConfigurationError(f"Text is divided by bytes, not {source_range.kind}.")
        if source_range.reason:
            yield from iterate_unreadable(source_range, cursor)
            return
        for _, offset, after, held in self._files.iterate_lines(source_range, cursor):
            data = held.pop()
            try:
                row = orjson.dumps({self._url_field: data.decode().strip()})
            except UnicodeDecodeError:
                where = f"{source_range.file.path}, byte {offset}"
                yield BadRow(where, "not UTF-8", data[:_MAX_BAD_BYTES], after)
            else:
                key = f"{source_range.file_index:05d}-{offset:013d}"
                yield Sample(key, {"json": row}, after)


@dataclass(slots=True)
class _PendingRow:
    """A row of the list that was not yielded yet.

    Attributes:
        row: The row, without the field of the URL.
        url: URL of the row.
        shown: The URL for messages; the position of the row if nothing of the URL can be shown.
        body: Answer to the URL; None for a row that makes no sample.
        size: Bytes of the row.
    """

    row: Row
    url: str
    shown: str
    body: Future[Body | Failure] | None
    size: int


class _UnansweredUrls:
    """The last URLs of a list, if they have got no answer: the network or a host may have failed.

    A host that has never answered may be gone, so only the first of its URLs counts. Every URL
    counts of a host that has answered this machine within the last hour, or that asks for a longer
    pause. So a run that is started again while a host fails does not drop its URLs. If no host has
    answered within this hour, every URL counts, since the list may have no other host.

    Args:
        most: Number of URLs that raises an error.
        limits: Memory of the hosts that have answered.
    """

    def __init__(self, most: int, limits: HostLimits) -> None:
        self._most, self._limits, self._count = most, limits, 0
        self._hosts: set[str] = set()

    def add(self, pending: _PendingRow, answer: Body | Failure) -> None:
        """Add the next URL of the list.

        Raises:
            UnavailableError: Too many URLs have got no answer, one after another.
        """
        if isinstance(answer, Failure) and answer.contact is Contact.NONE:
            return  # the URL may not be valid
        host = urlsplit(pending.url).hostname or ""
        if not isinstance(answer, Failure) or answer.contact is Contact.ANSWERED:
            self._limits.note_answer(host)
            self._limits.note_answer(_ANY_HOST)
            self._clear()
            return
        host = answer.host or host
        may_be_gone = self._limits.has_answered(_ANY_HOST) and not self._limits.has_answered(host)
        match answer.contact:
            case Contact.FAILING if may_be_gone:
                self._clear()  # the network works
                return
            case Contact.SILENT if may_be_gone and host in self._hosts:
                return
            case _:
                self._hosts.add(host)
                self._count += 1
        if self._count >= self._most:
            raise self._make_error(pending, answer)

    def _clear(self) -> None:
        self._hosts.clear()
        self._count = 0

    def _make_error(self, pending: _PendingRow, answer: Failure) -> errors.UnavailableError:
        where = f"the last one is {pending.shown}: {answer.reason}"
        if len(self._hosts) > 1:
            return errors.UnavailableError(
                f"{self._count} URLs of {len(self._hosts)} hosts, one after another, have "
                f"got no answer ({where}). Check the network of this machine, and run it again; "
                "the run continues. If the hosts are gone, raise `max_unanswered` in `downloads`."
            )
        remedy = "Run it again when the host answers"
        if answer.contact is Contact.BUSY:
            remedy = "Run it again after the pause, or raise `timeout` in `downloads` above it"
        return errors.UnavailableError(
            f"{self._count} URLs of {next(iter(self._hosts))}, one after another, have failed "
            f"({where}). {remedy}; the run continues. If these URLs should be left out, raise "
            "`max_unanswered` in `downloads`."
        )


class UrlSource:
    """Samples from the URLs of a list.

    Args:
        files: Files of the list.
        dataset_store: Store of the dataset, for the seek points of compressed lists.
        columns: Column of each field beside the body; None for the row as ``json``.
        settings: Column of the URLs, and limits on the answers.
        downloads: Limits on the requests.
        types: Types of fields, by their names. Others have the types of their extensions.
        allow_private: Whether addresses of private networks and of this machine may be read.
    """

    def __init__(
        self,
        files: SourceFiles,
        dataset_store: Store,
        columns: Mapping[str, str] | None,
        settings: UrlSettings,
        downloads: DownloadSettings,
        *,
        types: Mapping[str, str],
        allow_private: bool,
    ) -> None:
        self._files, self._dataset_store = files, dataset_store
        self._types = types
        self._columns = _select_columns(columns, settings)
        self._settings, self._downloads = settings, downloads
        self._allow_private = allow_private

    def iterate_rows(self, source_range: SourceRange, cursor: int) -> Iterator[Row]:
        """Yield the samples of a range of the list, in the order of the list.

        Memory: 256 MiB of bodies, and `requests * 8` rows of the list.

        Raises:
            ConfigurationError: The process may not open enough files for the requests.
            UnavailableError: Many URLs have got no answer, one after another.
        """
        at_a_time = MAX_BODY_BYTES // self._settings.max_body_bytes
        _check_open_files(min(self._downloads.requests, at_a_time))
        downloader = UrlDownloader(
            self._settings, self._downloads, allow_private=self._allow_private
        )
        unanswered = _UnansweredUrls(self._downloads.max_unanswered, downloader.limits)
        pool = ThreadPoolExecutor(self._downloads.requests, thread_name_prefix="urls")
        try:
            for pending in self._download_in_order(pool, downloader, source_range, cursor):
                yield self._make_row(pending, unanswered)
        finally:
            downloader.stop()
            pool.shutdown(cancel_futures=True)

    def _download_in_order(
        self,
        pool: ThreadPoolExecutor,
        downloader: UrlDownloader,
        source_range: SourceRange,
        cursor: int,
    ) -> Iterator[_PendingRow]:
        """Yield rows in their order, each when its body is downloaded."""
        rows = self._open_list(source_range).iterate_rows(source_range, cursor)
        following = next(rows, None)
        waiting: deque[_PendingRow] = deque()
        while following or waiting:
            while following and self._has_room(waiting):
                waiting.append(self._request_row(pool, downloader, source_range, following))
                following = next(rows, None)
            active = [one.body for one in waiting if one.body and not one.body.done()]
            if waiting[0].body in active:
                wait(active, return_when=FIRST_COMPLETED)
            else:
                yield waiting.popleft()

    def _has_room(self, waiting: deque[_PendingRow]) -> bool:
        """Decide whether another body may be downloaded. Each counts in full until it is there."""
        if not waiting:
            return True
        active = held = 0
        for one in waiting:
            held += one.size
            if one.body and one.body.done():
                held += len(one.body.result().data)
            elif one.body:
                active += 1
        reserved = (active + 1) * self._settings.max_body_bytes
        return (
            active < self._downloads.requests
            and len(waiting) < _WINDOW * self._downloads.requests
            and held + reserved <= MAX_BODY_BYTES
        )

    def _request_row(
        self,
        pool: ThreadPoolExecutor,
        downloader: UrlDownloader,
        source_range: SourceRange,
        row: Row,
    ) -> _PendingRow:
        """Start the download of the URL of a row."""
        if isinstance(row, BadRow):
            return _PendingRow(row, "", "", None, len(row.data))
        url, row = self._split_row(row)
        where = _describe_position(source_range, row)
        if not url:
            reason = f"no URL in {self._settings.url_field!r}"
            bad = BadRow(where, reason, self._join_row(url, row), row.next_cursor)
            return _PendingRow(bad, "", "", None, len(bad.data))
        size = sum(map(len, row.fields.values()))
        return _PendingRow(
            row, url, _show_url(url) or where, pool.submit(downloader.fetch, url), size
        )

    def _split_row(self, row: Sample) -> tuple[str, Sample]:
        """Return the URL of a row, and the row without the field of the URL."""
        fields = dict(row.fields)
        if self._columns is None:
            value = _find_value(orjson.loads(_get_bytes(fields["json"])), self._settings.url_field)
            url = value if isinstance(value, str) else ""
        else:
            url = _get_bytes(fields.pop(_URL)).decode("utf-8", "replace")
        return url.strip(), row._replace(fields=fields)

    def _make_row(self, pending: _PendingRow, unanswered: "_UnansweredUrls") -> Row:
        """Return the sample of a row, or the bad row of a URL without a body.

        Args:
            pending: The row, whose download has ended.
            unanswered: The last URLs, if they have got no answer.

        Raises:
            UnavailableError: Too many URLs have got no answer.
        """
        row = pending.row
        if pending.body is None or isinstance(row, BadRow):
            return row
        answer = pending.body.result()
        unanswered.add(pending, answer)
        if isinstance(answer, Failure):
            data = self._join_row(pending.url, row)
            return BadRow(pending.shown, answer.reason, data, row.next_cursor)
        name = self._settings.content_field or _name_content(answer, pending.url, row.fields)
        return row._replace(fields={**row.fields, name: answer.data})

    def _join_row(self, url: str, row: Sample) -> bytes:
        """Return the row of the list as a line of JSON, from which another list can be made."""
        if self._columns is None:
            return _get_bytes(row.fields["json"])[:_MAX_BAD_BYTES]
        values = {
            column: self._read_value(name, _get_bytes(row.fields[name])[:_MAX_BAD_BYTES])
            for name, column in self._columns.items()
            if name != _URL
        }
        return orjson.dumps({**values, self._settings.url_field: url})

    def _read_value(self, name: str, data: bytes) -> object:
        """Return the value of a field as a list of JSON lines has it."""
        if is_json(name, self._types):
            with suppress(orjson.JSONDecodeError):
                return orjson.loads(data)
        return data.decode("utf-8", "replace")

    def _open_list(self, source_range: SourceRange) -> Source:
        if isinstance(source_range, RowRange):
            # pyarrow is imported only for what needs it.
            from millrace.datasets.sources.parquet import ParquetSource  # noqa: PLC0415

            return ParquetSource(self._files, self._columns, types=self._types)
        files, store = self._files, self._dataset_store
        path = source_range.file.path if isinstance(source_range, TextRange) else ""
        match _find_kind(path):
            case "csv":
                return CsvSource(files, store, self._columns, None, None, types=self._types)
            case "jsonl":
                return JsonLinesSource(files, store, self._columns, types=self._types)
            case _:
                text = TextFiles(files, store, any_version=False)
                return _TextLines(text, self._settings.url_field)


def _describe_position(source_range: SourceRange, row: Sample) -> str:
    """Return the position of a row of a list, for messages."""
    number = int(row.key.rpartition("-")[2])
    if isinstance(source_range, RowRange):
        return f"{source_range.file.path}, row {number}"
    assert isinstance(source_range, TextRange), "lists are divided by rows or bytes"
    return f"{source_range.file.path}, byte {number}"


def _find_value(row: Any, column: str) -> object:
    """Return a value of a whole row, or of a part of a column such as ``image.url``."""
    if not isinstance(row, dict):
        return None
    values = cast("dict[str, Any]", row)
    name, _, rest = column.partition(".")
    if column in values or not rest:
        return values.get(column)
    return _find_value(values.get(name), rest)


def _get_bytes(data: Any) -> bytes:
    assert isinstance(data, bytes), "a row of a list has no large files"
    return data


def _name_content(body: Body, url: str, taken: Mapping[str, object]) -> str:
    """Return the name of the field of a body, which is no field of the row.

    Args:
        body: The body.
        url: URL without its query.
        taken: Fields of the row.
    """
    found = _EXTENSION.fullmatch(urlsplit(url).path.rpartition("/")[2])
    names = [_EXTENSIONS.get(body.media_type), found[1].lower() if found else None, "bin", "body"]
    lower = {name.lower() for name in taken}
    return next(name for name in names if name and name not in lower)


def _show_url(url: str) -> str:
    """Return a URL for messages, without what may be secret in it."""
    with suppress(ValueError):
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        url = urlunsplit(parts._replace(netloc=host, query="", fragment=""))
    return escape_path(url[:_SHOWN])
