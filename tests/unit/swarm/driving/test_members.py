"""Members of a run, how many of them must live, and who is waited for no longer."""

import pytest

from millrace import errors
from millrace.swarm.driving.members import RunMembers
from millrace.swarm.driving.quorum import Quorum
from millrace.swarm.driving.stragglers import StragglerFinder
from millrace.swarm.nodes import AbsentNode
from millrace.swarm.progress_events import NodeLost
from tests.oracle import compute_blake3
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


class UnlistedFiles:
    """Numbers of files that can be counted and looked up, but not listed."""

    def __len__(self) -> int:
        return 300_000

    def __contains__(self, number: int) -> bool:
        return number < len(self)


def test_the_files_of_a_member_are_counted_without_a_look_at_each():
    """The driver asks this for each node, several times a second."""
    member, files = make_member("a"), UnlistedFiles()
    member.files = files
    member.unusable = {0: "is also a file", len(files): "is not"}
    assert member.has_all(len(files) + 1)
    assert not member.has_all(len(files) + 2)


def test_a_run_begins_when_all_have_come_or_long_enough_was_waited():
    run = Run("a")
    quorum = Quorum(run.state.members, 0.5, 10.0, 0.0)
    quorum.node_count = 2
    assert not quorum.can_start(1.0)
    assert quorum.can_start(11.0)
    run.state.members.add_absent(AbsentNode("b", "b", "gone"))
    assert quorum.can_start(1.0)
    quorum = Quorum(run.state.members, 0.9, 10.0, 0.0)
    quorum.node_count = 2
    assert not quorum.can_start(1.0)


def test_a_run_ends_when_too_many_are_lost():
    run = Run("abc")
    quorum = Quorum(run.state.members, 0.5, 10.0, 0.0)
    quorum.node_count = 4
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


def test_a_run_does_not_begin_or_end_without_a_living_node():
    run = Run("a")
    quorum = Quorum(run.state.members, 0.5, 30.0, 0.0)
    quorum.node_count = 2
    run.state.lose(run["a"], "the request is signed with another key")
    run.state.members.await_member(make_member("b"), "silent")
    assert not quorum.can_start(1.0)
    assert not quorum.can_start(31.0)
    assert not run.state.has_finished(0)
    quorum.check(5.5)  # b may yet come
    with pytest.raises(errors.WorkerError, match=r"2 of 2 nodes are lost.*b: silent"):
        quorum.check(31.0)


def test_too_few_ready_nodes_end_no_run_well():
    run = Run("ab")
    quorum = Quorum(run.state.members, 0.5, 30.0, 0.0)
    quorum.node_count = 4
    run.state.lose(run["a"], "broken")
    for name in "cd":
        run.state.members.await_member(make_member(name), "silent")
    assert quorum.awaits_latecomers(29.0)  # b alone is too few
    quorum.check(29.0)
    with pytest.raises(errors.WorkerError, match="3 of 4 nodes are lost"):
        quorum.check(29.0, is_last=True)


def test_nodes_that_were_replaced_are_not_missing():
    run = Run("abcd")
    quorum = Quorum(run.state.members, 0.75, 30.0, 0.0)
    quorum.node_count = 4
    for old, new in zip("abc", "efg", strict=True):
        run.state.lose(run[old], "preempted")
        run.join(new)
        quorum.check(100.0, is_last=True)
    run.state.lose(run["d"], "preempted")
    quorum.check(100.0, is_last=True)
    run.state.lose(run["e"], "preempted")
    with pytest.raises(errors.WorkerError, match="2 of 4 nodes are lost"):
        quorum.check(100.0)


def test_agents_that_are_still_starting_are_not_lost():
    quorum = Quorum(RunMembers(), 0.5, 30.0, 0.0)
    quorum.node_count = 2
    quorum.check(1.0)
    assert not quorum.can_start(31.0)


def test_nodes_that_did_not_start_are_named_at_the_end():
    run = Run("a")
    quorum = Quorum(run.state.members, 0.5, 30.0, 0.0)
    quorum.node_count = 3
    quorum.check(31.0)
    with pytest.raises(errors.WorkerError, match=r"\(2 did not start within 30 s, the `start_ti"):
        quorum.check(31.0, is_last=True)


