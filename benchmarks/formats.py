"""Write each format and read each kind of source, beside the libraries that people use for it.

Run it with ``python -m benchmarks.formats [--only PART ...] [--quick] [--json FILE]``. Everything
runs on one worker, so CPU time is compared. A peer has the name of its library: see
`benchmarks.format_peers`. Each row of the JSON also has the part, and the characters of a sample.

``write``: rows in a folder become shards of 64 MiB in another folder. The rows are texts in JSON
lines; for the format ``tokens`` they are tokens in parquet files.

- ``millrace``: `shard_dataset` from call to return, with the plan, the ledger, the digests and the
  manifest.
- The peer is the format's own writer.
- ``floor``: the source is read once, and the shards of Millrace are written from memory.

``upload``: the same into a Ceph RGW on the loopback interface, with samples of 20 KB. Each peer
uploads as its users do.

``read``: all rows of a source are read, and nothing is written. A stand-in of the Hub serves the
files of ``http`` (JSON lines) and ``huggingface`` (parquet); the others are in a folder.

- ``millrace``: the source as the workers read it for LitData and MDS: in batches, if it has them.
- The peer is the library that reads this kind of file.
- ``floor``: the files are read.
"""

import csv
import gzip
import io
import json
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast
from urllib.request import Request

import numpy as np
import obstore
import orjson
import pyarrow
import zstandard
from pyarrow import parquet

from benchmarks.common import (
    CpuTimer,
    Options,
    Results,
    describe_machine,
    measure_process,
    parse_options,
    print_table,
    rotate_systems,
)
from benchmarks.corpus import read_text, write_jsonl
from benchmarks.format_peers import (
    MIB,
    MOSAICML,
    READERS,
    SHARD,
    WRITERS,
    HubFolder,
    ShardOutput,
)
from millrace.datasets import PipelineSettings, shard_dataset
from millrace.datasets.plan import make_plan
from millrace.datasets.sample import BadRow, RowBatch
from millrace.datasets.sources import open_source
from millrace.datasets.sources.base import BatchSource
from millrace.keys.datasets import DatasetKeys
from millrace.storage import StoreSpec, delete, list_objects, open_store, put
from millrace.testing.mosaicml import install_mosaicml

SIZES = {1_000: "1 KB", 20_000: "20 KB"}  # characters of a sample
UPLOADED = 20_000  # characters of a sample of the part `upload`
WRITE, UPLOAD, READ = PARTS = ("write", "upload", "read")
METRICS = ("MB/s", "cpu_s_per_GB", "peak_rss_MB")
FILES = 4
DATASET = "text"
SOURCES: dict[str, dict[str, Any]] = {
    "jsonl": {"kind": "jsonl", "columns": {"txt": "text"}},
    "jsonl.gz": {"kind": "jsonl", "columns": {"txt": "text"}},
    "jsonl.zst": {"kind": "jsonl", "columns": {"txt": "text"}},
    "csv": {"kind": "csv", "columns": {"txt": "text"}},
    "parquet": {"kind": "parquet", "columns": {"txt": "text"}},
    "tar": {"kind": "webdataset"},
    "files": {"kind": "files"},
    "http": {"kind": "jsonl", "columns": {"txt": "text"}, "allow_private": True},
    "huggingface": {"kind": "huggingface", "columns": {"txt": "text"}, "split": "train"},
    "tokens": {"kind": "parquet", "columns": {"tokens": "tokens"}},
}
HUB_KINDS = {"http": "jsonl", "huggingface": "parquet"}  # and the files that the Hub serves

SourceFolder = Path | HubFolder


def make_settings(
    kind: str, location: SourceFolder, store: StoreSpec, name: str
) -> PipelineSettings:
    """Return the settings of a run with one worker.

    Args:
        kind: Name of a source in `SOURCES`.
        location: Folder of the source.
        store: Store for the dataset.
        name: Format of the shards.
    """
    types = {"types": {"tokens": "uint16[]"}} if name == "tokens" else {}
    return PipelineSettings.model_validate(
        {
            "dataset": DATASET,
            "source": {**SOURCES[kind], **_locate(kind, location)},
            "store": store,
            "sharding": {"formats": [name], "shard_bytes": SHARD, **types},
            "execution": {"workers": 0, "uploads": 1},
        }
    )


