"""Writers of the formats and readers of the sources from other projects: see `benchmarks.formats`.

Each writer reads its source as its users do, and writes shards of 64 MiB. It uploads them, if that
is asked for, as its users do. Each reader returns the number of characters of the texts that it has
read.
"""

import csv
import gzip
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peer_options import (
    export_to_streaming,
    let_litdata_use_http,
    make_boto3_options,
    make_s3fs_options,
)
from millrace.storage import StoreSpec

MIB = 1 << 20
SHARD = 64 * MIB
MOSAICML = "mosaicml"  # folder beside the results
PREFIX = "peer"  # of the shards of a writer in a bucket


@dataclass(frozen=True, slots=True)
class ShardOutput:
    """Destination of the shards of a run.

    Attributes:
        folder: New folder for the shards, or for files that wait for their upload.
        bucket: Bucket for the shards; None keeps them in the folder.
    """

    folder: Path
    bucket: StoreSpec | None = None

    @property
    def url(self) -> str:
        """Folder or URL for the shards."""
        return f"{self.bucket.url}/{PREFIX}" if self.bucket else str(self.folder)

    @property
    def s3fs_options(self) -> dict[str, Any] | None:
        """Options of s3fs for the bucket; None for a folder."""
        return make_s3fs_options(self.bucket) if self.bucket else None

    def upload(self, name: str) -> None:
        """Upload a file with boto3, and delete it, unless the shards stay in the folder."""
        if self.bucket is None:
            return
        from millrace.testing.key import Key, connect

        options, file = make_boto3_options(self.bucket), Path(name)
        key = Key(options["aws_access_key_id"], options["aws_secret_access_key"])
        client = connect(options["endpoint_url"], key)
        client.upload_file(name, self.bucket.url.removeprefix("s3://"), f"{PREFIX}/{file.name}")
        file.unlink()


