"""Selection of uploaders among the members that live and agree."""

from collections.abc import Callable

from millrace.checkpoints.cooldown.checkpointers import SelectionRule, order_checkpointers
from millrace.checkpoints.cooldown.epoch_view import EpochView
from millrace.checkpoints.cooldown.uploaders import UploaderSelection
from millrace.schemas.checkpoint import CooldownOutcome, CooldownRecord
from tests.unit.checkpoints.cooldown.conftest import ROSTER, failed_record, vote_of

FIRST, SECOND, THIRD = order_checkpointers(ROSTER.members, ROSTER.seed)


def select(view: EpochView) -> list[str]:
    return UploaderSelection(view, vote_of("a"), SelectionRule.SPREAD).select()


def test_the_first_members_in_order_upload(view_of: Callable[..., EpochView]) -> None:
    assert select(view_of()) == [FIRST, SECOND]


def test_dead_members_and_those_with_another_content_are_replaced(
    view_of: Callable[..., EpochView],
) -> None:
    view = view_of()
    view.living.remove(FIRST)
    assert select(view) == [SECOND, THIRD]
    view.tally.votes[SECOND] = vote_of(SECOND, "f")
    assert select(view) == [THIRD]


def test_failed_members_come_last(view_of: Callable[..., EpochView]) -> None:
    view = view_of()
    for outcome, expected in (
        (CooldownOutcome.CANCELLED, [FIRST, SECOND]),
        (CooldownOutcome.FAILED, [SECOND, THIRD]),
    ):
        view.tally.ended[FIRST] = CooldownRecord(
            member=FIRST, outcome=outcome, reason="", sent=0, checked=0, replaced=0, seconds=0.0
        )
        assert select(view) == expected
    view.living = {FIRST}
    assert select(view) == [FIRST]


def test_psyche_replaces_nobody_but_selects_more(view_of: Callable[..., EpochView]) -> None:
    view = view_of()
    order = order_checkpointers(ROSTER.members, ROSTER.seed, SelectionRule.PSYCHE)
    selection = UploaderSelection(view, vote_of("a"), SelectionRule.PSYCHE)
    view.living.clear()
    assert selection.select() == order[:1]
    selection.add_more()
    assert selection.select() == order[:2]


def test_a_member_works_while_it_lives_and_has_no_result(
    view_of: Callable[..., EpochView],
) -> None:
    view = view_of()
    selection = UploaderSelection(view, vote_of("a"), SelectionRule.SPREAD)
    assert selection.are_working([FIRST, SECOND])
    view.tally.ended[FIRST] = failed_record(FIRST)
    assert selection.are_working([FIRST, SECOND])
    view.living.remove(SECOND)
    assert not selection.are_working([FIRST, SECOND])
