"""Load samples and pages from an S3 store: Millrace, other readers, a lower bound.

Run it with ``python -m benchmarks.loader [--only PART ...] [--quick] [--json FILE]``. The store is
a Ceph RGW on the loopback interface.

The parts ``tar``, ``litdata``, ``mds``, ``parquet`` and ``tokens`` are formats of shards of 8 MiB.
The samples are texts of 2.6 KB, and their characters as tokens. One process reads all samples of a
cold epoch.

- ``millrace``: `ShardLoader` with its defaults. Each part is verified by its digest.
- The peers are in `benchmarks.loader_peers`. They verify nothing.
- ``floor``: obstore gets the same shards, two at once, and nothing is decoded.

The part ``pages`` reads random pages, and makes tokens of them: see `benchmarks.loader_pages`. The
part ``link`` reads the tar shards over a link of 200 Mbit/s (network namespaces, see
`benchmarks.rig`) from a store that begins to answer after 50 ms; its floor is the link, computed.
The part ``order`` is the order of an epoch of 10,000,000 samples in 10,000 shards: its memory.
"""

import shutil
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import numpy as np
import orjson

from benchmarks.common import (
    Results,
    measure_process,
    parse_options,
    print_table,
    rotate_systems,
)
from benchmarks.corpus import read_text
from benchmarks.loader_link import compute_link_seconds, measure_link
from benchmarks.loader_pages import report_pages, run_pages
from benchmarks.loader_peers import PEERS, StoredShards
from benchmarks.loader_runs import run_floor, run_millrace, run_peer
from millrace.block_lists import join_shard_blocks
from millrace.datasets.formats import Fields, FieldType, open_format
from millrace.datasets.loader.epoch_order import EpochOrder
from millrace.datasets.sample import Sample
from millrace.digest import compute_digest, hash_blocks
from millrace.keys.datasets import CommitName, DatasetKeys
from millrace.records import commit_once
from millrace.schemas.dataset import (
    CommittedShard,
    Manifest,
    ManifestShard,
    encode_sample_offsets,
)
from millrace.storage import Store, StoreSpec, open_store, put, read
from millrace.testing.credentials import make_credentials
from millrace.testing.mosaicml import install_mosaicml
from millrace.testing.rgw import RGW

MIB = 1 << 20
SHARD = 8 * MIB
CHARACTERS = 2_600
FORMATS = {
    "tar": "webdataset",
    "litdata": "litdata",
    "mds": "mds",
    "parquet": "parquet",
    "tokens": "tokens",
}
METRICS = ("samples/s", "first_batch_s", "peak_rss_MB", "cpu_s_per_GB")
TEXTS: Fields = {"txt": FieldType.STR}
TOKENS: Fields = {"tokens": FieldType.UINT16_ARRAY}
PAGES, LINK, ORDER = "pages", "link", "order"


def make_samples(size: int) -> Iterator[tuple[Sample, Sample]]:
    """Yield samples of texts, and of the same texts as tokens."""
    text = read_text()
    for number, at in enumerate(range(0, size, CHARACTERS)):
        start = at % (len(text) - CHARACTERS)
        part = text[start : start + CHARACTERS]
        tokens = np.frombuffer(part.encode("utf-16-le", "surrogatepass"), "<u2")
        key = f"00000-{number:010d}"
        yield (
            Sample(key, {"txt": part.encode()}, number),
            Sample(key, {"tokens": tokens.tobytes()}, number),
        )


