"""Kills and stops of a process, at an event that it reports or at any moment."""

import os
import signal
import threading
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from millrace.progress import Event

ANYWHERE = "anywhere"


@dataclass(frozen=True, slots=True)
class Blow:
    """Kill or stop of a process.

    Attributes:
        at: Kind of the event at which, or `ANYWHERE`.
        number: The how-manieth such event; after so many milliseconds, if anywhere.
        kill: SIGKILL; else it is stopped, and goes on when the others have ended.
    """

    at: str
    number: int
    kill: bool = True


def runs(process: BaseProcess) -> bool:
    """Decide whether a process lives and is not stopped."""
    return process.is_alive() and not stopped(process)


def stopped(process: BaseProcess) -> bool:
    """Decide whether a process waits for a SIGCONT."""
    try:
        return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


class Struck:
    """Carries a blow out against its own process."""

    def __init__(self, blow: Blow | None, note: Path) -> None:
        self._blow, self._note, self._seen = blow, note, 0
        if blow is not None and blow.at == ANYWHERE:
            timer = threading.Timer(blow.number / 1000, self._strike)
            timer.daemon = True
            timer.start()

    def __call__(self, event: Event) -> None:
        if self._blow is not None and event.kind == self._blow.at:
            self._seen += 1
            if self._seen == self._blow.number:
                self._strike()

    def _strike(self) -> None:
        assert self._blow is not None
        self._note.touch()
        os.kill(os.getpid(), signal.SIGKILL if self._blow.kill else signal.SIGSTOP)
