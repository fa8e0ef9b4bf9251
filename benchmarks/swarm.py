"""Copy the same files to every node of a cluster: Millrace, its peers and a lower bound.

Run it with ``python -m benchmarks.swarm [--quick] [--json FILE] [--only PART ...]``, as root. Each
run has a new rig (`benchmarks.rig`): hosts in namespaces with links of a limited rate, a Ray node
on each host, and a store that counts its responses. ``s`` is the time from the call to the last
file on the last node, with planning, hashing and fsync. ``startup_s`` is the start of the agents.

The lower bound (``floor``) is ``max(S / B, S / d, N * S / (B + N * u))`` for S bytes to N nodes
with uplinks of rate u, downlinks of rate d and a store of rate B (Kumar and Ross, 2006). The rates
exclude the headers of TCP and Ethernet.

Two parts have links of different rates. ``zones`` has a near zone, and a far zone whose nodes share
a slow link to it. The lower bound of the near zone is as above, and that of the far zone is
``S / L`` for a link of rate L. ``mixed`` has nodes with a quarter and a fiftieth of the others'
rate. The lower bound of a node is that of its own link.

All connections between nodes are encrypted, which is the default. ``encryption`` copies the object
of ``4 nodes`` to agents that are already running, with and without encryption. It measures the CPU
time of all agents for each GB that a node receives. ``receiver`` copies a checkpoint from one node
to another on this machine, and measures the CPU time of each of both for each GB.

``planner`` measures the tracker alone: its CPU time for an event with 8, 64 and 256 nodes and 1,000
pieces, and with 100 nodes and 10,000 pieces. It also copies one file of 1 kB to 64 agents in one
process.
"""

import heapq
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from benchmarks.checkpoints import JOB, make_state
from benchmarks.common import (
    Results,
    Row,
    measure_process,
    parse_options,
    print_table,
    read_cpu_seconds,
    rotate_systems,
)
from benchmarks.node_process import set_encryption, start_node
from benchmarks.rig import DISK, GOODPUT, Rig, RigError
from benchmarks.rig.store import RigStore
from benchmarks.swarm_peers.run import DESTINATION, Figures, check_files, run_peer
from benchmarks.swarm_peers.xenna_python import NoXennaError
from benchmarks.swarm_peers.zones import ZoneFigures, run_zones
from millrace.checkpoints import Saver
from millrace.storage import StoreSpec, open_store
from millrace.swarm import Host, Hosts, PrewarmSettings, Request, prewarm
from millrace.swarm.agent import Agent
from millrace.swarm.settings import LimitSettings
from millrace.swarm.tracker import STORE, PieceOrder, Tracker

MIB = 1 << 20
SYSTEMS = ("millrace", "xenna", "naive", "ray")
Values = dict[tuple[str, str, str], Row]  # rows by work, system and metric


@dataclass(frozen=True, slots=True)
class SwarmWork:
    """Files to copy to nodes.

    Attributes:
        name: Name of the work.
        nodes: Number of nodes.
        mbit: Rate of every link, also of the store's, in Mbit/s.
        files: Number of files.
        size: Size of each file in bytes.
        quick: Size of each file in bytes with ``--quick``.
    """

    name: str
    nodes: int
    mbit: int
    files: int
    size: int
    quick: int

    def compute_floor(self, size: int) -> float:
        """Return the lower bound of the time for so many bytes, in seconds."""
        rate = self.mbit * 1e6 / 8 * GOODPUT
        return max(size / rate, self.nodes * size / (rate + self.nodes * rate))


WORKS = (
    SwarmWork("4 nodes", 4, 200, 1, 512 * MIB, 64 * MIB),
    SwarmWork("8 nodes", 8, 100, 1, 128 * MIB, 32 * MIB),
    SwarmWork("small files", 4, 200, 1000, 10_000, 10_000),
)


def run_system(work: SwarmWork, system: str, size: int) -> Figures:
    """Run one system over one work on a new rig."""
    disk_bytes = 3 * work.files * size + 512 * MIB  # two copies and Ray's object store
    with (
        Rig.start(
            nodes=work.nodes, rate_mbit=work.mbit, store_mbit=work.mbit, disk_bytes=disk_bytes
        ) as rig,
        RigStore.start(DISK / "objects", rig.store) as store,
    ):
        keys = [f"files/{number:04d}" for number in range(work.files)]
        for number, key in enumerate(keys):
            store.generate(key, size, seed=number)
        return run_peer(rig, store, system, keys)


