"""Progress events of listings and copies; `millrace.deletion` has those of a deletion."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectsCopied(Event):
    """Event after objects were copied or compared, at most a few times a second.

    Attributes:
        objects: Number of objects that are done.
        size: Bytes of these objects.
    """

    kind: ClassVar[str] = "copying.copied"

    objects: int
    size: int
