"""Reports of the workers of a campaign: joined workers, and metrics of the weights."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import islice

from millrace import errors
from millrace.gradients.settings import RunSettings
from millrace.keys.gradients import GradientKeys
from millrace.records import decode_record
from millrace.schemas.gradient import StartWindow
from millrace.storage import Store, head, list_objects, read_range

_MAX_REPORT_BYTES = 4096  # bytes of one report
_MAX_OBJECTS = 100_000  # objects of one worker that are looked at
_MAX_METRIC = 1e12  # larger values are ignored


def find_joined_workers(
    store: Store,
    run: RunSettings,
    workers: Sequence[str],
    since: Mapping[str, datetime] | None = None,
) -> set[str]:
    """Return the workers that have written an object since a run began.

    Args:
        store: Store of the gradients and the chain.
        run: Settings of the run.
        workers: Names of the workers that are looked for.
        since: Later times from which on the objects of some workers count.

    Raises:
        NotFoundError: The run has not begun.
        UnavailableError: The store does not answer.
    """
    started_at = head(store, run.chain_keys.make_link_key(0)).last_modified
    since = since or {}
    return {
        uid
        for uid in workers
        if any(
            one.last_modified >= max(started_at, since.get(uid, started_at))
            for one in islice(
                list_objects(store, run.gradient_keys.make_worker_prefix(uid)), _MAX_OBJECTS
            )
        )
    }


def read_median_metric(
    store: Store, keys: GradientKeys, workers: Sequence[str], metric: str, *, until: int
) -> dict[int, float]:
    """Return the median over workers of a metric of the weights, by the window they began.

    The reports are not verified. A window is left out if fewer than half of the workers report it.
    Unreadable reports are ignored.

    Args:
        store: Store of the gradients.
        keys: Keys of the run.
        workers: Names of the workers whose reports are read.
        metric: Name of the metric, such as ``loss``.
        until: Last window that can have begun. Reports of later windows are ignored.

    Raises:
        UnavailableError: The store does not answer.
    """
    found: defaultdict[int, list[float]] = defaultdict(list)
    for uid in workers:
        stats = list_objects(store, f"{keys.make_worker_prefix(uid)}start_window-")
        for stat in islice(stats, _MAX_OBJECTS):
            parsed = keys.parse_start_window(stat.key)
            if parsed is None or not 1 <= parsed[1] <= until or stat.size > _MAX_REPORT_BYTES:
                continue
            try:
                body = read_range(store, stat.key, 0, _MAX_REPORT_BYTES)
                report, _ = decode_record(store.make_url(stat.key), StartWindow, body)
            except (errors.CorruptError, errors.NotFoundError):
                continue
            value = report.measured.get(metric)
            if (
                (report.uid, report.window) == parsed
                and value is not None
                and abs(value) <= _MAX_METRIC
            ):
                found[parsed[1]].append(value)
    return {
        window: statistics.median(found[window])
        for window in sorted(found)
        if 2 * len(found[window]) >= len(workers)
    }
