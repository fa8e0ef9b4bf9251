"""Write objects whose size is not known in advance."""

import threading
from collections.abc import Generator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import obstore
from obstore.exceptions import BaseError

from millrace import errors
from millrace.storage.clients import make_boto3_client
from millrace.storage.file_writer import write_file
from millrace.storage.locations import Backend
from millrace.storage.multipart import begin_upload, complete_upload, raise_if_gone
from millrace.storage.object_keys import check_key
from millrace.storage.open import Store
from millrace.storage.retry import (
    call_with_retries,
    limit_retries,
    require_client,
    translate_error,
)
from millrace.storage.signed import can_sign, has_crc_check, send_part
from millrace.storage.write import UnfinishedUpload, abort_upload, put

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from obstore import Attributes

PART_SIZE = 16 * 1024 * 1024
_HEADERS = {
    "Cache-Control": "CacheControl",
    "Content-Disposition": "ContentDisposition",
    "Content-Encoding": "ContentEncoding",
    "Content-Language": "ContentLanguage",
    "Content-Type": "ContentType",
    "Storage-Class": "StorageClass",
}
"""Attributes of an object, as obstore and boto3 name them. Others are metadata."""
_ABORT_TIMEOUT = timedelta(seconds=10)


class Writer(Protocol):
    """Destination of the bytes of a streamed object."""

    def write(self, data: bytes, /) -> int:
        """Write the next bytes. The call waits while enough parts are being sent."""
        ...


@contextmanager
def open_writer(
    store: Store,
    key: str,
    *,
    part_size: int = PART_SIZE,
    concurrency: int = 4,
    attributes: "Attributes | None" = None,
) -> Generator[Writer]:
    """Open a writer of an object whose size is not known in advance.

    The object appears when the block ends. If the block raises, no object appears, and the upload
    is aborted. Where obstore has made the upload, it is left for `list_uploads`, since its
    identifier is not known: in a store without a key pair, with options, or behind a proxy.

    Parts have equal sizes, as R2 demands. The store checks each part: against a CRC-64/NVME if an
    earlier upload has shown that it does, and against a signed SHA-256 otherwise. Memory is about
    ``part_size * (concurrency + 1)``. A file of a folder is written as by `write_file`.

    Args:
        store: Store to write to.
        key: Key of the object, which is replaced if it exists.
        part_size: Bytes of a part: at least 5 MiB, and at least 1/10,000 of the object.
        concurrency: Number of parts that are sent at once.
        attributes: Attributes of the object, such as ``Content-Type``, and its metadata.

    Raises:
        ConfigurationError: The key is invalid.
        UploadGoneError: Another process has aborted the upload, or the answer to its completion was
            lost and the object was replaced since. The object may have been written.
    """
    check_key(store, key)
    require_client(store)
    if store.location.backend is Backend.FILE:
        with write_file(store, key, overwrite=True) as file:
            yield file
    elif can_sign(store):
        writer = _PartWriter(store, key, part_size, concurrency, attributes or {})
        try:
            yield writer
            writer.close()
        finally:
            writer.end()
    else:
        yield from _write_with_obstore(store, key, part_size, concurrency, attributes)


def _write_with_obstore(
    store: Store, key: str, part_size: int, concurrency: int, attributes: "Attributes | None"
) -> Generator[Writer]:
    writer = obstore.open_writer(
        store.retrying,
        key,
        buffer_size=part_size,
        max_concurrency=concurrency,
        attributes=attributes,
    )
    try:
        yield writer
        writer.close()
    except (BaseError, OSError) as error:
        raise_if_gone(error, store, key)
        raise translate_error(error, store, key) from error


