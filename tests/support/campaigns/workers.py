"""A dataset in a store, and a worker's settings."""

import io
import tarfile
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from millrace.campaigns.worker import WorkerOptions, WorkerSettings
from millrace.checkpoints import watch_epoch_end
from millrace.digest import compute_digest
from millrace.gradients import RunSettings
from millrace.keys.datasets import DatasetKeys
from millrace.records import commit_once
from millrace.schemas.dataset import Manifest, ManifestShard
from millrace.storage import Store, StoreSpec, open_store, put

Make = Callable[..., WorkerSettings]


@pytest.fixture
def place(tmp_path: Path) -> StoreSpec:
    return StoreSpec(url=(tmp_path / "store").as_uri())


@pytest.fixture
def store(place: StoreSpec) -> Store:
    return open_store(place)


@pytest.fixture
def make(place: StoreSpec, tmp_path: Path) -> Make:
    """A worker's settings."""

    def made(**more: Any) -> WorkerSettings:
        training = {"command": ("true",), "windows_per_epoch": 2} | {
            name: more.pop(name) for name in WorkerOptions.model_fields if name in more
        }
        settings = {
            "campaign": "small", "uid": "worker-0", "run": RunSettings(run="small/run", windows=4),
            "read_store": place, "write_store": place, "training": training,
            "dataset": "text", "data_folder": tmp_path / "data", "restart_delay": "PT0S",
        } | more  # fmt: skip
        return WorkerSettings.model_validate(settings)

    return made


@contextmanager
def owned(store: Store, epochs: int = 1) -> Generator[None]:
    """Have an owner end the epochs of the one worker while the block lasts, as a campaign does."""

    def own() -> None:
        for epoch in range(epochs):
            watch_epoch_end(
                store, "small/model", epoch, timeout=timedelta(minutes=1), members=["worker-0"]
            )

    with ThreadPoolExecutor(1) as pool:
        owning = pool.submit(own)
        yield
        owning.result()


def finalize_dataset(store: Store, shards: int) -> None:
    """Write a complete dataset: shards of a sample each, and one that is held out."""
    made: list[ManifestShard] = []
    for number in range(shards + 1):
        split = "val" if number == shards else "train"
        with io.BytesIO() as body:
            with tarfile.open(fileobj=body, mode="w") as tar:
                member = tarfile.TarInfo(f"{number}.txt")
                member.size = 100
                tar.addfile(member, io.BytesIO(str(number).encode() * 100))
            data = body.getvalue()
        key = f"text/shards/webdataset/{split}/{split}-00000-{number:06d}.tar"
        put(store, key, data)
        digest = compute_digest(data)
        shard = ManifestShard(
            format="webdataset", key=key, split=split, samples=1, size=len(data), digest=digest
        )
        made.append(shard)
    manifest = Manifest(
        dataset="text", plan_digest=compute_digest(b""), formats=("webdataset",),
        shards=tuple(made), samples={"train": shards, "val": 1},
        size=sum(one.size for one in made), quarantined=0,
    )  # fmt: skip
    commit_once(store, DatasetKeys("text").manifest, manifest)
