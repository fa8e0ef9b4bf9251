"""Upload a large object part by part, and continue an upload that a killed process has left.

The parts of an unfinished upload stay in the bucket. The next call lists them, and sends the other
ones. Without a proof that the parts are right, the object would be a mixture of two contents. So
the ETag of the whole object is computed from those of the parts before the object appears.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from millrace.errors import (
    CorruptError,
    DeniedError,
    ExistsError,
    MillraceError,
    NotFoundError,
    UploadGoneError,
)
from millrace.formatting import clean_text
from millrace.storage.clients import make_boto3_client, make_full_key
from millrace.storage.etags import combine_etags
from millrace.storage.open import Store
from millrace.storage.retry import call_boto3
from millrace.storage.signed import shows_md5
from millrace.storage.write import UnfinishedUpload, abort_upload, list_uploads

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import HeadObjectOutputTypeDef

MIN_PART_SIZE = 5 << 20
"""Smallest size of a part, except for the last one, of S3 and R2."""
MAX_PARTS = 10_000
"""Largest number of parts of an object, of S3 and R2."""
_CLOCK_STEP = timedelta(seconds=1)  # S3 and HTTP tell times in seconds
_MAX_CANDIDATES = 20  # unfinished uploads of a key whose parts are listed


@dataclass(frozen=True, slots=True)
class UploadPart:
    """Part of an object.

    Attributes:
        number: Number of the part, from 1.
        start: Offset of the first byte.
        end: Offset after the last one.
    """

    number: int
    start: int
    end: int

    @property
    def size(self) -> int:
        """Bytes of the part."""
        return self.end - self.start


class PartSource(Protocol):
    """Sender of the parts of an object."""

    def send(self, client: "S3Client", upload: Mapping[str, Any], part: UploadPart) -> str:
        """Send a part, and return its ETag. One try of one request.

        Args:
            client: Client of the bucket.
            upload: Arguments that name the upload and the number of the part.
            part: Part to send.

        Raises:
            CorruptError: The part may not be used.
        """
        ...

    def is_right(self, part: UploadPart, etag: str) -> bool:
        """Tell whether a part that an earlier process has sent is a part of this object."""
        ...


class PartUpload:
    """Upload of one object in parts.

    Args:
        store: Bucket that the object is written to.
        key: Key of the object.
        size: Bytes of the object.
        part_size: Bytes of each part except the last one.
        source: Sender of the parts.
        etag: ETag that the object must have; empty if it is not known.
        headers: Arguments of boto3 for the new object, such as ``ContentType``.
        overwrite: Whether to replace an object that is there.
        concurrency: Number of parts that are sent at once.

    Attributes:
        reused_bytes: Bytes of the parts that an earlier process had sent.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        size: int,
        part_size: int,
        source: PartSource,
        *,
        etag: str = "",
        headers: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        concurrency: int = 4,
    ) -> None:
        self._store, self._key, self._source = store, key, source
        self._etag, self._headers, self._overwrite = etag, headers or {}, overwrite
        self._concurrency, self._size = concurrency, size
        self._parts: list[UploadPart] = [
            UploadPart(number, start, min(size, start + part_size))
            for number, start in enumerate(range(0, size, part_size), start=1)
        ]
        self._client = make_boto3_client(store, max_attempts=1)
        key = make_full_key(store, key)
        self._target: Any = {"Bucket": store.location.bucket, "Key": key}
        self._found: list[tuple[UnfinishedUpload, dict[int, str]]] | None = None  # not looked for
        self.reused_bytes = 0

    def run(self) -> str:
        """Send the missing parts, and return the ETag of the object.

        Raises:
            ExistsError: There is an object, and ``overwrite`` is false.
            CorruptError: The parts do not have the ETag of the object, or the source refuses one.
                No object was written.
            UploadGoneError: Another process has completed or aborted the upload.
        """
        self.find_right_parts()
        for upload, done in self._found or ():
            self.reused_bytes = sum(self._parts[number - 1].size for number in done)
            etag = self._send_missing(upload, done)
            if not self._etag or etag == self._etag:
                return self._complete(upload, done)
            abort_upload(self._store, upload)  # parts of another content with the same sizes
        self.reused_bytes = 0
        upload = begin_upload(self._store, self._key, self._headers, self._client)
        done = dict[int, str]()
        etag = self._send_missing(upload, done)
        if self._etag and etag != self._etag:
            abort_upload(self._store, upload)
            raise CorruptError(
                f"{self._store.make_url(self._key)}: the parts have the ETag {etag}, not "
                f"{self._etag}. No object was written."
            )
        return self._complete(upload, done)

    def find_right_parts(self) -> bool:
        """Decide whether an earlier process has sent right parts. One listing or more."""
        if self._found is None:
            self._found = self._find_uploads()
        return bool(self._found)

    def _find_uploads(self) -> list[tuple[UnfinishedUpload, dict[int, str]]]:
        """Return unfinished uploads with right parts, and these parts; those with most first."""
        found: list[tuple[UnfinishedUpload, dict[int, str]]] = []
        uploads = (one for one in list_uploads(self._store, self._key) if one.key == self._key)
        for one in islice(uploads, _MAX_CANDIDATES):
            done = self._list_right_parts(one)
            if done:
                found.append((one, done))
        return sorted(found, key=lambda one: -len(one[1]))

    def _list_right_parts(self, upload: UnfinishedUpload) -> dict[int, str]:
        """Return the ETags of right parts by their numbers; none if a part has a wrong size."""
        done: dict[int, str] = {}

        def list_parts(client: "S3Client") -> list[Any]:
            pages = client.get_paginator("list_parts").paginate(**self._target, UploadId=upload.id)
            return [one for page in pages for one in page.get("Parts", [])]

        try:
            listed = call_boto3(self._store, self._key, list_parts, client=self._client)
        except NotFoundError:  # completed or aborted meanwhile
            return {}
        for one in listed:
            number: int = one["PartNumber"]
            etag: str = one["ETag"].strip('"')
            if number > len(self._parts) or one["Size"] != self._parts[number - 1].size:
                return {}
            if self._etag or self._source.is_right(self._parts[number - 1], etag):
                done[number] = etag
        return done

    def _send_missing(self, upload: UnfinishedUpload, done: dict[int, str]) -> str:
        """Send the parts that are not done, and return the ETag of the whole object."""
        missing = [part for part in self._parts if part.number not in done]
        try:
            with ThreadPoolExecutor(self._concurrency, thread_name_prefix="part") as pool:
                try:
                    for part, etag in zip(
                        missing, pool.map(partial(self._send, upload), missing), strict=True
                    ):
                        done[part.number] = etag
                finally:
                    pool.shutdown(wait=True, cancel_futures=True)
        except CorruptError:  # its parts are of no use
            abort_upload(self._store, upload)
            raise
        except (DeniedError, NotFoundError):
            if not done:  # otherwise another source may send the missing parts
                with suppress(MillraceError):
                    abort_upload(self._store, upload)
            raise
        return combine_etags([done[part.number] for part in self._parts])

    def _send(self, upload: UnfinishedUpload, part: UploadPart) -> str:
        names = {**self._target, "UploadId": upload.id, "PartNumber": part.number}

        def send(client: "S3Client") -> str:
            return self._source.send(client, names, part).strip('"')

        try:
            return call_boto3(self._store, self._key, send, client=self._client)
        except NotFoundError as error:
            raise_if_gone(error, self._store, self._key)
            raise

    def _complete(self, upload: UnfinishedUpload, done: Mapping[int, str]) -> str:
        if not self._overwrite and self._has_object():
            abort_upload(self._store, upload)
            raise ExistsError(f"{self._store.make_url(self._key)} already exists.")
        return complete_upload(
            self._store,
            upload,
            [done[part.number] for part in self._parts],
            self._size,
            self._client,
        )

    def _has_object(self) -> bool:
        return find_object(self._store, self._key, self._client) is not None


