"""Agent in a Ray worker. This module imports only the needs of an agent, to save memory."""

import os
import threading
from pathlib import Path

from millrace.errors import ConfigurationError
from millrace.swarm.agent import Agent, raise_file_limit


class Actor:
    """Agent in a Ray worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # Ray runs two calls at once
        self._agent: Agent | None = None
        self._key = b""

    def start(self, root: str, host: str, key: bytes) -> tuple[int, bytes]:
        """Start the agent, unless it runs already.

        Args:
            root: Folder that all destinations are below.
            host: Address of the node.
            key: Key of the requests of the driver.

        Returns:
            Port of the agent, and the key that it was started with.
        """
        with self._lock:
            if self._agent is None:
                raise_file_limit()
                agent = Agent(expand_variables(root), key, host=host)
                try:
                    agent.start()
                except BaseException:
                    agent.close()
                    raise
                self._agent, self._key = agent, key
            return self._agent.port, self._key

    def is_idle(self) -> bool:
        """Tell whether no run with a live driver uses the agent."""
        with self._lock:
            return self._agent is None or self._agent.is_idle()


def expand_variables(root: str) -> Path:
    """Replace ``~`` and variables of the node's environment in a root, as ``$SCRATCH/models``."""
    filled = os.path.expandvars(root)
    if "$" in filled:
        raise ConfigurationError(f"The root {root} names a variable that is not set here.")
    return Path(filled).expanduser()
