"""Runs in a rented machine: fetches the program, installs it, and starts what watches over it.

It is sent as text and needs Python's standard library only. From the environment, beside what the
program is started with:

- ``MILLRACE_REPO_URL``, ``MILLRACE_REPO_REF``, ``MILLRACE_EXTRAS``: what is installed;
- ``MILLRACE_SETUP_URL``: where it is said how far this is, by a PUT (or a ``file://``).
"""

from __future__ import annotations

import contextlib
import hashlib
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

_SAID = 4000  # of what was printed, its end
_TRIES = 3
_WHOLE = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_SHORT = re.compile(r"[0-9a-f]{7,63}")


def say(state: str, text: str = "") -> None:
    """Tell the owner how far it is. Nobody may hear it: then the owner's deadline decides."""
    url = os.environ["MILLRACE_SETUP_URL"]
    body = json.dumps({"state": state, "said": text[-_SAID:]}).encode()
    print(state, text, flush=True)
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
        except Exception as error:  # noqa: BLE001 - the owner's deadline decides then
            print("could not say so:", error, flush=True)
            time.sleep(pause)
        else:
            return


def run(*command: str) -> str:
    """Run a command and return its output; raise the output if it fails."""
    done = subprocess.run(
        command,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said = done.stdout.decode(errors="replace")
    print(said, flush=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` ended with {done.returncode}:\n{said}")
    return said.strip()


def again(*command: str) -> str:
    """Run a command, several times if it fails: networks of rented machines are not reliable."""
    for _ in range(_TRIES - 1):
        try:
            return run(*command)
        except RuntimeError:
            time.sleep(5)
    return run(*command)


def clone(folder: Path) -> str:
    """Check the program out; return the commit that it is.

    Raises:
        RuntimeError: The repository has no such branch, tag or commit, or the name is ambiguous.
    """
    url, ref = os.environ["MILLRACE_REPO_URL"], os.environ["MILLRACE_REPO_REF"]
    if not (folder / ".git").exists():
        shutil.rmtree(folder, ignore_errors=True)
        again("git", "clone", "--quiet", "--no-checkout", "--", url, str(folder))
    git = ("git", "-C", str(folder))
    again(*git, "fetch", "--quiet", "--tags", "origin")
    commit = find_commit(git, url, ref)
    # With the suffix the argument cannot be the name of a local branch, which git would prefer.
    run(*git, "checkout", "--quiet", "--force", "--detach", f"{commit}^{{commit}}")
    there = run(*git, "rev-parse", "--verify", "HEAD^{commit}")
    if there != commit:
        raise RuntimeError(f"{ref} of {url} is {commit}, and {there} was checked out: try again.")
    return commit


def find_commit(git: Sequence[str], url: str, ref: str) -> str:
    """Return the commit that a ref of a clone means.

    A whole object name always means that object. A branch or a tag of the same name is ignored.

    Args:
        git: The command for the clone.
        url: URL of the repository, for messages.
        ref: Branch, tag or commit.

    Raises:
        RuntimeError: There is none, or an abbreviated commit is the name of a branch or a tag, too.
    """
    if _WHOLE.fullmatch(ref):
        found = commit_of(git, ref)
        if not found:  # no branch or tag leads to it
            with contextlib.suppress(RuntimeError):
                run(*git, "fetch", "--quiet", "origin", ref)
            found = commit_of(git, ref)
    else:
        names = [f"refs/remotes/origin/{ref}", f"refs/tags/{ref}", ref]
        found = next((commit for name in names if (commit := commit_of(git, name))), "")
        if _SHORT.fullmatch(ref):
            pinned = commits_like(git, ref)
            if found and pinned - {found}:
                raise RuntimeError(
                    f"{ref} is the name of a branch or a tag of {url}, and the beginning of the "
                    f"commit {min(pinned - {found})}: write the whole name of the commit."
                )
    if not found:
        raise RuntimeError(f"{url} has no {ref}: name a branch, a tag or a commit of it.")
    return found


def commit_of(git: Sequence[str], name: str) -> str:
    """Return the commit that a name means to git; empty if it means none."""
    command = [*git, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"]
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True)
    return done.stdout.decode().strip() if done.returncode == 0 else ""


def commits_like(git: Sequence[str], prefix: str) -> set[str]:
    """Return the commits whose object names begin like this."""
    listed = run(*git, "rev-parse", f"--disambiguate={prefix}").split()
    return {commit for name in listed if (commit := commit_of(git, name))}


def install(folder: Path, commit: str) -> Path:
    """Have the program installed; the Python that runs it. What is installed already stays."""
    extras = os.environ.get("MILLRACE_EXTRAS", "")
    if sys.version_info < (3, 11):
        raise RuntimeError(f"the image has Python {sys.version}: 3.11 or newer is needed.")
    python = folder / ".venv" / "bin" / "python"
    mark = folder / ".venv" / "millrace-installed"
    wanted = hashlib.sha256(f"{commit} {extras} {sys.version}".encode()).hexdigest()
    if mark.exists() and mark.read_text() == wanted:
        return python
    if (folder / "uv.lock").exists() and shutil.which("uv"):
        names = [word for extra in extras.split(",") if extra for word in ("--extra", extra)]
        again("uv", "sync", "--project", str(folder), "--frozen", "--no-dev", *names)
    else:
        run(sys.executable, "-m", "venv", "--system-site-packages", str(folder / ".venv"))
        pins = folder / "constraints.txt"
        pinned = ["--constraint", str(pins)] if pins.exists() else []
        what = f"{folder}[{extras}]" if extras else str(folder)
        again(str(python), "-m", "pip", "install", "--quiet", *pinned, "--editable", what)
    mark.write_text(wanted)
    return python


def main() -> None:
    """Come up, or say why not."""
    folder = Path.cwd() / "program"
    os.environ.pop("CONTAINER_API_KEY", None)  # the watchdog's: nothing that is installed has it
    try:
        say("fetching")
        commit = clone(folder)
        say("installing", commit)
        python = install(folder, commit)
        say("starting", commit)
        run(str(python), "-m", "millrace.rentals.guest.machine", str(folder))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        say("failed", str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
