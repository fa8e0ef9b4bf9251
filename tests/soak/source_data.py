"""Make small source data for the soak. Each row has a unique id."""

import csv
import gzip
import io
import json
import random
import tarfile
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import zstandard
from pyarrow import parquet

from tests.oracle import make_row_token
from tests.support.web import Site

_WORDS = ("mill", "race", "wheel", "sluice", "weir", "grain", "stone", "flour", "sack", "gate")


@dataclass(frozen=True, slots=True)
class SourceData:
    """Files of a source, and the rows that the oracle expects of them.

    Attributes:
        name: Name of the source data.
        folder: Folder of the files.
        source: Settings of the source, without its store.
        sharding: Settings of the sharding.
        rows: Tokens of the valid rows.
        bad_rows: Lines that make no sample.
        location: Settings by which the files are read elsewhere than in `folder` or a store.
    """

    name: str
    folder: Path
    source: dict[str, Any]
    sharding: dict[str, Any]
    rows: Counter[str] = field(repr=False)
    bad_rows: Counter[str] = field(default_factory=Counter[str], repr=False)
    location: dict[str, Any] | None = None


def make_all_sources(folder: Path, seed: int, site: Site) -> list[SourceData]:
    """Make source data of every kind.

    Each has about 1 MiB, which makes four or five partitions and about twenty shards.

    Args:
        folder: New folder for the files.
        seed: Seed of the contents.
        site: Web server, which gets the bodies of the lists of URLs.
    """
    return [
        make_source(folder / name, random.Random(f"{seed} {name}"))
        for name, make_source in {**KINDS, "urls": partial(make_urls, site)}.items()
    ]


def make_lines(folder: Path, generator: random.Random) -> SourceData:
    """Make three files of JSON lines, which are kept whole."""
    folder.mkdir(parents=True)
    rows: Counter[str] = Counter()
    for number in range(3):
        written = []
        for i in range(220):
            name, text = f"{number}-{i}", _make_text(generator, 200, 2600)
            rows[make_row_token(name, text.encode())] += 1
            written.append(json.dumps({"id": name, "text": text}))
        (folder / f"part-{number}.jsonl").write_text("\n".join(written) + "\n")
    return SourceData(
        "lines",
        folder,
        {"kind": "jsonl"},
        {"shard_bytes": 64 << 10, "partition_bytes": 192 << 10, "seed": 1},
        rows,
    )


def make_columns(folder: Path, generator: random.Random) -> SourceData:
    """Make JSON lines of which two columns are taken, with bad rows and a held-out share."""
    folder.mkdir(parents=True)
    rows: Counter[str] = Counter()
    bad_rows: Counter[str] = Counter()
    written: list[str] = []
    for i in range(500):
        name, text = f"row-{i}", _make_text(generator, 100, 3200)
        match generator.randrange(25):
            case 0:
                written.append('{"id": "' + name)
                bad_rows[written[-1]] += 1
            case 1:
                written.append(json.dumps({"id": name}))
                bad_rows[written[-1]] += 1
            case _:
                rows[make_row_token(name, text.encode())] += 1
                written.append(json.dumps({"id": name, "text": text, "more": i}))
    (folder / "all.jsonl").write_text("\n".join(written))  # the last row has no newline
    return SourceData(
        "columns",
        folder,
        {"kind": "jsonl", "columns": {"txt": "text", "id": "id"}},
        {
            "shard_bytes": 64 << 10,
            "shard_samples": 25,
            "partition_bytes": 192 << 10,
            "holdout": 0.15,
        },
        rows,
        bad_rows,
    )


def make_files(folder: Path, generator: random.Random) -> SourceData:
    """Make folders with two files for each sample."""
    rows: Counter[str] = Counter()
    for i in range(220):
        name, text = f"{i:04d}", _make_text(generator, 800, 8000).encode()
        at = folder / f"group-{i % 7}"
        at.mkdir(parents=True, exist_ok=True)
        rows[make_row_token(name, text)] += 1
        (at / f"{name}.txt").write_bytes(text)
        (at / f"{name}.json").write_text(json.dumps({"id": name}))
    return SourceData(
        "files",
        folder,
        {"kind": "files"},
        {"shard_bytes": 64 << 10, "partition_bytes": 256 << 10, "seed": 3},
        rows,
    )


def make_compressed(folder: Path, generator: random.Random) -> SourceData:
    """Make compressed files of JSON lines, of one member and of several frames."""
    folder.mkdir(parents=True)
    rows: Counter[str] = Counter()
    for number in range(4):
        written = _make_lines(generator, number, rows)
        if number % 2:
            packed = gzip.compress("".join(written).encode())
        else:
            parts = ("".join(written[at : at + 30]) for at in range(0, len(written), 30))
            compressor = zstandard.ZstdCompressor()
            packed = b"".join(compressor.compress(part.encode()) for part in parts)
        (folder / f"part-{number}.jsonl.{'gz' if number % 2 else 'zst'}").write_bytes(packed)
    return SourceData("compressed", folder, {"kind": "jsonl"}, {"shard_bytes": 64 << 10}, rows)


