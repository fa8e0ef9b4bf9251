"""Rankings of nodes as readers and uploaders, the queues of waiting nodes, and the uploaders."""

from millrace.swarm.rates import ReadConcurrency
from millrace.swarm.tracking.copies import CopyTable
from millrace.swarm.tracking.direct_reads import DirectReads
from millrace.swarm.tracking.late_transfers import LateTransfers
from millrace.swarm.tracking.limits import MAX_CANDIDATES
from millrace.swarm.tracking.nodes import NodeTable
from millrace.swarm.tracking.orders import STORE, PieceOrder, TrackerOutput
from millrace.swarm.tracking.read_queue import ReadChoice, ReadQueue
from millrace.swarm.tracking.readers import ReaderRanking
from millrace.swarm.tracking.selection import ReadSelector, UploaderSelector
from millrace.swarm.tracking.transfers import TransferTable
from millrace.swarm.tracking.uploaders import UploaderRanking
from millrace.swarm.tracking.waiting_nodes import WaitingNodes

SIZE = 1000


class Parts:
    """Parts of a tracker, as the tracker connects them."""

    def __init__(self, pieces: int, zones: dict[str, str], *, up: int = 2, down: int = 4) -> None:
        concurrency = ReadConcurrency(4)
        self.nodes, self.transfers = NodeTable(pieces), TransferTable(pieces, up)
        self.read_queue = ReadQueue(pieces, seed=0)
        self.waiting_nodes = WaitingNodes(self.nodes, self.read_queue, concurrency)
        self.readers = ReaderRanking(self.nodes, concurrency, down, pieces)
        self.uploaders = UploaderRanking(self.nodes)
        self.output = TrackerOutput()
        self.copies = CopyTable(
            [SIZE] * pieces,
            nodes=self.nodes,
            transfers=self.transfers,
            waiting_nodes=self.waiting_nodes,
            readers=self.readers,
            output=self.output,
        )
        self.selector = UploaderSelector(self.nodes, self.copies, self.uploaders, self.transfers)
        self.select_uploader = self.selector.select
        self.select_read = ReadSelector(
            self.nodes, self.copies, self.read_queue, self.readers
        ).select
        for name, zone in zones.items():
            self.nodes.add(name, zone, self.transfers.add_node(name))

    def hold(self, name: str, *pieces: int) -> None:
        for piece in pieces:
            self.copies.note_copy(self.nodes[name], piece, f"d{piece}", vote=True)

    def give(self, receiver: str, uploader: str) -> str | None:
        """Return who gives piece 0 to a node, after a transfer of the same path was begun."""
        chosen = self.select_uploader(self.nodes[receiver], 0)
        assert chosen is None or chosen.id == uploader
        return chosen.id if chosen else None


def test_a_reader_that_is_slow_and_behind_leaves_the_reads_to_others():
    parts = Parts(100, {"quick": "", "slow": ""})
    quick, slow = parts.nodes["quick"], parts.nodes["slow"]
    parts.readers.note_read(quick, SIZE, 1.0, 1.0, 1.0)
    parts.readers.note_read(slow, SIZE, 10.0, 10.0, 10.0)
    assert not parts.readers.is_slow(slow)  # both lack the same
    parts.hold("quick", *range(9))
    assert parts.readers.is_slow(slow)
    assert not parts.readers.is_slow(quick)
    slow.queues.fetches.append(0)
    assert not parts.readers.may_read(slow)
    slow.queues.fetches.clear()  # it could fetch nothing else
    assert parts.readers.may_read(slow)


def test_the_first_read_of_a_zone_is_one_nodes():
    parts = Parts(10, {"a": "x", "b": "x", "c": "y"})
    a, b = parts.nodes["a"], parts.nodes["b"]
    parts.transfers.begin_read(a.transfers, 0, 0.0)
    assert parts.readers.is_probing(b)
    assert not parts.readers.is_probing(parts.nodes["c"])
    parts.transfers.end(a.transfers, 0, STORE, 1.0)
    parts.readers.note_read(a, SIZE, 1.0, 1.0, 1.0)
    assert not parts.readers.is_probing(b)


