"""Read objects in a process that was forked, where obstore cannot send requests.

Data loaders of PyTorch fork their workers. A key pair, of the settings or of the environment, signs
the requests of urllib3. One try each; `call_with_retries` repeats them. Other credentials need
boto3, which has hung in a forked process, so they are refused with a sentence.
"""

import os
import sys
from contextlib import closing
from dataclasses import replace
from email.utils import parsedate_to_datetime

from millrace import errors
from millrace.storage.open import Credentials, Store
from millrace.storage.read import READ_BLOCK_SIZE, Stat, join_blocks
from millrace.storage.retry import call_with_retries
from millrace.storage.signed import can_sign, head_with_signature, iterate_with_signature


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
        ConfigurationError: The store is not compatible with S3, or has no key pair.
    """
    store = _prepare(store)
    limit = end - start if end is not None else sys.maxsize if max_size is None else max_size
    asked = "" if end is None else f"bytes={start}-{end - 1}"

    def fetch() -> bytes:
        blocks = iterate_with_signature(store, key, asked, etag, READ_BLOCK_SIZE)
        with closing(blocks):
            return join_blocks(store, key, blocks, limit)

    return call_with_retries(store, key, fetch, is_fork_safe=True)


def head_after_fork(store: Store, key: str) -> Stat:
    """Describe an object. One request.

    Raises:
        NotFoundError: There is no such object.
        ConfigurationError: The store is not compatible with S3, or has no key pair.
    """
    store = _prepare(store)
    headers = call_with_retries(
        store, key, lambda: head_with_signature(store, key), is_fork_safe=True
    )
    modified = parsedate_to_datetime(headers["last-modified"])
    return Stat(key, int(headers["content-length"]), headers.get("etag"), modified)


def _prepare(store: Store) -> Store:
    """Return the store with a key pair that can sign requests.

    Raises:
        ConfigurationError: The store is not compatible with S3, or has no key pair.
    """
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    access_key, secret, token = (os.environ.get(name, "") for name in names)
    if store.spec.credentials is None and access_key and secret:
        pair = Credentials.model_validate(
            {
                "access_key_id": access_key,
                "secret_access_key": secret,
                "session_token": token or None,
            }
        )
        store = replace(store, spec=store.spec.model_copy(update={"credentials": pair}))
    if not can_sign(store):
        raise errors.ConfigurationError(
            f"This process was forked after {store.url} was opened, and its client of the store "
            "would hang. Give the store a key pair and a region, or start processes by `spawn`: "
            "`DataLoader(..., multiprocessing_context='spawn')`."
        )
    return store
