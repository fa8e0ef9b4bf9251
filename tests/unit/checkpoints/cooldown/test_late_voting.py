"""An epoch ends without a checkpoint when most members voted to."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from millrace import errors
from millrace.checkpoints import CooldownSettings, Membership
from millrace.checkpoints.cooldown.epoch_records import commit_epoch
from millrace.checkpoints.cooldown.epoch_view import EpochView
from millrace.checkpoints.cooldown.late_voting import LateVoting
from millrace.checkpoints.progress_events import EpochEndedWithoutCheckpoint
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.cooldowns import CooldownKeys
from millrace.progress import Event
from millrace.records import fetch
from millrace.schemas.checkpoint import (
    EpochRecord,
    LateVote,
    Roster,
)
from millrace.storage import Store, exists
from tests.unit.checkpoints.cooldown.conftest import JOB, ROSTER, Clock, failed_record, vote_of

SETTINGS = CooldownSettings(time=timedelta(seconds=10), extensions=1, without=1)
KEYS = CooldownKeys(JOB, 0)


class Voter:
    """Voting of one member, and the events of the votes."""

    def __init__(self, folder: Store, view: EpochView, *, confined: bool = False) -> None:
        self.events: list[Event] = []
        membership = Membership(folder, JOB, "a", reads=folder if confined else None)
        self.voting = LateVoting(membership, folder, view, SETTINGS, progress=self.events.append)


def late(name: str) -> LateVote:
    return LateVote(member=name, reason="no time")


def test_one_vote_of_three_ends_no_epoch(
    folder: Store, view_of: Callable[..., EpochView], clock: Clock
) -> None:
    voter = Voter(folder, view_of())
    assert not voter.voting.has_voted
    voter.voting.vote("10 s")
    assert voter.voting.has_voted
    assert (
        fetch(folder, KEYS.make_late_vote_key("a"), LateVote).reason == "no checkpoint after 10 s"
    )
    assert voter.voting.try_end("10 s", 5) is None
    assert voter.events == []


def test_most_votes_end_the_epoch(
    folder: Store, view_of: Callable[..., EpochView], clock: Clock
) -> None:
    view = view_of()
    voter = Voter(folder, view)
    voter.voting.vote("10 s")
    view.tally.late["b"] = late("b")
    end = voter.voting.try_end("12 s", 5)
    assert end == EpochRecord(
        job=JOB, epoch=0, step=5, root=None, member="a", reason="no checkpoint after 12 s"
    )
    assert fetch(folder, CheckpointKeys(JOB).make_epoch_key(0), EpochRecord) == end
    assert voter.events == [EpochEndedWithoutCheckpoint(member="a", epochs=1, max_epochs=1)]


def test_the_end_that_another_member_committed_counts(
    folder: Store, view_of: Callable[..., EpochView], clock: Clock
) -> None:
    first = commit_epoch(folder, EpochRecord(job=JOB, epoch=0, step=5, root=None, member="b"))
    view = view_of()
    voter = Voter(folder, view)
    voter.voting.vote("10 s")
    view.tally.late["b"] = late("b")
    assert voter.voting.try_end("12 s", 5) == first
    assert voter.events == []


def test_members_without_any_vote_are_awaited_for_the_whole_time_once_more(
    folder: Store, view_of: Callable[..., EpochView], clock: Clock
) -> None:
    view = view_of()
    voter = Voter(folder, view)
    view.tally.votes["a"] = vote_of("a")
    voter.voting.vote("20 s")
    clock.now += 20
    assert voter.voting.try_end("40 s", 5) is None
    clock.now += 1
    assert voter.voting.try_end("41 s", 5) is not None


def test_a_member_alone_ends_the_epoch(
    folder: Store, view_of: Callable[..., EpochView], clock: Clock
) -> None:
    view = view_of()
    view.living = {"a"}
    view.tally.ended["a"] = failed_record("a")
    voter = Voter(folder, view)
    voter.voting.vote("10 s")
    assert voter.voting.try_end("10 s", 5) is not None


def test_too_many_epochs_without_a_checkpoint_stop_the_training(
    folder: Store, view_of: Callable[..., EpochView], clock: Clock
) -> None:
    commit_epoch(folder, EpochRecord(job=JOB, epoch=0, step=4, root=None))
    roster = Roster(job=JOB, epoch=1, members=ROSTER.members, seed=7)
    voter = Voter(folder, view_of(roster=roster))
    with pytest.raises(errors.MillraceError, match="the 1 epochs before have none either"):
        voter.voting.vote("10 s")
    assert not voter.voting.has_voted
    assert not exists(folder, CooldownKeys(JOB, 1).make_late_vote_key("a"))


def test_a_confined_member_waits_for_its_owner_and_commits_nothing(
    folder: Store, view_of: Callable[..., EpochView], clock: Clock
) -> None:
    view = view_of()
    voter = Voter(folder, view, confined=True)
    voter.voting.vote("10 s")
    view.tally.late |= {name: late(name) for name in "bc"}
    clock.now += 79
    assert voter.voting.try_end("89 s", 5) is None
    clock.now += 1
    with pytest.raises(errors.MillraceError, match="has not ended epoch 0"):
        voter.voting.try_end("90 s", 5)
    assert not exists(folder, CheckpointKeys(JOB).make_epoch_key(0))
