"""The tracker, in simulated time: what it orders, whatever happens to the nodes."""

import heapq
import random
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.swarm.settings import LimitSettings
from millrace.swarm.tracker import STORE, PieceOrder, Tracker
from tests.support.examples import scale_examples
from tests.unit.swarm.network import Network


@dataclass
class Swarm:
    """Nodes that carry out orders, each after a while of its own."""

    tracker: Tracker
    seconds: Callable[[PieceOrder], float]
    fails: Callable[[PieceOrder], bool] = lambda _: False
    now: float = 0.0
    has: dict[str, set[int]] = field(default_factory=dict)
    orders: list[PieceOrder] = field(default_factory=list)
    pending: list[tuple[float, int, PieceOrder]] = field(default_factory=list)
    up: Counter[str] = field(default_factory=Counter)
    down: Counter[str] = field(default_factory=Counter)
    most_up: int = 0

    def give(self, orders: list[PieceOrder]) -> None:
        for order in orders:
            if order.drop:
                self.has[order.node].discard(order.piece)
                continue
            assert order.piece not in self.has[order.node], "it has that piece"
            if order.source != STORE:
                assert order.source in self.has, "a dead node's piece"
                assert order.piece in self.has[order.source], "ordered from a node that lacks it"
                self.up[order.source] += 1
                self.most_up = max(self.most_up, self.up[order.source])
            self.orders.append(order)
            entry = (self.now + self.seconds(order), len(self.orders), order)
            heapq.heappush(self.pending, entry)

    def join(self, name: str, have: dict[int, str] | None = None, zone: str = "") -> None:
        self.has[name] = set(have or {})
        self.give(self.tracker.add_node(name, (have or {}).items(), self.now, zone=zone))

    def begin(self) -> None:
        self.give(self.tracker.begin(self.now))

    def lose(self, name: str) -> None:
        del self.has[name]
        self.give(self.tracker.remove_node(name, self.now))

    def step(self) -> bool:
        """Carry out the next order, or let time pass; False when nothing is left to do."""
        if not any(map(self.tracker.lacks_any, self.has)):
            return False
        if not self.pending:
            self.now += 0.5
            self.give(self.tracker.tick(self.now))
            return True
        self.now, _, order = heapq.heappop(self.pending)
        if order.source != STORE:
            self.up[order.source] -= 1
        if order.node not in self.has:
            return True
        if self.fails(order) or (order.source != STORE and order.source not in self.has):
            self.give(self.tracker.fail_transfer(order.node, order.piece, order.source, self.now))
        elif order.piece in self.has[order.node]:
            self.give(
                self.tracker.note_redundant_transfer(
                    order.node, order.piece, order.source, self.now
                )
            )
        else:
            self.has[order.node].add(order.piece)
            self.give_up_others(order)
            self.give(
                self.tracker.complete_transfer(
                    order.node, order.piece, order.source, f"d{order.piece}", self.now
                )
            )
        self.give(self.tracker.tick(self.now))
        return True

    def give_up_others(self, done: PieceOrder) -> None:
        """End other transfers of a piece that has come, as agents do."""
        if not any((o.node, o.piece) == (done.node, done.piece) for _, _, o in self.pending):
            return
        self.pending = [
            (min(at, self.now + 1.0), number, order)
            if (order.node, order.piece) == (done.node, done.piece)
            else (at, number, order)
            for at, number, order in self.pending
        ]
        heapq.heapify(self.pending)

    def pass_time(self) -> None:
        """Carry out the next order, or let a second pass if that takes longer."""
        if self.pending and self.pending[0][0] < self.now + 1.0:
            self.step()
        else:
            self.now += 1.0
            self.give(self.tracker.tick(self.now))

    def finish(self) -> None:
        for _ in range(200_000):
            if not self.step():
                return
        raise AssertionError("it never ended")

    def count_reads(self) -> Counter[int]:
        return Counter(order.piece for order in self.orders if order.source == STORE)


