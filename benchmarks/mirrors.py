"""Ranges of an object read from three locations: one is slow at times, one is dead, one is good.

Each location is an S3 server of the rig with the same object. Of the slow one, 2 or 10 % of the
answers pause for 400 ms. The dead one refuses connections. An answer takes 20 ms, as from a store
that is not near. Threads read ranges of 84 kB, about those of a page.

``millrace`` is the reader of mirrors. ``no hedges`` is the same reader, which asks no second
location. ``slow alone`` and ``floor`` read the slow and the good location alone.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import quantiles

from benchmarks.common import Results, parse_options, print_table, rotate_systems
from benchmarks.rig.store import FaultKind, RigFault
from benchmarks.rig.store import RigStore as Rig
from millrace.storage import Credentials, Store, open_store, read_range
from millrace.storage.mirror_policy import MirrorPolicy
from millrace.storage.mirrored import MirroredReader
from millrace.storage.mirrored_objects import MirroredObject

KEY, SIZE, RANGE = "pages.parquet", 32 << 20, 84_000
LATENCY, PAUSE = 0.02, 0.4  # seconds
WORKS = {"2 % slow": 0.02, "10 % slow": 0.1}
SYSTEMS = ("millrace", "no hedges", "slow alone", "floor")
METRICS = ("p50_ms", "p99_ms", "p99.9_ms", "further_requests_%", "cpu_ms")
THREADS = 4

Read = Callable[[int], bytes]


def main() -> int:
    """Measure, print the table, and write the rows if asked."""
    asked = parse_options("mirrors", __doc__)
    results = Results("mirrors")
    reads, repeats = (1000, 1) if asked.quick else (2000, 3)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millrace-bench-")))
        rigs = [stack.enter_context(Rig.start(folder / name)) for name in ("slow", "dead", "good")]
        slow, dead, good = rigs
        for rig in rigs:
            rig.generate(KEY, SIZE)
        etag = good.head(KEY).etag
        dead.stop()
        for repeat in range(repeats):
            for work, share in WORKS.items():
                for system in rotate_systems(SYSTEMS, repeat):
                    prepare(slow, share, repeat)
                    prepare(good, 0.0, repeat)
                    measure(results, work, system, rigs, etag, reads)
    report(results)
    results.save(asked.file)
    return 0


def prepare(rig: Rig, share: float, seed: int) -> None:
    """Let all answers of a server take a while, and a share of them longer."""
    rig.reset()
    for part, seconds in ((share, PAUSE), (1.0, LATENCY)):
        if part:
            rig.inject_fault(
                RigFault(FaultKind.STALL, times=None, share=part, seconds=seconds, seed=seed)
            )


def measure(
    results: Results, work: str, system: str, rigs: list[Rig], etag: str, reads: int
) -> None:
    """Read ranges by one system, compare some of the bytes, and add the durations."""
    slow, _, good = stores = [open_rig(rig) for rig in rigs]
    item = MirroredObject(KEY, SIZE, etag=etag, listed_by=2)
    share = 0.0 if system == "no hedges" else 0.05
    reader = MirroredReader(stores, policy=MirrorPolicy(hedge_share=share))
    alone = slow if system == "slow alone" else good

    def read_mirrored(start: int) -> bytes:
        return reader.read_range(item, start, start + RANGE)

    def read_alone(start: int) -> bytes:
        return read_range(alone, KEY, start, start + RANGE, etag=etag)

    read: Read = read_mirrored if system in {"millrace", "no hedges"} else read_alone
    began = time.process_time()
    durations = read_ranges(read, reads)
    cpu = time.process_time() - began
    start = random.Random(reads).randrange(SIZE - RANGE)
    if read(start) != read_range(good, KEY, start, start + RANGE):
        raise RuntimeError("The bytes differ.")
    cuts = quantiles(durations, n=1000)
    results.add(work, system, "p50_ms", 1000 * cuts[499])
    results.add(work, system, "p99_ms", 1000 * cuts[989])
    results.add(work, system, "p99.9_ms", 1000 * cuts[998])
    further = reader.make_report().further_share if read is read_mirrored else 0.0
    results.add(work, system, "further_requests_%", 100 * further)
    results.add(work, system, "cpu_ms", 1000 * cpu / reads)


def open_rig(rig: Rig) -> Store:
    """Open a server of the rig as a store."""
    credentials = Credentials.model_validate(
        {"access_key_id": rig.key.access_key_id, "secret_access_key": rig.key.secret_access_key}
    )
    return open_store(
        f"s3://{rig.bucket}", endpoint=rig.endpoint, region="us-east-1", credentials=credentials
    )


def read_ranges(read: Read, count: int) -> list[float]:
    """Read ranges in several threads, and return the duration of each in seconds."""
    generator = random.Random(1)
    starts = [generator.randrange(SIZE - RANGE) for _ in range(count)]

    def time_read(start: int) -> float:
        began = time.perf_counter()
        read(start)
        return time.perf_counter() - began

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(time_read, starts))


def report(results: Results) -> None:
    """Print a line for each system."""
    rows = {(row.work, row.system, row.metric): row for row in results.compute_rows()}
    lines: list[list[str]] = []
    for work in WORKS:
        for system in SYSTEMS:
            found = [rows[work, system, metric] for metric in METRICS]
            ratio = found[1].value / found[0].value
            cells = [f"{row.value:.2f}" for row in found]
            lines.append([f"{work}, {system}", *cells, f"{ratio:.1f}x", str(found[0].n)])
    print_table(["system", *METRICS, "p99 / p50", "n"], lines)


if __name__ == "__main__":
    sys.exit(main())
