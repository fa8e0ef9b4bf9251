"""Write, copy and delete objects, and abort unfinished uploads."""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import AlreadyExistsError, GenericError

from millrace import errors
from millrace.extras import import_extra_module
from millrace.storage.clients import make_boto3_client, make_full_key
from millrace.storage.locations import Backend
from millrace.storage.object_keys import (
    check_key,
    find_key_fault,
    find_size_fault,
    make_key_error,
)
from millrace.storage.open import Store
from millrace.storage.retry import (
    call_boto3,
    call_with_retries,
    translate_error,
)
from millrace.storage.signed import (
    can_sign,
    create_with_signature,
    put_with_signature,
)

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import ListMultipartUploadsOutputTypeDef

Bytes = bytes | bytearray | memoryview

_BATCH = 1000  # objects or uploads per request: the limit of S3
_WRITE_SIZE = 1024 * 1024  # bytes of a write to a file
_LARGE = 256 * 1024  # bytes from which obstore's SHA-256 of a body is worth avoiding
_NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
_LINKED = "is reached through a link, and was not deleted: remove the link itself"


def put(store: Store, key: str, data: Bytes) -> None:
    """Write or replace an object. One request.

    Raises:
        ConfigurationError: The key is invalid.
        DeniedError: The credentials may not write here.
    """
    check_key(store, key)
    body = _make_body(store, data)

    def try_put() -> None:
        if len(body) >= _LARGE and can_sign(store):
            put_with_signature(store, key, body)
        else:
            obstore.put(store.raw, key, body, use_multipart=False)

    call_with_retries(store, key, try_put)


def create(
    store: Store,
    key: str,
    data: Bytes,
    *,
    is_stopped: Callable[[], bool] | None = None,
) -> None:
    """Write an object if there is none under its key. One request.

    One of several concurrent calls succeeds.

    Args:
        store: Store to write to.
        key: Key of the object.
        data: Bytes of the object.
        is_stopped: Function that decides before each try whether to stop. For an S3-compatible
            store, it also decides while the body is sent.

    Raises:
        ConfigurationError: The key is invalid, or the store does not support create-if-absent.
        ExistsError: There is an object. If an answer was lost, an earlier try of this call may have
            written the object. `millrace.records.commit_once` compares the content.
        DeniedError: The credentials may not write here.
        StoppedError: ``is_stopped`` returned true. The call leaves no object.
    """
    check_key(store, key)
    body = _make_body(store, data)

    def try_create() -> None:
        if is_stopped is not None and is_stopped():
            raise errors.StoppedError(f"{store.make_url(key)}: the upload was stopped.")
        try:
            if (is_stopped or len(body) >= _LARGE) and can_sign(store):
                create_with_signature(store, key, body, is_stopped)
            else:
                pieces = _divide_body(store, body)
                obstore.put(store.raw, key, pieces, mode="create", use_multipart=False)
        except AlreadyExistsError as error:
            if "status code: 409" in str(error):
                _confirm_exists(store, key)
            raise
        except GenericError as error:
            if "status code: 501" in str(error):
                raise errors.ConfigurationError(
                    f"{store.make_url(key)}: the store does not support create-if-absent (PUT with "
                    "If-None-Match), which Millrace needs. Use another store. "
                    f"({errors.format_error(error)})"
                ) from error
            raise

    try:
        call_with_retries(store, key, try_create)
    except errors.NotFoundError as error:
        if store.location.backend is Backend.FILE:
            raise
        raise errors.NotFoundError(
            f"{store.url}: there is no such bucket. Create it, or correct the URL."
        ) from error


def _make_body(store: Store, data: Bytes) -> Bytes:
    """Return a body for obstore. The store in memory keeps the given buffer, so it gets a copy."""
    return bytes(data) if store.location.backend is Backend.MEMORY else data


def _divide_body(store: Store, body: Bytes) -> Bytes | Iterator[memoryview]:
    """Return the writes of a body. A folder gets one for each MiB.

    With larger writes, Linux caches the file in larger pages, which can take ten times as long to
    allocate.
    """
    if store.location.backend is not Backend.FILE or len(body) <= _WRITE_SIZE:
        return body
    view = memoryview(body)
    return (view[at : at + _WRITE_SIZE] for at in range(0, len(view), _WRITE_SIZE))


def _confirm_exists(store: Store, key: str) -> None:
    """Check that an object exists, since 409 can also mean that another create is undecided.

    Raises:
        GenericError: There is no object yet.
    """
    try:
        obstore.head(store.raw, key)
    except FileNotFoundError as error:
        raise GenericError("The store is still deciding between two creates.") from error


