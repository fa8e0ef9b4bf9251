"""Nodes that die, stop, freeze, are missing or come late."""

import contextlib
import hashlib
import json
import signal
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pydantic import SecretStr

from benchmarks.rig.store import FaultKind, RigFault
from millrace import errors
from millrace.swarm import Host, Hosts, LimitSettings, prewarm, protocol, tls
from millrace.swarm.driving import agent_client, stragglers
from millrace.swarm.progress_events import NodeLost
from millrace.swarm.protocol import Endpoint
from tests.support.swarm.prewarms import MIB, below, fill, mounted
from tests.support.swarm.swarms import (
    KEY,
    TRICKLE,
    Agent,
    Heard,
    make_settings,
    read_files,
    start_agent,
    stop,
)


def test_a_node_that_dies_costs_only_itself(store, nodes):
    contents = fill(store, "dies")
    nodes[1] = replaced_by_slow(nodes[1], pause=0.3, stops_after=float("1e9"))  # never ready before
    heard = Heard(0.3, nodes[1].kill)
    report = prewarm(make_settings(store, nodes, **below("dies")), progress=heard)
    assert [lost.node for lost in heard.find(NodeLost)] == [nodes[1].name]
    assert [node.ready for node in report.nodes] == [True, False, True]
    assert "no longer answers" in report.nodes[1].reason or "orders" in report.nodes[1].reason
    assert read_files(nodes[0].root) == read_files(nodes[2].root) == contents


def test_too_few_nodes_are_an_error_that_says_why(store, nodes):
    fill(store, "few")
    nodes[0].kill()
    nodes[1].kill()
    start_timeout = timedelta(seconds=1)
    with pytest.raises(errors.WorkerError, match=r"2 of 3 nodes are lost.*cannot be reached"):
        prewarm(make_settings(store, nodes, start_timeout=start_timeout, **below("few")))


def test_a_missing_host_does_not_hold_up_the_others(store, nodes):
    fill(store, "missing")
    settings = make_settings(store, nodes, **below("missing"))
    stop(nodes[2])
    report = prewarm(settings.model_copy(update={"start_timeout": timedelta(minutes=5)}))
    assert [node.ready for node in report.nodes] == [True, True, False]
    assert report.seconds < settings.start_timeout.total_seconds()


class Dripping(BaseHTTPRequestHandler):
    """A server that answers with one byte at a time, for ever."""

    is_over = threading.Event()

    def do_GET(self) -> None:
        with contextlib.suppress(OSError):
            while not self.is_over.wait(0.01):
                self.wfile.write(b"x")

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_a_host_that_never_ends_its_first_answer_is_absent(store, nodes, monkeypatch):
    contents = fill(store, "drips")
    with ThreadingHTTPServer(("127.0.0.1", 0), Dripping) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def identify(endpoint: Endpoint, key: bytes, timeout: float) -> Endpoint:
            is_dripping = endpoint.port == server.server_port
            return protocol.identify(endpoint, key, 0.5 if is_dripping else timeout)

        monkeypatch.setattr(agent_client, "identify", identify)
        host = Host(url=f"http://127.0.0.1:{server.server_port}", name="drips")
        hosts = Hosts(hosts=(nodes[0].host, nodes[1].host, host), key=SecretStr(KEY))
        try:
            report = prewarm(make_settings(store, nodes, nodes=hosts, **below("drips")))
        finally:
            Dripping.is_over.set()
            server.shutdown()
    reasons = {node.name: node.reason for node in report.nodes if not node.ready}
    assert reasons.keys() == {"drips"}
    assert "did not answer for" in reasons["drips"]
    assert read_files(nodes[0].root) == read_files(nodes[1].root) == contents


def replaced_by_slow(node: Agent, pause: float, stops_after: float) -> Agent:
    """The same node with an agent that receives slowly."""
    stop(node)
    code = TRICKLE.format(pause=pause, stops_after=stops_after)
    return start_agent(node.name, node.root, port=int(node.url.rpartition(":")[2]), code=code)


def test_a_slow_node_that_goes_on_receiving_is_waited_for(store, nodes, monkeypatch):
    monkeypatch.setattr(
        stragglers, "_FINISH_FACTOR", 0.0
    )  # it counts for nodes that have every piece
    store.put("steady/object", hashlib.shake_256(b"steady").digest(MIB))
    nodes[2] = replaced_by_slow(nodes[2], pause=0.3, stops_after=float("1e9"))
    limits = LimitSettings(stall_timeout=timedelta(seconds=3))  # a piece takes longer
    report = prewarm(make_settings(store, nodes, limits=limits, **below("steady")))
    assert [node.reason for node in report.nodes] == [""] * 3
    assert report.nodes[2].ready


