"""Members agree when more than half of the voters have the same content."""

from collections.abc import Callable

import pytest

from millrace import errors
from millrace.checkpoints.cooldown.agreement import Agreement
from millrace.checkpoints.cooldown.epoch_view import EpochView
from millrace.checkpoints.progress_events import ContentAgreed
from millrace.keys.cooldowns import CooldownKeys
from millrace.progress import Event
from millrace.records import commit_once, fetch
from millrace.schemas.checkpoint import Vote
from millrace.storage import Store, exists
from tests.unit.checkpoints.cooldown.conftest import JOB, vote_of

KEYS = CooldownKeys(JOB, 0)


@pytest.fixture
def view(view_of: Callable[..., EpochView]) -> EpochView:
    return view_of()


def test_a_member_votes_once_and_waits_for_the_others(folder: Store, view: EpochView) -> None:
    agreement = Agreement(folder, vote_of("a"), view)
    agreement.advance()
    agreement.advance()
    assert fetch(folder, KEYS.make_vote_key("a"), Vote) == vote_of("a")
    assert not agreement.is_reached


def test_more_than_half_of_the_voters_agree(folder: Store, view: EpochView) -> None:
    events: list[Event] = []
    agreement = Agreement(folder, vote_of("a"), view, progress=events.append)
    view.tally.votes["b"] = vote_of("b")
    agreement.advance()
    assert agreement.is_reached
    agreement.advance()
    assert events == [ContentAgreed(member="a", votes=2, voters=3)]


def test_dead_members_without_a_vote_do_not_count(folder: Store, view: EpochView) -> None:
    view.living = {"a"}
    agreement = Agreement(folder, vote_of("a"), view)
    agreement.advance()
    assert agreement.is_reached


def test_dead_members_with_a_vote_count(folder: Store, view: EpochView) -> None:
    view.living = {"a"}
    view.tally.votes["b"] = vote_of("b", "f")
    with pytest.raises(errors.ConflictError, match="2 members have 2 different contents"):
        Agreement(folder, vote_of("a"), view).advance()


def test_a_majority_for_another_content_is_an_error(folder: Store, view: EpochView) -> None:
    view.tally.votes |= {name: vote_of(name, "f") for name in "bc"}
    with pytest.raises(errors.ConflictError, match="2 of 3 members have another content than a"):
        Agreement(folder, vote_of("a"), view).advance()


def test_no_possible_majority_is_an_error(folder: Store, view: EpochView) -> None:
    view.tally.votes |= {"b": vote_of("b", "e"), "c": vote_of("c", "f")}
    with pytest.raises(errors.ConflictError, match="3 different contents"):
        Agreement(folder, vote_of("a"), view).advance()


def test_a_member_that_voted_for_another_content_before_has_lost_state(
    folder: Store, view: EpochView
) -> None:
    commit_once(folder, KEYS.make_vote_key("a"), vote_of("a", "f"))
    with pytest.raises(errors.ConflictError, match="a has voted for another content"):
        Agreement(folder, vote_of("a"), view).advance()


def test_a_member_outside_the_roster_has_no_vote(folder: Store, view: EpochView) -> None:
    view.tally.votes |= {name: vote_of(name) for name in "ab"}
    agreement = Agreement(folder, vote_of("d"), view)
    agreement.advance()
    assert agreement.is_reached
    assert not exists(folder, KEYS.make_vote_key("d"))
