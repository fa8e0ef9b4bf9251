"""Unfinished uploads of a store, which are billed, but are not listed as objects."""

from datetime import timedelta

from millrace import deletion
from millrace.cleanup.protection import read_store_clock
from millrace.deletion import StaleUploads
from millrace.keys.kinds import classify_key
from millrace.storage import Backend, StoreSpec, open_store


def find_stale_uploads(
    spec: StoreSpec, *, older_than: timedelta, prefix: str = "", any_name: bool = False
) -> StaleUploads:
    """Find the unfinished uploads of a store, and abort none.

    In a folder, only partial files of objects that Millrace names are unfinished uploads. Another
    file with such a name, as ``Invoice #12``, may be finished.

    Args:
        spec: Store, with credentials to write.
        older_than: Least age by the store's clock. Choose it longer than any upload takes.
        prefix: Prefix of the keys.
        any_name: Whether to include all partial files of a folder.

    Raises:
        DeniedError: The credentials may not list uploads.
    """
    store = open_store(spec, make_folder=False)
    before = read_store_clock(store).now() - older_than
    has_any_names = any_name or store.location.backend is not Backend.FILE
    return deletion.find_stale_uploads(
        store,
        before,
        prefix=prefix,
        is_included=lambda key: has_any_names or classify_key(key) is not None,
    )


def abort_uploads(spec: StoreSpec, found: StaleUploads) -> StaleUploads:
    """Abort the uploads that `find_stale_uploads` found, and no others.

    Returns:
        The same uploads, with those that could not be aborted as failures.
    """
    return deletion.abort_uploads(open_store(spec, make_folder=False), found)
