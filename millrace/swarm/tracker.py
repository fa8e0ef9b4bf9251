"""Central tracker: decides which node fetches which piece from whom.

A pure state machine: events in, orders out, time given. Pieces are read from the store in order,
each by the node that has a slot free, so the stripes follow what each node can carry. Whoever
lacks a piece is sent to a node that has it, the newest pieces being the rarest; so a single piece
doubles its copies and more at every hop. What is lost, late or wrong is ordered again elsewhere.

What a piece should be is decided by votes: each node that read it from the store, or has it from an
earlier run, has one. A piece of an object whose digest the owner knows is given on after the first
vote, as every node checks the whole object. Any other piece is given on when two nodes agree. Where
votes differ, the owner reads the piece (`Tracker.disputed`), and what it says is final; it may say
so of any piece.

After Owl (OSDI '22): the mechanism lies with the peers, every decision with the tracker.
"""

import heapq
import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from millrace.swarm.rates import Durations, RateComparison, ReadConcurrency, SharedClock
from millrace.swarm.settings import LimitSettings

STORE = ""
"""The source of a piece that is read from the store."""

_MAX_CANDIDATES = 16  # pieces of a node's queue, and holders of a piece, that one decision looks at
_MAX_FILLED = 8  # waiting nodes that are offered what one event has freed
_VERY_LATE = 4.0  # times what is late
_SLOW_READER = 3.0  # times as long as the quickest reader of its zone takes
_SLOW_ZONE = 1.3  # times as long as the quickest zone takes
_SLOW_FETCHER = 4.0  # times as long as the quickest node takes for a piece of another one
_FIRST_FETCHES = 4  # of a node, until one is over
_SLOW_LEAST = 1.5  # seconds after which a slow reader's piece is read by another node too
_SLOW_LAST = 0.5  # and where it is one of the last
_SLOW_READ = 3.0  # and times as long as the quickest reader takes
_BEHIND = 2.0  # times the pieces that a node fetches at once, that it may be behind another one
_SLOW_BEHIND = 1.0  # and that a slow reader may be
_SLOW_ZONE_BEHIND = 0.5  # and that the nodes of a slow zone may be
_MIN_ACCUSERS = 2  # nodes that must say that one gives wrong bytes; one alone may lie
_MAX_REFUSALS = 8  # in a row, after which a node asks a giver no more that has given it nothing
_LONGEST_DOUBLING = 10  # failures after which the pause before the next read grows no more
_MAX_WRONG_VOTES = 2  # that cost a node its vote: one may be a bit that flipped in its memory
_HOPELESS = 8  # wrong votes after which a node is of no use: it cannot read what the store has
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


@dataclass(frozen=True, slots=True)
class Order:
    """Order to one node.

    Attributes:
        node: Who.
        piece: Which piece to fetch; with `drop`, to forget.
        source: From which node; `STORE` for the store.
        digest: What it must be; empty for a read from the store.
        drop: The copy that it has is wrong, or nobody can say that it is right.
    """

    node: str
    piece: int
    source: str
    digest: str = ""
    drop: bool = False


@dataclass(slots=True)
class _NodeState:
    name: str
    zone: str
    have: bytearray
    missing: int
    alive: bool = True
    trusted: bool = True
    slow: bool = False
    """Whether it gives late within its own zone: other givers come first."""
    down: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    """Piece → source → since when."""
    ordered: dict[tuple[int, str], str] = field(default_factory=dict[tuple[int, str], str])
    """Piece and source of those → the digest that was ordered."""
    reads: int = 0
    began: dict[int, float] = field(default_factory=dict[int, float])
    """Piece → when its read began, by the clock of `SharedClock`."""
    fetches: int = 0
    up: int = 0
    yielding: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    """Receiver and piece of those transfers of `up` that leave slots to others."""
    rates: dict[str, float] = field(default_factory=dict[str, float])
    """Zone → bytes a second of one piece that the node gives to it, smoothed."""
    read_pace: float = 0.0
    """Seconds a byte of its reads from the store, had each been alone, smoothed; 0 before the
    first."""
    fetch_pace: float = 0.0
    """Seconds a byte of what it gets from other nodes, smoothed; 0 before the first."""
    one_read: float = 0.0
    """Bytes a second of its last read from the store."""
    outrun: RateComparison = field(default_factory=RateComparison)
    queue: deque[int] = field(default_factory=deque[int])
    """Pieces that some node has and this one lacks, oldest first."""
    shuns: set[str] = field(default_factory=set[str])
    """Nodes that gave it wrong bytes: it asks them no more."""
    refusals: Counter[str] = field(default_factory=Counter[str])
    """Giver → its transfers to this node in a row that failed."""
    alone: deque[int] = field(default_factory=deque[int])
    """Pieces that only those have: it reads them from the store itself."""
    second: deque[int] = field(default_factory=deque[int])
    """Pieces with too few votes that it lacks: its read from the store would be a further one."""
    wrong_votes: int = 0


