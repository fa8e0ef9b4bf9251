"""Files of a dataset of which several stores have copies, for loaders."""

import logging
from collections.abc import Callable, Iterator, Sequence, Set
from datetime import timedelta
from functools import partial
from typing import Protocol, TypeVar

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


FileLocations = str | StoreSpec | Sequence[str | StoreSpec] | MirroredBucket
"""A URL, a store, several of them that have the same files, or a bucket with mirrors."""

RangeCheck = Callable[[int, bytes], object]
"""Function that raises `CorruptError` if bytes from an offset on do not have their checksums."""


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
    decode: Callable[[SourceFileReader], T],
    check: RangeCheck | None,
    faults: tuple[type[Exception], ...],
) -> T:
    """Read a file and decode its bytes, from another location if they differ or are damaged.

    Args:
        files: Files that the file is one of.
        file: The file.
        decode: Function that fetches parts of the file and decodes them.
        check: Function that checks the fetched parts, if any copy may be read. None reads copies
            with the ETag of the listing only.
        faults: Errors that `decode` raises for damaged bytes.
    """
    if isinstance(files, MirroredStoreFiles):
        return files.read_checked(file, decode, check, faults)
    return decode(SourceFileReader(files, file))


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
        self._has_warned = False

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
        """Yield the blocks of a file between two offsets, from copies with an equal ETag.

        Raises:
            MillraceError: No location has the file. The message has the reason of each.
        """
        described = self.describe(file)
        for at in range(start, end, block):
            yield self.reader.read_range(described, at, min(end, at + block))

    def read_checked(
        self,
        file: FileRef,
        decode: Callable[[SourceFileReader], T],
        check: RangeCheck | None,
        faults: tuple[type[Exception], ...],
    ) -> T:
        """Read a file and decode its bytes; a copy that fails is left out. See `read_checked`."""
        if check is not None:
            return decode(_CheckedFileReader(self, file, check))
        while True:
            reader = _EqualFileReader(self, file)
            try:
                return decode(reader)
            except MemoryError:
                raise
            except faults as error:
                if not reader.copies:  # no bytes were read, so another copy would not help
                    raise
                reason = f"its bytes are damaged ({errors.format_error(error)})"
                for fetched in reader.copies:
                    self.reader.reject(self.describe(file), fetched, reason)
            except errors.MillraceError as error:
                if unproven := self._explain_unproven(file):
                    raise type(error)(f"{error}\n{unproven}") from error
                raise
            finally:
                self._warn_of_unproven(file)

    def _warn_of_unproven(self, file: FileRef) -> None:
        """Warn once that copies are not read, since the index of the pages has no checksums."""
        if not self._has_warned and (sentence := self._explain_unproven(file)):
            self._has_warned = True
            logger.warning("%s", sentence)

    def _explain_unproven(self, file: FileRef) -> str:
        """Return which locations are not read for a file without checksums, and what to do."""
        names = self.reader.name_unproven(self.describe(file))
        if not names:
            return ""
        return (
            f"{file.path} and perhaps other files are not read from {', '.join(names)}, since the "
            "ETags are not equal and no index has checksums of the pages. Make one: millrace "
            f"dataset index {self.url} --checksums"
        )

    def describe(self, file: FileRef) -> MirroredObject:
        """Return a file as the reader of the stores names it."""
        return MirroredObject(file.path, file.size, file.etag, self.listed)


class _EqualFileReader(SourceFileReader):
    """A file that is read from copies with the ETag of the listing.

    Attributes:
        copies: Copies that the bytes are from.
    """

    def __init__(self, files: MirroredStoreFiles, file: FileRef) -> None:
        super().__init__(files, file)
        self._reader, self._item = files.reader, files.describe(file)
        self.copies = set[FetchedRange]()

    def _read_range(self, start: int, end: int) -> bytes:
        blocks: list[bytes] = []
        for at in range(start, end, READ_BLOCK_SIZE):
            found = self._reader.fetch(self._item, at, min(end, at + READ_BLOCK_SIZE))
            self.copies.add(found._replace(data=b""))
            blocks.append(found.data)
        return b"".join(blocks)


class _CheckedFileReader(SourceFileReader):
    """A file of which each range is checked, whichever copy it is from."""

    def __init__(self, files: MirroredStoreFiles, file: FileRef, check: RangeCheck) -> None:
        super().__init__(files, file)
        self._reader, self._item, self._check = files.reader, files.describe(file), check

    def _read_range(self, start: int, end: int) -> bytes:
        return self._reader.read_range(self._item, start, end, check=partial(self._check, start))
