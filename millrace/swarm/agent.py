"""An agent: one process and one port that puts files on a node, and gives their pieces to others.

It decides nothing. A driver tells it over signed requests what the files are and which piece to
fetch from where, and is told what happened. Other nodes may ask it for pieces, and for nothing
else. Below ``/runs/{run}``:

- ``PUT`` starts the run (its plan), ``POST .../orders`` gives orders, ``GET .../events?after=N``
  waits for what happened, ``DELETE`` ends it: signed with the control key;
- ``GET .../pieces/{number}`` is for other nodes: signed with the run's own key.

``GET /agent`` answers anybody with the agent's identity, which every signature names. With a nonce,
signed with the control key, it also proves that this is the agent (`millrace.swarm.tls`).

One port takes TLS and plain HTTP. Plain requests are answered over loopback only.
"""

import contextlib
import hashlib
import http.client
import json
import os
import queue
import resource
import secrets
import select
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs

from millrace.errors import ChangedError, ConfigurationError, HeldError, MillraceError, format_error
from millrace.swarm import tls
from millrace.swarm.archives.run_archives import ArchiveUnpacker
from millrace.swarm.assembler import Assembler
from millrace.swarm.cache_index import CacheCheck
from millrace.swarm.pieces import Catalogue, digest_of
from millrace.swarm.protocol import (
    AUTH_HEADER,
    ConnectionPool,
    Endpoint,
    SignatureChecker,
    SignatureError,
    check_signature,
)
from millrace.swarm.transfer import BufferPool, FetchError, PeerReader, StoreReader, hash_segments

_LONG_POLL_TIMEOUT = 1.0  # seconds that a request for events is held open at most: the heartbeat
_STALL_TIMEOUT = 10.0  # seconds without a byte after which a transfer has failed
_ORPHAN_TIMEOUT = (
    120.0  # seconds without a driver after which a run is given up; what is here stays
)
_MAX_BODY_SIZE = 256 << 20
_LINGER_TIMEOUT = 10.0  # seconds that the rest of a request that is refused is let go of
_DISCARD_SIZE = 256 * 1024  # bytes of it at a time
_BACKLOG = 256
_MAX_IDLE = 1024  # connections that are kept without a request
_HANDSHAKE = 10.0  # seconds that the beginning of TLS may take
_DRIVER_TIMEOUT = 15.0  # seconds after which a driver that asks for no events counts as gone

_Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _RunSpec:
    """Body of the request that starts a run.

    Two lines of JSON: the nodes that are there, and what every node is told alike.
    """

    catalogue: Catalogue
    sources: list[str]
    key: bytes
    peers: dict[str, Endpoint]
    check: CacheCheck
    slots: int
    ca: str | None
    unpacked: dict[str, int]

    @classmethod
    def parse(cls, body: bytes) -> "_RunSpec":
        peers, _, plan = body.partition(b"\n")
        data = json.loads(plan)
        return cls(
            catalogue=Catalogue.from_json(data["catalogue"]),
            sources=data["sources"],
            key=bytes.fromhex(data["key"]),
            peers={name: Endpoint(*place) for name, place in json.loads(peers).items()},
            check=CacheCheck(data["check"]),
            slots=data["slots"],
            ca=data["ca"],
            unpacked=data["unpacked"],
        )


