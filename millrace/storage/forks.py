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
        has_used_folder: Whether this process or its parent has made a request to a folder.
        has_lost_folders: Whether the process was forked afterwards.
    """

    def __init__(self) -> None:
        self.is_opened = self.is_lost = False
        self.has_used_folder = self.has_lost_folders = False

    def lose(self) -> None:
        """Note that this process was forked."""
        self.is_lost, self.has_lost_folders = self.is_opened, self.has_used_folder


_state = _ClientState()
os.register_at_fork(after_in_child=_state.lose)


def note_opened() -> None:
    """Note that this process has opened a remote store."""
    _state.is_opened = True


def note_folder_used() -> None:
    """Note that this process has made a request to a folder."""
    _state.has_used_folder = True


def is_client_lost() -> bool:
    """Decide whether obstore cannot send requests in this process."""
    return _state.is_lost


def are_folders_lost() -> bool:
    """Decide whether obstore cannot read and write folders in this process."""
    return _state.has_lost_folders
