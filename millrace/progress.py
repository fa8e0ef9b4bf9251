"""Progress of the engine, which callers receive as events."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

Figure = int | float | str


@dataclass(frozen=True, slots=True)
class Event:
    """Event of the engine: base of the event classes, which each capability defines for itself.

    Attributes:
        kind: Stable name of the class, under which an event leaves its process.
        name: Name of the event, such as ``shard.put``. Some events announce the next step.
        subject: Subject of the event, such as a partition's name or a shard's key.
        figures: Counts and sizes by their names (samples, bytes, seconds).
    """

    kind: ClassVar[str] = ""

    name: str = ""
    subject: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict[str, Figure])


class Progress(Protocol):
    """Function that receives events.

    Calls come from one thread at a time. The worker that sent an event waits until the call
    returns, so slow work belongs into another thread.
    """

    def __call__(self, event: Event) -> None:
        """Receive an event."""
        ...


def ignore_event(event: Event) -> None:
    """Ignore an event: the default of functions that report progress."""
