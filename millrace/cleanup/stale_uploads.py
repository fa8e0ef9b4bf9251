"""Unfinished uploads of a store, which are billed, but are not listed as objects."""

from datetime import timedelta

from millrace import deletion
from millrace.cleanup.planner import refuse_root
from millrace.cleanup.protection import read_store_clock
from millrace.deletion import StaleUploads
from millrace.keys.kinds import classify_key
from millrace.storage import Backend, StoreSpec, open_store
from millrace.storage.folders import is_partial_file


def find_stale_uploads(spec: StoreSpec, *, older_than: timedelta, prefix: str = "") -> StaleUploads:
    """Find the unfinished uploads of a store, and abort none.

    In a folder, unfinished uploads are partial files of copies, and those of objects that Millrace
    names. Another file with such a name, as ``Invoice #12``, may be finished.

    Args:
        spec: Store, with credentials to write.
        older_than: Least age by the store's clock. Choose it longer than any upload takes.
        prefix: Prefix of the keys.

    Raises:
        ConfigurationError: The store is the root of the file system.
        DeniedError: The credentials may not list uploads.
    """
    store = open_store(spec, make_folder=False)
    refuse_root(store)
    before = read_store_clock(store).now() - older_than
    is_folder = store.location.backend is Backend.FILE
    return deletion.find_stale_uploads(
        store,
        before,
        prefix=prefix,
        is_included=lambda one: (
            not is_folder or is_partial_file(one) or classify_key(one.key) is not None
        ),
    )


def abort_uploads(spec: StoreSpec, found: StaleUploads) -> StaleUploads:
    """Abort the uploads that `find_stale_uploads` found, and no others.

    Returns:
        The same uploads, with those that could not be aborted as failures.
    """
    return deletion.abort_uploads(open_store(spec, make_folder=False), found)