class Run:
    """One run on one node.

    Args:
        name: Of the run.
        root: The folder that files go below.
        plan: What it is.
    """

    def __init__(self, name: str, root: Path, plan: _RunSpec) -> None:
        self.name, self.key = name, plan.key
        self._plan = plan
        self._events: list[_Event] = []
        self._news = threading.Condition()
        self._orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._sizes = plan.catalogue.list_piece_sizes()
        self._buffers = BufferPool(max(self._sizes, default=0))
        self.began = datetime.now(UTC)
        self.heard = time.monotonic()
        self.landing = Assembler(
            root,
            plan.catalogue,
            check=plan.check,
            finished=self._report_finished,
            mismatch=lambda number, digest: self._emit({"e": "mismatch", "f": number, "d": digest}),
            fault=self._report_fault,
        )
        self._received = 0  # bytes, when the driver last asked
        self._to_store = ConnectionPool(_STALL_TIMEOUT, ca=plan.ca)
        self._to_peers = ConnectionPool(_STALL_TIMEOUT)
        self._store = StoreReader(
            plan.catalogue,
            plan.sources,
            self._to_store,
            lambda why: self._emit({"e": "retry", "why": why[:300]}),
        )
        self._peers = PeerReader(name, plan.key, plan.peers, self._to_peers)
        self._threads = [
            threading.Thread(target=self._run_orders, name=f"fetch-{i}", daemon=True)
            for i in range(plan.slots)
        ]
        self._archives = ArchiveUnpacker(root, plan.catalogue, self.landing, plan.unpacked)
        self._threads += [
            threading.Thread(target=self._unpack, args=(i,), name=f"unpack-{i}", daemon=True)
            for i, file in enumerate(plan.catalogue.files)
            if file.unpack
        ]

    def open(self) -> list[tuple[int, str]]:
        """Begin; returns the pieces that are here already, with their digests."""
        have = self.landing.open()
        for thread in self._threads:
            thread.start()
        return have

    def close(self) -> None:
        """End; transfers under way are broken off, what was written stays."""
        self._store.close()
        self._to_store.close()
        self._to_peers.close()
        for _ in range(self._plan.slots):
            self._orders.put(None)
        self.landing.stop()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self.landing.close()
        with self._news:
            self._news.notify_all()

    def is_driven(self) -> bool:
        """Tell whether the driver has asked for events a short while ago."""
        return time.monotonic() - self.heard <= _DRIVER_TIMEOUT

    def take_orders(self, orders: list[dict[str, Any]]) -> None:
        """Take orders, and nodes that have joined."""
        for order in orders:
            if "join" in order:
                self._plan.peers[order["join"]] = Endpoint(*order["place"])
            elif "void" in order:
                self.landing.void_digest(order["void"])
            elif order.get("drop"):
                self.landing.drop(order["p"])
            else:
                self._orders.put(order)

    def poll_events(self, after: int) -> list[_Event]:
        """Return what has happened since; after a while, nothing or that bytes have come."""
        self.heard = time.monotonic()
        with self._news:
            if len(self._events) <= after:
                self._news.wait(_LONG_POLL_TIMEOUT)
            received = self._to_store.received + self._to_peers.received
            if len(self._events) <= after and received != self._received:
                self._events.append({"e": "received", "b": received})
            self._received = received
            return self._events[after:]

    def _emit(self, event: _Event) -> None:
        with self._news:
            self._events.append(event)
            self._news.notify_all()

    def _report_fault(self, error: BaseException) -> None:
        self._emit({"e": "fault", "why": _describe_error(error)})

    def _run_orders(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                self._fetch(order)
            except Exception as error:  # noqa: BLE001 - told to the driver
                self._report_fault(error)

    def _fetch(self, order: dict[str, Any]) -> None:
        number: int = order["p"]
        source: str = order["s"]
        wanted: str = order["d"]
        told = {"p": number, "s": source}
        if self.landing.has(number):  # another source was quicker
            self._emit({"e": "had", **told, "b": 0})
            return
        with self._buffers.borrow(self._sizes[number]) as data:
            try:
                if source:
                    self._peers.read_piece(number, source, data, lambda: self.landing.has(number))
                else:
                    self._store.read_piece(number, data)
            except FetchError as error:
                if self.landing.has(number):
                    self._emit({"e": "had", **told, "b": 0})
                    return
                why = {"why": str(error)[:300], "status": error.status}
                self._emit({"e": "failed", **told, **why})
                return
            self._write_piece(number, data, wanted, told)

    def _write_piece(self, number: int, data: memoryview, wanted: str, told: _Event) -> None:
        parts = hash_segments(self._plan.catalogue.pieces[number], data)
        digest = digest_of(parts)
        if wanted and digest != wanted:
            self._emit({"e": "failed", **told, "why": "wrong bytes", "status": 0, "wrong": True})
            return
        if self.landing.write(number, data, parts):
            self._emit({"e": "done", **told, "d": digest, "b": len(data)})
        else:  # another source was quicker, and its bytes may be others
            self._emit({"e": "had", **told, "b": len(data)})

    def _report_finished(self, numbers: list[int]) -> None:
        files = self._plan.catalogue.files
        if plain := [number for number in numbers if not files[number].unpack]:
            self._emit({"e": "files", "f": plain})

    def _unpack(self, number: int) -> None:
        """Unpack an archive while it arrives. One that cannot be unpacked costs only itself."""
        try:
            self._archives.unpack(number)
        except ChangedError:
            return  # the run has ended
        except Exception as error:  # noqa: BLE001 - told to the driver
            self._emit({"e": "unusable", "f": number, "why": _describe_error(error)})
            return
        self._emit({"e": "files", "f": [number]})


class Agent:
    """The server of a node.

    Args:
        root: The folder that files go below; a driver cannot choose another.
        control: The key that a driver's requests are signed with.
        host: The address to listen on.
        port: The port; 0 takes a free one.
    """

    def __init__(self, root: Path, control: bytes, *, host: str = "", port: int = 0) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root, self._control = root, control
        self.identity = secrets.token_hex(8)
        self._signatures = SignatureChecker(self.identity)
        self._run: Run | None = None
        self._starting = False
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._server = _listen(host, port)
        self._server.agent = self
        self.ended = threading.Event()
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="serve", daemon=True
        )
        self._watch = threading.Thread(target=self._watch_driver, name="watch", daemon=True)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._server.server_address[1]

    @cached_property
    def _certificate(self) -> tls.Certificate:
        return tls.make_certificate()

    @property
    def certificate(self) -> tls.Certificate:
        """Its certificate; on loopback alone, made when it is asked for."""
        with self._making:
            return self._certificate

    def start(self) -> None:
        """Listen, in threads of its own."""
        if not tls.is_loopback(str(self._server.server_address[0])):
            _ = self.certificate
        self._thread.start()
        self._watch.start()

    def close(self) -> None:
        """Stop listening, and end a run."""
        self.ended.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self.end_run(None)

    def start_run(self, name: str, body: bytes) -> list[tuple[int, str]]:
        """Start a run. A run whose driver is gone is ended first.

        Returns:
            Pieces that are on this node already, with their digests.

        Raises:
            _BusyError: Another driver uses this agent.
        """
        plan = _RunSpec.parse(body)
        with self._lock:
            if self._starting:
                raise _BusyError("another run is being started on this node")
            if self._run is not None and self._run.name != name and self._run.is_driven():
                raise _BusyError(
                    f"another run uses this node, since {self._run.began:%Y-%m-%d %H:%M:%S} UTC, "
                    "and its driver is alive: wait for it, or stop it"
                )
            self._starting = True
        try:
            self.end_run(None)
            run = Run(name, self.root, plan)
            try:
                have = run.open()
            except BaseException:
                run.close()
                raise
            run.heard = time.monotonic()  # looking at what is here may have taken long
            with self._lock:
                self._run = run
        finally:
            self._starting = False
        return have

    def end_run(self, name: str | None) -> None:
        """End a run; with None, whichever it is."""
        with self._lock:
            run = self._run
            if run is None or name not in {None, run.name}:
                return
            self._run = None
        run.close()

    def get_run(self, name: str) -> Run:
        """Return the run of a name.

        Raises:
            KeyError: There is none.
        """
        run = self._run
        if run is None or run.name != name:
            raise KeyError(name)
        return run

    def check_driver(self, header: str | None, method: str, path: str) -> str:
        """Return the SHA-256 of the body of a driver's request.

        Raises:
            SignatureError: It is not signed with the control key for this agent.
        """
        return self._signatures.check(self._control, header, method, path)

    def check_peer(self, run: Run, header: str | None, path: str) -> None:
        """Check that a node of a run asks.

        Raises:
            SignatureError: It is not signed with the key of the run for this agent.
        """
        self._signatures.check(run.key, header, "GET", path)

    def introduce(self, header: str | None, path: str, *, encrypted: bool) -> dict[str, str]:
        """Return the identity, and for a nonce of the driver the proof that it is this agent.

        Args:
            header: `AUTH_HEADER` header of the request.
            path: Path with its query.
            encrypted: Whether it was asked over TLS: the proof is for the certificate then.

        Raises:
            SignatureError: The nonce is not signed with the control key.
        """
        nonce = parse_qs(path.partition("?")[2]).get("nonce")
        if nonce is None:
            return {"identity": self.identity}
        check_signature(self._control, header, "GET", path, to="")
        fingerprint = self.certificate.fingerprint if encrypted else ""
        proof = tls.prove(self._control, nonce[0], self.identity, fingerprint)
        return {"identity": self.identity, "proof": proof}

    def _watch_driver(self) -> None:
        while not self.ended.wait(_ORPHAN_TIMEOUT / 8):
            run = self._run
            if run is not None and time.monotonic() - run.heard > _ORPHAN_TIMEOUT:
                self.end_run(run.name)


