"""Write objects: whole, only if absent, as a stream; copy and delete them."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError

from millrace import errors
from millrace.storage.clients import boto3_client, full_key
from millrace.storage.open import Backend, Store
from millrace.storage.retry import translated, trying, with_boto3
from millrace.storage.signed import can_sign, create_signed

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import ListMultipartUploadsOutputTypeDef

Bytes = bytes | bytearray | memoryview

PART = 16 * 1024 * 1024
_BATCH = 1000


def put(store: Store, key: str, data: Bytes) -> None:
    """Write an object, replacing what is there. One request.

    Raises:
        DeniedError: The credentials may not write here.
    """
    body = _kept(store, data)
    trying(store, key, lambda: obstore.put(store.raw, key, body, use_multipart=False))


def create(
    store: Store,
    key: str,
    data: Bytes,
    *,
    sha256: str | None = None,
    stopped: Callable[[], bool] | None = None,
) -> None:
    """Write an object if there is none under this key. One request; of several at once, one wins.

    Args:
        store: Where to.
        key: Its key.
        data: Its bytes.
        sha256: Their digest in hexadecimal, where it is known: a store of S3's kind is told it,
            and it is not computed again. A store that finds another refuses the object.
        stopped: Whether to break off, asked before each try; with ``sha256`` and such a store also
            while the body is sent. What was broken off leaves no object.

    Raises:
        ExistsError: There is one. It may be ours: an earlier try may have been carried out
            although its answer was lost. Whoever must know compares the content, as
            `millrace.records.commit_once` does.
        DeniedError: The credentials may not write here.
        StoppedError: It was broken off.
    """
    body = _kept(store, data)

    def request() -> None:
        if stopped is not None and stopped():
            raise errors.StoppedError(f"{store.url_of(key)}: the upload was called off.")
        try:
            if sha256 is not None and can_sign(store):
                create_signed(store, key, body, sha256, stopped)
            else:
                obstore.put(store.raw, key, body, mode="create", use_multipart=False)
        except AlreadyExistsError as error:
            if "status code: 409" in str(error):
                _see(store, key)
            raise

    try:
        trying(store, key, request)
    except errors.NotFoundError as error:
        if store.location.backend is Backend.FILE:
            raise
        raise errors.NotFoundError(
            f"{store.url}: there is no such bucket. Create it, or correct the URL."
        ) from error


def _kept(store: Store, data: Bytes) -> Bytes:
    """Return a body for obstore: its store in memory keeps the very buffer that it is given."""
    return bytes(data) if store.location.backend is Backend.MEMORY else data


def _see(store: Store, key: str) -> None:
    """Ask whether an object is there: 409 can also mean that another create may yet fail."""
    try:
        obstore.head(store.raw, key)
    except FileNotFoundError as error:
        raise GenericError("The store is still deciding between two creates.") from error


class Writer(Protocol):
    """Destination of the bytes of a streamed object."""

    def write(self, data: bytes, /) -> int:
        """Take the next bytes; waits while enough parts are on their way."""
        ...


@contextlib.contextmanager
def open_writer(
    store: Store, key: str, *, part: int = PART, concurrency: int = 4
) -> Generator[Writer]:
    """Write an object whose size is not known beforehand.

    It appears under its key when the block ends, all of it; when the block raises, not at all.
    Parts are equal in size, as R2 demands. Memory is about ``part * (concurrency + 1)``.

    Args:
        store: Where to.
        key: Its key; what is there is replaced.
        part: Bytes a part: at least 5 MiB, and a ten-thousandth of the object.
        concurrency: Parts on their way at once.
    """
    writer = obstore.open_writer(store.patient, key, buffer_size=part, max_concurrency=concurrency)
    begun = datetime.now(UTC) - timedelta(minutes=5)  # clocks differ
    try:
        yield writer
        writer.close()
    except BaseException as error:
        # Never closed, so never published; its parts would be billed until somebody aborts them.
        del writer
        with contextlib.suppress(errors.MillraceError, BaseError):
            own = store.hurried(timedelta(seconds=10))
            _abort(own, key, lambda upload: upload.key == key and upload.begun > begun)
        if isinstance(error, BaseError | OSError):
            raise translated(error, store, key) from error
        raise


def copy(store: Store, source: str, target: str) -> None:
    """Copy an object within a store, without its bytes coming here where the store can.

    Raises:
        NotFoundError: There is no such source.
    """
    trying(store, source, lambda: obstore.copy(store.raw, source, target))


@dataclass(frozen=True, slots=True)
class DeleteFailure:
    """A key that could not be deleted, and why."""

    key: str
    reason: str


def delete(store: Store, keys: Iterable[str]) -> list[DeleteFailure]:
    """Delete objects, a thousand a request where the store can. One that is gone is a success.

    A key with a slash at an end is deleted by a request of its own, since obstore would delete the
    object of the key without it.

    Returns:
        What could not be deleted; the others are gone.
    """
    failures: list[DeleteFailure] = []
    remaining = iter(keys)
    while batch := list(islice(remaining, _BATCH)):
        plain = [key for key in batch if key == key.strip("/")]
        alone = [key for key in batch if key != key.strip("/")]
        try:
            if plain:
                trying(store, plain[0], lambda plain=plain: obstore.delete(store.raw, plain))
        except (errors.MillraceError, TypeError):
            # Told key by key what it is; and some credentials allow only single deletes. A list in
            # which obstore refuses one key is a TypeError.
            alone = batch
        failures += _delete_singly(store, alone)
    return failures


def _delete_singly(store: Store, keys: list[str]) -> list[DeleteFailure]:
    failures: list[DeleteFailure] = []
    client = boto3_client(store, tries=1) if keys and store.speaks_s3 else None
    for number, key in enumerate(keys):
        try:
            delete_one(store, key, client=client)
        except errors.UnavailableError as error:
            # Each would be tried as long: all of them together for days.
            reason = errors.one_line(error)
            return failures + [DeleteFailure(rest, reason) for rest in keys[number:]]
        except errors.MillraceError as error:
            failures.append(DeleteFailure(key, errors.one_line(error)))
    return failures


def delete_one(store: Store, key: str, *, client: "S3Client | None" = None) -> None:
    """Delete an object by a request for it alone. One that is gone is a success.

    Args:
        store: Where it is.
        key: Which.
        client: As of `with_boto3`.

    Raises:
        DeniedError: The credentials may not.
        ConfigurationError: The store cannot be asked for this key.
    """
    with contextlib.suppress(errors.NotFoundError):
        if not store.speaks_s3:
            if key != key.strip("/"):  # obstore would delete the object of the key without it
                raise errors.ConfigurationError(
                    f"{store.url_of(key)} cannot be deleted here, since its key has a slash at an "
                    "end. Delete it with the store's own tools."
                )
            trying(store, key, lambda: obstore.delete(store.raw, key))
            return
        # obstore sends even one key as a batch, which session policies of some servers refuse.
        bucket, whole = store.location.bucket, full_key(store, key)
        with_boto3(store, key, lambda s3: s3.delete_object(Bucket=bucket, Key=whole), client=client)


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload that was begun and not finished: it is billed, and no listing shows it.

    Attributes:
        key: What it was to become.
        id: The store's name for it.
        begun: When, by the store's clock.
    """

    key: str
    id: str
    begun: datetime


