"""Memory of loaders: one limit for all loaders of a process, measured."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.datasets.formats import FieldType
from millrace.datasets.sample import Sample
from millrace.storage import open_store
from tests.support.shard_datasets import write_dataset

FILES, PAGES, MIB = 200, 1000, 1 << 20
_READ_MEMORY = """
import sys
from pathlib import Path


def read_memory(name):
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if name in one]
    return int(line.split()[1]) << 10
"""
_READ = f"""{_READ_MEMORY}
from millrace.datasets.loader import Packer, PageLoader, TokenLoader
from millrace.datasets.loader.page_cache import get_shared_cache
from tests.support.byte_pairs import encode_json, make_tokenizer

folder, limit, pages = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
get_shared_cache().resize(limit)
loaders = [PageLoader(folder), PageLoader(folder)]
tokens = TokenLoader(loaders[1], encode_json(make_tokenizer()))
for values in loaders[0].read(loaders[0].draw(1, 0, 20)):
    pass
for page in tokens.read(loaders[1].draw(1, 0, 5)):
    pass
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = read_memory("VmRSS")
rows = 0
for values in loaders[0].read(loaders[0].draw(2, 0, pages)):
    rows += len(values)
for page in tokens.read(loaders[1].draw(3, 0, pages // 20)):
    rows += len(page.ends)
print(rows, read_memory("VmHWM") - before, get_shared_cache().most_bytes)
loaders[0].close()
loaders[1].close()
print(get_shared_cache().held_bytes)
"""
_READ_GROUPS = f"""{_READ_MEMORY}
from millrace.datasets.loader import PageLoader

loader = PageLoader(sys.argv[1], concurrency=int(sys.argv[2]), cache_bytes=0)
for values in loader.read(loader.draw(1, 0, 2)):
    pass
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = read_memory("VmRSS")
rows = sum(len(values) for values in loader.read(loader.draw(2, 0, 40)))
print(rows, loader.counts.whole_groups, read_memory("VmHWM") - before)
"""
_READ_SAMPLES = f"""{_READ_MEMORY}
from millrace.datasets.loader import ShardLoader

folder, buffer_bytes, streams = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
options = {{"buffer_bytes": buffer_bytes, "streams": streams or None}}
for sample in ShardLoader(f"{{folder}}/small"):
    pass
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = read_memory("VmRSS")
count = sum(len(sample["bin"]) for sample in ShardLoader(f"{{folder}}/large", **options))
print(count, read_memory("VmHWM") - before)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """200 files of 5 pages of 300 KB each, which are links to one file."""
    rng = random.Random(1)
    table = pa.table({"text": [rng.randbytes(1500).hex() for _ in range(500)]})
    folder = tmp_path / "files"
    folder.mkdir()
    cast("Any", pq).write_table(
        table, folder / "0.parquet", row_group_size=250, max_rows_per_page=100,
        write_batch_size=100, write_page_index=True, use_dictionary=False,
    )  # fmt: skip
    for number in range(1, FILES):
        os.link(folder / "0.parquet", folder / f"{number}.parquet")
    return folder


def run_script(script: str, *arguments: object) -> list[str]:
    """Return the lines that a process of its own prints.

    Arrow allocates by glibc, and glibc returns freed memory at once. By default both keep some MiB
    for each thread, more or less by chance: 25 to 70 MiB here.
    """
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = {
        **os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system",
        "MALLOC_TRIM_THRESHOLD_": str(128 << 10),
    }  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def read_pages(folder: Path, limit: int) -> tuple[int, int, int]:
    """Return the rows that were read, the growth of the resident set, and the cache's peak."""
    first, held = run_script(_READ, folder, limit, PAGES)
    assert held == "0"
    rows, growth, peak = map(int, first.split())
    return rows, growth, peak


@pytest.mark.soak
def test_1000_random_pages_of_200_files_take_the_memory_of_the_cache_and_of_the_read_ahead(
    folder: Path,
) -> None:
    """The read-ahead may take 64 MiB. Here it has 8 pages of 300 KB, which take less than 16."""
    limit = 16 * MIB
    rows, growth, peak = read_pages(folder, limit)
    assert rows > 80 * PAGES
    assert peak <= limit
    assert growth < limit + 16 * MIB
    # The check can fail: without the limit, the same pages take several times as much.
    _, unlimited, held = read_pages(folder, 1024 * MIB)
    assert held > 200 * MIB
    assert unlimited > 4 * (limit + 16 * MIB)


@pytest.mark.soak
def test_row_groups_of_files_without_an_index_take_the_memory_of_the_read_ahead(
    tmp_path: Path,
) -> None:
    """Two row groups of 25 MiB fit into its 64 MiB. The check can fail: eight take more."""
    table = pa.table({"text": [f"{n:08}" * 320 for n in range(10_000)]})
    cast("Any", pq).write_table(table, tmp_path / "0.parquet", use_dictionary=False)
    for number in range(1, 8):
        os.link(tmp_path / "0.parquet", tmp_path / f"{number}.parquet")
    ((rows, groups, growth),) = (
        map(int, line.split()) for line in run_script(_READ_GROUPS, tmp_path, 8)
    )
    assert (rows, groups) == (4000, 42)
    assert growth < 160 * MIB


def read_samples(folder: Path, buffer_bytes: int, streams: int = 0) -> int:
    """Return the growth of the resident set; 0 streams are the default."""
    (line,) = run_script(_READ_SAMPLES, folder, buffer_bytes, streams)
    count, growth = map(int, line.split())
    assert count == 128 * 3 * MIB
    return growth


@pytest.mark.soak
def test_samples_that_are_larger_than_a_share_of_the_buffer_have_fewer_streams(
    tmp_path: Path,
) -> None:
    """Up to four samples and 2 MiB for each of 16 streams, and 32 MiB for requests."""
    rng, store = random.Random(1), open_store(tmp_path.as_uri())
    for name, size in (("small", 1000), ("large", 3 * MIB)):
        parts = [[Sample(str(n), {"bin": rng.randbytes(size)}, n)] for n in range(128)]
        write_dataset(store, name, ["webdataset"], {"bin": FieldType.BYTES}, parts)
    taken = read_samples(tmp_path, 8 * MIB)
    assert taken < (16 * (4 * 3 + 2) + 32) * MIB
    # The check can fail: each of more streams holds some samples.
    assert read_samples(tmp_path, 8 * MIB, streams=64) > 2 * taken
