"""The benchmark of the formats gives Millrace and its peers the same work."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from pyarrow import parquet

from benchmarks.common import Options, Results, measure_process
from benchmarks.format_peers import READERS, WRITERS, ShardOutput
from benchmarks.formats import (
    HUB_KINDS,
    READ,
    FormatsBench,
    SourceFolder,
    make_settings,
    make_sources,
    publish_files,
    read_rows,
    write_token_rows,
)
from millrace.storage import StoreSpec
from millrace.testing.hub import HubServer


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """Write texts of ASCII as JSON lines into two files, and return them in their order."""
    texts = [f"{number} " + 'abc, "d"\n' * (number % 50) for number in range(2500)]
    (tmp_path / "jsonl").mkdir()
    for file in range(2):
        rows = enumerate(texts[file * 1250 : (file + 1) * 1250])
        lines = [orjson.dumps({"id": number, "text": text}) for number, text in rows]
        (tmp_path / f"jsonl/{file}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return texts


def count_characters(kind: str, location: SourceFolder) -> dict[str, float]:
    return {"size": READERS[kind].run(location)}


@pytest.mark.parametrize("kind", READERS)
def test_millrace_and_the_peer_read_the_same_texts(
    kind: str, texts: list[str], hub: HubServer, tmp_path: Path
) -> None:
    location: SourceFolder = tmp_path / HUB_KINDS.get(kind, kind)
    if location.name != "jsonl":
        make_sources(tmp_path, tmp_path / "jsonl", [location.name])
    if kind in HUB_KINDS:
        location = publish_files(hub, location, kind)
    store = StoreSpec(url=(tmp_path / "out").as_uri())
    size = sum(map(len, texts))
    assert read_rows(make_settings(kind, location, store, "webdataset")) == size
    # The library `datasets` reads from one Hub in each process.
    assert measure_process(count_characters, kind, location).figures["size"] == size


def test_the_peer_writes_all_texts_as_pages(texts: list[str], tmp_path: Path) -> None:
    output = ShardOutput(tmp_path / "out")
    WRITERS["pages"].run(tmp_path / "jsonl", output)
    (file,) = output.folder.iterdir()
    assert parquet.read_table(file)["text"].to_pylist() == texts
    assert parquet.ParquetFile(file).metadata.row_group(0).column(0).has_offset_index


def test_the_peer_writes_all_tokens(tmp_path: Path) -> None:
    source, output = tmp_path / "tokens", ShardOutput(tmp_path / "out")
    source.mkdir()
    for number in range(2):
        write_token_rows(source / f"{number}.parquet", characters=1000, size=1_500_000)
    WRITERS["tokens"].run(source, output)
    (path,) = output.folder.iterdir()
    with path.open("rb") as file:
        tokens, ends = np.load(file), np.load(file)
    rows: list[Any] = parquet.read_table(source)["tokens"].to_pylist()
    assert len(rows) == 3000
    assert np.split(tokens, ends[:-1])[1700].tolist() == rows[1700]
    assert len(tokens) == ends[-1] == 1_500_000


def test_a_row_names_its_format_its_part_and_its_library(tmp_path: Path) -> None:
    bench = FormatsBench(tmp_path, Options(quick=True, file=None), None, None)
    bench.results[READ, 1_000] = Results("formats")
    bench.results[READ, 1_000].add("parquet", READERS["parquet"].name, "MB/s", 2.0)
    bench.save(tmp_path / "rows.json")
    (row,) = json.loads((tmp_path / "rows.json").read_bytes())["rows"]
    assert row == {
        "work": "parquet", "part": "read", "characters": 1_000, "system": "pyarrow",
        "metric": "MB/s", "value": 2.0, "n": 1,
    }  # fmt: skip
