"""A virtual environment with cosmos-xenna, which is separate from the packages of the project."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

XENNA = "0.5.12"
RAY = "2.60.0"
# cosmos-xenna imports tqdm without a declared dependency.
PACKAGES = (f"cosmos-xenna=={XENNA}", f"ray[default]=={RAY}", "tqdm")
OLDEST = (3, 12)
NAME = re.compile(r"python3\.(\d+)")
INSTALL_TIMEOUT = 900.0  # seconds


class NoXennaError(RuntimeError):
    """This machine cannot run cosmos-xenna. The message says why."""


def ensure_xenna_python() -> Path:
    """Return the path of the interpreter. The first call installs it in about half a minute.

    Raises:
        NoXennaError: No installed Python is new enough, or the packages could not be installed.
    """
    folder = Path(sys.prefix) / "peers" / f"cosmos-xenna-{XENNA}"
    python = folder / "bin" / "python"
    if _has_xenna(python):
        return python
    base = next(_find_pythons(), None)
    if base is None:
        oldest = ".".join(map(str, OLDEST))
        raise NoXennaError(f"cosmos-xenna {XENNA} needs Python {oldest} or newer: none was found.")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _run(base, "-m", "venv", str(folder))
        _run(python, "-m", "pip", "install", "--quiet", *PACKAGES)
        _run(python, "-c", _PROBE)
    except (OSError, subprocess.SubprocessError) as error:
        message = getattr(error, "stderr", None) or str(error)
        last = message.strip().splitlines()[-1:]
        raise NoXennaError(f"cosmos-xenna {XENNA} cannot be installed: {''.join(last)}") from error
    return python


_PROBE = "import cosmos_xenna.file_distribution"


def _has_xenna(python: Path) -> bool:
    """Decide whether an interpreter can import cosmos-xenna."""
    try:
        _run(python, "-c", _PROBE)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _run(python: Path, *arguments: str) -> None:
    command = [str(python), *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT)


def _find_pythons() -> Iterator[Path]:
    """Yield the interpreters on PATH and of pyenv that are new enough."""
    folders = [Path(entry) for entry in os.get_exec_path()]
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders += sorted(root.glob("versions/*/bin"))
    for folder in folders:
        for python in sorted(folder.glob("python3.*")):
            match = NAME.fullmatch(python.name)
            if (
                match is not None
                and (3, int(match[1])) >= OLDEST
                and _can_create_environment(python)
            ):
                yield python


def _can_create_environment(python: Path) -> bool:
    """Decide whether an interpreter can create environments. Shims of pyenv may fail to start."""
    try:
        _run(python, "-c", "import venv, ensurepip")
    except (OSError, subprocess.SubprocessError):
        return False
    return True
