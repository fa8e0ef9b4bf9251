"""Run the swarm on hosts of a rig, with killed, malicious and slow nodes, and a failing store."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.rig import DISK, Rig, RigHost
from benchmarks.rig.store import REGION, FaultKind, RigFault, RigStore
from tests.support.swarm.swarms import KEY, LIE

MIB = 1 << 20
SIZE = 128 * MIB
PORT = 7000
NODES, MBIT = 4, 200
MAX_STORE_RATIO = 1.5  # `compute_store_ratio`; nodes that fetch nothing from each other have 4
NODE = "from millrace.cli import main; main()"


@dataclass
class Outcome:
    """Result of one run.

    Attributes:
        seconds: Seconds from the start of the driver to its end.
        report: Report of the driver; empty after an error.
        error: Class and message of the driver's error; empty if it had none.
        event_names: Kinds of the driver's events.
    """

    seconds: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    event_names: set[str] = field(default_factory=set)

    def find_node(self, host: RigHost) -> dict[str, Any]:
        """Return the report of a host's node."""
        return next(n for n in self.report["nodes"] if n["name"] == host.name)


class Swarm:
    """Rig with agents, a store, and a driver on the first host.

    Args:
        rig: Rig of the hosts.
        store: Store of the object that the nodes copy.
    """

    def __init__(self, rig: Rig, store: RigStore) -> None:
        self.rig, self.store = rig, store
        self.hosts = list(rig.nodes[:NODES])
        self.late_host = rig.nodes[NODES]
        self.root = DISK / "none"
        self.seconds = 0.0
        self._runs = 0

    def start_agent(self, host: RigHost, script: str = NODE) -> None:
        """Start the agent of a host. The agent ends with the host's processes."""
        command = [sys.executable, "-c", script, "swarm", "node", "--root", str(self.root)]
        command += ["--host", host.address, "--port", str(PORT)]
        agent = host.popen(command, env={"MILLRACE_NODE_KEY": KEY}, stdout=subprocess.PIPE)
        assert agent.stdout is not None
        assert agent.stdout.readline(), f"the agent of {host.name} did not start"

    @contextmanager
    def start_agents(self, *, liar: RigHost | None = None) -> Iterator[None]:
        """Start agents with empty folders, and write a new object to the store.

        Args:
            liar: Host whose agent sends wrong bytes to its peers.
        """
        self._runs += 1
        self.root = DISK / f"warm-{self._runs}"
        self.store.reset()
        self.store.generate("object", SIZE, seed=self._runs)
        self.store.reset()
        for host in self.hosts:
            self.start_agent(host, f"{LIE}\n{NODE}" if host is liar else NODE)
        try:
            yield
        finally:
            for host in self.rig.nodes:
                self.rig.shape(host, MBIT)
                host.kill()
                host.call(_remove_folder, self.root)

    def compute_sha256(self) -> str:
        """Return the SHA-256 of the newest object of the store."""
        return self.rig.store.call(_compute_newest_sha256, DISK / "objects")

    def make_settings(self, hosts: list[RigHost], **extra: Any) -> dict[str, Any]:
        """Return the settings of a driver."""
        return {
            "requests": [{"key": "object", "sha256": extra.pop("sha256", None)}],
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
            **extra,
        }

    def run(
        self,
        hosts: list[RigHost] | None = None,
        *,
        fraction: float = 2.0,
        action: Callable[[subprocess.Popen[str]], None] | None = None,
        **settings: Any,
    ) -> Outcome:
        """Run a driver on the first host.

        Args:
            hosts: Hosts of the nodes. None for all that `start_agents` started.
            fraction: Fraction of the bytes after which the action is done.
            action: Function that is called once with the driver.
            **settings: Further settings of the driver.
        """
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
                message = json.loads(line)
                match message.pop("kind"):
                    case "report":
                        outcome.report = message
                    case "error":
                        outcome.error = f"{message['error']}: {message['says']}"
                    case _:
                        outcome.event_names.add(message["name"])
                        fields = message["fields"]
                        if (
                            action
                            and fields.get("total")
                            and fields["present"] >= fraction * fields["total"]
                        ):
                            action(driver)
                            action = None
        outcome.seconds = time.monotonic() - began
        return outcome

    def has_object(self, hosts: list[RigHost]) -> bool:
        """Decide whether each of these hosts has the bytes of the object."""
        expected = self.compute_sha256()
        return all(host.call(_compute_sha256, self.root / "object") == expected for host in hosts)

    def compute_store_ratio(self) -> float:
        """Return the bytes that the store sent, relative to the size of the object."""
        return self.store.read_counts().bytes / SIZE


