"""Write each format and read each kind of source, beside the libraries that people use for it.

Run it with ``python -m benchmarks.formats [--only PART ...] [--quick] [--json FILE]``. All files
are in folders, and everything runs on one worker, so CPU time is compared, and no network.

``write``: JSON lines become shards of 64 MiB.

- ``millrace``: `shard_dataset` from call to return, with the plan, the ledger, the digests and the
  manifest.
- ``peer``: the format's own writer (see `benchmarks.format_peers`).
- ``floor``: the source is read once, and the shards of Millrace are written from memory.

``read``: all rows of a source are read, and nothing is written.

- ``millrace``: the source as the workers read it for LitData and MDS: in batches, if it has them.
- ``peer``: the library that reads this kind of file.
- ``floor``: the files are read.
"""

import csv
import gzip
import io
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow
import zstandard
from pyarrow import parquet

from benchmarks.common import (
    CpuTimer,
    Results,
    measure_process,
    parse_options,
    print_table,
    rotate_systems,
)
from benchmarks.corpus import write_jsonl
from benchmarks.format_peers import MIB, MOSAICML, READERS, SHARD, WRITERS
from millrace.datasets import PipelineSettings, plan_dataset, shard_dataset
from millrace.datasets.sample import BadRow, RowBatch
from millrace.datasets.sources import open_source
from millrace.datasets.sources.base import BatchSource
from millrace.storage import open_store
from millrace.testing.mosaicml import install_mosaicml

SYSTEMS = ("millrace", "peer", "floor")
SIZES = {"1 KB": 1_000, "20 KB": 20_000}  # characters of a sample
PARTS = ("write", "read")
METRICS = ("MB/s", "cpu_s_per_GB", "peak_rss_MB")
FILES = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "jsonl": {"kind": "jsonl", "columns": {"txt": "text"}},
    "jsonl.gz": {"kind": "jsonl", "columns": {"txt": "text"}},
    "jsonl.zst": {"kind": "jsonl", "columns": {"txt": "text"}},
    "csv": {"kind": "csv", "columns": {"txt": "text"}},
    "parquet": {"kind": "parquet", "columns": {"txt": "text"}},
    "tar": {"kind": "webdataset"},
}


def make_settings(source: Path, out: Path, name: str, kind: str) -> PipelineSettings:
    """Return the settings of a run with one worker."""
    return PipelineSettings.model_validate(
        {
            "dataset": "text",
            "source": {"url": source.as_uri(), **SETTINGS[kind]},
            "store": {"url": out.as_uri()},
            "sharding": {"formats": [name], "shard_bytes": SHARD},
            "execution": {"workers": 0, "uploads": 1},
        }
    )


def write_with_millrace(source: Path, out: Path, name: str) -> dict[str, float]:
    """Shard JSON lines with Millrace."""
    return _measure(lambda: shard_dataset(make_settings(source, out, name, "jsonl")))


def write_with_peer(source: Path, out: Path, name: str) -> dict[str, float]:
    """Shard JSON lines with the format's own writer."""
    return _measure(lambda: WRITERS[name](source, out))


def write_floor(source: Path, out: Path, shards: Path) -> dict[str, float]:
    """Read the source, and write shards from memory."""
    bodies = [path.read_bytes() for path in shards.rglob("*") if path.is_file()]
    out.mkdir()

    def copy() -> None:
        _read_files(source)
        for number, body in enumerate(bodies):
            (out / f"{number}").write_bytes(body)

    return _measure(copy)


def read_with_millrace(source: Path, out: Path, kind: str) -> dict[str, float]:
    """Read all rows of a source as a worker does."""
    settings = make_settings(source, out, "webdataset", kind)

    def read() -> int:
        plan = plan_dataset(settings)
        opened = open_source(plan.source, settings.source.open_files(), open_store(settings.store))
        size = 0
        for partition in plan.partitions:
            iterate = (
                opened.iterate_batches if isinstance(opened, BatchSource) else opened.iterate_rows
            )
            for row in iterate(partition.source_range, 0):
                assert not isinstance(row, BadRow)
                values = row.columns["txt"] if isinstance(row, RowBatch) else [row.fields["txt"]]
                size += sum(map(len, values))
        return size

    return _measure(read)


def read_with_peer(source: Path, kind: str) -> dict[str, float]:
    """Read all rows of a source with its library."""
    return _measure(lambda: READERS[kind](source))


def read_floor(source: Path) -> dict[str, float]:
    """Read the files of a source."""
    return _measure(lambda: _read_files(source))


def _measure(work: Callable[[], Any]) -> dict[str, float]:
    cpu, began = CpuTimer(), time.perf_counter()
    work()
    return {"seconds": time.perf_counter() - began, "cpu": cpu.read()}


def _read_files(source: Path) -> None:
    for path in sorted(source.iterdir()):
        with path.open("rb", buffering=0) as file:
            while file.read(MIB):
                pass


