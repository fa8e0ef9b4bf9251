"""Child processes that end with their parent."""

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

open_local = build_opener(ProxyHandler({})).open  # without a proxy
REPOSITORY = Path(__file__).resolve().parents[2]


class Child:
    """Server process in its own session. The kernel kills it when its parent ends.

    The signal (``PR_SET_PDEATHSIG``, set by ``setpriv`` of util-linux) is sent when the thread that
    started the child ends. Start servers from a thread that lives as long as they do, such as the
    main thread of pytest.
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
            command: Program and its arguments.
            log: File to which the output of the process is appended.
            folder: Folder in which the process runs.
            announces: Whether the process prints a line of JSON when it is ready, which
                `read_announcement` reads.
            environment: Environment of the process; by default that of this process.
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
        """Process ID of the server, which ``setpriv`` replaced itself with."""
        return self._process.pid

    def is_running(self) -> bool:
        """Decide whether the process is running."""
        return self._process.poll() is None

    def read_announcement(self) -> dict[str, Any]:
        """Wait until the process announces that it is ready, and return the announcement.

        Raises:
            RuntimeError: The process ended without an announcement.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.kill()
            raise RuntimeError(f"{self.name} ended before it was ready:\n{self.read_tail()}")
        return json.loads(line)

    def read_tail(self, lines: int = 15) -> str:
        """Return the last lines of the log, for an error message."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, timeout: float = 10.0) -> None:
        """Terminate the process with SIGTERM, and after ``timeout`` seconds with SIGKILL."""
        if self.is_running():
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        self.kill()

    def kill(self) -> None:
        """Kill the process with SIGKILL, and wait until it has ended."""
        if self.is_running():
            self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def start_module(module: str, *arguments: str, log: Path) -> Child:
    """Start ``python -m module`` in this repository. The module must announce when it is ready."""
    command = [sys.executable, "-m", module, *arguments]
    return Child(command, log=log, folder=REPOSITORY, announces=True)


def ask(url: str, body: Mapping[str, Any] | None = None) -> Any:
    """Send JSON to the control interface of a stand-in, without a proxy, and return the answer."""
    with contextlib.closing(open_local(Request(url, json.dumps(body or {}).encode()))) as answer:
        return json.load(answer)


def find_free_ports(count: int) -> list[int]:
    """Return free ports of 127.0.0.1. Another process may take one before its use."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