def write_dataset(store: Store, name: str, work: str, size: int) -> tuple[list[str], int]:
    """Write a dataset of one format, and return the keys of its shards and its bytes."""
    chosen, keys = open_format(FORMATS[work]), DatasetKeys(name)
    fields = TOKENS if work == "tokens" else TEXTS
    encoder = chosen.make_encoder(fields, SHARD)
    described: list[ManifestShard] = []
    committed: dict[str, CommittedShard] = {}

    def close() -> None:
        body = bytes(encoder.close())
        shard_name = CommitName("train-00000", len(described))
        key = keys.make_shard_key(chosen.name, "train", shard_name, chosen.extension)
        put(store, key, body)
        own: dict[str, Any] = {
            "format": chosen.name, "key": key, "size": len(body), "digest": compute_digest(body),
        }  # fmt: skip
        described.append(
            ManifestShard(
                **own,
                split="train",
                samples=encoder.samples,
                sample_offsets=encode_sample_offsets(encoder.sample_offsets),
            )
        )
        committed[key] = CommittedShard(
            **own, blocks=CommittedShard.encode_blocks(hash_blocks(body))
        )
        encoder.reset()

    for texts, tokens in make_samples(size):
        if encoder.prepare(tokens if work == "tokens" else texts) > SHARD and encoder.samples:
            close()
            encoder.prepare(tokens if work == "tokens" else texts)
        encoder.append()
    close()
    manifest = Manifest(
        dataset=name,
        plan_digest=compute_digest(b""),
        formats=(chosen.name,),
        fields={field: kind.value for field, kind in fields.items()},
        shards=tuple(described),
        samples={"train": sum(shard.samples for shard in described)},
        size=sum(shard.size for shard in described),
        quarantined=0,
    )
    put(store, keys.block_digests, join_shard_blocks(manifest, committed))
    for key, body in chosen.make_indexes(keys, fields, described).items():
        put(store, key, body)
    commit_once(store, keys.manifest, manifest)
    return [shard.key for shard in described], manifest.size


def count_tokens(store: Store, folder: str) -> int:
    """Return the number of tokens of a split, from the index of its shards."""
    return orjson.loads(read(store, f"{folder}/index.json"))["tokens"]


