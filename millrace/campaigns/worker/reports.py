"""Reports of workers: who has joined a run, and how good the weights are."""

import statistics
from collections import defaultdict
from collections.abc import Sequence

from millrace import errors
from millrace.gradients.settings import RunSettings
from millrace.keys import GradientKeys
from millrace.records import decode_record
from millrace.schemas.gradient import StartWindow
from millrace.storage import Store, head, list_objects, read_range

_LARGEST = 4096  # bytes of what one says
_MOST = 1e12  # what is more is no measure of anything


def joined(store: Store, run: RunSettings, workers: Sequence[str]) -> set[str]:
    """Return the workers that have written anything since a run began.

    Args:
        store: Where the gradients and the chain are.
        run: Settings of the run.
        workers: Names of the workers that are looked for.

    Raises:
        NotFoundError: The run has not begun.
        UnavailableError: The store does not answer.
    """
    began = head(store, run.chain.link(0)).last_modified
    return {
        uid
        for uid in workers
        if any(one.last_modified >= began for one in list_objects(store, run.gradients.worker(uid)))
    }


def measured(
    store: Store, keys: GradientKeys, workers: Sequence[str], name: str, *, last: int
) -> dict[int, float]:
    """Return a measure of the weights, by the window that began with them: the median worker's.

    What a worker says is its word only. Of a window that fewer than half speak of nothing is known.
    What cannot be read is passed over.

    Args:
        store: Where the gradients are.
        keys: Of the run.
        workers: Who is heard.
        name: Of the measure, such as ``loss``.
        last: The last window that can have begun; of later ones nobody is heard.

    Raises:
        UnavailableError: The store does not answer.
    """
    found: defaultdict[int, list[float]] = defaultdict(list)
    for uid in workers:
        for stat in list_objects(store, f"{keys.worker(uid)}start_window-"):
            parsed = keys.parse_start_window(stat.key)
            if parsed is None or not 1 <= parsed[1] <= last or stat.size > _LARGEST:
                continue
            try:
                body = read_range(store, stat.key, 0, _LARGEST)
                said, _ = decode_record(store.url_of(stat.key), StartWindow, body)
            except (errors.CorruptError, errors.NotFoundError):
                continue
            value = said.measured.get(name)
            if (said.uid, said.window) == parsed and value is not None and abs(value) <= _MOST:
                found[parsed[1]].append(value)
    return {
        window: statistics.median(found[window])
        for window in sorted(found)
        if 2 * len(found[window]) >= len(workers)
    }
