"""Identify processes of this machine. Needs Python's standard library only."""

from pathlib import Path


def started_at(pid: int) -> str | None:
    """When a process started, in ticks; None if there is none, or only its remains."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else fields[19]
