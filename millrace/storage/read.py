"""Verbs that read objects, parts of objects, or their descriptions."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import obstore

from millrace import errors
from millrace.digest import (
    BLOCK_SIZE,
    BlockHasher,
    describe_blocks,
    find_differing_blocks,
    get_algorithm,
    make_hasher,
)
from millrace.storage.answers import (
    READ_BLOCK_SIZE,
    Stat,
    check_etag,
    check_size,
    join_blocks,
    make_changed_error,
    make_excess_error,
    make_stat,
)
from millrace.storage.locations import Backend
from millrace.storage.object_keys import check_key, find_key_fault
from millrace.storage.open import Store
from millrace.storage.retry import call_with_retries

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult

_MAX_VECTORS = os.sysconf("SC_IOV_MAX")  # buffers of one read


def head(store: Store, key: str) -> Stat:
    """Describe an object. One request.

    Raises:
        ConfigurationError: The key is invalid.
        NotFoundError: There is no such object.
    """
    check_key(store, key)
    if store.has_lost_client:
        from millrace.storage.after_fork import head_after_fork  # noqa: PLC0415 - imports urllib3

        return head_after_fork(store, key)
    return make_stat(call_with_retries(store, key, lambda: obstore.head(store.raw, key)))


def exists(store: Store, key: str) -> bool:
    """Decide whether an object exists. One request."""
    try:
        head(store, key)
    except errors.NotFoundError:
        return False
    return True


def read(store: Store, key: str, *, etag: str | None = None, max_size: int | None = None) -> bytes:
    """Read a record or another small object into memory. One request.

    Args:
        store: Store of the object.
        key: Key of the object.
        etag: ETag that the object must have.
        max_size: Largest size in bytes. Pass a limit for objects that others may write.

    Raises:
        NotFoundError: There is no such object.
        ChangedError: The object has another ETag.
        CorruptError: The object is larger than ``max_size``. The rest is not read.
    """
    check_key(store, key)
    if store.has_lost_client:
        from millrace.storage.after_fork import read_after_fork  # noqa: PLC0415 - imports urllib3

        return read_after_fork(store, key, etag=etag, max_size=max_size)

    def fetch() -> bytes:
        found = obstore.get(store.raw, key, options=_make_match_options(etag))
        check_etag(store, key, etag, found.meta["e_tag"])
        if max_size is None:
            return bytes(found.bytes())
        if (size := found.meta["size"]) > max_size:
            raise errors.CorruptError(
                f"{store.make_url(key)} has {size} bytes, more than the {max_size} that are "
                "allowed. It was not read."
            )
        return _read_body(store, key, found, max_size)

    return call_with_retries(store, key, fetch)


def read_and_hash(
    store: Store, key: str, buffers: Sequence[memoryview], *, size: int, start: int = 0
) -> bytes:
    """Read a range of an object into consecutive buffers, and return the digests of its blocks.

    Each block is hashed right after its read, while the processor's cache has it. One request. The
    range is as long as the buffers together. A file is read without another copy.

    Args:
        store: Store of the object.
        key: Key of the object.
        buffers: Buffers for the bytes. A failed read may have filled some of them.
        size: Expected size of the whole object in bytes.
        start: Offset of the first byte, where a block begins.

    Returns:
        Joined digests of the blocks; empty if the object has another size.

    Raises:
        NotFoundError: There is no such object.
        CorruptError: The store sends more bytes than were requested. The rest is not read.
    """
    check_key(store, key)
    count = sum(map(len, buffers))

    def fetch() -> bytes:
        if store.location.backend is Backend.FILE:
            with (Path(store.location.bucket) / key).open("rb", buffering=0) as file:
                is_right = os.fstat(file.fileno()).st_size == size
                return _hash_file(file.fileno(), buffers, start) if is_right else b""
        if store.is_foreign and count != size:  # `read_range` has the rules of foreign stores
            found_size, body = size, iter([read_range(store, key, start, start + count)])
        else:
            options: GetOptions = {} if count == size else {"range": (start, start + count)}
            found = obstore.get(store.raw, key, options=options)
            found_size = found.meta["size"]
            body = map(memoryview, found.stream(min_chunk_size=BLOCK_SIZE))
        return _hash_body(store, key, body, buffers, count) if found_size == size else b""

    is_file = store.location.backend is Backend.FILE
    return call_with_retries(store, key, fetch, is_fork_safe=is_file)


def read_views_and_hash(
    store: Store, key: str, start: int, end: int, *, size: int
) -> tuple[list[memoryview], bytes]:
    """Return a range of an object as consecutive views, and the digests of its blocks.

    The bytes stay where they have arrived, without another copy. One request.

    Args:
        store: Store of the object.
        key: Key of the object.
        start: Offset of the first byte, where a block begins.
        end: Offset after the last one.
        size: Expected size of the whole object in bytes.

    Returns:
        Views, and joined digests; both empty if the object has another size.

    Raises:
        NotFoundError: There is no such object.
        CorruptError: The store sends more bytes than were requested. The rest is not read.
    """
    check_key(store, key)
    if store.location.backend is Backend.FILE or store.is_foreign:
        body = memoryview(bytearray(end - start))
        digests = read_and_hash(store, key, [body], size=size, start=start)
        return ([body] if digests else []), digests

    def fetch() -> tuple[list[memoryview], bytes]:
        options: GetOptions = {} if end - start == size else {"range": (start, end)}
        found = obstore.get(store.raw, key, options=options)
        if found.meta["size"] != size:
            return [], b""
        hasher, views = BlockHasher(), list[memoryview]()
        for part in found.stream(min_chunk_size=BLOCK_SIZE):
            views.append(memoryview(part))
            hasher.update(views[-1])
            if hasher.size > end - start:
                raise make_excess_error(store, key, end - start)
        return (views, hasher.blocks) if hasher.size == end - start else ([], b"")

    return call_with_retries(store, key, fetch)


def hash_damaged_file(store: Store, key: str, buffer: memoryview) -> bytes:
    """Read the beginning of a file of any size into a buffer, and return the digests of its blocks.

    Args:
        store: Store of the file.
        key: Key of the file.
        buffer: Buffer for the bytes. Only blocks with digests are read whole.

    Returns:
        Joined digests; empty if the store is no folder, or the file cannot be read.
    """
    if store.location.backend is not Backend.FILE or find_key_fault(store, key):
        return b""
    try:
        with (Path(store.location.bucket) / key).open("rb", buffering=0) as file:
            return _hash_file(file.fileno(), [buffer], 0)
    except OSError:
        return b""


def _hash_file(file: int, buffers: Sequence[memoryview], start: int) -> bytes:
    """Read a range of a file into buffers, and return the digests of its blocks.

    The digests of a truncated file have fewer bytes, or belong to fewer bytes.
    """
    hasher = BlockHasher()
    for block in _iterate_blocks(buffers):
        count = sum(map(len, block))
        got = os.preadv(file, block, start) if len(block) <= _MAX_VECTORS else 0
        at = 0
        for view in block:
            while at + len(view) > got:  # a signal interrupted the read, or the file is truncated
                more = os.preadv(file, [view[max(0, got - at) :]], start + got)
                if not more:
                    return hasher.blocks
                got += more
            hasher.update(view)
            at += len(view)
        start += count
    return hasher.blocks


def _hash_body(
    store: Store,
    key: str,
    body: Iterable[bytes | memoryview],
    buffers: Sequence[memoryview],
    count: int,
) -> bytes:
    """Copy a body into buffers, and return the digests of its blocks; empty if it is too short."""
    hasher, targets = BlockHasher(), iter(buffers)
    target = memoryview(b"")
    for part in body:
        view = memoryview(part)
        if hasher.size + len(view) > count:
            raise make_excess_error(store, key, count)
        hasher.update(view)
        while view:
            while not target:
                target = next(targets)
            step = min(len(view), len(target))
            target[:step] = view[:step]
            view, target = view[step:], target[step:]
    return hasher.blocks if hasher.size == count else b""


def _iterate_blocks(buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the parts of consecutive buffers that make each block."""
    block: list[memoryview] = []
    room = BLOCK_SIZE
    for buffer in buffers:
        view = buffer
        while view:
            block.append(view[:room])
            view, room = view[len(block[-1]) :], room - len(block[-1])
            if not room:
                yield block
                block, room = [], BLOCK_SIZE
    if block:
        yield block


