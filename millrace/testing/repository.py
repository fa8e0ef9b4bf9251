"""Snapshot of this project as a Git repository, for rented machines to clone."""

import shutil
import subprocess
from pathlib import Path

from millrace.testing.process import REPOSITORY

_FOLDERS = ("millrace", "blocks", "tasks", "flows", "examples")
_FILES = ("pyproject.toml", "constraints.txt", "README.md", "LICENSE")


def snapshot(folder: Path) -> Path:
    """Create a Git repository with the current files of the project, committed or not."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in _FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, folder / name, ignore=ignored)
    for name in _FILES:
        shutil.copy(REPOSITORY / name, folder / name)
    git = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in ("init -q -b main", "add -A", "commit -q -m snapshot"):
        subprocess.run([*git, *command.split()], check=True)
    return folder
