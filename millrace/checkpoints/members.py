"""The members of a job: who takes part, by leases in the bucket, and who of them lives."""

import secrets
import time
from collections import Counter
from collections.abc import Collection
from contextlib import ExitStack
from datetime import timedelta
from typing import Self, TypeVar

from millrace import errors
from millrace.keys import CheckpointKeys, CooldownKeys, member_lease
from millrace.lease import Census, Heartbeat, Held, Holder, Lease, StoreClock, await_lease
from millrace.models.checkpoint import Claim, Ended, Epoch, Outcome, Roster
from millrace.records import commit_once, fetch
from millrace.storage import Store, exists, list_objects

R = TypeVar("R", Claim, Ended)

_GROUP = "members"
_TTL = timedelta(seconds=30)
_LOOK = 1.0  # seconds


class Membership:
    """A member of a job, from entering the context to leaving it: a lease and its heartbeat.

    Who leaves is withdrawn; who is killed is dead once nothing was heard of it for ``ttl``.

    Args:
        store: The bucket that the members meet in.
        job: Which job.
        member: A name that no other member has; the same after a restart.
        ttl: For how long without a heartbeat it is believed to live; at least three seconds.
    """

    def __init__(self, store: Store, job: str, member: str, ttl: timedelta = _TTL) -> None:
        self.store, self.job, self.member, self.ttl = store, job, member, ttl
        self._keys = member_lease(job, member)
        self._stack = ExitStack()
        self.holder = Holder.this_process()

    def __enter__(self) -> Self:
        """Take the lease; wait for that of a dead member of this name to end.

        Raises:
            ConflictError: A member of this name lives.
            DeniedError: The credentials may not write here.
        """
        with ExitStack() as stack:
            self.clock = StoreClock.read(self.store, self.job, self.holder)
            self.census = census_of(self.store, self.job, self.clock)
            lease = self._acquired()
            stack.enter_context(Heartbeat(self.ttl)).keep(lease)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def gather(self, members: int, epoch: int, patience: timedelta) -> None:
        """Wait until so many members are there, this one among them.

        Once somebody has seen them and written down who ends the epoch, nobody waits any more:
        some may be dead by then.

        Args:
            members: How many.
            epoch: The epoch that they are to end.
            patience: For how long.

        Raises:
            UnavailableError: They are not.
        """
        deadline = time.monotonic() + patience.total_seconds()
        roster = CooldownKeys(self.job, epoch).roster
        while (there := len(self.census.held())) < members and not exists(self.store, roster):
            if time.monotonic() > deadline:
                raise errors.UnavailableError(
                    f"{there} of {members} members of {self.job} are there after "
                    f"{patience.total_seconds():g} s: start the others, or ask for fewer."
                )
            time.sleep(_LOOK)

    def _acquired(self) -> Lease:
        got = await_lease(self.store, self._keys, self.holder, self.ttl, self.clock)
        if isinstance(got, Held):
            raise errors.ConflictError(
                f"{self.member} of {self.job} lives, on {got.holder.host} in process "
                f"{got.holder.pid}: give this one another name."
            )
        return got


def census_of(store: Store, job: str, clock: StoreClock) -> Census:
    """Who of a job's members lives."""
    return Census(store, job, _GROUP, clock, strict=False)  # one cannot stop the others


def roster_of(membership: Membership, epoch: int, seed: int | None = None) -> Roster:
    """Who takes part in the end of an epoch: the first who asks writes down who lives.

    Args:
        membership: Whoever asks.
        epoch: Which epoch.
        seed: Of 64 bits; by default one is drawn.
    """
    keys = CooldownKeys(membership.job, epoch)
    store = membership.store
    try:
        return fetch(store, keys.roster, Roster)
    except errors.NotFoundError:
        pass
    members = tuple(sorted({*membership.census.held(), membership.member}))
    roster = Roster(
        job=membership.job,
        epoch=epoch,
        members=members,
        seed=secrets.randbits(64) if seed is None else seed,
    )
    return commit_once(store, keys.roster, roster).record


class Statements:
    """What the members of an epoch have committed, each read once.

    A record that cannot be read, or speaks in another's name, is a vote for nothing, and a failure:
    one member cannot stop the others. What is not of a member is not read.

    Args:
        store: The bucket that the members meet in.
        keys: Of the epoch's end.

    Attributes:
        claims: What each says that the content is.
        ended: What it came to for each.
    """

    def __init__(self, store: Store, keys: CooldownKeys) -> None:
        self._store, self._keys = store, keys
        self.claims: dict[str, Claim] = {}
        self.ended: dict[str, Ended] = {}

    def hear(self, members: Collection[str]) -> None:
        """Read what is new of the roster's members. A listing, and a GET for each."""
        for stat in list_objects(self._store, self._keys.prefix):
            kind, member = self._keys.parse(stat.key) or ("", "")
            if member not in members:
                continue
            if kind == "claims" and member not in self.claims:
                nothing = Claim(member=member, step=-1, root="", rest=member, size=0)
                self.claims[member] = self._read(stat.key, nothing)
            elif kind == "ended" and member not in self.ended:
                failed = Ended(
                    member=member,
                    outcome=Outcome.FAILED,
                    reason="Its record cannot be read.",
                    sent=0,
                    checked=0,
                    replaced=0,
                    seconds=0.0,
                )
                self.ended[member] = self._read(stat.key, failed)

    def favourite(self) -> tuple[Claim | None, int]:
        """A claim of what most say, and how many say it."""
        votes = Counter(claim.said for claim in self.claims.values())
        if not votes:
            return None, 0
        said, count = votes.most_common(1)[0]
        return next(claim for claim in self.claims.values() if claim.said == said), count

    def _read(self, key: str, otherwise: R) -> R:
        try:
            found = fetch(self._store, key, type(otherwise))
        except errors.CorruptError:
            return otherwise
        return found if found.member == otherwise.member else otherwise


def moved_on(store: Store, job: str, epoch: int) -> Epoch | None:
    """The record that an epoch has ended; None if it has not."""
    try:
        return fetch(store, CheckpointKeys(job).epoch(epoch), Epoch)
    except errors.NotFoundError:
        return None