def _compute_newest_sha256(folder: Path) -> str:
    """Return the SHA-256 of the newest file in a folder."""
    return _compute_sha256(max(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns))


def _compute_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, or the error message if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return str(error)


def _remove_folder(folder: Path) -> None:
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def run_undisturbed(swarm: Swarm) -> tuple[bool, str]:
    """Run without a disturbance, and keep the time as the reference.

    Returns:
        Whether the result is correct, and its measurements. The other cases return the same.
    """
    with swarm.start_agents():
        outcome = swarm.run()
        swarm.seconds = outcome.report["seconds"]
        is_correct = swarm.has_object(swarm.hosts) and swarm.compute_store_ratio() == 1.0
        return is_correct, f"{swarm.seconds:.1f} s"


def kill_node(swarm: Swarm) -> tuple[bool, str]:
    victim, others = swarm.hosts[2], [h for h in swarm.hosts if h is not swarm.hosts[2]]
    with swarm.start_agents():
        outcome = swarm.run(fraction=0.5, action=lambda _: victim.kill())
        extra = outcome.report["seconds"] - swarm.seconds
        allowed = swarm.seconds / NODES + 2
        is_correct = (
            swarm.has_object(others) and not outcome.find_node(victim)["ready"] and extra <= allowed
        )
        return (
            is_correct,
            f"{extra:+.1f} s of {allowed:.1f} allowed, store {swarm.compute_store_ratio():.2f}x",
        )


def run_with_liar(swarm: Swarm) -> tuple[bool, str]:
    liar, others = swarm.hosts[1], [h for h in swarm.hosts if h is not swarm.hosts[1]]
    with swarm.start_agents(liar=liar):
        outcome = swarm.run()
        is_correct = swarm.has_object(others) and not outcome.find_node(liar)["trusted"]
        is_correct &= swarm.compute_store_ratio() <= MAX_STORE_RATIO
        return (
            is_correct,
            f"{outcome.report['seconds']:.1f} s, store {swarm.compute_store_ratio():.2f}x",
        )


def run_with_slow_peer(swarm: Swarm) -> tuple[bool, str]:
    slow, others = swarm.hosts[3], swarm.hosts[:3]
    with swarm.start_agents():
        outcome = swarm.run(fraction=0.3, action=lambda _: swarm.rig.shape(slow, 0.008))
        took = max(outcome.find_node(host)["seconds"] for host in others)
        ratio = swarm.compute_store_ratio()
        is_correct = swarm.has_object(others) and not outcome.find_node(slow)["ready"]
        text = f"the others {took:.1f} s, the slow node was given up after {outcome.seconds:.1f} s"
        return is_correct and ratio <= MAX_STORE_RATIO, f"{text}, store {ratio:.2f}x"


def make_store_fault_case(
    fault: RigFault, *, digest: bool = False
) -> Callable[[Swarm], tuple[bool, str]]:
    """Return a case with a fault of the store.

    Args:
        fault: Fault of the store.
        digest: Whether the driver knows the SHA-256 of the object, and must report a mismatch.
    """

    def run(swarm: Swarm) -> tuple[bool, str]:
        with swarm.start_agents():
            known = swarm.compute_sha256() if digest else None
            swarm.store.inject_fault(fault)
            outcome = swarm.run(sha256=known)
            fired = swarm.store.read_counts().fired.get(fault.kind, 0)
            is_correct = swarm.has_object(swarm.hosts) and fired > 0
            is_correct &= not digest or "file.mismatch" in outcome.event_names
            ratio = swarm.compute_store_ratio()
            allowed = MAX_STORE_RATIO + digest  # a damaged object is read again as a whole
            return (
                is_correct and ratio <= allowed,
                f"{outcome.seconds:.1f} s, fired {fired}, store {ratio:.2f}x",
            )

    return run


