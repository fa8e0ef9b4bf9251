"""Pieces that the driver reads itself: a sample, disputed pieces, failing and wrong reads.

This module owns which pieces the driver reads, and the time since which the store fails each piece.
"""

import http.client
import random
import time
from collections.abc import Callable

from millrace import errors
from millrace.digest import Algorithm, get_algorithm
from millrace.swarm.catalogue import Catalogue
from millrace.swarm.driving.members import Member
from millrace.swarm.driving.run_state import RunState
from millrace.swarm.piece_readers import FINAL_STATUSES, FetchError
from millrace.swarm.progress_events import NodeMisread

_DENIED_STATUSES = {http.client.UNAUTHORIZED, http.client.FORBIDDEN}
_SAMPLE_BYTES = 16 << 20  # bytes of objects without a digest that the driver reads at most
_OWN_SHARE = 0.25  # of the timeout of the store: reads of the driver itself fail for so long


class PieceChecks:
    """Checks of single pieces by the driver.

    Args:
        state: Members and tracker of the run.
        catalogue: Files of the run.
        store_timeout: Seconds that reads from the store may keep failing.
        request: Starts to read a piece, if the digest is still needed (`is_useful`).
    """

    def __init__(
        self,
        state: RunState,
        catalogue: Catalogue,
        store_timeout: float,
        request: Callable[[int], None],
    ) -> None:
        self._state, self._catalogue = state, catalogue
        self._store_timeout, self._request = store_timeout, request
        self._sample: set[int] = set()
        self._failing: dict[int, float] = {}  # piece → time of the first failed read in a row
        self._own_failing: dict[int, float] = {}  # the same of the driver's own reads
        self._reports: dict[int, dict[str, str]] = {}  # piece → node → its reason for a failed read
        self._doubters: dict[int, set[str]] = {}  # piece → nodes that read other bytes
        self._intact: set[int] = set()  # pieces that have the expected digest in the store
        self._accused: set[str] = set()  # nodes that read other bytes than the store has

    def request_sample(self, pieces: list[int], sizes: list[int]) -> None:
        """Request a random sample of the pieces that no digest proves, up to `_SAMPLE_BYTES`.

        A piece may be larger than that, so one is requested in any case. The sample detects nodes
        that send the same wrong votes. It also checks the reads of a single node, which no other
        node confirms.

        Args:
            pieces: Pieces that no digest proves.
            sizes: Bytes of each piece of the run.
        """
        lacked = [number for number in pieces if self._state.tracker.is_lacked(number)]
        random.SystemRandom().shuffle(lacked)
        left = _SAMPLE_BYTES
        for number in lacked:
            if self._sample and sizes[number] > left:
                continue
            left -= sizes[number]
            self._sample.add(number)
            self._request(number)

    def note_read(self, number: int) -> None:
        """Note that a node has read a piece from the store."""
        self._failing.pop(number, None)

    def note_failure(self, member: Member, number: int, status: int, reason: str) -> None:
        """Note that a node could not read a piece from the store.

        The driver reads the piece too before the run ends: one node alone cannot end a run.

        Args:
            member: Node.
            number: Piece.
            status: HTTP status of the refusal; 0 if there was none.
            reason: Reason that the node gave.
        """
        now = time.monotonic()
        since = self._failing.setdefault(number, now)
        if status in FINAL_STATUSES or now - since > self._store_timeout:
            self._reports.setdefault(number, {})[member.node.id] = reason
            self._request(number)

    def note_wrong_read(self, member: Member, number: int) -> None:
        """Note that a node has read a piece whose digest is known, and that its bytes are wrong.

        The driver reads the piece too, once: the node, or the object, is damaged.
        """
        if number in self._intact:
            self._blame(member, number)
            return
        self._doubters.setdefault(number, set()).add(member.node.id)
        self._request(number)

    def is_useful(self, number: int) -> bool:
        """Tell whether a piece is of the sample or disputed, or fails or is wrong for a node."""
        members = self._state.members
        with self._state.news:
            if number in self._sample or self._state.tracker.is_disputed(number):
                return True
            names = [*self._reports.get(number, ()), *self._doubters.get(number, ())]
            return any(not members[name].is_lost for name in names)

    def is_expected(self, number: int, digest: str) -> bool:
        """Tell whether a digest is the known or decided one of a piece, or a vote."""
        with self._state.news:
            return self._state.tracker.is_expected(number, digest)

    def handle_digest(self, number: int, digest: str) -> None:
        """Settle a piece that the driver has read, and give up nodes that could not read it."""
        state = self._state
        with state.news:
            self._failing.pop(number, None)
            self._own_failing.pop(number, None)
            known = state.tracker.get_known_digest(number)
            if known and digest != known:
                state.fatal = make_corruption_error(self._describe_origins(number), known)
                state.news.notify_all()
                return
            self._intact.add(number)
            for name in sorted(self._doubters.pop(number, ())):
                self._blame(state.members[name], number)
            state.settle({number: digest})
            for name, reason in self._reports.pop(number, {}).items():
                origin = self._catalogue.files[self._catalogue.pieces[number][0].file].origin
                state.lose(
                    state.members[name],
                    f"it cannot read {origin} from the store, and the driver can: {reason}",
                )
            state.news.notify_all()

    def handle_failure(self, number: int, error: FetchError) -> None:
        """End the run if an object is gone, or if reads have failed for too long."""
        state = self._state
        with state.news:
            fatal = self._judge_failure(number, error.status, str(error))
            state.fatal = fatal or state.fatal
            state.news.notify_all()

    def _blame(self, member: Member, number: int) -> None:
        """Note that a node read other bytes than the store has."""
        state = self._state
        if member.node.id not in self._accused:
            self._accused.add(member.node.id)
            name, origin = state.members.format_name(member.node), self._describe_origins(number)
            state.report_progress(NodeMisread(node=name, piece=number, origin=origin))
        state.count_wrong_read(member)

    def _judge_failure(self, number: int, status: int, reason: str) -> errors.MillraceError | None:
        """Return the error that ends the run; None if the read is tried again."""
        origins = self._describe_origins(number)
        if status in FINAL_STATUSES:
            return errors.ChangedError(
                f"{origins} was replaced or removed while it was being read ({status}), so the run "
                "has stopped: no node has a mix of two versions. Run it again for the new version."
            )
        now = time.monotonic()
        since = self._failing.setdefault(number, now)
        own = self._own_failing.setdefault(number, now)  # a node may report anything
        if now - since <= self._store_timeout or now - own <= _OWN_SHARE * self._store_timeout:
            return None
        kind = errors.DeniedError if status in _DENIED_STATUSES else errors.UnavailableError
        return kind(
            f"{origins} could not be read for {now - since:.0f} s ({reason}). Run it again when "
            "the store answers: the nodes keep the data that they have."
        )

    def _describe_origins(self, number: int) -> str:
        files = {segment.file for segment in self._catalogue.pieces[number]}
        origins = sorted({self._catalogue.files[file].origin for file in files})
        if len(origins) == 1:
            return origins[0]
        return f"{origins[0]} or another of the {len(origins)} objects of its piece"


def make_corruption_error(origin: str, digest: str) -> errors.CorruptError:
    """Return the error that ends a run whose object does not have its digest in the store."""
    if get_algorithm(digest) is Algorithm.MD5:
        return errors.CorruptError(
            f"{origin} does not have the MD5 of its ETag, also when it is read again. It has no "
            "final name on any node. Upload it again. If the ETags of this store are not MD5s, "
            "request the object with its `sha256`."
        )
    return errors.CorruptError(
        f"{origin} does not have its digest {digest} in the store, also when it is read again. "
        "It has no final name on any node. Upload it again, or correct the record with the digest."
    )
