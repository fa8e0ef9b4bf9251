"""The formats `parquet`, `pages` and `tokens`, read by the readers that they are for."""

import hashlib
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import s3fs
import torch

from millrace.datasets.formats.base import FieldType
from millrace.datasets.formats.parquet import PagesFormat, ParquetFormat
from millrace.datasets.formats.tokens import TokensFormat
from millrace.datasets.sample import Sample
from millrace.keys.datasets import DatasetKeys
from millrace.storage import open_store, put
from millrace.testing.rgw import RGW
from tests.stores import make_spec
from tests.support.formats import make_objects
from tests.support.templar import TemplarPages

KEYS = DatasetKeys("corpus")


def write_files(folder: Path, objects: Mapping[str, bytes]) -> None:
    for key, body in objects.items():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_loads_parquet_shards_with_their_types(tmp_path: Path, streaming: bool) -> None:
    fields = {
        "cls": FieldType.INT,
        "jpg": FieldType.BYTES,
        "meta.json": FieldType.JSON,
        "tokens": FieldType.UINT16_ARRAY,
        "txt": FieldType.STR,
    }
    rng = random.Random(0)
    rows = [
        {
            "cls": n,
            "jpg": rng.randbytes(50),
            "meta.json": json.dumps({"n": n}),
            "tokens": [n, 65535],
            "txt": f"größer {n}" if n % 7 else None,
        }
        for n in range(2500)
    ]
    samples = [
        Sample(
            f"k{n}",
            {
                "cls": str(row["cls"]).encode(),
                "jpg": row["jpg"],
                "meta.json": row["meta.json"].encode(),
                "tokens": np.array(row["tokens"], "<u2").tobytes(),
                **({} if row["txt"] is None else {"txt": row["txt"].encode()}),
            },
            n + 1,
        )
        for n, row in enumerate(rows)
    ]
    write_files(
        tmp_path, make_objects(ParquetFormat(), KEYS, fields, [samples[:1200], samples[1200:]])
    )
    loaded: Any = datasets.load_dataset(
        "parquet",
        data_files=str(tmp_path / "corpus/shards/parquet/train/*.parquet"),
        split="train",
        streaming=streaming,
        cache_dir=str(tmp_path / "cache"),
    )
    assert list(loaded) == [{"__key__": f"k{n}", **row} for n, row in enumerate(rows)]
    assert {name: str(feature) for name, feature in loaded.features.items()} == {
        "__key__": "Value('string')",
        "cls": "Value('int64')",
        "jpg": "Value('binary')",
        "meta.json": "Value('string')",
        "tokens": "List(Value('uint16'))",
        "txt": "Value('string')",
    }


def test_a_loader_of_templar_finds_the_rows_of_every_page(
    request: pytest.FixtureRequest, rgw: RGW, bucket: str
) -> None:
    texts = [f"text {n}" for n in range(4000)]
    samples = [Sample(f"k{n}", {"txt": text.encode()}, n + 1) for n, text in enumerate(texts)]
    parts = [samples[:2000], samples[2000:2149], samples[2149:]]
    objects = make_objects(PagesFormat(), KEYS, {"txt": FieldType.STR}, parts)
    store = open_store(make_spec("rgw", request).model_copy(update={"url": f"s3://{bucket}"}))
    for key, body in objects.items():
        put(store, key, body)
    system = s3fs.S3FileSystem(
        key=rgw.full.access_key_id,
        secret=rgw.full.secret_access_key,
        client_kwargs={"endpoint_url": rgw.endpoint},
    )
    pages = TemplarPages(system, bucket, "corpus/shards/pages/train")
    assert pages.count("train") == 4000
    for row in (*range(0, 3999, 7), *range(2100, 2200), *range(3900, 3999)):
        page = pages.read("train", row)
        assert page == texts[row : row + len(page)]
        assert page
    # Of 1851 rows in 2 row groups, the loader takes the last for the first of the second group.
    assert pages.read("train", 3999) == texts[2149 + 925 : 2149 + 925 + 100]


class TemplarTokens:
    """Sequences of a shard and its ids, opened as Templar's later loader does it."""

    def __init__(self, folder: Path, shard: int, length: int) -> None:
        self._tokens = np.load(folder / f"train_{shard:06d}.npy", mmap_mode="r", allow_pickle=False)
        self._ids = np.load(
            folder / f"sample_ids_{shard:06d}.npy", mmap_mode="r", allow_pickle=False
        )
        assert self._tokens.dtype == np.uint32
        assert self._tokens.ndim == 1
        assert len(self._tokens) == len(self._ids) * length
        self._length = length

    def __len__(self) -> int:
        return len(self._ids)

    def read(self, index: int) -> tuple[torch.Tensor, int]:
        tokens = torch.tensor(self._tokens[index * self._length : (index + 1) * self._length])
        return tokens, int(self._ids[index])


def test_a_loader_of_templar_reads_packed_sequences_and_their_ids(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sequences = rng.integers(0, 128_000, (300, 64)).astype("<u4")
    samples = [Sample(f"k{n}", {"tokens": one.tobytes()}, n + 1) for n, one in enumerate(sequences)]
    objects = make_objects(
        TokensFormat(), KEYS, {"tokens": FieldType.UINT32_ARRAY}, [samples[:180], samples[180:]]
    )
    write_files(tmp_path, objects)
    folder = tmp_path / "corpus/shards/tokens/train"
    index = json.loads((folder / "index.json").read_text())
    for number, shard in enumerate(index["shards"]):
        path = folder / shard["name"]
        with path.open("rb") as file:
            _, _, ids = (np.load(file) for _ in range(3))
        np.save(folder / f"sample_ids_{number:06d}.npy", ids)
        path.rename(folder / f"train_{number:06d}.npy")
    shards = [TemplarTokens(folder, number, 64) for number in range(2)]
    assert [len(shard) for shard in shards] == [180, 120]
    read = [shard.read(n) for shard in shards for n in range(len(shard))]
    assert np.array_equal(torch.stack([tokens for tokens, _ in read]).numpy(), sequences)
    digests = [hashlib.blake2b(one.tobytes(), digest_size=8).digest() for one in sequences]
    assert [sample for _, sample in read] == [int.from_bytes(one, "little") for one in digests]


def test_nanogpt_draws_batches_from_a_shard(tmp_path: Path) -> None:
    documents = [np.arange(n, n + 700, dtype="<u2") for n in range(20)]
    samples = [Sample(f"k{n}", {"tokens": one.tobytes()}, n + 1) for n, one in enumerate(documents)]
    objects = make_objects(TokensFormat(), KEYS, {"tokens": FieldType.UINT16_ARRAY}, [samples])
    write_files(tmp_path, objects)
    tokens = np.concatenate(documents).astype(np.int64)
    path = tmp_path / "corpus/shards/tokens/train/train-00000-000000.npy"
    data, block = np.load(path, mmap_mode="r"), 256
    starts = torch.randint(len(data) - block, (12,), generator=torch.Generator().manual_seed(0))
    x = torch.stack([torch.from_numpy(data[i : i + block].astype(np.int64)) for i in starts])
    y = torch.stack(
        [torch.from_numpy(data[i + 1 : i + 1 + block].astype(np.int64)) for i in starts]
    )
    assert x.tolist() == [tokens[i : i + block].tolist() for i in starts.tolist()]
    assert torch.equal(x[:, 1:], y[:, :-1])
