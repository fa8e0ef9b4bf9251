"""Pieces to read from the store, and the pauses after failed reads.

This module owns the order of the reads. It has no state of the nodes.
"""

import heapq
import random
from collections.abc import Callable
from enum import Enum, auto

from millrace.swarm.tracking.limits import MAX_CANDIDATES

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds
_LONGEST_DOUBLING = 10  # failures after which the pause no longer grows
_OTHERS_FIRST = 3.0  # seconds for which other nodes come first after a node's read has failed


class ReadChoice(Enum):
    """Decision about one piece of the queue."""

    TAKE = auto()
    SKIP = auto()
    DISCARD = auto()


class ReadQueue:
    """Pieces to read from the store.

    Args:
        pieces: Number of pieces. At first, all of them are in the queue.
        seed: Seed of the random pauses.
    """

    def __init__(self, pieces: int, seed: int) -> None:
        self._unread = list(range(pieces))  # heap of the pieces that no node has or reads
        self._queued = set(self._unread)  # the pieces in this heap
        self._vote_requests: set[int] = set()  # pieces that wait for a read for a further vote
        self._delayed: list[int] = []  # pieces whose last read failed
        self._failures = [0] * pieces
        self._not_before = [0.0] * pieces
        self._failed_at: dict[int, dict[str, float]] = {}  # by piece and reader: the last failure
        self._random = random.Random(seed)

    @property
    def has_unread(self) -> bool:
        """True if a piece waits for its first read."""
        return bool(self._unread)

    @property
    def has_any(self) -> bool:
        """True if a piece waits: for its first read, for a vote, or for the end of a pause."""
        return bool(self._unread or self._vote_requests or self._delayed)

    def add(self, number: int) -> bool:
        """Add a piece that no node has; return False if it is in the queue already."""
        if number in self._queued:
            return False
        self._queued.add(number)
        heapq.heappush(self._unread, number)
        return True

    def take_first(self, choose: Callable[[int], ReadChoice]) -> int | None:
        """Remove and return the first piece that `choose` takes.

        Args:
            choose: Decides about a piece. The search ends after `MAX_CANDIDATES` skipped pieces.
        """
        skipped: list[int] = []
        found = None
        while self._unread and len(skipped) < MAX_CANDIDATES:
            number = heapq.heappop(self._unread)
            choice = choose(number)
            if choice is ReadChoice.SKIP:
                skipped.append(number)
                continue
            self._queued.discard(number)
            if choice is ReadChoice.TAKE:
                found = number
                break
        for number in skipped:
            heapq.heappush(self._unread, number)
        return found

    def add_vote_request(self, number: int) -> bool:
        """Request a further vote for a piece; return False if one is requested already."""
        if number in self._vote_requests:
            return False
        self._vote_requests.add(number)
        return True

    def is_vote_requested(self, number: int) -> bool:
        """Tell whether a further vote is requested for a piece."""
        return number in self._vote_requests

    def list_vote_requests(self) -> list[int]:
        """Return the pieces for which a further vote is requested."""
        return sorted(self._vote_requests)

    def remove_vote_request(self, number: int) -> None:
        """Remove the request of a vote, since a read is ordered or the piece is decided."""
        self._vote_requests.discard(number)

    def delay(self, number: int, node_id: str, now: float) -> None:
        """Note that a read by a node failed. The piece is due after a random pause, which grows."""
        self._failed_at.setdefault(number, {})[node_id] = now
        doublings = min(self._failures[number], _LONGEST_DOUBLING)
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0**doublings)
        self._failures[number] += 1
        self._not_before[number] = now + self._random.uniform(0.0, pause)
        if number not in self._delayed:
            self._delayed.append(number)

    def clear_failures(self, number: int) -> None:
        """Forget the failures of a piece that a node has received."""
        self._failures[number] = 0
        self._failed_at.pop(number, None)

    def list_failed_readers(self, number: int, now: float) -> list[str]:
        """Return the nodes whose read of a piece has just failed, so that others come first."""
        failed_at = self._failed_at.get(number, {})
        return [node_id for node_id, at in failed_at.items() if now - at < _OTHERS_FIRST]

    def is_due(self, number: int, now: float) -> bool:
        """Tell whether the pause after a failed read of a piece is over."""
        return self._not_before[number] <= now

    def take_due(self, now: float) -> list[int]:
        """Remove and return the delayed pieces whose pause is over."""
        due = [number for number in self._delayed if self.is_due(number, now)]
        self._delayed = [number for number in self._delayed if not self.is_due(number, now)]
        return due
