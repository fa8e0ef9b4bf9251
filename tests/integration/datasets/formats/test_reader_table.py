"""Each reader that `READERS` names opens the shards of its format, all samples in their order."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pytest
from pyarrow import parquet
from webdataset import WebDataset

from millrace.datasets.formats import FieldType, FormatName, open_format
from millrace.datasets.formats.readers import READERS, ShardReader
from millrace.datasets.sample import Sample
from millrace.keys.datasets import DatasetKeys
from tests.support.format_readers import read_litdata, read_mds
from tests.support.formats import make_objects
from tests.support.templar import TemplarPages

KEYS = DatasetKeys("texts")
TEXTS = [f"größer {number}" for number in range(250)]


def read_by_datasets(folder: Path, kind: str) -> list[str]:
    extension = {"parquet": "parquet", "webdataset": "tar"}[kind]
    loaded: Any = datasets.load_dataset(
        kind, data_files=f"{folder}/*.{extension}", split="train", cache_dir=str(folder / "cache")
    )
    return [row.get("text", row.get("txt")) for row in loaded]


def read_by_webdataset(folder: Path) -> list[str]:
    shards = sorted(map(str, folder.glob("*.tar")))
    texts = [sample["txt"].decode() for sample in WebDataset(shards, shardshuffle=False)]
    gc.collect()  # the library leaves its files open; their warnings belong to this test
    return texts


def read_by_pyarrow(folder: Path) -> list[str]:
    tables = [parquet.ParquetFile(path).read() for path in sorted(folder.glob("*.parquet"))]
    return [text for table in tables for text in table.column(table.column_names[-1]).to_pylist()]


def read_by_templar(folder: Path) -> list[str]:
    root, name = folder.parents[3], str(folder.relative_to(folder.parents[3]))
    pages = TemplarPages(fsspec.filesystem("file"), str(root), name)
    texts: list[str] = []
    while len(texts) < pages.count("train"):
        texts += pages.read("train", len(texts))
    return texts


def read_by_numpy(folder: Path) -> list[str]:
    """Return the texts, whose characters are the tokens. Each ends with a token 0."""
    shards = sorted(folder.glob("*.npy"))
    tokens = np.concatenate([np.load(path, mmap_mode="r") for path in shards])
    return "".join(map(chr, tokens)).split("\0")[:-1]


OPENERS: dict[tuple[str, str], Callable[[Path, Any], list[str]]] = {
    ("webdataset", "webdataset"): lambda folder, _: read_by_webdataset(folder),
    ("webdataset", "datasets"): lambda folder, _: read_by_datasets(folder, "webdataset"),
    ("litdata", "litdata"): lambda folder, _: [item["txt"] for item in read_litdata(str(folder))],
    ("mds", "mosaicml-streaming"): lambda folder, request: [
        item["txt"] for item in read_mds(request.getfixturevalue("mosaicml"), folder)
    ],
    ("parquet", "datasets"): lambda folder, _: read_by_datasets(folder, "parquet"),
    ("parquet", "pyarrow"): lambda folder, _: read_by_pyarrow(folder),
    ("pages", "datasets"): lambda folder, _: read_by_datasets(folder, "parquet"),
    ("pages", "pyarrow"): lambda folder, _: read_by_pyarrow(folder),
    ("pages", "s3fs"): lambda folder, _: read_by_templar(folder),
    ("tokens", "numpy"): lambda folder, _: read_by_numpy(folder),
}
"""ShardReader of the texts of a folder by each format and package. Add new readers here."""

READ = [(name, reader) for name, described in READERS.items() for reader in described.readers]


def make_sample(name: FormatName, number: int, text: str) -> Sample:
    fields = {"txt": text.encode()}
    if name is FormatName.TOKENS:
        fields = {"tokens": np.array([*map(ord, text), 0], "<u2").tobytes()}
    return Sample(f"{number:05d}", fields, number + 1)


def test_every_format_has_its_readers() -> None:
    assert set(READERS) == set(FormatName)
    assert list(OPENERS) == [(name, reader.package) for name, reader in READ]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("name", "reader"), READ, ids=[f"{name}-{reader.package}" for name, reader in READ]
)
def test_a_reader_opens_the_shards_of_its_format(
    name: FormatName, reader: ShardReader, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    shard_format = open_format(name)
    fields = {"txt": FieldType.STR}
    if name is FormatName.TOKENS:
        fields = {"tokens": FieldType.UINT16_ARRAY}
    samples = [make_sample(name, number, text) for number, text in enumerate(TEXTS)]
    given = fields if shard_format.has_types else {}
    for key, body in make_objects(
        shard_format, KEYS, given, [samples[:120], samples[120:]]
    ).items():
        path = tmp_path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    folder = tmp_path / KEYS.make_shards_prefix(name, "train")
    assert OPENERS[name, reader.package](folder, request) == TEXTS
