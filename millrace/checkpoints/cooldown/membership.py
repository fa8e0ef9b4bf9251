"""Members of a job: their leases show that they live."""

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Self

from millrace import errors
from millrace.audit import ProbeVerdict, probe
from millrace.checkpoints.destinations.base import Destination
from millrace.checkpoints.destinations.bucket import try_writes
from millrace.keys.cooldowns import CooldownKeys
from millrace.keys.members import make_member_lease, make_member_scope
from millrace.lease import Census, Heartbeat, HeldLease, Holder, Lease, StoreClock, await_lease
from millrace.storage import Store, exists

log = logging.getLogger(__name__)

_GROUP = "members"
_TTL = timedelta(seconds=30)
_POLL_INTERVAL = 1.0  # seconds


@dataclass(frozen=True, slots=True)
class ExpectedUpload:
    """Upload of a checkpoint by members together.

    Attributes:
        size: Size of the checkpoint in bytes.
        members: Number of members that upload it.
        within: Longest time of the upload; None for any.
    """

    size: int = 0
    members: int = 1
    within: timedelta | None = None


class Membership:
    """Membership in a job, as a context: a lease and its heartbeat.

    Who cannot save does not join: the begin of the context creates, reads, overwrites and deletes
    a sample of 4 MiB. The end of the context ends the membership. A killed member counts as dead
    after ``ttl`` without a heartbeat.

    Args:
        store: Store that the member writes to.
        job: Name of the job.
        member: Name of the member, unique in the job, and the same after a restart.
        ttl: Time without a heartbeat after which a member counts as dead; at least 3 seconds, at
            most 1 hour.
        reads: Store that can read the whole job, for a confined member: the credentials of
            ``store`` allow only the member's own prefixes. Then the owner of the job commits
            rosters, checkpoints and epochs (`millrace.checkpoints.watch_epoch_end`). By default
            the members commit them.
        expected: Upload that the destination must have space for, and should have time for.
        destination: Destination of the checkpoints, such as a repository of the Hub; by default
            ``store``. The members still meet in ``store``. A confined member has none.

    Attributes:
        confined: Whether the member writes below its own prefixes only.

    Raises:
        ConfigurationError: A confined member has a destination.
    """

    def __init__(
        self,
        store: Store,
        job: str,
        member: str,
        ttl: timedelta = _TTL,
        *,
        reads: Store | None = None,
        expected: ExpectedUpload | None = None,
        destination: Destination | None = None,
    ) -> None:
        if reads is not None and destination is not None:
            raise errors.ConfigurationError(
                "A confined member has no other destination: the owner of the job commits its "
                "checkpoints in the bucket. Copy them from there with `millrace checkpoint save`."
            )
        self.destination = destination
        self._expected = expected or ExpectedUpload()
        self.store, self.job, self.member, self.ttl = store, job, member, ttl
        self.reads, self.confined = reads or store, reads is not None
        self._keys = make_member_lease(job, member)
        self._stack = ExitStack()
        self.holder = Holder.describe_this_process()

    def __enter__(self) -> Self:
        """Acquire the lease. The lease of a dead member with the same name must end first.

        Raises:
            ConflictError: A live member has the same name.
            DeniedError: The credentials may not write, overwrite or delete objects of the member.
            NoSpaceError: The folder has too little space for the checkpoint.
            UnavailableError: The store does not answer.
        """
        scope = make_member_scope(self.job, self.member)
        self._check_destination(scope if self.confined else self.job)
        with ExitStack() as stack:
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

    def _check_destination(self, scope: str) -> None:
        """Refuse to join without what a save needs. An upload that takes long is only warned of."""
        own, expected = _MemberDestination(self.store, scope), self._expected
        if self.destination is None:
            self._check_upload(own, expected)
        else:
            self._check_upload(own, ExpectedUpload())  # the bucket gets records only
            self._check_upload(self.destination, replace(expected, members=1))

    def _check_upload(
        self, destination: "Destination | _MemberDestination", expected: ExpectedUpload
    ) -> None:
        found = probe(
            destination,
            self.job,
            size=expected.size,
            members=expected.members,
            within=expected.within,
            timeout=self.store.spec.retry_timeout,
        )
        if found.verdict is ProbeVerdict.TOO_SLOW:
            log.warning("%s: %s", destination.url, found.reason)
        else:
            found.check(destination.url)

    def _acquire_lease(self) -> Lease:
        got = await_lease(self.store, self._keys, self.holder, self.ttl, self.clock)
        if isinstance(got, HeldLease):
            raise errors.ConflictError(
                f"The member {self.member} of {self.job} already lives, on {got.holder.host} in "
                f"process {got.holder.pid}: give this member another name."
            )
        return got


@dataclass(frozen=True, slots=True)
class _MemberDestination:
    """Destination of the uploads of a member.

    Attributes:
        store: Store that the member writes to.
        scope: Scope in which it may write.
    """

    store: Store
    scope: str

    @property
    def url(self) -> str:
        """URL of the scope."""
        return self.store.make_url(self.scope)

    def try_save(self, job: str, *, timeout: timedelta) -> float:
        """Create, read, overwrite and delete a sample."""
        return try_writes(self.store.with_retry_timeout(timeout), self.scope)


def make_census(store: Store, job: str, clock: StoreClock) -> Census:
    """Return the census of a job's living members."""
    return Census(store, job, _GROUP, clock, strict=False)  # skips damaged records
