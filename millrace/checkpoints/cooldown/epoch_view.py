"""State of an epoch's end in the store, as one member reads it at each poll."""

from millrace.checkpoints.cooldown.epoch_records import find_epoch_end
from millrace.checkpoints.cooldown.votes import VoteTally
from millrace.checkpoints.destinations.base import Destination
from millrace.keys.cooldowns import CooldownKeys
from millrace.lease import Census
from millrace.schemas.checkpoint import EpochRecord, Roster
from millrace.storage import Store

_FULL_READ_POLLS = 2  # polls between reads of the living members and of the results


class EpochView:
    """State of an epoch's end, as one member last read it.

    Args:
        reads: Store that the job is read from.
        roster: Roster of the epoch.
        member: Name of this member.
        census: Census of the job's living members.
        destination: Destination of the checkpoint, if that is not the members' store.

    Attributes:
        roster: Roster of the epoch.
        living: Names of the members that live, this one included; at first all of the roster.
        tally: Votes and results of the members.
    """

    def __init__(
        self,
        reads: Store,
        roster: Roster,
        member: str,
        census: Census,
        destination: Destination | None = None,
    ) -> None:
        self.roster, self._destination = roster, destination
        self.living = set(roster.members)
        self.tally = VoteTally(reads, CooldownKeys(roster.job, roster.epoch))
        self._reads, self._member, self._census = reads, member, census
        self._polls = 0

    def find_end(self) -> EpochRecord | None:
        """Return the valid record of the epoch's end, or None."""
        return find_epoch_end(self._reads, self.roster.job, self.roster.epoch, self._destination)

    def read(self, *, late: bool) -> None:
        """Read new votes. Every second call also reads the living members and the results.

        Args:
            late: Whether to read votes to go on without a checkpoint too.
        """
        full = self._polls % _FULL_READ_POLLS == 0
        if full:
            self.living = {*self._census.find_holders(), self._member}
        self._polls += 1
        self.tally.read_new(self.roster.members, results=full, late=late)