def read_range(
    store: Store,
    key: str,
    start: int,
    end: int,
    *,
    etag: str | None = None,
    size: int | None = None,
    on_block: Callable[[int], None] | None = None,
) -> bytes:
    """Read bytes ``start`` to ``end`` (exclusive), or to the object's end. One request.

    Args:
        store: Store of the object.
        key: Key of the object.
        start: Offset of the first byte.
        end: Offset after the last byte.
        etag: ETag that the object must have.
        size: Size in bytes that the whole object must have.
        on_block: Function that receives the size of each block of up to 8 MiB when it has arrived.
            An error that the function raises ends the read. A foreign store does not call it.

    Raises:
        NotFoundError: There is no such object.
        ChangedError: The object has another ETag or another size.
        CorruptError: The store sends more bytes than were requested. The rest is not read.
    """
    check_key(store, key)
    if start >= end:
        return b""
    if store.has_lost_client and not store.is_foreign:
        from millrace.storage.after_fork import read_after_fork  # noqa: PLC0415 - imports urllib3

        return read_after_fork(store, key, start=start, end=end, etag=etag, size=size)
    if store.is_foreign and store.is_s3_compatible:
        from millrace.storage.foreign import read_foreign_range  # noqa: PLC0415 - imports boto3

        return read_foreign_range(store, key, start, end, etag=etag, size=size)
    options: GetOptions = {**_make_match_options(etag), "range": (start, end)}

    def fetch() -> bytes:
        found = obstore.get(store.raw, key, options=options)
        check_etag(store, key, etag, found.meta["e_tag"])
        check_size(store, key, size, found.meta["size"])
        return _read_body(store, key, found, end - start, on_block)

    return call_with_retries(store, key, fetch)


