"""Agent: one process with one port that writes files on a node, and sends pieces to other nodes.

An agent makes no decisions. The driver sends signed requests with the files of a run, and with
orders to fetch pieces. The agent answers with events. Other nodes can only request pieces. Requests
below ``/runs/{run}``:

- ``PUT`` starts the run (`millrace.swarm.run_spec`), ``POST .../orders`` sends orders,
  ``GET .../events?after=N`` waits for events, and ``DELETE`` ends the run. The control key signs
  these requests.
- ``GET .../pieces/{number}`` is for other nodes. The key of the run signs these requests.

``GET /agent`` answers every process with the version of the protocol and the identity of the agent.
Every signature names this identity. If the request has a nonce and is signed with the control key,
the answer also proves the identity (`millrace.swarm.tls`).

One port takes TLS and plain HTTP. Plain requests are answered over loopback only.
"""

import contextlib
import resource
import secrets
import signal
import threading
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from millrace.errors import ConfigurationError, StoppedError
from millrace.swarm import tls
from millrace.swarm.node_run import NodeRun
from millrace.swarm.protocol import VERSION, Endpoint, SignatureChecker, check_signature
from millrace.swarm.run_spec import decode_start_body
from millrace.swarm.server import BusyAgentError, listen

_ORPHAN_TIMEOUT = 120.0  # seconds without a request of the driver after which a run is ended
_MAX_OPEN_FILES = 1 << 16  # of the process of an agent; some systems have no limit
_MAX_PEER_SIGNATURES = 50_000  # that are kept, so that a node of the run cannot fill the memory


