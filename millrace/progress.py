"""Progress of the engine, which callers receive as events."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

Figure = int | float | str


@dataclass(frozen=True, slots=True)
class Event:
    """Event of the engine.

    Attributes:
        name: Name of the event, such as ``shard.put``. Some events announce the next step.
        subject: Subject of the event, such as a partition's name or a shard's key.
        figures: Counts and sizes by their names (samples, bytes, seconds).
    """

    name: str
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
    """Ignore an event. Functions that report progress have this default."""
