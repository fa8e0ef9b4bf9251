"""Know whether this process lost the client of stores in a fork.

obstore runs requests on threads of its own, and a forked process has none of them. A request in it
would wait without end, also through a store that is opened anew.
"""

import os


class _ClientState:
    """State of obstore in this process.

    Attributes:
        is_opened: Whether this process or its parent has opened a remote store.
        is_lost: Whether the process was forked afterwards.
    """

    def __init__(self) -> None:
        self.is_opened = False
        self.is_lost = False

    def lose(self) -> None:
        """Note that this process was forked."""
        self.is_lost = self.is_opened


_state = _ClientState()
os.register_at_fork(after_in_child=_state.lose)


def note_opened() -> None:
    """Note that this process has opened a remote store."""
    _state.is_opened = True


def is_client_lost() -> bool:
    """Decide whether obstore cannot send requests in this process."""
    return _state.is_lost
