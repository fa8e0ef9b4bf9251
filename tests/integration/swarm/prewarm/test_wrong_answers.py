"""Agents and servers that send wrong bytes, events or heads."""

import hashlib
import http.client
import json
import socket
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from pydantic import SecretStr

from millrace import errors
from millrace.swarm import Host, Hosts, Request, prewarm, tls
from millrace.swarm.driving import driver_reader
from millrace.swarm.progress_events import NodeUntrusted
from millrace.swarm.protocol import (
    VERSION,
    ConnectionPool,
    Endpoint,
    ProtocolVersionError,
    identify,
)
from tests.support.swarm.prewarms import MIB, below, fill
from tests.support.swarm.swarms import (
    KEY,
    LIE,
    Heard,
    make_failed,
    make_forging,
    make_settings,
    read_files,
    start_agent,
    stop,
)


def test_a_peer_that_gives_flipped_bits_is_caught_and_asked_no_more(store, nodes, tmp_path):
    contents = fill(store, "liar")
    stop(nodes.pop())
    liar = start_agent("liar", tmp_path / "liar", code=LIE)
    nodes.append(liar)
    heard = Heard()
    report = prewarm(make_settings(store, nodes, **below("liar")), progress=heard)
    assert [read_files(node.root) for node in nodes[:2]] == [contents] * 2
    assert heard.find(NodeUntrusted)
    assert [node.trusted for node in report.nodes] == [False, True, True]  # by their names


D = f"blake3:{0:064x}"
FORGED = [
    [{"type": "digest-mismatch", "file": 0, "digest": f"blake3:{n:064d}"} for n in range(3)],
    [{"type": "digest-mismatch", "file": number, "digest": D} for number in range(3)],
    [{}], ["x"], {"type": "piece-written"}, [None], 7, [{"type": []}], [{"type": "piece-written"}],
    [{"type": "piece-written", "piece": 10**6, "source": "", "digest": D, "size": 1}],
    [{"type": "piece-written", "piece": -1, "source": "", "digest": D, "size": 1}],
    [{"type": "piece-written", "piece": 0, "source": "", "digest": D, "size": 1}],
    [{"type": "piece-written", "piece": 0, "source": "nowhere", "digest": D, "size": 1}],
    [{"type": "piece-written", "piece": 0, "source": "", "digest": "x", "size": 1}],
    [{"type": "files-ready", "files": [99]}], [{"type": "files-ready", "files": 1}],
    [{"type": "digest-mismatch", "file": 99, "digest": D}],
    [make_failed(source="nowhere", reason="", is_wrong=True)],
    [make_failed(is_wrong=True)],
    [make_failed(reason=7, status="x")],
    [{"type": "file-unusable", "file": 99, "reason": "x"}],
    "[{'type': 'read-retried', 'reason': 'x' * (3 << 20)}]",
    [make_failed(status=500)] * 1100,
]  # fmt: skip


@pytest.mark.parametrize(
    "forged",
    [
        *FORGED[:3],
        *(pytest.param(forged, marks=pytest.mark.soak) for forged in FORGED[3:-2]),
        *FORGED[-2:],
    ],
    ids=lambda forged: repr(forged)[:40],
)
def test_a_node_that_forges_what_it_tells_harms_only_itself(store, nodes, tmp_path, forged):
    contents = fill(store, "forged")
    sums = {f"forged/{name}": hashlib.sha256(body).hexdigest() for name, body in contents.items()}
    requests = [Request(key=key, sha256=sha256) for key, sha256 in sums.items()]
    stop(nodes.pop())
    nodes.append(start_agent("liar", tmp_path / "liar", code=make_forging(forged)))
    limits = {"stall_timeout": timedelta(seconds=10)}  # one of them lets a node do nothing more
    report = prewarm(
        make_settings(store, nodes, requests=requests, min_node_share=0.5, limits=limits)
    )
    whole = {f"forged/{name}": body for name, body in contents.items()}
    assert [read_files(node.root) for node in nodes[:2]] == [whole] * 2
    by_name = {node.name: node for node in report.nodes}
    assert [by_name[node.name].reason for node in nodes[:2]] == ["", ""]
    malformed = forged not in (*FORGED[:2], FORGED[-1])
    assert ("no agent of this version" in by_name["liar"].reason) is malformed


def test_reads_that_only_one_node_says_to_fail_are_made_by_the_driver_few_at_a_time(
    store, nodes, tmp_path, monkeypatch
):
    body = hashlib.shake_256(b"gone").digest(16 * MIB)
    store.put("gone/object", body)
    forged = [make_failed(p, reason="gone", status=404) for p in range(64)]
    stop(nodes.pop())
    nodes.append(start_agent("liar", tmp_path / "liar", code=make_forging(forged)))
    read: list[int] = []
    read_piece = driver_reader.RetryingReader.read
    monkeypatch.setattr(
        driver_reader.RetryingReader,
        "read",
        lambda self, number, into: read.append(number) or read_piece(self, number, into),
    )
    request = Request(key="gone/object", sha256=hashlib.sha256(body).hexdigest())
    report = prewarm(make_settings(store, nodes, requests=[request]))
    assert [node.ready for node in report.nodes] == [False, True, True]
    assert len(read) < 16