def test_a_latecomer_is_waited_for_a_few_seconds():
    run = Run("a")
    quorum = Quorum(run.state.members, 0.5, 60.0, 0.0)
    quorum.node_count = 2
    assert not quorum.awaits_latecomers(1.0)
    run.state.members.await_member(make_member("b"), "silent")
    assert quorum.awaits_latecomers(1.0)
    assert not quorum.awaits_latecomers(6.0)


def straggling(run: Run, now: float, *, ready: str = "ab") -> StragglerFinder:
    """Return a finder, where some nodes, all but `c`, have been ready after a second."""
    for name in "abc":
        run[name].last_progress = now
    for name in ready:
        run[name].ready, run[name].seconds = True, 1.0
        run[name].files.update({0, 1})
        run[name].counts.from_store = SIZE
        for piece in (0, 1):
            digest = compute_blake3(b"%d" % piece)
            run.state.tracker.complete_transfer(f"id-{name}", piece, "", digest, now)
    return StragglerFinder(run.state, 2, 2 * SIZE, 10.0, now)


def test_a_node_that_receives_nothing_while_others_are_ready_is_a_straggler():
    run = Run("abc")
    finder = straggling(run, 0.0)
    assert finder.find(0.0) == []  # half of the nodes are ready from here on
    assert finder.find(9.0) == []
    ((member, why),) = finder.find(11.0)
    assert (member, why) == (run["c"], "it received no byte for 11 s")


def test_a_node_that_waited_for_a_straggler_gets_its_time_anew():
    run = Run("abc", pieces=1)
    tracker = run.state.tracker
    for name in "abc":
        run[name].last_progress = 0.0
    (order,) = tracker.begin(0.0)
    assert order.node == "id-a"  # the only piece, so `b` waits for `a`
    run["c"].ready, run["c"].seconds = True, 1.0
    run["c"].files.update({0, 1})
    finder = StragglerFinder(run.state, 2, SIZE, 10.0, 0.0)
    assert finder.find(0.0) == []
    ((member, why),) = finder.find(11.0)
    assert (member, why) == (run["a"], "it received no byte for 11 s")
    run.state.lose(member, why)
    assert tracker.measure_incoming("id-b") == SIZE
    assert finder.find(20.0) == []
    assert (run["b"], "it received no byte for 22 s") in finder.find(22.0)


def test_nodes_that_receive_nothing_are_stragglers_if_nobody_receives():
    run = Run("abc", pieces=1)
    for name in "abc":
        run[name].last_progress = 0.0
    run["c"].ready, run["c"].seconds = True, 1.0
    run["c"].files.update({0, 1})
    finder = StragglerFinder(run.state, 2, SIZE, 10.0, 0.0)
    assert finder.find(0.0) == []
    assert [member for member, _ in finder.find(11.0)] == [run[name] for name in "abc"]


def test_a_node_that_goes_on_for_ever_is_a_straggler():
    run = Run("abc")
    finder = straggling(run, 0.0)
    assert finder.find(0.0) == []
    run["c"].last_progress = 1e6
    ((member, why),) = finder.find(1e6)
    assert member is run["c"]
    assert why.startswith("it was not ready 1000000 s after the start")


class Straggling:
    """A run of three nodes and many pieces: `a` and `b` are ready, and `c` receives the pieces."""

    pieces = 200

    def __init__(self) -> None:
        self.run = Run("abc", pieces=self.pieces)
        state = self.run.state
        state.dispatch(state.tracker.begin(0.0))
        for name in "ab":
            member = self.run[name]
            member.ready, member.seconds = True, 2.0
            member.files.update({0, 1})
            member.counts.from_store = SIZE * self.pieces
            for number in range(self.pieces):
                self.write(name, number, f"digest of {number}", "")
        self.finder = StragglerFinder(state, 2, SIZE * self.pieces, 10.0, 0.0)

    def write(self, name: str, number: int, digest: str, source: str = "id-a") -> None:
        tracker = self.run.state.tracker
        self.run.state.dispatch(
            tracker.complete_transfer(f"id-{name}", number, source, digest, 2.0)
        )

    def find(self, now: float) -> list[str]:
        """Let `c` report bytes, and return the reasons not to wait for it."""
        self.run["c"].last_progress = now
        return [why for _, why in self.finder.find(now)]


