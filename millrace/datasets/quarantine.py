"""Stop a run if too many rows of its source make no sample."""

import heapq
import math
import re
from collections.abc import Iterable, Iterator

import orjson

from millrace import errors
from millrace.dataset_ledger import iterate_commits
from millrace.datasets.plan_digest import check_plan_digest, compute_plan_digest
from millrace.datasets.progress_events import ShardCommitted
from millrace.datasets.settings import ExecutionSettings
from millrace.formatting import format_count
from millrace.keys.datasets import DatasetKeys
from millrace.progress import Event, Progress
from millrace.records import iterate_records
from millrace.schemas.dataset import DatasetPlan, PartitionEnd, count_source_rows
from millrace.storage import Store, list_objects, read_range

_FEW_ROWS = 10  # bad rows that do not stop the run of a small source, up to half of its rows
_ROUNDING = 1e-6  # rows, for sums of shares of rows
_MARGIN = 2.0  # factor on the expected number of remaining rows, for an early stop
_MAX_REASONS = 3  # reasons in the error
_MAX_READ_BYTES = 1 << 20  # bytes of a quarantine object that are read for the reasons
_ROW = re.compile(rb'\{"where":("(?:[^"\\]|\\.)*"),"reason":("(?:[^"\\]|\\.)*")')


