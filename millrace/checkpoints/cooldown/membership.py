"""Members of a job: their leases, the roster of an epoch, and the members' votes.

A lease shows that a member lives. The roster lists the members that take part in the end of an
epoch. Records that cannot be read, or that do not match their keys, count as missing. They raise no
error.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Self, TypeVar

from millrace import errors
from millrace.checkpoints.find import read_checkpoint
from millrace.digest import compute_sha256
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.cooldowns import CooldownKeys
from millrace.keys.members import check_member_name, make_member_lease, make_member_scope
from millrace.lease import Census, Heartbeat, HeldLease, Holder, Lease, StoreClock, await_lease
from millrace.records import commit_once, fetch
from millrace.schemas.checkpoint import (
    CooldownOutcome,
    CooldownRecord,
    EpochRecord,
    LateVote,
    Roster,
    Vote,
)
from millrace.storage import Store, exists

R = TypeVar("R", Vote, CooldownRecord, LateVote)

_GROUP = "members"
_TTL = timedelta(seconds=30)
_POLL_INTERVAL = 1.0  # seconds
_OWNER_TIMEOUT = timedelta(hours=2)  # longest wait of members for their owner's roster
_CONCURRENCY = 8  # requests
_MAX_MEMBERS = 4096  # members of a roster


class Membership:
    """Membership in a job, as a context: a lease and its heartbeat.

    The end of the context ends the membership. A killed member counts as dead after ``ttl`` without
    a heartbeat.

    Args:
        store: Store that the member writes to.
        job: Name of the job.
        member: Name of the member, unique in the job, and the same after a restart.
        ttl: Time without a heartbeat after which a member counts as dead; at least 3 seconds.
        reads: Store that can read the whole job, for a confined member: the credentials of
            ``store`` allow only the member's own prefixes. Then the owner of the job commits
            rosters, checkpoints and epochs (`millrace.checkpoints.watch_epoch_end`). By default
            the members commit them.

    Attributes:
        confined: Whether the member writes below its own prefixes only.
    """

    def __init__(
        self,
        store: Store,
        job: str,
        member: str,
        ttl: timedelta = _TTL,
        *,
        reads: Store | None = None,
    ) -> None:
        self.store, self.job, self.member, self.ttl = store, job, member, ttl
        self.reads, self.confined = reads or store, reads is not None
        self._keys = make_member_lease(job, member)
        self._stack = ExitStack()
        self.holder = Holder.this_process()

    def __enter__(self) -> Self:
        """Acquire the lease. The lease of a dead member with the same name must end first.

        Raises:
            ConflictError: A live member has the same name.
            DeniedError: The credentials may not write to the job.
        """
        with ExitStack() as stack:
            scope = make_member_scope(self.job, self.member)
            self.clock = StoreClock.read(self.store, scope, self.holder)
            self.census = make_census(self.reads, self.job, self.clock)
            lease = self._acquire_lease()
            stack.enter_context(Heartbeat(self.ttl)).keep(lease)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait_for_members(self, members: int, epoch: int, timeout: timedelta) -> None:
        """Wait until a number of members live, this one included.

        The wait also ends when the epoch has a roster, since members of it may be dead by then.

        Args:
            members: Number of members.
            epoch: Number of the epoch that the members end.
            timeout: Longest wait.

        Raises:
            UnavailableError: Members are missing after the wait.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        roster = CooldownKeys(self.job, epoch).roster
        while (there := len(self.census.find_holders())) < members and not exists(
            self.reads, roster
        ):
            if time.monotonic() > deadline:
                raise errors.UnavailableError(
                    f"{there} of {members} members of {self.job} live after "
                    f"{timeout.total_seconds():g} s: start the others, or wait for fewer."
                )
            time.sleep(_POLL_INTERVAL)

    def _acquire_lease(self) -> Lease:
        got = await_lease(self.store, self._keys, self.holder, self.ttl, self.clock)
        if isinstance(got, HeldLease):
            raise errors.ConflictError(
                f"The member {self.member} of {self.job} already lives, on {got.holder.host} in "
                f"process {got.holder.pid}: give this member another name."
            )
        return got


def make_census(store: Store, job: str, clock: StoreClock) -> Census:
    """Return the census of a job's living members."""
    return Census(store, job, _GROUP, clock, strict=False)  # skips damaged records


