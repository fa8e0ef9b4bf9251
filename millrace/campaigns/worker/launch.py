"""Runs on a worker's machine: lets it be warmed, and keeps its training script running.

The script fails, and is started again: it joins the run where that is. What it trains with it finds
in the file that ``MILLRACE_WORKER`` names.
"""

import logging
import os
import subprocess
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from millrace import errors
from millrace.campaigns.worker.settings import FILE, PORT, WorkerSettings
from millrace.keys import CampaignKeys
from millrace.processes import kill_descendants, list_descendants
from millrace.settings import load
from millrace.storage import exists, open_store
from millrace.swarm.agent import Agent

_LOOK = 2.0  # seconds
_WELL = 600.0  # seconds after which a script has worked, and what it failed at before is forgotten

log = logging.getLogger(__name__)


def launch(path: Path, environ: Mapping[str, str] | None = None) -> int:
    """Run a worker to its end; the exit code of its training script.

    Args:
        path: Of its settings.
        environ: Beside ``${NAME}`` of the settings: with ``MILLRACE_NODE_KEY`` and
            ``VAST_TCP_PORT_70000``, or ``MILLRACE_NODE_PORT``, others may bring files here.
    """
    environ = os.environ if environ is None else environ
    settings = load(path, WorkerSettings, environ)
    if settings.warm is not None:
        with _agent(settings.root, environ):  # and no longer: nothing listens while it trains
            _until_warm(settings, settings.warm)
    return _run(settings, {**environ, FILE: str(path.absolute())})


@contextmanager
def _agent(root: Path, environ: Mapping[str, str]) -> Generator[None]:
    """Let this machine be warmed while the block lasts, if it was given a key and a port."""
    key = environ.get("MILLRACE_NODE_KEY", "")
    port = environ.get("MILLRACE_NODE_PORT") or environ.get(f"VAST_TCP_PORT_{PORT}") or ""
    if not key or not port.isdecimal():
        yield
        return
    agent = Agent(root, key.encode(), host="0.0.0.0", port=int(port))  # noqa: S104 - signed
    agent.start()
    try:
        yield
    finally:
        agent.close()


def _until_warm(settings: WorkerSettings, patience: timedelta) -> None:
    """Wait until the machines have their files. Without, the script fetches what it needs."""
    store, keys = open_store(settings.reads), CampaignKeys(settings.campaign)
    deadline = time.monotonic() + patience.total_seconds()
    while time.monotonic() < deadline:
        try:
            if not exists(store, keys.warming):
                return
        except errors.UnavailableError as error:
            log.warning("not known whether files are here: %s", errors.one_line(error))
        time.sleep(_LOOK)
    log.warning("nobody brought files in %s: they come out of the store", patience)


def _run(settings: WorkerSettings, environ: Mapping[str, str]) -> int:
    pause, left = settings.pause.total_seconds(), settings.restarts
    while True:
        began = time.monotonic()
        code = _code(settings.command, environ)
        if time.monotonic() - began >= _WELL:
            pause, left = settings.pause.total_seconds(), settings.restarts
        if code == 0 or not left:
            return code
        log.warning("%s ended with %d: it is started again", " ".join(settings.command), code)
        time.sleep(pause)
        pause, left = 2 * pause, left - 1


def _code(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command to its end; return its exit code, as a shell has it.

    What the command started and left running is killed. A rank in a session of its own would keep
    its GPU and its ports from the next try.
    """
    before = list_descendants(os.getpid())
    try:
        done = subprocess.run(command, env=dict(environ), stdin=subprocess.DEVNULL, check=False)
    except OSError as error:
        log.warning("%s cannot be run: %s", command[0], error)
        return 127
    finally:
        kill_descendants(spare=before)
    return done.returncode if done.returncode >= 0 else 128 - done.returncode