def _read_body(
    store: Store,
    key: str,
    found: "GetResult",
    max_size: int,
    on_block: Callable[[int], None] | None = None,
) -> bytes:
    """Read a body up to a limit. The length in the headers is not trusted.

    Raises:
        CorruptError: The body is longer than ``max_size``.
    """
    blocks = map(bytes, found.stream(min_chunk_size=min(max_size + 1, READ_BLOCK_SIZE)))
    if on_block is not None:
        blocks = _report_blocks(blocks, on_block)
    return join_blocks(store, key, blocks, max_size)


def _report_blocks(blocks: Iterable[bytes], on_block: Callable[[int], None]) -> Iterator[bytes]:
    for block in blocks:
        on_block(len(block))
        yield block


def stream(
    store: Store,
    key: str,
    *,
    start: int = 0,
    end: int | None = None,
    etag: str | None = None,
    block_size: int = READ_BLOCK_SIZE,
    prefetch: int = 2,
) -> Iterator[bytes]:
    """Yield the blocks of an object in order, and prefetch the next blocks.

    A failed request is repeated for its block only. All requests demand the ETag of the first
    answer.

    Args:
        store: Store of the object.
        key: Key of the object.
        start: Offset of the first byte.
        end: Offset after the last byte; the object's end by default.
        etag: ETag that the object must have.
        block_size: Bytes of a request. Memory is at most ``block_size * (prefetch + 1)``.
        prefetch: Number of pending requests besides the block in use.

    Raises:
        NotFoundError: There is no such object.
        ChangedError: The object has another ETag, or was replaced during the read.
    """
    if end is None or etag is None:
        now = head(store, key)
        if etag is not None and now.etag != etag:
            raise make_changed_error(store, key)
        end, etag = now.size if end is None else min(end, now.size), now.etag
    if 0 < end - start <= block_size:  # one block needs no threads
        yield _read_block(store, key, start, end, etag)
        return
    offsets = iter(range(start, end, block_size))
    with ThreadPoolExecutor(max_workers=max(1, prefetch), thread_name_prefix="read") as pool:
        waiting: list[Future[bytes]] = []
        try:
            while True:
                while len(waiting) <= prefetch and (at := next(offsets, None)) is not None:
                    stop = min(at + block_size, end)
                    waiting.append(pool.submit(_read_block, store, key, at, stop, etag))
                if not waiting:
                    return
                yield waiting.pop(0).result()
        finally:
            for part in waiting:
                part.cancel()


