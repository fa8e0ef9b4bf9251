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


class PartSender:
    """Sender of the parts of an object through memory.

    Args:
        source: Store of the object.
        stat: Description of the object.
        client: Client of the source for an object whose key obstore refuses; None for others.
        has_etag: Whether the ETag of the whole object proves the parts.

    Attributes:
        is_proven: Whether the store has confirmed the MD5 of each part.
    """

    def __init__(
        self, source: Store, stat: Stat, client: "S3Client | None", *, has_etag: bool
    ) -> None:
        self._source, self._stat, self._client = source, stat, client
        self._has_etag = has_etag
        self.is_proven = True

    def send(self, client: "S3Client", upload: Mapping[str, Any], part: UploadPart) -> str:
        """Read a part of the source, and send it."""
        data = self._read(part)
        etag = client.upload_part(**upload, Body=data)["ETag"].strip('"')
        self.is_proven &= self._has_etag or etag == compute_etag(data)
        return etag

    def is_right(self, part: UploadPart, etag: str) -> bool:
        """Compare a part that is there with the source."""
        return compute_etag(self._read(part)) == etag

    def _read(self, part: UploadPart) -> bytes:
        stat = self._stat
        if self._client is None:
            data = read_range(self._source, stat.key, part.start, part.end, etag=stat.etag)
        else:
            names = {
                "Bucket": self._source.location.bucket,
                "Key": make_full_key(self._source, stat.key),
                "Range": f"bytes={part.start}-{part.end - 1}",
                "IfMatch": stat.etag or "",
            }
            data: bytes = call_boto3(
                self._source,
                stat.key,
                lambda s3: read_whole(s3, names)["Body"],
                client=self._client,
            )
        if len(data) != part.size:
            raise errors.ChangedError(
                f"{self._source.make_url(stat.key)} is shorter than the {stat.size} bytes that it "
                "was listed with: it was written meanwhile. Copy it again."
            )
        return data


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
