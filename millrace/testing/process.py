"""Child processes that do not outlive the one that started them."""

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

open_local = build_opener(ProxyHandler({})).open  # by no proxy
REPOSITORY = Path(__file__).resolve().parents[2]


class Child:
    """A server started by us, in a session of its own, killed by the kernel should we die.

    The kernel's promise (``PR_SET_PDEATHSIG``, set by util-linux's ``setpriv``) is bound to the
    thread that started the child: start servers from a thread that lives as long as they do, as
    pytest's main thread does.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        folder: Path,
        announces: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a server.

        Args:
            command: The program and its arguments.
            log: What it prints is appended to this file.
            folder: Where it runs.
            announces: It prints a line of JSON when it is ready, for `read_announcement` to read.
            environment: Environment of the server; by default that of this process.
        """
        self.name = " ".join(command[:3])
        self.log = log
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if announces else sink,
                stderr=sink,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id (``setpriv`` has become the server itself)."""
        return self._process.pid

    def is_running(self) -> bool:
        """Decide whether the process still runs."""
        return self._process.poll() is None

    def read_announcement(self) -> dict[str, Any]:
        """Wait for the line of JSON that says that it is ready.

        Raises:
            RuntimeError: It ended without one.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.kill()
            raise RuntimeError(f"{self.name} ended before it was ready:\n{self.read_tail()}")
        return json.loads(line)

    def read_tail(self, lines: int = 15) -> str:
        """Return the last lines that the process printed, for an error message."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, timeout: float = 10.0) -> None:
        """Ask it to end, and after ``timeout`` seconds ask no longer."""
        if self.is_running():
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        self.kill()

    def kill(self) -> None:
        """End it with SIGKILL, and wait until it is gone."""
        if self.is_running():
            self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def start_module(module: str, *arguments: str, log: Path) -> Child:
    """Start ``python -m module``, which announces that it is ready, from this repository."""
    command = [sys.executable, "-m", module, *arguments]
    return Child(command, log=log, folder=REPOSITORY, announces=True)


def ask(url: str, body: Mapping[str, Any] | None = None) -> Any:
    """Ask a server of ours, by no proxy, what no client of it can; its answer."""
    with contextlib.closing(open_local(Request(url, json.dumps(body or {}).encode()))) as answer:
        return json.load(answer)


def find_free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that nothing listens on at this moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
