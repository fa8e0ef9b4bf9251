"""Identify and end processes of this machine. Needs Python's standard library only."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, prctl(2)
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_KILL_INTERVAL = 0.01  # seconds between two searches for remaining processes
_KILL_TIMEOUT = (
    10.0  # seconds that the kernel may need, such as for a process that waits for a device
)


def read_start_time(pid: int) -> str | None:
    """Return when a process started, in ticks; None if the process has ended or is a zombie."""
    fields = _read_stat(pid)
    return None if fields is None or fields[0] in {"Z", "X"} else fields[19]


def has_ended(pid: int, started: str) -> bool:
    """Decide whether a process has ended.

    Some systems hide the processes of other users (``hidepid`` of proc). Of these, only the number
    is known.

    Args:
        pid: Number of the process.
        started: Start of the process, from `read_start_time`.
    """
    fields = _read_stat(pid)
    if fields is not None:
        return fields[0] in {"Z", "X"} or fields[19] != started
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    return False


def adopt_orphans() -> None:
    """Become the parent of each descendant whose parent ends. Linux only.

    So `list_descendants` also finds daemons, and processes in sessions of their own.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends. Linux only.

    So the process also ends if code that holds Python's lock keeps its other threads waiting.
    """
    with contextlib.suppress(OSError, AttributeError):
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def list_descendants(pid: int) -> set[int]:
    """Return the descendants of a process in all sessions. Zombies are left out."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        fields = _read_stat(int(folder.name))
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        below = [one for one in children.get(waiting.pop(), ()) if one not in found]
        found.update(below)
        waiting += below
    return {one for one in found if read_start_time(one) is not None}


def kill_descendants(excluded: Collection[int] = ()) -> None:
    """Kill the descendants of this process until none is left, or for ten seconds.

    Args:
        excluded: Processes that stay, with their descendants.
    """

    def find_remaining() -> set[int]:
        spared = {below for one in excluded for below in (one, *list_descendants(one))}
        return list_descendants(os.getpid()) - spared

    _kill_all(find_remaining)


def kill_by_environment(variable: str, value: str) -> None:
    """Kill the processes of this machine that have a variable in their environment.

    The call ends when no such process is left, or after ten seconds.

    Args:
        variable: Name of the variable.
        value: Text that the value of the variable begins with.
    """
    wanted = f"{variable}={value}".encode()

    def find_remaining() -> set[int]:
        found: set[int] = set()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (folder / "environ").read_bytes().split(b"\0")
                if any(one.startswith(wanted) for one in variables):
                    found.add(int(folder.name))
        return found - {os.getpid()}

    _kill_all(find_remaining)


def kill_group() -> None:
    """Kill this process, its process group, and all its descendants in other sessions."""
    group = os.getpgrp()
    own = {pid for pid in list_descendants(os.getpid()) if _read_group(pid) == group}
    for pid in own:  # a stopped process starts no other; the end of the group kills these
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGSTOP)
    _kill_all(lambda: list_descendants(os.getpid()) - own)
    os.killpg(group, signal.SIGKILL)


def _kill_all(find_remaining: Callable[[], set[int]]) -> None:
    """Kill processes until none is left, or for ten seconds."""
    deadline = time.monotonic() + _KILL_TIMEOUT
    while (found := find_remaining()) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_KILL_INTERVAL)
        for pid in found:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # an adopted process becomes a zombie


def _read_group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _read_stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()
