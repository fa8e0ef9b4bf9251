"""Interrupt a process with a signal, at an event that it reports or at any moment."""

import multiprocessing.process
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random

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
        is_kill: True for SIGKILL, false for SIGSTOP.
        resumption: For SIGSTOP, number of events of another process after which that process sends
            SIGCONT. 0: the process continues after the other processes have ended.
    """

    event: str
    number: int
    is_kill: bool = True
    resumption: int = 0


@dataclass(slots=True)
class Resumption:
    """SIGCONT to a stopped process, after some events of this process.

    Attributes:
        marker: Marker file of the interruption of the stopped process.
        events: Number of events that are left.
    """

    marker: Path
    events: int

    def note_event(self) -> None:
        """Count an event of this process if the other one is stopped, and resume that one."""
        pid = self.marker.read_text() if self.events and self.marker.exists() else ""
        if not pid or not is_stopped(int(pid)):
            return
        self.events -= 1
        if not self.events:
            make_resumption_marker(self.marker).touch()
            os.kill(int(pid), signal.SIGCONT)


def make_resumption_marker(marker: Path) -> Path:
    """Return the file that exists if another process has resumed an interrupted one."""
    return marker.with_suffix(".resumed")


def draw_resumption(generator: Random) -> int:
    """Return a random `Interruption.resumption`. Half of them are 0."""
    return generator.choice([0, generator.randint(1, 4)])


def start_process(process: BaseProcess) -> None:
    """Start a process of which only this thread reads the exit code.

    By default, each start in another thread reads the exit codes of all processes. If two threads
    read the code of one process, the second one gets 255.
    """
    process.start()
    multiprocessing.process._children.discard(process)  # pyright: ignore[reportAttributeAccessIssue]


def is_running(process: BaseProcess) -> bool:
    """Decide whether a process is alive and not stopped."""
    return process.is_alive() and not is_stopped(process.pid)


def is_stopped(pid: int | None) -> bool:
    """Decide whether a process waits for a SIGCONT."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


class Interrupter:
    """Write a marker file and send the signal of an interruption to this process.

    Args:
        interruption: Interruption of this process. None for no signal.
        marker: Marker file, which has the number of this process.
        resumptions: Stopped processes that this process resumes.
    """

    def __init__(
        self,
        interruption: Interruption | None,
        marker: Path,
        resumptions: Sequence[Resumption] = (),
    ) -> None:
        self._interruption, self._marker, self._events = interruption, marker, 0
        self._resumptions = resumptions
        if interruption is not None and interruption.event == ANY_MOMENT:
            timer = threading.Timer(interruption.number / 1000, self._interrupt)
            timer.daemon = True
            timer.start()

    def __call__(self, event: Event) -> None:
        for resumption in self._resumptions:
            resumption.note_event()
        if self._interruption is not None and event.kind == self._interruption.event:
            self._events += 1
            if self._events == self._interruption.number:
                self._interrupt()

    def _interrupt(self) -> None:
        assert self._interruption is not None
        self._marker.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL if self._interruption.is_kill else signal.SIGSTOP)
