"""Read objects in a process that was forked, where obstore cannot send requests.

Data loaders of PyTorch fork their workers. A key pair signs the requests of urllib3, and boto3
sends them for a store with other credentials. One try each; `call_with_retries` repeats them.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from millrace import errors
from millrace.storage.clients import make_boto3_client, make_full_key
from millrace.storage.open import Store
from millrace.storage.read import BLOCK_SIZE, Stat, join_blocks
from millrace.storage.retry import call_boto3, call_with_retries
from millrace.storage.signed import can_sign, head_with_signature, iterate_with_signature

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


def read_after_fork(
    store: Store,
    key: str,
    *,
    start: int = 0,
    end: int | None = None,
    etag: str | None = None,
    max_size: int | None = None,
) -> bytes:
    """Read an object, or a range of it. One request.

    Args:
        store: Store of the object.
        key: Key of the object.
        start: Offset of the first byte.
        end: Offset after the last byte; None reads to the end.
        etag: ETag that the object must have.
        max_size: Largest size of a whole object in bytes.

    Raises:
        NotFoundError: There is no such object.
        ChangedError: The object has another ETag.
        CorruptError: The store sends more bytes than are allowed. The rest is not read.
        ConfigurationError: The store is not compatible with S3.
    """
    _check_store(store)
    limit = end - start if end is not None else sys.maxsize if max_size is None else max_size
    asked = "" if end is None else f"bytes={start}-{end - 1}"
    if can_sign(store):

        def fetch() -> bytes:
            blocks = iterate_with_signature(store, key, asked, etag, BLOCK_SIZE)
            with closing(blocks):
                return join_blocks(store, key, blocks, limit)

        return call_with_retries(store, key, fetch, is_fork_safe=True)
    options: dict[str, Any] = {"Bucket": store.location.bucket, "Key": make_full_key(store, key)}
    options |= {"Range": asked} if asked else {}
    options |= {"IfMatch": etag} if etag is not None else {}

    def fetch_with_boto3(client: "S3Client") -> bytes:
        body = client.get_object(**options)["Body"]
        with closing(body):
            blocks: Iterator[bytes] = body.iter_chunks(BLOCK_SIZE)
            return join_blocks(store, key, blocks, limit)

    return call_boto3(store, key, fetch_with_boto3, client=_make_client(store))


def head_after_fork(store: Store, key: str) -> Stat:
    """Describe an object. One request.

    Raises:
        NotFoundError: There is no such object.
        ConfigurationError: The store is not compatible with S3.
    """
    _check_store(store)
    if can_sign(store):
        headers = call_with_retries(
            store, key, lambda: head_with_signature(store, key), is_fork_safe=True
        )
        modified = parsedate_to_datetime(headers["last-modified"])
        return Stat(key, int(headers["content-length"]), headers.get("etag"), modified)
    asked: Any = {"Bucket": store.location.bucket, "Key": make_full_key(store, key)}
    found = call_boto3(
        store, key, lambda client: client.head_object(**asked), client=_make_client(store)
    )
    return Stat(key, found["ContentLength"], found.get("ETag"), found["LastModified"])


def _check_store(store: Store) -> None:
    if not store.is_s3_compatible:
        raise errors.ConfigurationError(
            f"This process was forked after {store.url} was opened, and its client of the store "
            "would hang. Start processes by `spawn`: `DataLoader(..., "
            "multiprocessing_context='spawn')`."
        )


@lru_cache(maxsize=8)
def _make_client(store: Store) -> "S3Client":
    return make_boto3_client(store, max_attempts=1)


os.register_at_fork(after_in_child=_make_client.cache_clear)  # a connection belongs to one process
