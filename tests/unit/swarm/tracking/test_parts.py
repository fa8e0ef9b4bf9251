"""Parts of the tracker, each alone: trust, votes, transfers, nodes, and the queue of reads."""

import pytest

from millrace.swarm.tracking.nodes import NodeTable
from millrace.swarm.tracking.orders import STORE
from millrace.swarm.tracking.read_queue import ReadChoice, ReadQueue
from millrace.swarm.tracking.transfers import TransferTable
from millrace.swarm.tracking.trust import Accusations, NodeTrust
from millrace.swarm.tracking.votes import PieceVotes


def trust_all(name: str) -> bool:
    return True


def test_one_accuser_is_not_believed_and_two_are():
    accusations = Accusations()
    assert not accusations.accuse("a", "bad")
    assert not accusations.accuse("a", "bad")
    assert not accusations.accuse("a", "other")
    assert accusations.accuse("b", "bad")


def test_a_node_loses_its_vote_with_the_second_wrong_one_and_is_given_up_with_the_eighth():
    trust = NodeTrust()
    lost, faulty = [], []
    for number in range(1, 10):
        trust.count_wrong_vote()
        lost += [number] if trust.has_lost_vote else []
        faulty += [number] if trust.has_become_faulty else []
    assert lost == [*range(2, 10)]
    assert faulty == [8]


def test_an_uploader_that_refuses_again_and_again_is_avoided_until_it_gives():
    trust = NodeTrust()
    assert [trust.count_failed_upload("g") for _ in range(8)] == [False] * 7 + [True]
    assert trust.avoids("g")
    trust.clear_failed_uploads("g")
    assert not trust.avoids("g")
    trust.excluded.add("g")
    assert trust.avoids("g")


def test_as_many_equal_votes_as_are_needed_decide():
    votes = PieceVotes(votes_needed=2)
    votes.add("a", "x", vote=True)
    votes.add("b", "x", vote=False)  # it has its copy from a node
    assert votes.count(trust_all) is None
    assert votes.has_too_few(trust_all)
    votes.add("c", "x", vote=True)
    assert votes.count(trust_all) == "x"
    assert votes.count(lambda name: name != "a") is None


def test_different_votes_are_a_dispute_until_the_owner_knows():
    votes = PieceVotes(digest="x")
    votes.add("a", "y", vote=True)
    assert votes.is_disputed(trust_all)
    assert not votes.is_disputed(lambda name: False)
    votes.is_settled = True
    assert not votes.is_disputed(trust_all)


def test_a_decision_stands_while_a_copy_and_enough_votes_are_left():
    votes = PieceVotes(votes_needed=2, digest="x")
    for name in "abc":
        votes.add(name, "x", vote=True)
    assert votes.has_support(lambda name: name != "a", held=True)
    assert not votes.has_support(lambda name: name != "a", held=False)
    assert votes.remove("b")
    assert not votes.remove("b")
    assert not votes.has_support(lambda name: name != "a", held=True)


def test_transfers_take_slots_until_they_end():
    table = TransferTable(3, 8)
    a, b = table.add_node("a"), table.add_node("b")
    table.begin_read(a, 0, 0.0)
    table.begin_fetch(b, 1, a, "x", 1.0)
    a.low_priority.add(("b", 1))
    assert (a.reads, b.fetches, a.uploads, table.reads) == (1, 1, 1, 1)
    assert table.is_read(0)
    assert a.reads_from_store(0)
    assert not b.reads_from_store(1)
    took = table.end(b, 1, "a", 4.0)
    assert took is not None
    assert (took.seconds, took.digest) == (3.0, "x")
    assert table.end(b, 1, "a", 4.0) is None
    assert (b.fetches, a.uploads, a.low_priority, b.incoming) == (0, 0, set(), {})


def test_reads_that_share_the_store_are_timed_as_if_each_were_alone():
    table = TransferTable(2, 8)
    a, b = table.add_node("a"), table.add_node("b")
    table.begin_read(a, 0, 0.0)
    table.begin_read(b, 1, 0.0)
    assert table.measure_read(b, 1, 4.0) == pytest.approx(2.0)
    took = table.end(a, 0, STORE, 4.0)
    assert took is not None
    assert (took.seconds, took.unshared) == (4.0, pytest.approx(2.0))
    assert not table.is_read(0)
    assert table.measure_read(b, 1, 6.0) == pytest.approx(4.0)


def make_nodes(pieces: int, zones: dict[str, str]) -> NodeTable:
    nodes, transfers = NodeTable(pieces), TransferTable(pieces, 8)
    for name, zone in zones.items():
        nodes.add(name, zone, transfers.add_node(name))
    return nodes


def test_nodes_that_lack_something_are_counted_by_zone():
    nodes = make_nodes(1, {"a": "x", "b": "x", "c": "y"})
    a, b = nodes["a"], nodes["b"]
    assert nodes.count_lacking_neighbours(a) == 1
    nodes.note_copy(b, 0)
    assert nodes.count_lacking_neighbours(a) == 0
    nodes.forget_copy(b, 0)
    assert nodes.count_lacking_neighbours(a) == 1
    nodes.remove(b)
    assert nodes.count_lacking_neighbours(a) == 0
    assert [node.id for node in nodes.iterate_living()] == ["a", "c"]
    assert nodes.is_lacked(0)
    for name in ("a", "c"):
        nodes.note_copy(nodes[name], 0)
    assert not nodes.is_lacked(0)


def test_a_piece_arrives_near_where_another_node_of_a_labelled_zone_gets_it():
    nodes = make_nodes(1, {"a": "x", "b": "x", "c": "", "d": ""})
    for name in ("b", "d"):
        nodes[name].transfers.incoming[0] = {STORE: 0.0}
    assert nodes.is_arriving_in_zone(nodes["a"], 0)
    assert not nodes.is_arriving_in_zone(nodes["b"], 0)
    assert not nodes.is_arriving_in_zone(nodes["c"], 0)
    assert nodes.is_one_of_zones(nodes["a"])
    assert not nodes.is_one_of_zones(nodes["c"])
    assert not make_nodes(1, {"a": "x"}).is_one_of_zones(nodes["a"])


def test_pieces_are_read_in_order_and_skipped_ones_stay():
    queue = ReadQueue(4, seed=0)
    assert not queue.add(2)  # all are there at first
    choices = {0: ReadChoice.SKIP, 1: ReadChoice.DISCARD, 2: ReadChoice.TAKE}
    assert queue.take_first(choices.__getitem__) == 2
    assert queue.take_first(lambda number: ReadChoice.TAKE) == 0
    assert queue.add(1)
    assert [queue.take_first(lambda number: ReadChoice.TAKE) for _ in range(3)] == [1, 3, None]
    assert not queue.has_any


def test_a_read_that_keeps_failing_waits_longer_and_at_most_five_seconds():
    queue = ReadQueue(1, seed=0)
    queue.take_first(lambda number: ReadChoice.TAKE)
    for failures in range(3000):
        queue.delay(0, "a", 0.0)
        assert queue.is_due(0, min(5.0, 0.1 * 2.0 ** min(failures, 10)))
    assert queue.has_any
    assert queue.take_due(5.0) == [0]
    assert queue.take_due(5.0) == []
    assert not queue.has_any


def test_a_piece_that_needs_a_further_vote_is_wanted_once():
    queue = ReadQueue(3, seed=0)
    assert queue.add_vote_request(2)
    assert not queue.add_vote_request(2)
    assert queue.add_vote_request(0)
    assert queue.list_vote_requests() == [0, 2]
    queue.remove_vote_request(2)
    assert not queue.is_vote_requested(2)
