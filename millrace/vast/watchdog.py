"""Runs in a rented machine, beside everything else, and destroys it when its time is over.

It is sent as text and needs Python's standard library only, so that it also stands guard over a
machine on which nothing else could be installed. From the environment:

- ``MILLRACE_UNTIL``: when the machine has to be gone, in seconds since 1970;
- ``MILLRACE_LIFETIME``: the same in seconds from now, should the machine's clock be wrong;
- ``MILLRACE_OWNER_URL``: an object that the owner overwrites while it lives; it says ``left`` when
  the machine is to stay without one;
- ``MILLRACE_SILENCE``: seconds without a change of it after which the owner is gone;
- ``MILLRACE_VAST_URL``, ``CONTAINER_ID``, ``CONTAINER_API_KEY``: how the machine destroys itself.
"""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Mapping

LEFT = b"left"
_LOOK = 15.0  # seconds between two looks
_PAUSE = 5.0  # seconds between two tries to destroy


def owner(url: str) -> bytes | None:
    """What the owner has last written; None if it cannot be read now."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.read(1000)
    except Exception:  # noqa: BLE001 - whatever it is, the machine has to be watched on
        return None


def destroy(env: Mapping[str, str]) -> None:
    """Ask until it is done: then this process is gone too."""
    url = f"{env['MILLRACE_VAST_URL']}/api/v0/instances/{env['CONTAINER_ID']}/"
    headers = {
        "Authorization": f"Bearer {env['CONTAINER_API_KEY']}",
        "Content-Type": "application/json",
    }
    while True:
        try:
            ask = urllib.request.Request(url, data=b"{}", headers=headers, method="DELETE")
            urllib.request.urlopen(ask, timeout=60).close()
        except Exception as error:  # noqa: BLE001 - it is asked until it is done
            print("could not destroy this machine:", error, flush=True)
        time.sleep(_PAUSE)


def watch(env: Mapping[str, str]) -> str:
    """Why the machine is destroyed now."""
    lifetime, silence = float(env["MILLRACE_LIFETIME"]), float(env["MILLRACE_SILENCE"])
    until, url = float(env["MILLRACE_UNTIL"]), env["MILLRACE_OWNER_URL"]
    began = heard = time.monotonic()
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


if __name__ == "__main__":
    print("this machine is destroyed:", watch(os.environ), flush=True)
    destroy(os.environ)