def run_works(results: Results, *, quick: bool) -> None:
    """Run the systems over each work, alternately."""
    left_out: set[str] = set()
    for work in WORKS:
        size = work.quick if quick else work.size
        total = size * work.files
        results.add(work.name, "floor", "s", work.compute_floor(total))
        for repeat in range(1 if quick else 3):
            for system in rotate_systems(SYSTEMS, repeat):
                if system in left_out:
                    continue
                try:
                    figures = run_system(work, system, size)
                except NoXennaError as error:
                    print(f"{system} is left out: {error}", file=sys.stderr)
                    left_out.add(system)
                    continue
                except RigError as error:
                    if system == "millrace":
                        raise
                    print(f"{work.name}: {system} failed this time: {error}", file=sys.stderr)
                    continue
                results.add(work.name, system, "s", figures.seconds)
                results.add(work.name, system, "startup_s", figures.startup_seconds)
                results.add(work.name, system, "peak_rss_MB", figures.peak_rss / 1e6)
                results.add(work.name, system, "store_bytes_ratio", figures.store_bytes / total)


def compute_rate(mbit: float) -> float:
    """Return the rate of the payload of a link in bytes per second."""
    return mbit * 1e6 / 8 * GOODPUT


def run_shaped(
    rates: Sequence[float],
    size: int,
    *,
    far: int = 0,
    link_mbit: float = 0,
    encrypted: bool = True,
) -> ZoneFigures:
    """Copy one object to nodes whose links have different rates.

    Args:
        rates: Rate of each node's link in Mbit/s.
        size: Size of the object in bytes.
        far: Number of nodes in the far zone, which are the last ones.
        link_mbit: Rate of the link between the zones in Mbit/s.
        encrypted: Whether the connections between nodes are encrypted.
    """
    store_mbit = max(rates)
    with (
        Rig.start(
            nodes=len(rates),
            rate_mbit=store_mbit,
            store_mbit=store_mbit,
            far=far,
            link_mbit=link_mbit,
            disk_bytes=2 * size + 256 * MIB,
        ) as rig,
        RigStore.start(DISK / "objects", rig.store) as store,
    ):
        for host, rate in zip(rig.nodes, rates, strict=True):
            rig.shape(host, rate)
        store.generate("object", size)
        figures = run_zones(rig, store, ["object"], DESTINATION, encrypted=encrypted)
        check_files(rig, store, ["object"], DESTINATION)
    return figures


def run_zone_rows(results: Results, *, quick: bool) -> None:
    """Copy an object to two zones of two nodes with a slow link between them."""
    size, mbit, slow = (64 if quick else 256) * MIB, 200, 50
    fluid = 2 * size / (compute_rate(mbit) + 2 * compute_rate(mbit))
    results.add("zones", "floor", "near_s", max(size / compute_rate(mbit), fluid))
    results.add("zones", "floor", "far_s", size / compute_rate(slow))
    results.add("zones", "floor", "store_bytes_ratio", 1.0)
    results.add("zones", "floor", "link_bytes_ratio", 1.0)
    for _ in range(1 if quick else 3):
        figures = run_shaped([mbit] * 4, size, far=2, link_mbit=slow)
        results.add("zones", "millrace", "near_s", max(figures.seconds[:2]))
        results.add("zones", "millrace", "far_s", max(figures.seconds[2:]))
        results.add("zones", "millrace", "store_bytes_ratio", figures.store_bytes / size)
        results.add("zones", "millrace", "link_bytes_ratio", figures.link_bytes / size)


def run_mixed_row(results: Results, *, quick: bool) -> None:
    """Copy an object to two nodes of full rate, one of a quarter and one of a fiftieth of it."""
    size, mbit = (16 if quick else 64) * MIB, 200
    parts = {"full_s": mbit, "quarter_s": mbit / 4, "fiftieth_s": mbit / 50}
    for metric, rate in parts.items():
        results.add("mixed", "floor", metric, size / compute_rate(rate))
    results.add("mixed", "floor", "store_bytes_ratio", 1.0)
    for _ in range(1 if quick else 3):
        figures = run_shaped([mbit, mbit, mbit / 4, mbit / 50], size)
        slowest = (max(figures.seconds[:2]), *figures.seconds[2:])
        for metric, seconds in zip(parts, slowest, strict=True):
            results.add("mixed", "millrace", metric, seconds)
        results.add("mixed", "millrace", "store_bytes_ratio", figures.store_bytes / size)


def run_encryption_row(results: Results, *, quick: bool) -> None:
    """Copy an object to four nodes with and without encryption, alternately."""
    work = WORKS[0]
    size = work.quick if quick else work.size
    results.add("encryption", "floor", "s", work.compute_floor(size))
    for repeat in range(1 if quick else 3):
        for system in rotate_systems(("millrace", "unencrypted"), repeat):
            figures = run_shaped([work.mbit] * work.nodes, size, encrypted=system == "millrace")
            arrived = work.nodes * size / 1e9
            results.add("encryption", system, "s", max(figures.seconds))
            results.add("encryption", system, "cpu_s_per_GB", figures.cpu_seconds / arrived)


