"""Read from an endpoint that is not trusted. boto3 makes the requests, with limited answers.

obstore allocates the length that the body of an error announces: an absurd length ends the process.
"""

from typing import TYPE_CHECKING, Any

from millrace.storage.clients import make_boto3_client, make_full_key
from millrace.storage.open import Store
from millrace.storage.read import BLOCK_SIZE, join_blocks
from millrace.storage.retry import call_boto3

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


def read_foreign_range(
    store: Store, key: str, start: int, end: int, *, etag: str | None = None
) -> bytes:
    """Read bytes ``start`` to ``end`` (exclusive) of an object, as `read_range` does.

    Raises:
        NotFoundError: There is no such object.
        ChangedError: The object has another ETag.
        CorruptError: The store sends more bytes than were requested. The rest is not read.
    """
    asked: dict[str, Any] = {
        "Bucket": store.location.bucket,
        "Key": make_full_key(store, key),
        "Range": f"bytes={start}-{end - 1}",
    }
    if etag is not None:
        asked["IfMatch"] = etag

    def fetch(client: "S3Client") -> bytes:
        body = client.get_object(**asked)["Body"]
        try:
            return join_blocks(store, key, body.iter_chunks(BLOCK_SIZE), end - start)
        finally:
            body.close()

    return call_boto3(store, key, fetch, client=make_boto3_client(store, max_attempts=1))
