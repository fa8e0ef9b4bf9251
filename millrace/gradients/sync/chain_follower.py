"""Weights of a worker, which follow the chain of a run."""

import time
from collections.abc import Iterator
from datetime import timedelta

from millrace import errors
from millrace.gradients.backends.rank_group import RankGroup
from millrace.gradients.backends.ranks import RankedWeights
from millrace.gradients.merging.links import (
    find_newest_window,
    find_opening,
    read_link,
    read_link_after,
)
from millrace.gradients.progress_events import LinkApplied
from millrace.gradients.settings import RunSettings
from millrace.progress import Progress
from millrace.schemas.chain import ChainLink, ChainStart
from millrace.schemas.window import WindowOpening
from millrace.storage import Store, exists

_OPENING_TIMEOUT = timedelta(hours=2)


class ChainFollower:
    """Weights after a window of a run, to which later links are applied.

    All ranks call the methods together.

    Args:
        settings: Settings of the run.
        store: Bucket of the aggregator, which is only read.
        weights: Weights after window ``after``.
        ranks: Group of the worker's ranks.
        after: Number of the window.
        progress: Receives `LinkApplied`.

    Attributes:
        window: Number of the window of the weights.
        link: Link of that window.
    """

    def __init__(
        self,
        settings: RunSettings,
        store: Store,
        weights: RankedWeights,
        ranks: RankGroup,
        *,
        after: int,
        progress: Progress,
    ) -> None:
        self._settings, self._store, self._weights = settings, store, weights
        self._ranks, self._progress = ranks, progress
        self.window = after
        self.link = self.read_link(after)

    def read_link(self, window: int) -> ChainStart | ChainLink:
        """Return the link of a window, without a check against the previous one.

        Raises:
            ChainError: The link is missing.
        """
        return self._ranks.run_on_each(
            lambda: read_link(self._store, self._settings.chain_keys, window)
        )

    def iterate_new_links(self) -> Iterator[ChainLink]:
        """Apply all new links of the chain, and yield each after it was applied.

        Raises:
            ChainError: The chain is broken.
        """
        keys = self._settings.chain_keys
        last = self._ranks.run_on_first(lambda: find_newest_window(self._store, keys))
        for window in range(self.window + 1, last + 1):
            yield self._advance(window)

    def _advance(self, window: int) -> ChainLink:
        before = self.link
        link = self._ranks.run_on_each(
            lambda: read_link_after(self._store, self._settings.chain_keys, window, before)
        )
        self._weights.apply_link(self._store, link)
        self._progress(LinkApplied(run=link.run, window=link.window, step=link.step))
        self.link, self.window = link, window
        return link

    def wait_for_next_link(self, timeout: timedelta | None = None) -> None:
        """Wait until the next window is merged. Its link is not applied.

        Args:
            timeout: Longest wait; by default twice the length of the window from its opening on.
                For the opening, which may wait for other workers, it is two hours by default.

        Raises:
            UnavailableError: The window was not merged in time.
        """
        window, keys = self.window + 1, self._settings.chain_keys
        began = time.monotonic()
        opening: WindowOpening | None = None

        def is_merged() -> bool:
            nonlocal began, opening
            if exists(self._store, keys.make_link_key(window)):
                return True
            limit = timeout
            if limit is None:
                if opening is None:
                    opening = find_opening(self._store, keys, window)
                    began = time.monotonic() if opening is not None else began
                # The aggregator's options may have changed the length.
                usual = 2 * max(
                    self._settings.window_length, (opening or self._settings).window_length
                )
                limit = usual if opening is not None else max(usual, _OPENING_TIMEOUT)
            if time.monotonic() - began > limit.total_seconds():
                raise errors.UnavailableError(
                    f"Window {window} of {keys.run} was not merged in {limit}. Check that the "
                    "aggregator runs, and wait again, or stop; nothing is lost."
                )
            return False

        while not self._ranks.run_on_first(is_merged):  # collectives time out
            time.sleep(self._settings.gather.poll_interval.total_seconds())
