"""Fail a run when too many rows of its source make no sample."""

import heapq
import re
from collections.abc import Iterable, Iterator

import orjson

from millrace import errors
from millrace.datasets.finalize import plan_digest
from millrace.datasets.partition import check_plan
from millrace.datasets.settings import ExecutionSettings
from millrace.keys import DatasetKeys
from millrace.progress import Event, Progress
from millrace.schemas.dataset import DatasetPlan, ShardCommit
from millrace.schemas.ledger import iterate_commits
from millrace.storage import Store, list_objects, read_range

_ALWAYS_ALLOWED = 10  # rows: one bad row of ten is no reason to stop
_MARGIN = 2.0  # more rows than expected may follow; beyond this factor a run stops early
_REASONS = 3  # shown in the error
_LOOKED_AT = 1 << 20  # bytes of an object of such rows that are read for the reasons
_ROW = re.compile(rb'\{"where":("(?:[^"\\]|\\.)*"),"reason":("(?:[^"\\]|\\.)*")')


class QuarantineLimit:
    """Counts the rows of a run, and raises when more are put aside than its settings allow.

    Called with each event of the run, it stops a run early: when the limit would be exceeded even
    if the rest of the source had twice as many rows as expected, all good. `check` is the final
    decision. Commits stay, so a run with a higher limit continues.

    Args:
        store: Store of the dataset.
        keys: Names of the dataset.
        plan: The dataset's plan.
        settings: The limits.
    """

    def __init__(
        self, store: Store, keys: DatasetKeys, plan: DatasetPlan, settings: ExecutionSettings
    ) -> None:
        self._store, self._keys, self._settings = store, keys, settings
        self._plan = plan_digest(plan)
        self._parts = {split.name: split.piece.size for split in plan.splits}
        self._through: dict[str, float] = {}
        self._size = sum(self._parts.values())
        self._read = 0.0  # bytes of the source
        self._good = self._bad = 0

    def resume(self, plan: DatasetPlan) -> None:
        """Count what earlier runs have committed. One GET a commit.

        Raises:
            QuarantineError: The limit is exceeded already.
            ConflictError: A run with a plan that was replaced has committed since.
        """
        pieces = {split.name: split.piece for split in plan.splits}
        for entry in iterate_commits(self._store, self._keys):
            check_plan([entry], self._plan)
            self._add(entry.samples, entry.quarantined)
            self._advance(entry.split, pieces[entry.split].fraction_before(entry.next))
        self._stop_early()

    def watch(self, progress: Progress) -> Progress:
        """Return a progress that passes events on, and raises when the limit is exceeded."""

        def passed_on(event: Event) -> None:
            progress(event)
            if event.name == "shard.committed":
                figures = event.figures
                self._add(int(figures["samples"]), int(figures["quarantined"]))
                self._advance(str(figures["split"]), float(figures["through"]))
                self._stop_early()

        return passed_on

    def check(self, entries: Iterable[ShardCommit]) -> None:
        """Decide over the whole ledger, before the dataset is completed.

        Raises:
            QuarantineError: More rows were put aside than allowed, or there are no samples.
        """
        self._good = self._bad = 0
        for entry in entries:
            self._add(entry.samples, entry.quarantined)
        if not self._good and not self._settings.allow_empty:
            raise self._empty()
        if self._bad > self._allowed(self._good + self._bad):
            raise self._exceeded(f"{self._bad} of {self._good + self._bad} rows")

    def _add(self, good: int, bad: int) -> None:
        self._good += good
        self._bad += bad

    def _advance(self, split: str, through: float) -> None:
        """Note how much of a split was read."""
        before = self._through.get(split, 0.0)
        if through > before:
            self._through[split] = through
            self._read += self._parts[split] * (through - before)

    def _allowed(self, rows: float) -> float:
        share = self._settings.max_quarantined
        return max(_ALWAYS_ALLOWED if share else 0, share * rows)

    def _stop_early(self) -> None:
        rest = max(0.0, self._size - self._read)
        rows = self._good + self._bad
        if not rows or not self._read:
            return
        expected = rows + rest * (rows / self._read) * _MARGIN
        if self._bad > self._allowed(expected):
            total = round(rows + rest * rows / self._read)
            so_far = f" read so far, of about {total} expected," if rest else ""
            raise self._exceeded(f"{self._bad} of {rows} rows{so_far}")

    def _exceeded(self, rows: str) -> errors.QuarantineError:
        limit = f"{self._settings.max_quarantined:.4%}".rstrip("%").rstrip("0").rstrip(".")
        return errors.QuarantineError(
            f"{self._keys.dataset}: {rows} made no sample, above the limit of {limit}%. "
            f"{self._first_reasons()}Nothing is lost: correct the settings of the source under "
            "another dataset name, or raise run.max_quarantined and run it again."
        )

    def _empty(self) -> errors.QuarantineError:
        rows = (
            f"{self._bad} of {self._bad} rows made none" if self._bad else "the source has no rows"
        )
        return errors.QuarantineError(
            f"{self._keys.dataset} would have no samples: {rows}. {self._first_reasons()}Correct "
            "the source under another dataset name, or set run.allow_empty and run it again."
        )

    def _first_reasons(self) -> str:
        shown = "; ".join(_first_of_each(self._rows()))
        where = self._store.url_of(self._keys.quarantined)
        return f"First reasons: {shown} (all are below {where}). " if shown else ""

    def _rows(self) -> Iterator[tuple[str, str]]:
        keys = (stat.key for stat in list_objects(self._store, self._keys.quarantined))
        for key in heapq.nsmallest(_REASONS, keys):
            for line in read_range(self._store, key, 0, _LOOKED_AT).split(b"\n"):
                if row := _ROW.match(line):  # else it is cut, or not Millrace's
                    yield orjson.loads(row[1]), orjson.loads(row[2])


def _first_of_each(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return the first row of each reason, a few at most."""
    found: dict[str, str] = {}
    for where, reason in rows:
        found.setdefault(reason, f"{where}: {reason}")
        if len(found) == _REASONS:
            break
    return list(found.values())
