"""Install the program on a rented machine, and start the process that runs it.

This file is sent as text, and needs Python's standard library only. It reads these variables:

- ``MILLRACE_REPO_URL``, ``MILLRACE_REPO_REF``, ``MILLRACE_EXTRAS``: the repository, the branch, tag
  or commit, and the extras of the package;
- ``MILLRACE_REPORT_URL``: URL to which reports are sent by PUT, or a ``file://`` URL.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

_MAX_DETAIL_LENGTH = 4000  # characters, from the end of the output
_MAX_TRIES = 3
_FULL_OBJECT_NAME = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_SHORT_OBJECT_NAME = re.compile(r"[0-9a-f]{7,63}")


def print_line(*words: object) -> None:
    """Print a line into the log. A full disk must not keep the owner from getting the reason."""
    with contextlib.suppress(OSError):
        print(*words, flush=True)


def report_state(state: str, detail: str = "") -> None:
    """Send a report to the owner, or print the error: the owner releases a silent machine."""
    url = os.environ["MILLRACE_REPORT_URL"]
    body = json.dumps({"state": state, "detail": detail[-_MAX_DETAIL_LENGTH:]}).encode()
    print_line(state, detail)
    for pause in (1, 5, 0):
        try:
            if url.startswith("file://"):
                path = Path(urllib.request.url2pathname(url[7:]))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.with_suffix(".part").write_bytes(body)
                path.with_suffix(".part").replace(path)
            else:
                urllib.request.urlopen(
                    urllib.request.Request(url, data=body, method="PUT"), timeout=60
                ).close()
        except Exception as error:  # noqa: BLE001 - the owner releases a silent machine
            print_line("the report could not be sent:", error)
            time.sleep(pause)
        else:
            return


def run_command(*command: str) -> str:
    """Run a command and return its output.

    Raises:
        RuntimeError: The command failed. The message has its output.
    """
    done = subprocess.run(
        command,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output = done.stdout.decode(errors="replace")
    print_line(output)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` ended with {done.returncode}:\n{output}")
    return output.strip()


def run_with_retries(*command: str) -> str:
    """Run a command; repeat it after a failure, because networks of machines are unreliable."""
    for _ in range(_MAX_TRIES - 1):
        try:
            return run_command(*command)
        except RuntimeError:
            time.sleep(5)
    return run_command(*command)


def link_folder(link: Path, target: Path) -> Path:
    """Make a folder, and a link to it; return the link, beside which the traffic is counted."""
    target.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(target, target_is_directory=True)
    return link


def clone(folder: Path) -> str:
    """Check the program out; return its commit.

    Raises:
        RuntimeError: The repository has no such branch, tag or commit, or the name is ambiguous.
    """
    url, ref = os.environ["MILLRACE_REPO_URL"], os.environ["MILLRACE_REPO_REF"]
    if not (folder / ".git").exists():
        shutil.rmtree(folder, ignore_errors=True)
        run_with_retries("git", "clone", "--quiet", "--no-checkout", "--", url, str(folder))
    git = ("git", "-C", str(folder))
    # A tag may have been moved since the clone was made, before a restart of the container.
    run_with_retries(*git, "fetch", "--quiet", "--tags", "--force", "origin")
    commit = find_commit(git, url, ref)
    # With the suffix the argument cannot be the name of a local branch, which git would prefer.
    run_command(*git, "checkout", "--quiet", "--force", "--detach", f"{commit}^{{commit}}")
    checked_out = run_command(*git, "rev-parse", "--verify", "HEAD^{commit}")
    if checked_out != commit:
        raise RuntimeError(
            f"{ref} of {url} is {commit}, and {checked_out} was checked out: try again."
        )
    return commit


def find_commit(git: Sequence[str], url: str, ref: str) -> str:
    """Return the commit of a branch, a tag or an object name.

    A full object name always means that object. A branch or a tag of the same name is ignored.

    Args:
        git: The command for the clone.
        url: URL of the repository, for messages.
        ref: Branch, tag or commit.

    Raises:
        RuntimeError: There is no such commit, or a short object name is also a branch or a tag.
    """
    if _FULL_OBJECT_NAME.fullmatch(ref):
        resolved = resolve_commit(git, ref)
        if not resolved:  # no branch or tag leads to it
            with contextlib.suppress(RuntimeError):
                run_command(*git, "fetch", "--quiet", "origin", ref)
            resolved = resolve_commit(git, ref)
    else:
        names = [f"refs/remotes/origin/{ref}", f"refs/tags/{ref}", ref]
        resolved = next((commit for name in names if (commit := resolve_commit(git, name))), "")
        if _SHORT_OBJECT_NAME.fullmatch(ref):
            matches = list_matching_commits(git, ref)
            if resolved and matches - {resolved}:
                raise RuntimeError(
                    f"{ref} is the name of a branch or a tag of {url}, and the beginning of the "
                    f"commit {min(matches - {resolved})}: write the whole name of the commit."
                )
    if not resolved:
        raise RuntimeError(
            f"{url} has no {ref}: name a branch, a tag or a commit of the repository."
        )
    return resolved


def resolve_commit(git: Sequence[str], name: str) -> str:
    """Return the commit of a name, as git resolves the name; empty if there is none."""
    command = [*git, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"]
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True)
    return done.stdout.decode().strip() if done.returncode == 0 else ""


def list_matching_commits(git: Sequence[str], prefix: str) -> set[str]:
    """Return the commits whose object names have this prefix."""
    object_names = run_command(*git, "rev-parse", f"--disambiguate={prefix}").split()
    return {commit for name in object_names if (commit := resolve_commit(git, name))}


def install(folder: Path, commit: str) -> Path:
    """Install the program, unless it is installed; return the path of its Python."""
    extras = os.environ.get("MILLRACE_EXTRAS", "")
    if sys.version_info < (3, 11):
        raise RuntimeError(f"the image has Python {sys.version}: 3.11 or newer is needed.")
    python = folder / ".venv" / "bin" / "python"
    marker = folder / ".venv" / "millrace-installed"
    fingerprint = hashlib.sha256(f"{commit} {extras} {sys.version}".encode()).hexdigest()
    if marker.exists() and marker.read_text() == fingerprint:
        return python
    if (folder / "uv.lock").exists() and shutil.which("uv"):
        names = [word for extra in extras.split(",") if extra for word in ("--extra", extra)]
        run_with_retries("uv", "sync", "--project", str(folder), "--frozen", "--no-dev", *names)
    else:
        pip = make_environment(folder / ".venv")
        pins = folder / "constraints.txt"
        constraint_options = ["--constraint", str(pins)] if pins.exists() else []
        requirement = f"{folder}[{extras}]" if extras else str(folder)
        # pip would compare the requirements of all packages of the image, for warnings only.
        options = ("--quiet", "--no-warn-conflicts", *constraint_options)
        run_with_retries(*pip, "install", *options, "--editable", requirement)
    marker.write_text(fingerprint)
    return python


def make_environment(folder: Path) -> tuple[str, ...]:
    """Make a virtual environment on the packages of the image; return the command of its pip.

    The environment gets a pip of its own only if the image's pip cannot install into it.
    """
    command = (sys.executable, "-m", "venv", "--system-site-packages")
    python = folder / "bin" / "python"
    if not can_install_elsewhere():
        run_command(*command, str(folder))
        return str(python), "-m", "pip"
    run_command(*command, "--without-pip", str(folder))
    script = folder / "bin" / "pip"  # without it, a program's `pip` would be the image's
    script.write_text(f'#!/bin/sh\nexec "{python}" -m pip "$@"\n')
    script.chmod(0o755)
    return sys.executable, "-m", "pip", "--python", str(python)


def can_install_elsewhere() -> bool:
    """Decide whether this Python has a pip that can install into another environment (22.3).

    The new environment must also see that pip. It does not if this Python is in one itself.
    """
    if sys.prefix != sys.base_prefix:
        return False
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2]) >= (22, 3)


def main() -> None:
    """Install and run the program, or report the error."""
    folder = Path.cwd() / "program"
    if workdir := os.environ.get("MILLRACE_WORKDIR"):
        folder = link_folder(folder, Path(workdir))
    os.environ.pop(
        "CONTAINER_API_KEY", None
    )  # only the watchdog gets the key, not the installed code
    try:
        report_state("fetching")
        commit = clone(folder)
        report_state("installing", commit)
        python = install(folder, commit)
        report_state("starting", commit)
        run_command(str(python), "-m", "millrace.rentals.guest.machine", str(folder))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        report_state("failed", str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
