"""Find locations of stores that overlap: a bucket has several URLs, and links lead to folders."""

from pathlib import Path

from millrace.storage.locations import Backend
from millrace.storage.open import Store


def locate_prefix(store: Store, prefix: str = "") -> tuple[tuple[str, str], str]:
    """Return the bucket of a store, and the path of a prefix there, with a slash at its end.

    Two locations overlap if their buckets are equal and one path starts with the other. All folders
    are in one bucket, and links in their paths are resolved. Nothing is sent.

    Args:
        store: Store of the prefix.
        prefix: Folder below the store's URL, as in keys; empty for the whole store.
    """
    if store.location.backend is Backend.FILE:
        folder = Path(store.location.bucket, prefix).resolve()
        return ("", ""), f"{folder}".rstrip("/") + "/"
    path = "/".join(filter(None, (store.location.prefix, prefix)))
    return store.bucket_id, f"{path}/" if path else ""
