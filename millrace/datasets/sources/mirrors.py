"""Several locations of one source, which serve its files as the plan pins them.

The location that a plan names is read by the ETags of the plan. A file of another location is read
only if it is proven equal: it has the same size, and a digest of the whole file is equal. The
digest is an ETag that is one (an MD5 of S3, a SHA-256 or a blob id of the Hub), or that of a whole
read. The file is then read by the ETag that it had at the proof.
"""

import contextlib
import hashlib
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import orjson

from millrace import errors
from millrace.datasets.sources.files import LocatedFiles, Patterns
from millrace.datasets.sources.table import FileTable
from millrace.keys.datasets import DatasetKeys
from millrace.schemas.dataset import FileRef, SourceRecord
from millrace.storage import Store, create, exists, read
from millrace.storage.answers import READ_BLOCK_SIZE

logger = logging.getLogger(__name__)

_REST = 60.0  # least seconds for which a location that failed comes last
_REST_RATIO = 10  # or as many times the duration of the failed try
_RECORDED_BYTES = 8 << 20  # size of a file of a mirror from which its digest is stored
_CONCURRENCY = 8  # concurrent reads of whole files
_MAX_RECORD_BYTES = 64 << 10
_HUB = "hf://"
_SHA256, _MD5, _BLOB = "sha256", "md5", "git-blob"
_DIGITS = re.compile(r"[0-9a-f]+")
_resting_until: dict[str, float] = {}  # by the monotonic clock; a process shards many partitions
_S3_DIGESTS, _HUB_DIGESTS = {32: _MD5}, {64: _SHA256, 40: _BLOB}

ReportFault = Callable[[str, str, bool], None]
"""Function that receives a location, its fault, and whether its bytes differ."""


def find_digest(url: str, etag: str) -> str:
    """Return the digest of a whole file that its ETag is, such as ``md5:9e10…``; empty without.

    Args:
        url: URL of the location.
        etag: ETag of the file.
    """
    kinds: Mapping[int, str] = {}
    if url.startswith(_HUB):
        kinds = _HUB_DIGESTS
    elif url.startswith(("s3://", "r2://")):
        kinds = _S3_DIGESTS  # an ETag with a dash depends on the parts of an upload
    text = etag.strip('"')
    kind = kinds.get(len(text))
    return f"{kind}:{text}" if kind and _DIGITS.fullmatch(text) else ""


class StoredDigests:
    """Digests of files that were read whole, in the store of the dataset, for all of its runs.

    Args:
        store: Store of the dataset.
        keys: Names of the dataset.
    """

    def __init__(self, store: Store, keys: DatasetKeys) -> None:
        self._store, self._keys = store, keys

    def has(self, location: str, file: FileRef) -> bool:
        """Decide whether there are digests of a file. One request."""
        return exists(self._store, self._make_key(location, file))

    def find(self, location: str, file: FileRef) -> dict[str, str]:
        """Return the digests of a file by their algorithms; empty without. One request.

        Args:
            location: Name of the location; empty for the location of the plan.
            file: File as the location has it.
        """
        key = self._make_key(location, file)
        # Another process may have deleted the digests. Damaged ones are as if there were none.
        with contextlib.suppress(errors.NotFoundError, errors.CorruptError, ValueError):
            described, digests = orjson.loads(read(self._store, key, max_size=_MAX_RECORD_BYTES))
            if described == self._describe(location, file):
                return dict(digests)
        return {}

    def store(self, location: str, file: FileRef, digests: Mapping[str, str]) -> None:
        """Store the digests of a file, unless there are some."""
        body = orjson.dumps([self._describe(location, file), digests])
        with contextlib.suppress(errors.ExistsError):
            create(self._store, self._make_key(location, file), body)

    @staticmethod
    def _describe(location: str, file: FileRef) -> list[Any]:
        return ["file-digests-1", location, file.path, file.size, file.etag]

    def _make_key(self, location: str, file: FileRef) -> str:
        described = orjson.dumps(self._describe(location, file))
        return self._keys.make_file_digests_key(hashlib.sha256(described).hexdigest()[:32])


