"""Reports of the workers of a campaign: joined workers, and metrics of the weights."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
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
_MAX_WINDOWS = 500  # windows whose reports are read
_CONCURRENCY = 32  # requests


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
    Unreadable reports are ignored. Of more than 500 windows, 500 are read, evenly spaced.

    Args:
        store: Store of the gradients.
        keys: Keys of the run.
        workers: Names of the workers whose reports are read.
        metric: Name of the metric, such as ``loss``.
        until: Last window that can have begun. Reports of later windows are ignored.

    Raises:
        UnavailableError: The store does not answer.
    """
    listed: defaultdict[int, list[str]] = defaultdict(list)
    for uid in workers:
        stats = list_objects(store, f"{keys.make_worker_prefix(uid)}start_window-")
        for stat in islice(stats, _MAX_OBJECTS):
            parsed = keys.parse_start_window(stat.key)
            if parsed is not None and 1 <= parsed[1] <= until and stat.size <= _MAX_REPORT_BYTES:
                listed[parsed[1]].append(stat.key)
    shown = _choose_evenly(sorted(listed), _MAX_WINDOWS)
    reports = [(window, key) for window in shown for key in listed[window]]
    found: defaultdict[int, list[float]] = defaultdict(list)
    with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="reports") as pool:
        names = [key for _, key in reports]
        values = pool.map(partial(_read_metric, store, keys, metric), names)
        for (window, _), value in zip(reports, values, strict=True):
            if value is not None:
                found[window].append(value)
    return {
        window: statistics.median(found[window])
        for window in sorted(found)
        if 2 * len(found[window]) >= len(workers)
    }


def _choose_evenly(windows: Sequence[int], limit: int) -> list[int]:
    """Return at most ``limit`` of the windows, evenly spaced, with the first and the last."""
    if len(windows) <= limit:
        return list(windows)
    return [windows[number * (len(windows) - 1) // (limit - 1)] for number in range(limit)]


def _read_metric(store: Store, keys: GradientKeys, metric: str, key: str) -> float | None:
    """Return a metric of one report; None if the report has none, or cannot be read."""
    try:
        body = read_range(store, key, 0, _MAX_REPORT_BYTES)
        report, _ = decode_record(store.make_url(key), StartWindow, body)
    except (errors.CorruptError, errors.NotFoundError):
        return None
    value = report.measured.get(metric)
    is_own = (report.uid, report.window) == keys.parse_start_window(key)
    return value if is_own and value is not None and abs(value) <= _MAX_METRIC else None
