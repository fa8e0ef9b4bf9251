"""The swarm on a rig of real hosts, while nodes die, lie and crawl, and the store fails."""

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.rig import DISK, Host, Rig
from benchmarks.rig.store import REGION, Fault, FaultKind, Store
from tests.support.swarm.swarms import KEY, LIE

MIB = 1 << 20
SIZE = 128 * MIB
PORT = 7000
NODES, MBIT = 4, 200
NODE = "from millrace.cli import main; main()"


@dataclass
class Outcome:
    """Result of one run.

    Attributes:
        seconds: From the start of the driver to its last line.
        report: What it reported; empty if it raised.
        error: What it raised, and what that says.
        names: Kinds of the events that it told.
    """

    seconds: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    names: set[str] = field(default_factory=set)

    def find_node(self, host: Host) -> dict[str, Any]:
        return next(n for n in self.report["nodes"] if n["name"] == host.name)

    def list_ready(self) -> list[str]:
        return [node["name"] for node in self.report.get("nodes", []) if node["ready"]]


class Swarm:
    """A rig with agents, a store, and a driver on its first host."""

    def __init__(self, rig: Rig, store: Store) -> None:
        self.rig, self.store = rig, store
        self.hosts = list(rig.nodes[:NODES])
        self.late = rig.nodes[NODES]
        self.root = DISK / "none"
        self.seconds = 0.0
        self._runs = 0

    def start_agent(self, host: Host, script: str = NODE) -> None:
        """Start the agent of a host; it ends with the host's processes."""
        command = [sys.executable, "-c", script, "swarm", "node", "--root", str(self.root)]
        command += ["--host", host.address, "--port", str(PORT)]
        agent = host.popen(command, env={"MILLRACE_NODE_KEY": KEY}, stdout=subprocess.PIPE)
        assert agent.stdout is not None
        assert agent.stdout.readline(), f"the agent of {host.name} did not start"

    @contextmanager
    def start_afresh(self, *, lies: Host | None = None) -> Iterator[None]:
        """Agents with empty roots, and an object that none of them has."""
        self._runs += 1
        self.root = DISK / f"warm-{self._runs}"
        self.store.reset()
        self.store.generate("object", SIZE, seed=self._runs)
        self.store.reset()
        for host in self.hosts:
            self.start_agent(host, f"{LIE}\n{NODE}" if host is lies else NODE)
        try:
            yield
        finally:
            for host in self.rig.nodes:
                self.rig.shape(host, MBIT)
                host.kill()
                host.call(_empty, self.root)

    def compute_sha256(self) -> str:
        return self.rig.store.call(_newest, DISK / "objects")

    def make_settings(self, hosts: list[Host], **more: Any) -> dict[str, Any]:
        return {
            "requests": [{"key": "object", "sha256": more.pop("sha256", None)}],
            "stores": {
                "store": {
                    "url": f"s3://{self.store.bucket}",
                    "endpoint": self.store.endpoint,
                    "region": REGION,
                    "credentials": {
                        "access_key_id": self.store.key.access_key_id,
                        "secret_access_key": self.store.key.secret_access_key,
                    },
                }
            },
            "root": "/unused",
            "nodes": {
                "kind": "hosts",
                "key": KEY,
                "hosts": [
                    {"url": f"http://{host.address}:{PORT}", "name": host.name} for host in hosts
                ],
            },
            **more,
        }

    def run(
        self,
        hosts: list[Host] | None = None,
        *,
        at: float = 2.0,
        act: Callable[[subprocess.Popen[str]], None] | None = None,
        **settings: Any,
    ) -> Outcome:
        """Run a driver on the first host; at a share of the bytes, do something to it."""
        command = [sys.executable, "-m", "tests.soak.warm"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        outcome, began = Outcome(), time.monotonic()
        with self.hosts[0].popen(command, **pipes) as driver:
            assert driver.stdin is not None
            assert driver.stdout is not None
            driver.stdin.write(
                json.dumps(self.make_settings(hosts or self.hosts, **settings)) + "\n"
            )
            driver.stdin.flush()
            for line in driver.stdout:
                told = json.loads(line)
                match told.pop("kind"):
                    case "report":
                        outcome.report = told
                    case "error":
                        outcome.error = f"{told['error']}: {told['says']}"
                    case _:
                        outcome.names.add(told["name"])
                        fields = told["fields"]
                        if (
                            act
                            and fields.get("total")
                            and fields["present"] >= at * fields["total"]
                        ):
                            act(driver)
                            act = None
        outcome.seconds = time.monotonic() - began
        return outcome

    def is_whole(self, hosts: list[Host]) -> bool:
        """Decide whether each of these hosts has the object, byte by byte."""
        due = self.compute_sha256()
        return all(host.call(_sha256, self.root / "object") == due for host in hosts)

    def compute_store_ratio(self) -> float:
        return self.store.read_counts().bytes / SIZE


def _newest(folder: Path) -> str:
    """The SHA-256 of the file that the store made last."""
    return _sha256(max(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns))


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return str(error)


def _empty(folder: Path) -> None:
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def calm(swarm: Swarm) -> tuple[bool, str]:
    with swarm.start_afresh():
        out = swarm.run()
        swarm.seconds = out.report["seconds"]
        good = swarm.is_whole(swarm.hosts) and swarm.compute_store_ratio() == 1.0
        return good, f"{swarm.seconds:.1f} s"


def node_killed(swarm: Swarm) -> tuple[bool, str]:
    victim, others = swarm.hosts[2], [h for h in swarm.hosts if h is not swarm.hosts[2]]
    with swarm.start_afresh():
        out = swarm.run(at=0.5, act=lambda _: victim.kill())
        more = out.report["seconds"] - swarm.seconds
        allowed = swarm.seconds / NODES + 2
        good = swarm.is_whole(others) and not out.find_node(victim)["ready"] and more <= allowed
        return (
            good,
            f"{more:+.1f} s of {allowed:.1f} allowed, store {swarm.compute_store_ratio():.2f}x",
        )


def peer_lies(swarm: Swarm) -> tuple[bool, str]:
    liar, others = swarm.hosts[1], [h for h in swarm.hosts if h is not swarm.hosts[1]]
    with swarm.start_afresh(lies=liar):
        out = swarm.run()
        good = swarm.is_whole(others) and not out.find_node(liar)["trusted"]
        return good, f"{out.report['seconds']:.1f} s, store {swarm.compute_store_ratio():.2f}x"


def peer_crawls(swarm: Swarm) -> tuple[bool, str]:
    slow, others = swarm.hosts[3], swarm.hosts[:3]
    with swarm.start_afresh():
        out = swarm.run(at=0.3, act=lambda _: swarm.rig.shape(slow, 0.008))
        took = max(out.find_node(host)["seconds"] for host in others)
        good = swarm.is_whole(others) and not out.find_node(slow)["ready"]
        return good, f"the others {took:.1f} s, it was given up after {out.seconds:.1f} s"


def store_fault(fault: Fault, *, digest: bool = False) -> Callable[[Swarm], tuple[bool, str]]:
    def run(swarm: Swarm) -> tuple[bool, str]:
        with swarm.start_afresh():
            known = swarm.compute_sha256() if digest else None
            swarm.store.inject_fault(fault)
            out = swarm.run(sha256=known)
            fired = swarm.store.read_counts().fired.get(fault.kind, 0)
            good = swarm.is_whole(swarm.hosts) and fired > 0
            good &= not digest or "file.mismatch" in out.names
            return (
                good,
                f"{out.seconds:.1f} s, fired {fired}, store {swarm.compute_store_ratio():.2f}x",
            )

    return run


def replaced(swarm: Swarm) -> tuple[bool, str]:
    with swarm.start_afresh():
        out = swarm.run(
            at=0.3, act=lambda _: void(swarm.store.generate("object", SIZE, seed=99_999))
        )
        nothing = [h.call(_sha256, swarm.root / "object") for h in swarm.hosts]
        good = "ChangedError" in out.error and all("No such file" in said for said in nothing)
        return good, out.error[:60]


def late_node(swarm: Swarm) -> tuple[bool, str]:
    hosts = [*swarm.hosts, swarm.late]
    with swarm.start_afresh():
        out = swarm.run(hosts, at=0.5, act=lambda _: swarm.start_agent(swarm.late))
        good = swarm.is_whole(hosts) and swarm.compute_store_ratio() == 1.0
        return good, f"{out.report['seconds']:.1f} s"


def driver_killed(swarm: Swarm) -> tuple[bool, str]:
    with swarm.start_afresh():
        swarm.run(at=0.5, act=lambda driver: driver.kill())
        first = swarm.compute_store_ratio()
        out = swarm.run()
        cached = min(node["cached"] for node in out.report["nodes"]) / SIZE
        good = swarm.is_whole(swarm.hosts) and swarm.compute_store_ratio() < 1.2 and cached > 0.3
        return (
            good,
            f"store {first:.2f}x, then {swarm.compute_store_ratio():.2f}x; had {cached:.0%}",
        )


def cache_damaged(swarm: Swarm) -> tuple[bool, str]:
    with swarm.start_afresh():
        swarm.run()
        swarm.store.reset()
        swarm.hosts[0].call(_damage, swarm.root / "object")
        out = swarm.run(check="full")
        moved = sum(n["from_peers"] + n["from_store"] for n in out.report["nodes"])
        return swarm.is_whole(swarm.hosts) and moved == MIB, f"{moved} bytes moved"


def _damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(SIZE // 2)
        byte = file.read(1)[0]
        file.seek(SIZE // 2)
        file.write(bytes([byte ^ 1]))


def disk_full(swarm: Swarm) -> tuple[bool, str]:
    full, others = swarm.hosts[2], [h for h in swarm.hosts if h is not swarm.hosts[2]]
    with swarm.start_afresh():
        full.call(_fill)
        try:
            out = swarm.run()
        finally:
            full.call((DISK / "filler").unlink)
        good = swarm.is_whole(others) and not out.find_node(full)["ready"]
        return good, out.find_node(full)["why"][-60:]


def _fill() -> None:
    with (DISK / "filler").open("wb") as file:
        try:
            while file.write(bytes(MIB)):
                file.flush()
        except OSError:
            pass


def void(_: object) -> None:
    """Nothing."""


MATRIX: dict[str, Callable[[Swarm], tuple[bool, str]]] = {
    "calm": calm,
    "one node of four SIGKILLed at 50 %": node_killed,
    "a peer gives flipped bits": peer_lies,
    "a peer at 1 KB/s": peer_crawls,
    "the store flips a bit of an object with a digest": store_fault(
        Fault(FaultKind.FLIP, offset=SIZE // 3), digest=True
    ),
    "the store truncates bodies": store_fault(Fault(FaultKind.TRUNCATE, times=10)),
    "the store says 403 twice": store_fault(Fault(FaultKind.DENY, times=2)),
    "the store says 500 to a fifth": store_fault(
        Fault(FaultKind.ERROR, times=None, share=0.2, seed=5)
    ),
    "the store stalls for 30 s": store_fault(
        Fault(FaultKind.STALL, offset=SIZE // 2, seconds=30.0)
    ),
    "the object is replaced meanwhile": replaced,
    "a fifth node comes late": late_node,
    "the driver is killed and run again": driver_killed,
    "a cache is damaged": cache_damaged,
    "the disk of a node is full": disk_full,
}


def run_swarm(tell: Callable[[str], None], only: str = "") -> tuple[int, int]:
    """Run the matrix; how many cases there were, and how many went wrong."""
    wrong = count = 0
    with (
        Rig.start(nodes=NODES + 1, rate_mbit=MBIT, store_mbit=MBIT, disk_bytes=4 * SIZE) as rig,
        Store.start(DISK / "objects", rig.store) as store,
    ):
        swarm = Swarm(rig, store)
        for name, case in MATRIX.items():
            if only and only not in name and case is not calm:
                continue
            count += 1
            try:
                good, said = case(swarm)
            except Exception as error:  # noqa: BLE001 - the other cases shall still run
                good, said = False, f"{type(error).__name__}: {error}"
            wrong += not good
            tell(f"swarm: {name}: {'right' if good else 'WRONG'}, {said}")
    return count, wrong
