"""An agent: one process and one port that puts files on a node, and gives their pieces to others.

It decides nothing. A driver tells it over signed requests what the files are and which piece to
fetch from where, and is told what happened. Other nodes may ask it for pieces, and for nothing
else. Below ``/runs/{run}``:

- ``PUT`` starts the run (its plan), ``POST .../orders`` gives orders, ``GET .../events?after=N``
  waits for what happened, ``DELETE`` ends it: signed with the control key;
- ``GET .../pieces/{number}`` is for other nodes: signed with the run's own key.

``GET /agent`` answers anybody with the version of the protocol and the identity of the agent, which
every signature names. With a nonce, signed with the control key, it also proves that this is the
agent (`millrace.swarm.tls`).

One port takes TLS and plain HTTP. Plain requests are answered over loopback only.
"""

import secrets
import signal
import threading
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from millrace.swarm import tls
from millrace.swarm.protocol import VERSION, Endpoint, SignatureChecker, check_signature
from millrace.swarm.run import Run, RunSpec
from millrace.swarm.server import BusyAgentError, listen

_ORPHAN_TIMEOUT = (
    120.0  # seconds without a driver after which a run is given up; what is here stays
)


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
        self._server = listen(host, port)
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
            BusyAgentError: Another driver uses this agent.
        """
        plan = RunSpec.parse(body)
        with self._lock:
            if self._starting:
                raise BusyAgentError("another run is being started on this node")
            if self._run is not None and self._run.name != name and self._run.is_driven():
                raise BusyAgentError(
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

    def introduce(self, header: str | None, path: str, *, encrypted: bool) -> dict[str, Any]:
        """Return version and identity, and for a nonce the proof that this is the agent.

        Args:
            header: `AUTH_HEADER` header of the request.
            path: Path with its query.
            encrypted: Whether it was asked over TLS: the proof is for the certificate then.

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