def list_uploads(store: Store, prefix: str = "") -> Iterator[Upload]:
    """Yield the unfinished uploads of keys that start with a prefix, a page of 1,000 in memory.

    On a folder these are the hidden halves of a killed process.

    Raises:
        DeniedError: The credentials may not list them.
        UnavailableError: The store failed for longer than its time budget.
    """
    if store.location.backend is Backend.FILE:
        yield from _halves(Path(store.location.bucket), prefix)
        return
    if not store.speaks_s3:
        return  # memory keeps none, and GCS drops its own after a week
    bucket, root = store.location.bucket, full_key(store, "")
    key_marker = id_marker = ""

    def page_of(client: "S3Client") -> "ListMultipartUploadsOutputTypeDef":
        return client.list_multipart_uploads(
            Bucket=bucket,
            Prefix=root + prefix,
            KeyMarker=key_marker,
            UploadIdMarker=id_marker,
        )

    while True:
        page = with_boto3(store, prefix, page_of)
        for upload in page.get("Uploads", []):
            key, begun = upload.get("Key", ""), upload.get("Initiated", datetime.now(UTC))
            yield Upload(key.removeprefix(root), upload.get("UploadId", ""), begun)
        if not page.get("IsTruncated"):
            return
        key_marker = page.get("NextKeyMarker", "")
        id_marker = page.get("NextUploadIdMarker", "")


def uploaded(store: Store, upload: Upload) -> int:
    """Bytes that an unfinished upload takes up: what is billed. One request a 1,000 parts."""
    if store.location.backend is Backend.FILE:
        return Path(upload.id).stat().st_size if Path(upload.id).exists() else 0
    bucket, whole = store.location.bucket, full_key(store, upload.key)

    def size(client: "S3Client") -> int:
        pages = client.get_paginator("list_parts").paginate(
            Bucket=bucket, Key=whole, UploadId=upload.id
        )
        return sum(part.get("Size", 0) for page in pages for part in page.get("Parts", []))

    with contextlib.suppress(errors.NotFoundError):
        return with_boto3(store, upload.key, size)
    return 0


def abort_upload(store: Store, upload: Upload) -> None:
    """Abort an unfinished upload. One that is gone is a success.

    Raises:
        DeniedError: The credentials may not.
    """
    if store.location.backend is Backend.FILE:
        try:
            Path(upload.id).unlink(missing_ok=True)
        except OSError as error:
            raise translated(error, store, upload.key) from error
        return
    bucket, whole = store.location.bucket, full_key(store, upload.key)
    with contextlib.suppress(errors.NotFoundError):
        with_boto3(
            store,
            upload.key,
            lambda client: client.abort_multipart_upload(
                Bucket=bucket, Key=whole, UploadId=upload.id
            ),
        )


def abort_stale_uploads(store: Store, moment: datetime, *, prefix: str = "") -> list[str]:
    """Abort uploads that were begun and never finished.

    Args:
        store: Where to look.
        moment: Those begun before it.
        prefix: Only keys that start with this.

    Returns:
        The keys whose uploads were aborted.

    Raises:
        DeniedError: The credentials may not.
    """
    return _abort(store, prefix, lambda upload: upload.begun < moment)


def _abort(store: Store, prefix: str, chosen: Callable[[Upload], bool]) -> list[str]:
    """Abort the unfinished uploads below a prefix that are chosen."""
    stale = [upload for upload in list_uploads(store, prefix) if chosen(upload)]
    for upload in stale:
        abort_upload(store, upload)
    return [upload.key for upload in stale]


def _halves(folder: Path, prefix: str) -> Iterator[Upload]:
    for half in folder.rglob("*#*"):
        name, _, number = half.name.rpartition("#")
        key = half.with_name(name).relative_to(folder).as_posix()
        if number.isdigit() and key.startswith(prefix) and half.is_file():
            yield Upload(key, str(half), datetime.fromtimestamp(half.stat().st_mtime, UTC))