def obtain_roster(
    membership: Membership,
    epoch: int,
    seed: int | None = None,
    *,
    cancelled: Callable[[], bool] = lambda: False,
) -> Roster:
    """Return the roster of an epoch.

    The first member commits a roster of the living members. A confined member waits for its owner's
    roster instead. If a roster is unreadable and the members are not confined, each member uses
    the living members.

    Args:
        membership: Membership of this member.
        epoch: Number of the epoch.
        seed: Seed of the order, of 64 bits; by default a random one.
        cancelled: Function that decides whether to stop the wait.

    Raises:
        UnavailableError: The owner has written no roster within two hours.
        StoppedError: The wait was cancelled.
    """
    store, job = membership.reads, membership.job
    deadline = time.monotonic() + _OWNER_TIMEOUT.total_seconds()
    while True:
        try:
            return read_roster(store, job, epoch)
        except errors.NotFoundError:
            if not membership.confined:
                break
        except errors.CorruptError:
            if not membership.confined:
                return _make_living_roster(membership, epoch)
        if find_epoch_end(store, job, epoch) is not None:  # without any living member
            return _make_living_roster(membership, epoch)
        if cancelled():
            raise errors.StoppedError(f"The end of epoch {epoch} of {job} was cancelled.")
        if time.monotonic() > deadline:
            raise errors.UnavailableError(
                f"The owner of {job} has not begun to end epoch {epoch} within {_OWNER_TIMEOUT}: "
                "run the flow `cooldown` for this job, with the names of its members."
            )
        time.sleep(_POLL_INTERVAL)
    members = {*membership.census.find_holders(), membership.member}
    try:
        commit_roster(membership.store, job, epoch, members, seed)
        return read_roster(store, job, epoch)
    except errors.CorruptError:
        return _make_living_roster(membership, epoch)


def commit_roster(
    store: Store, job: str, epoch: int, members: Collection[str], seed: int | None = None
) -> None:
    """Commit the roster of an epoch, unless the epoch has one.

    Raises:
        CorruptError: The existing roster cannot be read.
    """
    commit_once(store, CooldownKeys(job, epoch).roster, make_roster(job, epoch, members, seed))


def make_roster(job: str, epoch: int, members: Collection[str], seed: int | None = None) -> Roster:
    """Return a roster of some members, with a random seed by default."""
    seed = secrets.randbits(64) if seed is None else seed
    return Roster(job=job, epoch=epoch, members=tuple(sorted(members)), seed=seed)


def read_roster(store: Store, job: str, epoch: int) -> Roster:
    """Return the roster of an epoch.

    Raises:
        NotFoundError: The epoch has no roster.
        CorruptError: The roster is damaged, or belongs to another epoch.
    """
    key = CooldownKeys(job, epoch).roster
    found = fetch(store, key, Roster)
    names = found.members
    right = (found.job, found.epoch) == (job, epoch) and 0 <= found.seed < 1 << 64
    if not right or not 0 < len(names) <= _MAX_MEMBERS or tuple(sorted(set(names))) != names:
        raise errors.CorruptError(f"{store.make_url(key)} is not the roster of epoch {epoch}.")
    try:
        for name in names:
            check_member_name(name)
    except errors.ConfigurationError as error:
        raise errors.CorruptError(f"{store.make_url(key)}: {error}") from error
    return found


def _make_living_roster(membership: Membership, epoch: int) -> Roster:
    """Return a roster of the living members, which is equal on members that see the same ones."""
    seed = int(compute_sha256(f"{membership.job} {epoch}".encode())[:16], 16)
    return make_roster(
        membership.job, epoch, {*membership.census.find_holders(), membership.member}, seed
    )