@dataclass(slots=True)
class _PieceState:
    size: int
    needs: int = 1
    """Votes for the same digest that decide."""
    digest: str = ""
    """What it is, once that is decided: only then is it given to other nodes."""
    settled: bool = False
    """The owner knows the digest: no vote counts any more."""
    said: dict[str, str] = field(default_factory=dict[str, str])
    """Living node → digest of the copy that it has."""
    voters: set[str] = field(default_factory=set[str])
    """Those of them that did not get their copy from another node in this run."""
    holders: list[str] = field(default_factory=list[str])
    """Trusted nodes whose copy is of `digest`."""
    reading: set[str] = field(default_factory=set[str])
    """Nodes that read it from the store."""
    failures: int = 0
    not_before: float = 0.0


@dataclass(frozen=True, slots=True)
class _TransferTime:
    """Time that a transfer took.

    Attributes:
        seconds: From the order to the end.
        digest: What was ordered.
        alone: Seconds that it would have taken alone, for a read from the store.
    """

    seconds: float
    digest: str = ""
    alone: float = 0.0


@dataclass(slots=True)
class _LateTransfers:
    """Transfers that take too long.

    Attributes:
        transfers: Node, piece and source of each.
        nodes: The readers, or the givers.
        very: Whether one takes far too long.
    """

    transfers: list[tuple[_NodeState, int, str]] = field(
        default_factory=list[tuple[_NodeState, int, str]]
    )
    nodes: set[str] = field(default_factory=set[str])
    very: bool = False

    def note(self, node: _NodeState, number: int, source: str, took: float, allowed: float) -> None:
        """Add a transfer if it takes longer than allowed."""
        if took > allowed:
            self.transfers.append((node, number, source))
            self.nodes.add(node.name if source == STORE else source)
            self.very |= took > _VERY_LATE * allowed


