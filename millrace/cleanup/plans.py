"""Cleanup plans: an object in the store with a line for each object to delete.

A plan is JSON lines: a header, then the objects, then the totals. It is written and read in blocks,
so that memory does not grow with the number of keys. The object appears only when it is complete.
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
from millrace.deletion import PlannedObject
from millrace.keys.cleanup import make_cleaning_plan_key
from millrace.keys.kinds import ClassifiedKey, ObjectKind
from millrace.storage import Stat, Store, open_writer, stream

_PART = 8 << 20
_GB_MONTH = 0.015  # dollars, of R2's standard storage; deletes are free there
_LINES = 1000
_WORKERS = 1000  # workers whose junk is listed


class PlanHeader(BaseModel):
    """Origin of a plan: its store, rules and time.

    Attributes:
        version: Version of the format.
        store: URL of the store.
        created_at: Time by the store's clock.
        related_stores: URLs of the stores whose leases protect objects too.
        rules: Rules in order; empty for a wipe.
        pins: Keys and folders that stay.
        check: Check of checkpoints.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    store: str
    created_at: datetime
    related_stores: tuple[str, ...] = ()
    rules: tuple[Rule, ...]
    pins: tuple[str, ...]
    check: VerifyDepth


@dataclass(frozen=True, slots=True)
class WorkerJunk:
    """Junk to delete below the prefix of one worker.

    Attributes:
        scope: Run, or job of a member.
        worker: Name of the worker or member.
        objects: Number of objects.
        size: Bytes of the objects.
    """

    scope: str
    worker: str
    objects: int
    size: int