class VoteTally:
    """Votes and results of an epoch's members, each read once below the member's own prefix.

    An unreadable record, or one that names another member, counts as a vote for no content, or as a
    failure. Only members of the roster are read. There is no listing, so other keys cost nothing.

    Args:
        store: Store that the job is read from.
        keys: Keys of the epoch's end.

    Attributes:
        claims: Vote of each member for a content.
        late: Vote of each member to go on without a checkpoint.
        ended: Result of each member.
    """

    def __init__(self, store: Store, keys: CooldownKeys) -> None:
        self._store, self._keys = store, keys
        self.claims: dict[str, Vote] = {}
        self.late: dict[str, LateVote] = {}
        self.ended: dict[str, CooldownRecord] = {}

    def read_new(
        self, members: Collection[str], *, results: bool = True, late: bool = False
    ) -> None:
        """Read new records. One GET for each record that was missing before.

        Args:
            members: Names of the roster.
            results: Whether to read results too.
            late: Whether to read votes to go on without a checkpoint too.
        """
        with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="statements") as pool:
            new = [name for name in members if name not in self.claims]
            self.claims |= _select_found(new, pool.map(self._read_vote, new))
            new = [name for name in members if results and name not in self.ended]
            self.ended |= _select_found(new, pool.map(self._read_result, new))
            new = [name for name in members if late and name not in self.late]
            self.late |= _select_found(new, pool.map(self._read_late_vote, new))

    def _read_vote(self, member: str) -> Vote | None:
        nothing = Vote(member=member, step=-1, root="", rest=member, size=0)
        return self._read_record(self._keys.vote(member), nothing)

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
        return self._read_record(self._keys.result(member), failed)

    def _read_late_vote(self, member: str) -> LateVote | None:
        unread = LateVote(member=member, why="Its record cannot be read.")
        return self._read_record(self._keys.late(member), unread)

    def list_voters(self, members: Collection[str], living: Collection[str]) -> set[str]:
        """Return the members that count for a majority: those that live or have voted."""
        return set(members) & (set(living) | self.claims.keys())

    def find_favourite(self) -> tuple[Vote | None, int]:
        """Return a vote that most members share, and the number of those members."""
        votes = Counter(claim.agreement_key for claim in self.claims.values() if claim.root)
        if not votes:
            return None, 0
        said, count = votes.most_common(1)[0]
        return next(claim for claim in self.claims.values() if claim.agreement_key == said), count

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


def read_epoch(store: Store, job: str, epoch: int) -> EpochRecord:
    """Return the record of an epoch's end, without a check of its checkpoint.

    Raises:
        NotFoundError: There is no record.
        CorruptError: The record is damaged, or belongs to another epoch.
    """
    key = CheckpointKeys(job).epoch(epoch)
    found = fetch(store, key, EpochRecord)
    if (found.job, found.epoch) != (job, epoch):
        raise errors.CorruptError(
            f"{store.make_url(key)} is not the end of epoch {epoch} of {job}."
        )
    return found


def find_epoch_end(store: Store, job: str, epoch: int) -> EpochRecord | None:
    """Return the valid record of an epoch's end, or None.

    A record is not valid if it cannot be read, or names a checkpoint that does not exist.
    """
    try:
        found = read_epoch(store, job, epoch)
    except (errors.NotFoundError, errors.CorruptError):
        return None
    if found.root is None or has_checkpoint(store, job, found.step, found.root):
        return found
    return None


def has_checkpoint(store: Store, job: str, step: int, root: str) -> bool:
    """Decide whether a checkpoint with this content is committed at a step."""
    try:
        return read_checkpoint(store, job, step).root == root
    except (errors.NotFoundError, errors.CorruptError):
        return False


def commit_epoch(store: Store, record: EpochRecord) -> EpochRecord:
    """Commit the end of an epoch, and return the valid record of its end.

    If an invalid record exists, the new record counts without a commit, since every reader can
    derive it from the checkpoint and the votes.
    """
    try:
        commit = commit_once(store, CheckpointKeys(record.job).epoch(record.epoch), record)
    except errors.CorruptError:
        return record
    return record if commit.mine else find_epoch_end(store, record.job, record.epoch) or record


def derive_epoch(store: Store, job: str, epoch: int) -> EpochRecord | None:
    """Derive the end of an epoch from the members' votes, for epochs with a damaged record.

    The epoch has ended if more than half of the roster voted for one content, and its checkpoint is
    committed. Otherwise the result is None.
    """
    try:
        roster = read_roster(store, job, epoch)
    except (errors.NotFoundError, errors.CorruptError):
        return None
    heard = VoteTally(store, CooldownKeys(job, epoch))
    heard.read_new(roster.members)
    said = heard.find_majority(roster.members, roster.members)
    if said is None or not has_checkpoint(store, job, said.step, said.root):
        return None
    return said.make_epoch_record(job, epoch)
