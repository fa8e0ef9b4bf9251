"""Input of a peer's script and its output, as lines of JSON.

This module imports only the standard library, since another Python interpreter imports it too.
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
    """Input of a peer's script: objects to copy to all nodes, and their destination.

    Attributes:
        store: Arguments of an ``S3Store``.
        keys: Keys of the objects.
        destination: Path of the destination folder, the same on every node.
        ray: Address of the Ray cluster, or an empty string.
        options: Options of this peer.
    """

    store: dict[str, Any]
    keys: list[str]
    destination: str
    ray: str
    options: dict[str, Any]

    def format_line(self) -> str:
        """Return the line for the standard input of the script."""
        return json.dumps(asdict(self)) + "\n"

    def make_path(self, key: str) -> Path:
        """Return the path of an object's file."""
        return Path(self.destination) / key


@dataclass(frozen=True, slots=True)
class Times:
    """Times that a peer measured, in seconds.

    Attributes:
        startup: Time until the first request for an object, in which processes start and connect.
        transfer: Time from the first request until the last file is complete on the last node.
    """

    startup: float
    transfer: float


def read_order() -> Order:
    """Read an order from the standard input."""
    return Order(**json.loads(sys.stdin.readline()))


def print_times(times: Times) -> None:
    """Print the times as the last line of the output."""
    print(json.dumps(asdict(times)), flush=True)


def parse_times(line: str) -> Times:
    """Parse the last line of a peer's output."""
    return Times(**json.loads(line))


def create_file(path: Path, size: int) -> int:
    """Create a file of its full size, and return a descriptor for reads and writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    os.ftruncate(file, size)
    return file


def write_file(path: Path, body: memoryview) -> None:
    """Write a whole file."""
    file = create_file(path, len(body))
    try:
        at = 0
        while at < len(body):
            at += os.pwrite(file, body[at:], at)
    finally:
        os.close(file)


class Timer:
    """Timer of the wall time since its creation."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def read(self) -> float:
        """Return the seconds since the timer was created."""
        return time.perf_counter() - self._began
