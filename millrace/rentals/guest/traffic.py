"""Count the bytes that a rented machine has moved, over restarts of its container.

The kernel's counters are those of a network namespace: they begin high where the machine shares the
namespace of a host, and at zero again when its container is restarted. So the sum of what was added
is kept in a file. The first call, when the machine starts, sets the zero.

It is sent as text and needs Python's standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

STATE = "traffic.json"
"""Name of the file, beside the folder of the clone."""


def count_traffic(state: Path, proc: Path = Path("/proc")) -> tuple[int, int]:
    """Return the bytes that were received and sent since the first call with this state.

    Bytes over the loopback interface do not count.

    Args:
        state: File that keeps the sums and the counters of the last call.
        proc: Where the kernel's files are.
    """
    last = _read(state)
    namespace, now = _namespace(proc), _counters(proc)
    sums = [0, 0]
    if last is not None:
        sums = [int(number) for number in last["sums"]]
        before: dict[str, list[int]] = last["counters"] if last["namespace"] == namespace else {}
        for name, counters in now.items():
            for way, counter in enumerate(counters):
                earlier = before.get(name, [0, 0])[way]
                # A counter that is lower belongs to an interface that was made anew.
                sums[way] += counter - earlier if counter >= earlier else counter
    part = state.with_suffix(".part")
    part.write_text(json.dumps({"namespace": namespace, "counters": now, "sums": sums}))
    part.replace(state)
    return sums[0], sums[1]


def _read(state: Path) -> dict[str, Any] | None:
    """Return the state of the last call; None if there is none, or it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(state.read_text())
    return None


def _namespace(proc: Path) -> str:
    """Name the network namespace of this process: another one has other counters."""
    names = [(proc / "sys/kernel/random/boot_id").read_text().strip()]
    with contextlib.suppress(OSError):
        names.append(str((proc / "self/ns/net").readlink()))
    return " ".join(names)


def _counters(proc: Path) -> dict[str, list[int]]:
    """Bytes received and sent by each interface but the loopback."""
    counters: dict[str, list[int]] = {}
    for line in (proc / "net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        fields = numbers.split()
        if name.strip() != "lo":
            counters[name.strip()] = [int(fields[0]), int(fields[8])]
    return counters


if __name__ == "__main__":
    count_traffic(Path(os.environ["HOME"]) / ".millrace" / STATE)
