"""Several stores with copies of the same objects, each behind an endpoint with its own faults."""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Self

from millrace.storage import Store, StoreSpec, head, open_store, put
from millrace.storage.mirrored_objects import MirroredObject
from millrace.testing.credentials import make_credentials
from millrace.testing.r2 import R2Proxy, Rules
from millrace.testing.rgw import RGW
from tests.stores import ACCOUNT


@contextmanager
def start_mirrors(rgw: RGW, folder: Path, count: int) -> Iterator[list[R2Proxy]]:
    """Start endpoints in front of one RGW."""
    keys = {rgw.full.access_key_id: rgw.full.secret_access_key}
    rules = Rules(write_interval=0)
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                R2Proxy.start(rgw.endpoint, keys, folder / str(n), tls=False, rules=rules)
            )
            for n in range(count)
        ]


@dataclass
class Mirrors:
    """Stores of one test, one behind each endpoint."""

    proxies: list[R2Proxy]
    specs: list[StoreSpec]
    stores: list[Store]

    @classmethod
    def make(cls, rgw: RGW, proxies: list[R2Proxy], prefix: str = "") -> Self:
        """Make a bucket behind each endpoint, which has no faults then."""
        name = secrets.token_hex(6)
        specs: list[StoreSpec] = []
        for number, proxy in enumerate(proxies):
            proxy.reset()
            bucket = rgw.create_bucket(f"mirror-{number}-{name}")
            specs.append(
                StoreSpec(
                    url=f"r2://{ACCOUNT}/{bucket}{prefix}",
                    endpoint=proxy.endpoint,
                    credentials=make_credentials(rgw.full),
                    retry_timeout=timedelta(seconds=20),
                )
            )
        return cls(proxies, specs, [open_store(spec) for spec in specs])

    def put(self, key: str, *bodies: bytes | None) -> MirroredObject:
        """Write a copy into each store, and describe the first one."""
        for store, body in zip(self.stores, bodies, strict=True):
            if body is not None:
                put(store, key, body)
        found = head(self.stores[0], key)
        self.reset()
        return MirroredObject(key, found.size, etag=found.etag or "", listed_by=0)

    def put_parts(self, number: int, key: str, body: bytes) -> None:
        """Write a copy by a multipart upload, so that its ETag is another one."""
        proxy, store = self.proxies[number], self.stores[number]
        assert store.spec.credentials is not None
        client = proxy.make_client(proxy.get_key(store.spec.credentials.access_key_id))
        prefix = store.location.prefix
        named = {"Bucket": store.location.bucket, "Key": f"{prefix}/{key}" if prefix else key}
        upload = {**named, "UploadId": client.create_multipart_upload(**named)["UploadId"]}
        part = client.upload_part(**upload, PartNumber=1, Body=body)
        parts = [{"PartNumber": 1, "ETag": part["ETag"]}]
        client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})

    def reset(self) -> None:
        """Remove all faults and counts."""
        for proxy in self.proxies:
            proxy.reset()

    def count(self) -> list[int]:
        """Return the number of requests to each store."""
        return [len(proxy.list_requests()) for proxy in self.proxies]
