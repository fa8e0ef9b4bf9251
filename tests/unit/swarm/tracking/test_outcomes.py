"""Outcomes of transfers, without a tracker: copies, queues, rates and trust after their ends."""

import pytest

from millrace.swarm.rates import ReadConcurrency
from millrace.swarm.tracking.copies import CopyTable
from millrace.swarm.tracking.direct_reads import DirectReads
from millrace.swarm.tracking.nodes import NodeState, NodeTable
from millrace.swarm.tracking.orders import STORE, TrackerOutput
from millrace.swarm.tracking.outcomes import TransferOutcomes
from millrace.swarm.tracking.read_queue import ReadChoice, ReadQueue
from millrace.swarm.tracking.readers import ReaderRanking
from millrace.swarm.tracking.transfers import TransferTable
from millrace.swarm.tracking.uploaders import UploaderRanking
from millrace.swarm.tracking.waiting_nodes import WaitingNodes

SIZE = 1000


class Parts:
    """Parts of a tracker of one piece, which node a has."""

    def __init__(self, names: str = "abc") -> None:
        concurrency, self.output = ReadConcurrency(8), TrackerOutput()
        self.nodes, self.transfers, self.read_queue = (
            NodeTable(1),
            TransferTable(1, 8),
            ReadQueue(1, 0),
        )
        waiting_nodes = WaitingNodes(self.nodes, self.read_queue, concurrency)
        readers = ReaderRanking(self.nodes, concurrency, 4, 1)
        uploaders = UploaderRanking(self.nodes)
        self.copies = CopyTable(
            [SIZE],
            nodes=self.nodes,
            transfers=self.transfers,
            waiting_nodes=waiting_nodes,
            readers=readers,
            output=self.output,
        )
        self.outcomes = TransferOutcomes(
            nodes=self.nodes,
            copies=self.copies,
            transfers=self.transfers,
            read_queue=self.read_queue,
            waiting_nodes=waiting_nodes,
            readers=readers,
            uploaders=uploaders,
            direct=DirectReads(self.nodes, self.copies, self.read_queue, allowed=True),
            output=self.output,
        )
        for name in names:
            self.nodes.add(name, "", self.transfers.add_node(name))
        self.read_queue.take_first(lambda number: ReadChoice.TAKE)
        self.transfers.begin_read(self.nodes["a"].transfers, 0, 0.0)
        assert self.outcomes.complete(self.nodes["a"], 0, STORE, "x", 1.0)

    def begin_fetch(self, name: str) -> NodeState:
        node, uploader = self.nodes[name], self.nodes["a"]
        node.queues.fetches.clear()
        self.transfers.begin_fetch(node.transfers, 0, uploader.transfers, "x", 1.0)
        return node


def test_a_read_of_a_node_is_a_copy_that_others_may_fetch():
    parts = Parts()
    assert list(parts.copies[0].holders) == ["a"]
    assert parts.nodes["a"].rates.read_seconds_per_byte == pytest.approx(1 / SIZE)
    assert list(parts.nodes["b"].queues.fetches) == [0]


def test_a_fetched_copy_is_a_further_holder_and_its_path_has_a_rate():
    parts = Parts()
    assert parts.outcomes.complete(parts.begin_fetch("b"), 0, "a", "x", 3.0)
    assert list(parts.copies[0].holders) == ["a", "b"]
    assert parts.nodes["a"].rates.upload_rates == {"": SIZE / 2.0}


def test_a_node_that_reports_another_digest_than_was_ordered_is_faulty():
    parts = Parts()
    assert not parts.outcomes.complete(parts.begin_fetch("b"), 0, "a", "y", 2.0)
    assert parts.output.faulty == ["b"]
    assert not parts.nodes["b"].have[0]


@pytest.mark.parametrize(("ordered", "faulty"), [("x", ["b"]), ("", [])])
def test_a_node_that_reports_another_digest_for_a_read_of_a_known_piece_is_faulty(ordered, faulty):
    parts = Parts()
    node = parts.nodes["b"]
    parts.transfers.begin_read(node.transfers, 0, 1.0, ordered)
    assert parts.outcomes.complete(node, 0, STORE, "y", 2.0) is not bool(faulty)
    assert parts.output.faulty == faulty


def test_wrong_bytes_exclude_the_uploader_and_two_accusers_take_its_trust():
    parts = Parts()
    for name, trusted in (("b", True), ("c", False)):
        assert parts.outcomes.fail(parts.begin_fetch(name), 0, "a", 2.0, wrong=True)
        assert parts.nodes[name].trust.excluded == {"a"}
        assert parts.nodes["a"].trust.is_trusted is trusted


def test_a_failure_of_a_transfer_that_was_not_ordered_is_ignored():
    parts = Parts()
    assert not parts.outcomes.fail(parts.nodes["b"], 0, "a", 2.0, wrong=True)
    assert not parts.nodes["b"].trust.excluded


def test_an_uploader_that_fails_eight_times_in_a_row_is_slow_and_the_piece_is_read_again():
    parts = Parts()
    for failures in range(1, 9):
        assert parts.outcomes.fail(parts.begin_fetch("b"), 0, "a", 2.0, wrong=False)
        assert parts.nodes["a"].rates.is_slow is (failures == 8)
    assert parts.read_queue.has_unread


def test_a_redundant_transfer_of_a_node_without_the_piece_is_queued_again():
    parts = Parts()
    parts.outcomes.note_redundant(parts.begin_fetch("b"), 0, "a", 2.0)
    assert list(parts.nodes["b"].queues.fetches) == [0]
    assert parts.nodes["a"].transfers.uploads == 0
