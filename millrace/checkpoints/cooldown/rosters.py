"""Rosters: the members that take part in the end of an epoch, the same for all."""

import secrets
import time
from collections.abc import Callable, Collection
from datetime import timedelta

from millrace import errors
from millrace.checkpoints.cooldown.epoch_records import find_epoch_end
from millrace.checkpoints.cooldown.membership import Membership
from millrace.digest import compute_digest, get_hex
from millrace.keys.cooldowns import CooldownKeys
from millrace.keys.members import check_member_name
from millrace.records import commit_once, fetch
from millrace.schemas.checkpoint import Roster
from millrace.storage import Store

_POLL_INTERVAL = 1.0  # seconds
_OWNER_TIMEOUT = timedelta(hours=2)  # longest wait of members for their owner's roster
_MAX_MEMBERS = 4096  # members of a roster


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


def check_seed(seed: int | None) -> None:
    """Check that a roster can have a seed; None is a random one.

    Raises:
        ConfigurationError: The seed is not an integer of 64 bits.
    """
    if seed is not None and not 0 <= seed < 1 << 64:
        raise errors.ConfigurationError(
            f"The seed {seed} of the order of the checkpointers is not one of 64 bits: give one "
            f"from 0 to {(1 << 64) - 1}."
        )


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
    seed = int(get_hex(compute_digest(f"{membership.job} {epoch}".encode()))[:16], 16)
    return make_roster(
        membership.job, epoch, {*membership.census.find_holders(), membership.member}, seed
    )
