"""Agreement of an epoch's members on the content of its checkpoint."""

from millrace import errors
from millrace.checkpoints.cooldown.epoch_view import EpochView
from millrace.checkpoints.progress_events import ContentAgreed
from millrace.keys.cooldowns import CooldownKeys
from millrace.progress import Progress, ignore_event
from millrace.records import commit_once
from millrace.schemas.checkpoint import Vote
from millrace.storage import Store


class Agreement:
    """Agreement of the members, from the side of one member.

    The members agree when more than half of those that live or have voted have voted for the same
    content.

    Args:
        store: Store that the member writes to.
        vote: Vote of this member.
        view: State of the epoch's end.
        progress: Receives `ContentAgreed`.

    Attributes:
        vote: Vote of this member.
        is_reached: Whether the members agree on this member's content.
    """

    def __init__(
        self, store: Store, vote: Vote, view: EpochView, *, progress: Progress = ignore_event
    ) -> None:
        self.vote = vote
        self.is_reached = False
        self._store, self._view, self._progress = store, view, progress
        self._has_voted = False

    def advance(self) -> None:
        """Vote, if this member has not, and decide from the known votes whether the members agree.

        Raises:
            ConflictError: There is a majority for another content, or none is possible, or this
                member has voted for another content before.
        """
        if self.is_reached:
            return
        roster, tally, member = self._view.roster, self._view.tally, self.vote.member
        if member in roster.members and not self._has_voted:
            self._commit_vote()
        voters = tally.list_voters(roster.members, self._view.living)
        favourite, count = tally.find_favourite()
        if favourite is not None and 2 * count > len(voters):
            if favourite.agreement_key != self.vote.agreement_key:
                raise errors.ConflictError(
                    f"{count} of {len(voters)} members have another content than {member}, "
                    f"whose content is not saved. Load the epoch's checkpoint. {self._remedy}"
                )
            self.is_reached = True
            self._progress(ContentAgreed(member=member, votes=count, voters=len(voters)))
        elif voters <= tally.votes.keys():
            different = len({vote.agreement_key for vote in tally.votes.values()})
            raise errors.ConflictError(
                f"The {len(voters)} members have {different} different contents, and none has "
                "more than half of them: nothing is saved. Load the newest checkpoint on all. "
                f"{self._remedy}"
            )

    @property
    def _remedy(self) -> str:
        """Sentence for an epoch whose votes cannot lead to a checkpoint."""
        roster = self._view.roster
        return (
            "If no member can save it, stop all members, clear the votes with `millrace checkpoint "
            f"clear-votes {self._store.url} {roster.job} {roster.epoch}`, and start them again."
        )

    def _commit_vote(self) -> None:
        roster, member = self._view.roster, self.vote.member
        key = CooldownKeys(roster.job, roster.epoch).make_vote_key(member)
        committed = commit_once(self._store, key, self.vote).record
        if committed != self.vote:
            raise errors.ConflictError(
                f"{member} has voted for another content of this epoch before, so it did "
                f"not resume from its last state. Load the epoch's checkpoint. {self._remedy}"
            )
        self._has_voted = True
        self._view.tally.votes[member] = committed
