"""Names that are safe as part of a key on every store, and the folders that they may not have."""

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

from millrace.errors import ConfigurationError

RESERVED_FOLDERS = frozenset({"shards", "commits", "partitions", "quarantine", "lease"})
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*"
_NAME = re.compile(NAME_PATTERN)


def check_name(name: str, *, what: str) -> str:
    """Return a name that is safe as part of a key, on every store we know.

    Raises:
        ConfigurationError: It is empty, too long, or has a character that some store changes.
    """
    name = name.strip("/")
    if not _NAME.fullmatch(name) or len(name) > 200:
        raise ConfigurationError(
            f"{what} {name!r} cannot be part of an object's name: write letters, digits, "
            "'.', '_' and '-', with '/' between folders, at most 200 characters."
        )
    return name


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
    """Decide whether a key is a path that stays below its folder on every machine.

    Such a key is relative, has no empty, ``.`` or ``..`` segment, no backslash and no character
    that does not print.
    """
    return {"", ".", ".."}.isdisjoint(key.split("/")) and "\\" not in key and key.isprintable()


def find_common_prefix(keys: Iterable[str]) -> str:
    """Return the longest beginning that all of these share, be it a whole folder's name or not."""
    some = list(keys)
    first, last = min(some, default=""), max(some, default="")
    size = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), None)
    return first[: min(len(first), len(last)) if size is None else size]
