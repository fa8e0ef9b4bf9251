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

FILES, PAGES, MIB = 200, 1000, 1 << 20
_READ = """
import sys
from pathlib import Path
from millrace.datasets.loader import Packer, PageLoader, TokenLoader
from millrace.datasets.loader.cache import get_shared_cache
from tests.support.byte_pairs import encode_json, make_tokenizer


def read_memory(name):
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if name in one]
    return int(line.split()[1]) << 10


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


def read_pages(folder: Path, limit: int) -> tuple[int, int, int]:
    """Return the rows that were read, the growth of the resident set, and the cache's peak.

    Arrow allocates by glibc, and glibc returns freed memory at once. By default both keep some MiB
    for each thread, more or less by chance: 25 to 70 MiB here.
    """
    command = [sys.executable, "-c", _READ, str(folder), str(limit), str(PAGES)]
    environment = {
        **os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system",
        "MALLOC_TRIM_THRESHOLD_": str(128 << 10),
    }  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    first, held = done.stdout.splitlines()
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