class QuarantineLimit:
    """Limit on the quarantined rows of a run.

    `wrap_progress` counts the rows of each commit, and may stop the run early. The early decision
    assumes that twice as many rows as expected remain, and that all of them are good. Up to ten bad
    rows stop no run early, since the source may have as many good rows. `check` makes the final
    decision. Commits stay, so a run with a higher limit continues.

    Args:
        store: Store of the dataset.
        keys: Names of the dataset.
        plan: Plan of the dataset.
        settings: Settings with the limits.
    """

    def __init__(
        self, store: Store, keys: DatasetKeys, plan: DatasetPlan, settings: ExecutionSettings
    ) -> None:
        self._store, self._keys, self._settings = store, keys, settings
        self._plan_digest = compute_plan_digest(plan)
        self._partition_sizes = {p.name: p.source_range.size for p in plan.partitions}
        self._fractions: dict[str, float] = {}
        self._source_bytes = sum(self._partition_sizes.values())
        self._read_bytes = 0.0  # bytes of the source
        self._rows, self._bad_rows = 0, 0.0  # of the source

    def resume(self, plan: DatasetPlan) -> None:
        """Count the rows that earlier runs have committed. One GET for each commit.

        Raises:
            QuarantineError: The limit is exceeded already.
            ConflictError: A run with a replaced plan has committed after the replacement.
        """
        source_ranges = {p.name: p.source_range for p in plan.partitions}
        ends = {} if plan.source.is_reproducible else self._read_ends()
        for entry in iterate_commits(self._store, self._keys):
            check_plan_digest([entry], self._plan_digest)
            if entry.number >= ends.get(entry.partition, entry.number + 1):
                continue  # of a run that another one had overtaken
            self._count_rows(*count_source_rows(entry))
            self._advance(
                entry.partition,
                source_ranges[entry.partition].compute_fraction_before(entry.next_cursor),
            )
        self._check_early()

    def _read_ends(self) -> dict[str, int]:
        """Return the number of commits that count of each partition that has ended."""
        found = iterate_records(
            self._store,
            self._keys.commits,
            PartitionEnd,
            wanted=lambda stat: self._keys.parse_end(stat.key) is not None,
        )
        return {end.partition: end.commits for _, end in found if isinstance(end, PartitionEnd)}

    def wrap_progress(self, progress: Progress) -> Progress:
        """Return a callback that forwards events, and raises when the limit is exceeded."""

        def forward_event(event: Event) -> None:
            progress(event)
            if isinstance(event, ShardCommitted):
                self._count_rows(event.rows, event.bad_rows)
                self._advance(event.partition, event.fraction)
                self._check_early()

        return forward_event

    def check(self, *, samples: int, rows: int, bad_rows: float, dropped: int = 0) -> None:
        """Check the rows of the whole ledger, before the dataset is finalized.

        Args:
            samples: Number of samples.
            rows: Number of rows of the source.
            bad_rows: Quarantined rows of the source; may be a fraction, as in `ShardCommit`.
            dropped: Number of rows that transforms dropped.

        Raises:
            QuarantineError: More rows were quarantined than allowed, or there are no samples.
        """
        self._rows, self._bad_rows = rows, bad_rows
        if not samples and not self._settings.allow_empty:
            raise self._make_empty_error(dropped)
        if self._exceeds_limit(rows):
            raise self._make_exceeded_error(f"{self._count_bad_rows()} of {rows} rows")

    def _count_rows(self, rows: int, bad_rows: float) -> None:
        self._rows += rows
        self._bad_rows += bad_rows

    def _advance(self, partition: str, fraction: float) -> None:
        """Record the fraction of a partition that was read."""
        before = self._fractions.get(partition, 0.0)
        if fraction > before:
            self._fractions[partition] = fraction
            self._read_bytes += self._partition_sizes[partition] * (fraction - before)

    def _count_bad_rows(self) -> int:
        """Return how many rows of the source have made no sample, or fewer than they should."""
        return max(1, math.ceil(self._bad_rows - _ROUNDING))

    def _exceeds_limit(self, rows: float) -> bool:
        """Decide whether there are too many bad rows for a number of rows."""
        share = self._settings.max_quarantined
        allowed = max(share * rows, min(_FEW_ROWS, rows / 2)) + _ROUNDING if share else 0
        return self._bad_rows > allowed

    def _check_early(self) -> None:
        rest = max(0.0, self._source_bytes - self._read_bytes)
        rows = self._rows
        is_few = self._settings.max_quarantined > 0 and self._bad_rows <= _FEW_ROWS + _ROUNDING
        if not rows or not self._read_bytes or is_few:
            return
        expected = rows + rest * (rows / self._read_bytes) * _MARGIN
        if self._exceeds_limit(expected):
            total = round(rows + rest * rows / self._read_bytes)
            so_far = f" read so far, of about {total} expected," if rest else ""
            raise self._make_exceeded_error(f"{self._count_bad_rows()} of {rows} rows{so_far}")

    def _make_exceeded_error(self, rows: str) -> errors.QuarantineError:
        limit = f"{self._settings.max_quarantined:.4%}".rstrip("%").rstrip("0").rstrip(".")
        return errors.QuarantineError(
            f"{self._keys.dataset}: {rows} made no sample, above the limit of {limit}%. "
            f"{self._describe_first_reasons()}Nothing is lost: correct the settings of the source "
            "under another dataset name, or raise execution.max_quarantined and run it again."
        )

    def _make_empty_error(self, dropped: int) -> errors.QuarantineError:
        faulty = "source"
        if self._bad_rows:
            others = f", and the transforms dropped {dropped}" if dropped else ""
            rows = f"{self._count_bad_rows()} of {self._rows} rows made none{others}"
        elif dropped:
            faulty = "transforms"
            rows = f"the transforms dropped all {format_count(dropped, 'row')}"
        else:
            rows = "the source has no rows"
        return errors.QuarantineError(
            f"{self._keys.dataset} would have no samples: {rows}. "
            f"{self._describe_first_reasons()}Correct the {faulty} under another dataset name, or "
            "set execution.allow_empty and run it again."
        )

    def _describe_first_reasons(self) -> str:
        shown = "; ".join(_select_first_of_each(self._iterate_quarantined_rows()))
        where = self._store.make_url(self._keys.quarantined)
        return f"First reasons: {shown} (all are below {where}). " if shown else ""

    def _iterate_quarantined_rows(self) -> Iterator[tuple[str, str]]:
        keys = (stat.key for stat in list_objects(self._store, self._keys.quarantined))
        for key in heapq.nsmallest(_MAX_REASONS, keys):
            try:
                body = read_range(self._store, key, 0, _MAX_READ_BYTES)
            except errors.NotFoundError:
                continue  # deleted since the listing
            for line in body.split(b"\n"):
                if row := _ROW.match(
                    line
                ):  # otherwise the line is truncated, or was written by another program
                    yield orjson.loads(row[1]), orjson.loads(row[2])


def _select_first_of_each(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return the first row of each reason, for at most three reasons."""
    found: dict[str, str] = {}
    for where, reason in rows:
        found.setdefault(reason, f"{where}: {reason}")
        if len(found) == _MAX_REASONS:
            break
    return list(found.values())
