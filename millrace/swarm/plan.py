"""Who fetches which piece from whom: a central tracker, and nodes that do as they are told.

A pure state machine: events in, orders out, time given. Pieces are read from the store in order,
each by the node that has a slot free, so the stripes follow what each node can carry. Whoever
lacks a piece is sent to a node that has it, the newest pieces being the rarest; so a single piece
doubles its copies and more at every hop. What is lost, late or wrong is ordered again elsewhere.

After Owl (OSDI '22): the mechanism lies with the peers, every decision with the tracker.
"""

import heapq
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from millrace.swarm.rates import Durations, Outrun, Pace
from millrace.swarm.settings import LimitSettings

STORE = ""
"""The source of a piece that is read from the store."""

_LOOKED_AT = 16  # pieces of a node's queue, and holders of a piece, that one decision looks at
_FED = 8  # waiting nodes that are offered what one event has freed
_VERY_LATE = 4.0  # times what is late
_ACCUSERS = 2  # nodes that must say that one gives wrong bytes, where there are as many
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


@dataclass(frozen=True, slots=True)
class Order:
    """What one node is to do.

    Attributes:
        node: Who.
        piece: Which piece to fetch; with `drop`, to forget.
        source: From which node; `STORE` for the store.
        digest: What it must be; empty for the first read from the store.
        drop: The copy that it has is wrong.
        again: Fetch it although it is there.
    """

    node: str
    piece: int
    source: str
    digest: str = ""
    drop: bool = False
    again: bool = False


@dataclass(slots=True)
class _Node:
    name: str
    zone: str
    have: bytearray
    missing: int
    alive: bool = True
    trusted: bool = True
    slow: bool = False
    """Its last transfer was late: others are asked first, and it reads nothing for them."""
    down: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    """Piece → source → since when."""
    reads: int = 0
    fetches: int = 0
    up: int = 0
    rate: float = 0.0
    """Bytes a second of one piece that it gives, smoothed; 0 before the first."""
    queue: deque[int] = field(default_factory=deque[int])
    """Pieces that some node has and this one lacks, oldest first."""
    shuns: set[str] = field(default_factory=set[str])
    """Nodes that gave it wrong bytes: it asks them no more."""
    alone: deque[int] = field(default_factory=deque[int])
    """Pieces that only those have: it reads them from the store itself."""


@dataclass(slots=True)
class _Piece:
    size: int
    digest: str = ""
    holders: list[str] = field(default_factory=list[str])
    reading: set[str] = field(default_factory=set[str])
    """Nodes that read it from the store."""
    failures: int = 0
    not_before: float = 0.0


@dataclass(slots=True)
class _Late:
    """Transfers that take too long.

    Attributes:
        transfers: Node, piece and source of each.
        nodes: Whose fault it would be.
        very: One takes far too long.
    """

    transfers: list[tuple[_Node, int, str]] = field(default_factory=list[tuple[_Node, int, str]])
    nodes: set[str] = field(default_factory=set[str])
    very: bool = False


