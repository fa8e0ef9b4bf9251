"""Check names that become part of a key."""

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

from millrace.errors import ConfigurationError

RESERVED_FOLDERS = frozenset(
    {"shards", "commits", "partitions", "quarantine", "transforms", "lease"}
)
"""Folders that a dataset has. No part of a dataset's, a job's or a rental's name may equal one."""
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*"
MAX_LENGTH = 200
"""Largest number of characters of a name."""
MAX_DEPTH = 16
"""Largest number of folders in a name. A cleanup may read the leases of each folder."""

_NAME = re.compile(NAME_PATTERN)


def check_name(name: str, *, what: str) -> str:
    """Return a name without outer slashes, checked to be safe in a key of every store.

    Args:
        name: Name to check.
        what: Subject of the error message, such as "The job's name".

    Raises:
        ConfigurationError: The name is empty, too long, or has a character that a store changes.
    """
    name = name.strip("/")
    if not _NAME.fullmatch(name) or len(name) > MAX_LENGTH or is_too_deep(name):
        raise ConfigurationError(
            f"{what} {name!r} cannot be part of an object's name: write letters, digits, "
            f"'.', '_' and '-', with '/' between folders, at most {MAX_LENGTH} characters and "
            f"{MAX_DEPTH} folders."
        )
    return name


def is_too_deep(name: str) -> bool:
    """Decide whether a name has more than `MAX_DEPTH` folders."""
    return name.count("/") >= MAX_DEPTH


@lru_cache(maxsize=1024)
def is_valid_name(keys: Callable[[str], object], name: str) -> bool:
    """Decide whether a class of keys accepts a name.

    Args:
        keys: Class, such as `DatasetKeys`, that raises `ConfigurationError` for other names.
        name: Name to decide about.
    """
    try:
        keys(name)
    except ConfigurationError:
        return False
    return True


def is_plain(key: str) -> bool:
    """Decide whether a key stays below its folder when it is used as a file's path.

    A plain key is relative. It has no empty, ``.`` or ``..`` segment, no backslash, and only
    printable characters.
    """
    return {"", ".", ".."}.isdisjoint(key.split("/")) and "\\" not in key and key.isprintable()


def find_common_prefix(keys: Iterable[str]) -> str:
    """Return the longest common prefix of some keys, which may end within a folder's name."""
    some = list(keys)
    first, last = min(some, default=""), max(some, default="")
    size = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), None)
    return first[: min(len(first), len(last)) if size is None else size]
