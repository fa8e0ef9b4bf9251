"""Name and describe the objects of a copy in its two stores."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from millrace import errors
from millrace.cleanup.part_senders import read_part
from millrace.storage import Stat, Store, call_boto3, head, make_boto3_client, stream
from millrace.storage.clients import make_full_key
from millrace.storage.etags import find_part_size
from millrace.storage.object_keys import find_segment_fault
from millrace.storage.writer import PART_SIZE

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

ATTRIBUTES = {
    "CacheControl": "Cache-Control",
    "ContentDisposition": "Content-Disposition",
    "ContentEncoding": "Content-Encoding",
    "ContentLanguage": "Content-Language",
    "ContentType": "Content-Type",
}
"""Attributes of an object that a copy has, as boto3 and obstore name them."""


@dataclass(frozen=True, slots=True)
class CopySides:
    """Two stores of a copy, with a client of boto3 for each that speaks S3.

    Attributes:
        source: Store of the objects.
        destination: Store to copy to.
        source_client: Client of the source.
        client: Client of the destination.
    """

    source: Store
    destination: Store
    source_client: "S3Client | None"
    client: "S3Client | None"

    @classmethod
    def open(cls, source: Store, destination: Store) -> Self:
        """Open the clients of two stores. Nothing is sent."""
        clients = (
            make_boto3_client(one, max_attempts=1) if one.is_s3_compatible else None
            for one in (source, destination)
        )
        return cls(source, destination, *clients)

    @property
    def share_endpoint(self) -> bool:
        """True if a request to the destination can name an object of the source."""
        source, destination = self.source, self.destination
        return (
            source.is_s3_compatible
            and destination.is_s3_compatible
            and source.endpoint == destination.endpoint
            and source.region == destination.region
        )

    def get_client(self, store: Store) -> "S3Client | None":
        """Return the client of one of the stores."""
        return self.source_client if store is self.source else self.client

    def name(self, store: Store, stat: Stat) -> Any:
        """Return the arguments of boto3 that name an object in one of the buckets."""
        return {"Bucket": store.location.bucket, "Key": make_full_key(store, stat.key)}

    def describe(self, store: Store, stat: Stat) -> Any:
        """Return the answer of boto3 to a HEAD of an object in one of the buckets. One request."""
        names = self.name(store, stat)
        client = self.get_client(store)
        return call_boto3(store, stat.key, lambda s3: s3.head_object(**names), client=client)

    def find_target(self, stat: Stat) -> Stat | None:
        """Return the object of the destination under the key of an object; None without one."""
        with suppress(errors.NotFoundError):
            if self.client is None or not find_segment_fault(stat.key):
                return head(self.destination, stat.key)
            found = self.describe(self.destination, stat)
            return Stat(stat.key, found["ContentLength"], found["ETag"], found["LastModified"])
        return None

    def fetch_headers(self, stat: Stat) -> dict[str, Any]:
        """Return the attributes of an object of a bucket, as boto3 names them."""
        if self.source_client is None:
            return {}
        return select_attributes(self.describe(self.source, stat))

    def find_part_size(self, store: Store, stat: Stat, parts: int) -> tuple[int, bool]:
        """Return the size of an object's parts, 0 if it has none, and whether the store told it."""
        client = self.get_client(store)
        return (
            (0, True) if not parts or client is None else find_part_size(store, stat, parts, client)
        )

    def iterate_blocks(self, store: Store, stat: Stat) -> Iterator[bytes]:
        """Yield the blocks of an object, also of one whose key obstore refuses."""
        client = self.get_client(store)
        if client is None or not find_segment_fault(stat.key):
            yield from stream(store, stat.key, etag=stat.etag)
            return
        for start in range(0, stat.size, PART_SIZE):
            yield read_part(store, stat, start, min(start + PART_SIZE, stat.size), client)


def select_attributes(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of an object from its description by boto3."""
    return {name: found[name] for name in (*ATTRIBUTES, "Metadata") if found.get(name)}


def name_attributes(headers: Mapping[str, Any]) -> dict[str, str]:
    """Return attributes of an object as obstore names them."""
    named = {ATTRIBUTES[name]: headers[name] for name in ATTRIBUTES if name in headers}
    return named | headers.get("Metadata", {})
