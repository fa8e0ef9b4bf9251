"""Interrupt a process with a signal, at an event that it reports or at any moment."""

import os
import signal
import threading
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from millrace.progress import Event

ANY_MOMENT = "anywhere"


@dataclass(frozen=True, slots=True)
class Interruption:
    """Signal to a process, and the time at which it is sent.

    Attributes:
        event: Kind of the event at which the signal is sent, or `ANY_MOMENT`.
        number: Number of the event among those of its kind, from 1. For `ANY_MOMENT`, delay in
            milliseconds.
        is_kill: True for SIGKILL, false for SIGSTOP. A stopped process continues after the other
            processes have ended.
    """

    event: str
    number: int
    is_kill: bool = True


def is_running(process: BaseProcess) -> bool:
    """Decide whether a process is alive and not stopped."""
    return process.is_alive() and not is_stopped(process)


def is_stopped(process: BaseProcess) -> bool:
    """Decide whether a process waits for a SIGCONT."""
    try:
        return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


class Interrupter:
    """Create a marker file and send the signal of an interruption to this process.

    Args:
        interruption: Interruption of this process. None for no signal.
        marker: Marker file.
    """

    def __init__(self, interruption: Interruption | None, marker: Path) -> None:
        self._interruption, self._marker, self._events = interruption, marker, 0
        if interruption is not None and interruption.event == ANY_MOMENT:
            timer = threading.Timer(interruption.number / 1000, self._interrupt)
            timer.daemon = True
            timer.start()

    def __call__(self, event: Event) -> None:
        if self._interruption is not None and event.kind == self._interruption.event:
            self._events += 1
            if self._events == self._interruption.number:
                self._interrupt()

    def _interrupt(self) -> None:
        assert self._interruption is not None
        self._marker.touch()
        os.kill(os.getpid(), signal.SIGKILL if self._interruption.is_kill else signal.SIGSTOP)