def copy(store: Store, source: str, target: str) -> None:
    """Copy an object within a store. Buckets copy without a download.

    Raises:
        ConfigurationError: A key is invalid.
        NotFoundError: There is no such source.
    """
    check_key(store, source)
    check_key(store, target)
    if store.location.backend is Backend.FILE and _are_same_file(store, source, target):
        return  # obstore would leave a partial file, since it renames one link to the other
    call_with_retries(store, source, lambda: obstore.copy(store.raw, source, target))


def _are_same_file(store: Store, key: str, other: str) -> bool:
    """Decide whether two keys of a folder are links to one file."""
    folder = Path(store.location.bucket)
    try:
        one = (folder / key).lstat()
        return stat.S_ISREG(one.st_mode) and os.path.samestat(one, (folder / other).lstat())
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class ObjectFailure:
    """Key of an object that could not be deleted or copied, and the reason."""

    key: str
    reason: str


def delete(store: Store, keys: Iterable[str]) -> list[ObjectFailure]:
    """Delete objects, up to 1,000 per request. A missing object is a success.

    A key that obstore would refuse or change is deleted with its own request if the bucket is
    S3-compatible. On GCS, this holds for keys that end in a slash (extra ``millrace[gcs]``). In a
    folder, nothing is deleted through a link to another folder.

    Returns:
        Keys that could not be deleted, with the reasons.

    Raises:
        ConfigurationError: ``keys`` is a single text.
    """
    if isinstance(keys, str):
        raise errors.ConfigurationError(
            f"{store.make_url(keys)}: `delete` takes several keys, not one text. Write "
            "delete(store, [key]), or delete_one(store, key)."
        )
    failures: list[ObjectFailure] = []
    remaining = iter(keys)
    while batch := list(islice(remaining, _BATCH)):
        links = LinkFinder(store)
        plain, alone = list[str](), list[str]()
        for key in batch:
            if find_key_fault(store, key):
                alone.append(key)
            elif links.is_linked(key):
                failures.append(ObjectFailure(key, f"It {_LINKED}."))
            else:
                plain.append(key)
        try:
            if plain:
                call_with_retries(
                    store, plain[0], lambda plain=plain: obstore.delete(store.raw, plain)
                )
        except errors.MillraceError:
            # Single deletes have a reason for each key, and some credentials allow no others.
            alone += plain
        failures += _delete_singly(store, alone)
    return failures


class LinkFinder:
    """Finds objects of a folder that are reached through a link to another folder.

    Any writer of the folder can make a link, and the link may lead to any other folder.

    Args:
        store: Store of the objects; buckets have no links.
    """

    def __init__(self, store: Store) -> None:
        is_folder = store.location.backend is Backend.FILE
        self._root = Path(store.location.bucket).resolve() if is_folder else None
        self._linked: dict[str, bool] = {}  # by the folder below the root

    def is_linked(self, key: str) -> bool:
        """Decide whether an object is reached through a link."""
        if self._root is None:
            return False
        folder = key.rpartition("/")[0]
        if folder not in self._linked:
            self._linked[folder] = (self._root / folder).resolve() != self._root / folder
        return self._linked[folder]


def _delete_singly(store: Store, keys: list[str]) -> list[ObjectFailure]:
    failures: list[ObjectFailure] = []
    client = make_boto3_client(store, max_attempts=1) if keys and store.is_s3_compatible else None
    for number, key in enumerate(keys):
        try:
            delete_one(store, key, client=client)
        except errors.UnavailableError as error:
            # Each further key would be retried as long, which could take days.
            reason = errors.format_error(error)
            return failures + [ObjectFailure(rest, reason) for rest in keys[number:]]
        except errors.MillraceError as error:
            failures.append(ObjectFailure(key, errors.format_error(error)))
    return failures


def delete_one(store: Store, key: str, *, client: "S3Client | None" = None) -> None:
    """Delete one object with one request. A missing object is a success.

    Args:
        store: Store of the object.
        key: Key of the object.
        client: Client that tries each request once, as for `call_boto3`.

    Raises:
        DeniedError: The credentials may not delete the object.
        ConfigurationError: The store cannot delete this key.
    """
    with contextlib.suppress(errors.NotFoundError):
        if store.location.backend is Backend.GS and key.endswith("/"):
            requests = import_extra_module("millrace.storage.google_requests", "gcs")
            requests.delete_exact_key(store, key)
            return
        if not store.is_s3_compatible:
            check_key(store, key)
            if LinkFinder(store).is_linked(key):
                raise errors.ConfigurationError(f"{store.make_url(key)} {_LINKED}.")
            call_with_retries(store, key, lambda: obstore.delete(store.raw, key))
            return
        if fault := find_size_fault(store, key):
            raise make_key_error(store, key, fault)
        # obstore deletes even one key as a batch, which session policies of some servers refuse.
        bucket, whole = store.location.bucket, make_full_key(store, key)
        call_boto3(store, key, lambda s3: s3.delete_object(Bucket=bucket, Key=whole), client=client)


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """Multipart upload that was not completed. Its parts are billed, but are not listed as objects.

    Attributes:
        key: Key of the object.
        id: Identifier of the upload in the store.
        started_at: Time at which the upload began, by the store's clock.
    """

    key: str
    id: str
    started_at: datetime