def begin_upload(
    store: Store, key: str, headers: Mapping[str, Any], client: "S3Client"
) -> UnfinishedUpload:
    """Begin a multipart upload of an object. If an answer is lost, an empty upload is left.

    Args:
        store: Store that the object is written to.
        key: Key of the object.
        headers: Arguments of boto3 for the object, such as ``ContentType``.
        client: Client of the store that tries each request once.
    """
    target: Any = {"Bucket": store.location.bucket, "Key": make_full_key(store, key)}
    begun = call_boto3(
        store, key, lambda s3: s3.create_multipart_upload(**target, **headers), client=client
    )
    date = begun["ResponseMetadata"]["HTTPHeaders"].get("date")
    started_at = parsedate_to_datetime(date) if date else datetime.now(UTC)
    return UnfinishedUpload(key, begun["UploadId"], started_at)


def complete_upload(
    store: Store, upload: UnfinishedUpload, etags: Sequence[str], size: int, client: "S3Client"
) -> str:
    """Complete an upload, and return the ETag of the object.

    If the answer to a try is lost, the next one finds no upload. Then the object shows whether the
    upload was completed.

    Args:
        store: Store that the object is written to.
        upload: Upload that all parts have been sent to.
        etags: ETags of the parts, in order.
        size: Bytes of the object.
        client: Client of the store that tries each request once.

    Raises:
        UploadGoneError: There is no such upload, and no object that it has certainly made.
    """
    target: Any = {"Bucket": store.location.bucket, "Key": make_full_key(store, upload.key)}
    parts: Any = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]

    def complete(s3: "S3Client") -> str:
        answer = s3.complete_multipart_upload(
            **target, UploadId=upload.id, MultipartUpload={"Parts": parts}
        )
        return answer["ETag"].strip('"')

    try:
        etag = call_boto3(store, upload.key, complete, client=client)
    except NotFoundError as error:
        found = find_object(store, upload.key, client)
        if found is None or not _is_result(found, upload, etags, size):
            raise _make_gone_error(store, upload.key) from error
        etag = ""
    else:
        found = None if etag else find_object(store, upload.key, client)
    # Ceph's answer about a key like "\t" has no ETag.
    return etag or ("" if found is None else found["ETag"].strip('"'))