def run_receiver_row(results: Results, *, quick: bool) -> None:
    """Copy an object from one node to another with and without encryption, alternately."""
    size = (64 if quick else 512) * MIB
    for repeat in range(1 if quick else 3):
        for system in rotate_systems(("millrace", "unencrypted"), repeat):
            with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
                figures = measure_process(copy_to_second_node, Path(name), size, system).figures
            for metric, value in figures.items():
                results.add("receiver", system, metric, value)


def copy_to_second_node(folder: Path, size: int, system: str) -> dict[str, float]:
    """Copy a checkpoint to one node of this machine, and then from it to another one.

    Returns:
        Seconds of the second copy, and CPU seconds for each GB of both agents.
    """
    encrypted = system != "unencrypted"
    set_encryption(encrypted=encrypted)
    (folder / "source").mkdir()
    source = open_store((folder / "source").as_uri())
    with Saver(source, JOB) as saver:
        saver.save(make_state(size, 0), step=0).result()
    key = secrets.token_hex(16)
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(start_node(folder / name, key, "--port", "0", encrypted=encrypted))
            for name in ("node-0", "node-1")
        ]
        hosts = [Host(url=node.url) for node in nodes]
        settings = PrewarmSettings(
            requests=(Request(checkpoint=JOB),),
            stores={"source": source.spec},
            nodes=Hosts(hosts=tuple(hosts[:1]), key=SecretStr(key)),
        )
        prewarm(settings)
        both = Hosts(hosts=tuple(hosts), key=SecretStr(key))
        before = [read_cpu_seconds(node.pid) for node in nodes]
        report = prewarm(settings.model_copy(update={"nodes": both}))
        spent = [
            read_cpu_seconds(node.pid) - used for node, used in zip(nodes, before, strict=True)
        ]
    if not all(node.ready for node in report.nodes):
        raise RuntimeError(f"Not all nodes are ready: {report.nodes}")
    return {
        "s": report.seconds - report.startup,
        "receiver_cpu_s_per_GB": spent[1] / (size / 1e9),
        "sender_cpu_s_per_GB": spent[0] / (size / 1e9),
        "store_bytes_ratio": report.store_bytes / size,
    }


def run_planner(results: Results, *, quick: bool) -> None:
    """Measure the tracker alone in simulated time, and a copy of a small file in this process."""
    pieces = 200 if quick else 1000
    for nodes in (8, 64, 256):
        measure_tracker(results, nodes, pieces)
    if not quick:
        measure_tracker(results, 100, 10_000)
    run_small_file(results)


def measure_tracker(results: Results, nodes: int, pieces: int) -> None:
    """Measure the CPU time of each event of a simulated run."""
    tracker = Tracker([1] * pieces, LimitSettings(store_reads=400))
    pending: list[tuple[float, int, PieceOrder]] = []
    spent: list[float] = []

    def start_transfers(orders: list[PieceOrder], now: float) -> None:
        for order in orders:
            # A read from the store takes about as long as ten transfers between nodes.
            duration = (10.0 if order.source == STORE else 1.0) * (1 + order.piece % 7 / 10)
            heapq.heappush(pending, (now + duration, len(spent) + len(pending), order))

    for number in range(nodes):
        start_transfers(tracker.add_node(f"n{number}", [], 0.0), 0.0)
    start_transfers(tracker.begin(0.0), 0.0)
    due = 0.0
    while pending:
        now, _, order = heapq.heappop(pending)
        began = time.process_time()
        orders = tracker.complete_transfer(order.node, order.piece, order.source, "", now)
        if now >= due:
            orders += tracker.tick(now)
            due = now + 5.0
        spent.append(time.process_time() - began)
        start_transfers(orders, now)
    if any(tracker.lacks_any(f"n{number}") for number in range(nodes)):
        raise RuntimeError("The tracker did not deliver all pieces.")
    work = f"planner, {nodes} x {pieces}"
    results.add(work, "millrace", "ms an event, mean", statistics.mean(spent) * 1e3)
    results.add(work, "millrace", "ms an event, worst", max(spent) * 1e3)


