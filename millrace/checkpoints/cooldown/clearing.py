"""Deletion of the votes of an epoch that cannot end.

Members that were killed after their votes can come back with another content, or under other names.
The votes stand then, and no living member has their content.
"""

from contextlib import suppress

from millrace import errors
from millrace.checkpoints.cooldown.epoch_records import find_epoch_end
from millrace.checkpoints.cooldown.membership import make_census
from millrace.checkpoints.cooldown.votes import VoteTally, derive_epoch
from millrace.keys.cooldowns import CooldownKeys
from millrace.keys.leases import MEMBERS
from millrace.keys.members import check_member_name
from millrace.lease import StoreClock
from millrace.storage import Store, delete, exists, list_folders


def clear_votes(
    store: Store, job: str, epoch: int, *, clock: StoreClock | None = None
) -> tuple[str, ...]:
    """Delete the roster, the votes and the results of an epoch that has not ended.

    Then the next members make a new roster, and vote again. No checkpoint and no file of one is
    deleted, and each step still has one content, since its metadata are committed once. Do not
    start members during the call: votes of that time may be deleted, and these members then wait
    for their time limit. A `watch_epoch_end` that began before the call keeps the old roster and
    votes: stop it too. A call that was killed can be repeated.

    Args:
        store: Store of the job, with credentials for the whole job.
        job: Name of the job.
        epoch: Number of the epoch.
        clock: Clock of the store, which decides whether a member lives; by default it is read.

    Returns:
        Names of the members whose records are deleted.

    Raises:
        ConflictError: A member of the job lives, or the epoch has ended, or the checkpoint that
            most members voted for is committed.
        NotFoundError: The epoch has no roster and no votes.
        DeniedError: The credentials may not delete the records.
        UnavailableError: The store does not answer.
    """
    keys = CooldownKeys(job, epoch)
    _check_clearable(store, keys, clock or StoreClock.read_if_permitted(store, job))
    tally = VoteTally(store, keys)
    tally.read_new(_list_members(store, job), late=True)
    members = tuple(sorted(tally.votes.keys() | tally.ended.keys() | tally.late.keys()))
    if not members and not exists(store, keys.roster):
        raise errors.NotFoundError(f"Epoch {epoch} of {store.make_url(job)} has no votes.")
    records = [key for member in members for key in keys.list_records(member)]
    # The roster is last: its members are those whose votes count.
    for failure in delete(store, records) or delete(store, [keys.roster]):
        raise errors.DeniedError(
            f"{store.make_url(failure.key)} could not be deleted ({failure.reason}): take "
            "credentials that may delete, and clear the votes again."
        )
    return members


def _check_clearable(store: Store, keys: CooldownKeys, clock: StoreClock) -> None:
    """Refuse while the votes of an epoch may lead to its end, or after its end."""
    job, epoch = keys.job, keys.epoch
    if living := sorted(make_census(store, job, clock).find_holders()):
        raise errors.ConflictError(
            f"{len(living)} members of {job} live ({', '.join(living[:5])}): stop all members, "
            "and wait until their leases have ended."
        )
    if find_epoch_end(store, job, epoch) is not None:
        raise errors.ConflictError(
            f"Epoch {epoch} of {job} has ended: members that end it again find its result."
        )
    if (end := derive_epoch(store, job, epoch)) is not None:
        raise errors.ConflictError(
            f"The checkpoint of epoch {epoch} of {job}, step {end.step}, is committed: load it "
            "on all members, and end the epoch with it."
        )


def _list_members(store: Store, job: str) -> list[str]:
    """Return the names of all members that have written records of any epoch."""
    members: list[str] = []
    for name in list_folders(store, f"{job}/{MEMBERS}/"):
        with suppress(errors.ConfigurationError):  # the name of no member
            members.append(check_member_name(name))
    return members