def test_each_piece_leaves_the_store_once():
    swarm = Swarm(Tracker([1] * 100), lambda _: 1.0)
    for i in range(8):
        swarm.join(f"n{i}")
    swarm.begin()
    swarm.finish()
    assert all(have == set(range(100)) for have in swarm.has.values())
    assert swarm.count_reads() == Counter(range(100))
    assert swarm.most_up <= LimitSettings().uploads_per_node


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_a_piece_that_needs_two_votes_leaves_the_store_twice(nodes):
    swarm = Swarm(Tracker([1] * 100, votes_needed=[2] * 100), lambda _: 1.0)
    for i in range(nodes):
        swarm.join(f"n{i}")
    swarm.begin()
    swarm.finish()
    assert swarm.count_reads() == Counter(dict.fromkeys(range(100), 2))


def test_what_a_node_has_already_is_not_fetched_and_is_given_to_others():
    swarm = Swarm(Tracker([1] * 20), lambda _: 1.0)
    swarm.join("full", {i: f"d{i}" for i in range(20)})
    swarm.join("empty")
    swarm.begin()
    swarm.finish()
    assert {order.source for order in swarm.orders} == {"full"}


@pytest.mark.parametrize("nodes", [2, 64, 500])
def test_one_piece_reaches_all_nodes_in_a_logarithm_of_hops(nodes):
    swarm = Swarm(Tracker([1000]), lambda _: 1.0)
    for i in range(nodes):
        swarm.join(f"n{i}")
    swarm.begin()
    swarm.finish()
    assert swarm.count_reads() == Counter([0])
    hops = 1  # one from the store; then each that has it gives it to as many as it may
    while (1 + LimitSettings().uploads_per_node) ** (hops - 1) < nodes:
        hops += 1
    assert swarm.now <= hops + 1


def test_a_zone_fetches_each_piece_once_from_another_one():
    tracker = Tracker([1] * 40)
    swarm = Swarm(tracker, lambda order: 1.0 + order.piece % 3)
    zones = {f"n{i}": f"zone-{i % 3}" for i in range(12)}
    for name, zone in zones.items():
        swarm.join(name, zone=zone)
    swarm.begin()
    swarm.finish()
    entered = Counter(
        (zones[order.node], order.piece)
        for order in swarm.orders
        if order.source == STORE or zones[order.source] != zones[order.node]
    )
    assert set(entered.values()) == {1}
    assert len(entered) == 3 * 40


@settings(max_examples=scale_examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    nodes=st.integers(1, 9),
    pieces=st.integers(1, 40),
    deaths=st.integers(0, 8),
    late=st.integers(0, 3),
)
def test_whatever_fails_or_dies_the_others_get_everything(seed, nodes, pieces, deaths, late):
    rng = random.Random(seed)
    swarm = Swarm(
        Tracker([rng.randrange(1, 100) for _ in range(pieces)]),
        lambda _: rng.uniform(0.01, 30.0),
        lambda _: rng.random() < 0.2,
    )
    for i in range(nodes):
        swarm.join(f"n{i}", {p: f"d{p}" for p in range(pieces) if rng.random() < 0.1})
    swarm.begin()
    for i in range(late):
        for _ in range(rng.randrange(20)):
            swarm.step()
        swarm.join(f"late{i}")
    for _ in range(min(deaths, len(swarm.has) - 1)):
        for _ in range(rng.randrange(30)):
            swarm.step()
        swarm.lose(rng.choice(sorted(swarm.has)))
    swarm.finish()
    assert all(have == set(range(pieces)) for have in swarm.has.values())


def test_what_nobody_lacks_any_more_hides_nothing_that_is_still_to_be_read():
    swarm = Swarm(
        Tracker([1] * 60), lambda _: 1.0, lambda order: order.source == "slow" or order.node == "b"
    )
    swarm.join("slow", {piece: f"d{piece}" for piece in range(40)})
    swarm.join("b")
    swarm.begin()
    while not list_slow(swarm.tracker):  # what it has is to be read from the store again
        swarm.step()
    swarm.lose("b")
    swarm.finish()
    assert swarm.has == {"slow": set(range(60))}