class Agent:
    """Server of a node.

    Args:
        root: Folder that all destinations are below. A driver cannot choose another folder.
        control: Control key, which signs the requests of the driver.
        host: Address to listen on.
        port: Port to listen on; 0 for a free port.

    Raises:
        ConfigurationError: The folder cannot be made, or the process cannot listen there.

    Attributes:
        root: Folder that all destinations are below.
        identity: Random name of this agent.
        ended: Event that is set when the agent is to stop.
    """

    def __init__(self, root: Path, control: bytes, *, host: str = "", port: int = 0) -> None:
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"The agent cannot make its folder {root} ({error.strerror}): name a folder that "
                "it may write to."
            ) from error
        self.root, self._control = root, control
        self.identity = secrets.token_hex(8)
        self._driver_signatures = SignatureChecker(self.identity)
        self._peer_signatures = SignatureChecker(self.identity, _MAX_PEER_SIGNATURES)
        self._run: NodeRun | None = None
        self._starting = False
        self._opening: NodeRun | None = None  # run whose node checks its files
        self._ending = 0  # runs that are being ended
        self._lock = threading.Lock()
        self._certificate_lock = threading.Lock()
        self._server = listen(host, port)
        self._server.agent = self
        self.ended = threading.Event()
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="serve", daemon=True
        )
        self._watch = threading.Thread(target=self._watch_driver, name="watch", daemon=True)

    @property
    def port(self) -> int:
        """Port that the agent listens on."""
        return self._server.server_address[1]

    @cached_property
    def _certificate(self) -> tls.Certificate:
        return tls.make_certificate()

    @property
    def certificate(self) -> tls.Certificate:
        """Certificate of the agent. An agent on loopback makes it for the first TLS connection."""
        with self._certificate_lock:
            return self._certificate

    def start(self) -> None:
        """Start to listen, in threads of the agent."""
        if not tls.is_loopback(str(self._server.server_address[0])):
            _ = self.certificate
        self._thread.start()
        self._watch.start()

    def close(self) -> None:
        """Stop to listen, and end the current run. The start of the agent may have failed."""
        self.ended.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        self.end_run(None)

    def start_run(self, name: str, body: bytes) -> list[tuple[int, str]]:
        """Start a run. End a run whose driver is dead before.

        Args:
            name: Name of the run.
            body: Body of the request (the joined lines of `encode_start_body`).

        Returns:
            The pieces that the node has already, with their digests.

        Raises:
            BusyAgentError: Another driver uses this agent.
            StoppedError: `end_run` was called while the node checked its files.
        """
        spec, peers = decode_start_body(body)
        with self._lock:
            if self._starting:
                raise BusyAgentError(
                    "another run is being started on this node: wait for it, or stop it"
                )
            if self._ending:
                raise BusyAgentError(
                    "the last run on this node is being ended: wait for it, and try again"
                )
            if self._run is not None and self._run.name != name and self._run.is_driven():
                raise BusyAgentError(
                    f"another run uses this node, since {self._run.began:%Y-%m-%d %H:%M:%S} UTC, "
                    "and its driver is alive: wait for it, or stop it"
                )
            self._starting = True
        try:
            self.end_run(None)
            run = NodeRun(name, self.root, spec, peers)
            with self._lock:
                self._opening = run
            try:
                have = run.open()
                run.heard = time.monotonic()  # the check of the files may have taken long
                self._finish_opening(run)
            except BaseException:
                run.close()
                raise
        finally:
            self._opening, self._starting = None, False
        return have

    def _finish_opening(self, run: NodeRun) -> None:
        """Make a run the current one.

        Raises:
            StoppedError: The run was ended meanwhile.
        """
        with self._lock:
            if self._opening is not run:
                raise StoppedError("The run ended while the node checked its files.")
            self._run = run

    def end_run(self, name: str | None) -> None:
        """End a run, if it is the current one. None ends the current run.

        A run whose node still checks its files is ended before the next file, without a wait.
        """
        with self._lock:
            opening, run = self._opening, self._run
            if opening is not None and name in {None, opening.name}:
                opening.interrupt()
                self._opening = None
            if run is None or name not in {None, run.name}:
                return
            self._run = None
            self._ending += 1
        try:
            run.close()
        finally:
            with self._lock:
                self._ending -= 1

    def is_idle(self) -> bool:
        """Tell whether no run with a live driver uses the agent."""
        with self._lock:
            return not self._starting and (self._run is None or not self._run.is_driven())

    def get_run(self, name: str) -> NodeRun:
        """Return the run of a name.

        Raises:
            KeyError: The run of this name has ended, or was never started.
        """
        run = self._run
        if run is None or run.name != name:
            raise KeyError(name)
        return run

    def check_driver(self, header: str | None, method: str, path: str) -> str:
        """Check the signature of a request of the driver, and return the SHA-256 of its body.

        Raises:
            SignatureError: The request is not signed with the control key for this agent.
        """
        return self._driver_signatures.check(self._control, header, method, path)

    def check_peer(self, run: NodeRun, header: str | None, path: str) -> None:
        """Check the signature of a request of another node.

        Raises:
            SignatureError: The request is not signed with the key of the run for this agent.
        """
        self._peer_signatures.check(run.key, header, "GET", path)

    def introduce(self, header: str | None, path: str, *, encrypted: bool) -> dict[str, Any]:
        """Return version and identity, and a proof of the identity if the request has a nonce.

        Args:
            header: `AUTH_HEADER` header of the request.
            path: Path with its query.
            encrypted: Whether the request came over TLS. Then the proof includes the certificate.

        Raises:
            SignatureError: The nonce is not signed with the control key.
        """
        nonce = parse_qs(path.partition("?")[2]).get("nonce")
        if nonce is None:
            return {"version": VERSION, "identity": self.identity}
        check_signature(self._control, header, "GET", path, to="")
        fingerprint = self.certificate.fingerprint if encrypted else ""
        proof = tls.prove(self._control, nonce[0], self.identity, fingerprint)
        return {"version": VERSION, "identity": self.identity, "proof": proof}

    def _watch_driver(self) -> None:
        while not self.ended.wait(_ORPHAN_TIMEOUT / 8):
            run = self._run
            if run is not None and time.monotonic() - run.heard > _ORPHAN_TIMEOUT:
                self.end_run(run.name)


def raise_file_limit() -> None:
    """Let this process open as many files as it may. Call this before an `Agent` is made."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # the system allows fewer
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def serve(
    root: Path, key: bytes, host: str, port: int, on_listening: Callable[[str], None]
) -> None:
    """Run an agent until the process receives SIGTERM or SIGINT, or SIGHUP unless it ignores it.

    Args:
        root: Folder that all destinations are below.
        key: Control key, which signs the requests of the driver.
        host: Address to listen on.
        port: Port to listen on; 0 for a free port.
        on_listening: Called with the URL of the agent, once it listens.
    """
    raise_file_limit()
    agent = Agent(root, key, host=host, port=port)

    def handle_signal(number: int, frame: object) -> None:
        agent.ended.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handle_signal)
    agent.start()
    on_listening(f"http://{Endpoint('http', host, agent.port).netloc}")
    agent.ended.wait()
    agent.close()