def _locate(kind: str, location: SourceFolder) -> dict[str, Any]:
    """Return the settings that tell where a source is."""
    if isinstance(location, Path):
        return {"url": location.as_uri()}
    if kind == "http":
        return {"url": location.url, "paths": location.paths, "options": location.headers}
    return {
        "url": f"hf://datasets/{location.repo}",
        "endpoint": location.endpoint,
        "options": {"token": location.token},
    }


def write_with_millrace(
    kind: str, source: Path, output: ShardOutput, name: str
) -> dict[str, float]:
    """Shard rows with Millrace."""
    store = output.bucket or StoreSpec(url=output.folder.as_uri())
    return _measure(lambda: shard_dataset(make_settings(kind, source, store, name)))


def write_with_peer(source: Path, output: ShardOutput, name: str) -> dict[str, float]:
    """Shard rows with the format's own writer."""
    return _measure(lambda: WRITERS[name].run(source, output))


def write_floor(source: Path, output: ShardOutput, shards: Path) -> dict[str, float]:
    """Read the source, and write shards from memory."""
    bodies = [path.read_bytes() for path in shards.rglob("*") if path.is_file()]
    store = open_store(output.bucket).raw if output.bucket else None
    output.folder.mkdir()

    def copy() -> None:
        _read_files(source)
        for number, body in enumerate(bodies):
            if store:
                obstore.put(store, f"{number}", body)
            else:
                (output.folder / f"{number}").write_bytes(body)

    return _measure(copy)


def read_with_millrace(kind: str, location: SourceFolder, out: Path) -> dict[str, float]:
    """Read all rows of a source as a worker does."""
    store = StoreSpec(url=out.as_uri())
    settings = make_settings(kind, location, store, "webdataset")
    return _measure(lambda: read_rows(settings))


def read_rows(settings: PipelineSettings) -> int:
    """Return the bytes of the texts of all rows of a source."""
    store, files = open_store(settings.store), settings.source.open_files()
    keys = DatasetKeys(settings.dataset)
    plan, partitioned = make_plan(keys, settings.source, files, settings.sharding)
    for key, body in partitioned.objects.items():
        put(store, key, body)
    opened = open_source(plan.source, files, store, allow_private=settings.source.allow_private)
    iterate = opened.iterate_batches if isinstance(opened, BatchSource) else opened.iterate_rows
    size = 0
    for partition in plan.partitions:
        for row in iterate(partition.source_range, 0):
            assert not isinstance(row, BadRow)
            values = row.columns["txt"] if isinstance(row, RowBatch) else [row.fields["txt"]]
            size += sum(map(len, values))
    return size


def read_with_peer(kind: str, location: SourceFolder) -> dict[str, float]:
    """Read all rows of a source with its library."""
    return _measure(lambda: READERS[kind].run(location))


def read_floor(location: SourceFolder) -> dict[str, float]:
    """Read the files of a source."""
    if isinstance(location, Path):
        return _measure(lambda: _read_files(location))
    return _measure(lambda: _fetch_files(location))


def _measure(work: Callable[[], Any]) -> dict[str, float]:
    cpu, began = CpuTimer(), time.perf_counter()
    work()
    return {"seconds": time.perf_counter() - began, "cpu": cpu.read()}


def _read_files(source: Path) -> None:
    for path in sorted(source.iterdir()):
        with path.open("rb", buffering=0) as file:
            while file.read(MIB):
                pass


def _fetch_files(folder: HubFolder) -> None:
    from millrace.testing.process import open_local

    for url in folder.urls:
        with open_local(Request(url, headers=folder.headers)) as answer:
            while answer.read(MIB):
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
        if "files" in kinds:
            for row in rows:
                (folder / "files" / f"{path.stem}-{row['id']:09d}.txt").write_text(row["text"])


