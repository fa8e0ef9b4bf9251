"""Unfinished uploads of a store, which are billed, but are not listed as objects."""

from datetime import timedelta

from millrace import deletion
from millrace.cleanup.protection import read_store_clock
from millrace.deletion import StaleUploads
from millrace.storage import StoreSpec, open_store


def find_stale_uploads(spec: StoreSpec, *, older_than: timedelta, prefix: str = "") -> StaleUploads:
    """Find the unfinished uploads of a store, and abort none.

    Args:
        spec: Store, with credentials to write.
        older_than: Least age by the store's clock. Choose it longer than any upload takes.
        prefix: Prefix of the keys.

    Raises:
        DeniedError: The credentials may not list uploads.
    """
    store = open_store(spec, make_folder=False)
    before = read_store_clock(store).now() - older_than
    return deletion.find_stale_uploads(store, before, prefix=prefix)


def abort_uploads(spec: StoreSpec, found: StaleUploads) -> StaleUploads:
    """Abort the uploads that `find_stale_uploads` found, and no others.

    Returns:
        The same uploads, with those that could not be aborted as failures.
    """
    return deletion.abort_uploads(open_store(spec, make_folder=False), found)