def list_slow(tracker: Tracker) -> list[str]:
    """Return the nodes whose uploads within their own zone are late."""
    return [node.id for node in tracker._nodes if node.rates.is_slow]


def spoil(swarm: Swarm, wrong: Callable[[PieceOrder], bool]) -> Counter[str]:
    """Carry all out, where some transfers bring wrong bytes; says how often each node gave them."""
    seen: Counter[str] = Counter()
    while any(map(swarm.tracker.lacks_any, swarm.has)):
        if not swarm.pending:
            swarm.now += 0.5
            swarm.give(swarm.tracker.tick(swarm.now))
            continue
        swarm.now, _, order = heapq.heappop(swarm.pending)
        if order.source != STORE:
            swarm.up[order.source] -= 1
        if order.source != STORE and wrong(order):
            seen[order.source] += 1
            told = swarm.tracker.fail_transfer(
                order.node, order.piece, order.source, swarm.now, wrong=True
            )
        else:
            swarm.has[order.node].add(order.piece)
            digest = f"d{order.piece}"
            told = swarm.tracker.complete_transfer(
                order.node, order.piece, order.source, digest, swarm.now
            )
        swarm.give(told)
    return seen


def test_a_node_that_gives_wrong_bytes_is_asked_no_more():
    swarm = Swarm(Tracker([1] * 30), lambda _: 1.0)
    for name in ("good", "bad", "other"):
        swarm.join(name)
    swarm.begin()
    seen = spoil(swarm, lambda order: order.source == "bad")
    assert swarm.tracker.untrusted_nodes == ["bad"]
    assert seen["bad"] <= 2 * LimitSettings().uploads_per_node


def test_one_node_alone_is_not_believed_and_gets_its_bytes_elsewhere():
    swarm = Swarm(Tracker([1] * 30), lambda _: 1.0)
    for name in ("a", "b", "c", "broken"):
        swarm.join(name)
    swarm.begin()
    seen = spoil(swarm, lambda order: order.node == "broken")
    assert swarm.tracker.untrusted_nodes == []
    assert set(seen) == {"a", "b", "c"}
    assert all(have == set(range(30)) for have in swarm.has.values())
    others = [order for order in swarm.orders if order.node != "broken"]
    assert max(Counter(o.piece for o in others if o.source == STORE).values()) == 1


def test_a_store_that_fails_a_node_that_reads_alone_is_given_a_pause():
    tracker = Tracker([1])
    for name in ("a", "b", "c"):
        tracker.add_node(name, [(0, "d0")] if name == "a" else [], 0.0)
    assert {order.source for order in tracker.begin(0.0)} == {"a"}
    told = tracker.fail_transfer("b", 0, "a", 1.0, wrong=True)
    assert [(order.node, order.source) for order in told] == [("b", STORE)]
    assert tracker.fail_transfer("b", 0, STORE, 1.0) == []
    told = tracker.tick(1.1)
    assert [(order.node, order.source) for order in told] == [("b", STORE)]


def slow_uplinks(order: PieceOrder) -> float:
    return 1.0 if order.source == STORE else 60.0


def test_nodes_read_from_a_store_that_outruns_them_and_the_reason_is_said():
    swarm = Swarm(Tracker([1_000_000] * 200), slow_uplinks)
    for i in range(4):
        swarm.join(f"n{i}")
    swarm.begin()
    while any(map(swarm.tracker.lacks_any, swarm.has)):
        swarm.step()
        if not swarm.pending or swarm.pending[0][0] > swarm.now + 0.25:
            swarm.now += 0.25
            swarm.give(swarm.tracker.tick(swarm.now))
    assert all(have == set(range(200)) for have in swarm.has.values())
    assert "the store gave each node" in swarm.tracker.direct_reads_reason
    # Seconds, had the nodes but themselves.
    alone = 200 * 3 / 4 * 60.0 / LimitSettings().downloads_per_node
    assert swarm.now < alone / 4


