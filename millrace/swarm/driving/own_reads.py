"""Pieces that the driver reads itself: at random, where nodes disagree, or where they fail.

This module owns which pieces are read, and since when the store fails them.
"""

import http.client
import random
import time
from collections.abc import Callable

from millrace import errors
from millrace.swarm.driving.members import Member
from millrace.swarm.driving.run_state import RunState
from millrace.swarm.pieces import Catalogue
from millrace.swarm.transfer import FINAL_STATUSES, FetchError

_DENIED_STATUSES = {http.client.UNAUTHORIZED, http.client.FORBIDDEN}
_OWN_READ_LIMIT = 16 << 20  # bytes that the driver reads of objects without a digest


class OwnReads:
    """Reads of single pieces by the driver.

    Args:
        state: Members and tracker of the run.
        catalogue: Files of the run.
        store_timeout: Seconds that the store may fail.
        read: Begins to read a piece, if it is of use (`is_useful`).
    """

    def __init__(
        self,
        state: RunState,
        catalogue: Catalogue,
        store_timeout: float,
        read: Callable[[int], None],
    ) -> None:
        self._state, self._catalogue = state, catalogue
        self._store_timeout, self._read = store_timeout, read
        self._selected: set[int] = set()  # pieces that are read in any case
        self._failing: dict[int, float] = {}  # piece → since when the store has failed it
        self._blaming: dict[int, dict[str, str]] = {}  # piece → node → why it cannot read it

    def select(self, unproven: list[int], sizes: list[int]) -> None:
        """Choose pieces that the driver reads itself, of those that nothing says anything of.

        They are drawn at random, up to a limit: all of them where they are few. Nodes that lie
        alike are found out by them, and a single node has nobody else who reads what it read.
        """
        pieces = [number for number in unproven if self._state.tracker.is_lacked(number)]
        random.SystemRandom().shuffle(pieces)
        left = _OWN_READ_LIMIT
        for number in pieces:
            left -= sizes[number]
            if left < 0:
                break
            self._selected.add(number)
            self._read(number)

    def note_read(self, number: int) -> None:
        """Note that a node has read a piece from the store."""
        self._failing.pop(number, None)

    def note_failure(self, member: Member, number: int, status: int, why: str) -> None:
        """Note that a node could not read a piece. The driver looks itself: one node ends no run.

        Args:
            member: Node.
            number: Piece.
            status: HTTP status of the refusal; 0 where there was none.
            why: Reason that the node gave.
        """
        now = time.monotonic()
        since = self._failing.setdefault(number, now)
        if status in FINAL_STATUSES or now - since > self._store_timeout:
            self._blaming.setdefault(number, {})[member.node.id] = why
            self._read(number)

    def is_useful(self, number: int) -> bool:
        """Tell whether a piece is the driver's own, disputed, or said by a node to be gone."""
        members = self._state.members
        with self._state.news:
            if number in self._selected or self._state.tracker.is_disputed(number):
                return True
            return any(not members[name].why for name in self._blaming.get(number, ()))

    def handle_digest(self, number: int, digest: str) -> None:
        """Settle a piece that the driver has read, and give up nodes that cannot read it."""
        state = self._state
        with state.news:
            self._failing.pop(number, None)
            state.settle({number: digest})
            for name, why in self._blaming.pop(number, {}).items():
                where = self._catalogue.files[self._catalogue.pieces[number][0].file].origin
                state.lose(
                    state.members[name],
                    f"it cannot read {where} from the store, and the driver can: {why}",
                )
            state.news.notify_all()

    def handle_failure(self, number: int, error: FetchError) -> None:
        """End the run if the driver itself finds an object gone, or cannot read it for too long."""
        state = self._state
        with state.news:
            fatal = self._judge_failure(number, error.status, str(error))
            state.fatal = fatal or state.fatal
            state.news.notify_all()

    def _judge_failure(self, number: int, status: int, why: str) -> errors.MillraceError | None:
        """Return the error that ends the run; None while the piece is tried again."""
        where = self._describe_origins(number)
        if status in FINAL_STATUSES:
            return errors.ChangedError(
                f"{where} was replaced or removed while it was being read ({status}), so the run "
                "has stopped rather than mix two versions. Run it again for what is there now."
            )
        now = time.monotonic()
        since = self._failing.setdefault(number, now)
        if now - since <= self._store_timeout:
            return None
        kind = errors.DeniedError if status in _DENIED_STATUSES else errors.UnavailableError
        return kind(
            f"{where} could not be read for {now - since:.0f} s ({why}). Run it again when the "
            "store answers: what is on the nodes stays."
        )

    def _describe_origins(self, number: int) -> str:
        files = {segment.file for segment in self._catalogue.pieces[number]}
        origins = sorted({self._catalogue.files[file].origin for file in files})
        if len(origins) == 1:
            return origins[0]
        return f"{origins[0]} or one of {len(origins)} beside it"
