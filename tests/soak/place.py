"""Stores of the soak's datasets, for the driver and for the oracle."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tests.oracle import Bucket, Folder, S3Bucket
from tests.soak.material import Material


class Place(Protocol):
    """A store that many cases share, a prefix each.

    Attributes:
        name: For the tables.
    """

    name: str

    def make_spec(self, prefix: str) -> dict[str, Any]:
        """Return the spec that a driver opens."""
        ...

    def open_bucket(self, prefix: str) -> Bucket:
        """The same for the oracle, on the shortest way."""
        ...

    def make_source(self, material: Material) -> dict[str, Any]:
        """Return the spec that a driver opens for a source: in this store, or its folder."""
        ...


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """Folders."""

    root: Path
    name: str = "folder"

    def make_spec(self, prefix: str) -> dict[str, Any]:
        return {"url": (self.root / prefix).as_uri()}

    def open_bucket(self, prefix: str) -> Bucket:
        return Folder(self.root / prefix)

    def make_source(self, material: Material) -> dict[str, Any]:
        return {"url": material.folder.as_uri()}


@dataclass(slots=True)
class S3Place:
    """A bucket of an S3 server; what the driver talks to may be a proxy before it.

    Attributes:
        client: boto3's, of the server itself.
        uploaded: Materials that are there already.
    """

    name: str
    endpoint: str
    access_key_id: str
    secret_access_key: str = field(repr=False)
    client: Any
    bucket_name: str
    region: str = "us-east-1"
    ca_file: Path | None = None
    patience: float = 120.0
    uploaded: set[str] = field(default_factory=set)

    def make_spec(self, prefix: str) -> dict[str, Any]:
        return {
            "url": f"s3://{self.bucket_name}/{prefix}",
            "endpoint": self.endpoint,
            "region": self.region,
            "ca_file": str(self.ca_file) if self.ca_file else None,
            "retry_timeout": f"{self.patience}s",
            "credentials": {
                "access_key_id": self.access_key_id,
                "secret_access_key": self.secret_access_key,
            },
        }

    def open_bucket(self, prefix: str) -> Bucket:
        return S3Bucket(self.client, self.bucket_name, prefix)

    def make_source(self, material: Material) -> dict[str, Any]:
        prefix = f"material/{material.name}"
        if material.name not in self.uploaded:
            for path in sorted(material.folder.rglob("*")):
                if path.is_file():
                    key = f"{prefix}/{path.relative_to(material.folder).as_posix()}"
                    self.client.put_object(Bucket=self.bucket_name, Key=key, Body=path.read_bytes())
            self.uploaded.add(material.name)
        return self.make_spec(prefix)
