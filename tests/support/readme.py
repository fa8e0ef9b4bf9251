"""A clone of the project, and the code blocks of its docs, run in the clone by the letter."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from millrace.testing.process import REPOSITORY

LONGEST = 900  # seconds for a block of commands, on a busy machine


def block(heading: str, language: str, number: int = 0, *, file: str = "README.md") -> str:
    """Return a code block of a section of a file; of a console, the commands alone."""
    page = (REPOSITORY / file).read_text()
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    text = re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[number]
    return re.sub(r"^\$ ", "", text, flags=re.MULTILINE) if language == "console" else text


@dataclass(frozen=True)
class Clone:
    """A clone of the project, with the environment that its commands make."""

    folder: Path

    def run(self, script: str, **environment: str) -> str:
        """Run commands as one shell would, and return what they print.

        What they start in the background ends with the shell.
        """
        foreign = ("PREFECT", "AWS_", "R2_", "MILLRACE", "PYTHON", "VIRTUAL_ENV")
        before = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        log = self.folder.parent / "output"
        with log.open("w") as sink:
            shell = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", script],
                cwd=self.folder,
                env={
                    **before,
                    "PATH": f"{self.folder / '.venv/bin'}{os.pathsep}{os.environ['PATH']}",
                    "DO_NOT_TRACK": "1",
                    **environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        try:
            code = shell.wait(LONGEST)
        finally:
            _end_session(shell)
        output = log.read_text()
        assert code == 0, output
        return output


def _end_session(shell: "subprocess.Popen[bytes]") -> None:
    """End a shell and all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        left: list[psutil.Process] = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if os.getsid(process.pid) == shell.pid:
                    process.send_signal(number)
                    left.append(process)
        psutil.wait_procs(left, timeout=10)
    shell.wait()


def make_clone(folder: Path) -> Clone:
    """Make what git would clone."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (REPOSITORY / name).is_file():  # not one that was deleted since the last commit
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, folder / name)
    return Clone(folder)
