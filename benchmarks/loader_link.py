"""Load tar shards over a link of a set rate, from a store that begins to answer after a while.

`benchmarks.loader` calls `measure_link`. This module is also the program that reads on the host:
it gets an order in JSON on its standard input, and prints its figures.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import rotate_systems
from benchmarks.loader_peers import StoredShards
from benchmarks.loader_runs import run_millrace, run_peer
from benchmarks.rig import DISK, GOODPUT, Rig, RigHost
from benchmarks.rig.store import RigStore
from benchmarks.rig.store_faults import FaultKind, RigFault
from millrace.storage import StoreSpec

LINK_MBIT, STORE_MBIT = 200.0, 2000.0
LATENCY = 0.05  # seconds until the store begins to answer
SYSTEMS = ("millrace", "webdataset")
TIMEOUT = 600.0  # seconds


def measure_link(
    objects: Path, dataset: str, folder: str, keys: Sequence[str], repeats: int
) -> dict[str, list[dict[str, float]]]:
    """Read all samples over a link, and return the figures of each system.

    Args:
        objects: Folder with the objects of the dataset.
        dataset: Name of the dataset.
        folder: Prefix of the shards.
        keys: Keys of the shards.
        repeats: Number of runs of each system.
    """
    paths = [path for path in objects.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in paths)
    found: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS}
    with (
        Rig.start(
            nodes=1, rate_mbit=LINK_MBIT, store_mbit=STORE_MBIT, disk_bytes=2 * size + (64 << 20)
        ) as rig,
        RigStore.start(DISK / "objects", rig.store) as store,
    ):
        for path in paths:
            store.put(str(path.relative_to(objects)), path.read_bytes())
        store.inject_fault(RigFault(FaultKind.DELAY, operation="", times=None, seconds=LATENCY))
        for repeat in range(repeats):
            for system in rotate_systems(SYSTEMS, repeat):
                order = {
                    "system": system, "dataset": dataset, "folder": folder, "keys": list(keys),
                    "spec": store.make_settings(),
                }  # fmt: skip
                found[system].append(_run_on(rig.nodes[0], order))
    return found


def compute_link_seconds(size: int) -> float:
    """Return the seconds that the link takes for a number of bytes."""
    return size / (LINK_MBIT * 1e6 / 8 * GOODPUT)


def _run_on(host: RigHost, order: dict[str, Any]) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.loader_link"]
    return json.loads(host.run(command, stdin=json.dumps(order), timeout=TIMEOUT).splitlines()[-1])


def main() -> None:
    """Run one system by the order on the standard input, and print its figures."""
    order = json.load(sys.stdin)
    shards = StoredShards(
        StoreSpec.model_validate(order["spec"]), order["dataset"], "webdataset", order["folder"],
        order["keys"], Path("/nowhere"),
    )  # fmt: skip
    if order["system"] == "millrace":
        figures = run_millrace(shards)
    else:
        figures = run_peer(shards, "tar", order["system"])
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
