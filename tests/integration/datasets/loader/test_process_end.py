"""A process of a trainer ends although a store does not answer."""

import subprocess
import sys
from pathlib import Path

import pytest

from millrace.datasets.formats import FieldType
from millrace.datasets.sample import Sample
from millrace.storage import open_store
from tests.support.shard_datasets import write_dataset

PROGRAM = """
import sys
import threading

from millrace.datasets.loader import PageLoader, ShardLoader
from millrace.datasets.loader import pages
from millrace.storage import copy_reader

hangs = threading.Event()


def let_hang(module, name, answers):
    # All calls of a function hang but those that are answered.
    read = getattr(module, name)

    def read_late(*args, **options):
        if not answers(*args):
            hangs.set()
            threading.Event().wait()
        return read(*args, **options)

    setattr(module, name, read_late)


if sys.argv[1] == "pages":
    loader = PageLoader(f"{sys.argv[2]}/d/shards/pages/train", concurrency=4)
    wanted = loader.draw(1, 0, len(loader))
    let_hang(pages, "read_rows", lambda _, file, *__: file.path == loader.paths[wanted[0].file])
    samples = loader.read(wanted)
else:
    loader = ShardLoader(sys.argv[2], "d", streams=1, shuffle_window=10, cache=sys.argv[3])
    keys = []
    let_hang(copy_reader, "read_range", lambda _, key, *__: keys.append(key) or key == keys[0])
    samples = iter(loader)
next(samples)
hangs.wait()
if sys.argv[4] == "True":
    samples.close()
print("ended")
"""


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("kind", ["pages", "shards"])
def test_a_process_ends_while_a_read_does_not(kind: str, is_closed: bool, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    samples = [Sample(f"k{n}", {"txt": b"%d" % n}, n) for n in range(40)]
    parts = [samples[start : start + 10] for start in range(0, 40, 10)]
    name = "pages" if kind == "pages" else "webdataset"
    write_dataset(open_store(url), "d", [name], {"txt": FieldType.STR}, parts)
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind, url, str(tmp_path / "cache"), str(is_closed)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (0, "ended\n"), result.stderr
