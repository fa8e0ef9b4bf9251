"""Pieces that are to be read from the store, and when a failed read is tried again.

This module owns the order of the reads. It knows no node.
"""

import heapq
import random
from collections.abc import Callable
from enum import Enum, auto

from millrace.swarm.tracking.limits import MAX_CANDIDATES

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds
_LONGEST_DOUBLING = 10  # failures after which the pause before the next read grows no more


class ReadChoice(Enum):
    """Decision about one piece of the queue."""

    TAKE = auto()
    SKIP = auto()
    DISCARD = auto()


class ReadQueue:
    """Pieces that are to be read from the store.

    Args:
        pieces: Number of pieces; all of them are in the queue at first.
        seed: Seed of the pauses before a piece is read again.
    """

    def __init__(self, pieces: int, seed: int) -> None:
        self._unread = list(range(pieces))  # a heap: in no node, and nobody reads it
        self._offered = set(self._unread)  # what is in it
        self._wanted: set[int] = set()  # pieces that need a further vote, and that nobody reads yet
        self._delayed: list[int] = []  # failed at the store: read again later
        self._failures = [0] * pieces
        self._not_before = [0.0] * pieces
        self._random = random.Random(seed)

    @property
    def has_unread(self) -> bool:
        """True if a piece waits that no node has."""
        return bool(self._unread)

    @property
    def has_any(self) -> bool:
        """True if a piece waits: for its first read, for a vote, or for the end of a pause."""
        return bool(self._unread or self._wanted or self._delayed)

    def offer(self, number: int) -> bool:
        """Add a piece that no node has; return whether it was absent."""
        if number in self._offered:
            return False
        self._offered.add(number)
        heapq.heappush(self._unread, number)
        return True

    def take_first(self, choose: Callable[[int], ReadChoice]) -> int | None:
        """Remove and return the first piece that is chosen.

        Args:
            choose: Decides about a piece. A few pieces at most are skipped.
        """
        skipped: list[int] = []
        found = None
        while self._unread and len(skipped) < MAX_CANDIDATES:
            number = heapq.heappop(self._unread)
            choice = choose(number)
            if choice is ReadChoice.SKIP:
                skipped.append(number)
                continue
            self._offered.discard(number)
            if choice is ReadChoice.TAKE:
                found = number
                break
        for number in skipped:
            heapq.heappush(self._unread, number)
        return found

    def want_vote(self, number: int) -> bool:
        """Add a piece that needs a further vote; return whether it was absent."""
        if number in self._wanted:
            return False
        self._wanted.add(number)
        return True

    def is_wanted(self, number: int) -> bool:
        """Tell whether a piece needs a further vote, and nobody reads it yet."""
        return number in self._wanted

    def list_wanted(self) -> list[int]:
        """Return the pieces that need a further vote."""
        return sorted(self._wanted)

    def remove_wanted(self, number: int) -> None:
        """Remove a piece that is read, or that needs no vote any more."""
        self._wanted.discard(number)

    def delay(self, number: int, now: float) -> None:
        """Note that a read failed: the piece is due after a pause, which grows."""
        doublings = min(self._failures[number], _LONGEST_DOUBLING)
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0**doublings)
        self._failures[number] += 1
        self._not_before[number] = now + self._random.uniform(0.0, pause)
        if number not in self._delayed:
            self._delayed.append(number)

    def clear_failures(self, number: int) -> None:
        """Forget the failures of a piece that has been fetched."""
        self._failures[number] = 0

    def is_due(self, number: int, now: float) -> bool:
        """Tell whether the pause after a failed read of a piece is over."""
        return self._not_before[number] <= now

    def take_due(self, now: float) -> list[int]:
        """Remove and return the delayed pieces whose pause is over."""
        due = [number for number in self._delayed if self.is_due(number, now)]
        self._delayed = [number for number in self._delayed if not self.is_due(number, now)]
        return due
