"""Files of a dataset of which several stores have copies, for loaders."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from datetime import timedelta
from typing import Generic, NamedTuple, Protocol, TypeVar

from millrace import errors
from millrace.datasets.sources import is_store_url, open_files
from millrace.datasets.sources.files import Patterns, SourceFiles
from millrace.datasets.sources.reader import SourceFileReader
from millrace.datasets.sources.store_files import StoreFiles
from millrace.datasets.sources.table import FileTable
from millrace.schemas.dataset import FileRef
from millrace.storage import Store, StoreSpec, open_store
from millrace.storage.answers import READ_BLOCK_SIZE
from millrace.storage.mirror_locations import MirrorReport
from millrace.storage.mirrored import MirroredReader
from millrace.storage.mirrored_objects import FetchedRange, MirroredObject

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LISTING_TIMEOUT = timedelta(seconds=10)  # of a location, while there are others


class MirroredBucket(Protocol):
    """A bucket that knows its mirrors, such as a Millrace Bucket block."""

    def make_read_specs(self) -> list[StoreSpec]:
        """Return the bucket and its mirrors, with credentials to read."""
        ...


class Decoded(NamedTuple, Generic[T]):
    """Value of decoded bytes.

    Attributes:
        value: The value.
        is_checked: Whether a checksum of each part was verified.
    """

    value: T
    is_checked: bool


FileLocations = str | StoreSpec | Sequence[str | StoreSpec] | MirroredBucket
"""A URL, a store, several of them that have the same files, or a bucket with mirrors."""


def list_specs(source: FileLocations) -> list[StoreSpec]:
    """Return the locations of files.

    Raises:
        ConfigurationError: There is no location.
    """
    if isinstance(source, str | StoreSpec):
        found: Sequence[str | StoreSpec] = [source]
    elif isinstance(source, Sequence):
        found = source
    else:
        found = source.make_read_specs()
    if not found:
        raise errors.ConfigurationError("Name at least one location of the files.")
    return [StoreSpec(url=one) if isinstance(one, str) else one for one in found]


def open_mirrors(specs: Sequence[StoreSpec]) -> list[Store]:
    """Open the stores of mirrors. Nothing is sent.

    Raises:
        ConfigurationError: A URL names no store.
        NotFoundError: There is no such folder.
    """
    if other := next((spec.url for spec in specs if not is_store_url(spec.url)), None):
        raise errors.ConfigurationError(
            f"{other} is no store. Mirrors of a loader are stores or folders: copy the files into "
            "one, or name this URL alone."
        )
    return [open_store(spec, make_folder=False) for spec in specs]


def limit_retries(store: Store) -> Store:
    """Return a store whose requests are soon given up, since there are other locations."""
    return store.with_retry_timeout(min(store.spec.retry_timeout, _LISTING_TIMEOUT))


def open_loader_files(
    source: FileLocations, paths: Sequence[str] | None = None, *, listed: int = 0
) -> SourceFiles:
    """Open the files of a loader. Nothing is sent.

    Args:
        source: One location, or several that have the same files.
        paths: Paths of the files, for a web server, which cannot be listed.
        listed: Number of the location of several that was listed before.

    Raises:
        ConfigurationError: A URL names no store, or the settings do not fit it.
        NotFoundError: There is no such folder.
    """
    specs = list_specs(source)
    if len(specs) == 1:
        return open_files(specs[0], paths=paths)
    return MirroredStoreFiles(open_mirrors(specs), listed=listed)


def read_checked(
    files: SourceFiles,
    file: FileRef,
    decode: Callable[[SourceFileReader], Decoded[T]],
    faults: tuple[type[Exception], ...],
) -> T:
    """Read a file and decode its bytes, from another location if they are damaged.

    Bytes without checksums are read from copies only that are proven equal.

    Args:
        files: Files that the file is one of.
        file: The file.
        decode: Function that reads and decodes parts of the file, and checks their checksums.
        faults: Errors that it raises for damaged bytes.
    """
    if isinstance(files, MirroredStoreFiles):
        return files.read_checked(file, decode, faults)
    return decode(SourceFileReader(files, file)).value


class MirroredStoreFiles:
    """Files that several stores have. They are read as the first store that answers lists them.

    Args:
        stores: The stores, in the order in which they are listed.
        listed: Number of the store that another process has listed.

    Attributes:
        reader: Reader of the stores.
        listed: Number of the store that was listed, whose ETags the files have.
    """

    unseekable: Set[str] = frozenset()
    is_local = False

    def __init__(self, stores: Sequence[Store], *, listed: int = 0) -> None:
        self.reader = MirroredReader(stores)
        self.listed = listed
        self._unchecked: set[str] = set()  # paths of files that have parts without a checksum
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """URL of the location that was listed."""
        return self.reader.stores[self.listed].url

    def make_url(self, path: str) -> str:
        """Return the URL of a file, for messages."""
        return self.reader.stores[self.listed].make_url(path)

    def make_report(self) -> MirrorReport:
        """Return the work of each location so far."""
        return self.reader.make_report()

    def collect(self, patterns: Patterns) -> FileTable:
        """List the files of the first location that answers and has some.

        Raises:
            MillraceError: No location can be listed. The message has the reason of each.
        """
        faults: dict[str, errors.MillraceError] = {}
        table: FileTable | None = None
        for number, store in enumerate(self.reader.stores):
            try:
                table = StoreFiles(limit_retries(store)).collect(patterns)
            except errors.MillraceError as error:
                faults[store.url] = error
                logger.warning("%s cannot be listed: %s", store.url, error)
                continue
            if table:
                self.listed = number
                return table
        if table is None:
            reasons = "\n".join(f"{url}: {error}" for url, error in faults.items())
            raise type(next(iter(faults.values())))(f"No location can be listed.\n{reasons}")
        return table

    def read(self, file: FileRef) -> bytes:
        """Return the content of a file.

        Raises:
            MillraceError: No location has the file. The message has the reason of each.
        """
        return self.reader.read_range(self.describe(file), 0, file.size)

    def iterate_blocks(
        self, file: FileRef, start: int, end: int, *, block: int = READ_BLOCK_SIZE
    ) -> Iterator[bytes]:
        """Yield the blocks of a file between two offsets, from copies that are proven equal.

        Raises:
            MillraceError: No location has the file. The message has the reason of each.
        """
        described = self.describe(file)
        for at in range(start, end, block):
            yield self.reader.read_range(described, at, min(end, at + block))

    def read_checked(
        self,
        file: FileRef,
        decode: Callable[[SourceFileReader], Decoded[T]],
        faults: tuple[type[Exception], ...],
    ) -> T:
        """Read a file and decode its bytes; a copy that fails is left out. See `read_checked`."""
        while True:
            view = _CheckedFiles(self, file, allow_unproven=file.path not in self._unchecked)
            try:
                decoded = decode(SourceFileReader(view, file))
            except MemoryError:
                raise
            except faults as error:
                view.reject(error)
                continue
            if decoded.is_checked:
                view.confirm()
            elif not view.is_proven:
                self._note_unchecked(file)
                continue
            return decoded.value

    def _note_unchecked(self, file: FileRef) -> None:
        """Read a file from proven copies only, and warn once, since its mirrors are of no use."""
        with self._lock:
            is_first = not self._unchecked
            self._unchecked.add(file.path)
        if is_first:
            logger.warning(
                "%s and perhaps other files have no checksums, so only copies with an equal ETag "
                "are read. Upload copies in equal parts, or write checksums of the pages.",
                self.make_url(file.path),
            )

    def describe(self, file: FileRef) -> MirroredObject:
        """Return a file as the reader of the stores names it."""
        return MirroredObject(file.path, file.size, file.etag, self.listed)


class _CheckedFiles:
    """One file whose bytes are checked after the read, and the copies that they are from.

    Args:
        files: The files.
        file: The file.
        allow_unproven: Whether copies are read that are not proven yet.
    """

    unseekable: Set[str] = frozenset()
    is_local = False

    def __init__(self, files: MirroredStoreFiles, file: FileRef, *, allow_unproven: bool) -> None:
        self._files, self._item = files, files.describe(file)
        self._allow_unproven = allow_unproven
        self._fetched: dict[int, FetchedRange] = {}
        self.url = files.url

    def make_url(self, path: str) -> str:
        """Return the URL of a file, for messages."""
        return self._files.make_url(path)

    def collect(self, patterns: Patterns) -> FileTable:
        """List all files."""
        return self._files.collect(patterns)

    def read(self, file: FileRef) -> bytes:
        """Return the content of the file."""
        return b"".join(self.iterate_blocks(file, 0, file.size))

    def iterate_blocks(
        self, file: FileRef, start: int, end: int, *, block: int = READ_BLOCK_SIZE
    ) -> Iterator[bytes]:
        """Yield the blocks of the file, where it is allowed from a copy that is not proven yet."""
        del file
        for at in range(start, end, block):
            found = self._files.reader.fetch(
                self._item, at, min(end, at + block), allow_unproven=self._allow_unproven
            )
            self._fetched[found.location] = found._replace(data=b"")
            yield found.data

    @property
    def is_proven(self) -> bool:
        """True if all bytes are of proven copies."""
        return all(one.is_proven for one in self._fetched.values())

    def confirm(self) -> None:
        """Note that the bytes are right."""
        for fetched in self._fetched.values():
            self._files.reader.confirm(self._item, fetched)

    def reject(self, error: Exception) -> None:
        """Leave out the copies that the bytes are from: those that are not proven, if there are."""
        unproven = [one for one in self._fetched.values() if not one.is_proven]
        reason = f"its bytes are damaged ({errors.format_error(error)})"
        for fetched in unproven or self._fetched.values():
            self._files.reader.reject(self._item, fetched, reason)
        if not self._fetched:  # no bytes were read, so another copy would not help
            raise error
