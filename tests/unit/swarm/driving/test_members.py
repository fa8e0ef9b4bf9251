"""Members of a run, how many of them must live, and who is waited for no longer."""

import pytest

from millrace import errors
from millrace.swarm.driving.members import RunMembers
from millrace.swarm.driving.quorum import Quorum
from millrace.swarm.driving.stragglers import StragglerFinder
from millrace.swarm.nodes import AbsentNode
from millrace.swarm.progress_events import NodeLost
from tests.unit.swarm.driving.runs import SIZE, Run, make_member


def test_nodes_of_one_name_are_told_apart_by_their_ids():
    members = RunMembers()
    member = make_member("a")
    members.add(member)
    assert members.format_name(member.node) == "a"
    members.add_absent(AbsentNode("other", "a", "gone"))
    assert members.format_name(member.node) == "a (id-a)"


def test_two_nodes_with_one_identity_and_certificate_are_one_agent():
    members = RunMembers()
    first = make_member("a", identity="x", fingerprint="1").node
    assert members.register_agent(first) is None
    assert members.register_agent(first) is None  # asked again
    assert members.register_agent(make_member("b", identity="x", fingerprint="2").node) is None
    assert members.register_agent(make_member("c", identity="x", fingerprint="1").node) is first
    assert members.register_agent(make_member("d", identity="y", fingerprint="1").node) is None


def test_a_member_that_does_not_answer_is_absent_until_it_joins():
    members = RunMembers()
    member = make_member("a")
    members.add(member)
    members.await_member(member, "it did not answer")
    assert member.node.id not in members
    assert members.has_awaited()
    assert members.is_awaited(members.absent[member.node.id])
    member.joined = True
    members.add(member)
    assert not members.has_awaited()
    assert members.list_joined() == [member]


def test_a_run_begins_when_all_have_come_or_long_enough_was_waited():
    run = Run("a")
    quorum = Quorum(run.state.members, 0.5, 10.0, 0.0)
    quorum.expected = 2
    assert not quorum.can_start(1.0)
    assert quorum.can_start(11.0)
    run.state.members.add_absent(AbsentNode("b", "b", "gone"))
    assert quorum.can_start(1.0)
    quorum = Quorum(run.state.members, 0.9, 10.0, 0.0)
    quorum.expected = 2
    assert not quorum.can_start(1.0)


def test_a_run_ends_when_too_many_are_lost():
    run = Run("abc")
    quorum = Quorum(run.state.members, 0.5, 10.0, 0.0)
    quorum.expected = 4
    quorum.check(0.0)
    run.state.lose(run["a"], "broken")
    run.state.members.await_member(make_member("d"), "silent")
    quorum.check(0.0)  # d may yet come
    quorum.check(11.0)
    run.state.lose(run["b"], "broken too")
    with pytest.raises(
        errors.WorkerError, match=r"3 of 4 nodes are lost.*b: broken too; d: silent"
    ):
        quorum.check(11.0)


def test_a_latecomer_is_waited_for_a_few_seconds():
    run = Run("a")
    quorum = Quorum(run.state.members, 0.5, 60.0, 0.0)
    assert not quorum.awaits_latecomers(1.0)
    run.state.members.await_member(make_member("b"), "silent")
    assert quorum.awaits_latecomers(1.0)
    assert not quorum.awaits_latecomers(6.0)


def straggling(run: Run, now: float) -> StragglerFinder:
    """Return a finder, where all but `c` have been ready after a second."""
    for name in "abc":
        run[name].last_progress = now
    for name in "ab":
        run[name].ready, run[name].seconds = True, 1.0
        run[name].files.update({0, 1})
        run[name].counts.from_store = SIZE
    return StragglerFinder(run.state, 2, 2 * SIZE, 10.0, now)


def test_a_node_that_receives_nothing_while_others_are_ready_is_a_straggler():
    run = Run("abc")
    finder = straggling(run, 0.0)
    assert finder.find(0.0) == []  # half of the nodes are ready from here on
    assert finder.find(9.0) == []
    ((member, why),) = finder.find(11.0)
    assert (member, why) == (run["c"], "it received no byte for 11 s")


def test_a_node_that_goes_on_for_ever_is_a_straggler():
    run = Run("abc")
    finder = straggling(run, 0.0)
    assert finder.find(0.0) == []
    run["c"].last_progress = 1e6
    ((member, why),) = finder.find(1e6)
    assert member is run["c"]
    assert why.startswith("it was not ready 1000000 s after the start")


def test_nobody_is_a_straggler_while_half_of_the_nodes_go_on():
    run = Run("abc")
    finder = straggling(run, 0.0)
    for name in "ab":
        run[name].ready = False
        run[name].files.clear()
    assert finder.find(1e6) == []


def test_a_lost_member_counts_with_nothing_and_gets_no_orders():
    run = Run("ab")
    state = run.state
    state.dispatch(state.tracker.begin(0.0))
    assert [order.piece for order in run.take_orders("a") if order] == [0]
    state.dispatch(state.tracker.complete_transfer("id-a", 0, "", "x", 1.0))
    state.held = SIZE
    state.lose(run["a"], "broken")
    state.lose(run["a"], "again")
    assert run["a"].lost_reason == "broken"
    assert state.held == 0
    assert run.take_orders("a")[-1] is None
    assert run.take_events() == [(NodeLost, "a")]
    state.is_ending = True
    state.lose(run["b"], "too late")
    assert run["b"].lost_reason == ""
