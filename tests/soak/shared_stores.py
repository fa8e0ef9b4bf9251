"""Open the stores of the soak, for the driver and for the oracle."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tests.oracle import Bucket, Folder, S3Bucket
from tests.soak.source_data import SourceData


class SharedStore(Protocol):
    """Store of many cases. Each case has a prefix."""

    @property
    def name(self) -> str:
        """Name of the store in the report."""
        ...

    def make_spec(self, prefix: str) -> dict[str, Any]:
        """Return the settings by which a driver opens a prefix."""
        ...

    def open_bucket(self, prefix: str) -> Bucket:
        """Return a prefix for the oracle, without a proxy and without Millrace."""
        ...

    def make_source(self, source: SourceData) -> dict[str, Any]:
        """Return the settings by which a driver opens source data in this store or in a folder."""
        ...


@dataclass(frozen=True, slots=True)
class FolderStore:
    """Folder with a folder for each case."""

    root: Path
    name: str = "folder"

    def make_spec(self, prefix: str) -> dict[str, Any]:
        return {"url": (self.root / prefix).as_uri()}

    def open_bucket(self, prefix: str) -> Bucket:
        return Folder(self.root / prefix)

    def make_source(self, source: SourceData) -> dict[str, Any]:
        return {"url": source.folder.as_uri()}


@dataclass(slots=True)
class BucketStore:
    """Bucket of an S3 server. The driver may use a proxy of the server.

    Attributes:
        name: Name of the store in the report.
        endpoint: URL of the server, or of its proxy, for the driver.
        access_key_id: ID of the key for the driver.
        secret_access_key: Secret of the key for the driver.
        client: Client of boto3 for the server itself.
        bucket_name: Name of the bucket.
        region: Region of the bucket.
        ca_file: Certificate of the proxy's authority.
        retry_seconds: Seconds in which the driver repeats a failed request.
        uploaded: Names of the source data that the bucket has.
    """

    name: str
    endpoint: str
    access_key_id: str
    secret_access_key: str = field(repr=False)
    client: Any
    bucket_name: str
    region: str = "us-east-1"
    ca_file: Path | None = None
    retry_seconds: float = 120.0
    uploaded: set[str] = field(default_factory=set)

    def make_spec(self, prefix: str) -> dict[str, Any]:
        return {
            "url": f"s3://{self.bucket_name}/{prefix}",
            "endpoint": self.endpoint,
            "region": self.region,
            "ca_file": str(self.ca_file) if self.ca_file else None,
            "retry_timeout": f"{self.retry_seconds}s",
            "credentials": {
                "access_key_id": self.access_key_id,
                "secret_access_key": self.secret_access_key,
            },
        }

    def open_bucket(self, prefix: str) -> Bucket:
        return S3Bucket(self.client, self.bucket_name, prefix)

    def make_source(self, source: SourceData) -> dict[str, Any]:
        prefix = f"material/{source.name}"
        if source.name not in self.uploaded:
            for path in sorted(source.folder.rglob("*")):
                if path.is_file():
                    key = f"{prefix}/{path.relative_to(source.folder).as_posix()}"
                    self.client.put_object(Bucket=self.bucket_name, Key=key, Body=path.read_bytes())
            self.uploaded.add(source.name)
        return self.make_spec(prefix)
