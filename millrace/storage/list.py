"""List objects and folders."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import obstore
from obstore.exceptions import BaseError

from millrace import errors
from millrace.storage.answers import Stat, make_stat
from millrace.storage.locations import Backend
from millrace.storage.open import Store
from millrace.storage.read import exists
from millrace.storage.retry import (
    RetryLoop,
    call_with_retries,
    is_key_error,
    translate_error,
)

PAGE_SIZE = 1000


def marks_folder(stat: Stat) -> bool:
    """Decide whether an object of an exact listing is empty and marks a folder, as consoles do."""
    return stat.key.endswith("/") and stat.size == 0


def list_objects(
    store: Store, prefix: str = "", *, after: str = "", exact: bool = False
) -> Iterator[Stat]:
    """List the objects whose keys start with a prefix, one page in memory at a time.

    Objects come in the order of their keys, except for those of a local folder. One request per
    page of 1,000. The listing of an S3-compatible bucket has every key, also keys that other verbs
    refuse (with an empty segment, ``..`` or control characters).

    Args:
        store: Store to list.
        prefix: Any text that the keys start with, not only a folder's name.
        after: Key after which the listing begins.
        exact: Whether to keep the slash at the end of keys. For S3 and R2, this imports boto3. For
            GCS, one more request for each empty object finds those that mark folders. Otherwise
            the slash may be missing, but no key is listed twice.

    Raises:
        DeniedError: The credentials may not list.
        UnavailableError: The store failed for longer than its time budget.
    """
    if (exact or store.is_foreign or store.has_lost_client) and store.is_s3_compatible:
        yield from _list_exact_keys(store, prefix, after)
        return
    folder = prefix.rpartition("/")[0]
    is_ordered = store.location.backend is not Backend.FILE
    offset = max(after, _make_offset(prefix)) if is_ordered else after
    retries = RetryLoop(store, prefix, is_fork_safe=not store.is_remote)
    while True:
        has_advanced = False
        retries.wait_for_throttle()
        try:
            # `raw` tries once, since obstore does not retry after a page's body was cut off.
            pages = obstore.list(  # pyright: ignore[reportUnknownMemberType] - Arrow overload
                store.raw, folder or None, offset=offset or None, chunk_size=PAGE_SIZE
            )
            for page in pages:
                for meta in page:
                    stat = _restore_key(store, make_stat(meta), offset, folder, exact=exact)
                    if not stat.key.startswith(prefix):
                        if is_ordered and stat.key > prefix:
                            return
                        continue
                    if stat.key == offset:  # with a slash at its end, and listed before an error
                        continue
                    has_advanced, offset = True, stat.key
                    yield stat
        except (BaseError, OSError, ValueError) as error:
            # The listing has, or begins after, a key that obstore refuses.
            if is_key_error(error) and store.is_s3_compatible:
                yield from _list_exact_keys(store, prefix, offset)
                return
            if has_advanced and not is_ordered:
                raise translate_error(error, store, prefix) from error
            if has_advanced:
                retries = RetryLoop(store, prefix)  # for a request after the last key
            retries.wait_after_error(error)
            continue
        return


def _restore_key(store: Store, stat: Stat, last: str, folder: str, *, exact: bool) -> Stat:
    """Append the slash that obstore has dropped from a key.

    A key out of order had one. So had the key of an object that is listed below itself, and that of
    an empty object under whose key there is nothing.

    Args:
        store: Store of the listing.
        stat: Object as obstore lists it.
        last: Key before it; empty if there is none.
        folder: Folder that is listed, without a slash; empty if there is none.
        exact: Whether to restore all keys of empty objects of GCS. One request for each.
    """
    is_ordered = store.location.backend is not Backend.FILE
    is_shortened = is_ordered and bool(last) and stat.key <= last
    if exact and store.location.backend is Backend.GS and not is_shortened:
        is_shortened = stat.key == folder or (not stat.size and _is_missing(store, stat.key))
    return replace(stat, key=f"{stat.key}/") if is_shortened else stat


def _is_missing(store: Store, key: str) -> bool:
    """Decide whether there is no object under a key; false if the credentials may not look."""
    try:
        return not exists(store, key)
    except errors.DeniedError:
        return False


def list_sorted_keys(store: Store, prefix: str) -> Iterator[str]:
    """List the keys that start with a prefix, in their order.

    The listing of a local folder has no order, so all of its keys are held in memory.

    Raises:
        DeniedError, UnavailableError: The listing failed, as in `list_objects`.
    """
    keys = (stat.key for stat in list_objects(store, prefix))
    return iter(sorted(keys)) if store.location.backend is Backend.FILE else keys


def list_fairly(
    store: Store, prefix: str, *, depth: int = 1, limit: int, within: str = ""
) -> Iterator[Stat]:
    """List objects like `list_objects`, up to a limit for each folder.

    So the owner of one folder cannot make the listing long for other readers. The first objects of
    a folder are listed. The next request begins after the folder, and skips the rest.

    Args:
        store: Store to list.
        prefix: Prefix of the keys, which ends in ``/``.
        depth: Number of folder levels below the prefix that identify an owner.
        limit: Largest number of listed objects of a folder.
        within: Folder below the prefix, which ends in ``/``, whose own folders have the limit. The
            depth then counts from there, and all other objects are listed. By default, folders
            below the prefix have it.

    Raises:
        DeniedError, UnavailableError: The listing failed, as in `list_objects`.
    """
    limited_prefix = f"{prefix}{within}"
    is_ordered = store.location.backend is not Backend.FILE
    counts: Counter[str] = Counter()
    after: str | None = ""
    while after is not None:
        stats, after = list_objects(store, prefix, after=after), None
        for stat in stats:
            is_limited = stat.key.startswith(limited_prefix)
            rest = stat.key.removeprefix(limited_prefix) if is_limited else ""
            folders = rest.split("/")[:-1][:depth]
            folder = "/".join(folders)
            if is_ordered and folder not in counts:
                counts.clear()  # no key of an earlier folder follows
            counts[folder] += bool(folders)
            if counts[folder] <= limit:
                yield stat
            elif is_ordered:
                after = f"{limited_prefix}{folder}0"  # the character that follows a slash
                break


def _list_exact_keys(store: Store, prefix: str, after: str) -> Iterator[Stat]:
    from millrace.storage.exact import ExactListing  # noqa: PLC0415 - imports boto3

    pages, more = ExactListing(store, prefix, after), True
    while more:
        objects, _, more = pages.fetch_page()
        yield from objects


def list_folders(store: Store, prefix: str = "") -> list[str]:
    """Return the names of the folders directly below a prefix.

    Args:
        store: Store to list.
        prefix: Prefix that ends in ``/``, or is empty.
    """

    def fetch_names() -> list[str]:
        found = obstore.list_with_delimiter(  # pyright: ignore[reportUnknownMemberType]
            store.raw, prefix.rstrip("/") or None
        )
        return [name.rpartition("/")[2] for name in found["common_prefixes"]]

    if store.has_lost_client and store.location.backend is Backend.FILE:
        from millrace.storage.after_fork import list_folders_after_fork  # noqa: PLC0415 - as above

        return list_folders_after_fork(store, prefix)
    if not ((store.is_foreign or store.has_lost_client) and store.is_s3_compatible):
        try:
            return call_with_retries(store, prefix, fetch_names)
        except errors.ConfigurationError:  # obstore refuses a key
            if not store.is_s3_compatible:
                raise
    from millrace.storage.exact import ExactListing  # noqa: PLC0415 - imports boto3

    pages, more, names = ExactListing(store, prefix, delimiter="/"), True, list[str]()
    while more:
        _, folders, more = pages.fetch_page()
        names += [name for folder in folders if (name := folder.removeprefix(prefix)[:-1])]
    return names


def _make_offset(prefix: str) -> str:
    """Return a key just before all keys that start with the prefix, since offsets are exclusive."""
    if not prefix or prefix.endswith("/") or not prefix.isascii() or prefix[-1] <= "!":
        return ""
    before = "." if prefix[-1] == "0" else chr(ord(prefix[-1]) - 1)  # a slash would end a segment
    return f"{prefix[:-1]}{before}~"