def run_small_file(results: Results) -> None:
    """Copy one file of 1 kB to 64 agents in this process."""
    count, key = 64, secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="millrace-swarm-") as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "source").mkdir()
        (folder / "source" / "file").write_bytes(secrets.token_bytes(1000))
        agents = [
            Agent(folder / f"n{number}", key.encode(), host="127.0.0.1") for number in range(count)
        ]
        for agent in agents:
            agent.start()
            stack.callback(agent.close)
        hosts = tuple(Host(url=f"http://127.0.0.1:{agent.port}") for agent in agents)
        report = prewarm(
            PrewarmSettings(
                requests=(Request(prefix=""),),
                stores={"source": StoreSpec(url=(folder / "source").as_uri())},
                root=folder,
                nodes=Hosts(hosts=hosts, key=SecretStr(key)),
            )
        )
    if not all(node.ready for node in report.nodes):
        raise RuntimeError(f"Not all nodes are ready: {report.nodes}")
    results.add("1 kB to 64 nodes", "millrace", "s", report.seconds - report.startup)
    results.add("1 kB to 64 nodes", "millrace", "startup_s", report.startup)


def report(results: Results) -> None:
    """Print the figures of the parts that ran, and their ratios to the lower bounds."""
    values = {(row.work, row.system, row.metric): row for row in results.compute_rows()}
    print_works(values)
    print_shaped(values)
    print_encryption(values)
    print_receiver(values)
    for (work, _, metric), row in values.items():
        if work.startswith(("planner", "1 kB")):
            print(f"{work}: {row.value:.3f} {metric}")


def print_works(values: Values) -> None:
    """Print the table of the works and systems."""
    metrics = ("s", "startup_s", "peak_rss_MB", "store_bytes_ratio")
    lines: list[list[str]] = []
    for work in WORKS:
        if (work.name, "floor", "s") not in values:
            return
        floor = values[work.name, "floor", "s"].value
        lines.append([work.name, "floor", f"{floor:.2f}", "", "", "", "1.00x", ""])
        for system in SYSTEMS:
            cells = [values.get((work.name, system, metric)) for metric in metrics]
            seconds = cells[0]
            if seconds is None:
                continue
            formatted = [
                f"{cell.value:.{digits}f}" if cell else ""
                for cell, digits in zip(cells, (2, 2, 0, 2), strict=True)
            ]
            ratio = f"{seconds.value / floor:.2f}x"
            lines.append([work.name, system, *formatted, ratio, str(seconds.n)])
    print_table(["work", "system", *metrics, "/floor", "n"], lines)
    print()


def print_shaped(values: Values) -> None:
    """Print the table of the parts with links of different rates."""
    lines: list[list[str]] = []
    for row in values.values():
        if row.work in {"zones", "mixed"} and row.system == "millrace":
            floor = values[row.work, "floor", row.metric].value
            figures = [f"{row.value:.2f}", f"{floor:.2f}", f"{row.value / floor:.2f}x", str(row.n)]
            lines.append([row.work, row.metric, *figures])
    if lines:
        print_table(["work", "metric", "millrace", "floor", "/floor", "n"], lines)
        print()


def print_receiver(values: Values) -> None:
    """Print the table of the CPU time of the two agents of a copy."""
    metrics = ("s", "receiver_cpu_s_per_GB", "sender_cpu_s_per_GB", "store_bytes_ratio")
    lines = [
        ["receiver", system, *(f"{values['receiver', system, one].value:.2f}" for one in metrics)]
        for system in ("millrace", "unencrypted")
        if ("receiver", system, "s") in values
    ]
    if lines:
        print_table(["work", "system", *metrics], lines)
        print()


def print_encryption(values: Values) -> None:
    """Print the table of the runs with and without encryption."""
    if ("encryption", "floor", "s") not in values:
        return
    floor = values["encryption", "floor", "s"].value
    lines: list[list[str]] = []
    for system in ("millrace", "unencrypted"):
        row = values["encryption", system, "s"]
        spent = values["encryption", system, "cpu_s_per_GB"].value
        ratio = f"{row.value / floor:.2f}x"
        lines.append(["encryption", system, f"{row.value:.2f}", ratio, f"{spent:.2f}", str(row.n)])
    print_table(["work", "system", "s", "/floor", "cpu_s_per_GB", "n"], lines)
    print()


PARTS: dict[str, Callable[..., None]] = {
    "planner": run_planner,
    "zones": run_zone_rows,
    "mixed": run_mixed_row,
    "encryption": run_encryption_row,
    "receiver": run_receiver_row,
    "works": run_works,
}


def main() -> int:
    """Run the benchmark, print the tables, and write the rows as JSON if ``--json`` is set."""
    options = parse_options("swarm", __doc__, parts=list(PARTS))
    results = Results("swarm")
    for part in options.only:
        PARTS[part](results, quick=options.quick)
    report(results)
    results.save(options.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