def test_a_node_cannot_put_what_does_not_print_into_an_error(store, nodes, tmp_path):
    fill(store, "odd")
    stop(nodes.pop())
    failed = '[{"type": "node-failed", "reason": "a\\\\ud800b\\\\u001b[2Jc"}]'
    fault = f"__import__('json').loads('{failed}')"
    nodes.append(start_agent("liar", tmp_path / "liar", code=make_forging(fault)))
    with pytest.raises(errors.WorkerError) as caught:
        prewarm(make_settings(store, nodes, min_node_share=1.0, **below("odd")))
    assert "a\ufffdb\ufffd[2Jc" in str(caught.value)


@pytest.mark.parametrize(
    ("module", "refuses"),
    [
        ("agent", f"agent speaks version {VERSION + 1}"),
        ("run_spec", f"driver speaks version {VERSION}"),
    ],
)
def test_a_driver_and_an_agent_of_different_versions_refuse_each_other(
    store, nodes, tmp_path, module, refuses
):
    contents = fill(store, "versions")
    stop(nodes.pop())
    code = "import millrace.swarm.agent, millrace.swarm.run_spec, millrace.swarm.protocol as wire\n"
    code += f"wire.VERSION = millrace.swarm.{module}.VERSION = {VERSION + 1}\n"
    nodes.append(start_agent("later", tmp_path / "later", code=code))
    report = prewarm(make_settings(store, nodes, min_node_share=0.5, **below("versions")))
    assert [read_files(node.root) for node in nodes[:2]] == [contents] * 2
    later = next(node for node in report.nodes if node.name == "later")
    assert refuses in later.reason
    assert "install the same version of Millrace on the driver and on all nodes" in later.reason


class Refusing(BaseHTTPRequestHandler):
    """An agent that refuses each run, with a reason that is none."""

    protocol_version = "HTTP/1.1"
    said = b""
    stated: ClassVar[dict[str, int]] = {"version": VERSION}

    def do_GET(self) -> None:
        nonce = self.path.partition("nonce=")[2]
        proof = tls.prove(KEY.encode(), nonce, "refusing", "")
        answer = {"identity": "refusing", "proof": proof, **self.stated}
        self.answer(200, json.dumps(answer).encode())

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(403, self.said)

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.mark.parametrize("said", [b'{"why": ""}', b'{"why": 0}', b'{"why": ["x"]}', b""])
def test_a_refusal_without_a_reason_costs_only_its_node(store, nodes, said, monkeypatch):
    fill(store, "refused")
    monkeypatch.setattr(Refusing, "said", said)
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hosts = [nodes[0].host, Host(url=f"http://127.0.0.1:{server.server_port}", name="refuses")]
        settings = make_settings(
            store, nodes, nodes=Hosts(hosts=tuple(hosts), key=SecretStr(KEY)), **below("refused")
        )
        try:
            report = prewarm(settings)
        finally:
            server.shutdown()
    assert [node.ready for node in report.nodes] == [True, False]
    assert isinstance(report.nodes[1].reason, str)
    assert report.nodes[1].reason


def test_an_agent_that_states_no_version_is_refused(monkeypatch):
    monkeypatch.setattr(Refusing, "stated", {})
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(ProtocolVersionError, match="agent speaks no version"):
                identify(Endpoint("http", "127.0.0.1", server.server_port), KEY.encode(), 60.0)
        finally:
            server.shutdown()


HEAD = b"HTTP/1.1 206 Partial Content\r\nContent-Length: 4\r\n"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (HEAD + b"\r\nlonger than it says", "the answer has more than 4 bytes"),
        (HEAD + b"\r\nsho", "1 more expected"),
        (HEAD.replace(b"4", b"5") + b"\r\nfive!", "the answer has 5 bytes, not 4"),
        (b"HTTP/1.1 206 Partial Content\r\n\r\nfour", "the answer has unknown bytes, not 4"),
        (b"HTTP/1.1 \xb2\xb2\xb2 ?\r\n\r\n", "^HTTP/1.1 ²²² "),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\nfour", "^HTTP/1.0 200 OK$"),
        (b"no HTTP at all\r\n\r\n", "^no HTTP at all$"),
        (b"", "the connection was closed without an answer"),
    ],
)
def test_an_answer_that_is_none_is_an_error_of_the_transfer(answer, reason):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            client, _ = server.accept()
            with client:
                client.recv(4096)
                client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        connections = ConnectionPool(5.0)
        endpoint = Endpoint("http", "127.0.0.1", server.getsockname()[1])
        with pytest.raises(http.client.HTTPException, match=reason):
            connections.read_into(endpoint, "/a", {}, memoryview(bytearray(4)))
        thread.join()
        connections.close()


def test_a_header_of_two_lines_is_not_sent():
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = Endpoint("http", "127.0.0.1", server.getsockname()[1])
        with pytest.raises(ValueError, match="one line"):
            ConnectionPool(5.0).read_into(
                endpoint, "/a", {"A": "b\r\nC: d"}, memoryview(bytearray(1))
            )
