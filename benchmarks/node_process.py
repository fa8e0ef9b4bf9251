"""Node of a swarm in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.swarm import tls

NODE_KEY = "MILLRACE_NODE_KEY"
_RUN = "from benchmarks.node_process import run_node; run_node(encrypted={})"


@dataclass(frozen=True, slots=True)
class NodeProcess:
    """A node that is running.

    Attributes:
        pid: Identifier of its process.
        url: URL at which it listens.
    """

    pid: int
    url: str


def start_here(
    command: Sequence[str], *, env: Mapping[str, str], **options: Any
) -> subprocess.Popen[Any]:
    """Start a process on this machine, with additional environment variables."""
    return subprocess.Popen(command, env=os.environ | dict(env), **options)


@contextmanager
def start_node(
    root: Path,
    key: str,
    *options: str,
    encrypted: bool,
    popen: Callable[..., subprocess.Popen[Any]] = start_here,
) -> Iterator[NodeProcess]:
    """Start a node, and stop it at the end of the block.

    Args:
        root: Folder of its files.
        key: Key that the driver and all nodes share.
        options: Further options of ``millrace swarm node``.
        encrypted: Whether the connections of the node are encrypted.
        popen: Function that starts the process with additional environment variables, as on a host
            of a rig.

    Raises:
        RuntimeError: The node did not start.
    """
    command = [sys.executable, "-c", _RUN.format(encrypted), "swarm", "node", "--root", str(root)]
    with popen(
        [*command, *options], env={NODE_KEY: key}, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            if not words:
                raise RuntimeError(f"The node of {root} did not start.")
            yield NodeProcess(process.pid, words[-1])
        finally:
            process.kill()


def set_encryption(*, encrypted: bool) -> None:
    """Encrypt all connections of this process between nodes, or none. No setting does that."""
    tls.is_loopback = lambda host: not encrypted


def run_node(*, encrypted: bool) -> None:
    """Run ``millrace swarm node`` in this process."""
    set_encryption(encrypted=encrypted)
    from millrace.cli import main

    main()
