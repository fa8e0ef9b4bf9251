"""List and delete older versions and delete markers, which a versioned bucket keeps and bills.

Listings of objects do not show them. Only S3 is supported: R2, folders and memory keep one
version of an object, and GCS deletes older versions by a lifecycle rule.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from millrace import errors
from millrace.storage.clients import make_boto3_client, make_full_key
from millrace.storage.locations import Backend
from millrace.storage.open import Store
from millrace.storage.retry import call_boto3
from millrace.storage.write import ObjectFailure

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_BATCH = 1000  # versions per request: the limit of S3
_NEVER_VERSIONED = re.compile(
    rb"\s*(<\?xml[^>]*>)?\s*"
    rb"<VersioningConfiguration(\s[^>]*)?(/>|>\s*</VersioningConfiguration>)\s*"
)  # the configuration of a bucket whose versions were never switched on is empty


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """A version of an object that no listing shows.

    Attributes:
        key: Key of the object, below the store's URL.
        id: Identifier of the version.
        size: Bytes that are billed; 0 for a delete marker.
        is_delete_marker: Whether the version is a delete marker.
    """

    key: str
    id: str
    size: int
    is_delete_marker: bool


@dataclass(frozen=True, slots=True)
class VersionCount:
    """Number of older versions and delete markers that a bucket keeps.

    Attributes:
        versions: Number of versions that hold bytes.
        markers: Number of delete markers.
        size: Bytes of the versions.
    """

    versions: int = 0
    markers: int = 0
    size: int = 0

    def __bool__(self) -> bool:
        return bool(self.versions or self.markers)


def list_versions(store: Store, prefix: str = "") -> Iterator[ObjectVersion]:
    """Yield older versions and delete markers below a prefix, with a page of 1,000 in memory.

    The current version of an object is left out: `list_objects` lists it. Nothing is listed if the
    bucket never had versions.

    Raises:
        DeniedError: The credentials may not list versions.
        UnavailableError: The store failed for longer than its time budget.
    """
    if store.location.backend is not Backend.S3 or not _may_have_versions(store):
        return
    bucket, root = store.location.bucket, make_full_key(store, "")
    key_marker = id_marker = ""

    def fetch_page(client: "S3Client") -> dict[str, Any]:
        from botocore.exceptions import ClientError  # noqa: PLC0415

        try:
            page = client.list_object_versions(
                Bucket=bucket,
                Prefix=root + prefix,
                KeyMarker=key_marker,
                VersionIdMarker=id_marker,
                MaxKeys=_BATCH,
            )
        except ClientError as error:
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") in {405, 501}:
                return {}  # the store has no versions
            raise
        return dict(page)

    while True:
        page = call_boto3(store, prefix, fetch_page)
        for name in ("Versions", "DeleteMarkers"):
            is_marker = name == "DeleteMarkers"
            for one in page.get(name, []):
                if is_marker or not one["IsLatest"]:
                    key = one["Key"].removeprefix(root)
                    yield ObjectVersion(key, one["VersionId"], one.get("Size", 0), is_marker)
        if not page.get("IsTruncated"):
            return
        key_marker = page.get("NextKeyMarker", "")
        id_marker = page.get("NextVersionIdMarker", "")


def _may_have_versions(store: Store) -> bool:
    """Decide whether a bucket may have versions: it had none if they were never switched on.

    A store may refuse the question, or ignore it and list its objects. Then the answer is true.

    Raises:
        UnavailableError: The store failed for longer than its time budget.
    """
    client = make_boto3_client(store, max_attempts=1)
    client.meta.events.register("before-parse.s3.GetBucketVersioning", _keep_body)

    def ask(client: "S3Client") -> dict[str, Any]:
        return dict(client.get_bucket_versioning(Bucket=store.location.bucket))

    try:
        answer = call_boto3(store, "", ask, client=client)
    except errors.UnavailableError:
        raise
    except errors.MillraceError:
        return True
    return _NEVER_VERSIONED.fullmatch(answer["Body"]) is None


def _keep_body(
    response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: object
) -> None:
    customized_response_dict["Body"] = response_dict["body"]


def count_versions(store: Store, prefix: str = "") -> VersionCount:
    """Count older versions and delete markers below a prefix. One request per 1,000 versions.

    Raises:
        DeniedError: The credentials may not list versions.
    """
    versions = markers = size = 0
    for one in list_versions(store, prefix):
        markers += one.is_delete_marker
        versions += not one.is_delete_marker
        size += one.size
    return VersionCount(versions, markers, size)


def delete_versions(store: Store, versions: Iterable[ObjectVersion]) -> list[ObjectFailure]:
    """Delete versions permanently, 1,000 per request. A missing version is a success.

    Returns:
        Versions that could not be deleted, each with the reason.
    """
    bucket = store.location.bucket
    failures: list[ObjectFailure] = []
    remaining = iter(versions)
    while batch := list(islice(remaining, _BATCH)):

        def request(client: "S3Client", batch: list[ObjectVersion] = batch) -> list[ObjectFailure]:
            named: Any = [
                {"Key": make_full_key(store, one.key), "VersionId": one.id} for one in batch
            ]
            answer = client.delete_objects(Bucket=bucket, Delete={"Objects": named, "Quiet": True})
            root = make_full_key(store, "")
            return [
                ObjectFailure(
                    error.get("Key", "").removeprefix(root),
                    f"version {error.get('VersionId', '')}: {error.get('Message', '')}",
                )
                for error in answer.get("Errors", [])
            ]

        try:
            failures += call_boto3(store, batch[0].key, request)
        except errors.MillraceError:
            # One key with a character that XML cannot represent fails the whole request.
            failures += _delete_singly(store, batch)
    return failures


def _delete_singly(store: Store, versions: list[ObjectVersion]) -> list[ObjectFailure]:
    """Delete each version with its own request, and return the failures."""
    bucket, failures = store.location.bucket, list[ObjectFailure]()
    client = make_boto3_client(store, max_attempts=1)
    for number, one in enumerate(versions):
        asked: Any = {"Bucket": bucket, "Key": make_full_key(store, one.key), "VersionId": one.id}
        try:
            call_boto3(store, one.key, lambda s3, a=asked: s3.delete_object(**a), client=client)
        except errors.NotFoundError:
            continue
        except errors.UnavailableError as error:
            # Each further version would be retried as long, which could take days.
            reason = errors.format_error(error)
            return failures + [ObjectFailure(rest.key, reason) for rest in versions[number:]]
        except errors.MillraceError as error:
            failures.append(ObjectFailure(one.key, errors.format_error(error)))
    return failures
