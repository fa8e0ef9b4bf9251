"""A process that uses a cache, and stops at a boundary until it is killed or told to go on."""

import os
import random
import sys
from pathlib import Path

from millrace.datasets.loader import disk_cache
from millrace.datasets.loader.disk_cache import DiskCache
from millrace.digest import compute_digest


def reach(name: str) -> None:
    """Announce a boundary, and wait there if it is the wanted one."""
    print(name, flush=True)
    if name == sys.argv[2]:
        sys.stdin.readline()


def main() -> None:
    """Lend a file, and announce each step. Arguments: folder, boundary, largest size."""
    body = random.Random(1).randbytes(100_000)

    def download(file: int, damaged: Path | None) -> None:
        reach("reserved" if damaged is None else "mend")
        os.pwrite(file, body[:50_000], 0)
        reach("half")
        os.pwrite(file, body[50_000:], 50_000)
        reach("whole")

    def write_mark(lock: int, path: Path) -> None:
        reach("renamed")
        os.ftruncate(lock, 0)
        os.pwrite(lock, b'{"boot"', 0)
        reach("marking")
        marked(lock, path)
        reach("marked")

    marked, disk_cache._write_mark = disk_cache._write_mark, write_mark
    cache = DiskCache(Path(sys.argv[1]), int(sys.argv[3]))
    lent = cache.lend(compute_digest(body), len(body), download)
    assert lent is not None
    reach("lent")
    assert lent.path.read_bytes() == body
    print("read", flush=True)


if __name__ == "__main__":
    main()
