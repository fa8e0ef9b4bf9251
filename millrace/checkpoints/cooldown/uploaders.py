"""Selection of the members that upload the checkpoint of an epoch."""

from collections.abc import Collection

from millrace.checkpoints.cooldown.checkpointers import (
    SelectionRule,
    count_checkpointers,
    order_checkpointers,
)
from millrace.checkpoints.cooldown.epoch_view import EpochView
from millrace.schemas.checkpoint import CooldownOutcome, Vote


class UploaderSelection:
    """Selection of the uploaders from the side of one member.

    Args:
        view: State of the epoch's end.
        vote: Vote of this member.
        rule: Rule of the selection.
    """

    def __init__(self, view: EpochView, vote: Vote, rule: SelectionRule) -> None:
        self._view, self._vote, self._rule = view, vote, rule
        roster = view.roster
        self._order = order_checkpointers(roster.members, roster.seed, rule)
        self._number = count_checkpointers(len(roster.members), rule)

    def add_more(self) -> None:
        """Select as many members again, in addition."""
        self._number += count_checkpointers(len(self._order), self._rule)

    def select(self) -> list[str]:
        """Return the members that upload, as far as this member knows.

        Psyche's rule does not replace dead members. Otherwise a member uploads if it lives and has
        not voted for another content. Failed members come last, and stay candidates, since the
        others may fail too.
        """
        if self._rule is SelectionRule.PSYCHE:
            return self._order[: self._number]
        different = {
            name
            for name, vote in self._view.tally.votes.items()
            if vote.agreement_key != self._vote.agreement_key
        }
        able = [name for name in self._order if name in self._view.living - different]
        able.sort(key=self._has_failed)
        return able[: self._number]

    def are_working(self, members: Collection[str]) -> bool:
        """Decide whether any of these members lives and has no result yet."""
        return bool(self._view.living.intersection(members) - self._view.tally.ended.keys())

    def _has_failed(self, name: str) -> bool:
        ended = self._view.tally.ended.get(name)
        return ended is not None and ended.outcome is CooldownOutcome.FAILED
