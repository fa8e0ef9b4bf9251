"""An agent within a Ray worker. It imports what an agent needs, and no more: memory is counted."""

import os
from pathlib import Path

from millrace.errors import ConfigurationError
from millrace.swarm.agent import Agent


class Actor:
    """An agent within a Ray worker."""

    def __init__(self) -> None:
        self._agent: Agent | None = None
        self._key = b""

    def start(self, root: str, host: str, key: bytes) -> tuple[int, bytes]:
        """Listen at the node's own address; returns the port, and the key of control requests."""
        if self._agent is None:
            self._key = key
            self._agent = Agent(_expand_variables(root), key, host=host)
            self._agent.start()
        return self._agent.port, self._key


def _expand_variables(root: str) -> Path:
    """Fill variables of this node's own environment into the root: ``$SCRATCH/models``."""
    filled = os.path.expandvars(root)
    if "$" in filled:
        raise ConfigurationError(f"The root {root} names a variable that is not set here.")
    return Path(filled)
