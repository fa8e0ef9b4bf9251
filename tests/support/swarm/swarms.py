"""Nodes for the tests: agents as processes of their own, each with a folder that is its disk."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import SecretStr

from benchmarks.rig.store import RigStore
from benchmarks.swarm_peers import spec
from millrace.progress import Event
from millrace.storage import StoreSpec
from millrace.swarm import Host, Hosts, PrewarmReport, PrewarmSettings, Request
from millrace.swarm.progress_events import PrewarmProgressed
from tests.support.fork_server import ForkedProcess, get_fork_server

KEY = secrets.token_hex(16)


@dataclass
class Agent:
    """A running ``millrace swarm node``."""

    name: str
    root: Path
    url: str
    process: ForkedProcess

    @property
    def host(self) -> Host:
        return Host(url=self.url, name=self.name)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


LIE = """
import os
import millrace.swarm.server as server

def send_wrong(to, descriptor, start, size):
    body = bytearray(os.pread(descriptor, size, start))
    body[size // 2] ^= 1
    to.sendall(body)

server._send_file = send_wrong
"""

FLIP = """
import millrace.swarm.piece_readers as fetch

read = fetch.StoreReader.read_piece

def flip(reader, number, into, *turn):
    read(reader, number, into, *turn)
    if len(into):
        into[len(into) // 2] ^= 1

fetch.StoreReader.read_piece = flip
"""
"""Makes a node flip a bit of each piece after it has read it from the store."""

FLIP_ONCE = """
import threading
import millrace.swarm.piece_readers as fetch

read = fetch.StoreReader.read_piece
first = threading.Lock()

def flip(reader, number, into, *turn):
    read(reader, number, into, *turn)
    if len(into) and first.acquire(blocking=False):
        into[len(into) // 2] ^= 1

fetch.StoreReader.read_piece = flip
"""
"""Makes a node flip a bit of the first piece that it reads from the store, and of no other one."""

FLIP_ALWAYS = """
import millrace.swarm.fetcher as fetcher

write = fetcher.PieceFetcher._write

def flip(self, order, data):
    if len(data):
        data[len(data) // 2] ^= 1
    write(self, order, data)

fetcher.PieceFetcher._write = flip
"""
"""Makes a node flip a bit of each piece that it receives, wherever the piece comes from."""

CLAIM = """
import millrace.swarm.assembler as assembler

def claim(self):
    opened(self)
    return [(number, f"blake3:{number:064x}") for number in range(len(self))]

opened = assembler.Assembler.open
assembler.Assembler.open = claim
"""
"""Makes a node say that it has all pieces, with digests that it makes up."""

FORGE = """
import millrace.swarm.agent as agent

events = agent.NodeRun.poll_events
FORGED = {forged}
told = False

def forge(run, after):
    global told
    if told:
        return events(run, after)
    told = True
    return FORGED

agent.NodeRun.poll_events = forge
"""


def make_forging(events: object) -> str:
    """Make a node answer so, a value or its source, when it is first asked what has happened."""
    return FORGE.replace("{forged}", events if isinstance(events, str) else repr(events))


def make_failed(piece: int = 0, **fields: object) -> dict[str, object]:
    """Make the JSON object of a failed fetch from the store, with other fields where given."""
    usual = {"piece": piece, "source": "", "reason": "x", "status": 0, "is_wrong": False}
    return {"type": "piece-failed", **usual, **fields}


DAWDLE = """
import time
import millrace.swarm.agent as agent

def events(run, after):
    run.heard = time.monotonic()
    time.sleep(0.05)
    return [{event}]

agent.NodeRun.poll_events = events
agent.NodeRun.take_orders = lambda run, orders: None
"""
"""Lets a node do nothing it is told, and say one thing for ever."""

DRIP = """
import os
import select
import millrace.swarm.server as server

def drip(to, descriptor, start, size):
    for at in range(start, start + size):
        to.sendall(os.pread(descriptor, 1, at))
        select.select([], [], [], 0.05)

server._send_file = drip
"""
"""Lets a node give others a byte at a time."""

IMPATIENT = """
import millrace.swarm.protocol as wire

wire._GRACE = 1.0
"""
"""Lets a node give up soon what comes too slowly."""

TRICKLE = """
import time
import millrace.swarm.protocol as wire
import millrace.swarm.fetcher as fetcher

class Trickle:
    def __init__(self, sock): self._sock, self._got = sock, 0
    def __getattr__(self, name): return getattr(self._sock, name)
    def recv(self, size): return self._sock.recv(min(size, 4096))
    def recv_into(self, into, size):
        time.sleep({pause} if self._got < {stops_after} else 3600)
        self._got += 1
        return self._sock.recv_into(into[:16384])

class ConnectionPool(wire.ConnectionPool):
    def _open(self, *arguments):
        super()._open(*arguments)
        connection = arguments[0]
        if not isinstance(connection.sock, Trickle):
            connection.sock = Trickle(connection.sock)
        return connection.sock

fetcher.ConnectionPool = ConnectionPool
"""
"""Lets an agent receive 16 KiB at a time with a pause, and nothing after a number of times."""


def start_agent(name: str, root: Path, *, port: int = 0, code: str = "") -> Agent:
    """Start a node; code may change what it does, as `LIE` and `TRICKLE` do."""
    process = get_fork_server("millrace.cli", "millrace.swarm", "millrace.swarm.agent").start(
        f"{code}from millrace.cli import main; main()",
        *("swarm", "node", "--root", str(root), "--port", str(port)),
        env=os.environ | {"MILLRACE_NODE_KEY": KEY},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("Listening at "), line
    return Agent(name, root, line.split()[-1], process)


@contextmanager
def running(folder: Path, count: int) -> Iterator[list[Agent]]:
    """So many nodes, each with a root of its own below the folder."""
    agents = [start_agent(f"n{i}", folder / f"n{i}") for i in range(count)]
    try:
        yield agents
    finally:
        for agent in agents:
            stop(agent)


def stop(agent: Agent) -> None:
    agent.process.terminate()
    agent.process.wait()
    assert agent.process.stdout is not None
    agent.process.stdout.close()


def make_spec(store: RigStore) -> StoreSpec:
    return spec.make_spec(store.make_config())


def reveal_settings(settings: PrewarmSettings) -> dict[str, Any]:
    """Return settings as plain JSON values, with the secrets of the stores."""
    stores = {name: one.reveal_secrets() for name, one in settings.stores.items()}
    return {**settings.model_dump(mode="json"), "stores": stores}


def make_settings(store: RigStore | StoreSpec, agents: list[Agent], **more: Any) -> PrewarmSettings:
    """Everything of a store, on every node."""
    values: dict[str, Any] = {
        "requests": [Request(prefix="")],
        "stores": {"s": store if isinstance(store, StoreSpec) else make_spec(store)},
        "root": Path("/unused"),
        "piece_size": 256 * 1024,
    }
    if agents:
        values["nodes"] = Hosts(hosts=tuple(a.host for a in agents), key=SecretStr(KEY))
    return PrewarmSettings(**(values | more))


def describe_transfers(report: PrewarmReport) -> str:
    """Return what each node has read from the store and received, and the reasons in the report."""
    lines = [
        f"{node.name}: {node.from_store:,} bytes from the store, {node.from_peers:,} from nodes, "
        f"{node.failures} failed fetches, {'trusted' if node.trusted else 'not trusted'}, "
        f"ready after {node.seconds} s{node.reason and f', lost: {node.reason}'}"
        for node in report.nodes
    ]
    lines += [
        f"driver: {report.driver_bytes:,} bytes from the store",
        f"unverified files, which need two reads: {report.unverified}",
        f"reason for direct reads: {report.direct or 'none'}",
        f"first orders after {report.startup:.3f} s; bytes on all nodes: {report.curve}",
        "A further read without a failure, wrong bytes or a direct read is one of a late read.",
    ]
    return "\n".join(lines)


def read_files(root: Path) -> dict[str, bytes]:
    """Return the files of a node under final names, without Millrace's hidden files."""
    return {
        file.relative_to(root).as_posix(): file.read_bytes()
        for file in root.rglob("*")
        if file.is_file() and not any(p.startswith(".") for p in file.relative_to(root).parts)
    }


E = TypeVar("E", bound=Event)


class Heard:
    """A progress that remembers, and may do something at a share of the bytes."""

    def __init__(self, at: float = 2.0, act: Any = None) -> None:
        self.events: list[Event] = []
        self._at, self._act = at, act

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if self._act is None or not isinstance(event, PrewarmProgressed) or not event.total:
            return
        if event.present >= self._at * event.total:
            act, self._act = self._act, None
            act()

    def find(self, event_class: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, event_class)]