def test_an_uploader_that_is_late_within_its_zone_is_slow_until_it_gives_there():
    parts = Parts(10, {"a": "x", "b": "x", "c": "y"})
    a, b, c = (parts.nodes[name] for name in "abc")
    parts.copies.mark_slow(a)
    parts.uploaders.note_fetch(a, c, SIZE, 1.0)
    assert a.rates.is_slow
    parts.uploaders.note_fetch(a, b, SIZE, 2.0)
    assert not a.rates.is_slow
    assert parts.uploaders.get_rate(a, b) == SIZE / 2.0
    parts.uploaders.note_failed_upload(a, b)
    assert parts.uploaders.get_rate(a, b) == SIZE / 4.0


def test_a_node_that_fetches_far_slower_than_the_quickest_is_a_slow_fetcher():
    parts = Parts(10, dict.fromkeys("abc", ""))
    a, b, c = (parts.nodes[name] for name in "abc")
    parts.uploaders.note_fetch(a, b, SIZE, 1.0)
    parts.uploaders.note_fetch(a, c, SIZE, 5.0)
    assert parts.uploaders.is_slow_fetcher(c)
    assert not parts.uploaders.is_slow_fetcher(b)
    parts.nodes.remove(b)
    parts.uploaders.update()
    assert not parts.uploaders.is_slow_fetcher(c)


def test_a_path_is_known_after_a_few_transfers():
    parts = Parts(10, {"a": "x", "b": "y"})
    a, b = parts.nodes["a"], parts.nodes["b"]
    unknown = parts.uploaders.compute_timeout(a, b, SIZE)
    for _ in range(4):
        assert not parts.uploaders.knows_path(a, b)
        parts.uploaders.note_fetch(a, b, SIZE, 1.0)
    assert parts.uploaders.knows_path(a, b)
    assert parts.uploaders.compute_timeout(a, b, SIZE) < unknown


def test_a_holder_of_the_own_zone_gives_before_others():
    parts = Parts(1, {"far": "y", "near": "x", "node": "x"})
    parts.hold("far", 0)
    assert parts.give("node", "far") == "far"
    parts.hold("near", 0)
    assert parts.give("node", "near") == "near"
    parts.nodes["near"].transfers.uploads = 2
    assert parts.give("node", "near") is None  # it is waited for, as one copy a zone is enough


def test_transfers_to_other_zones_leave_half_of_the_slots_to_neighbours():
    parts = Parts(1, {"uploader": "x", "neighbour": "x", "far": "y", "other": "y"})
    parts.hold("uploader", 0)
    uploader = parts.nodes["uploader"].transfers
    uploader.uploads, uploader.low_priority = 1, {("far", 0)}
    assert parts.give("other", "uploader") is None
    assert parts.give("neighbour", "uploader") == "uploader"


def test_a_first_copy_is_queued_by_all_that_lack_it_and_those_first_that_lack_most():
    parts = Parts(3, dict.fromkeys("abc", ""))
    parts.hold("c", 1)
    parts.hold("a", 0)
    assert list(parts.nodes["b"].queues.fetches) == [1, 0]
    assert [node.id for node in parts.waiting_nodes.take_most_lacking()] == ["b", "a", "c"]
    assert parts.waiting_nodes.take_most_lacking() == []


def test_a_waiting_node_moves_with_the_number_of_pieces_that_it_lacks():
    parts = Parts(3, dict.fromkeys("abc", ""))
    for name in "abc":
        parts.waiting_nodes.mark(parts.nodes[name])
    for name, piece in (("a", 1), ("a", 2), ("b", 1)):
        parts.nodes.note_copy(parts.nodes[name], piece)
    parts.nodes.remove(parts.nodes["c"])
    parts.waiting_nodes.mark(parts.nodes["a"])
    parts.nodes.forget_copy(parts.nodes["a"], 1)
    parts.nodes.forget_copy(parts.nodes["a"], 2)
    parts.waiting_nodes.queue_vote_read(parts.nodes["a"], 2)
    assert [node.id for node in parts.waiting_nodes.take_most_lacking()] == ["a", "b"]
    assert parts.waiting_nodes.take_most_lacking() == []


def test_a_node_is_blocked_until_a_holder_of_what_it_lacks_has_a_slot():
    parts = Parts(2, dict.fromkeys(["holder", "first", "second", "node"], ""))
    parts.hold("holder", 0)
    node, holder = parts.nodes["node"], parts.nodes["holder"].transfers
    assert not parts.selector.is_blocked(node)
    for name in ("first", "second"):
        parts.transfers.begin_fetch(parts.nodes[name].transfers, 0, holder, "d0", 0.0)
    assert parts.selector.is_blocked(node)
    assert parts.selector.skip_blocked(node, 16) == 16
    parts.transfers.end(parts.nodes["first"].transfers, 0, "holder", 1.0)
    assert not parts.selector.is_blocked(node)
    assert parts.selector.skip_blocked(node, 16) == 0
    assert not parts.selector.is_blocked(parts.nodes["first"])
    assert parts.selector.is_blocked(parts.nodes["second"])  # the piece is on its way


