"""A clone of the project, and the code blocks of its docs, run in the clone by the letter."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from millrace.testing.process import REPOSITORY
from tests.support.shell import Shell, prepend_path


def read_block(heading: str, language: str) -> str:
    """Return the code block of a section of README; of a console, the commands alone."""
    page = (REPOSITORY / "README.md").read_text()
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return re.sub(r"^\$ ", "", text, flags=re.MULTILINE) if language == "console" else text


@dataclass(frozen=True)
class Clone:
    """A clone of the project, with the environment that its commands make."""

    folder: Path

    def run(self, script: str, **environment: str) -> str:
        """Run commands as one shell would, and return what they print.

        What they start in the background ends with the shell.
        """
        environment = {"PATH": prepend_path(self.folder / ".venv/bin"), **environment}
        shell = Shell(script, self.folder, environment, self.folder.parent / "output")
        assert shell.wait() == 0, shell.output
        return shell.output


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
