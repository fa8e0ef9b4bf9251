"""Files of a source in a bucket. A change shows in an object's ETag."""

from collections.abc import Iterator, Set

from millrace import errors
from millrace.datasets.sources.files import (
    Patterns,
    describe_difference,
    make_changed_error,
)
from millrace.datasets.sources.table import FileTable
from millrace.schemas.dataset import FileRef
from millrace.storage import Stat, Store, head, list_objects, read, stream
from millrace.storage.answers import READ_BLOCK_SIZE


class StoreFiles:
    """Objects below the URL of a store.

    Args:
        store: The store.
    """

    unseekable: Set[str] = frozenset()
    is_local = False

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def url(self) -> str:
        """URL of the store."""
        return self._store.url

    def make_url(self, path: str) -> str:
        """Return the URL of an object, for messages."""
        return self._store.make_url(path)

    def collect(self, patterns: Patterns) -> FileTable:
        """List the objects that match patterns. Consoles make empty ones to show a folder.

        Raises:
            ConfigurationError: An object has no ETag.
        """
        return FileTable.collect(self._iterate_objects(patterns))

    def find(self, path: str) -> FileRef | None:
        """Describe an object; None if there is none. One request.

        Raises:
            ConfigurationError: The object has no ETag.
        """
        try:
            found = head(self._store, path)
        except errors.NotFoundError:
            return None
        return FileRef(path=path, size=found.size, etag=self._require_etag(found))

    def _iterate_objects(self, patterns: Patterns) -> Iterator[tuple[str, int, str]]:
        for found in list_objects(self._store, exact=True):
            if patterns.matches(found.key):
                yield found.key, found.size, self._require_etag(found)

    def _require_etag(self, found: Stat) -> str:
        if found.etag is None:
            raise errors.ConfigurationError(
                f"{self.make_url(found.key)} has no ETag, so a change could not be seen: "
                "copy the source to a store that gives one."
            )
        return found.etag

    def read(self, file: FileRef) -> bytes:
        """Return the content of an object.

        Raises:
            ChangedError: The object has changed or is gone.
        """
        try:
            data = read(self._store, file.path, etag=file.etag or None, max_size=file.size)
        except (errors.NotFoundError, errors.ChangedError, errors.CorruptError):
            raise self._make_changed_error(file) from None
        if len(data) != file.size:
            raise self._make_changed_error(file)
        return data

    def iterate_blocks(
        self, file: FileRef, start: int, end: int, *, block: int = READ_BLOCK_SIZE
    ) -> Iterator[bytes]:
        """Yield the blocks of an object between two offsets.

        Raises:
            ChangedError: The object has changed or is gone. No block with other content is
                returned.
        """
        try:
            yield from stream(
                self._store,
                file.path,
                start=start,
                end=end,
                etag=file.etag or None,
                block_size=block,
            )
        except (errors.NotFoundError, errors.ChangedError):
            raise self._make_changed_error(file) from None

    def _make_changed_error(self, file: FileRef) -> errors.ChangedError:
        """Return the error for an object that has other bytes, with its present size."""
        try:
            size = head(self._store, file.path).size
        except errors.NotFoundError:
            size = None
        except errors.MillraceError:
            size = file.size
        return make_changed_error(self, file, describe_difference(file, size))
