"""Destroy a rented machine from inside when its deadline has passed or its owner is lost.

This file is sent as text, and needs Python's standard library only. So the watchdog also works on a
machine where the program cannot be installed. It reads these variables:

- ``MILLRACE_DEADLINE``: deadline of the machine, in seconds since 1970;
- ``MILLRACE_LIFETIME``: lifetime in seconds, in case the machine's clock is wrong;
- ``MILLRACE_OWNER_URL``: URL of the object that the owner overwrites while it runs. Its content is
  ``detached`` if the machine is detached, or ``detached`` and an earlier deadline, in seconds since
  1970;
- ``MILLRACE_HEARTBEAT_TIMEOUT``: seconds without a change of that object, after which the owner is
  lost, unless the machine was detached;
- ``MILLRACE_VAST_URL``, ``CONTAINER_ID``: address of the API, and number of the machine.

The watchdog reads the machine's API key from standard input, because other processes can read
environments. The kernel shows the memory of the watchdog to root with ``CAP_SYS_PTRACE`` only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
import urllib.request
from collections.abc import Mapping

DETACHED = b"detached"
_POLL_INTERVAL = 15.0  # seconds between two reads of the owner's object
_DESTROY_INTERVAL = 5.0  # seconds between two tries to destroy
_RESTART_DELAY = 10.0  # seconds until a failed watch starts again
_PR_SET_DUMPABLE = 4  # PR_SET_DUMPABLE, prctl(2)


def read_owner(url: str) -> bytes | None:
    """Return the content that the owner wrote last; None if it cannot be read now."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.read(1000)
    except Exception:  # noqa: BLE001 - the watch continues after any error
        return None


def parse_detached(content: bytes | None) -> float | None:
    """Return until when the owner has detached the machine; None if the machine has an owner."""
    words = (content or b"").split()
    if words[:1] != [DETACHED]:
        return None
    try:
        return float(words[1]) if len(words) > 1 else float("inf")
    except ValueError:
        return None


def protect_memory() -> None:
    """Hide the memory and the open files of this process from other processes of its user."""
    with contextlib.suppress(Exception):  # the watch also works without this protection
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def report(*words: object) -> None:
    """Print a line into the log. A full disk ends neither the watch nor the tries to destroy."""
    with contextlib.suppress(Exception):
        print(*words, flush=True)


def destroy(env: Mapping[str, str], key: str) -> None:
    """Ask the API to destroy this machine, again and again, until the machine is gone."""
    url = f"{env['MILLRACE_VAST_URL']}/api/v0/instances/{env['CONTAINER_ID']}/"
    headers = {
        "Authorization": f"Bearer {key}",
        "Content-Type": "application/json",
    }
    while True:
        try:
            request = urllib.request.Request(url, data=b"{}", headers=headers, method="DELETE")
            urllib.request.urlopen(request, timeout=60).close()
        except Exception as error:  # noqa: BLE001 - the next try follows
            report("could not destroy this machine:", error)
        time.sleep(_DESTROY_INTERVAL)


def watch(env: Mapping[str, str], began: float) -> str:
    """Wait until the machine has to be destroyed; return the reason.

    Args:
        env: Environment of this process.
        began: Start of the first watch, by the monotonic clock.
    """
    lifetime, owner_timeout = (
        float(env["MILLRACE_LIFETIME"]),
        float(env["MILLRACE_HEARTBEAT_TIMEOUT"]),
    )
    last_deadline, url = float(env["MILLRACE_DEADLINE"]), env["MILLRACE_OWNER_URL"]
    last_change = time.monotonic()
    last_content: bytes | None = None
    while True:
        now = time.monotonic()
        detached_until = parse_detached(last_content)
        deadline = min(last_deadline, float("inf") if detached_until is None else detached_until)
        if now - began >= lifetime or time.time() >= deadline:
            return "the deadline has passed"
        content = read_owner(url)
        if content is None:  # a machine that was detached stays so while the store is silent
            content = last_content
        if content != last_content or parse_detached(content) is not None:
            last_content, last_change = content, now
        if now - last_change >= owner_timeout:
            return "the owner sent no heartbeat"
        remaining = min(lifetime - (now - began), deadline - time.time())
        time.sleep(max(0.1, min(_POLL_INTERVAL, owner_timeout / 4, remaining)))


def main() -> None:
    """Watch in a child process; start another child if one fails."""
    protect_memory()
    key, began = sys.stdin.read().strip(), time.monotonic()
    while True:
        try:
            child = os.fork()
        except OSError as error:  # as while the machine has no memory, or too many processes
            report("the watch could not be started:", error)
            time.sleep(_RESTART_DELAY)
            continue
        if not child:
            try:
                report("this machine is destroyed:", watch(os.environ, began))
                destroy(os.environ, key)
            except Exception as error:  # noqa: BLE001 - another child continues after any error
                report("the watch has failed:", repr(error))
            finally:
                os._exit(1)
        os.waitpid(child, 0)
        time.sleep(_RESTART_DELAY)


if __name__ == "__main__":
    main()