def measure_order(samples: int) -> float:
    """Return the peak of the bytes of an order, while windows of all streams are located."""
    tracemalloc.start()
    order = EpochOrder(
        np.full(samples // 1000, 1000),
        seed=0,
        epoch=0,
        streams=64,
        shuffle_window=1000,
        shuffle=True,
    )
    for window in range(0, int(order.lengths[0]) // 1000, 10):
        for stream in range(64):
            order.list_ranges(stream, window)
            order.permute_window(stream, window)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


def run_link(size: int, repeats: int, results: Results) -> list[list[str]]:
    """Measure readers of tar shards over a link, and return the lines of the table."""
    work, shard_format = "tar", FORMATS["tar"]
    with tempfile.TemporaryDirectory() as name:
        store = open_store(StoreSpec(url=Path(name).as_uri()))
        keys, stored = write_dataset(store, "link", work, size)
        folder = DatasetKeys("link").make_shards_prefix(shard_format, "train").rstrip("/")
        found = measure_link(Path(name), "link", folder, keys, repeats)
    samples = -(-size // CHARACTERS)
    for _ in range(repeats):
        results.add(LINK, "floor", "samples/s", samples / compute_link_seconds(stored))
    for system, runs in found.items():
        for figures in runs:
            if figures["samples"] != samples:
                raise RuntimeError(f"{system} gave {figures['samples']} of {samples} samples")
            results.add(LINK, system, "samples/s", samples / figures["seconds"])
            results.add(LINK, system, "first_batch_s", figures["first"])
            results.add(LINK, system, "cpu_s_per_GB", figures["cpu"] / stored * 1e9)
    return [make_line(results, LINK, system) for system in (*found, "floor")]


def make_line(results: Results, work: str, system: str) -> list[str]:
    """Return the line of a system in the table, with its ratios."""
    rows = {
        r.metric: r.value for r in results.compute_rows() if (r.work, r.system) == (work, system)
    }
    values = [rows.get(metric) for metric in METRICS]
    ratios = [
        results.compute_ratio(work, system, "floor", "samples/s"),
        results.compute_ratio(work, "millrace", system, "samples/s"),
    ]
    return [work, system, *map(_format_value, values), *(f"{ratio:.2f}" for ratio in ratios)]


def _format_value(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


class LoaderBench:
    """One invocation of the benchmark.

    Attributes:
        results: Results of the runs.

    Args:
        spec: Bucket for the datasets.
        packages: Folder with the packages of mosaicml-streaming; without them it is left out.
        size: Number of characters of all texts.
        repeats: Number of runs of each system.
    """

    def __init__(self, spec: StoreSpec, packages: Path, size: int, repeats: int) -> None:
        self.results = Results("loader")
        self._spec, self._packages, self._size, self._repeats = spec, packages, size, repeats

    def run(self, work: str) -> list[str]:
        """Measure the systems of a work, and return their names."""
        shard_format, name = FORMATS[work], f"loader-{work}"
        store = open_store(self._spec)
        keys, stored = write_dataset(store, name, work, self._size)
        folder = DatasetKeys(name).make_shards_prefix(shard_format, "train").rstrip("/")
        shards = StoredShards(self._spec, name, shard_format, folder, keys, self._packages)
        samples = -(-self._size // CHARACTERS)
        tokens = count_tokens(store, folder) if work == "tokens" else 0
        peers = [one for one in PEERS[work] if one != "streaming" or self._packages.exists()]
        systems = ["millrace", *peers, "floor"]
        for repeat in range(self._repeats):
            for system in rotate_systems(systems, repeat):
                match system:
                    case "millrace":
                        found = measure_process(run_millrace, shards)
                    case "floor":
                        found = measure_process(run_floor, shards, samples, stored)
                    case _:
                        found = measure_process(run_peer, shards, work, system)
                figures = found.figures
                if figures["samples"] != samples:
                    raise RuntimeError(f"{system} gave {figures['samples']} of {samples} samples")
                values = (
                    samples / figures["seconds"],
                    figures["first"],
                    found.peak_rss / 1e6,
                    figures["cpu"] / stored * 1e9,
                )
                for metric, value in zip(METRICS, values, strict=True):
                    self.results.add(work, system, metric, value)
                if tokens:
                    self.results.add(work, system, "tokens/s", tokens / figures["seconds"])
        return systems


def main() -> None:
    """Run the works, and print a table with the ratios to the peers and to the floor."""
    options = parse_options("loader", __doc__, parts=(*FORMATS, PAGES, LINK, ORDER))
    size, repeats = (32 * MIB, 1) if options.quick else (256 * MIB, 3)
    lines: list[list[str]] = []
    with tempfile.TemporaryDirectory() as name, RGW.start(Path(name) / "rgw") as rgw:
        packages = Path(name) / "mosaicml"
        if "mds" in options.only:
            try:
                install_mosaicml(packages)
            except CalledProcessError:
                print(
                    "mosaicml-streaming cannot be installed here, so it is left out",
                    file=sys.stderr,
                )
                shutil.rmtree(packages, ignore_errors=True)
        spec = StoreSpec(
            url=f"s3://{rgw.create_bucket('loader')}",
            endpoint=rgw.endpoint,
            credentials=make_credentials(rgw.full),
            region="us-east-1",
        )
        bench = LoaderBench(spec, packages, size, repeats)
        results = bench.results
        for work in (one for one in FORMATS if one in options.only):
            lines += [make_line(results, work, system) for system in bench.run(work)]
        if PAGES in options.only:
            run_pages(Path(name), rgw, results, quick=options.quick)
        if LINK in options.only:
            lines += run_link(size // 2, repeats, results)
        if ORDER in options.only:
            results.add(ORDER, "millrace", "MB", measure_order(10_000_000))
            lines.append(
                [
                    ORDER,
                    "millrace",
                    "",
                    "",
                    f"{results.values[ORDER, 'millrace', 'MB'][0]:.2f}",
                    "",
                    "",
                    "",
                ]
            )
    if lines:
        print_table(["work", "system", *METRICS, "/floor", "millrace /"], lines)
    if PAGES in options.only:
        report_pages(results)
    results.save(options.file)


if __name__ == "__main__":
    main()