class Tracker:
    """Knows who has what, and decides what is fetched next.

    Every method that tells it something returns the orders that follow. It gives none before
    `begin`: what a node has that comes a moment later need not be read from the store.

    Args:
        sizes: Bytes of each piece.
        limits: How much goes on at once.
        needs: Votes for the same digest that each piece needs before a node may get it from
            another one; left out, one.
        seed: Of the pauses before something is read again.

    Attributes:
        disputed: Pieces of which nodes have different digests: the owner reads those that still
            are disputed (`is_disputed`), tells what they are (`settle_piece`), and empties it.
        hopeless: Nodes that had too many pieces wrong: the owner says that they are lost, and
            empties it.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        limits: LimitSettings | None = None,
        *,
        needs: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        self._pieces = [_PieceState(size) for size in sizes]
        for piece, votes in zip(self._pieces, needs, strict=False):
            piece.needs = votes
        self._limits = limits or LimitSettings()
        self._pace = ReadConcurrency(self._limits.node_store)
        self._direct = ""
        self._accusers: dict[str, set[str]] = {}  # of a node → who says that it gives wrong bytes
        self._nodes: dict[str, _NodeState] = {}
        self._zones: dict[str, list[_NodeState]] = {}  # the nodes that live
        self._lacking: Counter[str] = Counter()  # zone → living nodes that lack something
        self._quickest = 0.0  # the least `_NodeState.read_pace`
        self._slow_zones: set[str] = set()  # labelled zones that read slowly from the store
        self._slow_readers: set[str] = set()  # nodes that do, beside the others of their zone
        self._least_fetch = 0.0  # the least `_NodeState.fetch_pace`
        self._least_missing = len(sizes)  # pieces
        self._unread = list(range(len(sizes)))  # a heap: in no node, and nobody reads it
        self._offered = set(self._unread)  # what is in it
        self._wanted: set[int] = set()  # pieces in `_NodeState.second` that nobody reads yet
        self._delayed: list[int] = []  # failed at the store: read again later
        self._shares = SharedClock()
        self._hungry: dict[str, None] = {}  # in order, so that the choices are always the same
        self._random = random.Random(seed)
        self._from_store = Durations()
        self._from_peers: dict[tuple[str, str], Durations] = {}  # by the giver's zone and the node
        self._orders: list[Order] = []
        self._begun = False
        self.disputed: list[int] = []
        self.hopeless: list[str] = []

    def begin(self, now: float) -> list[Order]:
        """Give orders from now on: those that were expected have come."""
        self._begun = True
        for node in self._nodes.values():
            if node.alive:
                self._fill_slots(node, now)
        return self._take_orders()

    @property
    def nodes(self) -> list[str]:
        """The nodes that live."""
        return [node.name for node in self._nodes.values() if node.alive]

    @property
    def quarantined(self) -> list[str]:
        """The nodes that nothing is fetched from any more."""
        return [node.name for node in self._nodes.values() if not node.trusted]

    @property
    def slow(self) -> list[str]:
        """The nodes that give late within their own zone."""
        return [node.name for node in self._nodes.values() if node.slow]

    @property
    def direct(self) -> str:
        """Reason why nodes read from the store what others have; empty while they do not."""
        return self._direct

    def is_decided(self, piece: int) -> bool:
        """Tell whether enough votes, or the owner, have decided what a piece is."""
        return bool(self._pieces[piece].digest)

    def is_lacked(self, piece: int) -> bool:
        """Tell whether a living node lacks a piece."""
        return any(not node.have[piece] for node in self._iterate_living())

    def is_disputed(self, piece: int) -> bool:
        """Tell whether votes for a piece differ, and the owner has not said what it is."""
        found = self._pieces[piece]
        votes = {found.said[name] for name in self._list_voters(found)} | {found.digest}
        return not found.settled and len(votes - {""}) > 1

    def is_complete(self) -> bool:
        """Tell whether every living node has every piece."""
        return all(node.missing == 0 for node in self._nodes.values() if node.alive)

    def list_held_sizes(self, node: str, sizes: Sequence[int]) -> list[int]:
        """Return the sizes of the pieces that a node has; of one that never joined, none."""
        known = self._nodes.get(node)
        return [size for size, has in zip(sizes, known.have, strict=True) if has] if known else []

    def lacks(self, node: str) -> bool:
        """Tell whether a node lacks a piece."""
        return self._nodes[node].missing > 0

    def has(self, node: str, piece: int) -> bool:
        """Tell whether a node has a piece."""
        return bool(self._nodes[node].have[piece])

    def add_node(
        self, name: str, have: Iterable[tuple[int, str]], now: float, *, zone: str = ""
    ) -> list[Order]:
        """Note that a node has come, with the pieces (and their digests) that it holds already."""
        node = _NodeState(name, zone, bytearray(len(self._pieces)), len(self._pieces))
        self._nodes[name] = node
        self._zones.setdefault(zone, []).append(node)
        self._lacking[zone] += bool(node.missing)
        node.second.extend(sorted(self._wanted))
        for number, piece in enumerate(self._pieces):
            if piece.holders:
                node.queue.append(number)
            else:
                self._offer_if_nobody_has(number)
        for number, digest in have:
            self._note_copy(node, number, digest, vote=True)
        self._fill_slots(node, now)
        self._fill_waiting(now)
        return self._take_orders()

    def complete_transfer(
        self, name: str, number: int, source: str, digest: str, now: float
    ) -> list[Order]:
        """Note that a node has a piece, of this digest.

        From another node it is of the digest that was ordered, or the agent says `failed`: one that
        says another digest lies.
        """
        node, piece = self._nodes[name], self._pieces[number]
        took = self._end_transfer(node, number, source, now)
        if took is not None and source != STORE and digest != took.digest:
            self.hopeless.append(name)
            return self._take_orders()
        if took is not None:
            self._measure_transfer(node, piece, source, took, now)
        if not node.alive or node.have[number]:
            self._offer_if_nobody_has(number)
            return self._take_orders()
        piece.failures = 0
        node.refusals.pop(source, None)
        self._note_copy(node, number, digest, vote=source == STORE)
        self._fill_slots(node, now)
        self._fill_waiting(now)
        return self._take_orders()

    def fail_transfer(
        self, name: str, number: int, source: str, now: float, *, wrong: bool = False
    ) -> list[Order]:
        """Note that a node could not fetch a piece from a source.

        ``wrong``: the bytes were not right.

        Of a transfer that was not ordered, or is over, nothing is believed.
        """
        node, piece = self._nodes[name], self._pieces[number]
        took = self._end_transfer(node, number, source, now)
        if took is None:
            return self._take_orders()
        if source == STORE:
            self._schedule_retry(number, now)
        elif wrong:
            if took.digest == piece.digest:  # else the giver has dropped what was ordered
                self._accuse(node, self._nodes[source])
        else:
            self._note_refusal(node, self._nodes[source])
        if node.alive and not node.have[number] and piece.holders:
            self._enqueue(node, number)
        if node.alive:
            self._fill_slots(node, now)
        self._fill_waiting(now)
        return self._take_orders()

    def cancel_transfer(self, name: str, number: int, source: str, now: float) -> list[Order]:
        """Note that a node needs a piece from this source no more: another one was quicker.

        Where the node is not known to have the piece, the transfer has failed.
        """
        node = self._nodes[name]
        took = self._end_transfer(node, number, source, now)
        if took is not None and node.alive and not node.have[number]:
            if source == STORE:
                self._schedule_retry(number, now)
            if self._pieces[number].holders:
                self._enqueue(node, number)
        if source != STORE:
            if took is not None:
                giver, size = self._nodes[source], self._pieces[number].size
                if took.seconds > self._compute_fetch_timeout(giver, node, size):
                    self._note_refusal(node, giver)
            self._offer_if_nobody_has(number)
        if node.alive:
            self._fill_slots(node, now)
        self._fill_waiting(now)
        return self._take_orders()

    def remove_node(self, name: str, now: float) -> list[Order]:
        """Note that a node is gone, with what it had."""
        node = self._nodes.get(name)
        if node is None or not node.alive:
            return []
        node.alive = False
        self._zones[node.zone].remove(node)
        self._lacking[node.zone] -= bool(node.missing)
        self._find_quickest()
        self._find_least_fetch()
        for number, sources in list(node.down.items()):
            for source in list(sources):
                self._end_transfer(node, number, source, now)
            self._offer_if_nobody_has(number)
        self._forget_copies(node)
        for other in self._nodes.values():
            if other.alive:
                for number, sources in list(other.down.items()):
                    if name in sources:
                        self._end_transfer(other, number, name, now)
                        self._enqueue(other, number)
                self._fill_slots(other, now)
        return self._take_orders()

    def tick(self, now: float) -> list[Order]:
        """Time has passed: what was delayed is due, and what is late is ordered elsewhere too."""
        delayed, self._delayed = self._delayed, []
        for number in delayed:
            if self._pieces[number].not_before <= now:
                self._offer_to_read(number)
            else:
                self._delayed.append(number)
        self._hedge(now)
        self._compare_rates(now)
        for node in self._nodes.values():
            if node.alive:
                self._fill_slots(node, now)
        return self._take_orders()

    def settle_piece(self, number: int, digest: str, now: float) -> list[Order]:
        """Note the digest of a piece that the owner has read itself.

        Others drop copies that differ.

        A node that said otherwise of what it read from the store, or had, loses its vote when it
        does so a second time, and nothing is fetched from it any more.
        """
        piece = self._pieces[number]
        piece.settled = True
        self._decide(number, digest)
        self._offer_if_nobody_has(number)
        self._fill_waiting(now)
        return self._take_orders()

    # -- what happens to a piece

    def _note_copy(self, node: _NodeState, number: int, digest: str, *, vote: bool) -> None:
        """Note that a node has a copy of a piece; `vote`: it did not get it from a node."""
        piece = self._pieces[number]
        node.have[number] = 1
        node.missing -= 1
        self._lacking[node.zone] -= not node.missing
        if not node.slow:
            self._least_missing = min(self._least_missing, node.missing)
        piece.said[node.name] = digest
        if vote:
            piece.voters.add(node.name)
        if piece.digest == digest:
            self._add_holder(node, number)
        elif piece.settled or not vote:
            self._reject_copy(node, number)
        else:
            self._count_votes(number)
        self._offer_if_nobody_has(number)

    def _add_holder(self, node: _NodeState, number: int) -> None:
        """Let others fetch a piece from a node, whose copy is right."""
        piece = self._pieces[number]
        if not node.trusted or node.name in piece.holders:
            return
        piece.holders.append(node.name)
        if node.slow:
            self._offer_if_nobody_has(number)
        if len(piece.holders) == 1:
            for other in self._nodes.values():
                if other.alive and not other.have[number] and number not in other.down:
                    self._enqueue(other, number)
        elif node.zone:
            self._pass_on(node, number)

    def _list_voters(self, piece: _PieceState) -> list[str]:
        """Return the nodes whose votes for a piece count."""
        return [name for name in piece.voters if self._nodes[name].trusted]

    def _count_votes(self, number: int) -> None:
        """Count the votes for a piece: enough for one digest decide, and others are a dispute."""
        piece = self._pieces[number]
        if not (piece.digest or piece.settled):
            votes = Counter(piece.said[name] for name in self._list_voters(piece))
            digest, most = votes.most_common(1)[0] if votes else ("", 0)
            if most >= piece.needs:
                self._decide(number, digest)
        if self.is_disputed(number):
            self.disputed.append(number)

    def _decide(self, number: int, digest: str) -> None:
        """Let a piece be what is said; where the owner says so, other copies are dropped."""
        piece = self._pieces[number]
        piece.digest, piece.holders = digest, []
        for name, said in list(piece.said.items()):
            if said == digest:
                self._add_holder(self._nodes[name], number)
            elif piece.settled and name in piece.said:
                self._reject_copy(self._nodes[name], number)

    def _reject_copy(self, node: _NodeState, number: int) -> None:
        """Have a node drop a copy: the owner says otherwise, or it is of a digest that is undone.

        A node whose vote was wrong twice has none any more. One that goes on so is given up: it
        would read the piece again for ever.
        """
        piece = self._pieces[number]
        voted = node.name in piece.voters
        self._drop_copy(node, number)
        self._enqueue(node, number)
        if voted:
            node.wrong_votes += 1
            if node.wrong_votes >= _MAX_WRONG_VOTES:
                self._distrust(node)
            if node.wrong_votes == _HOPELESS:
                self.hopeless.append(node.name)

    def _pass_on(self, node: _NodeState, number: int) -> None:
        """Let the other nodes of a zone fetch a piece next that has just entered it."""
        for mate in self._zones[node.zone]:
            if not mate.have[number] and number not in mate.down:
                mate.queue.appendleft(number)
                self._mark_waiting(mate)

    def _offer_if_nobody_has(self, number: int) -> None:
        piece = self._pieces[number]
        if piece.reading or self._is_well_held(number):
            return
        if any(node.alive and not node.have[number] for node in self._nodes.values()):
            self._offer_to_read(number)

    def _mark_slow(self, node: _NodeState) -> None:
        """Compare nobody with a node. What only slow nodes have is read from the store again."""
        if node.slow:
            return
        node.slow = True
        self._find_quickest()
        for number in range(len(self._pieces)):
            if node.have[number]:
                self._offer_if_nobody_has(number)

    def _enqueue(self, node: _NodeState, number: int) -> None:
        node.queue.append(number)
        self._mark_waiting(node)

    def _mark_waiting(self, node: _NodeState) -> None:
        self._hungry[node.name] = None

    def _forget_copies(self, node: _NodeState) -> None:
        """Forget the copies of a node that is gone. What they were stays decided."""
        for number, piece in enumerate(self._pieces):
            if piece.said.pop(node.name, None) is None:
                continue
            piece.voters.discard(node.name)
            if node.name in piece.holders:
                piece.holders.remove(node.name)
            self._offer_if_nobody_has(number)

    def _distrust(self, node: _NodeState) -> None:
        """Fetch nothing more from a node, count its votes no more, and undo what they decided.

        A piece of which too few votes are left is open again. Copies of it that came from other
        nodes are dropped where two votes were needed, and those of the node itself where no other
        node has it.
        """
        if not node.trusted:
            return
        node.trusted = False
        for number, piece in enumerate(self._pieces):
            if node.name not in piece.said:
                continue
            if node.name in piece.holders:
                piece.holders.remove(node.name)
            self._undo_decision(node, number)
            self._offer_if_nobody_has(number)

    def _undo_decision(self, node: _NodeState, number: int) -> None:
        piece = self._pieces[number]
        if piece.settled or not piece.digest:
            return
        votes = sum(piece.said[name] == piece.digest for name in self._list_voters(piece))
        if piece.holders and (piece.needs == 1 or votes >= piece.needs):
            return
        wrong, piece.digest, piece.holders = piece.digest, "", []
        for name, said in list(piece.said.items()):
            voted = name in piece.voters and name != node.name
            if said == wrong and not voted:
                self._drop_copy(self._nodes[name], number)
        self._count_votes(number)

    def _accuse(self, node: _NodeState, giver: _NodeState) -> None:
        """Note that a node was given wrong bytes.

        It may be its own memory: one accuser is not believed.
        """
        node.shuns.add(giver.name)
        accusers = self._accusers.setdefault(giver.name, set())
        accusers.add(node.name)
        if len(accusers) >= _MIN_ACCUSERS:
            self._distrust(giver)

    def _note_refusal(self, node: _NodeState, giver: _NodeState) -> None:
        """Note that a giver did not give; of one that goes on so, copies are no source.

        What only such a node has is read from the store again. It may say that it has everything,
        so nobody is compared with it.
        """
        giver.rates[node.zone] = giver.rates.get(node.zone, 0.0) / 2
        node.refusals[giver.name] += 1
        if node.refusals[giver.name] >= _MAX_REFUSALS:
            self._mark_slow(giver)

    def _drop_copy(self, node: _NodeState, number: int) -> None:
        piece = self._pieces[number]
        piece.said.pop(node.name, None)
        piece.voters.discard(node.name)
        if node.name in piece.holders:
            piece.holders.remove(node.name)
        if node.have[number]:
            self._lacking[node.zone] += node.alive and not node.missing
            node.have[number] = 0
            node.missing += 1
            if number in self._wanted:
                node.second.append(number)
            self._orders.append(Order(node.name, number, STORE, drop=True))

    def _offer_to_read(self, number: int) -> None:
        if self._waits_for_votes(number):
            self._offer_to_vote(number)
            return
        if number in self._offered:
            return
        self._offered.add(number)
        heapq.heappush(self._unread, number)
        for node in self._nodes.values():
            if node.alive and node.reads < self._pace.reads:
                self._mark_waiting(node)

    def _offer_to_vote(self, number: int) -> None:
        """Let a node that lacks a piece read it for a further vote."""
        if number in self._wanted:
            return
        self._wanted.add(number)
        for node in self._iterate_living():
            if not node.have[number]:
                node.second.append(number)
                self._mark_waiting(node)

    def _schedule_retry(self, number: int, now: float) -> None:
        piece = self._pieces[number]
        doublings = min(piece.failures, _LONGEST_DOUBLING)
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0**doublings)
        piece.failures += 1
        piece.not_before = now + self._random.uniform(0.0, pause)
        if number not in self._delayed:
            self._delayed.append(number)

    # -- what a node does next

    def _fill_waiting(self, now: float) -> None:
        """Offer what has become free to those that wait; to those that lack most first."""
        waiting = [node for name in self._hungry if (node := self._nodes[name]).alive]
        for node in heapq.nlargest(_MAX_FILLED, waiting, key=lambda node: node.missing):
            self._hungry.pop(node.name, None)
            self._fill_slots(node, now)

    def _fill_slots(self, node: _NodeState, now: float) -> None:
        """Fill a node's free slots."""
        if not self._begun:
            return
        limits = self._limits
        while node.reads < self._pace.reads and self._shares.users < limits.store:
            number = self._pick_direct_read(node, now)
            if number is None:
                number = self._pick_vote_read(node)
            if number is None:
                number = self._pick_unread(node)
            if number is None:
                break
            self._order_transfer(node, number, STORE, now)
        looked = 0
        down = limits.down if node.fetch_pace else min(limits.down, _FIRST_FETCHES)
        while node.queue and node.fetches < down and looked < _MAX_CANDIDATES:
            number = node.queue.popleft()
            if node.have[number] or number in node.down:
                continue
            source = self._pick_source(node, number)
            if source is None:
                holders = self._pieces[number].holders
                if not node.shuns.issuperset(holders):  # all busy, or better left to a neighbour
                    node.queue.append(number)
                elif holders:
                    node.alone.append(number)
                looked += 1
                continue
            self._order_transfer(node, number, source.name, now)
        if (node.queue and node.fetches < down) or (
            (self._unread or node.alone or node.second) and node.reads < self._pace.reads
        ):
            self._mark_waiting(node)

    def _pick_direct_read(self, node: _NodeState, now: float) -> int | None:
        """Return a piece that others have, and that this node is to read from the store."""
        for waiting in (node.alone, node.queue) if node.outrun.why else (node.alone,):
            for _ in range(min(len(waiting), _MAX_CANDIDATES)):
                number = waiting.pop()
                if node.have[number] or number in node.down:
                    continue
                if not node.outrun.why and not node.shuns.issuperset(self._pieces[number].holders):
                    node.queue.append(number)  # another node has it by now
                    continue
                if self._pieces[number].not_before <= now:
                    return number
                waiting.appendleft(number)  # it failed a moment ago
        return None

    def _pick_vote_read(self, node: _NodeState) -> int | None:
        """Return a piece with too few votes that this node lacks, and that nobody else reads."""
        may = self._may_read(node)
        passed: list[int] = []
        found = None
        while node.second and len(passed) < _MAX_CANDIDATES:
            number = node.second.popleft()
            if number not in self._wanted or node.have[number]:
                continue
            if self._pieces[number].digest:
                self._wanted.discard(number)
            elif number in node.down:
                passed.append(number)
            elif may or (not node.trusted and self._is_left_to_untrusted(number)):
                self._wanted.discard(number)
                found = number
                break
            else:
                passed.append(number)
        node.second.extendleft(reversed(passed))
        return found

    def _waits_for_votes(self, number: int) -> bool:
        """Tell whether a piece has a vote, and too few: it is in `_NodeState.second`."""
        piece = self._pieces[number]
        return not piece.digest and bool(self._list_voters(piece))

    def _is_left_to_untrusted(self, number: int) -> bool:
        """Tell whether no trusted node lacks a piece, so that nobody will vote for it any more."""
        return all(node.have[number] for node in self._iterate_living() if node.trusted)

    def _pick_unread(self, node: _NodeState) -> int | None:
        """Return the first piece that nobody has, and that this node does not read already."""
        if not self._may_read(node):
            return None
        passed: list[int] = []
        found = None
        while self._unread and len(passed) < _MAX_CANDIDATES:
            number = heapq.heappop(self._unread)
            if self._is_well_held(number) or self._waits_for_votes(number):
                self._offered.discard(number)
                continue
            if STORE not in node.down.get(number, {}) and not node.have[number]:
                found = number
                self._offered.discard(number)
                break
            if self.is_lacked(number):
                passed.append(number)
            else:  # who lacked it is gone
                self._offered.discard(number)
        for number in passed:
            heapq.heappush(self._unread, number)
        return found

    def _may_read(self, node: _NodeState) -> bool:
        """Tell whether a node reads from the store for the others.

        A node whose reads are slow, or that has fallen behind (its link is thin, or the one that
        leads to its zone), does so only while there is nothing that it could fetch from others
        instead: that takes the same link, and all would wait for what it reads.
        """
        if not node.trusted and any(other.trusted for other in self._iterate_living()):
            return False
        if not (node.fetches or node.queue):
            return not self._is_probing(node)
        return not (
            self._is_behind(node, _BEHIND) or self._is_probing(node) or self._reads_slowly(node)
        )

    def _is_probing(self, node: _NodeState) -> bool:
        """Tell whether a first read is under way that will show how quick a node's reads are.

        The first read of a zone is one node's: all of a zone may have one thin link to the store.
        """
        if node.read_pace:
            return False
        if self._is_one_of_zones(node) and not self._find_zone_pace(node.zone):
            return any(mate.reads for mate in self._zones[node.zone])
        return node.reads > 0

    def _is_one_of_zones(self, node: _NodeState) -> bool:
        """Tell whether a node has a labelled zone, and there are nodes outside of it."""
        return bool(node.zone) and any(
            nodes for zone, nodes in self._zones.items() if zone != node.zone
        )

    def _find_zone_pace(self, zone: str) -> float:
        """Return the least `_NodeState.read_pace` of a zone; 0 before its first read."""
        paces = [mate.read_pace for mate in self._zones[zone] if mate.trusted and mate.read_pace]
        return min(paces, default=0.0)

    def _reads_slowly(self, node: _NodeState) -> bool:
        """Tell whether a node's reads, or its zone's, are slow, and it has fallen behind.

        A single slow read says little: where all have the same links, each is the slow one at
        times, and the others may not be left to do its part.
        """
        if node.zone in self._slow_zones and self._is_behind(node, _SLOW_ZONE_BEHIND):
            return True
        return node.name in self._slow_readers and self._is_behind(node, _SLOW_BEHIND)

    def _is_behind(self, node: _NodeState, times: float) -> bool:
        """Tell whether a node lacks more pieces than the quickest, by what it fetches at once."""
        return node.missing - self._least_missing > times * self._limits.down

    def _find_quickest(self) -> None:
        paces = [
            node.read_pace for node in self._iterate_living() if node.trusted and node.read_pace
        ]
        self._quickest = min(paces, default=0.0)
        missing = (n.missing for n in self._iterate_living() if not n.slow)
        self._least_missing = min(missing, default=len(self._pieces))

    def _find_slow_readers(self, measured: _NodeState) -> None:
        """Compare each zone with the quickest reader, and each node with that of its zone.

        One that is slow stays so until its own next read: it may be a while, and what was measured
        then cannot be compared with what the others do now.
        """
        self._find_quickest()
        self._slow_zones.discard(measured.zone)
        self._slow_readers.discard(measured.name)
        for zone, nodes in self._zones.items():
            quickest = self._find_zone_pace(zone) if zone else self._quickest
            if zone and quickest > _SLOW_ZONE * self._quickest:
                self._slow_zones.add(zone)
            for node in nodes:
                if node.read_pace > _SLOW_READER * quickest:
                    self._slow_readers.add(node.name)

    def _iterate_living(self) -> Iterator[_NodeState]:
        return (node for node in self._nodes.values() if node.alive)

    def _is_well_held(self, number: int) -> bool:
        """Tell whether some node has a piece from which it comes in time."""
        nodes = self._nodes
        return any(not nodes[name].slow for name in self._pieces[number].holders)

    def _pick_source(self, node: _NodeState, number: int) -> _NodeState | None:
        """Return the holder to fetch from: near, idle, quick.

        None if none has a slot, or none should.
        """
        holders = self._pieces[number].holders
        near = False
        best: tuple[tuple[bool, bool, float], _NodeState] | None = None
        for name in reversed(holders[-_MAX_CANDIDATES:]):
            holder = self._nodes[name]
            if not (holder.alive and holder.trusted) or name in node.shuns:
                continue
            if node.refusals[name] >= _MAX_REFUSALS:
                continue
            same = holder.zone == node.zone
            near = near or same
            if not self._has_slot(holder, node):
                continue
            rate = holder.rates.get(node.zone, 0.0) or 1e12
            cost = (not same, holder.slow, (holder.up + 1) / rate)
            if best is None or cost < best[0]:
                best = cost, holder
        if best is None:
            return None
        if best[0][0] and (near or self._is_arriving_near(node, number)):
            return None  # one copy a zone: the others take it from there
        return best[1]

    def _has_slot(self, giver: _NodeState, node: _NodeState) -> bool:
        """Tell whether a giver has a slot for a node.

        Transfers over slow links take long: they leave half of the slots to neighbours that lack
        something.
        """
        if giver.up >= self._limits.up:
            return False
        neighbours = self._lacking[giver.zone] - bool(giver.missing)
        most = max(1, self._limits.up // 2)
        return not neighbours or len(giver.yielding) < most or not self._yields(giver, node)

    def _yields(self, giver: _NodeState, node: _NodeState) -> bool:
        """Tell whether a transfer leaves slots to others: to another zone, or to a slow node."""
        return giver.zone != node.zone or node.fetch_pace > _SLOW_FETCHER * self._least_fetch > 0.0

    def _is_arriving_near(self, node: _NodeState, number: int) -> bool:
        return bool(node.zone) and any(
            number in mate.down for mate in self._zones[node.zone] if mate is not node
        )

    def _order_transfer(self, node: _NodeState, number: int, source: str, now: float) -> None:
        piece = self._pieces[number]
        node.down.setdefault(number, {})[source] = now
        if source == STORE:
            node.reads += 1
            node.began[number] = self._shares.read(now)
            self._shares.change_users(1, now)
            piece.reading.add(node.name)
        else:
            node.fetches += 1
            giver = self._nodes[source]
            giver.up += 1
            if self._yields(giver, node):
                giver.yielding.add((node.name, number))
        wanted = "" if source == STORE else piece.digest
        node.ordered[number, source] = wanted
        self._orders.append(Order(node.name, number, source, wanted))

    def _end_transfer(
        self, node: _NodeState, number: int, source: str, now: float
    ) -> "_TransferTime | None":
        """End a transfer; returns how long it took, None if it is not one that is known."""
        sources = node.down.get(number, {})
        since = sources.pop(source, None)
        if since is None:
            return None
        if not sources:
            del node.down[number]
        digest = node.ordered.pop((number, source))
        if source != STORE:
            node.fetches -= 1
            giver = self._nodes[source]
            giver.up -= 1
            giver.yielding.discard((node.name, number))
            return _TransferTime(now - since, digest)
        alone = self._shares.read(now) - node.began.pop(number)
        node.reads -= 1
        self._shares.change_users(-1, now)
        self._pieces[number].reading.discard(node.name)
        return _TransferTime(now - since, alone=alone)

    def _measure_transfer(
        self, node: _NodeState, piece: _PieceState, source: str, took: "_TransferTime", now: float
    ) -> None:
        """Learn from a transfer how long one takes on its path."""
        if source == STORE:
            self._measure_read(node, piece.size, took, now)
            return
        seconds = max(took.seconds, 1e-6)
        giver = self._nodes[source]
        self._find_durations(giver, node).note(piece.size, seconds)
        node.outrun.note_given(piece.size)
        pace = seconds / max(piece.size, 1)
        before = node.fetch_pace
        node.fetch_pace = 0.7 * before + 0.3 * pace if before else pace
        if not self._least_fetch or node.fetch_pace <= self._least_fetch:
            self._least_fetch = node.fetch_pace
        elif before == self._least_fetch:
            self._find_least_fetch()
        if giver.zone == node.zone:
            giver.slow = False
        rate = piece.size / seconds
        given = giver.rates.get(node.zone)
        giver.rates[node.zone] = 0.8 * given + 0.2 * rate if given else rate

    def _find_least_fetch(self) -> None:
        paces = [node.fetch_pace for node in self._iterate_living() if node.fetch_pace]
        self._least_fetch = min(paces, default=0.0)

    def _measure_read(self, node: _NodeState, size: int, took: "_TransferTime", now: float) -> None:
        self._from_store.note(size, took.seconds)
        node.outrun.note_read(size, now)
        node.one_read = size / max(took.seconds, 1e-6)
        self._note_pace(node, max(took.alone, 1e-6) / max(size, 1))
        if not self._reads_slowly(node):
            readers = sum(not self._reads_slowly(other) for other in self._iterate_living())
            self._pace.note_read(size, readers, now)

    def _note_pace(self, node: _NodeState, pace: float) -> None:
        node.read_pace = 0.7 * node.read_pace + 0.3 * pace if node.read_pace else pace
        self._find_slow_readers(node)

    def _find_durations(self, giver: _NodeState, node: _NodeState) -> Durations:
        """Durations of what a node gets from a zone: its own link, and the zones', set them."""
        return self._from_peers.setdefault((giver.zone, node.name), Durations())

    def _compare_rates(self, now: float) -> None:
        """See whether the store outruns the nodes, when nothing waits for the store."""
        if not self._limits.direct:
            return
        supplied = self._unread or self._wanted or self._delayed or self._is_awaiting_store()
        for node in self._iterate_living():
            if supplied:
                node.outrun.restart(now)
            elif node.fetches and not node.outrun.why:
                coming = sum(
                    self._pieces[number].size
                    for number, sources in node.down.items()
                    if STORE not in sources
                )
                node.outrun.compare(node.one_read, coming, now)
                self._direct = self._direct or node.outrun.why

    def _is_awaiting_store(self) -> bool:
        """Tell whether a piece that no node has is being read."""
        return any(
            STORE in sources and not self._pieces[number].holders
            for node in self._iterate_living()
            for number, sources in node.down.items()
        )

    def _hedge(self, now: float) -> None:
        """Order what is late from somewhere else too; whichever comes first counts."""
        reads, slow_reads, near = _LateTransfers(), _LateTransfers(), _LateTransfers()
        across: dict[str, _LateTransfers] = {}  # by the zone that they go to
        crossing: Counter[str] = Counter()
        for node in self._iterate_living():
            slow = self._is_probing(node) or self._reads_slowly(node)
            for number, sources in node.down.items():
                if len(sources) > 1 or node.have[number]:  # hedged already, or read again
                    continue
                source, since = next(iter(sources.items()))
                giver = self._nodes.get(source)
                size, took = self._pieces[number].size, now - since
                if giver is None:
                    late = slow_reads if slow else reads
                    late.note(
                        node, number, source, took, self._compute_read_timeout(size, slow=slow)
                    )
                    continue
                late = near
                if giver.zone != node.zone:
                    late = across.setdefault(node.zone, _LateTransfers())
                    crossing[node.zone] += 1
                allowed = self._compute_fetch_timeout(giver, node, size)
                late.note(node, number, source, took, allowed)
                if took > _VERY_LATE * allowed:  # it may go on so for ever
                    self._mark_slow(giver)
        # Late at many at once is a crowded network, and more of the same would not help.
        few = max(1, len(self.nodes) // 4)
        due = [late for late in (reads, near) if len(late.nodes) <= few or late.very]
        for zone, late in across.items():
            if len(late.transfers) <= max(1, crossing[zone] // 4) or late.very:
                due.append(late)
        for late in (slow_reads, *due):
            for node, number, source in late.transfers:
                self._hedge_one(node, number, source, now)

    def _compute_read_timeout(self, size: int, *, slow: bool) -> float:
        """Seconds that a read may take: fewer for a slow reader, as all others wait for it."""
        allowed = self._from_store.compute_timeout(size)
        if not slow or not self._quickest:
            return allowed
        quick = self._quickest * size * self._shares.users
        return min(allowed, max(_SLOW_LEAST if self._unread else _SLOW_LAST, _SLOW_READ * quick))

    def _compute_fetch_timeout(self, giver: _NodeState, node: _NodeState, size: int) -> float:
        """Seconds that a fetch may take on its path.

        While nothing is known of the path, several that are slow at once have a slow link.
        """
        path = self._find_durations(giver, node)
        return path.compute_timeout(size) * (
            _VERY_LATE if not path.has_enough and node.fetches > 1 else 1.0
        )

    def _hedge_one(self, node: _NodeState, number: int, source: str, now: float) -> None:
        piece = self._pieces[number]
        if source == STORE:
            alone = self._shares.read(now) - node.began[number]
            self._note_pace(node, alone / max(piece.size, 1))
            if not piece.holders:
                self._offer_to_read(number)  # another node reads it too
                return
        elif (
            self._nodes[source].zone == node.zone
            and self._find_durations(self._nodes[source], node).has_enough
        ):
            self._mark_slow(self._nodes[source])  # other givers serve this node better
        giver = self._pick_source(node, number)
        if giver is not None and giver.name != source and not giver.slow:
            self._order_transfer(node, number, giver.name, now)

    def _take_orders(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders
