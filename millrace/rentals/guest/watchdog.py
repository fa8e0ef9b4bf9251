"""Runs in a rented machine, beside everything else, and destroys it when its time is over.

It is sent as text and needs Python's standard library only, so that it also stands guard over a
machine on which nothing else could be installed. From the environment:

- ``MILLRACE_UNTIL``: when the machine has to be gone, in seconds since 1970;
- ``MILLRACE_LIFETIME``: the same in seconds from now, should the machine's clock be wrong;
- ``MILLRACE_OWNER_URL``: an object that the owner overwrites while it lives; it says ``left`` when
  the machine is to stay without one;
- ``MILLRACE_SILENCE``: seconds without a change of it after which the owner is gone;
- ``MILLRACE_VAST_URL``, ``CONTAINER_ID``: how the machine destroys itself.

The machine's API key comes over standard input. It is in no environment, and the kernel shows the
memory of this process to root with ``CAP_SYS_PTRACE`` only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
import urllib.request
from collections.abc import Mapping

LEFT = b"left"
_LOOK = 15.0  # seconds between two looks
_PAUSE = 5.0  # seconds between two tries to destroy
_AGAIN = 10.0  # seconds until a watch that has failed begins again
_DUMPABLE = 4  # PR_SET_DUMPABLE, prctl(2)


def owner(url: str) -> bytes | None:
    """Return what the owner has last written; None if it cannot be read now."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.read(1000)
    except Exception:  # noqa: BLE001 - whatever it is, the machine has to be watched on
        return None


def hide() -> None:
    """Keep other processes of this user from this one's memory, and from what it has open."""
    with contextlib.suppress(Exception):  # without, the machine is still watched
        ctypes.CDLL(None).prctl(_DUMPABLE, 0, 0, 0, 0)


def destroy(env: Mapping[str, str], key: str) -> None:
    """Ask until it is done: then this process is gone too."""
    url = f"{env['MILLRACE_VAST_URL']}/api/v0/instances/{env['CONTAINER_ID']}/"
    headers = {
        "Authorization": f"Bearer {key}",
        "Content-Type": "application/json",
    }
    while True:
        try:
            ask = urllib.request.Request(url, data=b"{}", headers=headers, method="DELETE")
            urllib.request.urlopen(ask, timeout=60).close()
        except Exception as error:  # noqa: BLE001 - it is asked until it is done
            print("could not destroy this machine:", error, flush=True)
        time.sleep(_PAUSE)


def watch(env: Mapping[str, str], began: float) -> str:
    """Wait until the machine has to go; return why.

    Args:
        env: The environment.
        began: When the machine was first watched, by the monotonic clock.
    """
    lifetime, silence = float(env["MILLRACE_LIFETIME"]), float(env["MILLRACE_SILENCE"])
    until, url = float(env["MILLRACE_UNTIL"]), env["MILLRACE_OWNER_URL"]
    heard = time.monotonic()
    last: bytes | None = None
    while True:
        now = time.monotonic()
        if now - began >= lifetime or time.time() >= until:
            return "its time is over"
        said = owner(url)
        if said is not None and (said != last or said == LEFT):
            last, heard = said, now
        if now - heard >= silence:
            return "its owner was not heard of"
        left = min(lifetime - (now - began), until - time.time())
        time.sleep(max(0.1, min(_LOOK, silence / 4, left)))


def main() -> None:
    """Watch in a child process, and again in another one should that fail."""
    hide()
    key, began = sys.stdin.read().strip(), time.monotonic()
    while True:
        child = os.fork()
        if not child:
            try:
                print("this machine is destroyed:", watch(os.environ, began), flush=True)
                destroy(os.environ, key)
            except Exception as error:  # noqa: BLE001 - whatever it is, another child goes on
                print("the watch has failed:", repr(error), flush=True)
            finally:
                os._exit(1)
        os.waitpid(child, 0)
        time.sleep(_AGAIN)


if __name__ == "__main__":
    main()