class MirrorLocation:
    """One location of a source.

    Args:
        url: URL of the location.
        endpoint: Endpoint of its store or its Hub; empty for that of the URL.
        open_files: Function that opens its files. A folder may be missing.

    Attributes:
        url: URL of the location.
        name: URL of the location, with its endpoint if it has one.
        served: Bytes that were read from the location.
    """

    def __init__(self, url: str, endpoint: str, open_files: Callable[[], LocatedFiles]) -> None:
        self.url, self._open = url, open_files
        self.name = f"{url} ({endpoint})" if endpoint else url
        self.served = 0
        self._lock = threading.Lock()

    @cached_property
    def files(self) -> LocatedFiles:
        """Files of the location.

        Raises:
            NotFoundError: There is no such folder.
        """
        return self._open()

    def iterate_blocks(self, file: FileRef, start: int, end: int, block: int) -> Iterator[bytes]:
        """Yield the blocks of a file between two offsets, and count their bytes."""
        for data in self.files.iterate_blocks(file, start, end, block=block):
            self._count(len(data))
            yield data
            start += len(data)
        if start != end:
            raise errors.CorruptError(f"{self.name} sent another number of bytes of {file.path}.")

    def read(self, file: FileRef) -> bytes:
        """Return the content of a file, and count its bytes."""
        data = self.files.read(file)
        self._count(len(data))
        return data

    def compute_digests(self, file: FileRef, algorithms: Iterable[str]) -> dict[str, str]:
        """Read a file whole, and return its digests by their algorithms."""
        hashers = {name: _make_hasher(name, file.size) for name in algorithms}
        for data in self.iterate_blocks(file, 0, file.size, READ_BLOCK_SIZE):
            for hasher in hashers.values():
                hasher.update(data)
        return {name: f"{name}:{hasher.hexdigest()}" for name, hasher in hashers.items()}

    def rest(self, tried: float) -> None:
        """Note a failure. The location comes last for ten times the duration of the failed try."""
        _resting_until[self.name] = time.monotonic() + max(_REST, _REST_RATIO * tried)

    @property
    def is_resting(self) -> bool:
        """True if the location failed a short time ago in this process."""
        return _resting_until.get(self.name, 0.0) > time.monotonic()

    def _count(self, size: int) -> None:
        with self._lock:
            self.served += size


def _make_hasher(algorithm: str, size: int) -> Any:
    if algorithm == _BLOB:  # the Hub has files that are not in Git LFS as blobs of Git
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    return hashlib.new(algorithm, usedforsecurity=algorithm != _MD5)