def _read_block(store: Store, key: str, start: int, end: int, etag: str | None) -> bytes:
    data = read_range(store, key, start, end, etag=etag)
    if len(data) != end - start:
        raise errors.ChangedError(f"{store.make_url(key)} is shorter than its description says.")
    return data


def hash_object(store: Store, key: str, size: int) -> bytes:
    """Read an object, and return the joined digests of its blocks.

    Returns:
        Digests; empty if the object is missing, has another size or cannot be read.

    Raises:
        UnavailableError: The store does not answer.
    """
    hasher = BlockHasher()
    try:
        if _describe(store, key).size != size:
            return b""
        for block in stream(store, key):
            hasher.update(block)
    except (errors.NotFoundError, errors.ChangedError, errors.CorruptError):
        return b""
    return hasher.blocks


def describe_difference(
    store: Store,
    key: str,
    size: int,
    digest: str | None = None,
    *,
    blocks: bytes = b"",
    is_stopped: Callable[[], bool] = lambda: False,
) -> str:
    """Describe the difference between an object and the expected size and digest.

    Args:
        store: Store of the object.
        key: Key of the object.
        size: Expected size in bytes. One request.
        digest: Expected digest. If given, the whole object is read.
        blocks: Joined digests of the blocks, from `check_blocks`. If given, the text names the
            blocks that differ.
        is_stopped: Function that decides after each block whether to stop.

    Returns:
        Short text about the difference; empty if there is none.

    Raises:
        StoppedError: ``is_stopped`` returned true.
    """
    try:
        found = _describe(store, key)
        if found.size != size:
            return f"{found.size} bytes, not {size}"
        if digest is not None:
            hasher = make_hasher(get_algorithm(digest))
            for block in _iterate_until_stopped(is_stopped, stream(store, key)):
                hasher.update(block)
            if hasher.compute() != digest:
                where = ""
                if blocks and isinstance(hasher, BlockHasher):
                    differing = find_differing_blocks(hasher.blocks, blocks)
                    where = f" in {describe_blocks(differing)}, counted from 0"
                return f"its bytes are not those that were written (the digest differs{where})"
    except errors.NotFoundError:
        return "missing"
    except errors.ChangedError:
        return "it is being replaced"
    except errors.CorruptError:
        return "the store cannot read it"
    return ""


def _describe(store: Store, key: str) -> Stat:
    """Describe an object, as `head` does.

    Raises:
        CorruptError: The store cannot read the object. Only an answer to GET has the reason.
    """
    try:
        return head(store, key)
    except (errors.NotFoundError, errors.UnavailableError):
        raise
    except errors.MillraceError:
        read_range(store, key, 0, 1)
        raise


def _iterate_until_stopped(
    is_stopped: Callable[[], bool], blocks: Iterator[bytes]
) -> Iterator[bytes]:
    for block in blocks:
        if is_stopped():
            raise errors.StoppedError("The verification was stopped.")
        yield block


def _make_match_options(etag: str | None) -> "GetOptions":
    return {} if etag is None else {"if_match": etag}
