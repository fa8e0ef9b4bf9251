"""Readers of shards from other projects, over S3: see `benchmarks.loader`.

Each reader yields the texts or the token arrays of all samples, in one process.
"""

import importlib
import io
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import obstore

from benchmarks.peer_options import (
    export_to_streaming,
    let_litdata_use_http,
    make_boto3_options,
    make_s3fs_options,
)
from millrace.storage import Store, StoreSpec, open_filesystem, open_store, sign_url

IN_FLIGHT = 2  # requests of the floor, and shards that a reader without prefetch gets at once


@dataclass(frozen=True, slots=True)
class StoredShards:
    """Shards of one format in a store.

    Attributes:
        spec: Store of the dataset.
        dataset: Name of the dataset.
        format: Format of the shards.
        folder: Prefix of the shards.
        keys: Keys of the shards.
        packages: Folder with the packages of mosaicml-streaming.
    """

    spec: StoreSpec
    dataset: str
    format: str
    folder: str
    keys: Sequence[str]
    packages: Path

    def open(self) -> Store:
        """Return the store."""
        return open_store(self.spec)


def import_peer(peer: str, packages: Path) -> None:
    """Import a reader, so that its import is not measured."""
    if peer == "streaming":
        from millrace.testing.mosaicml import prepare_import

        sys.path.insert(0, str(packages))
        prepare_import()
    names = {"streaming": "streaming.base", "pyarrow": "pyarrow.parquet"}
    importlib.import_module(names.get(peer, peer))


def fetch_bodies(shards: StoredShards) -> Iterator[bytes]:
    """Yield the bytes of the shards, two of which are fetched at once."""
    store = shards.open()
    keys = iter(shards.keys)

    def fetch(key: str) -> Any:
        return obstore.get(store.raw, key).bytes()

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        waiting = deque(pool.submit(fetch, key) for key in islice(keys, IN_FLIGHT))
        while waiting:
            body = waiting.popleft().result()
            if (key := next(keys, None)) is not None:
                waiting.append(pool.submit(fetch, key))
            yield body


def read_webdataset(shards: StoredShards) -> Iterator[Any]:
    """Read with ``webdataset.WebDataset``, which fetches by curl, and shuffle its way."""
    webdataset: Any = importlib.import_module("webdataset")
    store = shards.open()
    urls = [f"pipe:curl -s '{sign_url(store, key, timedelta(hours=1))}'" for key in shards.keys]
    dataset = cast("Any", webdataset).WebDataset(urls, shardshuffle=len(urls), seed=0)
    for sample in dataset.shuffle(5000).decode():
        yield sample["txt"]


def read_litdata(shards: StoredShards) -> Iterator[Any]:
    """Read with ``litdata.StreamingDataset``, shuffled, without TLS."""
    import litdata

    let_litdata_use_http()
    with tempfile.TemporaryDirectory() as cache:
        dataset: Any = litdata.StreamingDataset(
            f"{shards.spec.url}/{shards.folder}",
            cache_dir=cache,
            shuffle=True,
            storage_options=make_boto3_options(shards.spec),
        )
        for sample in dataset:
            yield sample["txt"]


def read_mds(shards: StoredShards) -> Iterator[Any]:
    """Read with ``streaming.StreamingDataset``, shuffled."""
    export_to_streaming(shards.spec)
    streaming: Any = importlib.import_module("streaming.base")
    with tempfile.TemporaryDirectory() as cache:
        dataset = streaming.StreamingDataset(
            remote=f"{shards.spec.url}/{shards.folder}", local=cache, shuffle=True, batch_size=32
        )
        for sample in dataset:
            yield sample["txt"]


def read_datasets(shards: StoredShards) -> Iterator[Any]:
    """Stream with ``datasets.load_dataset``, and shuffle its way."""
    import datasets

    loaded: Any = datasets.load_dataset(
        "parquet",
        data_files=[f"{shards.spec.url}/{key}" for key in shards.keys],
        split="train",
        streaming=True,
        storage_options=make_s3fs_options(shards.spec),
    )
    for sample in loaded.shuffle(seed=0, buffer_size=5000):
        yield sample["txt"]


def read_pyarrow(shards: StoredShards) -> Iterator[Any]:
    """Read with ``pyarrow.parquet`` in batches, as Python objects, without a shuffle."""
    parquet: Any = importlib.import_module("pyarrow.parquet")
    filesystem, folder = open_filesystem(shards.open())
    for key in shards.keys:
        with filesystem.open(f"{folder}/{key}") as file:
            for batch in parquet.ParquetFile(cast("Any", file)).iter_batches(columns=["txt"]):
                yield from batch.column(0).to_pylist()


def read_numpy(shards: StoredShards) -> Iterator[Any]:
    """Fetch whole token shards, and cut them with numpy, without a shuffle."""
    for body in fetch_bodies(shards):
        file = io.BytesIO(body)
        tokens, ends = np.load(file), np.load(file)
        yield from np.split(tokens, ends[:-1])


PEERS: dict[str, dict[str, Callable[[StoredShards], Iterator[Any]]]] = {
    "tar": {"webdataset": read_webdataset},
    "litdata": {"litdata": read_litdata},
    "mds": {"streaming": read_mds},
    "parquet": {"datasets": read_datasets, "pyarrow": read_pyarrow},
    "tokens": {"numpy": read_numpy},
}
