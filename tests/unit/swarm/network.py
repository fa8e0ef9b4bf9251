"""A network for the tracker's tests: links of set rates, in simulated time.

Every transfer is a flow over the links between its source and its node. At each moment the flows
have max-min fair rates (progressive filling), as long-lived TCP connections roughly have. With a
`jitter`, each flow has a random weight and a random delay, as short-lived ones have.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from millrace.swarm.tracker import STORE, PieceOrder, Tracker

_TICK = 0.25  # seconds between two ticks of the tracker, as the driver gives them
_LATENCY = 0.01  # seconds from an event to the first byte of what it orders


@dataclass(eq=False, slots=True)
class _Flow:
    order: PieceOrder
    links: tuple[str, ...]
    left: float
    begins: float
    weight: float = 1.0
    rate: float = 0.0


@dataclass
class Network:
    """Nodes that carry out a tracker's orders over links.

    Attributes:
        tracker: Tracker that gives the orders.
        pieces: Number of pieces.
        size: Bytes of every piece.
        rates: Bytes a second of each link: ``NODE up`` and ``NODE down``, `STORE` for the store's
            uplink, ``A>B`` for the link that zones A and B share in this direction.
        zones: Zone of each node; nodes of one zone reach each other by their own links alone.
        store_zone: Zone of the store.
        watch: Called after every event.
        jitter: Standard deviation of the logarithm of a flow's weight.
        delay: Mean seconds that a flow begins late.
        seed: Seed of both.
        now: Simulated time in seconds.
        ready: Time at which each node had every piece.
        store_bytes: Bytes that left the store.
        crossed: Bytes that crossed each shared link.
    """

    tracker: Tracker
    pieces: int
    size: int
    rates: dict[str, float]
    zones: dict[str, str]
    store_zone: str = ""
    watch: Callable[[], None] = lambda: None
    jitter: float = 0.0
    delay: float = 0.0
    seed: int = 0
    now: float = 0.0
    ready: dict[str, float] = field(default_factory=dict)
    store_bytes: float = 0.0
    crossed: dict[str, float] = field(default_factory=dict)
    _flows: list[_Flow] = field(default_factory=list)
    _has: dict[str, set[int]] = field(default_factory=dict)
    _random: random.Random = field(default_factory=random.Random)

    def run(self, limit: float) -> None:
        """Bring every piece to every node, or fail after so many simulated seconds."""
        self._random = random.Random(self.seed)
        for name, zone in self.zones.items():
            self._has[name] = set()
            self._give(self.tracker.add_node(name, [], 0.0, zone=zone))
        self._give(self.tracker.begin(0.0))
        tick = _TICK
        while any(map(self.tracker.lacks_any, self._has)):
            assert self.now < limit, f"not ready after {limit} s: {self.ready}"
            self._share()
            due = [f.begins - self.now for f in self._flows if f.begins > self.now]
            due += [f.left / f.rate for f in self._flows if f.rate > 0]
            self._advance(min([tick - self.now, *due]))
            for flow in [f for f in self._flows if f.left <= 1e-3]:
                self._flows.remove(flow)
                self._land(flow.order)
                self.watch()
            if self.now >= tick - 1e-9:
                self._give(self.tracker.tick(self.now))
                self.watch()
                tick += _TICK

    def _give(self, orders: list[PieceOrder]) -> None:
        for order in orders:
            assert not order.drop
            links = self._route(order)
            weight = self._random.lognormvariate(0.0, self.jitter)
            late = self._random.expovariate(1 / self.delay) if self.delay else 0.0
            begins = self.now + _LATENCY + late
            self._flows.append(_Flow(order, links, self.size, begins, weight))

    def _route(self, order: PieceOrder) -> tuple[str, ...]:
        there = self.zones[order.node]
        store = order.source == STORE
        here = self.store_zone if store else self.zones[order.source]
        first = STORE if store else f"{order.source} up"
        shared = () if here == there else (f"{here}>{there}",)
        return (first, *shared, f"{order.node} down")

    def _share(self) -> None:
        """Give each flow its max-min fair rate, by its weight."""
        room = dict(self.rates)
        open_flows = [f for f in self._flows if f.begins <= self.now]
        for flow in self._flows:
            flow.rate = 0.0
        while open_flows:
            users: dict[str, float] = {}
            for flow in open_flows:
                for link in flow.links:
                    users[link] = users.get(link, 0.0) + flow.weight
            tight = min(users, key=lambda link: room[link] / users[link])
            fair = room[tight] / users[tight]
            for flow in open_flows:
                if tight in flow.links:
                    flow.rate = fair * flow.weight
                    for link in flow.links:
                        room[link] = max(0.0, room[link] - flow.rate)
            open_flows = [f for f in open_flows if tight not in f.links]

    def _advance(self, seconds: float) -> None:
        self.now += seconds
        for flow in self._flows:
            moved = min(flow.left, flow.rate * seconds)
            flow.left -= moved
            if flow.order.source == STORE:
                self.store_bytes += moved
            for link in flow.links:
                if ">" in link:
                    self.crossed[link] = self.crossed.get(link, 0.0) + moved

    def _land(self, order: PieceOrder) -> None:
        name, number, source = order.node, order.piece, order.source
        if number in self._has[name]:
            self._give(self.tracker.note_redundant_transfer(name, number, source, self.now))
            return
        self._has[name].add(number)
        if len(self._has[name]) == self.pieces:
            self.ready[name] = self.now
        self._give(self.tracker.complete_transfer(name, number, source, f"d{number}", self.now))
