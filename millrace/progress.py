"""Progress of the engine: reported through a small protocol, never by printing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

Figure = int | float | str


@dataclass(frozen=True, slots=True)
class Event:
    """Something that just happened.

    Attributes:
        name: What happened or is about to, dotted from its subject: ``shard.put``.
        subject: What it happened to: a split, a shard's key.
        figures: Counts and sizes (samples, bytes, seconds), with their plain names.
    """

    name: str
    subject: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict[str, Figure])


class Progress(Protocol):
    """Whoever wants to know.

    It is called in one thread at a time, and the worker that sent the event waits until it
    returns: what is slow belongs in a thread of its own.
    """

    def __call__(self, event: Event) -> None:
        """Take an event."""
        ...


def ignore_event(event: Event) -> None:
    """Ignore what is reported."""
