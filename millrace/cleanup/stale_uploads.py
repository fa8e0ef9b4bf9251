"""Unfinished uploads: no listing shows them, and they are billed."""

from dataclasses import dataclass
from datetime import timedelta

from millrace import errors
from millrace.cleanup.protection import read_store_clock
from millrace.storage import (
    DeleteFailure,
    StoreSpec,
    abort_upload,
    list_uploads,
    measure_upload,
    open_store,
)


@dataclass(frozen=True, slots=True)
class StaleUploadsResult:
    """Result of a search for unfinished uploads.

    Attributes:
        uploads: Key of each upload, and its billed bytes.
        recent: Number of uploads that are not old enough.
        failures: Uploads that could not be aborted.
        is_aborted: Whether the uploads were aborted, or only found.
    """

    uploads: tuple[tuple[str, int], ...]
    recent: int
    failures: tuple[DeleteFailure, ...]
    is_aborted: bool

    @property
    def size(self) -> int:
        """Bytes of the old uploads, without those that could not be aborted."""
        failed = {failure.key for failure in self.failures}
        return sum(size for key, size in self.uploads if key not in failed)


def abort_uploads(
    spec: StoreSpec, *, older_than: timedelta, prefix: str = "", dry_run: bool = True
) -> StaleUploadsResult:
    """Find, or abort, the unfinished uploads of a store.

    Args:
        spec: Store, with credentials to write.
        older_than: Least age by the store's clock. Choose it longer than any upload takes.
        prefix: Prefix of the keys.
        dry_run: Whether the uploads are only found.

    Raises:
        DeniedError: The credentials may not list uploads.
    """
    store = open_store(spec, make_folder=False)
    horizon = read_store_clock(store).now() - older_than
    keys: list[tuple[str, int]] = []
    failures: list[DeleteFailure] = []
    recent = 0
    for upload in list_uploads(store, prefix):
        if upload.started_at >= horizon:
            recent += 1
            continue
        size = 0
        try:
            size = measure_upload(store, upload)
            if not dry_run:
                abort_upload(store, upload)
        except errors.MillraceError as error:
            failures.append(DeleteFailure(upload.key, errors.format_error(error)))
        keys.append((upload.key, size))
    return StaleUploadsResult(tuple(keys), recent, tuple(failures), is_aborted=not dry_run)
