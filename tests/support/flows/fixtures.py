"""Blocks, sources and results of flow runs."""

import io
import json
import tarfile
import uuid
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect_aws import AwsCredentials
from prefect_aws.client_parameters import AwsClientParameters

from blocks import Bucket, BucketRole
from millrace.keys.leases import LeaseKeys
from millrace.lease import Holder, Lease, StoreClock, acquire
from millrace.storage import open_store
from millrace.testing.key import Key
from millrace.testing.rgw import RGW
from tests.oracle import Bucket as Place
from tests.prefect_server import PrefectServer, SharedWorker, Worker
from tests.ray_cluster import RayCluster

SHARD = "shard-dataset/shard-dataset"
# Small enough for many shards, and for several partitions, of a few thousand rows.
SHARDING = {"shard_bytes": 65536, "partition_bytes": 200_000}
RUN = {"workers": 2, "uploads": 2, "lease_timeout": "PT5S"}

MakeBlock = Callable[..., dict[str, Any]]


@pytest.fixture
def block(prefect_api: PrefectServer, rgw: RGW) -> MakeBlock:
    """Save a Bucket block of an RGW bucket; what comes back is the parameter that refers to it."""

    def make(bucket: str, *, read: Key | None = None, write: Key | None = None) -> dict[str, Any]:
        name = f"bucket-{uuid.uuid4().hex[:8]}"
        pairs: dict[str, AwsCredentials] = {}
        for right, key in (("read", read), ("write", write)):
            if key is not None:
                pair = make_aws_credentials(key, rgw.endpoint)
                pair.save(f"{name}-{right}")
                pairs[f"{right}_credentials"] = pair
        Bucket(role=BucketRole.DATASET, url=f"s3://{bucket}", **pairs).save(name)  # pyright: ignore[reportArgumentType]
        return {"$ref": {"block_document_slug": f"millrace-bucket/{name}"}}

    return make


@pytest.fixture
def ray_worker(shared_worker: SharedWorker, ray_cluster: RayCluster) -> Worker:
    """A worker on a machine of the cluster."""
    return shared_worker.get({**ray_cluster.environment, "RAY_ADDRESS": ray_cluster.address})


def make_aws_credentials(key: Key, endpoint: str) -> AwsCredentials:
    """prefect-aws's block of a key."""
    return AwsCredentials(
        aws_access_key_id=key.access_key_id,
        aws_secret_access_key=key.secret_access_key,  # pyright: ignore[reportArgumentType]
        aws_session_token=key.session_token,
        aws_client_parameters=AwsClientParameters(endpoint_url=endpoint),
    )


def make_texts(rows: int = 4000) -> list[str]:
    """Return the texts of a source's rows, all different."""
    return [f"{number:09d} " + "water " * 30 for number in range(rows)]


def make_jsonl(rows: list[str]) -> bytes:
    """The rows as a file."""
    return b"".join(json.dumps({"text": row}).encode() + b"\n" for row in rows)


@pytest.fixture
def folder_source(tmp_path: Path) -> dict[str, Any]:
    """A folder with all rows, as the flow's parameter."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "rows.jsonl").write_bytes(make_jsonl(make_texts()))
    return {"url": folder.as_uri(), "columns": {"txt": "text"}}


def read_texts(place: Place) -> Counter[str]:
    """Return the samples of a dataset's shards, by Python's own tar reader."""
    found: Counter[str] = Counter()
    for name in place.list_names():
        if name.endswith(".tar"):
            with tarfile.open(fileobj=io.BytesIO(place.read(name))) as tar:
                for member in tar:
                    data = tar.extractfile(member)
                    assert data is not None
                    found[data.read().decode()] += 1
    return found


def has_one_partition_left(folder: Path) -> bool:
    """Decide whether a run has done all work, except for a partition that is held elsewhere."""
    plan, ends = folder / "words/plan.json", list(folder.glob("words/commits/*/end.json"))
    return plan.exists() and len(ends) == 3


def hold_partition(store_url: str, dataset: str, partition: str) -> Lease:
    """Claim a partition as a machine elsewhere would: no run can end before it is given back."""
    store = open_store(store_url)
    elsewhere = Holder(id="elsewhere", host="elsewhere", machine="elsewhere", pid=1, started="1")
    clock = StoreClock.read(store, dataset, elsewhere)
    lease = acquire(store, LeaseKeys(dataset, partition), elsewhere, timedelta(hours=1), clock)
    assert isinstance(lease, Lease)
    return lease
