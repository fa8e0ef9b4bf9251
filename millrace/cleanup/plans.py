"""A plan of cleaning: an object in the store, with a line for each object that is to go.

It is JSON lines: what it was made of, then the objects, then the totals. It is written and read a
piece at a time, so that a million keys need no memory, and it is there only when it is whole.
"""

import heapq
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from millrace import errors
from millrace.checkpoints import VerifyDepth
from millrace.cleanup.rules import Rule
from millrace.keys import ClassifiedKey, ObjectKind, cleaning_plan_key
from millrace.storage import Stat, Store, open_writer, stream

_PART = 8 << 20
_GB_MONTH = 0.015  # dollars, of R2's standard storage; what is deleted costs no request there
_LINES = 1000
_WORKERS = 1000  # whose junk is told apart


class PlanHeader(BaseModel):
    """Origin of a plan: its store, rules and time.

    Attributes:
        version: Of the format.
        store: The URL of the store that it is of.
        made: When, by the store's clock.
        beside: URLs of the places whose leases protected what is in the store.
        rules: By which; empty where all goes.
        pinned: What stays, whatever the rules say.
        check: How checkpoints were verified.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    store: str
    made: datetime
    beside: tuple[str, ...] = ()
    rules: tuple[Rule, ...]
    pinned: tuple[str, ...]
    check: VerifyDepth


@dataclass(frozen=True, slots=True)
class WorkerJunk:
    """Junk that goes from below the own prefix of one worker.

    Attributes:
        scope: Run, or job of a member.
        worker: Name of the worker or member.
        objects: Number of objects.
        size: Their bytes.
    """

    scope: str
    worker: str
    objects: int
    size: int


class PlanTotals(BaseModel):
    """Totals of a plan.

    Attributes:
        objects: That go, by the place of the rule that took them.
        size: Their bytes, likewise.
        kept: Objects that a rule would take and something stronger protects, by why.
        junk: Junk that goes, by the worker: the largest first, 1,000 workers at most.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    objects: dict[int, int]
    size: dict[int, int]
    kept: dict[str, int]
    junk: tuple[WorkerJunk, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """An object that is to go.

    Attributes:
        stat: Which, as it was when the plan was made.
        rule: The place of the rule that took it.
        phase: Of what goes whole, when: all of one phase are gone before the next begins.
        junk: Kind of a worker's junk: its key does not say whose it is.
    """

    stat: Stat
    rule: int
    phase: int = 0
    junk: ClassifiedKey | None = None

    def line(self) -> bytes:
        """As it stands in a plan."""
        stat = self.stat
        data: dict[str, Any] = {
            "key": stat.key,
            "size": stat.size,
            "etag": stat.etag,
            "modified": stat.last_modified.astimezone(UTC),
            "rule": self.rule,
        }
        if self.phase:
            data["phase"] = self.phase
        if self.junk:
            data["junk"] = [self.junk.scope, self.junk.worker]
        return orjson.dumps(data, option=orjson.OPT_APPEND_NEWLINE)


@dataclass(frozen=True, slots=True)
class CleaningPlan:
    """A plan that is whole.

    Attributes:
        name: By which it is executed.
        header: What it was made of.
        totals: What it comes to.
    """

    name: str
    header: PlanHeader
    totals: PlanTotals

    @property
    def key(self) -> str:
        """Key of the object."""
        return cleaning_plan_key(self.name)

    @property
    def objects(self) -> int:
        """Number of objects to delete."""
        return sum(self.totals.objects.values())

    @property
    def size(self) -> int:
        """Their bytes."""
        return sum(self.totals.size.values())


@dataclass(slots=True)
class Tally:
    """Totals of a plan while it is made."""

    objects: Counter[int] = field(default_factory=Counter[int])
    size: Counter[int] = field(default_factory=Counter[int])
    kept: Counter[str] = field(default_factory=Counter[str])
    _junk: dict[tuple[str, str], WorkerJunk] = field(
        default_factory=dict[tuple[str, str], WorkerJunk]
    )

    def add(self, entry: Entry) -> None:
        """Count an object that goes."""
        self.objects[entry.rule] += 1
        self.size[entry.rule] += entry.stat.size
        if entry.junk:
            whose = (entry.junk.scope, entry.junk.worker)
            one = self._junk.get(whose, WorkerJunk(*whose, 0, 0))
            size = one.size + entry.stat.size
            self._junk[whose] = replace(one, objects=one.objects + 1, size=size)

    def junk(self) -> tuple[WorkerJunk, ...]:
        """Return the junk of each worker: the largest first, 1,000 workers at most."""
        each = heapq.nsmallest(
            _WORKERS, self._junk.values(), key=lambda one: (-one.size, -one.objects, one.worker)
        )
        return tuple(each)

    def totals(self) -> PlanTotals:
        """Return the totals, when nothing comes any more."""
        return PlanTotals(
            objects=dict(self.objects), size=dict(self.size), kept=dict(self.kept), junk=self.junk()
        )


def write_plan(
    store: Store, name: str, header: PlanHeader, entries: Iterable[Entry], tally: Tally
) -> CleaningPlan:
    """Write a plan while it is made. Memory is three parts of 8 MiB.

    Args:
        store: Whose objects they are, and where it is written to.
        name: The plan's.
        header: What it is made of.
        entries: What goes. Whatever they raise leaves no plan.
        tally: Of what is kept the entries are counting themselves.
    """
    with open_writer(store, cleaning_plan_key(name), part=_PART, concurrency=2) as writer:
        writer.write(header.model_dump_json().encode() + b"\n")
        lines: list[bytes] = []
        for entry in entries:
            tally.add(entry)
            lines.append(entry.line())
            if len(lines) == _LINES:
                writer.write(b"".join(lines))
                lines.clear()
        totals = tally.totals()
        lines.append(totals.model_dump_json().encode() + b"\n")
        writer.write(b"".join(lines))
    return CleaningPlan(name, header, totals)


@contextmanager
def open_plan(store: Store, name: str) -> Generator[tuple[PlanHeader, Iterator[Entry]]]:
    """Read a plan: what it was made of at once, then one entry after the other.

    Raises:
        NotFoundError: There is none of this name.
        CorruptError: It is none.
        ConfigurationError: It is another store's.
    """
    where = store.url_of(cleaning_plan_key(name))
    blocks = stream(store, cleaning_plan_key(name))
    lines = _lines(blocks)
    try:
        try:
            header = PlanHeader.model_validate_json(next(lines, b""))
        except ValidationError as error:
            raise errors.CorruptError(f"{where} is no plan of cleaning: make a new one.") from error
        if header.store != store.url:
            raise errors.ConfigurationError(
                f"{where} is a plan for {header.store}: it was copied here. Make a new one."
            )
        yield header, _entries(where, lines)
    finally:
        lines.close()


def read_plan(store: Store, name: str) -> CleaningPlan:
    """Return a plan's totals. All of it is read.

    Raises:
        NotFoundError, CorruptError, ConfigurationError: As of `open_plan`.
    """
    with open_plan(store, name) as (header, entries):
        tally = Tally()
        for entry in entries:
            tally.add(entry)
    return CleaningPlan(name, header, tally.totals())


def first_keys(store: Store, name: str, most: int) -> list[tuple[str, int]]:
    """Return the first objects of a plan, each with its bytes: for whoever looks at it.

    Raises:
        NotFoundError, CorruptError, ConfigurationError: As of `open_plan`.
    """
    with open_plan(store, name) as (_, entries):
        return [(entry.stat.key, entry.stat.size) for entry in islice(entries, most)]


def saved_a_month(size: int) -> float:
    """Dollars that so many bytes cost a month on Cloudflare R2 (0.015 a GB)."""
    return size / 1e9 * _GB_MONTH


def _entries(where: str, lines: Iterator[bytes]) -> Iterator[Entry]:
    for line in lines:
        try:
            data: dict[str, Any] = orjson.loads(line)
            if "objects" in data:
                return  # the totals, which are last
            stat = Stat(
                data["key"],
                data["size"],
                data["etag"],
                datetime.fromisoformat(data["modified"]),
            )
            yield Entry(stat, data["rule"], data.get("phase", 0), _junk(data))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise errors.CorruptError(f"{where} is damaged: make a new plan.") from error
    raise errors.CorruptError(f"{where} has no end: make a new plan.")


def _junk(data: dict[str, Any]) -> ClassifiedKey | None:
    if "junk" not in data:
        return None
    scope, worker = data["junk"]
    return ClassifiedKey(ObjectKind.JUNK, scope, worker=worker)


def _lines(blocks: Iterator[bytes]) -> Generator[bytes]:
    rest = b""
    for block in blocks:
        *whole, rest = (rest + block).split(b"\n")
        yield from whole
    if rest:
        yield rest
