"""Encryption between the machines of a swarm: who can read, and who can answer."""

import contextlib
import json
import secrets
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from benchmarks.rig import DISK, Rig
from benchmarks.rig import RigHost as Machine
from benchmarks.rig.store import RigStore
from millrace import errors
from millrace.storage import StoreSpec
from millrace.swarm import Host, Hosts, PrewarmSettings, Request, prewarm, server, tls
from millrace.swarm import agent as agents
from millrace.swarm.driving import agent_client
from millrace.swarm.protocol import (
    AUTH_HEADER,
    VERSION,
    ConnectionPool,
    Endpoint,
    HttpStatusError,
    identify,
    sign,
)
from tests.support.swarm.swarms import KEY, Agent, read_files, running, start_agent, stop

MIB = 1 << 20
PORT = 7000
PLAIN = "import millrace.swarm.tls as tls; tls.is_loopback = lambda host: True\n"
"""Takes the encryption out of an agent or a driver, as the swarm was before."""
NODE = "from millrace.cli import main; main()"
DRIVER = """
import json
from millrace.swarm import driver
from tests.soak.warm import main

make_run_spec = driver.make_run_spec

def tell_key(*arguments):
    spec = make_run_spec(*arguments)
    print(json.dumps({"kind": "key", "key": spec.key.hex()}), flush=True)
    return spec

driver.make_run_spec = tell_key
main()
"""
SNIFFER = Path(__file__).with_name("sniffer.py")
MARKER = b"a pattern of 32 bytes, like none"
NAME = "weights-of-a-model-that-is-secret"


# -- a network with somebody who listens


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig.start(nodes=3, rate_mbit=1000, store_mbit=1000, disk_bytes=512 * MIB) as rig:
        yield rig


@contextmanager
def started(machine: Machine, root: Path, code: str = "") -> Iterator[None]:
    command = [sys.executable, "-c", f"{code}{NODE}", "swarm", "node", "--root", str(root)]
    command += ["--host", machine.address, "--port", str(PORT)]
    node = machine.popen(command, env={"MILLRACE_NODE_KEY": KEY}, stdout=subprocess.PIPE)
    with node:
        assert node.stdout is not None
        assert node.stdout.readline()
        try:
            yield
        finally:
            node.kill()


@contextmanager
def recorded(machine: Machine, file: Path) -> Iterator[None]:
    command = [sys.executable, str(SNIFFER), "eth0", str(file)]
    with machine.popen(command, stdout=subprocess.PIPE) as sniffer:
        assert sniffer.stdout is not None
        assert sniffer.stdout.readline()
        try:
            yield
        finally:
            sniffer.kill()


def between_nodes(frames: bytes, store: str) -> bytes:
    """The frames of a recording that neither come from the store nor go there."""
    outside, kept, at = socket.inet_aton(store), bytearray(), 0
    while at < len(frames):
        size = int.from_bytes(frames[at : at + 4], "big")
        frame = frames[at + 4 : at + 4 + size]
        at += 4 + size
        if frame[12:14] == b"\x08\x00" and outside not in {frame[26:30], frame[30:34]}:
            kept += frame
    return bytes(kept)


def warm(rig: Rig, store: RigStore, code: str) -> list[dict[str, Any]]:
    settings = {
        "requests": [{"key": NAME}],
        "stores": {"store": store.make_settings()},
        "root": "/unused",
        "nodes": {
            "kind": "hosts",
            "key": KEY,
            "hosts": [{"url": f"http://{each.address}:{PORT}"} for each in rig.nodes],
        },
    }
    command = [sys.executable, "-c", f"{code}{DRIVER}"]
    said = rig.nodes[0].run(command, stdin=json.dumps(settings) + "\n", timeout=300)
    return [json.loads(line) for line in said.splitlines()]