@dataclass(frozen=True, slots=True)
class HubFolder:
    """Files of a dataset at a stand-in of the Hub.

    Attributes:
        endpoint: URL of the server.
        repo: Name of the dataset.
        paths: Paths of the files.
        token: Token of a reader.
    """

    endpoint: str
    repo: str
    paths: tuple[str, ...]
    token: str

    @property
    def url(self) -> str:
        """URL below which a web client finds the files."""
        return f"{self.endpoint}/datasets/{self.repo}/resolve/main"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of a request."""
        return {"Authorization": f"Bearer {self.token}"}

    @property
    def urls(self) -> list[str]:
        """URLs of the files."""
        return [f"{self.url}/{path}" for path in self.paths]


class FormatPeer(NamedTuple):
    """Library that people use for a format or for a kind of source.

    Attributes:
        name: Name of the library.
        run: Function that writes or reads with the library.
    """

    name: str
    run: Callable[..., Any]


def write_webdataset(source: Path, output: ShardOutput) -> None:
    """Write with ``webdataset.ShardWriter``. Its ``post`` hook uploads with boto3."""
    from webdataset.writer import ShardWriter

    output.folder.mkdir()
    pattern = f"{output.folder}/%06d.tar"
    with ShardWriter(pattern, maxsize=SHARD, post=output.upload, verbose=0) as writer:
        for number, row in enumerate(_iterate_rows(source)):
            writer.write({"__key__": f"{number:09d}", "txt": row["text"]})


def write_litdata(source: Path, output: ShardOutput) -> None:
    """Write with ``litdata.optimize`` and one worker."""
    import litdata

    let_litdata_use_http()
    litdata.optimize(
        fn=iterate_texts,
        inputs=sorted(map(str, source.iterdir())),
        output_dir=output.url,
        chunk_bytes=SHARD,
        num_workers=1,
        storage_options=make_boto3_options(output.bucket) if output.bucket else {},
    )


def iterate_texts(file: str) -> Iterator[dict[str, str]]:
    """Yield the samples of a file. The workers of litdata import this function."""
    let_litdata_use_http()
    with Path(file).open() as lines:
        for line in lines:
            yield {"txt": json.loads(line)["text"]}


def write_mds(source: Path, output: ShardOutput) -> None:
    """Write with ``streaming.MDSWriter``."""
    from millrace.testing.mosaicml import prepare_import

    sys.path.insert(0, str(output.folder.parent / MOSAICML))
    prepare_import()
    if output.bucket:
        export_to_streaming(output.bucket)
    streaming: Any = importlib.import_module("streaming.base")
    with streaming.MDSWriter(out=output.url, columns={"txt": "str"}, size_limit=SHARD) as writer:
        for row in _iterate_rows(source):
            writer.write({"txt": row["text"]})


def write_parquet(source: Path, output: ShardOutput) -> None:
    """Write with ``datasets.Dataset.to_parquet``, a file for each 64 MiB of Arrow data."""
    import datasets

    files = sorted(map(str, source.iterdir()))
    output.folder.mkdir()
    with tempfile.TemporaryDirectory(dir=output.folder.parent) as cache:
        table: Any = datasets.Dataset.from_json(files, cache_dir=cache)  # pyright: ignore[reportArgumentType]
        shards = max(1, table.data.nbytes // SHARD)
        for number in range(shards):
            table.shard(shards, number, contiguous=True).to_parquet(
                f"{output.url}/{number:06d}.parquet", storage_options=output.s3fs_options
            )


def write_pages(source: Path, output: ShardOutput) -> None:
    """Write pages of 100 texts and an index of them with ``pyarrow``. boto3 uploads the files."""
    import pyarrow
    from pyarrow import parquet

    output.folder.mkdir()
    rows, numbers = _iterate_rows(source), count()
    schema = pyarrow.schema({"text": pyarrow.string()})

    def take_group() -> list[str]:
        return [row["text"] for row in islice(rows, 1000)]

    group = take_group()
    while group:
        path, size = output.folder / f"{next(numbers):06d}.parquet", 0
        with parquet.ParquetWriter(
            path,
            schema,
            compression="zstd",
            use_dictionary=False,
            write_page_index=True,
            max_rows_per_page=100,
        ) as writer:
            while group and size < SHARD:
                writer.write_table(pyarrow.table({"text": group}, schema))
                size += sum(map(len, group))
                group = take_group()
        output.upload(str(path))


def write_tokens(source: Path, output: ShardOutput) -> None:
    """Write tokens, and the ends of the samples, with ``numpy.save``. boto3 uploads the files."""
    import numpy as np
    from pyarrow import parquet

    output.folder.mkdir()
    numbers = count()

    def save(tokens: list[Any], lengths: list[Any]) -> None:
        path = output.folder / f"{next(numbers):06d}.npy"
        with path.open("wb") as file:
            np.save(file, np.concatenate(tokens))
            np.save(file, np.cumsum(np.concatenate(lengths)))
        output.upload(str(path))

    tokens: list[Any] = []
    lengths: list[Any] = []
    for path in sorted(source.iterdir()):
        for batch in parquet.ParquetFile(path).iter_batches(1000, columns=["tokens"]):
            column: Any = batch.column(0)
            tokens.append(column.flatten().to_numpy())
            lengths.append(column.value_lengths().to_numpy())
            if sum(part.nbytes for part in tokens) >= SHARD:
                save(tokens, lengths)
                tokens, lengths = [], []
    if tokens:
        save(tokens, lengths)


WRITERS: dict[str, FormatPeer] = {
    "webdataset": FormatPeer("webdataset", write_webdataset),
    "litdata": FormatPeer("litdata", write_litdata),
    "mds": FormatPeer("streaming", write_mds),
    "parquet": FormatPeer("datasets", write_parquet),
    "pages": FormatPeer("pyarrow", write_pages),
    "tokens": FormatPeer("numpy", write_tokens),
}


def _iterate_rows(source: Path) -> Iterator[dict[str, Any]]:
    for file in sorted(source.iterdir()):
        with file.open() as lines:
            for line in lines:
                yield json.loads(line)


def read_jsonl(source: Path) -> int:
    """Read JSON lines with ``json``."""
    return sum(len(row["text"]) for row in _iterate_rows(source))


def read_gzip(source: Path) -> int:
    """Read compressed JSON lines with ``gzip`` and ``json``."""
    size = 0
    for file in sorted(source.iterdir()):
        with gzip.open(file) as lines:
            size += sum(len(json.loads(line)["text"]) for line in lines)
    return size


def read_zstd(source: Path) -> int:
    """Read compressed JSON lines with ``zstandard`` and ``json``."""
    import zstandard

    size = 0
    for file in sorted(source.iterdir()):
        with zstandard.open(file, "rt") as lines:
            size += sum(len(json.loads(line)["text"]) for line in lines)
    return size


def read_csv(source: Path) -> int:
    """Read CSV with ``csv.DictReader``."""
    csv.field_size_limit(SHARD)
    size = 0
    for file in sorted(source.iterdir()):
        with file.open(newline="") as lines:
            size += sum(len(row["text"]) for row in csv.DictReader(lines))
    return size


def read_parquet(source: Path) -> int:
    """Read parquet in batches with ``pyarrow``, as Python objects."""
    from pyarrow import parquet

    size = 0
    for path in sorted(source.iterdir()):
        for batch in parquet.ParquetFile(path).iter_batches(columns=["text"]):
            size += sum(len(row["text"]) for row in batch.to_pylist())
    return size


def read_webdataset(source: Path) -> int:
    """Read tar files with ``webdataset``."""
    from webdataset.tariterators import group_by_keys, tar_file_expander

    size = 0
    for path in sorted(source.iterdir()):
        with path.open("rb") as stream:
            members = tar_file_expander([{"url": str(path), "stream": stream}])
            size += sum(len(sample["txt"]) for sample in group_by_keys(members))
    return size


def read_files(source: Path) -> int:
    """Read text files, each of which is a sample."""
    return sum(len(path.read_text()) for path in sorted(source.iterdir()))


def read_http(folder: HubFolder) -> int:
    """Read JSON lines of a web server with ``fsspec`` and ``json``."""
    import fsspec

    size = 0
    for url in folder.urls:
        with fsspec.open(url, "rt", client_kwargs={"headers": folder.headers}) as lines:
            size += sum(len(json.loads(line)["text"]) for line in lines)
    return size


def read_huggingface(folder: HubFolder) -> int:
    """Stream a dataset of parquet files with ``datasets.load_dataset``."""
    os.environ["HF_ENDPOINT"] = folder.endpoint
    import datasets

    rows: Any = datasets.load_dataset(
        folder.repo, split="train", streaming=True, token=folder.token
    )
    return sum(len(row["text"]) for row in rows)


READERS: dict[str, FormatPeer] = {
    "jsonl": FormatPeer("json", read_jsonl),
    "jsonl.gz": FormatPeer("gzip", read_gzip),
    "jsonl.zst": FormatPeer("zstandard", read_zstd),
    "csv": FormatPeer("csv", read_csv),
    "parquet": FormatPeer("pyarrow", read_parquet),
    "tar": FormatPeer("webdataset", read_webdataset),
    "files": FormatPeer("pathlib", read_files),
    "http": FormatPeer("fsspec", read_http),
    "huggingface": FormatPeer("datasets", read_huggingface),
}