def test_a_node_that_receives_nothing_any_more_is_given_up(store, nodes):
    store.put("stalled/object", hashlib.shake_256(b"stalled").digest(MIB))
    nodes[2] = replaced_by_slow(nodes[2], pause=0.0, stops_after=2)
    limits = LimitSettings(stall_timeout=timedelta(seconds=2))
    try:
        report = prewarm(make_settings(store, nodes, limits=limits, **below("stalled")))
    finally:
        nodes[2].kill()
    assert [node.ready for node in report.nodes] == [True, True, False]
    assert "received no byte for" in report.nodes[2].reason


@pytest.mark.soak
def test_a_node_that_is_frozen_before_its_start_is_noticed(store, nodes, monkeypatch):
    monkeypatch.setattr(agent_client, "_ANSWER_TIMEOUT", 1.0)
    fill(store, "frozen")
    nodes[2].process.send_signal(signal.SIGSTOP)
    try:
        settings = make_settings(store, nodes, **below("frozen"))
        report = prewarm(settings.model_copy(update={"start_timeout": timedelta(minutes=5)}))
    finally:
        nodes[2].kill()
    assert [node.ready for node in report.nodes] == [True, True, False]
    assert report.seconds < 300


class Freezing(BaseHTTPRequestHandler):
    """An agent that answers until a run is to start, and then nothing any more."""

    frozen = threading.Event()
    thawed = threading.Event()

    def do_GET(self) -> None:
        if self.frozen.is_set():
            self.thawed.wait()
            return
        nonce = self.path.partition("nonce=")[2]
        proof = tls.prove(KEY.encode(), nonce, "freezing", "")
        answer = {"version": protocol.VERSION, "identity": "freezing", "proof": proof}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        self.frozen.set()
        self.thawed.wait()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.mark.soak
def test_a_node_that_freezes_while_it_looks_at_what_it_has_is_noticed(store, nodes, monkeypatch):
    monkeypatch.setattr(agent_client, "_ANSWER_TIMEOUT", 1.0)
    contents = fill(store, "freezes")
    with ThreadingHTTPServer(("127.0.0.1", 0), Freezing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hosts = [agent.host for agent in nodes[:2]]
        hosts.append(Host(url=f"http://127.0.0.1:{server.server_port}", name="freezes"))
        settings = make_settings(
            store, nodes, nodes=Hosts(hosts=tuple(hosts), key=SecretStr(KEY)), **below("freezes")
        )
        try:
            report = prewarm(settings.model_copy(update={"start_timeout": timedelta(minutes=5)}))
        finally:
            Freezing.thawed.set()
            server.shutdown()
    ready = {node.name: node.ready for node in report.nodes}
    assert ready == {"n0": True, "n1": True, "freezes": False}
    assert "did not answer for" in next(n.reason for n in report.nodes if n.name == "freezes")
    assert read_files(nodes[1].root) == contents


IDLE = """
import millrace.swarm.fetcher as fetcher
from millrace.swarm.messages import PieceRedundant

def fetch(self, order):
    self._emit(PieceRedundant(order.piece, order.source, 0))

fetcher.PieceFetcher._fetch = fetch
"""
"""Lets an agent answer each order that it has the piece already."""


@pytest.mark.parametrize("honest", [1, 2])
def test_a_node_that_fetches_nothing_is_given_up(store, nodes, tmp_path, honest):
    fill(store, "idle")
    idle = start_agent("idle", tmp_path / "idle", code=IDLE)
    limits = LimitSettings(stall_timeout=timedelta(seconds=1))
    try:
        report = prewarm(
            make_settings(store, [*nodes[:honest], idle], limits=limits, **below("idle"))
        )
    finally:
        stop(idle)
    assert {node.name: node.ready for node in report.nodes} == {
        "idle": False,
        **{node.name: True for node in nodes[:honest]},
    }


@pytest.mark.soak
def test_a_late_node_joins_a_run(store, nodes, tmp_path):
    contents = fill(store, "late")
    settings = make_settings(store, nodes, **below("late"))
    stop(nodes[2])
    port = int(nodes[2].url.rpartition(":")[2])
    store.inject_fault(
        RigFault(FaultKind.STALL, key="late/large.bin", offset=0, times=None, seconds=6)
    )

    def come() -> None:
        nodes[2] = start_agent("n2", nodes[2].root, port=port)

    report = prewarm(settings, progress=Heard(0.05, come))
    assert [node.ready for node in report.nodes] == [True] * 3
    assert read_files(nodes[2].root) == contents


def test_a_full_disk_fails_its_node_only(store, nodes):
    contents = fill(store, "full")
    small = nodes[0].root
    with mounted(small, 4 * MIB):
        report = prewarm(make_settings(store, nodes, **below("full")))
        assert "free" in report.nodes[0].reason
    assert [node.ready for node in report.nodes] == [False, True, True]
    assert read_files(nodes[1].root) == contents
