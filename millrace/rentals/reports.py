"""Reports of rented machines, read anew only where they have changed."""

import re
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from millrace import errors
from millrace.keys import MachineKeys
from millrace.rentals.messages import PIECE, Beat, ProgramEnd, Setup
from millrace.storage import Stat, Store, list_objects, read_range

M = TypeVar("M", bound=BaseModel)

_LARGEST = 2 * PIECE
_LINES = 50  # of a log that are kept
_AT_ONCE = 20  # pieces of a log that are read in one look
_OBJECTS = 20_000  # below a machine's folder: what is beyond is not looked at
_LINES_A_PIECE = 2000
_LINES_IN_ALL = 200_000  # that one machine may have told
_COLUMNS = 500
_TOLD = 5  # lines of what a failed command printed
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SECRETS = re.compile(r"://[^/@\s]+@")


@dataclass(slots=True)
class Report:
    """Reports of one machine so far.

    Attributes:
        store: Where.
        keys: Of what it says.
        setup: How far it is with installing.
        beat: Its last sign of life.
        ended: What its program came to.
        news: What it has printed since the last look.
        tail: The last lines that it has printed.
    """

    store: Store
    keys: MachineKeys
    setup: Setup | None = None
    beat: Beat | None = None
    ended: ProgramEnd | None = None
    news: list[str] = field(default_factory=list[str])
    tail: list[str] = field(default_factory=list[str])
    _seen: dict[str, Stat] = field(default_factory=dict[str, Stat])
    _told: int = 0

    def look(self) -> bool:
        """Read what is new; whether there is a new sign of life. One listing, and what changed.

        Raises:
            UnavailableError: The store does not answer.
        """
        self.news = []
        found = islice(list_objects(self.store, self.keys.prefix), _OBJECTS)
        there = {stat.key: stat for stat in found}
        changed = {key for key, stat in there.items() if self._seen.get(key) != stat}
        logs = sorted(key for key in changed if key.startswith(self.keys.logs))
        for key in logs[:_AT_ONCE]:
            self._print(there[key])
        for name, kind in (("setup", Setup), ("beat", Beat), ("ended", ProgramEnd)):
            key = getattr(self.keys, name)
            if key in changed and (said := self._said(there[key], kind)) is not None:
                setattr(self, name, said)
        late = set(logs[_AT_ONCE:])
        self._seen = {key: stat for key, stat in there.items() if key not in late}
        return bool(changed & {self.keys.setup, self.keys.beat, self.keys.ended} or logs)

    def _print(self, stat: Stat) -> None:
        text = self._text(stat)
        lines = [printable(line) for line in text.splitlines()[:_LINES_A_PIECE]]
        room = _LINES_IN_ALL - self._told
        self._told += len(lines)
        self.news += lines[: max(0, room)]
        if 0 <= room < len(lines):
            where = self.store.url_of(self.keys.logs)
            self.news.append(f"({_LINES_IN_ALL:,} lines are told; the others are in {where})")
        self.tail = [*self.tail, *lines][-_LINES:]

    def _said(self, stat: Stat, kind: type[M]) -> M | None:
        """Return the record in an object; None if it cannot be read."""
        try:
            return kind.model_validate_json(self._text(stat))
        except ValidationError:
            return None

    def _text(self, stat: Stat) -> str:
        """Return the text of an object, or its beginning. The object may have changed since."""
        end = min(stat.size, _LARGEST)
        if not end:
            return ""
        try:
            return read_range(self.store, stat.key, 0, end).decode(errors="replace")
        except errors.NotFoundError:
            return ""


def cause_of(printed: str) -> str:
    """Return the last lines of what a failed command printed, in one line, without secrets.

    Colours, blank lines and pip's notices are left out, and passwords in URLs are hidden.
    """
    plain = _SECRETS.sub("://…@", _COLOURS.sub("", printed))
    lines = [printable(line).strip() for line in plain.splitlines()]
    told = [line for line in lines if line and not line.startswith(("[notice]", "WARNING:"))]
    return " ".join(told[-_TOLD:])[-_COLUMNS:]


def printable(text: str) -> str:
    """Return a line of a machine's output, without control characters, and cut."""
    return "".join(one for one in text if one.isprintable())[:_COLUMNS]
