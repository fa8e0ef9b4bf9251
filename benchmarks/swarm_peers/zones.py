"""Millrace with agents that are already running, in zones. It measures each node and the CPU time.

As a script, this module runs on the first node of a rig, and reads an `Order`.
"""

import json
import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from benchmarks.common import read_cpu_seconds
from benchmarks.node_process import NODE_KEY, set_encryption, start_node
from benchmarks.rig import Rig
from benchmarks.rig.store import RigStore
from benchmarks.swarm_peers.order import Order, read_order
from benchmarks.swarm_peers.spec import make_spec
from millrace.swarm import Host, Hosts, PrewarmSettings, Request, prewarm

PORT = 7070
TIMEOUT = 600.0  # seconds


@dataclass(frozen=True, slots=True)
class ZoneFigures:
    """Figures of a run.

    Attributes:
        seconds: Time of each node in the order of the rig, from the first request to its last file.
        store_bytes: Number of bytes of bodies that the store sent.
        link_bytes: Number of bytes of payload on the link between the zones, in both directions.
        cpu_seconds: CPU time of all agents during the run, without their start.
    """

    seconds: tuple[float, ...]
    store_bytes: int
    link_bytes: int
    cpu_seconds: float


def run_zones(
    rig: Rig, store: RigStore, keys: Sequence[str], destination: Path, *, encrypted: bool = True
) -> ZoneFigures:
    """Copy objects to every node of a rig.

    Args:
        rig: Rig with the nodes.
        store: Store in the rig. Its counts are reset.
        keys: Keys of the objects.
        destination: Path of the destination folder, the same on every node.
        encrypted: Whether the connections between nodes are encrypted.

    Raises:
        RigError: The run failed.
        RuntimeError: An agent did not start.
    """
    store.reset()
    key = secrets.token_hex(16)
    with ExitStack() as stack:
        agents = [
            stack.enter_context(
                start_node(
                    destination, key, "--host", host.address, "--port", str(PORT),
                    encrypted=encrypted, popen=host.popen,
                )
            )
            for host in rig.nodes
        ]  # fmt: skip
        before = sum(rig.read_link_bytes()) if rig.far else 0
        nodes = {
            host.name: [host.address, "far" if host in rig.far else "near"] for host in rig.nodes
        }
        options = {"nodes": nodes, "encrypted": encrypted}
        order = Order(store.make_config(), list(keys), str(destination), "", options)
        cpu_seconds = sum(read_cpu_seconds(agent.pid) for agent in agents)
        command = [sys.executable, "-m", "benchmarks.swarm_peers.zones"]
        output = rig.nodes[0].run(
            command, stdin=order.format_line(), env={NODE_KEY: key}, timeout=TIMEOUT
        )
        after = sum(rig.read_link_bytes()) if rig.far else 0
        cpu_seconds = sum(read_cpu_seconds(agent.pid) for agent in agents) - cpu_seconds
    seconds = json.loads(output.splitlines()[-1])
    return ZoneFigures(
        tuple(seconds[host.name] for host in rig.nodes),
        store.read_counts().bytes,
        after - before,
        cpu_seconds,
    )


def main() -> None:
    """Copy the objects to all nodes, and print the time of each node without the startup."""
    order = read_order()
    set_encryption(encrypted=order.options["encrypted"])
    hosts = tuple(
        Host(url=f"http://{address}:{PORT}", name=name, zone=zone)
        for name, (address, zone) in order.options["nodes"].items()
    )
    report = prewarm(
        PrewarmSettings(
            requests=tuple(Request(key=key) for key in order.keys),
            stores={"store": make_spec(order.store)},
            root=Path(order.destination),
            nodes=Hosts(hosts=hosts, key=SecretStr(os.environ[NODE_KEY])),
        )
    )
    faults = [
        f"{node.name}: {node.reason or 'not trusted'}" for node in report.nodes if not node.ready
    ]
    faults += [f"{node.name} is not trusted" for node in report.nodes if not node.trusted]
    if faults:
        raise RuntimeError("; ".join(faults))
    print(json.dumps({node.name: node.seconds - report.startup for node in report.nodes}))


if __name__ == "__main__":
    main()
