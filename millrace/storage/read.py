"""Read objects: whole, by range, as a stream of blocks, or only what describes them."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import obstore

from millrace import errors
from millrace.digest import sha256_of
from millrace.storage.open import Backend, Store
from millrace.storage.retry import trying

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta

BLOCK = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Stat:
    """Description of an object by its store.

    Attributes:
        key: Its key, below the store's URL.
        size: Bytes.
        etag: The store's name for this content of it; None where the store has none.
        last_modified: By the store's clock.
    """

    key: str
    size: int
    etag: str | None
    last_modified: datetime


def stat_of(meta: "ObjectMeta") -> Stat:
    """Our record of obstore's description."""
    return Stat(meta["path"], meta["size"], meta["e_tag"], meta["last_modified"])


def head(store: Store, key: str) -> Stat:
    """Describe an object. One request.

    Raises:
        NotFoundError: There is none.
    """
    return stat_of(trying(store, key, lambda: obstore.head(store.raw, key)))


def exists(store: Store, key: str) -> bool:
    """Tell whether there is such an object. One request."""
    try:
        head(store, key)
    except errors.NotFoundError:
        return False
    return True


def read(store: Store, key: str, *, etag: str | None = None, largest: int | None = None) -> bytes:
    """Read the whole of an object into memory: for records and small files. One request.

    Args:
        store: Where it is.
        key: Which.
        etag: Only this content of it.
        largest: The most bytes that it may have, of an object that others may write.

    Raises:
        NotFoundError: There is none.
        ChangedError: Its ETag is another.
        CorruptError: It is larger. No more of it is read.
    """

    def get() -> bytes:
        found = obstore.get(store.raw, key, options=_if_match(etag))
        if largest is None:
            return bytes(found.bytes())
        if (size := found.meta["size"]) > largest:
            raise errors.CorruptError(
                f"{store.url_of(key)} has {size} bytes, more than {largest}, which is the most "
                "that it may have. It was not read."
            )
        return _bounded(store, key, found, largest)

    return trying(store, key, get)


def read_into(store: Store, key: str, into: memoryview) -> int:
    """Read an object into a buffer. One request; a file without a copy in between.

    Returns:
        The object's size: more than the buffer's if it does not fit, and then nothing is written.

    Raises:
        NotFoundError: There is none.
    """

    def get() -> int:
        if store.location.backend is Backend.FILE:
            with (Path(store.location.bucket) / key).open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                at = 0
                while size <= len(into) and at < size:
                    got = file.readinto(into[at : min(size, at + BLOCK)])
                    if not got:
                        return at  # it was cut meanwhile
                    at += got
                return size
        found = obstore.get(store.raw, key)
        size = found.meta["size"]
        if size <= len(into):
            body = _bounded(store, key, found, size)
            into[: len(body)] = body
        return size

    return trying(store, key, get)


def read_range(store: Store, key: str, start: int, end: int, *, etag: str | None = None) -> bytes:
    """Read bytes ``start`` to ``end`` (exclusive); fewer where it ends before. One request.

    Raises:
        NotFoundError: There is none.
        ChangedError: Its ETag is another.
        CorruptError: The store sends more than was asked for. No more of it is read.
    """
    if start >= end:
        return b""
    options: GetOptions = {**_if_match(etag), "range": (start, end)}

    def get() -> bytes:
        return _bounded(store, key, obstore.get(store.raw, key, options=options), end - start)

    return trying(store, key, get)


def _bounded(store: Store, key: str, found: "GetResult", most: int) -> bytes:
    """Read a body up to a limit, whatever length its headers announce.

    Raises:
        CorruptError: It is longer.
    """
    parts: list[bytes] = []
    size = 0
    for part in found.stream(min_chunk_size=min(most + 1, BLOCK)):
        parts.append(bytes(part))
        size += len(part)
        if size > most:
            raise errors.CorruptError(
                f"{store.url_of(key)}: more than {most} bytes come, which is the most that may."
            )
    return parts[0] if len(parts) == 1 else b"".join(parts)


def stream(
    store: Store,
    key: str,
    *,
    start: int = 0,
    end: int | None = None,
    etag: str | None = None,
    block: int = BLOCK,
    ahead: int = 2,
) -> Iterator[bytes]:
    """Yield the blocks of an object in order; the next ones are fetched while one is used.

    A body that breaks off costs one block again, not the whole. All blocks are of one content:
    the first answer's ETag is asked for in every later request.

    Args:
        store: Where it is.
        key: Which.
        start: The first byte.
        end: One past the last byte; the object's end by default.
        etag: Only this content of it.
        block: Bytes a request. Memory is at most ``block * (ahead + 1)``.
        ahead: Requests on their way besides the block in use.

    Raises:
        NotFoundError: There is none.
        ChangedError: It was replaced, before or meanwhile.
    """
    if end is None or etag is None:
        now = head(store, key)
        if etag is not None and now.etag != etag:
            raise errors.ChangedError(
                f"{store.url_of(key)} is no longer the object that was meant."
            )
        end, etag = now.size if end is None else min(end, now.size), now.etag
    offsets = iter(range(start, end, block))
    with ThreadPoolExecutor(max_workers=max(1, ahead), thread_name_prefix="read") as pool:
        waiting: list[tuple[int, Future[bytes]]] = []
        try:
            while True:
                while len(waiting) <= ahead and (at := next(offsets, None)) is not None:
                    stop = min(at + block, end)
                    part = pool.submit(read_range, store, key, at, stop, etag=etag)
                    waiting.append((stop - at, part))
                if not waiting:
                    return
                size, part = waiting.pop(0)
                data = part.result()
                if len(data) != size:
                    raise errors.ChangedError(
                        f"{store.url_of(key)} is shorter than it was when it was listed."
                    )
                yield data
        finally:
            for _, part in waiting:
                part.cancel()


def difference(
    store: Store,
    key: str,
    size: int,
    sha256: str | None = None,
    *,
    stopped: Callable[[], bool] = lambda: False,
) -> str:
    """Describe how an object differs from what was written, in a few words.

    Empty if it is the same.

    Args:
        store: Where it is.
        key: Which.
        size: Bytes that it should have. One request.
        sha256: The digest that it should have: all of it is read. By default it is not.
        stopped: Whether to break off, asked after each block.

    Raises:
        StoppedError: It was broken off.
    """
    try:
        found = _described(store, key)
        if found.size != size:
            return f"{found.size} bytes, not {size}"
        if sha256 is not None and sha256_of(_until(stopped, stream(store, key)))[0] != sha256:
            return "its bytes are not those that were written (SHA-256 differs)"
    except errors.NotFoundError:
        return "missing"
    except errors.ChangedError:
        return "it is being replaced"
    except errors.CorruptError:
        return "the store cannot read it"
    return ""


def _described(store: Store, key: str) -> Stat:
    """Describe an object, as `head` does.

    Raises:
        CorruptError: The store cannot read it. It answers a HEAD without a reason, and a GET with.
    """
    try:
        return head(store, key)
    except (errors.NotFoundError, errors.UnavailableError):
        raise
    except errors.MillraceError:
        read_range(store, key, 0, 1)
        raise


def _until(stopped: Callable[[], bool], blocks: Iterator[bytes]) -> Iterator[bytes]:
    for block in blocks:
        if stopped():
            raise errors.StoppedError("The verification was called off.")
        yield block


def _if_match(etag: str | None) -> "GetOptions":
    return {} if etag is None else {"if_match": etag}