def serve(root: Path, key: bytes, host: str, port: int, told: Callable[[str], None]) -> None:
    """Run an agent until the process is asked to end (SIGTERM, SIGINT).

    Args:
        root: The folder that files go below.
        key: What a driver signs with.
        host: The address to listen on.
        port: The port; 0 takes a free one.
        told: Told the address, once it listens.
    """
    agent = Agent(root, key, host=host, port=port)

    def handle_signal(number: int, frame: object) -> None:
        agent.ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle_signal)
    agent.start()
    told(f"http://{Endpoint('http', host, agent.port).netloc}")
    agent.ended.wait()
    agent.close()


class _BusyError(HeldError):
    """The agent takes part in the run of another driver."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = _BACKLOG
    agent: Agent

    def __init__(self, family: socket.AddressFamily, address: tuple[str, int]) -> None:
        self.address_family = family
        self._idle: dict[socket.socket, None] = {}  # connections without a request, oldest first
        self._most_idle = min(_MAX_IDLE, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection. Where there are too many idle ones, the oldest is closed."""
        self.set_idle(request, idle=True)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, which TLS begins in too."""
        try:
            request.settimeout(_Handler.timeout)
            if tls.is_hello(request):
                request = self._encrypt(request)
        except OSError:
            self.shutdown_request(request)
            return
        super().process_request_thread(request, client_address)

    def _encrypt(self, plain: socket.socket) -> ssl.SSLSocket:
        context = self.agent.certificate.context
        self.set_idle(plain, idle=False)
        plain.settimeout(_HANDSHAKE)
        secured = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        self.set_idle(secured, idle=True)
        try:
            secured.do_handshake()
        except OSError:
            self.shutdown_request(secured)
            raise
        return secured

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.set_idle(request, idle=False)
        super().shutdown_request(request)

    def set_idle(self, connection: socket.socket, *, idle: bool) -> None:
        """Note whether a connection waits for a request, which anybody can let it do."""
        with self._lock:
            self._idle.pop(connection, None)
            if not idle:
                return
            self._idle[connection] = None
            if len(self._idle) > self._most_idle:
                oldest = next(iter(self._idle))
                del self._idle[oldest]
                with contextlib.suppress(OSError):
                    tls.shut(oldest, socket.SHUT_RDWR)  # its thread closes it

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a peer that has gone away: it asks again, or the driver is told."""


