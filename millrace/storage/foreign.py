"""Read from an endpoint that is not trusted. boto3 makes the requests, with limited answers.

obstore allocates the length that the body of an error announces: an absurd length ends the process.
An endpoint may also send its answers byte by byte. The time budget of the store therefore limits
each answer, and few requests to one endpoint are made at once, so that few threads can hang.
"""

import math
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from millrace import errors
from millrace.storage.answers import READ_BLOCK_SIZE, check_content_range, check_etag, join_blocks
from millrace.storage.clients import make_boto3_client, make_full_key
from millrace.storage.open import Store
from millrace.storage.retry import call_boto3

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


def compute_deadline(store: Store) -> float:
    """Return the end of a foreign store's time budget by the monotonic clock; else infinity."""
    if not store.is_foreign:
        return math.inf
    return time.monotonic() + store.spec.retry_timeout.total_seconds()


@contextmanager
def limit_requests(store: Store, deadline: float) -> Generator[None]:
    """Wait until few requests to a foreign store have no answer yet. Other stores have no limit.

    Raises:
        UnavailableError: The deadline has passed.
    """
    if not store.is_foreign:
        yield
        return
    left = deadline - time.monotonic()
    if left <= 0 or not store.throttle.foreign_requests.acquire(timeout=left):
        raise errors.UnavailableError(
            f"{store.url}: its endpoint {store.endpoint} answers too slowly or without end."
        )
    try:
        yield
    finally:
        store.throttle.foreign_requests.release()


def read_foreign_range(
    store: Store,
    key: str,
    start: int,
    end: int,
    *,
    etag: str | None = None,
    size: int | None = None,
) -> bytes:
    """Read bytes ``start`` to ``end`` (exclusive) of an object, as `read_range` does.

    Raises:
        NotFoundError: There is no such object.
        ChangedError: The object has another ETag or another size.
        CorruptError: The store sends more bytes than were requested. The rest is not read.
        UnavailableError: The bytes did not arrive within the time budget of the store.
    """
    asked: dict[str, Any] = {
        "Bucket": store.location.bucket,
        "Key": make_full_key(store, key),
        "Range": f"bytes={start}-{end - 1}",
    }
    if etag is not None:
        asked["IfMatch"] = etag

    def fetch(client: "S3Client") -> bytes:
        found = client.get_object(**asked)
        body = found["Body"]
        try:
            check_etag(store, key, etag, found.get("ETag"))
            check_content_range(store, key, size, found.get("ContentRange", ""))
            return join_blocks(store, key, body.iter_chunks(READ_BLOCK_SIZE), end - start)
        finally:
            body.close()

    deadline = compute_deadline(store)
    with limit_requests(store, deadline):
        client = make_boto3_client(store, max_attempts=1, deadline=deadline)
        return call_boto3(store, key, fetch, client=client)