def test_nodes_do_without_a_store_that_outruns_them_where_its_bytes_are_dear():
    swarm = Swarm(Tracker([1_000_000] * 60, LimitSettings(direct_reads=False)), slow_uplinks)
    for i in range(4):
        swarm.join(f"n{i}")
    swarm.begin()
    swarm.finish()
    assert swarm.tracker.direct_reads_reason == ""
    assert max(swarm.count_reads().values()) == 1


def test_a_transfer_that_takes_too_long_is_ordered_from_somewhere_else_too():
    swarm = Swarm(Tracker([1] * 50), lambda order: 1e6 if order.source == "slow" else 0.1)
    for name in ("slow", "a", "b"):
        swarm.join(name)
    swarm.begin()
    while any(map(swarm.tracker.lacks_any, swarm.has)):
        swarm.pass_time()
        assert swarm.now < 120


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("needs", [1, 2])
@pytest.mark.parametrize("pieces", [1, 5, 50, 300])
@pytest.mark.parametrize("zones", [("", "", ""), "xyy", "xyz", "xy", ("", "")])
def test_what_only_a_node_has_that_never_gives_it_is_read_from_the_store(
    zones, pieces, needs, direct
):
    tracker = Tracker(
        [1] * pieces, LimitSettings(direct_reads=direct), votes_needed=[needs] * pieces
    )
    swarm = Swarm(tracker, lambda order: 1e9 if order.source == "slow" else 0.1)
    swarm.join("slow", {piece: f"d{piece}" for piece in range(pieces)}, zone=zones[0])
    for name, zone in zip("ab", zones[1:], strict=False):
        swarm.join(name, zone=zone)
    swarm.begin()
    while any(map(swarm.tracker.lacks_any, swarm.has)):
        swarm.pass_time()
        assert swarm.now < 600


MIB = 1 << 20
MBIT = 1e6 / 8


def zones_over_a_link(
    mbit: float, pieces: int, *, near: int = 2, far: int = 2, direct: bool = True
) -> Network:
    """Two zones of nodes at 200 Mbit/s, the second one behind a shared link."""
    zones = {f"n{i}": "near" if i < near else "far" for i in range(near + far)}
    rates = {f"{name} {way}": 200 * MBIT for name in zones for way in ("up", "down")}
    rates |= {STORE: 200 * MBIT, "near>far": mbit * MBIT, "far>near": mbit * MBIT}
    tracker = Tracker([MIB] * pieces, LimitSettings(direct_reads=direct))
    return Network(tracker, pieces, MIB, rates, zones, "near")


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("near", "far"), [(2, 2), (3, 3), (1, 3)])
@pytest.mark.parametrize(("mbit", "pieces"), [(50, 256), (20, 128), (4, 64)])
def test_a_piece_crosses_a_thin_link_once_and_the_near_zone_does_not_wait(
    mbit, pieces, near, far, direct
):
    network = zones_over_a_link(mbit, pieces, near=near, far=far, direct=direct)
    network.run(2000)
    size = pieces * MIB
    ready = {
        zone: max(network.ready[name] for name in network.zones if network.zones[name] == zone)
        for zone in ("near", "far")
    }
    assert network.store_bytes <= 1.02 * size
    assert sum(network.crossed.values()) <= 1.04 * size
    assert ready["near"] <= 1.3 * size / (200 * MBIT)
    assert ready["far"] <= 1.15 * size / (mbit * MBIT)
    assert network.tracker.direct_reads_reason == ""


def test_a_slow_link_between_zones_is_not_blamed_on_those_who_give_over_it():
    network = zones_over_a_link(4, 64)
    blamed: set[str] = set()
    network.watch = lambda: blamed.update(
        list_slow(network.tracker), network.tracker.untrusted_nodes
    )
    network.run(2000)
    assert blamed == set()


