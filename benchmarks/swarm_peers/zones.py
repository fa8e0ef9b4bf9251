"""Millrace on nodes whose links differ: agents that run already, told their zones; times by node.

As a script it drives the run, on the first node of a rig; it reads an `Order`.
"""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from benchmarks.rig import Rig, RigError
from benchmarks.rig.store import Store
from benchmarks.swarm_peers.order import Order, read_order
from benchmarks.swarm_peers.spec import spec_of
from millrace.swarm import Host, Hosts, PrewarmSettings, Request, prewarm

PORT = 7070
KEY = "MILLRACE_NODE_KEY"
TIMEOUT = 600.0  # seconds


@dataclass(frozen=True, slots=True)
class Warmed:
    """A run, node by node.

    Attributes:
        seconds: Of each node, in the rig's order, from the first request to its last file.
        store_bytes: Bodies that the store sent.
        link_bytes: Payload that crossed the link between the zones, both ways.
    """

    seconds: tuple[float, ...]
    store_bytes: int
    link_bytes: int


def run_zones(rig: Rig, store: Store, keys: Sequence[str], destination: Path) -> Warmed:
    """Put objects on every node of a rig.

    Raises:
        RigError: It failed.
    """
    store.reset()
    secret = {KEY: secrets.token_hex(16)}
    with ExitStack() as stack:
        for node in rig.nodes:
            command = [sys.executable, "-c", "from millrace.cli import main; main()", "node"]
            command += ["--root", str(destination), "--host", node.address, "--port", str(PORT)]
            agent = node.popen(command, env=secret, stdout=subprocess.PIPE, text=True)
            stack.enter_context(agent)
            stack.callback(agent.kill)
            assert agent.stdout is not None
            if not agent.stdout.readline():
                raise RigError(f"The agent of {node.name} did not start.")
        before = sum(rig.crossed()) if rig.far else 0
        nodes = {
            host.name: [host.address, "far" if host in rig.far else "near"] for host in rig.nodes
        }
        order = Order(store.config(), list(keys), str(destination), "", {"nodes": nodes})
        command = [sys.executable, "-m", "benchmarks.swarm_peers.zones"]
        said = rig.nodes[0].run(command, given=order.said(), env=secret, timeout=TIMEOUT)
        after = sum(rig.crossed()) if rig.far else 0
    seconds = json.loads(said.splitlines()[-1])
    return Warmed(
        tuple(seconds[host.name] for host in rig.nodes), store.counts().bytes, after - before
    )


def main() -> None:
    """Warm every node, and say how long each took without the start of the run."""
    order = read_order()
    hosts = tuple(
        Host(url=f"http://{address}:{PORT}", name=name, zone=zone)
        for name, (address, zone) in order.options["nodes"].items()
    )
    report = prewarm(
        PrewarmSettings(
            requests=tuple(Request(key=key) for key in order.keys),
            stores={"store": spec_of(order.store)},
            root=Path(order.destination),
            nodes=Hosts(hosts=hosts, key=SecretStr(os.environ[KEY])),
        )
    )
    faults = [
        f"{node.name}: {node.why or 'not trusted'}" for node in report.nodes if not node.ready
    ]
    faults += [f"{node.name} is not trusted" for node in report.nodes if not node.trusted]
    if faults:
        raise RuntimeError("; ".join(faults))
    print(json.dumps({node.name: node.seconds - report.startup for node in report.nodes}))


if __name__ == "__main__":
    main()
