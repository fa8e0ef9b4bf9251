"""Descriptions of objects, and checks of the answers to reads."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from millrace import errors
from millrace.storage.open import Store

if TYPE_CHECKING:
    from obstore import ObjectMeta

READ_BLOCK_SIZE = 8 * 1024 * 1024
"""Bytes of a request, and of a part of a body, unless a caller names another size."""


@dataclass(frozen=True, slots=True)
class Stat:
    """Description of an object by its store.

    Attributes:
        key: Key below the store's URL.
        size: Size in bytes.
        etag: Identifier of the content, from the store; None if the store has none.
        last_modified: Time of the last write, by the store's clock.
    """

    key: str
    size: int
    etag: str | None
    last_modified: datetime


def make_stat(meta: "ObjectMeta") -> Stat:
    """Return the description of an object, from obstore's description."""
    return Stat(meta["path"], meta["size"], meta["e_tag"], meta["last_modified"])


def join_blocks(store: Store, key: str, blocks: Iterable[bytes], max_size: int) -> bytes:
    """Join the blocks of an object's body up to a limit.

    Raises:
        CorruptError: The body is longer than ``max_size``.
    """
    parts: list[bytes] = []
    size = 0
    for part in blocks:
        parts.append(part)
        size += len(part)
        if size > max_size:
            raise make_excess_error(store, key, max_size)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def make_excess_error(store: Store, key: str, max_size: int) -> errors.CorruptError:
    """Return the error of an answer with more bytes than ``max_size``."""
    return errors.CorruptError(
        f"{store.make_url(key)}: the store sends more than the {max_size} bytes that are allowed. "
        "The rest was not read."
    )


def check_etag(store: Store, key: str, etag: str | None, found: str | None) -> None:
    """Compare the ETag of an answer with the requested one, if there are both.

    Some stores and proxies ignore ``If-Match``. A proxy that compresses marks an ETag as weak.

    Raises:
        ChangedError: The object has another ETag.
    """
    if etag and found and _strip_etag(etag) != _strip_etag(found):
        raise make_changed_error(store, key)


def check_size(store: Store, key: str, size: int | None, found: int) -> None:
    """Compare the size of an object with the expected one, if there is one.

    Raises:
        ChangedError: The object has another size.
    """
    if size is not None and found != size:
        raise errors.ChangedError(f"{store.make_url(key)} has {found:,} bytes, not {size:,}.")


def check_content_range(store: Store, key: str, size: int | None, header: str) -> None:
    """Compare the size in a ``Content-Range`` (``bytes 0-5/11``) with the expected one.

    Raises:
        ChangedError: The object has another size.
    """
    total = header.rpartition("/")[2]
    if total.isdecimal():
        check_size(store, key, size, int(total))


def make_changed_error(store: Store, key: str) -> errors.ChangedError:
    """Return the error of an object with another ETag than the requested one."""
    return errors.ChangedError(
        f"{store.make_url(key)} was replaced: its ETag is no longer the one that was requested."
    )


def _strip_etag(etag: str) -> str:
    return etag.removeprefix("W/").strip('"')