class MirroredFiles:
    """Files of a source that has several locations.

    A file is read from the location of the plan, and else from the next one that has it. After an
    error, the read continues elsewhere, at the offset that was reached.

    Args:
        locations: Locations, in the order in which they are tried.
        committed: Source of the plan; None if there is no plan.
        digests: Stored digests; None stores none.
        paths: Paths of all files of the source; None if the locations are listed.
        report: Function that receives faults. Each kind of fault of a location is reported once.

    Attributes:
        locations: The locations.
        unseekable: Paths of the listed files of which no part can be read alone.
        is_listed: Whether a location was listed.
        is_local: Whether the location of the plan is a folder.
    """

    def __init__(
        self,
        locations: Sequence[MirrorLocation],
        *,
        committed: SourceRecord | None = None,
        digests: StoredDigests | None = None,
        paths: Collection[str] | None = None,
        report: ReportFault | None = None,
    ) -> None:
        self.locations = tuple(locations)
        self.unseekable: Set[str] = frozenset()
        self.is_listed = False
        self.is_local = (committed.url if committed else locations[0].url).startswith("file:")
        self._committed, self._url = committed, committed.url if committed else ""
        self._digests, self._paths = digests, paths
        self._report = report or log_fault
        self._reported: set[tuple[str, bool]] = set()
        self._proven: dict[tuple[str, str, str], FileRef | errors.MillraceError] = {}
        self._replaced: set[tuple[str, str, str]] = set()

    @property
    def url(self) -> str:
        """URL of the source in the plan; without a plan, that of the location that was listed."""
        return self._url or self.locations[0].files.url

    @property
    def served(self) -> dict[str, int]:
        """Bytes that were read from each location, by its name."""
        return {location.name: location.served for location in self.locations}

    def get_planned_files(self) -> LocatedFiles:
        """Return the files of the plan's location.

        Raises:
            UnavailableError: The location was not listed.
        """
        for location in self.locations:
            if self.is_listed and self._is_planned(location):
                return location.files
        raise errors.UnavailableError(f"{self.url}, the location of the plan, was not listed.")

    def make_url(self, path: str) -> str:
        """Return the URL of a file, for messages."""
        return f"{self.url}/{path}"

    def collect(self, patterns: Patterns) -> FileTable:
        """List the files of the plan's location; without a plan, of the first that answers.

        Raises:
            UnavailableError: No such location answers.
        """
        if self._paths is not None:
            patterns = _NamedPaths(patterns, self._paths)
        faults: dict[str, errors.MillraceError] = {}
        tables: list[tuple[MirrorLocation, FileTable]] = []
        for location in self.locations:
            if self._committed and not self._is_planned(location):
                continue
            try:
                table = location.files.collect(patterns)
                if not table:
                    raise errors.NotFoundError(f"It has no files that match {patterns}.")
            except errors.MillraceError as error:
                self._add_fault(faults, location, error)
                continue
            tables.append((location, table))
            if self._committed is None or table.compute_digest() == self._committed.digest:
                break
        # Two locations may have one URL at different endpoints. Only one of them is the plan's.
        else:
            if not tables or faults:
                raise self._make_error("The source", faults)
            del tables[1:]
        location, table = tables[-1]
        self._url, self.unseekable = location.files.url, location.files.unseekable
        self.is_listed, self.is_local = True, location.files.is_local
        return table

    def read(self, file: FileRef) -> bytes:
        """Return the content of a file.

        Raises:
            MillraceError: No location has the file. The message has the reason of each.
        """
        faults: dict[str, errors.MillraceError] = {}
        while location := self._choose(faults):
            began = time.monotonic()
            try:
                return location.read(self._pin(location, file))
            except errors.MillraceError as error:
                self._handle_fault(faults, location, file, error, began)
        raise self._make_error(file.path, faults)

    def iterate_blocks(
        self, file: FileRef, start: int, end: int, *, block: int = READ_BLOCK_SIZE
    ) -> Iterator[bytes]:
        """Yield the blocks of a file between two offsets.

        Raises:
            MillraceError: No location has the rest of the file. The message has the reason of each.
        """
        faults: dict[str, errors.MillraceError] = {}
        while start < end:
            location = self._choose(faults)
            if location is None:
                raise self._make_error(file.path, faults)
            began = time.monotonic()
            try:
                for data in location.iterate_blocks(self._pin(location, file), start, end, block):
                    yield data
                    start += len(data)
                    began = time.monotonic()  # the time that the caller took does not count
                    faults.clear()  # those that failed are tried once more from here on
            except errors.MillraceError as error:
                self._handle_fault(faults, location, file, error, began)

    def store_digests(self, files: Iterable[FileRef]) -> None:
        """Read the files of the plan's location that no ETag proves, and store their digests.

        Each file is read whole once, by one of the runs of the dataset. Without the digests, no
        location could replace the plan's when it fails. If that does not answer, nothing is stored.

        Args:
            files: Files of the plan.
        """
        wanted = [file for file in files if not find_digest(self._url, file.etag)]
        random.shuffle(wanted)  # runs on several machines share the work
        with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="digests") as pool:
            for done in [pool.submit(self._store_digest, file) for file in wanted]:
                try:
                    done.result()
                except errors.MillraceError as error:
                    pool.shutdown(cancel_futures=True)
                    logger.warning(
                        "Not every file of %s could be read for its digest, so mirrors may be of "
                        "no use: %s", self._url, error,
                    )  # fmt: skip
                    return

    def _store_digest(self, file: FileRef) -> None:
        if self._digests and not self._digests.has("", file):
            self._find_planned_digest(file)

    def _sort_locations(self) -> list[MirrorLocation]:
        """Return the locations: those that failed last, and before the others that of the plan."""
        return sorted(self.locations, key=lambda one: (one.is_resting, not self._is_planned(one)))

    def _is_planned(self, location: MirrorLocation) -> bool:
        """Decide whether a location is that of the plan."""
        is_hub = location.url.startswith(_HUB)
        if is_hub and _strip_revision(location.url) != _strip_revision(self._url):
            return False  # without a request for the commit
        try:
            return location.files.url == self._url
        except errors.MillraceError:  # a missing folder, or a Hub that does not answer
            return False

    def _choose(self, faults: Mapping[str, errors.MillraceError]) -> MirrorLocation | None:
        """Return the next location to try for a file; None if all have failed."""
        return next((one for one in self._sort_locations() if one.name not in faults), None)

    def _pin(self, location: MirrorLocation, file: FileRef) -> FileRef:
        """Return a file by which a location may be read: with the ETag of its proven bytes.

        Raises:
            MillraceError: The file is missing or differs, or cannot be compared.
        """
        key = location.name, file.path, file.etag
        if self._is_planned(location) and key not in self._replaced:
            return file
        known = self._proven.get(key)
        if known is None:
            try:
                known = self._prove(location, file)
            except (errors.ChangedError, errors.NotFoundError) as error:
                known = error
            self._proven[key] = known
        if isinstance(known, errors.MillraceError):
            raise known
        return known

    def _prove(self, location: MirrorLocation, file: FileRef) -> FileRef:
        """Compare a file of a location with the planned one, and return it with its own ETag.

        Raises:
            ChangedError: The file is missing or differs, or cannot be compared.
            UnavailableError: The location does not answer.
        """
        found = location.files.find(file.path)
        if found is None:
            raise errors.ChangedError(f"{location.name} does not have {file.path}.")
        if found.size != file.size:
            raise _make_difference(location, file, f"has {found.size} bytes, not {file.size}")
        if not file.etag:  # the caller compares the bytes
            return found
        planned = find_digest(self._url, file.etag)
        own = find_digest(location.files.url, found.etag)
        if planned and planned == own:
            return found
        algorithm = planned.partition(":")[0]
        # An object that is encrypted by a key service has an ETag that looks like an MD5.
        is_certain = algorithm not in {"", _MD5}
        if not (is_certain and own.startswith(f"{algorithm}:")):
            digests = self._find_digests(location, found, {_SHA256, algorithm} - {""})
            if planned and planned == digests[algorithm]:
                return found
            if not is_certain and self._find_planned_digest(file) == digests[_SHA256]:
                return found
        raise _make_difference(location, file, "has the same size, and other bytes")

    def _find_digests(
        self, location: MirrorLocation, file: FileRef, algorithms: Set[str]
    ) -> dict[str, str]:
        """Return the digests of a file, which is read whole if they are not stored."""
        is_stored = self._digests is not None and file.size >= _RECORDED_BYTES
        if self._digests and is_stored:
            found = self._digests.find(location.name, file)
            if algorithms <= found.keys():
                return found
        digests = location.compute_digests(file, algorithms)
        if self._digests and is_stored:
            self._digests.store(location.name, file, digests)
        return digests

    def _find_planned_digest(self, file: FileRef) -> str:
        """Return the SHA-256 of a planned file, which is read whole if it is not stored.

        Raises:
            ChangedError: The digest is not stored, and no location has the planned file.
        """
        if self._digests and (found := self._digests.find("", file).get(_SHA256)):
            return found
        reason = "no location of these settings is that of the plan"
        for location in filter(self._is_planned, self.locations):
            if location.is_resting:
                reason = f"{location.name} could not be read"
                continue
            began = time.monotonic()
            try:
                digests = location.compute_digests(file, [_SHA256])
            except errors.MillraceError as error:
                if isinstance(error, errors.UnavailableError):
                    location.rest(time.monotonic() - began)
                reason = str(error)
                continue
            if self._digests:
                self._digests.store("", file, digests)
            return digests[_SHA256]
        raise errors.ChangedError(
            f"{file.path} of {self._url} has no stored digest, so no other file can be compared "
            f"with it ({reason})."
        )

    def _handle_fault(
        self,
        faults: dict[str, errors.MillraceError],
        location: MirrorLocation,
        file: FileRef,
        error: errors.MillraceError,
        began: float,
    ) -> None:
        """Note that a location could not be read, unless the file may still be proven there."""
        key = location.name, file.path, file.etag
        if isinstance(error, errors.ChangedError):
            if self._is_planned(location) and key not in self._replaced:
                self._replaced.add(key)
                return
            self._proven[key] = error
        elif not isinstance(error, errors.NotFoundError | errors.CorruptError):
            location.rest(time.monotonic() - began)
        self._add_fault(faults, location, error)

    def _add_fault(
        self,
        faults: dict[str, errors.MillraceError],
        location: MirrorLocation,
        error: errors.MillraceError,
    ) -> None:
        faults[location.name] = error
        kind = location.name, isinstance(error, errors.ChangedError)
        if kind not in self._reported:
            self._reported.add(kind)
            self._report(location.name, str(error), kind[1])

    def _make_error(
        self, what: str, faults: Mapping[str, errors.MillraceError]
    ) -> errors.MillraceError:
        """Return the error for what no location has, with the reason of each."""
        kinds = [type(error) for error in faults.values()]
        kind = next((one for one in (errors.UnavailableError, errors.ChangedError) if one in kinds),
                    kinds[0] if kinds else errors.UnavailableError)  # fmt: skip
        reasons = [f"{name}: {error}" for name, error in faults.items()]
        if not reasons:
            reasons = [f"None of them is {self._url}, from which the plan was made."]
        return kind(
            f"{what} cannot be read from any location. Run it again when one can be read; the run "
            "continues.\n" + "\n".join(reasons)
        )


def _strip_revision(url: str) -> str:
    """Return the repository in a URL of the Hub."""
    return "/".join(url.partition("@")[0].split("/")[:5])


class _NamedPaths(Patterns):
    """Patterns that choose among named paths."""

    def __init__(self, patterns: Patterns, paths: Collection[str]) -> None:
        super().__init__()
        self._patterns, self._paths = patterns, frozenset(paths)

    def matches(self, path: str) -> bool:
        """Decide whether a path is taken."""
        return path in self._paths and self._patterns.matches(path)

    def __str__(self) -> str:
        return str(self._patterns)


def _make_difference(location: MirrorLocation, file: FileRef, how: str) -> errors.ChangedError:
    return errors.ChangedError(
        f"{file.path} of {location.name} is not the file of the plan: it {how}."
    )


def log_fault(location: str, reason: str, differs: bool) -> None:  # noqa: FBT001 - of a callback
    """Log a warning about a location of a source."""
    if differs:
        logger.warning("%s is left out for files that differ, such as: %s", location, reason)
    else:
        logger.warning("%s could not be read, and comes last for a while: %s", location, reason)