@pytest.mark.parametrize("plain", [False, True], ids=["encrypted", "plain"])
def test_who_listens_at_a_node_learns_nothing_of_what_goes_between_nodes(rig, plain):
    code, root = PLAIN if plain else "", DISK / f"root-{plain}"
    body = MARKER * (4 * MIB // len(MARKER))
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(RigStore.start(DISK / f"objects-{plain}", rig.store))
        store.put(NAME, body)
        for machine in rig.nodes:
            stack.enter_context(started(machine, root, code))
        file = DISK / f"frames-{plain}"
        with recorded(rig.nodes[1], file):
            told = warm(rig, store, code)
        frames = rig.nodes[1].call(file.read_bytes)
    report, key = told[-1], next(each["key"] for each in told if each["kind"] == "key")
    assert [node["ready"] for node in report["nodes"]] == [True] * 3
    assert all(each.call((root / NAME).read_bytes) == body for each in rig.nodes)
    assert MARKER in frames  # it has recorded: the store's own protocol is the store's
    seen = between_nodes(frames, rig.store.address)
    assert len(seen) > len(body) // 2  # other nodes gave or got some of it
    secret = [
        MARKER,
        NAME.encode(),
        b"X-Amz-Signature",
        key.encode(),
        b"X-Millrace-Auth",
        b"/runs/",
    ]
    # In the clear all of it is there: the test would see it.
    assert [each in seen for each in secret] == [plain] * len(secret)
    assert KEY.encode() not in seen


def test_an_agent_answers_plain_requests_on_its_own_machine_only(rig):
    near, far = rig.nodes[:2]
    ask = """
import http.client, sys
connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]))
connection.request("PUT", "/runs/x", body=bytes(100_000))
answer = connection.getresponse()
print(answer.status, answer.read().decode())
"""
    with started(near, DISK / "root-426"):
        for machine in (near, far):  # its own address is not loopback either
            said = machine.run([sys.executable, "-c", ask, near.address, str(PORT)])
            assert said.startswith("426 ")
            assert "answers over TLS" in said


# -- somebody who answers in between


@dataclass
class Between:
    """Ends TLS with a certificate of its own, and hands on what it hears to an agent.

    Attributes:
        agent: Port of the agent.
        heard: Decrypted bytes.
    """

    agent: int
    heard: bytearray = field(default_factory=bytearray)
    server: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))

    @property
    def port(self) -> int:
        return self.server.getsockname()[1]

    def serve(self) -> None:
        certificate = tls.make_certificate()
        with contextlib.suppress(OSError):
            while True:
                plain, _ = self.server.accept()
                with contextlib.suppress(OSError), plain:
                    self._hand_on(certificate.context.wrap_socket(plain, server_side=True))

    def _hand_on(self, client: ssl.SSLSocket) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        raw = socket.create_connection(("127.0.0.1", self.agent))
        with client, context.wrap_socket(raw) as agent:
            back = threading.Thread(target=self._hand_back, args=(agent, client))
            back.start()
            while request := client.recv(MIB):
                self.heard += request
                agent.sendall(request)
            tls.shut(agent, socket.SHUT_RDWR)
            back.join()

    @staticmethod
    def _hand_back(agent: ssl.SSLSocket, client: ssl.SSLSocket) -> None:
        with contextlib.suppress(OSError):
            while answer := agent.recv(MIB):
                client.sendall(answer)


