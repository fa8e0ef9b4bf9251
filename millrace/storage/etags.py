"""ETags that prove the content of an object in a bucket.

S3, R2 and Ceph make the ETag of an object from the MD5 of its bytes. An object that was uploaded in
parts has the MD5 of the MD5s of its parts, and the number of parts. So two objects with equal ETags
have equal bytes, unless somebody has searched for two contents with one MD5. Encryption by a key
service changes the ETags, and then equal objects have different ones.

Source: "Checking object integrity in Amazon S3", Amazon Simple Storage Service documentation.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from millrace.storage.answers import Stat
from millrace.storage.clients import make_full_key
from millrace.storage.open import Store

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

ParsedEtag = tuple[str, int]
"""ETag without quotes, and its number of parts: 0 for an object that was uploaded as a whole."""

_MIB = 1 << 20
_USUAL_SIZES = (8, 5, 16, 64, 10, 15, 32, 50, 100, 128, 256, 512, 1024)  # MiB
_MD5 = re.compile(r'"?([0-9a-f]{32})(?:-([1-9][0-9]{0,4}))?"?')


def parse_etag(store: Store, etag: str | None) -> ParsedEtag | None:
    """Parse an ETag that is made of MD5s.

    Returns:
        None for another ETag, and for a store whose ETags are not made so.
    """
    found = _MD5.fullmatch(etag or "") if store.is_s3_compatible else None
    return None if found is None else (found[0].strip('"'), int(found[2] or 0))


def compute_etag(data: bytes | bytearray | memoryview) -> str:
    """Return the ETag of an object, or of a part, with these bytes."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def combine_etags(parts: Sequence[str]) -> str:
    """Return the ETag of an object from those of its parts; empty if they are no MD5s."""
    try:
        joined = bytes.fromhex("".join(parts))
    except ValueError:
        return ""
    return f"{compute_etag(joined)}-{len(parts)}"


class EtagHasher:
    """Computes the ETag of an object that is read block by block.

    Args:
        part_size: Bytes of the parts that the object was uploaded in; 0 if it was not.
    """

    def __init__(self, part_size: int = 0) -> None:
        self._part_size, self._left = part_size, part_size
        self._parts: list[str] = []
        self._hash = hashlib.md5(usedforsecurity=False)

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes."""
        view = memoryview(data)
        while self._part_size and len(view) >= self._left:
            self._hash.update(view[: self._left])
            view, self._left = view[self._left :], self._part_size
            self._end_part()
        self._hash.update(view)
        self._left -= len(view)

    def compute_etag(self) -> str:
        """Return the ETag after the last bytes."""
        if not self._part_size:
            return self._hash.hexdigest()
        if self._left < self._part_size or not self._parts:
            self._left = self._part_size
            self._end_part()
        return combine_etags(self._parts)

    def _end_part(self) -> None:
        self._parts.append(self._hash.hexdigest())
        self._hash = hashlib.md5(usedforsecurity=False)


def find_part_size(store: Store, stat: Stat, parts: int, client: "S3Client") -> tuple[int, bool]:
    """Return the size of the parts that an object was uploaded in. One try of one request.

    Some stores tell the size of the first part. For others, the result is the usual size, or else
    the smallest number of whole MiB, that gives the number of parts.

    Args:
        store: Store of the object.
        stat: Description of the object.
        parts: Number of parts.
        client: Client that tries each request once.

    Returns:
        Size in bytes, and whether the store has told it. Otherwise it may be wrong.
    """
    if parts == 1:
        return stat.size, True
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

    bucket, key = store.location.bucket, make_full_key(store, stat.key)
    try:
        size = client.head_object(Bucket=bucket, Key=key, PartNumber=1)["ContentLength"]
    except (BotoCoreError, ClientError):  # some stores refuse the number of a part
        size = 0
    if 0 < size < stat.size and -(-stat.size // size) == parts:
        return size, True
    smallest = -(-stat.size // (parts * _MIB))
    sizes = [one * _MIB for one in (*_USUAL_SIZES, smallest)]
    return next((one for one in sizes if -(-stat.size // one) == parts), sizes[-1]), False
