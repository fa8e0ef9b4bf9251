"""Progress of the engine, which callers receive as events.

Each capability defines the classes of its events in its module ``progress_events``.
"""

import logging
import threading
from dataclasses import dataclass
from typing import ClassVar, Protocol

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Event of the engine: base of the classes that callers match. Some announce the next step.

    Attributes:
        kind: Stable name of the class, such as ``shard.uploaded``, for events that leave a process.
    """

    kind: ClassVar[str] = ""


class Progress(Protocol):
    """Function that receives events.

    Calls come from one thread at a time. The worker that sent an event waits until the call
    returns, so slow work belongs into another thread.
    """

    def __call__(self, event: Event) -> None:
        """Receive an event."""
        ...


def ignore_event(event: Event) -> None:
    """Ignore an event. Functions that report progress have this default."""


def serialize_events(progress: Progress) -> Progress:
    """Return a function that passes on the events of several threads, one at a time."""
    lock = threading.Lock()

    def pass_on(event: Event) -> None:
        with lock:
            progress(event)

    return pass_on


def shield_progress(progress: Progress) -> Progress:
    """Return a function that passes on events to a receiver, also after the receiver has failed.

    The first error of the receiver, such as a closed pipe, is logged. Errors never reach the
    sender of an event.
    """
    has_failed = False

    def pass_on(event: Event) -> None:
        nonlocal has_failed
        try:
            progress(event)
        except Exception as error:  # noqa: BLE001 - the progress of an event fails no work
            if not has_failed:
                _log.warning("The progress cannot be shown. The work goes on.", exc_info=error)
            has_failed = True

    return pass_on
