"""Check a training command before a campaign uses it.

Only certain errors are refused. A command that cannot be checked from here passes, such as a module
that a rented machine installs later.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from millrace import errors
from millrace.rentals import CodeRepository

_TIMEOUT = 60  # seconds for one check
_PYTHON_PATTERN = re.compile(r"python(3(\.\d+)?)?")
_OPTIONS_WITH_VALUE = {"-W", "-X"}  # options of Python that take the next word
_COMMIT_PATTERN = re.compile(r"[0-9a-f]{7,40}")
_FIND_MODULE_SCRIPT = """\
import importlib.util, sys
found = importlib.util.find_spec(sys.argv[1])
if found and found.submodule_search_locations is not None:
    found = importlib.util.find_spec(sys.argv[1] + ".__main__")
sys.exit(0 if found else 3)
"""


@dataclass(frozen=True, slots=True)
class _CommandTarget:
    """Target of a command: a program, and a Python module or file if the program is Python."""

    program: str
    module: str | None = None
    file: str | None = None


def make_worker_path() -> str:
    """Return the search path of local workers: programs beside this Python come first."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def check_local_command(
    command: Sequence[str], folder: Path, environ: Mapping[str, str] | None = None
) -> None:
    """Refuse a command that a process of this machine cannot run.

    Args:
        command: Program and arguments.
        folder: Folder that the process runs in.
        environ: Environment of the process; by default that of this process with
            `make_worker_path`.

    Raises:
        ConfigurationError: The folder, the program, or the Python file or module does not exist.
    """
    environ = {**os.environ, "PATH": make_worker_path()} if environ is None else environ
    target = _parse_command(command)
    if not folder.is_dir():
        raise errors.ConfigurationError(
            f"training.machines.folder: there is no folder {folder.absolute()}. Name the folder "
            "that the training command runs in."
        )
    program_path = folder / target.program if "/" in target.program else target.program
    program = shutil.which(program_path, path=environ.get("PATH"))
    if program is None:
        searched = f"at {program_path}" if "/" in target.program else "on the PATH"
        raise _make_error(command, f"there is no program {target.program} {searched}")
    if target.file is not None and not (folder / target.file).exists():
        raise _make_error(command, f"there is no file {target.file} in {folder.absolute()}")
    if target.module is not None:
        _check_module(command, target.module, program, folder, environ)


def _check_module(
    command: Sequence[str], module: str, program: str, folder: Path, environ: Mapping[str, str]
) -> None:
    find_command = [str(Path(program).absolute()), "-c", _FIND_MODULE_SCRIPT, module]
    try:
        done = subprocess.run(
            find_command, cwd=folder, env=dict(environ), stdin=subprocess.DEVNULL,
            capture_output=True, timeout=_TIMEOUT, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return  # the check is not possible
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        detail = "" if done.returncode == 3 or not lines else f" ({lines[-1]})"
        raise _make_error(
            command, f"{program} finds no module {module} from {folder.absolute()}{detail}"
        )


def check_repository_command(command: Sequence[str], repository: CodeRepository) -> None:
    """Refuse a command whose file is not in the repository that rented machines clone.

    Without git, or if the repository cannot be read from here, the command passes.

    Args:
        command: Program and arguments.
        repository: Repository that the machines clone.

    Raises:
        ConfigurationError: The repository has no such branch or tag, or no such file.
    """
    target = _parse_command(command)
    files = _list_files(repository)
    if files is None:
        return
    source = f"{repository.repo_url} at {repository.repo_ref}"
    file = target.program if "/" in target.program else target.file
    if file is not None and not file.startswith("/"):
        path = os.path.normpath(file)
        if path not in files and not any(one.startswith(f"{path}/") for one in files):
            raise _make_error(command, f"{source} has no file {file}")
    if target.module is not None and not _may_have_module(files, target.module):
        raise _make_error(command, f"{source} has no module {target.module}")


def _may_have_module(files: set[str], module: str) -> bool:
    """Tell whether a module may exist: in the repository, or in a package outside of it."""
    parts = PurePosixPath(*module.split("."))
    for root in ("", "src/"):
        package = f"{root}{parts.parts[0]}/"
        if not any(one.startswith(package) for one in files):
            continue
        if not {f"{root}{parts}.py", f"{root}{parts}/__main__.py"} & files:
            return False
    return True


def _list_files(repository: CodeRepository) -> set[str] | None:
    """Return the paths of a repository's files; None if they cannot be known from here."""
    if shutil.which("git") is None:
        return None
    with tempfile.TemporaryDirectory(prefix="millrace-repository-") as folder:
        git = ["git", "-C", folder]
        ref = repository.repo_ref
        fetch = [*git, "fetch", "-q", "--depth", "1", "--filter=blob:none", "--",
                 repository.repo_url, ref]  # fmt: skip
        try:
            _run_git([*git, "init", "-q"])
            _run_git(fetch)
            output = _run_git([*git, "ls-tree", "-r", "-z", "--name-only", "FETCH_HEAD"])
        except subprocess.CalledProcessError as error:
            message = error.stderr.decode(errors="replace")
            if "couldn't find remote ref" in message and not _COMMIT_PATTERN.fullmatch(ref):
                raise errors.ConfigurationError(
                    f"{repository.repo_url} has no {ref}: name a branch, a tag or a commit of it "
                    "in training.machines.repo_ref."
                ) from None
            return None
        except (OSError, subprocess.TimeoutExpired):
            return None
    return set(output.decode(errors="replace").split("\0"))


def _run_git(command: Sequence[str]) -> bytes:
    done = subprocess.run(
        command, env={**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"},
        stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT, check=True,
    )  # fmt: skip
    return done.stdout


def _parse_command(command: Sequence[str]) -> _CommandTarget:
    program, *words = (word.replace("{slot}", "0") for word in command)
    if not _PYTHON_PATTERN.fullmatch(PurePosixPath(program).name):
        return _CommandTarget(program)
    while words:
        word = words.pop(0)
        if word == "-m":
            return _CommandTarget(program, module=words[0] if words else None)
        if word in {"-c", "-"} or word.startswith("--"):
            return _CommandTarget(program)
        if not word.startswith("-"):
            return _CommandTarget(program, file=word)
        if word in _OPTIONS_WITH_VALUE and words:
            words.pop(0)
    return _CommandTarget(program)


def _make_error(command: Sequence[str], reason: str) -> errors.ConfigurationError:
    return errors.ConfigurationError(
        f"training.command: `{' '.join(command)}` cannot be run: {reason}. Correct the command."
    )
