"""Votes and results of the members of an epoch, as another process reads them.

A record that cannot be read, or that names another member, raises no error.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from millrace import errors
from millrace.checkpoints.cooldown.epoch_records import has_checkpoint
from millrace.checkpoints.cooldown.rosters import read_roster
from millrace.keys.cooldowns import CooldownKeys
from millrace.records import fetch
from millrace.schemas.checkpoint import (
    CooldownOutcome,
    CooldownRecord,
    EpochRecord,
    LateVote,
    Vote,
)
from millrace.storage import Store

R = TypeVar("R", Vote, CooldownRecord, LateVote)

_CONCURRENCY = 8  # requests


class VoteTally:
    """Votes and results of an epoch's members, below each member's own prefix.

    A vote for a content is read once. Results and late votes are read again, since a member that
    ends the epoch again deletes those of its earlier call.

    An unreadable record, or one that names another member, counts as a vote for no content, or as a
    failure. Only members of the roster are read. There is no listing, so other keys cost nothing.

    Args:
        store: Store that the job is read from.
        keys: Keys of the epoch's end.

    Attributes:
        votes: Vote of each member for a content.
        late: Vote of each member to go on without a checkpoint.
        ended: Result of each member.
    """

    def __init__(self, store: Store, keys: CooldownKeys) -> None:
        self._store, self._keys = store, keys
        self.votes: dict[str, Vote] = {}
        self.late: dict[str, LateVote] = {}
        self.ended: dict[str, CooldownRecord] = {}

    def read_new(
        self, members: Collection[str], *, results: bool = True, late: bool = False
    ) -> None:
        """Read new votes, and all results and late votes. One GET for each record.

        Args:
            members: Names of the roster.
            results: Whether to read results too.
            late: Whether to read votes to go on without a checkpoint too.
        """
        with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="statements") as pool:
            new = [name for name in members if name not in self.votes]
            self.votes |= _select_found(new, pool.map(self._read_vote, new))
            if results:
                self.ended = _select_found(members, pool.map(self._read_result, members))
            if late:
                self.late = _select_found(members, pool.map(self._read_late_vote, members))

    def _read_vote(self, member: str) -> Vote | None:
        nothing = Vote(member=member, step=-1, root="", rest=member, size=0)
        return self._read_record(self._keys.make_vote_key(member), nothing)

    def _read_result(self, member: str) -> CooldownRecord | None:
        failed = CooldownRecord(
            member=member,
            outcome=CooldownOutcome.FAILED,
            reason="Its record cannot be read.",
            sent=0,
            checked=0,
            replaced=0,
            seconds=0.0,
        )
        return self._read_record(self._keys.make_result_key(member), failed)

    def _read_late_vote(self, member: str) -> LateVote | None:
        unread = LateVote(member=member, reason="Its record cannot be read.")
        return self._read_record(self._keys.make_late_vote_key(member), unread)

    def list_voters(self, members: Collection[str], living: Collection[str]) -> set[str]:
        """Return the members that count for a majority: those that live or have voted."""
        return set(members) & (set(living) | self.votes.keys())

    def find_favourite(self) -> tuple[Vote | None, int]:
        """Return a vote that most members share, and the number of those members."""
        votes = Counter(vote.agreement_key for vote in self.votes.values() if vote.root)
        if not votes:
            return None, 0
        key, count = votes.most_common(1)[0]
        return next(vote for vote in self.votes.values() if vote.agreement_key == key), count

    def find_majority(self, members: Collection[str], living: Collection[str]) -> Vote | None:
        """Return the vote of more than half of the members; None without such a majority."""
        favourite, count = self.find_favourite()
        return favourite if 2 * count > len(self.list_voters(members, living)) else None

    def has_late_majority(self, members: Collection[str], living: Collection[str]) -> bool:
        """Decide whether most members that live and work voted to go on without a checkpoint."""
        working = (set(members) & set(living)) - self.ended.keys()
        late = working & self.late.keys()
        return 2 * len(late) > len(working)

    def _read_record(self, key: str, otherwise: R) -> R | None:
        try:
            found = fetch(self._store, key, type(otherwise))
        except errors.NotFoundError:
            return None
        except errors.CorruptError:
            return otherwise
        return found if found.member == otherwise.member else otherwise


def _select_found(names: Collection[str], records: Iterable[R | None]) -> dict[str, R]:
    pairs = zip(names, records, strict=True)
    return {name: record for name, record in pairs if record is not None}


def derive_epoch(store: Store, job: str, epoch: int) -> EpochRecord | None:
    """Derive the end of an epoch from the members' votes, for epochs with a damaged record.

    The epoch has ended if more than half of the roster voted for one content, and its checkpoint is
    committed. Otherwise the result is None.
    """
    try:
        roster = read_roster(store, job, epoch)
    except (errors.NotFoundError, errors.CorruptError):
        return None
    tally = VoteTally(store, CooldownKeys(job, epoch))
    tally.read_new(roster.members)
    favourite = tally.find_majority(roster.members, roster.members)
    if favourite is None or not has_checkpoint(store, job, favourite.step, favourite.root):
        return None
    return favourite.make_epoch_record(job, epoch)
