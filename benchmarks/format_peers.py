"""Writers of the formats and readers of the sources from other projects: see `benchmarks.formats`.

Each writer reads JSON lines with ``json``, as its users do, and writes shards of 64 MiB into a
folder. Each reader returns the number of bytes of the texts that it has read.
"""

import csv
import gzip
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MIB = 1 << 20
SHARD = 64 * MIB
MOSAICML = "mosaicml"  # folder beside the results


def write_webdataset(source: Path, out: Path) -> None:
    """Write with ``webdataset.ShardWriter``."""
    from webdataset.writer import ShardWriter

    out.mkdir()

    with ShardWriter(f"{out}/%06d.tar", maxsize=SHARD, verbose=0) as writer:
        for number, row in enumerate(_iterate_rows(source)):
            writer.write({"__key__": f"{number:09d}", "txt": row["text"]})


def write_litdata(source: Path, out: Path) -> None:
    """Write with ``litdata.optimize`` and one worker."""
    import litdata

    files = sorted(map(str, source.iterdir()))
    litdata.optimize(
        fn=iterate_texts, inputs=files, output_dir=str(out), chunk_bytes=SHARD, num_workers=1
    )


def iterate_texts(file: str) -> Iterator[dict[str, str]]:
    """Yield the samples of a file. The workers of litdata import this function."""
    with Path(file).open() as lines:
        for line in lines:
            yield {"txt": json.loads(line)["text"]}


def write_mds(source: Path, out: Path) -> None:
    """Write with ``streaming.MDSWriter``."""
    from millrace.testing.mosaicml import prepare_import

    sys.path.insert(0, str(out.parent / MOSAICML))
    prepare_import()
    streaming: Any = importlib.import_module("streaming.base")
    with streaming.MDSWriter(out=str(out), columns={"txt": "str"}, size_limit=SHARD) as writer:
        for row in _iterate_rows(source):
            writer.write({"txt": row["text"]})


def write_parquet(source: Path, out: Path) -> None:
    """Write with ``datasets.Dataset.to_parquet``, a file for each 64 MiB of Arrow data."""
    import datasets

    files = sorted(map(str, source.iterdir()))
    with tempfile.TemporaryDirectory(dir=out.parent) as cache:
        table: Any = datasets.Dataset.from_json(files, cache_dir=cache)  # pyright: ignore[reportArgumentType]
        count = max(1, table.data.nbytes // SHARD)
        out.mkdir()
        for number in range(count):
            table.shard(count, number, contiguous=True).to_parquet(out / f"{number:06d}.parquet")


WRITERS: dict[str, Callable[[Path, Path], None]] = {
    "webdataset": write_webdataset,
    "litdata": write_litdata,
    "mds": write_mds,
    "parquet": write_parquet,
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


READERS: dict[str, Callable[[Path], int]] = {
    "jsonl": read_jsonl,
    "jsonl.gz": read_gzip,
    "jsonl.zst": read_zstd,
    "csv": read_csv,
    "parquet": read_parquet,
    "tar": read_webdataset,
}
