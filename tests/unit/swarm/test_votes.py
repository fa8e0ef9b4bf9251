"""Votes on pieces where nodes disagree, and the owner's own reads, in simulated time."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.swarm.tracker import STORE, PieceOrder, Tracker
from tests.support.examples import scale_examples


@dataclass
class Votes:
    """Nodes that carry out orders in any order; some have, or say that they have, wrong bytes.

    Attributes:
        tracker: Tracker that gives the orders.
        rng: Decides what happens next.
        lies: Node → share of its reads from the store that are wrong.
        alike: Whether all wrong copies of a piece are the same.
        gives_wrong: Nodes that give wrong bytes of what they have right.
        gives_nothing: Nodes that give nothing, whatever they say that they have.
        gives_only: Node → the only nodes that it gives anything.
        claims: Nodes that report wrong bytes of a known piece as received.
        own: Pieces that the owner reads in any case.
        has: Node → piece → digest of its copy.
        inbox: Node → orders that it has not seen yet.
        outbox: Node → what it tells, and the tracker has not heard yet.
    """

    tracker: Tracker
    rng: random.Random
    lies: dict[str, float] = field(default_factory=dict)
    alike: bool = False
    gives_wrong: set[str] = field(default_factory=set)
    gives_nothing: set[str] = field(default_factory=set)
    gives_only: dict[str, set[str]] = field(default_factory=dict)
    claims: set[str] = field(default_factory=set)
    now: float = 0.0
    has: dict[str, dict[int, str]] = field(default_factory=dict)
    inbox: dict[str, deque[PieceOrder]] = field(default_factory=dict)
    outbox: dict[str, deque[Callable[[], list[PieceOrder]]]] = field(default_factory=dict)
    pending: list[PieceOrder] = field(default_factory=list)
    own: set[int] = field(default_factory=set)
    to_read: list[int] = field(default_factory=list)
    reads: int = 0

    def join(self, name: str, have: dict[int, str] | None = None) -> None:
        self.has[name] = dict(have or {})
        self.inbox[name], self.outbox[name] = deque(), deque()
        self.give(self.tracker.add_node(name, list(self.has[name].items()), self.now))

    def lose(self, name: str) -> None:
        for of in (self.has, self.inbox, self.outbox):
            del of[name]
        self.pending = [order for order in self.pending if order.node != name]
        self.give(self.tracker.remove_node(name, self.now))

    def make_wrong(self, node: str, piece: int) -> str:
        return f"wrong-{piece}" if self.alike else f"wrong-{piece}-of-{node}"

    def give(self, orders: list[PieceOrder]) -> None:
        for order in orders:
            if order.node in self.has:
                self.inbox[order.node].append(order)
        self.to_read += self.tracker.take_disputed()
        for name in self.tracker.take_faulty():
            if name in self.has:
                self.lose(name)

    def step(self) -> None:
        """Let one thing happen: orders and events are under way for a while, in their order."""
        self.now += 0.05
        boxes = [box for box in (*self.inbox.values(), *self.outbox.values()) if box]
        what = self.rng.choice(
            ["take"] * bool(boxes) * 2 + ["transfer"] * bool(self.pending)
            + ["read"] * bool(self.to_read) + ["tick"] * (self.rng.random() < 0.2) or ["tick"]
        )  # fmt: skip
        if what == "tick":
            self.now += self.rng.choice([0.5, 20.0])  # after which all that is under way is late
            self.give(self.tracker.tick(self.now))
        elif what == "read":
            piece = self.to_read.pop(self.rng.randrange(len(self.to_read)))
            if piece in self.own or self.tracker.is_disputed(piece):
                self.give(self.tracker.settle_piece(piece, f"d{piece}", self.now))
        elif what == "transfer":
            self.carry_out(self.pending.pop(self.rng.randrange(len(self.pending))))
        else:
            taken = self.rng.choice(boxes).popleft()
            if callable(taken):
                self.give(taken())
            elif taken.drop:
                self.has[taken.node].pop(taken.piece, None)
            else:
                self.reads += taken.source == STORE
                self.pending.append(taken)

    def carry_out(self, order: PieceOrder) -> None:
        name, piece, source = order.node, order.piece, order.source
        tell, tracker = self.outbox[name].append, self.tracker
        if piece in self.has[name]:
            tell(lambda: tracker.note_redundant_transfer(name, piece, source, self.now))
            return
        if source == STORE:
            lied = self.rng.random() < self.lies.get(name, 0.0)
            got = self.make_wrong(name, piece) if lied else f"d{piece}"
            if order.digest not in {"", got} and name not in self.claims:
                tell(lambda: self.tell_wrong_read(name, piece))
                return
        else:
            given = self.has.get(source, {}).get(piece)
            if source in self.gives_nothing or name not in self.gives_only.get(source, {name}):
                given = None
            bad = given is not None and (given != order.digest or source in self.gives_wrong)
            if given is None or bad:
                tell(lambda: tracker.fail_transfer(name, piece, source, self.now, wrong=bad))
                return
            got = given
        self.has[name][piece] = got
        tell(lambda: tracker.complete_transfer(name, piece, source, got, self.now))

    def tell_wrong_read(self, name: str, piece: int) -> list[PieceOrder]:
        """Tell the tracker of a read whose bytes the node found wrong, and the owner right."""
        orders = self.tracker.fail_transfer(name, piece, STORE, self.now, wrong=True)
        return orders + self.tracker.count_wrong_read(name, self.now)

    def finish(self) -> None:
        for _ in range(100_000):
            under_way = self.to_read or any(self.inbox.values()) or any(self.outbox.values())
            if not any(map(self.tracker.lacks_any, self.has)) and not under_way:
                return
            self.step()
        raise AssertionError("it never ended")


@settings(max_examples=scale_examples(200), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    honest=st.integers(2, 6),
    liars=st.integers(0, 4),
    needs=st.integers(1, 2),
    pieces=st.integers(1, 30),
    deaths=st.integers(0, 3),
    late=st.integers(0, 2),
)
# A node that is not trusted gets from a dead one what it was to read for all.
@example(seed=241, honest=3, liars=3, needs=1, pieces=23, deaths=1, late=1)
def test_nodes_that_lie_each_for_itself_give_nobody_wrong_bytes(
    seed, honest, liars, needs, pieces, deaths, late
):
    rng = random.Random(seed)
    swarm = Votes(Tracker([100] * pieces, votes_needed=[needs] * pieces, seed=seed), rng)
    names = [f"h{i}" for i in range(honest)] + [f"liar{i}" for i in range(liars)]
    rng.shuffle(names)
    for name in names:
        if name.startswith("liar"):
            swarm.lies[name] = rng.choice([0.1, 1.0])
            if rng.random() < 0.3:
                swarm.gives_wrong.add(name)
            elif rng.random() < 0.3:
                swarm.gives_nothing.add(name)
        right = {p: f"d{p}" for p in range(pieces) if rng.random() < 0.1}
        false = {p: swarm.make_wrong(name, p) for p in range(pieces) if rng.random() < 0.5}
        swarm.join(name, false if name in swarm.lies and rng.random() < 0.5 else right)
    swarm.give(swarm.tracker.begin(swarm.now))
    for i in range(late):
        for _ in range(rng.randrange(40)):
            swarm.step()
        swarm.join(f"late{i}")
    for _ in range(min(deaths, honest - 2)):
        for _ in range(rng.randrange(60)):
            swarm.step()
        swarm.lose(rng.choice(sorted(n for n in swarm.has if n.startswith("h"))))
    swarm.finish()
    for name in swarm.has.keys() - swarm.lies.keys():
        assert swarm.has[name].keys() == set(range(pieces))
        if needs == 2:  # where one vote is enough, the node sees that the whole is wrong
            assert swarm.has[name] == {p: f"d{p}" for p in range(pieces)}
    assert not {name for name in swarm.tracker.untrusted_nodes if name not in swarm.lies}


@settings(max_examples=scale_examples(200), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    honest=st.integers(1, 3),
    liars=st.integers(1, 5),
    needs=st.integers(1, 2),
    pieces=st.integers(1, 20),
    late=st.integers(0, 2),
)
@example(seed=6082, honest=1, liars=2, needs=1, pieces=19, late=1)
@example(seed=18087, honest=1, liars=5, needs=2, pieces=8, late=1)
@example(seed=132, honest=1, liars=2, needs=2, pieces=11, late=2)
def test_nodes_that_give_only_to_some_hold_nobody_up(seed, honest, liars, needs, pieces, late):
    rng = random.Random(seed)
    swarm = Votes(Tracker([100] * pieces, votes_needed=[needs] * pieces, seed=seed), rng)
    names = [f"h{i}" for i in range(honest)] + [f"liar{i}" for i in range(liars)]
    rng.shuffle(names)
    for name in names:
        right = {}
        if name.startswith("liar"):
            swarm.lies[name] = rng.choice([0.0, 0.0, 0.1, 1.0])
            swarm.gives_only[name] = {other for other in names if rng.random() < 0.3}
            right = {p: f"d{p}" for p in range(pieces) if rng.random() < 0.9}
        swarm.join(name, right)
    swarm.give(swarm.tracker.begin(swarm.now))
    for i in range(late):
        for _ in range(rng.randrange(400)):
            swarm.step()
        swarm.join(f"late{i}")
        swarm.lose(next(name for name in swarm.has if not name.startswith("liar")))
    swarm.finish()
    for name in swarm.has.keys() - swarm.lies.keys():
        assert swarm.has[name].keys() == set(range(pieces))


@settings(max_examples=scale_examples(100), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), honest=st.integers(1, 4), pieces=st.integers(1, 20))
def test_what_the_owner_reads_itself_stands_against_any_number_of_votes(seed, honest, pieces):
    rng = random.Random(seed)
    swarm = Votes(Tracker([100] * pieces, votes_needed=[2] * pieces, seed=seed), rng, alike=True)
    swarm.lies = {f"liar{i}": 1.0 for i in range(honest + 1)}
    for name in rng.sample([*swarm.lies, *(f"h{i}" for i in range(honest))], 2 * honest + 1):
        swarm.join(name)
    swarm.own, swarm.to_read = set(range(pieces)), list(range(pieces))
    swarm.give(swarm.tracker.begin(swarm.now))
    swarm.finish()
    for i in range(honest):
        assert swarm.has[f"h{i}"] == {p: f"d{p}" for p in range(pieces)}


@settings(max_examples=scale_examples(200), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    honest=st.integers(1, 4),
    liars=st.integers(1, 4),
    pieces=st.integers(1, 20),
    alike=st.booleans(),
)
def test_where_digests_are_known_one_honest_node_among_any_number_of_liars_is_enough(
    seed, honest, liars, pieces, alike
):
    rng = random.Random(seed)
    known = {p: f"d{p}" for p in range(pieces)}
    swarm = Votes(Tracker([100] * pieces, known_digests=known, seed=seed), rng, alike=alike)
    names = [f"h{i}" for i in range(honest)] + [f"liar{i}" for i in range(liars)]
    rng.shuffle(names)
    for name in names:
        have = {p: f"d{p}" for p in range(pieces) if rng.random() < 0.1}
        if name.startswith("liar"):
            swarm.lies[name] = rng.choice([0.1, 1.0])
            for kind in (swarm.claims, swarm.gives_wrong, swarm.gives_nothing):
                if rng.random() < 0.3:
                    kind.add(name)
                    break
            if rng.random() < 0.3:
                have = {p: swarm.make_wrong(name, p) for p in range(pieces) if rng.random() < 0.5}
        swarm.join(name, have)
    swarm.give(swarm.tracker.begin(swarm.now))
    swarm.finish()
    assert {f"h{i}" for i in range(honest)} <= swarm.has.keys()
    for has in swarm.has.values():
        assert has == known
    assert all(swarm.tracker.is_decided(p) for p in range(pieces))
    assert not {name for name in swarm.tracker.untrusted_nodes if name not in swarm.lies}


def test_of_two_nodes_that_read_known_pieces_the_one_that_flips_bits_is_named():
    known = {p: f"d{p}" for p in range(20)}
    swarm = Votes(Tracker([100] * 20, known_digests=known), random.Random(0), lies={"bad": 1.0})
    for name in ("a", "bad"):
        swarm.join(name)
    orders = swarm.tracker.begin(0.0)
    assert {order.digest for order in orders} <= set(known.values())
    swarm.give(orders)
    swarm.finish()
    assert swarm.has == {"a": known, "bad": known}  # the bytes came from the other node
    assert swarm.tracker.untrusted_nodes == ["bad"]


def test_a_known_digest_stands_against_the_votes_and_the_reads_of_the_owner():
    tracker = Tracker([100] * 2, votes_needed=[2] * 2, known_digests={0: "d0"})
    for name in ("a", "b"):
        tracker.add_node(name, [(0, "wrong"), (1, "wrong")], 0.0)
    assert [tracker.has("a", piece) for piece in (0, 1)] == [False, True]
    tracker.settle_piece(0, "other", 0.0)
    tracker.add_node("c", [(0, "d0")], 0.0)
    assert tracker.has("c", 0)
    assert tracker.get_known_digest(0) == "d0"
    assert not tracker.take_disputed()


def test_what_two_nodes_have_from_an_earlier_run_is_not_read_again():
    have = {p: f"d{p}" for p in range(40)}
    swarm = Votes(Tracker([100] * 40, votes_needed=[2] * 40), random.Random(0))
    for name, there in (("a", have), ("b", have), ("c", {})):
        swarm.join(name, there)
    swarm.give(swarm.tracker.begin(0.0))
    swarm.finish()
    assert swarm.reads == 0


def test_one_node_alone_has_what_it_read_and_nobody_has_confirmed_it():
    swarm = Votes(Tracker([100] * 3, votes_needed=[2] * 3), random.Random(0))
    swarm.join("a")
    swarm.give(swarm.tracker.begin(0.0))
    swarm.finish()
    assert [swarm.tracker.is_decided(p) for p in range(3)] == [False] * 3


def test_a_node_whose_reads_are_always_wrong_is_given_up():
    swarm = Votes(Tracker([100] * 20, votes_needed=[2] * 20), random.Random(0), lies={"bad": 1.0})
    for name in ("a", "bad", "b"):
        swarm.join(name)
    swarm.own, swarm.to_read = set(range(20)), list(range(20))
    swarm.give(swarm.tracker.begin(0.0))
    swarm.finish()
    assert set(swarm.has) <= {"a", "b", "bad"}
    assert swarm.tracker.untrusted_nodes == ["bad"]
    assert swarm.reads < 100


@dataclass
class Forging(Votes):
    """The same, where one node answers what it likes.

    Attributes:
        answer: Told an order that has to do with ``liar``; returns the orders that follow from
            what that node says, or None if it is carried out.
    """

    answer: Callable[[PieceOrder], list[PieceOrder] | None] = lambda _: None

    def carry_out(self, order: PieceOrder) -> None:
        orders = self.answer(order) if "liar" in {order.node, order.source} else None
        if orders is None:
            super().carry_out(order)
        else:
            self.give(orders)

    def finish_honest(self) -> None:
        """Go on until all nodes but the liar have everything."""
        honest = self.has.keys() - {"liar"}
        for _ in range(20_000):
            if all(len(self.has[name]) == self.pieces for name in honest):
                return
            self.step()
        raise AssertionError({name: len(self.has[name]) for name in honest})

    @property
    def pieces(self) -> int:
        return len(self.tracker._copies)


def forging(needs: int, have: dict[int, str]) -> Forging:
    swarm = Forging(Tracker([100] * 40, votes_needed=[needs] * 40), random.Random(0))
    for name in ("a", "b", "c"):
        swarm.join(name)
    swarm.join("liar", have)
    return swarm


@pytest.mark.parametrize("needs", [1, 2])
def test_a_read_that_a_node_says_it_needs_no_more_is_made_by_another(needs):
    swarm = forging(needs, {})
    tracker = swarm.tracker
    swarm.answer = lambda order: (
        tracker.note_redundant_transfer("liar", order.piece, order.source, swarm.now)
        if order.node == "liar"
        else None
    )
    swarm.give(tracker.begin(0.0))
    swarm.finish_honest()


@pytest.mark.parametrize("needs", [1, 2])
def test_a_node_that_has_everything_and_gives_nothing_holds_nobody_up(needs):
    swarm = forging(needs, {p: f"d{p}" for p in range(40)})
    tracker = swarm.tracker
    swarm.answer = lambda order: tracker.fail_transfer(
        order.node, order.piece, order.source, swarm.now
    )
    swarm.give(tracker.begin(0.0))
    swarm.finish_honest()


@pytest.mark.parametrize("needs", [1, 2])
@pytest.mark.parametrize("liars", [1, 2])
@pytest.mark.parametrize("method", [Tracker.fail_transfer, Tracker.note_redundant_transfer])
def test_nodes_that_end_each_transfer_at_once_keep_no_piece_from_others(method, liars, needs):
    tracker = Tracker([100] * 40, votes_needed=[needs] * 40)
    has = {name: set[int]() for name in ("a", "b")}
    for number in range(liars):
        tracker.add_node(f"liar-{number}", [], 0.0)
    for name in has:
        tracker.add_node(name, [], 0.0)
    orders, now = tracker.begin(0.0), 0.0
    for _ in range(1000):
        later: list[PieceOrder] = []
        for _ in range(50):  # answers of the liars before the others have read anything
            answers: list[PieceOrder] = []
            for order in orders:
                if order.node in has:
                    later.append(order)
                else:
                    answers += method(tracker, order.node, order.piece, order.source, now)
            orders = answers
        for order in later:
            has[order.node].add(order.piece)
            orders += tracker.complete_transfer(
                order.node, order.piece, order.source, f"d{order.piece}", now
            )
        now += 0.05
        orders += tracker.tick(now)
        if all(len(pieces) == 40 for pieces in has.values()):
            return
    raise AssertionError({name: len(pieces) for name, pieces in has.items()})


def test_failures_of_what_was_not_ordered_are_not_believed():
    swarm = forging(1, {})
    swarm.give(swarm.tracker.begin(0.0))
    for _ in range(2000):
        swarm.give(swarm.tracker.fail_transfer("liar", 39, STORE, swarm.now))
    for uploader in ("a", "b", "c"):
        swarm.give(swarm.tracker.fail_transfer("liar", 0, uploader, swarm.now, wrong=True))
    swarm.finish()
    assert not swarm.tracker.untrusted_nodes


def test_a_read_that_keeps_failing_is_tried_without_end():
    tracker = Tracker([100])
    tracker.add_node("a", [], 0.0)
    orders, now = tracker.begin(0.0), 0.0
    for _ in range(2000):
        (order,) = orders
        tracker.fail_transfer("a", order.piece, order.source, now)
        now += 10.0
        orders = tracker.tick(now)


def test_of_two_nodes_neither_is_distrusted_at_the_others_word():
    swarm = Votes(Tracker([100] * 4), random.Random(0))
    swarm.join("a", {p: f"d{p}" for p in range(4)})
    swarm.join("liar")
    for order in swarm.tracker.begin(0.0):
        if order.node == "liar" and order.source == "a":
            swarm.give(swarm.tracker.fail_transfer("liar", order.piece, "a", 0.0, wrong=True))
    assert not swarm.tracker.untrusted_nodes
    assert len(swarm.has["a"]) == 4


def test_what_a_node_that_is_not_trusted_was_to_read_and_got_elsewhere_is_read_by_another():
    tracker = Tracker([100] * 3)
    tracker.add_node("liar", [(1, "x1"), (2, "x2")], 0.0)
    tracker.add_node("b", [(1, "d1"), (2, "d2")], 0.0)
    tracker.add_node("a", [(0, "d0")], 0.0)
    tracker.begin(0.0)
    orders = tracker.remove_node("a", 1.0)
    assert [(order.node, order.piece, order.source) for order in orders] == [("liar", 0, STORE)]
    for piece in (1, 2):
        tracker.settle_piece(piece, f"d{piece}", 1.0)
    assert tracker.untrusted_nodes == ["liar"]
    tracker.complete_transfer("liar", 0, "a", "d0", 2.0)
    orders = tracker.note_redundant_transfer("liar", 0, STORE, 2.0)
    assert PieceOrder("b", 0, STORE) in orders


def test_who_comes_late_reads_what_only_a_node_has_that_is_known_to_give_nothing():
    have = {p: f"d{p}" for p in range(10)}
    swarm = Votes(Tracker([100] * 10), random.Random(0), gives_nothing={"liar"})
    swarm.join("liar", have)
    swarm.join("a")
    swarm.give(swarm.tracker.begin(0.0))
    swarm.finish()
    swarm.lose("a")
    swarm.join("b")
    swarm.finish()
    assert swarm.has["b"] == have


def test_a_node_that_others_slander_reads_itself_what_they_do_not_give():
    have = {p: f"d{p}" for p in range(20)}
    liars = {"liar0", "liar1"}
    swarm = Votes(Tracker([100] * 20), random.Random(0), gives_nothing=set(liars))
    swarm.join("a", {p: f"d{p}" for p in range(2)})
    for name in sorted(liars):
        swarm.join(name, {p: f"d{p}" for p in range(2, 20)})
    for order in swarm.tracker.begin(0.0):
        if order.source == "a":
            swarm.give(swarm.tracker.fail_transfer(order.node, order.piece, "a", 0.0, wrong=True))
        else:
            swarm.give([order])
    assert swarm.tracker.untrusted_nodes == ["a"]
    for _ in range(20_000):
        swarm.step()
    assert swarm.has["a"] == have


def make_untrusted_tracker() -> Tracker:
    """Make a tracker whose node c has two wrong votes."""
    tracker = Tracker([100] * 3, votes_needed=[2] * 3)
    for name in "abc":
        tracker.add_node(name, [], 0.0)
    tracker.begin(0.0)
    for piece in range(2):
        tracker.complete_transfer("c", piece, STORE, "wrong", 0.0)
        tracker.settle_piece(piece, "right", 0.0)
    assert list(tracker.untrusted_nodes) == ["c"]
    return tracker


@pytest.mark.parametrize("order", ["cab", "abc", "acb"])
def test_a_node_that_is_not_trusted_keeps_no_copy_that_the_others_do_not_have(order):
    tracker = make_untrusted_tracker()
    drops: list[PieceOrder] = []
    for name in order:
        digest = "wrong" if name == "c" else "right"
        orders = tracker.complete_transfer(name, 2, STORE, digest, 0.0)
        drops += [order for order in orders if order.drop]
    assert drops == [PieceOrder("c", 2, STORE, drop=True)]


def test_a_node_loses_no_trust_by_votes_that_a_mirror_may_have_sent():
    tracker = Tracker([100] * 3, votes_needed=[2] * 3)
    tracker.add_node("a", [], 0.0)
    tracker.begin(0.0)
    for piece in range(3):
        tracker.excuse_read("a", piece)
        tracker.complete_transfer("a", piece, STORE, "wrong", 0.0)
        tracker.settle_piece(piece, "right", 0.0)
    assert not tracker.untrusted_nodes
    for piece in range(2):  # read again, from the store itself
        tracker.complete_transfer("a", piece, STORE, "wrong", 0.0)
    assert list(tracker.untrusted_nodes) == ["a"]
