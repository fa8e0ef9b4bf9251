"""Launch a worker of a campaign: serve its node of the swarm, then run its training script.

A script that fails is started again, and joins the run at the current window. The variable
``MILLRACE_WORKER`` names its settings file.
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
from millrace.campaigns.worker.settings import NODE_PORT, SETTINGS_VARIABLE, WorkerSettings
from millrace.keys.campaigns import CampaignKeys
from millrace.processes import kill_descendants, list_descendants
from millrace.settings import load_settings
from millrace.storage import Stat, head, open_store
from millrace.swarm.agent import Agent

_POLL_INTERVAL = 2.0  # seconds
_STABLE_AFTER = 600.0  # seconds; a run that lasts longer resets the restarts and their delay

log = logging.getLogger(__name__)


def launch_worker(path: Path, environ: Mapping[str, str] | None = None) -> int:
    """Run a worker to its end; return the exit code of its training script.

    Args:
        path: Path of the settings file.
        environ: Variables of the settings. With ``MILLRACE_NODE_KEY``, and
            ``VAST_TCP_PORT_70000`` or ``MILLRACE_NODE_PORT``, this machine can be prewarmed.
    """
    environ = os.environ if environ is None else environ
    settings = load_settings(path, WorkerSettings, environ)
    if settings.prewarm_timeout is not None:
        with _run_agent(settings.data_folder, environ):  # no port is open during the training
            _await_prewarm(settings, settings.prewarm_timeout)
    return _run_with_restarts(settings, {**environ, SETTINGS_VARIABLE: str(path.absolute())})


@contextmanager
def _run_agent(root: Path, environ: Mapping[str, str]) -> Generator[None]:
    """Run the swarm's agent while the block lasts, if the environment has a key and a port."""
    key = environ.get("MILLRACE_NODE_KEY", "")
    port = environ.get("MILLRACE_NODE_PORT") or environ.get(f"VAST_TCP_PORT_{NODE_PORT}") or ""
    if not key or not port.isdecimal():
        yield
        return
    agent = Agent(root, key.encode(), host="0.0.0.0", port=int(port))  # noqa: S104 - signed
    agent.start()
    try:
        yield
    finally:
        agent.close()


def _await_prewarm(settings: WorkerSettings, timeout: timedelta) -> None:
    """Wait until the prewarm has ended, or until its marker is renewed no more.

    The script fetches missing files itself.
    """
    store, keys = open_store(settings.read_store), CampaignKeys(settings.campaign)
    found: Stat | None = None
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        try:
            before, found = found, head(store, keys.prewarm_marker)
            if found != before:
                deadline = time.monotonic() + timeout.total_seconds()
        except errors.NotFoundError:
            return
        except errors.UnavailableError as error:
            log.warning(
                "whether the prewarm has ended is not known: %s", errors.format_error(error)
            )
        time.sleep(_POLL_INTERVAL)
    log.warning(
        "the campaign has not renewed its prewarm for %s: files are read from the store", timeout
    )


def _run_with_restarts(settings: WorkerSettings, environ: Mapping[str, str]) -> int:
    options = settings.training
    delay, remaining = settings.restart_delay.total_seconds(), options.restarts
    while True:
        began = time.monotonic()
        code = _run_command(options.command, environ)
        if time.monotonic() - began >= _STABLE_AFTER:
            delay, remaining = settings.restart_delay.total_seconds(), options.restarts
        if code == 0 or not remaining:
            return code
        log.warning("%s ended with %d: it is started again", " ".join(options.command), code)
        time.sleep(delay)
        delay, remaining = 2 * delay, remaining - 1


def _run_command(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command to its end; return its exit code, as a shell reports it.

    Processes that the command left running are killed. A rank in a session of its own would keep
    its GPU and its ports from the next try.
    """
    spared = list_descendants(os.getpid())
    try:
        done = subprocess.run(command, env=dict(environ), stdin=subprocess.DEVNULL, check=False)
    except OSError as error:
        log.warning("%s cannot be run: %s", command[0], error)
        return 127
    finally:
        kill_descendants(excluded=spared)
    return done.returncode if done.returncode >= 0 else 128 - done.returncode