class Tracker:
    """Knows who has what, and decides what is fetched next.

    Every method that tells it something returns the orders that follow. It gives none before
    `begin`: what a node has that comes a moment later need not be read from the store.

    Args:
        sizes: Bytes of each piece.
        limits: How much goes on at once.
        seed: Of the pauses before something is read again.

    Attributes:
        disputed: Pieces that two nodes have read differently from the store: the caller has
            somebody read them again, and empties it.
    """

    def __init__(
        self, sizes: Sequence[int], limits: LimitSettings | None = None, *, seed: int = 0
    ) -> None:
        self._pieces = [_Piece(size) for size in sizes]
        self._limits = limits or LimitSettings()
        self._pace = Pace(self._limits.node_store)
        self._outrun = Outrun()
        self._accusers: dict[str, set[str]] = {}  # of a node → who says that it gives wrong bytes
        self._nodes: dict[str, _Node] = {}
        self._unread = list(range(len(sizes)))  # a heap: in no node, and nobody reads it
        self._offered = set(self._unread)  # what is in it
        self._delayed: list[int] = []  # failed at the store: read again later
        self._reads = 0
        self._hungry: set[str] = set()
        self._random = random.Random(seed)
        self._durations = {STORE: Durations(), "peer": Durations()}
        self._orders: list[Order] = []
        self._begun = False
        self.disputed: list[int] = []

    def begin(self, now: float) -> list[Order]:
        """Give orders from now on: those that were expected have come."""
        self._begun = True
        for node in self._nodes.values():
            if node.alive:
                self._feed(node, now)
        return self._taken()

    @property
    def nodes(self) -> list[str]:
        """The nodes that live."""
        return [node.name for node in self._nodes.values() if node.alive]

    @property
    def quarantined(self) -> list[str]:
        """The nodes that nothing is fetched from any more."""
        return [node.name for node in self._nodes.values() if not node.trusted]

    @property
    def direct(self) -> str:
        """Why nodes read from the store what others have; empty while they do not."""
        return self._outrun.why

    def complete(self) -> bool:
        """Whether every living node has every piece."""
        return all(node.missing == 0 for node in self._nodes.values() if node.alive)

    def held(self, node: str, sizes: Sequence[int]) -> list[int]:
        """The sizes of the pieces that a node has; of one that never joined, none."""
        known = self._nodes.get(node)
        return [size for size, has in zip(sizes, known.have, strict=True) if has] if known else []

    def has(self, node: str, piece: int) -> bool:
        """Whether a node has a piece."""
        return bool(self._nodes[node].have[piece])

    def joined(
        self, name: str, have: Iterable[tuple[int, str]], now: float, *, zone: str = ""
    ) -> list[Order]:
        """A node has come, with the pieces (and their digests) that it holds already."""
        node = _Node(name, zone, bytearray(len(self._pieces)), len(self._pieces))
        self._nodes[name] = node
        for number, piece in enumerate(self._pieces):
            if piece.holders:
                node.queue.append(number)
        for number, digest in have:
            piece = self._pieces[number]
            if piece.digest in {"", digest}:
                self._gained(node, number, digest)
            else:
                self._orders.append(Order(name, number, STORE, drop=True))
        self._feed(node, now)
        self._feed_hungry(now)
        return self._taken()

    def done(self, name: str, number: int, source: str, digest: str, now: float) -> list[Order]:
        """A node has a piece, of this digest.

        From another node it is of the digest that was ordered, or the agent says `failed`. What
        two nodes read from the store may differ: the first one's stands, and the other reads it
        from a node.
        """
        node, piece = self._nodes[name], self._pieces[number]
        since = self._over(node, number, source)
        if since is not None:
            self._measure(node, piece, source, now - since, now)
        if not node.alive or node.have[number]:
            return self._taken()
        if piece.digest not in {"", digest}:
            self._orders.append(Order(name, number, STORE, drop=True))
            if source == STORE:
                self.disputed.append(number)
            self._enqueue(node, number)
        else:
            piece.failures = 0
            self._gained(node, number, digest)
        self._feed(node, now)
        self._feed_hungry(now)
        return self._taken()

    def failed(
        self, name: str, number: int, source: str, now: float, *, wrong: bool = False
    ) -> list[Order]:
        """A node could not fetch a piece from a source; ``wrong``: the bytes were not right."""
        node, piece = self._nodes[name], self._pieces[number]
        self._over(node, number, source)
        if source == STORE:
            self._read_again(number, now)
        elif (giver := self._nodes.get(source)) is not None:
            if wrong:
                self._accuse(node, giver)
            else:
                giver.rate /= 2
        if node.alive and not node.have[number] and piece.holders:
            self._enqueue(node, number)
        if node.alive:
            self._feed(node, now)
        self._feed_hungry(now)
        return self._taken()

    def ended(self, name: str, number: int, source: str, now: float) -> list[Order]:
        """A node needs a piece from this source no more: another one was quicker."""
        node = self._nodes[name]
        self._over(node, number, source)
        if node.alive:
            self._feed(node, now)
        self._feed_hungry(now)
        return self._taken()

    def lost(self, name: str, now: float) -> list[Order]:
        """A node is gone, with what it had."""
        node = self._nodes.get(name)
        if node is None or not node.alive:
            return []
        node.alive = False
        for number, sources in list(node.down.items()):
            for source in list(sources):
                self._over(node, number, source)
            self._offer_if_nobody_has(number)
        self._forget_holder(node)
        for other in self._nodes.values():
            if other.alive:
                for number, sources in list(other.down.items()):
                    if name in sources:
                        self._over(other, number, name)
                        self._enqueue(other, number)
                self._feed(other, now)
        return self._taken()

    def tick(self, now: float) -> list[Order]:
        """Time has passed: what was delayed is due, and what is late is ordered elsewhere too."""
        delayed, self._delayed = self._delayed, []
        for number in delayed:
            if self._pieces[number].not_before <= now:
                self._offer_to_read(number)
            else:
                self._delayed.append(number)
        self._hedge(now)
        self._look_at_rates(now)
        for node in self._nodes.values():
            if node.alive:
                self._feed(node, now)
        return self._taken()

    def reread(self, name: str, numbers: Iterable[int], now: float) -> list[Order]:
        """Have one node read pieces from the store again: an object came out wrong.

        What then differs replaces what everybody has (`corrected`).
        """
        node = self._nodes[name]
        for number in numbers:
            if not node.down.get(number):
                self._order(node, number, STORE, now)
        return self._taken()

    def corrected(self, name: str, number: int, digest: str, now: float) -> list[Order]:
        """A node has read a piece again, and this is its digest. Others drop what differs."""
        node, piece = self._nodes[name], self._pieces[number]
        self._over(node, number, STORE)
        if piece.digest != digest:
            piece.holders = []
            for other in self._nodes.values():
                if other is not node and other.alive:
                    self._lost_copy(other, number)
            self._gained(node, number, digest)
        self._feed_hungry(now)
        return self._taken()

    # -- what happens to a piece

    def _gained(self, node: _Node, number: int, digest: str) -> None:
        piece = self._pieces[number]
        piece.digest = digest
        if not node.have[number]:
            node.have[number] = 1
            node.missing -= 1
        if not node.trusted:
            self._offer_if_nobody_has(number)
            return
        piece.holders.append(node.name)
        if node.slow:
            self._offer_if_nobody_has(number)
        if len(piece.holders) == 1:
            for other in self._nodes.values():
                if other.alive and not other.have[number] and number not in other.down:
                    self._enqueue(other, number)

    def _offer_if_nobody_has(self, number: int) -> None:
        piece = self._pieces[number]
        if piece.reading or self._well_held(number):
            return
        if any(node.alive and not node.have[number] for node in self._nodes.values()):
            self._offer_to_read(number)

    def _mark_slow(self, node: _Node) -> None:
        """What only slow nodes have is read from the store again."""
        if node.slow:
            return
        node.slow = True
        for number in range(len(self._pieces)):
            if node.have[number]:
                self._offer_if_nobody_has(number)

    def _enqueue(self, node: _Node, number: int) -> None:
        node.queue.append(number)
        self._await(node)

    def _await(self, node: _Node) -> None:
        self._hungry.add(node.name)

    def _forget_holder(self, node: _Node, *, wrong: bool = False) -> None:
        """Fetch nothing more from a node; with `wrong`, what only it has is worth nothing."""
        for number, piece in enumerate(self._pieces):
            if node.name not in piece.holders:
                continue
            piece.holders.remove(node.name)
            if wrong and not piece.holders:
                piece.digest = ""
                self._lost_copy(node, number)
            self._offer_if_nobody_has(number)

    def _accuse(self, node: _Node, giver: _Node) -> None:
        """A node was given wrong bytes. It may be its own memory: one accuser is not believed."""
        node.shuns.add(giver.name)
        accusers = self._accusers.setdefault(giver.name, set())
        accusers.add(node.name)
        if giver.trusted and len(accusers) >= min(_ACCUSERS, len(self.nodes) - 1):
            giver.trusted = False
            self._forget_holder(giver, wrong=True)

    def _lost_copy(self, node: _Node, number: int) -> None:
        if node.have[number]:
            node.have[number] = 0
            node.missing += 1
            self._orders.append(Order(node.name, number, STORE, drop=True))

    def _offer_to_read(self, number: int) -> None:
        if number in self._offered:
            return
        self._offered.add(number)
        heapq.heappush(self._unread, number)
        for node in self._nodes.values():
            if node.alive and node.reads < self._pace.reads:
                self._await(node)

    def _read_again(self, number: int, now: float) -> None:
        piece = self._pieces[number]
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0**piece.failures)
        piece.failures += 1
        piece.not_before = now + self._random.uniform(0.0, pause)
        if number not in self._delayed:
            self._delayed.append(number)

    # -- what a node does next

    def _feed_hungry(self, now: float) -> None:
        """Offer what has become free to those that wait; to those that lack most first."""
        waiting = [node for name in self._hungry if (node := self._nodes[name]).alive]
        for node in heapq.nlargest(_FED, waiting, key=lambda node: node.missing):
            self._hungry.discard(node.name)
            self._feed(node, now)

    def _feed(self, node: _Node, now: float) -> None:
        """Fill a node's free slots."""
        if not self._begun:
            return
        limits = self._limits
        while node.reads < self._pace.reads and self._reads < limits.store:
            number = self._next_alone(node, now)
            if number is None:
                number = self._next_unread(node)
            if number is None:
                break
            self._order(node, number, STORE, now)
        looked = 0
        while node.queue and node.fetches < limits.down and looked < _LOOKED_AT:
            number = node.queue.popleft()
            if node.have[number] or number in node.down:
                continue
            source = self._source(node, number)
            if source is None:
                holders = self._pieces[number].holders
                if not node.shuns.issuperset(holders):  # all busy, or better left to a neighbour
                    node.queue.append(number)
                elif holders:
                    node.alone.append(number)
                looked += 1
                continue
            self._order(node, number, source.name, now)
        if (node.queue and node.fetches < limits.down) or (
            (self._unread or node.alone) and node.reads < self._pace.reads
        ):
            self._await(node)

    def _next_alone(self, node: _Node, now: float) -> int | None:
        """A piece that others have, and that this node is to read from the store nevertheless."""
        for waiting in (node.alone, node.queue) if self._outrun.why else (node.alone,):
            for _ in range(min(len(waiting), _LOOKED_AT)):
                number = waiting.pop()
                if node.have[number] or number in node.down:
                    continue
                if self._pieces[number].not_before <= now:
                    return number
                waiting.appendleft(number)  # it failed a moment ago
        return None

    def _next_unread(self, node: _Node) -> int | None:
        """The first piece that nobody has, and that this node does not read already."""
        if not self._may_read(node):
            return None
        passed: list[int] = []
        found = None
        while self._unread and len(passed) < _LOOKED_AT:
            number = heapq.heappop(self._unread)
            if self._well_held(number):
                self._offered.discard(number)
                continue
            if STORE not in node.down.get(number, {}) and not node.have[number]:
                found = number
                self._offered.discard(number)
                break
            passed.append(number)
        for number in passed:
            heapq.heappush(self._unread, number)
        return found

    def _may_read(self, node: _Node) -> bool:
        """Whether a node reads from the store for the others: it must be fit, if anybody is."""
        return (node.trusted and not node.slow) or not any(
            other.alive and other.trusted and not other.slow for other in self._nodes.values()
        )

    def _well_held(self, number: int) -> bool:
        """Whether some node has a piece from which it comes in time."""
        nodes = self._nodes
        return any(not nodes[name].slow for name in self._pieces[number].holders)

    def _source(self, node: _Node, number: int) -> _Node | None:
        """The holder to fetch from: near, idle, quick; None if none has a slot, or none should."""
        holders = self._pieces[number].holders
        near = False
        best: tuple[tuple[bool, bool, float], _Node] | None = None
        for name in reversed(holders[-_LOOKED_AT:]):
            holder = self._nodes[name]
            if not (holder.alive and holder.trusted) or name in node.shuns:
                continue
            same = holder.zone == node.zone
            near = near or same
            if holder.up >= self._limits.up:
                continue
            cost = (not same, holder.slow, (holder.up + 1) / (holder.rate or 1e12))
            if best is None or cost < best[0]:
                best = cost, holder
        if best is None:
            return None
        if best[0][0] and (near or self._arriving_near(node, number)):
            return None  # one copy a zone: the others take it from there
        return best[1]

    def _arriving_near(self, node: _Node, number: int) -> bool:
        return bool(node.zone) and any(
            number in other.down and other.zone == node.zone
            for other in self._nodes.values()
            if other.alive and other is not node
        )

    def _order(self, node: _Node, number: int, source: str, now: float) -> None:
        piece = self._pieces[number]
        node.down.setdefault(number, {})[source] = now
        if source == STORE:
            node.reads += 1
            self._reads += 1
            piece.reading.add(node.name)
        else:
            node.fetches += 1
            self._nodes[source].up += 1
        wanted = "" if source == STORE else piece.digest
        again = bool(node.have[number])
        self._orders.append(Order(node.name, number, source, wanted, again=again))

    def _over(self, node: _Node, number: int, source: str) -> float | None:
        """A transfer is over; returns when it began, None if it is not one that is known."""
        sources = node.down.get(number, {})
        since = sources.pop(source, None)
        if since is None:
            return None
        if not sources:
            del node.down[number]
        if source == STORE:
            node.reads -= 1
            self._reads -= 1
            self._pieces[number].reading.discard(node.name)
        else:
            node.fetches -= 1
            self._nodes[source].up -= 1
        return since

    def _measure(self, node: _Node, piece: _Piece, source: str, seconds: float, now: float) -> None:
        """Learn from a transfer how long one takes, and how quick a node is."""
        self._durations[STORE if source == STORE else "peer"].took(piece.size, seconds)
        if source == STORE:
            self._pace.read(piece.size, len(self.nodes), now)
            self._outrun.read(piece.size, now)
        else:
            self._outrun.given(piece.size)
        other = node if source == STORE else self._nodes[source]
        other.slow = False
        if source != STORE:
            rate = piece.size / max(seconds, 1e-6)
            other.rate = 0.8 * other.rate + 0.2 * rate if other.rate else rate

    def _look_at_rates(self, now: float) -> None:
        """See whether the store outruns the nodes, when nothing waits for the store."""
        if not self._limits.direct or self._outrun.why:
            return
        if self._unread or self._reads or self._delayed:
            self._outrun.supplied(now)
            return
        living = [node for node in self._nodes.values() if node.alive]
        lacking = sum(node.fetches > 0 for node in living)
        self._outrun.look(len(living), lacking, now)

    def _hedge(self, now: float) -> None:
        """Order what is late from somewhere else too; whichever comes first counts."""
        late = {STORE: _Late(), "peer": _Late()}
        for node in self._nodes.values():
            if node.alive:
                self._find_late(node, late, now)
        living = len(self.nodes)
        for found in late.values():
            # Late at many at once is a crowded network, and more of the same would not help.
            if len(found.nodes) <= max(1, living // 4) or found.very:
                for node, number, source in found.transfers:
                    self._hedge_one(node, number, source, now)

    def _find_late(self, node: _Node, late: "dict[str, _Late]", now: float) -> None:
        for number, sources in node.down.items():
            if len(sources) > 1 or node.have[number]:  # hedged already, or read again to be sure
                continue
            source, since = next(iter(sources.items()))
            kind = STORE if source == STORE else "peer"
            allowed = self._durations[kind].allowed(self._pieces[number].size)
            if now - since > allowed:
                late[kind].transfers.append((node, number, source))
                late[kind].nodes.add(node.name if source == STORE else source)
                late[kind].very |= now - since > _VERY_LATE * allowed

    def _hedge_one(self, node: _Node, number: int, source: str, now: float) -> None:
        piece = self._pieces[number]
        self._mark_slow(node if source == STORE else self._nodes[source])
        if source == STORE and not piece.holders:
            self._offer_to_read(number)  # somebody else reads it too
            return
        giver = self._source(node, number)
        if giver is not None and giver.name != source and not giver.slow:
            self._order(node, number, giver.name, now)

    def _taken(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders
