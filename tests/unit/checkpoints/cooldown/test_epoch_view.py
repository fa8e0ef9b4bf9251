"""The view of an epoch: what a member reads at each poll."""

from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.cooldowns import CooldownKeys
from millrace.records import commit_once
from millrace.schemas.checkpoint import EpochRecord, LateVote
from tests.unit.checkpoints.cooldown.conftest import JOB, failed_record, vote_of

KEYS = CooldownKeys(JOB, 0)


def test_votes_are_read_at_every_poll_and_living_members_and_results_at_every_second(
    folder, census, view_of
) -> None:
    view = view_of()
    census.living = {"b"}
    view.read(late=False)
    assert (view.living, view.tally.votes) == ({"a", "b"}, {})
    census.living = {"c"}
    commit_once(folder, KEYS.make_vote_key("b"), vote_of("b"))
    failed = failed_record("b")
    commit_once(folder, KEYS.make_result_key("b"), failed)
    view.read(late=False)
    assert (view.living, view.tally.ended) == ({"a", "b"}, {})
    assert view.tally.votes == {"b": vote_of("b")}
    view.read(late=False)
    assert (view.living, view.tally.ended) == ({"a", "c"}, {"b": failed})
    assert census.reads == 2


def test_late_votes_are_read_on_request(folder, view_of) -> None:
    view = view_of()
    late = LateVote(member="c", reason="no time")
    commit_once(folder, KEYS.make_late_vote_key("c"), late)
    view.read(late=False)
    assert view.tally.late == {}
    view.read(late=True)
    assert view.tally.late == {"c": late}


def test_an_epoch_ends_with_a_record_that_is_valid(folder, view_of) -> None:
    view = view_of()
    assert view.find_end() is None
    end = EpochRecord(job=JOB, epoch=0, step=5, root=None, reason="no time")
    commit_once(folder, CheckpointKeys(JOB).make_epoch_key(0), end)
    assert view.find_end() == end