class PlanTotals(BaseModel):
    """Totals of a plan.

    Attributes:
        objects: Number of objects to delete, by the index of the rule.
        size: Bytes to delete, by the index of the rule.
        kept: Number of protected objects that a rule would take, by the reason.
        junk: Junk of each worker, the largest first, 1,000 workers at most.
        unmatched_pins: Pins that are neither the key of an object nor a folder with objects.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    objects: dict[int, int]
    size: dict[int, int]
    kept: dict[str, int]
    junk: tuple[WorkerJunk, ...] = ()
    unmatched_pins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanEntry(PlannedObject):
    """Object to delete by a rule.

    Attributes:
        rule_index: Index of the rule that takes it.
        phase: Phase of a checkpoint or dataset: all of one phase is deleted before the next.
        junk: Run and worker of junk, which its key does not tell.
    """

    rule_index: int
    phase: int = 0
    junk: ClassifiedKey | None = None

    def encode_line(self) -> bytes:
        """Return the line of a plan."""
        stat = self.stat
        data: dict[str, Any] = {
            "key": stat.key,
            "size": stat.size,
            "etag": stat.etag,
            "modified": stat.last_modified.astimezone(UTC),
            "rule": self.rule_index,
        }
        if self.phase:
            data["phase"] = self.phase
        if self.junk:
            data["junk"] = [self.junk.scope, self.junk.worker]
        return orjson.dumps(data, option=orjson.OPT_APPEND_NEWLINE)


@dataclass(frozen=True, slots=True)
class CleanupPlan:
    """Complete plan.

    Attributes:
        name: Name of the plan.
        header: Store, rules and time.
        totals: Totals of the objects to delete and of those kept.
    """

    name: str
    header: PlanHeader
    totals: PlanTotals

    @property
    def key(self) -> str:
        """Key of the object."""
        return make_cleaning_plan_key(self.name)

    @property
    def objects(self) -> int:
        """Number of objects to delete."""
        return sum(self.totals.objects.values())

    @property
    def size(self) -> int:
        """Bytes of the objects to delete."""
        return sum(self.totals.size.values())


@dataclass(slots=True)
class PlanTally:
    """Totals of a plan while it is made."""

    objects: Counter[int] = field(default_factory=Counter[int])
    size: Counter[int] = field(default_factory=Counter[int])
    kept: Counter[str] = field(default_factory=Counter[str])
    unmatched_pins: tuple[str, ...] = ()
    _junk_by_worker: dict[tuple[str, str], WorkerJunk] = field(
        default_factory=dict[tuple[str, str], WorkerJunk]
    )

    def add_entry(self, entry: PlanEntry) -> None:
        """Count an object to delete."""
        self.objects[entry.rule_index] += 1
        self.size[entry.rule_index] += entry.size
        if entry.junk:
            worker = (entry.junk.scope, entry.junk.worker)
            one = self._junk_by_worker.get(worker, WorkerJunk(*worker, 0, 0))
            size = one.size + entry.size
            self._junk_by_worker[worker] = replace(one, objects=one.objects + 1, size=size)

    def summarize_junk(self) -> tuple[WorkerJunk, ...]:
        """Return the junk of each worker: the largest first, 1,000 workers at most."""
        each = heapq.nsmallest(
            _WORKERS,
            self._junk_by_worker.values(),
            key=lambda one: (-one.size, -one.objects, one.worker),
        )
        return tuple(each)

    def make_totals(self) -> PlanTotals:
        """Return the totals of all entries so far."""
        return PlanTotals(
            objects=dict(self.objects),
            size=dict(self.size),
            kept=dict(self.kept),
            junk=self.summarize_junk(),
            unmatched_pins=self.unmatched_pins,
        )


def write_plan(
    store: Store, name: str, header: PlanHeader, entries: Iterable[PlanEntry], tally: PlanTally
) -> CleanupPlan:
    """Write a plan while it is made. Memory is three parts of 8 MiB.

    Args:
        store: Store of the objects and of the plan.
        name: Name of the plan.
        header: Header of the plan.
        entries: Objects to delete. An exception of the iterator leaves no plan.
        tally: Totals. The iterator counts the kept objects in it.
    """
    with open_writer(store, make_cleaning_plan_key(name), part_size=_PART, concurrency=2) as writer:
        writer.write(header.model_dump_json().encode() + b"\n")
        lines: list[bytes] = []
        for entry in entries:
            tally.add_entry(entry)
            lines.append(entry.encode_line())
            if len(lines) == _LINES:
                writer.write(b"".join(lines))
                lines.clear()
        totals = tally.make_totals()
        lines.append(totals.model_dump_json().encode() + b"\n")
        writer.write(b"".join(lines))
    return CleanupPlan(name, header, totals)


@contextmanager
def open_plan(store: Store, name: str) -> Generator[tuple[PlanHeader, Iterator[PlanEntry]]]:
    """Read the header of a plan, and iterate over its entries.

    Raises:
        NotFoundError: There is no plan of this name.
        CorruptError: The object is not a plan.
        ConfigurationError: The plan is for another store.
    """
    url = store.make_url(make_cleaning_plan_key(name))
    blocks = stream(store, make_cleaning_plan_key(name))
    lines = _split_lines(blocks)
    try:
        try:
            header = PlanHeader.model_validate_json(next(lines, b""))
        except ValidationError as error:
            raise errors.CorruptError(f"{url} is no plan of cleaning: make a new one.") from error
        if header.store != store.url:
            raise errors.ConfigurationError(
                f"{url} is a plan for {header.store}: it was copied here. Make a new one."
            )
        yield header, _parse_entries(url, lines)
    finally:
        lines.close()


def read_plan(store: Store, name: str) -> CleanupPlan:
    """Read a whole plan, and return it with its totals.

    Raises:
        NotFoundError, CorruptError, ConfigurationError: As of `open_plan`.
    """
    with open_plan(store, name) as (header, entries):
        tally = PlanTally()
        for entry in entries:
            tally.add_entry(entry)
    return CleanupPlan(name, header, tally.make_totals())


def read_first_keys(store: Store, name: str, limit: int) -> list[tuple[str, int]]:
    """Return the keys and sizes of the first objects of a plan.

    Raises:
        NotFoundError, CorruptError, ConfigurationError: As of `open_plan`.
    """
    with open_plan(store, name) as (_, entries):
        return [(entry.key, entry.size) for entry in islice(entries, limit)]


def estimate_monthly_cost(size: int, price: float = _GB_MONTH) -> float:
    """Return the dollars that so many bytes cost a month.

    Args:
        size: Number of bytes.
        price: Dollars for a GB and a month; by default those of Cloudflare R2.
    """
    return size / 1e9 * price


def _parse_entries(url: str, lines: Iterator[bytes]) -> Iterator[PlanEntry]:
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
            yield PlanEntry(stat, data["rule"], data.get("phase", 0), _parse_junk(data))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise errors.CorruptError(f"{url} is damaged: make a new plan.") from error
    raise errors.CorruptError(f"{url} has no end: make a new plan.")


def _parse_junk(data: dict[str, Any]) -> ClassifiedKey | None:
    if "junk" not in data:
        return None
    scope, worker = data["junk"]
    return ClassifiedKey(ObjectKind.JUNK, scope, worker=worker)


def _split_lines(blocks: Iterator[bytes]) -> Generator[bytes]:
    rest = b""
    for block in blocks:
        *whole, rest = (rest + block).split(b"\n")
        yield from whole
    if rest:
        yield rest