def test_a_node_that_only_says_that_it_receives_is_waited_for_briefly():
    straggling = Straggling()
    reasons = {now: straggling.find(float(now)) for now in range(3, 120)}
    given_up = min(now for now, why in reasons.items() if why)
    # The stall timeout, and the time of the pieces under way at the lowest rate.
    assert 13 < given_up < 13 + 10 * SIZE / 100e3
    (why,) = reasons[given_up]
    assert why.startswith(f"it was not ready {given_up} s after the start, ")
    assert "0 bytes of 209.7 MB are confirmed" in why


def test_made_up_digests_are_no_progress():
    straggling = Straggling()
    assert straggling.find(3.0) == []
    for number in range(straggling.pieces // 2):
        straggling.run.state.tracker.tick(3.0)
        straggling.write("c", number, "digest of nothing", "")
    assert straggling.find(150.0) != []


def test_a_slow_node_is_waited_for_while_others_confirm_its_pieces():
    straggling = Straggling()
    reasons: list[str] = []
    seconds_per_piece = SIZE / 1.1e6  # a hundredth of the others' 100 MiB a second, and some more
    for number in range(straggling.pieces):
        reasons += straggling.find(3.0 + number * seconds_per_piece)
        straggling.write("c", number, f"digest of {number}")
    assert reasons == []


def test_a_node_with_all_pieces_that_finishes_one_file_after_another_is_not_waited_for_long():
    straggling = Straggling()
    for number in range(straggling.pieces):
        straggling.write("c", number, f"digest of {number}")
    disk = SIZE * straggling.pieces / 10e6
    assert straggling.find(3.0) == []
    assert straggling.find(2.0 + disk) == []
    assert straggling.find(4.0 + disk) != []


def make_warmed(size: int) -> tuple[Run, StragglerFinder]:
    """Return a run where `a` and `b` had every piece before and are ready, and `c` has them now."""
    run = Run("abc")
    straggling(run, 0.0)
    for name in "ab":
        run[name].counts.from_store, run[name].counts.cached = 0, size
    for piece in (0, 1):
        digest = compute_blake3(b"%d" % piece)
        run.state.tracker.complete_transfer("id-c", piece, "id-a", digest, 0.0)
    return run, StragglerFinder(run.state, 2, size, 10.0, 0.0)


def test_nodes_that_had_all_files_do_not_show_how_long_a_new_node_needs():
    run, finder = make_warmed(1_000_000_000)
    assert [finder.find(now) for now in (0.0, 11.0, 99.0)] == [[], [], []]
    ((member, why),) = finder.find(101.0)
    assert member is run["c"]
    assert why.startswith("it was not ready 101 s after its last byte")


def test_a_new_node_that_unpacks_among_warmed_nodes_is_waited_for_up_to_an_hour():
    run, finder = make_warmed(2 * SIZE)
    for now in range(0, 3601, 5):
        run["c"].last_progress = float(now)
        assert finder.find(float(now)) == []
    run["c"].last_progress = 3602.0
    ((member, why),) = finder.find(3602.0)
    assert member is run["c"]
    assert "it has had all bytes for 3602 s: check its disk" in why


def test_a_node_that_checks_its_own_files_is_no_straggler():
    run = Run("abc")
    finder = straggling(run, 0.0)
    late = make_member("d")
    late.last_progress = 0.0
    run.state.members.add(late)
    run["c"].files.update({0, 1})
    for piece in (0, 1):
        run.state.tracker.complete_transfer("id-c", piece, "id-a", compute_blake3(b"%d" % piece), 0)
    assert [finder.find(now) for now in (0.0, 3000.0)] == [[], []]


def test_nobody_is_a_straggler_while_half_of_the_nodes_go_on():
    run = Run("abc")
    finder = straggling(run, 0.0, ready="")
    assert finder.find(1e6) == []


def test_a_lost_member_counts_with_nothing_and_gets_no_orders():
    run = Run("ab")
    state = run.state
    state.dispatch(state.tracker.begin(0.0))
    assert [order.piece for order in run.take_orders("a") if order] == [0]
    state.dispatch(state.tracker.complete_transfer("id-a", 0, "", "x", 1.0))
    assert state.held == SIZE
    state.lose(run["a"], "broken")
    state.lose(run["a"], "again")
    assert run["a"].lost_reason == "broken"
    assert state.held == 0
    assert run.take_orders("a")[-1] is None
    assert run.take_events() == [(NodeLost, "a")]
    state.is_ending = True
    state.lose(run["b"], "too late")
    assert run["b"].lost_reason == ""
