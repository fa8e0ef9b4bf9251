"""A Python with cosmos-xenna: a virtual environment made on demand, beside our own packages."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

XENNA = "0.5.12"
RAY = "2.60.0"
# It imports tqdm, and does not say so.
PACKAGES = (f"cosmos-xenna=={XENNA}", f"ray[default]=={RAY}", "tqdm")
OLDEST = (3, 12)
NAMED = re.compile(r"python3\.(\d+)")
INSTALL_TIMEOUT = 900.0  # seconds


class NoXennaError(RuntimeError):
    """It cannot run here; the sentence says why."""


def xenna_python() -> Path:
    """Return the interpreter; the first call makes it, in about half a minute.

    Raises:
        NoXennaError: There is no Python that is new enough, or the packages cannot be had.
    """
    folder = Path(sys.prefix) / "peers" / f"cosmos-xenna-{XENNA}"
    python = folder / "bin" / "python"
    if _imports(python):
        return python
    base = next(_pythons(), None)
    if base is None:
        oldest = ".".join(map(str, OLDEST))
        raise NoXennaError(f"cosmos-xenna {XENNA} needs Python {oldest} or newer: none was found.")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _run(base, "-m", "venv", str(folder))
        _run(python, "-m", "pip", "install", "--quiet", *PACKAGES)
        _run(python, "-c", _PROBE)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        last = said.strip().splitlines()[-1:]
        raise NoXennaError(f"cosmos-xenna {XENNA} cannot be installed: {''.join(last)}") from error
    return python


_PROBE = "import cosmos_xenna.file_distribution"


def _imports(python: Path) -> bool:
    try:
        _run(python, "-c", _PROBE)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _run(python: Path, *arguments: str) -> None:
    command = [str(python), *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT)


def _pythons() -> Iterator[Path]:
    """Those that are new enough, on the path and among pyenv's."""
    folders = [Path(entry) for entry in os.get_exec_path()]
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders += sorted(root.glob("versions/*/bin"))
    for folder in folders:
        for python in sorted(folder.glob("python3.*")):
            named = NAMED.fullmatch(python.name)
            if named is not None and (3, int(named[1])) >= OLDEST and _works(python):
                yield python


def _works(python: Path) -> bool:
    """Tell whether an interpreter runs at all: pyenv's stand-ins on the path need not."""
    try:
        _run(python, "-c", "import venv, ensurepip")
    except (OSError, subprocess.SubprocessError):
        return False
    return True