def _listen(host: str, port: int) -> _Server:
    """Make the server of an agent, for IPv4 or IPv6 as the host is.

    Raises:
        ConfigurationError: It cannot listen there.
    """
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # Without a host the first may be IPv6, which this machine may lack.
        family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        return _Server(family, (str(address[0]), int(address[1])))
    except (OSError, OverflowError) as error:
        raise ConfigurationError(
            f"The agent cannot listen at {host or '*'}, port {port}: {format_error(error)}. Choose "
            "an address of this machine and a free port."
        ) from error


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 120.0

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Nothing is printed."""

    @property
    def _agent(self) -> Agent:
        return cast("_Server", self.server).agent

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def _answer(self, verb: Callable[[list[str], bytes], None]) -> None:
        server = cast("_Server", self.server)
        server.set_idle(self.connection, idle=False)
        try:
            self._dispatch(verb)
        finally:
            server.set_idle(self.connection, idle=not self.close_connection)

    def _dispatch(self, verb: Callable[[list[str], bytes], None]) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        if not tls.is_secured(self.connection):
            why = (
                "this agent answers over TLS, and plain HTTP only on its own machine: drive it "
                "with the version of Millrace that it has"
            )
            self._refuse(why, size, http.client.UPGRADE_REQUIRED)
            return
        if not 0 <= size <= _MAX_BODY_SIZE:
            self.close_connection = True
            self._send(http.client.REQUEST_ENTITY_TOO_LARGE)
            return
        body = self._read_body(size)
        if body is None:
            return
        path, _, _ = self.path.partition("?")
        words = path.strip("/").split("/")
        about = words == ["agent"] and self.command == "GET"
        if not about and (len(words) < 2 or words[0] != "runs"):
            self._send(http.client.NOT_FOUND)
            return
        try:
            if about:
                encrypted = isinstance(self.connection, ssl.SSLSocket)
                header = self.headers.get(AUTH_HEADER)
                said = self._agent.introduce(header, self.path, encrypted=encrypted)
                self._send(http.client.OK, said)
            else:
                verb(words[1:], body)
        except (KeyError, ValueError) as error:
            self._send(http.client.NOT_FOUND, {"why": f"no such thing: {error}"})
        except SignatureError as error:
            self._send(http.client.FORBIDDEN, {"why": str(error)})
        except _BusyError as error:
            self._send(http.client.LOCKED, {"why": str(error)})
        except MillraceError as error:
            self._send(http.client.CONFLICT, {"why": str(error)})
        except OSError as error:
            self._send(http.client.INSUFFICIENT_STORAGE, {"why": _describe_error(error)})

    def _refuse(self, why: str, size: int, status: int = http.client.FORBIDDEN) -> None:
        """Refuse a request, and discard what is still sent of it.

        A sender whose connection is reset does not read the answer.

        Args:
            why: Reason, for the sender.
            size: Bytes that were not read yet.
            status: HTTP status.
        """
        self.close_connection = True
        self._send(status, {"why": why})
        deadline = time.monotonic() + _LINGER_TIMEOUT
        with contextlib.suppress(OSError):
            tls.shut(self.connection, socket.SHUT_WR)
            self.connection.settimeout(_LINGER_TIMEOUT)
            while (
                size > 0
                and time.monotonic() < deadline
                and (got := self.rfile.read1(_DISCARD_SIZE))
            ):
                size -= len(got)

    def _read_body(self, size: int) -> bytes | None:
        """Read the body of a driver's request; None if it was refused, and nothing was kept."""
        if self.command == "GET" and not size:
            return b""
        if self.command == "GET":
            self._refuse("a GET request has no body here", size)
            return None
        try:
            digest = self._check_driver()
        except SignatureError as error:
            self._refuse(str(error), size)
            return None
        body = self.rfile.read(size)
        if hashlib.sha256(body).hexdigest() != digest:
            self._refuse("the body is not the one that was signed", 0)
            return None
        return body

    def _check_driver(self) -> str:
        return self._agent.check_driver(self.headers.get(AUTH_HEADER), self.command, self.path)

    def _get(self, words: list[str], _: bytes) -> None:
        match words:
            case [name, "pieces", number]:
                run = self._agent.get_run(name)
                self._agent.check_peer(run, self.headers.get(AUTH_HEADER), self.path)
                self._send_piece(run, int(number))
            case [name, "events"]:
                self._check_driver()
                after = int(self.path.rpartition("after=")[2] or 0)
                self._send(http.client.OK, self._agent.get_run(name).poll_events(after))
            case _:
                self._send(http.client.NOT_FOUND)

    def _put(self, words: list[str], body: bytes) -> None:
        self._send(http.client.OK, {"have": self._agent.start_run(words[0], body)})

    def _post(self, words: list[str], body: bytes) -> None:
        self._agent.get_run(words[0]).take_orders(json.loads(body))
        self._send(http.client.OK)

    def _delete(self, words: list[str], _: bytes) -> None:
        self._agent.end_run(words[0])
        self._send(http.client.OK)

    def _send_piece(self, run: Run, number: int) -> None:
        if not 0 <= number < len(run.landing):
            self._send(http.client.NOT_FOUND)
            return
        with run.landing.open_piece(number) as segments:
            self.send_response(http.client.OK)
            self.send_header("Content-Length", str(sum(size for _, _, size in segments)))
            self.end_headers()
            self.wfile.flush()
            try:
                for descriptor, start, size in segments:
                    _send_file(self.connection, descriptor, start, size)
            except OSError:
                self.close_connection = True

    def _send(self, status: int, value: Any = None) -> None:
        body = json.dumps(value).encode() if value is not None else b""
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True


def _send_file(to: socket.socket, descriptor: int, start: int, size: int) -> None:
    if isinstance(to, ssl.SSLSocket):
        to.settimeout(_STALL_TIMEOUT)
        tls.send_file(to, descriptor, start, size)
        to.settimeout(_Handler.timeout)
        return
    end, room = start + size, select.poll()
    room.register(to, select.POLLOUT)
    while start < end:
        try:
            sent = os.sendfile(to.fileno(), descriptor, start, end - start)
        except BlockingIOError:  # the socket has a timeout, so it does not block
            if not room.poll(_STALL_TIMEOUT * 1000):
                raise
            continue
        if not sent:
            raise OSError("The file is shorter than the piece.")
        start += sent


def _describe_error(error: BaseException) -> str:
    return str(error) if isinstance(error, MillraceError) else f"{type(error).__name__}: {error}"