def make_sources(folder: Path, texts: Path, kinds: Sequence[str]) -> None:
    """Write the rows of JSON lines again in the other kinds of files."""
    for kind in kinds:
        (folder / kind).mkdir()
    for path in sorted(texts.iterdir()):
        body = path.read_bytes()
        rows = [orjson.loads(line) for line in body.splitlines()]
        if "jsonl.gz" in kinds:
            (folder / "jsonl.gz" / f"{path.name}.gz").write_bytes(gzip.compress(body, 6))
        if "jsonl.zst" in kinds:
            compressed = zstandard.ZstdCompressor().compress(body)
            (folder / "jsonl.zst" / f"{path.name}.zst").write_bytes(compressed)
        if "csv" in kinds:
            with (folder / "csv" / f"{path.stem}.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, ["id", "text"])
                writer.writeheader()
                writer.writerows(rows)
        if "parquet" in kinds:
            table = pyarrow.Table.from_pylist(rows)
            parquet.write_table(table, folder / "parquet" / f"{path.stem}.parquet")
        if "tar" in kinds:
            with tarfile.open(folder / "tar" / f"{path.stem}.tar", "w") as tar:
                for row in rows:
                    text = row["text"].encode()
                    header = tarfile.TarInfo(f"{row['id']:09d}.txt")
                    header.size = len(text)
                    tar.addfile(header, io.BytesIO(text))


class FormatsBench:
    """One invocation of the benchmark.

    Attributes:
        results: Results of the runs.

    Args:
        folder: Folder for sources and shards.
        size: Size of the JSON lines in bytes.
        repeats: Number of runs of each system.
    """

    def __init__(self, folder: Path, size: int, repeats: int) -> None:
        self.results = Results("formats")
        self._folder, self._size, self._repeats = folder, size, repeats
        self._out = folder / "out"

    def run(self, name: str, characters: int, parts: Sequence[str]) -> None:
        """Run the parts over texts of one length."""
        texts = self._folder / "jsonl"
        for number in range(FILES):
            file = texts / f"{number}.jsonl"
            write_jsonl(file, characters=characters, size=self._size // FILES)
        if "write" in parts:
            for name_of_format in WRITERS:
                self._write(f"write {name_of_format}, {name}", texts, name_of_format)
        if "read" in parts:
            kinds = [kind for kind in READERS if kind != "jsonl"]
            make_sources(self._folder, texts, kinds)
            for kind in READERS:
                self._read(f"read {kind}, {name}", self._folder / kind, kind)
            for kind in kinds:
                shutil.rmtree(self._folder / kind)
        shutil.rmtree(texts)

    def _write(self, work: str, texts: Path, name: str) -> None:
        shards = self._folder / "shards"
        shard_dataset(make_settings(texts, shards, name, "jsonl"))
        self._compare(
            work,
            {
                "millrace": (write_with_millrace, texts, self._out, name),
                "peer": (write_with_peer, texts, self._out, name),
                "floor": (write_floor, texts, self._out, shards / "text/shards"),
            },
        )
        shutil.rmtree(shards)

    def _read(self, work: str, source: Path, kind: str) -> None:
        self._compare(
            work,
            {
                "millrace": (read_with_millrace, source, self._out, kind),
                "peer": (read_with_peer, source, kind),
                "floor": (read_floor, source),
            },
        )

    def _compare(self, work: str, calls: dict[str, tuple[Any, ...]]) -> None:
        for repeat in range(self._repeats):
            for system in rotate_systems(SYSTEMS, repeat):
                measured = measure_process(*calls[system])
                shutil.rmtree(self._out, ignore_errors=True)
                seconds, cpu = measured.figures["seconds"], measured.figures["cpu"]
                values = (
                    self._size / 1e6 / seconds,
                    cpu / self._size * 1e9,
                    measured.peak_rss / 1e6,
                )
                for metric, value in zip(METRICS, values, strict=True):
                    self.results.add(work, system, metric, value)


def main() -> None:
    """Run the parts, and print a table with the ratios to the peer and to the floor."""
    options = parse_options("formats", __doc__, parts=PARTS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "write" in options.only:
            install_mosaicml(folder / MOSAICML)
        bench = FormatsBench(
            folder, (16 if options.quick else 256) * MIB, 1 if options.quick else 3
        )
        for length, characters in SIZES.items():
            bench.run(length, characters, options.only)
    results, lines = bench.results, list[list[str]]()
    for work in dict.fromkeys(work for work, _, _ in results.values):
        ratios = [results.compute_ratio(work, "millrace", other, "MB/s") for other in SYSTEMS[1:]]
        cpu = results.compute_ratio(work, "millrace", "peer", "cpu_s_per_GB")
        rates = [
            next(r.value for r in results.compute_rows() if (r.work, r.system, r.metric) == key)
            for key in ((work, system, "MB/s") for system in SYSTEMS)
        ]
        shown = [f"{rate:.0f}" for rate in rates]
        lines.append([work, *shown, f"{ratios[0]:.2f}", f"{ratios[1]:.2f}", f"{cpu:.2f}"])
    header = ["work", *(f"{one} MB/s" for one in SYSTEMS), "/peer", "/floor", "CPU /peer"]
    print_table(header, lines)
    results.save(options.file)


if __name__ == "__main__":
    main()
