"""Progress events of the planning of a cleanup; `millrace.deletion` has those of the deletion."""

from dataclasses import dataclass
from typing import ClassVar

from millrace.progress import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectsListed(Event):
    """Event after each 10,000 objects that a plan has listed.

    Attributes:
        store: URL of the store.
        objects: Number of objects in the listing so far.
    """

    kind: ClassVar[str] = "cleaning.seen"

    store: str
    objects: int
