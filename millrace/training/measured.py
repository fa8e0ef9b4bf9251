"""What workers say of the weights that they begin windows with."""

from collections import defaultdict
from collections.abc import Iterable

from millrace import errors
from millrace.keys import GradientKeys
from millrace.models.gradient import StartWindow
from millrace.records import decoded
from millrace.storage import Store, list_objects, read_range

_LARGEST = 4096  # bytes of what one says


def measured(
    store: Store, keys: GradientKeys, workers: Iterable[str], name: str
) -> dict[int, dict[str, float]]:
    """A measure of the weights, by the window that began with them, and by worker.

    What a worker says is its word only: of a window, the median bears liars. What cannot be read is
    passed over.

    Args:
        store: Where the gradients are.
        keys: Of the run.
        workers: Who is heard.
        name: Of the measure, such as ``loss``.

    Raises:
        UnavailableError: The store does not answer.
    """
    found: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for uid in workers:
        for stat in list_objects(store, f"{keys.worker(uid)}start_window-"):
            parsed = keys.parse_start(stat.key)
            if parsed is None or stat.size > _LARGEST:
                continue
            try:
                body = read_range(store, stat.key, 0, _LARGEST)
                said, _ = decoded(store.url_of(stat.key), StartWindow, body)
            except (errors.CorruptError, errors.NotFoundError):
                continue
            if name in said.measured:
                found[parsed[1]][uid] = said.measured[name]
    return {window: found[window] for window in sorted(found)}
