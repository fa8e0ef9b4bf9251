"""Order to a peer's script on its standard input, and its answer.

Of the standard library only: a peer's own Python reads this too.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Order:
    """Order to a peer: objects, and their destination.

    Attributes:
        store: The arguments of an ``S3Store``.
        keys: Of the objects.
        destination: The folder, the same path on every node.
        ray: The cluster's address; empty if there is none.
        options: Of this peer.
    """

    store: dict[str, Any]
    keys: list[str]
    destination: str
    ray: str
    options: dict[str, Any]

    def said(self) -> str:
        """As the script reads it."""
        return json.dumps(asdict(self)) + "\n"

    def path(self, key: str) -> Path:
        """Return the path of an object."""
        return Path(self.destination) / key


@dataclass(frozen=True, slots=True)
class Times:
    """Times that a peer measured itself, in seconds.

    Attributes:
        startup: Until the first byte was asked for: its processes started and connected.
        transfer: From then until the last file was whole on the last node.
    """

    startup: float
    transfer: float


def read_order() -> Order:
    """Read the order from the standard input."""
    return Order(**json.loads(sys.stdin.readline()))


def answer(times: Times) -> None:
    """Print what was measured, as the last line."""
    print(json.dumps(asdict(times)), flush=True)


def heard(line: str) -> Times:
    """Read a peer's last line."""
    return Times(**json.loads(line))


def create(path: Path, size: int) -> int:
    """Make a file of its full size; a descriptor that reads and writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    os.ftruncate(file, size)
    return file


def write(path: Path, body: memoryview) -> None:
    """Write a whole file."""
    file = create(path, len(body))
    try:
        at = 0
        while at < len(body):
            at += os.pwrite(file, body[at:], at)
    finally:
        os.close(file)


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def now(self) -> float:
        """Seconds."""
        return time.perf_counter() - self._began
