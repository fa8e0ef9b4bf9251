"""Scores of the workers of a run, as a merge reads them."""

from millrace.keys.gradients import ChainKeys
from millrace.records import fetch, list_numbers
from millrace.schemas.scores import WindowScores
from millrace.storage import Store


def read_newest_scores(store: Store, keys: ChainKeys) -> WindowScores | None:
    """Return the newest scores of a run; None if there are none.

    Raises:
        CorruptError: The newest scores cannot be read.
    """
    scored = list_numbers(store, keys.scores, keys.parse_scores)
    return fetch(store, keys.make_scores_key(scored[-1]), WindowScores) if scored else None