class _PartWriter:
    """Writer of an object that is sent in parts. A small object is sent by one request.

    Args:
        store: Store for which `can_sign` returns true.
        key: Key of the object.
        part_size: Bytes of each part except the last one.
        concurrency: Number of parts that are sent at once.
        attributes: Attributes of the object.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        part_size: int,
        concurrency: int,
        attributes: "Attributes",
    ) -> None:
        self._store, self._key, self._attributes = store, key, attributes
        self._part_size, self._concurrency = part_size, concurrency
        self._use_crc = has_crc_check(store)
        self._buffer = bytearray()
        self._given = self._size = 0  # bytes passed to `write`, and those that it has taken
        self._upload: UnfinishedUpload | None = None
        self._client: S3Client | None = None
        self._parts = list[Future[str]]()
        self._under_way = set[Future[str]]()
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="part")
        self._stopped = threading.Event()

    def write(self, data: bytes, /) -> int:
        """Write the next bytes. The call waits while enough parts are being sent.

        Raises:
            MillraceError: A part could not be sent.
        """
        left = memoryview(data).cast("B")
        size = len(left)
        self._given += size
        while left:
            room = self._part_size - len(self._buffer)
            self._buffer += left[:room]
            self._size += len(left[:room])
            left = left[room:]
            if len(self._buffer) == self._part_size:
                self._send_buffer()
        return size

    def close(self) -> None:
        """Send the last bytes, and complete the object.

        Raises:
            MillraceError: The object could not be written, or a write of it has failed.
        """
        if self._given != self._size:
            raise errors.StoppedError(
                f"{self._store.make_url(self._key)}: a write has failed, so there is no object. "
                "Write it again."
            )
        if self._upload is None or self._client is None:
            self._put_whole()
            return
        if self._buffer:
            self._send_buffer()
        etags = [part.result() for part in self._parts]
        complete_upload(self._store, self._upload, etags, self._size, self._client)
        self._upload = None

    def end(self) -> None:
        """End the requests under way, and abort the upload unless it was completed."""
        self._stopped.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._upload is not None:
            with suppress(errors.MillraceError):
                abort_upload(self._store.with_retry_timeout(_ABORT_TIMEOUT), self._upload)

    def _put_whole(self) -> None:
        store, key, body = self._store, self._key, self._buffer
        if not self._attributes:
            put(store, key, body)
            return
        call_with_retries(
            store,
            key,
            lambda: obstore.put(
                store.raw, key, body, attributes=self._attributes, use_multipart=False
            ),
        )

    def _send_buffer(self) -> None:
        """Send the buffer as the next part, once fewer parts are under way than may be."""
        if self._upload is None:
            self._begin()
        if len(self._under_way) == self._concurrency:
            done, self._under_way = wait(self._under_way, return_when=FIRST_COMPLETED)
            for part in done:
                part.result()
        body, self._buffer = self._buffer, bytearray()
        part = self._pool.submit(self._send, len(self._parts) + 1, body)
        self._parts.append(part)
        self._under_way.add(part)

    def _send(self, number: int, body: bytearray) -> str:
        """Send a part, and return its ETag."""
        store, key, upload = self._store, self._key, self._upload
        assert upload is not None

        def send() -> str:
            return send_part(
                store,
                key,
                upload.id,
                number,
                body,
                use_crc=self._use_crc,
                is_stopped=self._stopped.is_set,
            )

        with limit_retries(self._stopped):
            try:
                return call_with_retries(store, key, send, is_fork_safe=True)
            except errors.NotFoundError as error:
                raise_if_gone(error, store, key)
                raise

    def _begin(self) -> None:
        metadata = {name: one for name, one in self._attributes.items() if name not in _HEADERS}
        headers: dict[str, Any] = {
            _HEADERS[name]: one for name, one in self._attributes.items() if name in _HEADERS
        }
        if metadata:
            headers["Metadata"] = metadata
        if self._use_crc:
            headers["ChecksumAlgorithm"] = "CRC64NVME"
        self._client = make_boto3_client(self._store, max_attempts=1)
        self._upload = begin_upload(self._store, self._key, headers, self._client)
