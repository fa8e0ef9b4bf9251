"""Count the bytes that a rented machine has transferred, over restarts of its container.

The kernel's counters belong to a network namespace. In the namespace of the host, the counters
start above zero. In a namespace of the container, they start again at zero when the container
restarts. So a file keeps the sum of all increases. The first call, when the machine starts, sets
the sum to zero.

This file is sent as text, and needs Python's standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

STATE_FILE = "traffic.json"
"""Name of the state file, in the parent of the clone's folder."""


def count_traffic(state: Path, proc: Path = Path("/proc")) -> tuple[int, int]:
    """Return the bytes that were received and sent since the first call with this state.

    Bytes over the loopback interface do not count.

    Args:
        state: File that keeps the sums and the counters of the last call.
        proc: Folder of the kernel's files.
    """
    previous = _read_state(state)
    namespace, now = _identify_namespace(proc), _read_counters(proc)
    sums = [0, 0]
    if previous is not None:
        sums = [int(number) for number in previous["sums"]]
        before: dict[str, list[int]] = (
            previous["counters"] if previous["namespace"] == namespace else {}
        )
        for name, counters in now.items():
            for direction, counter in enumerate(counters):
                earlier = before.get(name, [0, 0])[direction]
                # A lower counter belongs to a new interface of the same name.
                sums[direction] += counter - earlier if counter >= earlier else counter
    temporary = state.with_suffix(".part")
    with contextlib.suppress(OSError):  # on a full disk, the next call counts from the last state
        temporary.write_text(json.dumps({"namespace": namespace, "counters": now, "sums": sums}))
        temporary.replace(state)
    return sums[0], sums[1]


def _read_state(state: Path) -> dict[str, Any] | None:
    """Return the state of the last call; None if there is none, or it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(state.read_text())
    return None


def _identify_namespace(proc: Path) -> str:
    """Return the identity of this process's network namespace, which owns the counters."""
    names = [(proc / "sys/kernel/random/boot_id").read_text().strip()]
    with contextlib.suppress(OSError):
        names.append(str((proc / "self/ns/net").readlink()))
    return " ".join(names)


def _read_counters(proc: Path) -> dict[str, list[int]]:
    """Return the bytes received and sent by each interface except the loopback."""
    counters: dict[str, list[int]] = {}
    for line in (proc / "net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        fields = numbers.split()
        if name.strip() != "lo":
            counters[name.strip()] = [int(fields[0]), int(fields[8])]
    return counters


if __name__ == "__main__":
    count_traffic(Path(os.environ["HOME"]) / ".millrace" / STATE_FILE)
