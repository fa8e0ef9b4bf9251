"""Commands as a shell runs them, in a session of their own."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

HANGS = 900  # seconds for a block of commands, on a busy machine
_FOREIGN = ("PREFECT", "AWS_", "R2_", "MILLRACE", "PYTHON", "VIRTUAL_ENV", "RAY_")


class Shell:
    """A shell that runs commands, and ends at the first that fails."""

    def __init__(self, script: str, folder: Path, environment: Mapping[str, str], log: Path):
        """Start the commands.

        Args:
            script: Commands.
            folder: Folder in which they run.
            environment: Variables besides those of this process. Variables of this process that
                would change the commands are left out.
            log: File for all that they print.
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        self._log = log
        with log.open("w") as sink:
            self._process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", script],
                cwd=folder,
                env={**kept, "DO_NOT_TRACK": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """Text that the commands have printed."""
        return self._log.read_text()

    def wait(self) -> int:
        """Return the exit code when the commands have ended, and end what they left running."""
        try:
            return self._process.wait(HANGS)
        finally:
            self.end()

    def end(self) -> None:
        """End the shell and all that it has started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            left: list[psutil.Process] = []
            for process in psutil.process_iter():
                with contextlib.suppress(OSError, psutil.NoSuchProcess):
                    if os.getsid(process.pid) == self._process.pid:
                        process.send_signal(number)
                        left.append(process)
            psutil.wait_procs(left, timeout=10)
        self._process.wait()


def prepend_path(folder: Path = Path(sys.executable).parent) -> str:
    """Return a PATH that begins with a folder: by default that of this process's Python."""
    return f"{folder}{os.pathsep}{os.environ['PATH']}"