def make_tables(folder: Path, generator: random.Random) -> SourceData:
    """Make CSV files, one of them compressed, with newlines in their values."""
    folder.mkdir(parents=True)
    rows: Counter[str] = Counter()
    for number in range(4):
        written = io.StringIO()
        writer = csv.writer(written)
        writer.writerow(["id", "text"])
        for i in range(160):
            name = f"{number}-{i}"
            text = _make_text(generator, 200, 2600).replace(" mill ", ' "mill",\n')
            rows[make_row_token(name, text.encode())] += 1
            writer.writerow([name, text])
        body = written.getvalue().encode()
        if number:
            (folder / f"part-{number}.csv").write_bytes(body)
        else:
            (folder / f"part-{number}.csv.gz").write_bytes(gzip.compress(body))
    return SourceData("tables", folder, {"kind": "csv"}, {"shard_bytes": 64 << 10}, rows)


def make_parquet(folder: Path, generator: random.Random) -> SourceData:
    """Make parquet files of several row groups."""
    folder.mkdir(parents=True)
    rows: Counter[str] = Counter()
    for number in range(4):
        table: dict[str, list[str]] = {"id": [], "text": []}
        for i in range(160):
            table["id"].append(f"{number}-{i}")
            table["text"].append(_make_text(generator, 200, 2600))
            rows[make_row_token(table["id"][-1], table["text"][-1].encode())] += 1
        path = folder / f"part-{number}.parquet"
        parquet.write_table(pyarrow.table(table), path, row_group_size=50)
    return SourceData("parquet", folder, {"kind": "parquet"}, {"shard_bytes": 64 << 10}, rows)


def make_tars(folder: Path, generator: random.Random) -> SourceData:
    """Make tar files whose samples have two members, in a random order."""
    folder.mkdir(parents=True)
    rows: Counter[str] = Counter()
    for number in range(4):
        members: list[tuple[str, bytes]] = []
        for i in range(160):
            name, text = f"{number}-{i}", _make_text(generator, 200, 2600).encode()
            rows[make_row_token(name, text)] += 1
            members += [(f"{name}.txt", text), (f"{name}.json", json.dumps({"id": name}).encode())]
        generator.shuffle(members)
        with tarfile.open(folder / f"part-{number}.tar", "w") as tar:
            for name, body in members:
                header = tarfile.TarInfo(name)
                header.size = len(body)
                tar.addfile(header, io.BytesIO(body))
    return SourceData("tars", folder, {"kind": "webdataset"}, {"shard_bytes": 64 << 10}, rows)


def make_urls(site: Site, folder: Path, generator: random.Random) -> SourceData:
    """Make lists of URLs, some of which have no body."""
    folder.mkdir(parents=True)
    rows: Counter[str] = Counter()
    bad_rows: Counter[str] = Counter()
    for number in range(4):
        written: list[str] = []
        for i in range(45):
            name, text = f"{number}-{i}", _make_text(generator, 200, 10000).encode()
            path = f"/bodies/{name}"
            row = json.dumps({"id": name, "url": f"{site.url}{path}"}, separators=(",", ":"))
            if generator.randrange(25):
                site.files[path] = text
                rows[make_row_token(name, text)] += 1
            else:
                bad_rows[row] += 1
            written.append(row + "\n")
        (folder / f"part-{number}.jsonl").write_text("".join(written))
    return SourceData(
        "urls",
        folder,
        {
            "kind": "urls",
            "columns": {"id": "id"},
            "urls": {"content_field": "txt"},
            "allow_private": True,
        },
        {"shard_bytes": 64 << 10},
        rows,
        bad_rows,
    )


KINDS = {
    "lines": make_lines,
    "columns": make_columns,
    "files": make_files,
    "compressed": make_compressed,
    "tables": make_tables,
    "parquet": make_parquet,
    "tars": make_tars,
}


def _make_lines(generator: random.Random, number: int, rows: Counter[str]) -> list[str]:
    written: list[str] = []
    for i in range(160):
        name, text = f"{number}-{i}", _make_text(generator, 200, 2600)
        rows[make_row_token(name, text.encode())] += 1
        written.append(json.dumps({"id": name, "text": text}) + "\n")
    return written


def _make_text(generator: random.Random, min_size: int, max_size: int) -> str:
    size = generator.randint(min_size, max_size)
    return " ".join(generator.choices(_WORDS, k=size // 6 + 1))[:size]
