"""Uploads that were begun and never finished: no listing shows them, and they are billed."""

from dataclasses import dataclass
from datetime import timedelta

from millrace import errors
from millrace.cleanup.protection import clock_of
from millrace.storage import (
    DeleteFailure,
    StoreSpec,
    abort_upload,
    list_uploads,
    open_store,
    uploaded,
)


@dataclass(frozen=True, slots=True)
class Aborted:
    """Unfinished uploads, and what became of them.

    Attributes:
        uploads: What they were to become, and the bytes that are billed for each.
        young: Those that are not old enough.
        failures: Those that could not be aborted.
        aborted: Whether they were aborted, or only found.
    """

    uploads: tuple[tuple[str, int], ...]
    young: int
    failures: tuple[DeleteFailure, ...]
    aborted: bool

    @property
    def size(self) -> int:
        """Bytes of all that are old enough, but for those that could not be aborted."""
        failed = {failure.key for failure in self.failures}
        return sum(size for key, size in self.uploads if key not in failed)


def abort_uploads(
    spec: StoreSpec, *, older_than: timedelta, prefix: str = "", dry_run: bool = True
) -> Aborted:
    """Find, and by choice abort, the unfinished uploads of a store.

    Args:
        spec: Which, with credentials to write.
        older_than: By the store's clock. One that is under way is younger than this.
        prefix: Only of keys that begin with this.
        dry_run: Only find them.

    Raises:
        DeniedError: The credentials may not list them.
    """
    store = open_store(spec, make_folder=False)
    horizon = clock_of(store).now() - older_than
    keys: list[tuple[str, int]] = []
    failures: list[DeleteFailure] = []
    young = 0
    for upload in list_uploads(store, prefix):
        if upload.begun >= horizon:
            young += 1
            continue
        size = 0
        try:
            size = uploaded(store, upload)
            if not dry_run:
                abort_upload(store, upload)
        except errors.MillraceError as error:
            failures.append(DeleteFailure(upload.key, errors.one_line(error)))
        keys.append((upload.key, size))
    return Aborted(tuple(keys), young, tuple(failures), aborted=not dry_run)
