"""Send the parts of an object that is copied, through this process or within the store."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from millrace import errors
from millrace.storage import Stat, Store, call_boto3, read_range
from millrace.storage.clients import make_full_key
from millrace.storage.etags import compute_etag
from millrace.storage.multipart import UploadPart

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


class UnprovenPartError(errors.CorruptError):
    """The ETag of a part is not the MD5 of its bytes, so nothing proves the part."""


class PartSender:
    """Sender of the parts of an object through memory.

    Args:
        source: Store of the object.
        stat: Description of the object.
        client: Client of the source for an object whose key obstore refuses; None for others.
        must_prove: Whether the store has to confirm the MD5 of each part. If not, the ETag of the
            whole object may prove the parts, and no part of another process is used otherwise.
    """

    def __init__(
        self, source: Store, stat: Stat, client: "S3Client | None", *, must_prove: bool
    ) -> None:
        self._source, self._stat, self._client = source, stat, client
        self._must_prove = must_prove

    def send(self, client: "S3Client", upload: Mapping[str, Any], part: UploadPart) -> str:
        """Read a part of the source, and send it.

        Raises:
            UnprovenPartError: The store did not confirm the MD5 of the part.
        """
        data = self._read(part)
        etag = client.upload_part(**upload, Body=data)["ETag"].strip('"')
        if self._must_prove and etag != compute_etag(data):
            raise UnprovenPartError(
                f"{self._source.make_url(self._stat.key)}: the copy of part {part.number} has the "
                f"ETag {etag}, which is not the MD5 of its bytes. Copy the object again."
            )
        return etag

    def is_right(self, part: UploadPart, etag: str) -> bool:
        """Compare a part that is there with the source."""
        return self._must_prove and compute_etag(self._read(part)) == etag

    def _read(self, part: UploadPart) -> bytes:
        return read_part(self._source, self._stat, part.start, part.end, self._client)


class StorePartSender:
    """Sender of the parts of an object within the store."""

    def __init__(self, source: Any, stat: Stat) -> None:
        self._source, self._stat = source, stat

    def send(self, client: "S3Client", upload: Mapping[str, Any], part: UploadPart) -> str:
        """Let the store copy a part."""
        answer: Any = client.upload_part_copy(
            **upload,
            CopySource=self._source,
            CopySourceIfMatch=self._stat.etag or "",
            CopySourceRange=f"bytes={part.start}-{part.end - 1}",
        )
        return answer["CopyPartResult"]["ETag"]

    def is_right(self, part: UploadPart, etag: str) -> bool:
        """Trust no part that the ETag of the object does not prove."""
        return False


def read_whole(client: "S3Client", names: Any) -> dict[str, Any]:
    """Read an object and its attributes."""
    answer = client.get_object(**names)
    return {**answer, "Body": answer["Body"].read()}


def read_part(
    store: Store, stat: Stat, start: int, end: int, client: "S3Client | None" = None
) -> bytes:
    """Read a part of an object.

    Args:
        store: Store of the object.
        stat: Description of the object.
        start: Offset of the first byte.
        end: Offset after the last one.
        client: Client of the store for an object whose key obstore refuses.

    Raises:
        ChangedError: The object is shorter than its description, or has another ETag.
    """
    if client is None:
        data = read_range(store, stat.key, start, end, etag=stat.etag)
    else:
        names = {
            "Bucket": store.location.bucket,
            "Key": make_full_key(store, stat.key),
            "Range": f"bytes={start}-{end - 1}",
            "IfMatch": stat.etag or "",
        }
        data: bytes = call_boto3(
            store, stat.key, lambda s3: read_whole(s3, names)["Body"], client=client
        )
    if len(data) != end - start:
        raise errors.ChangedError(
            f"{store.make_url(stat.key)} is shorter than the {stat.size} bytes that it was listed "
            "with: it was written meanwhile. Copy it again."
        )
    return data
