"""Progress events of the worker processes that a campaign runs on this machine."""

from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

from millrace.progress import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWorkerPrinted(Event):
    """Event of each line that a worker has printed.

    Attributes:
        uid: Name of the worker.
        text: Line, cut if it is long.
    """

    kind: ClassVar[str] = "worker.printed"

    uid: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWorkerLate(Event):
    """Event after the time for a worker's end is over, and the worker still runs.

    Attributes:
        uid: Name of the worker.
        timeout: Time that the workers had.
    """

    kind: ClassVar[str] = "worker.late"

    uid: str
    timeout: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWorkerFailed(Event):
    """Event after a worker has ended with an error.

    Attributes:
        uid: Name of the worker.
        code: Exit code of the process; the negative number of a signal that killed it.
    """

    kind: ClassVar[str] = "worker.failed"

    uid: str
    code: int