@contextmanager
def between(agent: int) -> Iterator[Between]:
    made = Between(agent)
    thread = threading.Thread(target=made.serve, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        with contextlib.suppress(OSError):
            made.server.shutdown(socket.SHUT_RDWR)
        made.server.close()
        thread.join()


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loopback count as a network, for the driver that runs in this process."""
    monkeypatch.setattr(tls, "is_loopback", lambda host: False)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Agent]]:
    with running(tmp_path, 3) as agents:
        yield agents


def settings_of(folder: Path, started: list[Agent], **more: Any) -> PrewarmSettings:
    source = folder / "source"
    if not source.exists():
        source.mkdir()
        (source / "large").write_bytes(secrets.token_bytes(3 * MIB + 17))
        (source / "small").write_bytes(b"small")
    values: dict[str, Any] = {
        "requests": (Request(prefix=""),),
        "stores": {"s": StoreSpec(url=source.as_uri())},
        "root": Path("/unused"),
        "piece_size": 256 * 1024,
    }
    if started:
        values["nodes"] = Hosts(hosts=tuple(each.host for each in started), key=SecretStr(KEY))
    return PrewarmSettings(**(values | more))


def port_of(agent: Agent) -> int:
    return int(agent.url.rpartition(":")[2])


def test_nodes_are_warmed_over_tls(far, nodes, tmp_path):
    report = prewarm(settings_of(tmp_path, nodes))
    assert [node.reason for node in report.nodes] == [""] * 3
    assert [read_files(node.root) for node in nodes] == [read_files(tmp_path / "source")] * 3
    received = sum(node.from_peers for node in report.nodes)
    assert received > report.size  # two nodes that begin at once may read one piece each
    assert received + sum(node.from_store for node in report.nodes) == 3 * report.size


def test_who_answers_in_between_is_refused_and_hears_only_a_nonce(far, nodes, tmp_path):
    with between(port_of(nodes[1])) as thief:
        hosts = [node.host for node in nodes]
        hosts[1] = Host(url=f"http://127.0.0.1:{thief.port}", name="n1")
        chosen = Hosts(hosts=tuple(hosts), key=SecretStr(KEY))
        report = prewarm(settings_of(tmp_path, nodes, nodes=chosen))
        assert [node.ready for node in report.nodes] == [True, False, True]
        assert f"the server at 127.0.0.1:{thief.port} cannot prove" in report.nodes[1].reason
        assert "another program answers there" in report.nodes[1].reason
        with pytest.raises(errors.WorkerError, match="another program answers there"):
            prewarm(settings_of(tmp_path, nodes, nodes=chosen, min_node_share=1.0))
        assert b"GET /agent?nonce=" in thief.heard
        assert [line for line in thief.heard.split(b"\r\n") if b"HTTP/1.1" in line] == [
            line for line in thief.heard.split(b"\r\n") if line.startswith(b"GET /agent?nonce=")
        ]
    assert read_files(nodes[1].root) == {}


def test_a_node_that_states_the_identity_of_another_takes_nobodys_place(
    far, nodes, tmp_path, monkeypatch
):
    identities = [identify_over_tls(Endpoint.parse_url(node.url)[0]).identity for node in nodes]
    stop(nodes[0])
    code = f"""
import millrace.swarm.agent as agent

begin = agent.Agent.__init__

def pose(self, *arguments, **more):
    begin(self, *arguments, **more)
    self.identity = {identities[1]!r}

agent.Agent.__init__ = pose
"""
    nodes[0] = start_agent("liar", tmp_path / "liar", code=code)
    identified = threading.Event()
    come = agent_client.identify

    def in_order(endpoint, *more):  # the liar first
        if endpoint.port == port_of(nodes[0]):
            found = come(endpoint, *more)
            identified.set()
            return found
        identified.wait()
        return come(endpoint, *more)

    monkeypatch.setattr(agent_client, "identify", in_order)
    report = prewarm(settings_of(tmp_path, nodes))
    assert [node.reason for node in report.nodes if node.name != "liar"] == ["", ""]


def test_a_node_sends_nothing_to_who_answers_in_place_of_another_node(nodes):
    endpoint, _ = Endpoint.parse_url(nodes[0].url)
    with between(endpoint.port) as thief:
        known = identify_over_tls(endpoint)
        connections = ConnectionPool(10.0)
        try:
            with pytest.raises(tls.TlsError, match="nothing was sent to it"):
                connections.read_into(
                    replace(known, port=thief.port), "/a", {}, memoryview(bytearray(1))
                )
        finally:
            connections.close()
        assert thief.heard == b""


def identify_over_tls(endpoint: Endpoint, key: bytes = KEY.encode()) -> Endpoint:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tls, "is_loopback", lambda host: False)
        return identify(endpoint, key, 10.0)


def test_a_proof_is_for_one_nonce_one_agent_and_one_certificate():
    key, right = b"key", ("nonce", "agent", "certificate")
    proof = tls.prove(key, *right)
    tls.check_proof(proof, key, *right, at="a")
    for at in range(3):
        other = [*right]
        other[at] = "other"
        with pytest.raises(tls.TlsError):
            tls.check_proof(proof, key, *other, at="a")
    for wrong in (tls.prove(b"another", *right), "", "é", None, 7):
        with pytest.raises(tls.TlsError):
            tls.check_proof(wrong, key, *right, at="a")


def test_a_certificate_is_made_at_each_start():
    made = [tls.make_certificate() for _ in range(2)]
    assert made[0].fingerprint != made[1].fingerprint
    assert all(each.context.minimum_version == ssl.TLSVersion.TLSv1_3 for each in made)


def test_the_wrong_node_key_is_named_also_over_tls(far, nodes, tmp_path):
    key = SecretStr("another key, long enough")
    hosts = Hosts(hosts=tuple(node.host for node in nodes), key=key)
    with pytest.raises(errors.WorkerError, match="signed with another key"):
        prewarm(settings_of(tmp_path, nodes, nodes=hosts))


# -- a request that is sent again


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize(
    ("method", "path"),
    [("PUT", "/runs/x"), ("POST", "/runs/x/orders"), ("GET", "/runs/x/events?after=0")],
)
def test_a_request_that_is_sent_again_is_refused(nodes, method, path, encrypted):
    endpoint, _ = Endpoint.parse_url(nodes[0].url)
    endpoint = identify_over_tls(endpoint) if encrypted else identify(endpoint, KEY.encode(), 10.0)
    assert bool(endpoint.fingerprint) is encrypted
    body = b"no JSON" if method != "GET" else b""
    signed = {AUTH_HEADER: sign(KEY.encode(), method, path, body, to=endpoint.identity)}
    said: list[HttpStatusError] = []
    for _ in range(2):
        connections = ConnectionPool(10.0)  # another connection each
        with pytest.raises(HttpStatusError) as refused:
            connections.request(endpoint, method, path, signed, body, longest=100)
        connections.close()
        said.append(refused.value)
    assert [each.status for each in said] == [404, 403]
    assert "was used before" in str(said[1])


# -- what does not encrypt


class Old(BaseHTTPRequestHandler):
    """An agent of a version that did not encrypt."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_an_agent_that_does_not_encrypt_is_a_sentence(far, nodes, tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), Old) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hosts = [node.host for node in nodes[:2]]
        hosts.append(Host(url=f"http://127.0.0.1:{server.server_port}", name="old"))
        chosen = Hosts(hosts=tuple(hosts), key=SecretStr(KEY))
        report = prewarm(settings_of(tmp_path, nodes, nodes=chosen))
        server.shutdown()
    assert [node.ready for node in report.nodes] == [True, True, False]
    assert "does not encrypt (TLS)" in report.nodes[2].reason
    assert "Start `millrace swarm node` of this version there" in report.nodes[2].reason


def test_loopback_stays_plain_and_makes_no_certificate(tmp_path, monkeypatch):
    monkeypatch.setattr(tls, "make_certificate", lambda: pytest.fail("a certificate was made"))
    agent = agents.Agent(tmp_path / "n", KEY.encode(), host="127.0.0.1")
    agent.start()
    try:
        host = Host(url=f"http://localhost:{agent.port}", name="n")
        chosen = Hosts(hosts=(host,), key=SecretStr(KEY))
        report = prewarm(settings_of(tmp_path, [], nodes=chosen))
        assert [node.ready for node in report.nodes] == [True]
    finally:
        agent.close()
    loopback = {"127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST", "::ffff:127.0.0.1"}
    assert {each for each in loopback if tls.is_loopback(each)} == loopback
    for each in ("10.0.0.1", "198.18.0.1", "::", "0.0.0.0", "host", "localhost.example", ""):
        assert not tls.is_loopback(each)


def test_a_port_of_this_machine_that_leads_to_a_forger_is_told_nothing(nodes, tmp_path):
    heard = bytearray()

    class Forger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.extend(f"{self.requestline} {self.headers}".encode())
            answer = {"version": VERSION, "identity": "0" * 16, "proof": "0" * 64}
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_PUT(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Forger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        forger = Host(url=f"http://127.0.0.1:{server.server_port}", name="forger")
        chosen = Hosts(hosts=(nodes[0].host, forger), key=SecretStr(KEY))
        report = prewarm(settings_of(tmp_path, [], nodes=chosen))
        server.shutdown()
    by_name = {node.name: node for node in report.nodes}
    assert by_name["n0"].ready
    assert "cannot prove that it is the agent" in by_name["forger"].reason
    assert heard.count(b"HTTP/1.1") == heard.count(b"GET /agent?nonce=") == 1


def test_a_port_of_this_machine_that_leads_to_another_one_is_asked_over_tls(tmp_path, monkeypatch):
    # As behind a tunnel: loopback for the driver, but not for the agent.
    monkeypatch.setattr(tls, "is_secured", lambda sock: isinstance(sock, ssl.SSLSocket))
    agent = agents.Agent(tmp_path / "n", KEY.encode(), host="127.0.0.1")
    agent.start()
    try:
        host = Host(url=f"http://127.0.0.1:{agent.port}", name="n")
        chosen = Hosts(hosts=(host,), key=SecretStr(KEY))
        report = prewarm(settings_of(tmp_path, [], nodes=chosen))
        assert [node.reason for node in report.nodes] == [""]
    finally:
        agent.close()


# -- those who begin and say no more


def test_a_handshake_that_is_not_ended_holds_up_nobody_and_is_closed(far, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "_HANDSHAKE_TIMEOUT", 2.0)
    agent = agents.Agent(tmp_path / "n", KEY.encode(), host="127.0.0.1")
    agent.start()
    try:
        with contextlib.ExitStack() as stack:
            address = ("127.0.0.1", agent.port)
            slow = [
                stack.enter_context(socket.create_connection(address, timeout=60))
                for _ in range(50)
            ]
            for each in slow:
                each.sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a ClientHello
            host = Host(url=f"http://127.0.0.1:{agent.port}", name="n")
            chosen = Hosts(hosts=(host,), key=SecretStr(KEY))
            report = prewarm(settings_of(tmp_path, [], nodes=chosen))
            assert [node.ready for node in report.nodes] == [True]
            assert [each.recv(1) for each in slow] == [b""] * 50
    finally:
        agent.close()


def test_an_agent_that_falls_silent_in_the_handshake_is_given_up(far, nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(agent_client, "_ANSWER_TIMEOUT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:  # the kernel accepts
        host = Host(url=f"http://127.0.0.1:{server.getsockname()[1]}", name="silent")
        hosts = Hosts(hosts=(nodes[0].host, host), key=SecretStr(KEY))
        settings = settings_of(tmp_path, nodes, nodes=hosts, start_timeout=timedelta(seconds=2))
        report = prewarm(settings)
    assert [node.ready for node in report.nodes] == [True, False]
    assert "did not answer for" in report.nodes[1].reason


def test_a_kept_connection_that_was_closed_meanwhile_is_made_anew(tmp_path):
    agent = agents.Agent(tmp_path / "n", KEY.encode(), host="127.0.0.1")
    agent.start()
    connections = ConnectionPool(10.0)
    try:
        endpoint = identify_over_tls(Endpoint("http", "127.0.0.1", agent.port))
        accepted: list[socket.socket] = []
        set_idle = agent._server.set_idle

        def note(connection: socket.socket, *, idle: bool) -> None:
            accepted.append(connection)
            set_idle(connection, idle=idle)

        agent._server.set_idle = note
        for _ in range(3):
            answer = connections.request(endpoint, "GET", "/agent", longest=1000)
            assert json.loads(answer)["identity"] == agent.identity
            with contextlib.suppress(OSError):
                tls.shut(accepted[-1], socket.SHUT_RDWR)
    finally:
        connections.close()
        agent.close()
