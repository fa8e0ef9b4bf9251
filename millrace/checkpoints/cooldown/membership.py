"""Members of a job: leases tell who lives, and each member's records tell what it has.

Who takes part in the end of an epoch is the roster. Records that cannot be read, or that are not
what their names say, count as if they were not there: damage and junk raise no error here.
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
_OWNER_TIMEOUT = timedelta(hours=2)  # that members wait for their owner to write the roster
_CONCURRENCY = 8  # requests
_MAX_MEMBERS = 4096  # members of a roster


class Membership:
    """A member of a job, from entering the context to leaving it: a lease and its heartbeat.

    Who leaves is withdrawn; who is killed is dead once nothing was heard of it for ``ttl``.

    Args:
        store: Store that the member writes to.
        job: Name of the job.
        member: Name that no other member has; the same after a restart.
        ttl: Time without a heartbeat after which a member counts as dead; at least 3 seconds.
        reads: Store that reads the whole job, where the credentials of ``store`` reach the
            member's own prefixes only. Then the owner of the job writes rosters, checkpoints and
            epochs, from what the members have written (`millrace.checkpoints.watch_epoch_end`).
            Left out, the members write them.

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
        """Take the lease; wait for that of a dead member of this name to end.

        Raises:
            ConflictError: A member of this name lives.
            DeniedError: The credentials may not write here.
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
        """Wait until so many members are there, this one among them.

        Once somebody has seen them and written down who ends the epoch, nobody waits any more:
        some may be dead by then.

        Args:
            members: How many.
            epoch: The epoch that they are to end.
            timeout: For how long.

        Raises:
            UnavailableError: They are not.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        roster = CooldownKeys(self.job, epoch).roster
        while (there := len(self.census.find_holders())) < members and not exists(
            self.reads, roster
        ):
            if time.monotonic() > deadline:
                raise errors.UnavailableError(
                    f"{there} of {members} members of {self.job} are there after "
                    f"{timeout.total_seconds():g} s: start the others, or ask for fewer."
                )
            time.sleep(_POLL_INTERVAL)

    def _acquire_lease(self) -> Lease:
        got = await_lease(self.store, self._keys, self.holder, self.ttl, self.clock)
        if isinstance(got, HeldLease):
            raise errors.ConflictError(
                f"{self.member} of {self.job} lives, on {got.holder.host} in process "
                f"{got.holder.pid}: give this one another name."
            )
        return got


def make_census(store: Store, job: str, clock: StoreClock) -> Census:
    """Return the census of a job's living members."""
    return Census(store, job, _GROUP, clock, strict=False)  # one cannot stop the others


def obtain_roster(
    membership: Membership,
    epoch: int,
    seed: int | None = None,
    *,
    cancelled: Callable[[], bool] = lambda: False,
) -> Roster:
    """Return who takes part in the end of an epoch.

    The first member that asks writes down who lives. A confined member waits for the roster of its
    owner instead. Where a roster cannot be read and members write it themselves, each member takes
    the living for the roster.

    Args:
        membership: Membership of the member that asks.
        epoch: Number of the epoch.
        seed: Seed of the order, of 64 bits; by default one is drawn.
        cancelled: Whether to stop waiting.

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
        if find_epoch_end(store, job, epoch) is not None:  # before any member was there
            return _make_living_roster(membership, epoch)
        if cancelled():
            raise errors.StoppedError(f"The end of epoch {epoch} of {job} was called off.")
        if time.monotonic() > deadline:
            raise errors.UnavailableError(
                f"The owner of {job} has not begun to end epoch {epoch} within {_OWNER_TIMEOUT}: "
                "run `cooldown` for it, with the names of its members."
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
    """Write down who takes part in the end of an epoch, unless a roster is there.

    Raises:
        CorruptError: What is there is no roster.
    """
    commit_once(store, CooldownKeys(job, epoch).roster, make_roster(job, epoch, members, seed))


def make_roster(job: str, epoch: int, members: Collection[str], seed: int | None = None) -> Roster:
    """Return a roster of these members, with a seed of chance where none is given."""
    seed = secrets.randbits(64) if seed is None else seed
    return Roster(job=job, epoch=epoch, members=tuple(sorted(members)), seed=seed)


def read_roster(store: Store, job: str, epoch: int) -> Roster:
    """Return the roster of an epoch.

    Raises:
        NotFoundError: There is none.
        CorruptError: What is there is not the roster of this epoch.
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
    """Return the living members as a roster: the same on all members that see the same living."""
    seed = int(compute_sha256(f"{membership.job} {epoch}".encode())[:16], 16)
    return make_roster(
        membership.job, epoch, {*membership.census.find_holders(), membership.member}, seed
    )


class VoteTally:
    """Statements of an epoch's members, each read once from below the member's own prefix.

    A record that cannot be read, or names another member, is a vote for nothing, or a failure. Only
    members of the roster are heard: no listing is made, so that names of others cost nothing.

    Args:
        store: Store that the job is read from.
        keys: Keys of the epoch's end.

    Attributes:
        claims: Content that each member states.
        late: Votes to go on without a checkpoint.
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
        """Read what is new. One GET for each record that was not there before.

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
        """Return the members whose votes decide: those that live, and those that have voted."""
        return set(members) & (set(living) | self.claims.keys())

    def find_favourite(self) -> tuple[Vote | None, int]:
        """Return a vote that most members share, and the number of those members."""
        votes = Counter(claim.agreement_key for claim in self.claims.values() if claim.root)
        if not votes:
            return None, 0
        said, count = votes.most_common(1)[0]
        return next(claim for claim in self.claims.values() if claim.agreement_key == said), count

    def find_majority(self, members: Collection[str], living: Collection[str]) -> Vote | None:
        """Return the statement of more than half of the members; None if there is no such one."""
        favourite, count = self.find_favourite()
        return favourite if 2 * count > len(self.list_voters(members, living)) else None

    def has_late_majority(self, members: Collection[str], living: Collection[str]) -> bool:
        """Decide whether most of the members that still live and work vote to go on without."""
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
    """Return the record of an epoch's end. Its checkpoint is not looked for.

    Raises:
        NotFoundError: There is none.
        CorruptError: What is there is no record of this epoch's end.
    """
    key = CheckpointKeys(job).epoch(epoch)
    found = fetch(store, key, EpochRecord)
    if (found.job, found.epoch) != (job, epoch):
        raise errors.CorruptError(
            f"{store.make_url(key)} is not the end of epoch {epoch} of {job}."
        )
    return found


def find_epoch_end(store: Store, job: str, epoch: int) -> EpochRecord | None:
    """Return the record that has ended an epoch; None if none has.

    A record that cannot be read, or names a checkpoint that is not there, has ended nothing.
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
    """Commit the end of an epoch; return the record that has ended it.

    Where a record stands that has ended nothing, this one counts without being committed: every
    reader can derive it from the checkpoint and the votes.
    """
    try:
        commit = commit_once(store, CheckpointKeys(record.job).epoch(record.epoch), record)
    except errors.CorruptError:
        return record
    return record if commit.mine else find_epoch_end(store, record.job, record.epoch) or record


def derive_epoch(store: Store, job: str, epoch: int) -> EpochRecord | None:
    """Return how an epoch has ended, by the votes of its members; None if it has not.

    It has ended with the content that more than half of the roster state, once its checkpoint is
    committed. For epochs whose own record is damaged.
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