def find_object(store: Store, key: str, client: "S3Client") -> "HeadObjectOutputTypeDef | None":
    """Return the description of an object; None without one. obstore refuses some keys."""
    target: Any = {"Bucket": store.location.bucket, "Key": make_full_key(store, key)}
    try:
        return call_boto3(store, key, lambda s3: s3.head_object(**target), client=client)
    except NotFoundError:
        return None


def raise_if_gone(error: BaseException, store: Store, key: str) -> None:
    """Raise the error of an upload that a store does not have any more, if a request shows this.

    Args:
        error: Error of a client, or of Millrace with such a cause.
        store: Store of the upload.
        key: Key of the object.

    Raises:
        UploadGoneError: There is no such upload.
    """
    if "NoSuchUpload" in f"{error} {error.__cause__}":
        raise _make_gone_error(store, key) from error


def _make_gone_error(store: Store, key: str) -> UploadGoneError:
    return UploadGoneError(
        f"{clean_text(store.make_url(key))}: the upload is gone. Another process has aborted it, "
        "or the object was written and replaced. Look at the object, or write it again."
    )


def _is_result(
    found: "HeadObjectOutputTypeDef", upload: UnfinishedUpload, etags: Sequence[str], size: int
) -> bool:
    """Decide whether an object is the result of an upload.

    The ETag decides if it is made of MD5s. Otherwise, the size, the number of parts and the time
    decide.
    """
    etag = found["ETag"].strip('"')
    if etag == combine_etags(etags):
        return True
    if shows_md5(found["ResponseMetadata"]["HTTPHeaders"]):
        return False
    is_new = found["LastModified"] >= upload.started_at - _CLOCK_STEP
    return is_new and found["ContentLength"] == size and etag.endswith(f"-{len(etags)}")