def list_uploads(store: Store, prefix: str = "") -> Iterator[UnfinishedUpload]:
    """Yield unfinished uploads of keys that start with a prefix, with a page of 1,000 in memory.

    In a folder, unfinished uploads are the hidden partial files of a killed process. Their names
    end in ``#`` and a number. A finished file of another program may have such a name, too.

    Raises:
        DeniedError: The credentials may not list uploads.
        UnavailableError: The store failed for longer than its time budget.
    """
    if store.location.backend is Backend.FILE:
        yield from _iterate_partial_files(Path(store.location.bucket), prefix)
        return
    if not store.is_s3_compatible:
        return  # memory has none, and GCS aborts its uploads after a week
    bucket, root = store.location.bucket, make_full_key(store, "")
    key_marker = id_marker = ""

    def fetch_page(client: "S3Client") -> "ListMultipartUploadsOutputTypeDef":
        return client.list_multipart_uploads(
            Bucket=bucket,
            Prefix=root + prefix,
            KeyMarker=key_marker,
            UploadIdMarker=id_marker,
            MaxUploads=_BATCH,
        )

    while True:
        page = call_boto3(store, prefix, fetch_page)
        for upload in page.get("Uploads", []):
            key, started_at = upload.get("Key", ""), upload.get("Initiated", datetime.now(UTC))
            yield UnfinishedUpload(key.removeprefix(root), upload.get("UploadId", ""), started_at)
        if not page.get("IsTruncated"):
            return
        key_marker = page.get("NextKeyMarker", "")
        id_marker = page.get("NextUploadIdMarker", "")


def measure_upload(store: Store, upload: UnfinishedUpload) -> int:
    """Return the billed bytes of an unfinished upload. One request per 1,000 parts."""
    if store.location.backend is Backend.FILE:
        found = _stat_file(upload.id)
        return 0 if found is None else found.st_size
    bucket, whole = store.location.bucket, make_full_key(store, upload.key)

    def sum_part_sizes(client: "S3Client") -> int:
        pages = client.get_paginator("list_parts").paginate(
            Bucket=bucket, Key=whole, UploadId=upload.id
        )
        return sum(part.get("Size", 0) for page in pages for part in page.get("Parts", []))

    with contextlib.suppress(errors.NotFoundError):
        return call_boto3(store, upload.key, sum_part_sizes)
    return 0


def abort_upload(store: Store, upload: UnfinishedUpload) -> None:
    """Abort an unfinished upload. A missing upload is a success.

    Raises:
        DeniedError: The credentials may not abort uploads.
    """
    if store.location.backend is Backend.FILE:
        try:
            Path(upload.id).unlink(missing_ok=True)
        except OSError as error:
            raise translate_error(error, store, upload.key) from error
        return
    bucket, whole = store.location.bucket, make_full_key(store, upload.key)
    with contextlib.suppress(errors.NotFoundError):
        call_boto3(
            store,
            upload.key,
            lambda client: client.abort_multipart_upload(
                Bucket=bucket, Key=whole, UploadId=upload.id
            ),
        )


def _iterate_partial_files(folder: Path, prefix: str) -> Iterator[UnfinishedUpload]:
    for parent, _folders, names in os.walk(folder, onerror=_raise_unless_removed):
        for full_name in names:
            name, _, number = full_name.rpartition("#")
            key = Path(parent, name).relative_to(folder).as_posix()
            is_number = number.isascii() and number.isdigit()
            if not (name and is_number and key.startswith(prefix)):
                continue
            path = os.path.join(parent, full_name)  # noqa: PTH118 - of os.walk
            if (found := _stat_file(path)) is not None:
                yield UnfinishedUpload(key, path, datetime.fromtimestamp(found.st_mtime, UTC))


def _raise_unless_removed(error: OSError) -> None:
    """Raise the error of a folder that cannot be listed, unless it is gone or may not be read."""
    if error.errno not in _NO_FILE and not isinstance(error, PermissionError):
        raise error


def _stat_file(path: str) -> os.stat_result | None:
    """Return the status of a file; None for others, and for one that was removed meanwhile."""
    try:
        found = os.stat(path)  # noqa: PTH116 - of os.walk
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        return None
    return found if stat.S_ISREG(found.st_mode) else None