def replace_object(swarm: Swarm) -> tuple[bool, str]:
    def replace() -> None:
        swarm.store.generate("object", SIZE, seed=99_999)
        swarm.store.reset()  # also of the fault

    with swarm.start_agents():
        # Nobody has the whole object before it is replaced.
        swarm.store.inject_fault(RigFault(FaultKind.ERROR, offset=SIZE // 2, times=None))
        outcome = swarm.run(fraction=0.3, action=lambda _: replace())
        nothing = [h.call(_compute_sha256, swarm.root / "object") for h in swarm.hosts]
        is_correct = "ChangedError" in outcome.error and all(
            "No such file" in text for text in nothing
        )
        return is_correct, outcome.error[:60]


def add_late_node(swarm: Swarm) -> tuple[bool, str]:
    hosts = [*swarm.hosts, swarm.late_host]
    with swarm.start_agents():
        outcome = swarm.run(
            hosts, fraction=0.5, action=lambda _: swarm.start_agent(swarm.late_host)
        )
        is_correct = swarm.has_object(hosts) and swarm.compute_store_ratio() == 1.0
        return is_correct, f"{outcome.report['seconds']:.1f} s"


def kill_driver(swarm: Swarm) -> tuple[bool, str]:
    with swarm.start_agents():
        killed = swarm.run(fraction=0.5, action=lambda driver: driver.kill())
        first = swarm.compute_store_ratio()
        outcome = swarm.run()
        cached = min(node["cached"] for node in outcome.report["nodes"]) / SIZE
        is_correct = (
            swarm.has_object(swarm.hosts) and swarm.compute_store_ratio() < 1.2 and cached > 0.3
        )
        is_correct &= not killed.report  # the first driver did not end by itself
        return (
            is_correct,
            f"store {first:.2f}x, then {swarm.compute_store_ratio():.2f}x; cached {cached:.0%}",
        )


def damage_cache(swarm: Swarm) -> tuple[bool, str]:
    with swarm.start_agents():
        swarm.run()
        swarm.store.reset()
        swarm.hosts[0].call(_flip_bit, swarm.root / "object")
        outcome = swarm.run(check="full")
        moved = sum(n["from_peers"] + n["from_store"] for n in outcome.report["nodes"])
        return swarm.has_object(swarm.hosts) and moved == MIB, f"{moved} bytes moved"


def _flip_bit(path: Path) -> None:
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(SIZE // 2)
        byte = file.read(1)[0]
        file.seek(SIZE // 2)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def fill_disk(swarm: Swarm) -> tuple[bool, str]:
    full, others = swarm.hosts[2], [h for h in swarm.hosts if h is not swarm.hosts[2]]
    with swarm.start_agents():
        full.call(_fill_with_file)
        try:
            outcome = swarm.run()
        finally:
            full.call((DISK / "filler").unlink)
        is_correct = swarm.has_object(others) and not outcome.find_node(full)["ready"]
        return is_correct, outcome.find_node(full)["reason"][-60:]


def _fill_with_file() -> None:
    with (DISK / "filler").open("wb") as file:
        try:
            while file.write(bytes(MIB)):
                file.flush()
        except OSError:
            pass


MATRIX: dict[str, Callable[[Swarm], tuple[bool, str]]] = {
    "undisturbed": run_undisturbed,
    "one node of four SIGKILLed at 50 %": kill_node,
    "a peer sends flipped bits": run_with_liar,
    "a peer at 1 KB/s": run_with_slow_peer,
    "the store flips a bit of an object with a digest": make_store_fault_case(
        RigFault(FaultKind.FLIP, offset=SIZE // 3), digest=True
    ),
    "the store truncates bodies": make_store_fault_case(RigFault(FaultKind.TRUNCATE, times=10)),
    "the store answers 403 twice": make_store_fault_case(RigFault(FaultKind.DENY, times=2)),
    "the store answers 500 to a fifth of the requests": make_store_fault_case(
        RigFault(FaultKind.ERROR, times=None, share=0.2, seed=5)
    ),
    "the store stalls for 30 s": make_store_fault_case(
        RigFault(FaultKind.STALL, offset=SIZE // 2, seconds=30.0)
    ),
    "the object is replaced during the run": replace_object,
    "a fifth node starts late": add_late_node,
    "the driver is killed and run again": kill_driver,
    "a cache is damaged": damage_cache,
    "the disk of a node is full": fill_disk,
}


def run_swarm(report: Callable[[str], None], only: str = "") -> tuple[int, int]:
    """Run the cases of the matrix.

    Args:
        report: Function that is called with a line for each case.
        only: Text that the name of a case must contain. The undisturbed case always runs.

    Returns:
        Number of cases, and number of cases with a wrong result.
    """
    wrong = count = 0
    with (
        Rig.start(nodes=NODES + 1, rate_mbit=MBIT, store_mbit=MBIT, disk_bytes=4 * SIZE) as rig,
        RigStore.start(DISK / "objects", rig.store) as store,
    ):
        swarm = Swarm(rig, store)
        for name, case in MATRIX.items():
            if only and only not in name and case is not run_undisturbed:
                continue
            count += 1
            try:
                is_correct, text = case(swarm)
            except Exception as error:  # noqa: BLE001 - the other cases still run
                is_correct, text = False, f"{type(error).__name__}: {error}"
            wrong += not is_correct
            report(f"swarm: {name}: {'right' if is_correct else 'WRONG'}, {text}")
    return count, wrong