def test_only_the_last_holders_of_a_piece_offer_it():
    parts = Parts(1, {f"n{i}": "" for i in range(MAX_CANDIDATES + 2)})
    for i in range(MAX_CANDIDATES + 1):
        parts.hold(f"n{i}", 0)
    assert parts.nodes["n0"].transfers.offers == 0
    assert parts.nodes["n1"].transfers.offers == 1
    parts.nodes.remove(parts.nodes["n5"])
    parts.copies.forget_node(parts.nodes["n5"])
    assert parts.nodes["n0"].transfers.offers == 1
    assert parts.nodes["n5"].transfers.offers == 0


def test_what_the_owner_settles_is_dropped_where_it_differs():
    parts = Parts(1, dict.fromkeys("ab", ""))
    parts.copies.note_copy(parts.nodes["a"], 0, "x", vote=True)
    parts.copies.note_copy(parts.nodes["b"], 0, "y", vote=True)
    assert parts.output.disputed == [0]
    parts.copies.settle(0, "y")
    assert parts.output.orders == [PieceOrder("a", 0, STORE, drop=True)]
    assert list(parts.copies[0].holders) == ["b"]
    assert not parts.copies.is_disputed(0)


def test_what_a_distrusted_node_decided_is_open_again():
    parts = Parts(1, dict.fromkeys("abc", ""))
    parts.copies.require_votes([2])
    parts.read_queue.take_first(lambda number: ReadChoice.TAKE)  # somebody has read it
    for name in "ab":
        parts.copies.note_copy(parts.nodes[name], 0, "x", vote=True)
    parts.copies.note_copy(parts.nodes["c"], 0, "x", vote=False)
    parts.copies.distrust(parts.nodes["a"])
    assert parts.copies[0].votes.digest == ""
    assert parts.copies.has_too_few_votes(0)
    assert [order.node for order in parts.output.orders] == ["a", "c"]


def test_a_node_reads_alone_what_only_shunned_nodes_have():
    parts = Parts(2, dict.fromkeys("ab", ""))
    parts.hold("a", 0)
    b = parts.nodes["b"]
    b.trust.excluded.add("a")
    b.queues.without_uploader.append(0)
    assert parts.select_read(b, 0.0) == 0
    assert parts.select_read(b, 0.0) == 1  # nobody has it


def test_a_node_does_not_vote_twice_for_a_piece():
    parts = Parts(1, dict.fromkeys("ab", ""))
    parts.copies.require_votes([2])
    parts.hold("a", 0)
    assert parts.select_read(parts.nodes["a"], 0.0) is None
    assert parts.select_read(parts.nodes["b"], 0.0) == 0
    assert not parts.read_queue.has_any


def test_the_store_is_compared_with_the_nodes_only_when_nothing_waits_for_it():
    parts = Parts(3, dict.fromkeys("ab", ""))
    direct = DirectReads(parts.nodes, parts.copies, parts.read_queue, allowed=True)
    parts.hold("a", 0, 1, 2)
    a, b = parts.nodes["a"], parts.nodes["b"]
    direct.note_read(b, 1_000_000, 1.0, 0.0)
    parts.transfers.begin_fetch(b.transfers, 0, a.transfers, "d0", 0.0)
    for now in range(5):
        direct.compare(float(now))
    assert direct.reason == ""  # pieces wait for their first read
    while parts.read_queue.take_first(lambda number: ReadChoice.TAKE) is not None:
        pass
    for now in range(5, 10):
        direct.compare(float(now))
    assert "the store gave each node 1.0 MB/s" in direct.reason


def test_late_transfers_name_the_reader_or_the_uploader():
    parts = Parts(2, dict.fromkeys("ab", ""))
    late = LateTransfers()
    late.note(parts.nodes["a"], 0, STORE, 1.0, 2.0)
    late.note(parts.nodes["a"], 0, STORE, 3.0, 2.0)
    assert (late.nodes, late.very) == ({"a"}, False)
    late.note(parts.nodes["a"], 1, "b", 9.0, 2.0)
    assert (late.nodes, late.very) == ({"a", "b"}, True)
