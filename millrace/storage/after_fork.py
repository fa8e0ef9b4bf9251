"""Read objects in a process that was forked, where obstore cannot send requests.

Data loaders of PyTorch fork their workers. The system reads the files of a folder. A key pair, of
the settings or of the environment, signs the requests of urllib3. One try each; `call_with_retries`
repeats them. Other credentials need boto3, which has hung in a forked process, so they are refused
with a sentence.
"""

import errno
import os
import sys
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

from obstore.exceptions import GenericError

from millrace import errors
from millrace.storage.answers import READ_BLOCK_SIZE, Stat, check_etag, check_size, join_blocks
from millrace.storage.locations import Backend
from millrace.storage.open import Store
from millrace.storage.retry import call_with_retries
from millrace.storage.signed import can_sign, head_with_signature, iterate_with_signature
from millrace.storage.spec import Credentials


def read_after_fork(
    store: Store,
    key: str,
    *,
    start: int = 0,
    end: int | None = None,
    etag: str | None = None,
    size: int | None = None,
    max_size: int | None = None,
) -> bytes:
    """Read an object, or a range of it. One request.

    Args:
        store: Store of the object.
        key: Key of the object.
        start: Offset of the first byte.
        end: Offset after the last byte; None reads to the end.
        etag: ETag that the object must have.
        size: Size in bytes that the whole object must have, if a range is read.
        max_size: Largest size of a whole object in bytes.

    Raises:
        NotFoundError: There is no such object.
        ChangedError: The object has another ETag or another size.
        CorruptError: The store sends more bytes than are allowed. The rest is not read.
        ConfigurationError: The store is not compatible with S3, or has no key pair.
    """
    if store.location.backend is Backend.FILE:
        asked = (start, sys.maxsize if end is None else end)
        return _read_file(store, key, asked, etag, size, max_size)
    store = _prepare(store)
    limit = end - start if end is not None else sys.maxsize if max_size is None else max_size
    asked = "" if end is None else f"bytes={start}-{end - 1}"

    def fetch() -> bytes:
        blocks = iterate_with_signature(store, key, asked, etag, READ_BLOCK_SIZE, size=size)
        with closing(blocks):
            return join_blocks(store, key, blocks, limit)

    return call_with_retries(store, key, fetch, is_fork_safe=True)


def head_after_fork(store: Store, key: str) -> Stat:
    """Describe an object. One request.

    Raises:
        NotFoundError: There is no such object.
        ConfigurationError: The store is not compatible with S3, or has no key pair.
    """
    if store.location.backend is Backend.FILE:
        return call_with_retries(store, key, lambda: _stat_file(store, key), is_fork_safe=True)
    store = _prepare(store)
    headers = call_with_retries(
        store, key, lambda: head_with_signature(store, key), is_fork_safe=True
    )
    modified = parsedate_to_datetime(headers["last-modified"])
    return Stat(key, int(headers["content-length"]), headers.get("etag"), modified)


def list_folders_after_fork(store: Store, prefix: str) -> list[str]:
    """Return the names of the folders directly below a prefix of a folder."""
    try:
        with os.scandir(Path(store.location.bucket) / prefix) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read_file(
    store: Store,
    key: str,
    asked: tuple[int, int],
    etag: str | None,
    size: int | None,
    max_size: int | None,
) -> bytes:
    """Read a range of a file, which may end later than the file."""
    start, limit = asked[0], sys.maxsize - 1 if max_size is None else max_size

    def fetch() -> bytes:
        with _find_file(store, key).open("rb") as file:
            found = _describe_file(key, os.fstat(file.fileno()))
            check_etag(store, key, etag, found.etag)
            check_size(store, key, size, found.size)
            if start > max(0, found.size - 1):
                raise GenericError("Invalid range")
            file.seek(start)
            count = min(asked[1], found.size) - start
            return join_blocks(store, key, [file.read(min(count, limit + 1))], limit)

    return call_with_retries(store, key, fetch, is_fork_safe=True)


def _stat_file(store: Store, key: str) -> Stat:
    return _describe_file(key, _find_file(store, key).stat())


def _find_file(store: Store, key: str) -> Path:
    """Return the path of an object.

    Raises:
        GenericError: The key has relative segments, as obstore says.
        FileNotFoundError: The path is a folder.
    """
    if not {"", ".", ".."}.isdisjoint(key.split("/")):
        raise GenericError(f"Error parsing Path: {key!r} has an empty or a relative segment")
    path = Path(store.location.bucket) / key
    if path.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return path


def _describe_file(key: str, found: os.stat_result) -> Stat:
    """Return the description of a file as obstore makes it."""
    modified = found.st_mtime_ns // 1000  # microseconds
    return Stat(
        key,
        found.st_size,
        f'"{found.st_ino:x}-{modified:x}-{found.st_size:x}"',
        datetime.fromtimestamp(0, UTC) + timedelta(microseconds=modified),
    )


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