def write_token_rows(file: Path, *, characters: int, size: int) -> None:
    """Write rows of tokens as a parquet file: the UTF-16 units of texts.

    Args:
        file: Path of the file.
        characters: Twice the number of tokens of a row.
        size: Bytes of all tokens.
    """
    units = np.frombuffer(read_text().encode("utf-16-le", "surrogatepass"), "<u2")
    length = characters // 2
    starts = len(units) - length
    schema: Any = pyarrow.schema({"tokens": pyarrow.list_(pyarrow.uint16())})
    with parquet.ParquetWriter(file, schema) as writer:
        for first in range(0, size // characters, 1000):
            rows = range(first, min(first + 1000, size // characters))
            parts = [units[n * length % starts :][:length] for n in rows]
            ends = np.arange(len(rows) + 1, dtype=np.int32) * length
            lists = cast("Any", pyarrow.ListArray).from_arrays(ends, np.concatenate(parts))
            writer.write_table(pyarrow.Table.from_arrays([lists], schema=schema))


def publish_files(hub: Any, folder: Path, kind: str) -> HubFolder:
    """Commit the files of a folder as a dataset of the Hub."""
    from huggingface_hub import CommitOperationAdd, HfApi

    from millrace.testing.hub import READER, WRITER

    paths = {f"data/train-{path.name}": path for path in sorted(folder.iterdir())}
    repo = hub.make_repo(dataset=True)
    HfApi(endpoint=hub.endpoint, token=WRITER).create_commit(
        repo,
        [CommitOperationAdd(name, path) for name, path in paths.items()],
        commit_message=kind,
        repo_type="dataset",
    )
    return HubFolder(hub.endpoint, repo, tuple(paths), READER)


class FormatsBench:
    """One invocation of the benchmark.

    Attributes:
        results: Results by the part and the characters of a sample.

    Args:
        folder: Folder for sources and shards.
        options: Options of the command line.
        hub: Stand-in of the Hub for the part ``read``.
        bucket: Bucket for the part ``upload``.
    """

    def __init__(self, folder: Path, options: Options, hub: Any, bucket: StoreSpec | None) -> None:
        self.results: dict[tuple[str, int], Results] = {}
        self._folder, self._parts, self._hub, self._bucket = folder, options.only, hub, bucket
        self._size = (16 if options.quick else 256) * MIB
        self._repeats = 1 if options.quick else 3

    def run(self, characters: int) -> None:
        """Run the parts over samples of one length."""
        if characters != UPLOADED and set(self._parts) == {UPLOAD}:
            return
        texts, tokens = self._folder / "jsonl", self._folder / "tokens"
        tokens.mkdir()
        for number in range(FILES):
            size = self._size // FILES
            write_jsonl(texts / f"{number}.jsonl", characters=characters, size=size)
            write_token_rows(tokens / f"{number}.parquet", characters=characters, size=size)
        for name in WRITERS:
            source = tokens if name == "tokens" else texts
            self._write(name, source, characters)
        shutil.rmtree(tokens)
        if READ in self._parts:
            self._read(characters)
        shutil.rmtree(texts)

    def _write(self, name: str, source: Path, characters: int) -> None:
        shards, kind = self._folder / "shards", source.name
        outputs = {WRITE: ShardOutput(self._folder / "out")}
        if characters == UPLOADED:
            outputs[UPLOAD] = ShardOutput(self._folder / "out", self._bucket)
        chosen = {part: output for part, output in outputs.items() if part in self._parts}
        if not chosen:
            return
        shard_dataset(make_settings(kind, source, StoreSpec(url=shards.as_uri()), name))
        for part, output in chosen.items():
            calls = {
                "millrace": (write_with_millrace, kind, source, output, name),
                WRITERS[name].name: (write_with_peer, source, output, name),
                "floor": (write_floor, source, output, shards / DATASET / "shards"),
            }
            self._compare(part, characters, name, calls)
        shutil.rmtree(shards)

    def _read(self, characters: int) -> None:
        folder = self._folder
        made = [kind for kind in READERS if kind != "jsonl" and kind not in HUB_KINDS]
        make_sources(folder, folder / "jsonl", made)
        for kind in READERS:
            served = HUB_KINDS.get(kind)
            location = publish_files(self._hub, folder / served, kind) if served else folder / kind
            calls = {
                "millrace": (read_with_millrace, kind, location, folder / "out"),
                READERS[kind].name: (read_with_peer, kind, location),
                "floor": (read_floor, location),
            }
            self._compare(READ, characters, kind, calls)
        for kind in made:
            shutil.rmtree(folder / kind)

    def _compare(
        self, part: str, characters: int, work: str, calls: dict[str, tuple[Any, ...]]
    ) -> None:
        results = self.results.setdefault((part, characters), Results("formats"))
        for repeat in range(self._repeats):
            for system in rotate_systems(tuple(calls), repeat):
                measured = measure_process(*calls[system])
                if not self._remove_output(part) and part != READ:
                    raise RuntimeError(f"{part} {work}: {system} has written nothing.")
                seconds, cpu = measured.figures["seconds"], measured.figures["cpu"]
                values = (
                    self._size / 1e6 / seconds,
                    cpu / self._size * 1e9,
                    measured.peak_rss / 1e6,
                )
                for metric, value in zip(METRICS, values, strict=True):
                    results.add(work, system, metric, value)

    def _remove_output(self, part: str) -> int:
        """Delete the objects of a run, and return their bytes."""
        folder = self._folder / "out"
        folder.mkdir(exist_ok=True)
        spec = self._bucket if part == UPLOAD else StoreSpec(url=folder.as_uri())
        assert spec is not None
        store = open_store(spec)
        objects = list(list_objects(store))
        delete(store, [one.key for one in objects])
        shutil.rmtree(folder)
        return sum(one.size for one in objects)

    def print(self) -> None:
        """Print a table with the ratios to the peers and to the floor."""
        lines: list[list[str]] = []
        for (part, characters), results in self.results.items():
            rates = {
                (row.work, row.system): row.value
                for row in results.compute_rows()
                if row.metric == "MB/s"
            }
            for work in dict.fromkeys(work for work, _ in rates):
                peer = next(
                    one for name, one in rates if name == work and one not in ("millrace", "floor")
                )
                systems = ("millrace", peer, "floor")
                ratios = [
                    results.compute_ratio(work, "millrace", other, metric)
                    for other, metric in (
                        (peer, "MB/s"), ("floor", "MB/s"), (peer, "cpu_s_per_GB")
                    )
                ]  # fmt: skip
                lines.append(
                    [
                        f"{part} {work}, {SIZES[characters]}",
                        peer,
                        *(f"{rates[work, system]:.0f}" for system in systems),
                        *(f"{ratio:.2f}" for ratio in ratios),
                    ]
                )
        rates_header = ["millrace MB/s", "peer MB/s", "floor MB/s"]
        print_table(["work", "peer", *rates_header, "/peer", "/floor", "CPU /peer"], lines)

    def save(self, path: Path | None) -> None:
        """Write the rows as JSON, each with its part and the characters of a sample."""
        if path is None:
            return
        rows = [
            {**asdict(row), "value": round(row.value, 4), "part": part, "characters": characters}
            for (part, characters), results in self.results.items()
            for row in results.compute_rows()
        ]
        body = {"name": "formats", "machine": describe_machine(), "rows": rows}
        path.write_text(json.dumps(body, indent=1) + "\n")


def main() -> None:
    """Run the parts, and print a table with the ratios to the peers and to the floor."""
    from millrace.testing.credentials import make_credentials
    from millrace.testing.hub import HubServer
    from millrace.testing.rgw import RGW

    options = parse_options("formats", __doc__, parts=PARTS)
    os.environ["HF_HUB_DISABLE_XET"] = "1"  # whose files no web client can read
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["HF_HOME"] = str(folder / "hf")
        hub = bucket = None
        if READ in options.only:
            hub = stack.enter_context(HubServer.start(folder / "hub"))
        if UPLOAD in options.only:
            server = stack.enter_context(RGW.start(folder / "rgw"))
            bucket = StoreSpec(
                url=f"s3://{server.create_bucket('formats')}",
                endpoint=server.endpoint,
                credentials=make_credentials(server.full),
                region="us-east-1",
            )
        if {WRITE, UPLOAD}.intersection(options.only):
            install_mosaicml(folder / MOSAICML)
        bench = FormatsBench(folder, options, hub, bucket)
        for characters in SIZES:
            bench.run(characters)
    bench.print()
    bench.save(options.file)


if __name__ == "__main__":
    main()
