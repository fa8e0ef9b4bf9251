"""Check the keys of objects before a request.

obstore drops the slashes at both ends of a key, so ``a/`` would address the object ``a``. obstore
refuses other keys. An S3-compatible bucket may have objects with such keys: `list_objects` lists
them, `delete` deletes them, and `millrace.storage.exact` lists them unchanged. In GCS, this holds
for empty objects whose keys end in a slash.
"""

import re

from millrace.errors import ConfigurationError
from millrace.formatting import clean_text
from millrace.storage.clients import make_full_key
from millrace.storage.locations import CONTROL, Backend
from millrace.storage.open import Store

_MAX_SIZE = 1024  # bytes of a key in a bucket: the limit of S3, R2 and GCS
_PARTIAL_FILE = re.compile(r"#\d+$")


def check_key(store: Store, key: str) -> None:
    """Check the key of an object that obstore is to read, write, copy or sign. Sends nothing.

    Raises:
        ConfigurationError: obstore would refuse the key, or address another object.
    """
    if fault := find_key_fault(store, key):
        raise make_key_error(store, key, fault)


def make_key_error(store: Store, key: str, fault: str) -> ConfigurationError:
    """Return the error of an invalid key."""
    return ConfigurationError(
        f"{clean_text(store.make_url(key))}: the key is invalid ({fault}). Choose another key. If "
        "there is an object with this key, rename the object, or delete it with the store's own "
        "tools."
    )


def find_key_fault(store: Store, key: str) -> str:
    """Return the reason why obstore cannot address an object; empty if obstore can."""
    if fault := find_size_fault(store, key):
        return fault
    if not key or key.startswith("/") or key.endswith("/"):
        return "it is empty, or has a slash at an end"
    if fault := find_segment_fault(key):
        return fault
    if store.location.backend is Backend.FILE and _PARTIAL_FILE.search(key):
        return "in a folder, names that end in # and a number belong to unfinished writes"
    return ""


def find_segment_fault(key: str) -> str:
    """Return the reason why obstore and folders refuse a key by its names; empty if they do not."""
    if not {"", ".", ".."}.isdisjoint(key.split("/")):
        return "it has an empty or a relative segment"
    return "it has a control character" if CONTROL.search(key) else ""


def find_size_fault(store: Store, key: str) -> str:
    """Return the reason why no object can have a key of this length; empty if one can."""
    try:
        size = len(make_full_key(store, key).encode())
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    if not size:
        return "it is empty"
    if size > _MAX_SIZE and store.location.backend is not Backend.FILE:
        return f"with its prefix it has {size:,} bytes, and may have {_MAX_SIZE:,}"
    return ""