def nodes_of(mbits: list[float], pieces: int, *, zones: int = 1, up: float = 1.0) -> Network:
    """Nodes of set rates, in zones that are as near to each other as to the store."""
    names = {f"n{i}": f"z{i % zones}" if zones > 1 else "" for i in range(len(mbits))}
    rates = {STORE: max(mbits) * MBIT}
    for name, mbit in zip(names, mbits, strict=True):
        rates |= {f"{name} down": mbit * MBIT, f"{name} up": up * mbit * MBIT}
    rates |= {f"{a}>{b}": 1e12 for a in ("", *names.values()) for b in names.values()}
    return Network(Tracker([MIB] * pieces), pieces, MIB, rates, names)


@pytest.mark.parametrize("mbits", [[200, 200, 50, 4], [200, 200, 4, 4], [200, 50, 50, 50]])
def test_slow_nodes_hold_nobody_up(mbits):
    network = nodes_of(mbits, 256)
    network.run(2000)
    size = 256 * MIB
    assert network.store_bytes <= 1.02 * size
    for name, mbit in zip(network.zones, mbits, strict=True):
        assert network.ready[name] <= 1.3 * size / (mbit * MBIT)
    assert network.tracker.direct_reads_reason == ""


@pytest.mark.parametrize("zone", ["", "near"])
@pytest.mark.parametrize("mbits", [[200, 200, 50, 4], [200, 200, 4, 4], [200, 200, 200, 200, 4]])
def test_slow_nodes_hold_nobody_up_whether_their_zone_has_a_name_or_not(mbits, zone):
    network = nodes_of(mbits, 64)
    network.zones = dict.fromkeys(network.zones, zone)
    network.store_zone = zone
    network.run(2000)
    size = 64 * MIB
    slow = sum(mbit < 200 for mbit in mbits)
    assert network.store_bytes <= size + slow * MIB  # what each of them reads first
    for name, mbit in zip(network.zones, mbits, strict=True):
        assert network.ready[name] <= 1.3 * size / (mbit * MBIT)
    assert network.tracker.direct_reads_reason == ""


def test_a_slow_node_of_a_zone_does_not_make_its_zone_slow():
    network = zones_over_a_link(50, 128, near=3)
    network.rates |= {"n2 up": 4 * MBIT, "n2 down": 4 * MBIT}
    network.run(2000)
    size = 128 * MIB
    assert network.store_bytes <= size + 2 * MIB
    assert max(network.ready["n0"], network.ready["n1"]) <= 1.3 * size / (200 * MBIT)
    assert max(network.ready["n3"], network.ready["n4"]) <= 1.15 * size / (50 * MBIT)
    assert network.ready["n2"] <= 1.15 * size / (4 * MBIT)


@pytest.mark.parametrize("zones", [1, 2, 4])
def test_zones_that_are_equally_near_share_the_reads(zones):
    network = nodes_of([100] * 8, 128, zones=zones)
    network.run(100)
    assert network.store_bytes == pytest.approx(128 * MIB)
    assert max(network.ready.values()) <= 1.2 * 128 * MIB / (100 * MBIT)


@pytest.mark.parametrize("zones", [1, 2])
@pytest.mark.parametrize(("count", "mbit", "pieces"), [(4, 200, 512), (8, 100, 128)])
def test_nodes_with_the_same_links_share_the_reads_though_transfers_differ(
    count, mbit, pieces, zones
):
    ratios: list[float] = []
    for seed in range(3):
        network = nodes_of([mbit] * count, pieces, zones=zones)
        network.jitter, network.delay, network.seed = 1.0, 0.02, seed
        network.run(100)
        assert network.store_bytes <= 1.15 * pieces * MIB  # what is late is read twice
        ratios.append(max(network.ready.values()) / (pieces * MIB / (mbit * MBIT)))
    assert statistics.median(ratios) <= 1.25
    assert max(ratios) <= 1.3
