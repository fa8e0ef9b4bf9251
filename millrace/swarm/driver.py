"""Drive a run: find what is requested, start the agents, and tell them what to do."""

import http.client
import json
import queue
import random
import secrets
import threading
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from millrace import cluster, errors
from millrace.progress import Event, Progress, silent
from millrace.storage import open_store
from millrace.swarm.catalogue import ResolvedCatalogue, resolve_requests
from millrace.swarm.events import EventChecker, ProtocolError
from millrace.swarm.nodes import AbsentNode, Node, connect_agents
from millrace.swarm.protocol import (
    AUTH_HEADER,
    ConnectionPool,
    Endpoint,
    HttpStatusError,
    identify,
    read_body,
    sign,
)
from millrace.swarm.referee import FileAudit, Referee
from millrace.swarm.settings import PrewarmSettings, RayNodes
from millrace.swarm.tls import TlsError
from millrace.swarm.tracker import STORE, Order, Tracker
from millrace.swarm.transfer import FINAL_STATUSES, FetchError
from millrace.words import clean_text

_URL_TTL = timedelta(hours=24)  # that signed URLs are valid
_ANSWER_TIMEOUT = 6.0  # seconds without an answer after which a node is lost
_TICK_INTERVAL = 0.25
_LATECOMER_TIMEOUT = 5.0  # seconds that a missing host is waited for when all others are ready
_RETRY_INTERVAL = 1.0  # seconds between two tries to reach a host that does not answer yet
_DENIED_STATUSES = {http.client.UNAUTHORIZED, http.client.FORBIDDEN}
_OWN_READ_LIMIT = 16 << 20  # bytes that the driver reads of objects without a digest
_VOTES_NEEDED = 2  # that decide on a piece of which nothing says what it is
_MAX_FALSE_ALARMS = (
    3  # times that a node may say that a file is wrong of which every piece is right
)
_STRAGGLER = 5.0  # times as long as the others take that a node may take after its last byte
_SLOW_DISK_RATE = 10e6  # bytes a second at which a node is done with its files at least
_START_TIMEOUT = 3600.0  # seconds that a node may look at what it has, while it answers otherwise
_LEAST_RATE = 100e3  # bytes a second at which a node goes on at least, once half are ready
_SLOWEST = 100.0  # times as fast as that the slowest ready node may be


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Result of one node.

    Attributes:
        name: The node.
        ready: Whether everything is there, under its final name.
        why: If not, a sentence.
        cached: Bytes that were there already.
        from_store: Bytes it read from the store.
        from_peers: Bytes it got from other nodes.
        failures: Fetches that failed and were ordered again.
        seconds: From the call until it was ready.
        trusted: False when it served bytes that were not what they should be.
    """

    name: str
    ready: bool
    why: str
    cached: int
    from_store: int
    from_peers: int
    failures: int
    seconds: float
    trusted: bool


@dataclass(frozen=True, slots=True)
class PrewarmReport:
    """Result of a run.

    Attributes:
        files: How many files every node was to get.
        size: Their bytes.
        unverified: Files of which neither a record, nor the caller, nor an ETag says what they
            should be. The store's ETag did not change.
        unconfirmed: Those of them with a part that only one node has read, and the driver has not:
            nobody can say that it is what the store has.
        driver_bytes: Bytes that the driver has read from the store itself.
        seconds: From the call to the last file in place. Letting go of the agents comes after it.
        startup: Seconds of it in which agents were started, and looked at what they have.
        nodes: What became of each.
        direct: Why nodes also read from the store what others had; empty if none did.
        curve: Seconds since the call, and the bytes all nodes had by then.
    """

    files: int
    size: int
    unverified: int
    unconfirmed: int
    driver_bytes: int
    seconds: float
    startup: float
    nodes: tuple[NodeReport, ...]
    direct: str
    curve: tuple[tuple[float, int], ...]

    @property
    def store_bytes(self) -> int:
        """Bytes that were read from the store, by all nodes and the driver."""
        return self.driver_bytes + sum(node.from_store for node in self.nodes)


def prewarm(settings: PrewarmSettings, *, progress: Progress = silent) -> PrewarmReport:
    """Put the same files on every node of a cluster, each byte out of the store once.

    A node that is lost, full or wrong fails by itself; the others go on. Broken off at any time,
    the next call fetches what is missing.

    Args:
        settings: What, where to, and on which nodes.
        progress: Told a few times a second: ``swarm.progress`` with ``bytes`` that the nodes
            have ``of`` all, ``moved`` in this run, ``nodes`` and ``ready``; and of each node that
            is ready or lost.

    Raises:
        NotFoundError: An object that was requested is not there.
        ChangedError: One was replaced meanwhile: nothing of it was mixed, and it has no final name.
        CorruptError: One is not what its digest says, however often it is read.
        UnavailableError, DeniedError: The store kept failing or refusing for longer than
            ``patience``.
        WorkerError: Fewer than the stated share of the nodes live; each one's reason is named.
    """
    began = time.monotonic()
    stores = {name: open_store(spec) for name, spec in settings.stores.items()}
    return _PrewarmDriver(settings, resolve_requests(settings, stores), progress, began).run()


@dataclass(frozen=True, slots=True)
class Preview:
    """Files that a run would put on every node.

    Attributes:
        files: Destination, bytes and origin of each.
        size: Bytes in all.
        pieces: How many pieces they travel in.
        piece_size: Bytes of a piece at most.
        unverified: Files of which nothing says what they should be.
        refusals: Why `prewarm` will refuse on this machine, in sentences; empty if it will not.
    """

    files: tuple[tuple[str, int, str], ...]
    size: int
    pieces: int
    piece_size: int
    unverified: int
    refusals: tuple[str, ...]


def preview(settings: PrewarmSettings) -> Preview:
    """Return what a run would put where. Asks the store for names and sizes; starts nothing.

    Whether a Ray cluster can be reached is checked; hosts may come later, and are not.

    Raises:
        NotFoundError, ConfigurationError: As `prewarm` does.
    """
    stores = {name: open_store(spec) for name, spec in settings.stores.items()}
    catalogue = resolve_requests(settings, stores).catalogue
    refusals: list[str] = []
    if isinstance(settings.nodes, RayNodes):
        try:
            cluster.check_reachable(settings.nodes.address)
        except errors.ConfigurationError as error:
            refusals.append(str(error))
    return Preview(
        files=tuple((file.path, file.size, file.origin) for file in catalogue.files),
        size=catalogue.size,
        pieces=len(catalogue.pieces),
        piece_size=catalogue.piece_size,
        unverified=sum(not file.digest for file in catalogue.files),
        refusals=tuple(refusals),
    )


@dataclass(slots=True)
class _DrivenNode:
    """A node, as the driver knows it."""

    node: Node
    orders: queue.SimpleQueue[dict[str, Any] | None] = field(
        default_factory=queue.SimpleQueue[dict[str, Any] | None]
    )
    joined: bool = False
    why: str = ""
    files: set[int] = field(default_factory=set[int])
    unusable: dict[int, str] = field(default_factory=dict[int, str])
    """Archive → why it could not be unpacked."""
    accused: set[str] = field(default_factory=set[str])
    """Nodes that it says gave it wrong bytes."""
    cached: int = 0
    from_store: int = 0
    from_peers: int = 0
    failures: int = 0
    seconds: float = 0.0
    ready: bool = False
    moved: float = field(default_factory=time.monotonic)
    """When it last received a byte, or came."""
    until: float = 0.0
    """When it is waited for no longer, whatever it says; 0 until half of the nodes are ready."""


class _PrewarmDriver:
    def __init__(
        self, settings: PrewarmSettings, found: ResolvedCatalogue, progress: Progress, began: float
    ) -> None:
        self._settings, self._found, self._progress, self._began = settings, found, progress, began
        self._catalogue = found.catalogue
        self._sizes = found.catalogue.list_piece_sizes()
        self._unproven = [  # pieces with a part of which nothing says what it is
            n
            for n, piece in enumerate(self._catalogue.pieces)
            if any(s.size and not self._catalogue.files[s.file].digest for s in piece)
        ]
        needs = [1] * len(self._sizes)
        for number in self._unproven:
            needs[number] = _VOTES_NEEDED
        self._tracker = Tracker(self._sizes, settings.limits, needs=needs)
        self._name = secrets.token_hex(8)
        self._key = secrets.token_bytes(32)
        self._connections = ConnectionPool(_ANSWER_TIMEOUT)
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)
        # By `Node.id`: two nodes may have the same name.
        self._members: dict[str, _DrivenNode] = {}
        self._check = EventChecker(self._sizes, len(self._catalogue.files), self._members)
        self._absent: dict[str, AbsentNode] = {}
        self._knocking: set[str] = set()  # of the absent ones, those that may yet come
        self._identities: dict[str, list[Node]] = {}  # identity of an agent → its nodes
        self._fatal: errors.MillraceError | None = None
        self._ending = False
        self._expected = 0
        self._started = self._began
        self._startup = self._seconds = 0.0
        self._had = 0
        self._curve: list[tuple[float, int]] = []
        self._failing: dict[int, float] = {}  # piece → since when the store has failed it
        self._mismatched: dict[int, set[str]] = {}  # file → nodes that find it wrong
        self._audited: dict[int, str] = {}  # file that the driver has read → digest of its segments
        self._void: set[int] = set()  # files whose ETag is no MD5
        self._vain: dict[str, int] = {}  # node → how often it found a file wrong that is right
        self._untrusted: set[str] = set()
        self._own: set[int] = set()  # pieces that the driver reads in any case
        self._blaming: dict[int, dict[str, str]] = {}  # piece → node → why it cannot read it
        self._told: list[Event] = []
        self._threads: list[threading.Thread] = []
        sources = found.make_sources(_URL_TTL)
        self._plan = self._make_run_spec(sources)
        self._referee = Referee(
            self._catalogue,
            sources,
            self._read_authorities(),
            is_open=self._is_open,
            is_doubted=self._is_doubted,
            settled=self._handle_settled,
            audited=self._handle_audit,
            failed=self._handle_unreadable,
            fault=self._handle_fault,
        )

    def run(self) -> PrewarmReport:
        settings = self._settings
        self._started = time.monotonic()
        try:
            with connect_agents(settings.nodes, settings.root, self._add_node) as expected:
                try:
                    self._expected = expected
                    self._wait()
                    self._seconds = time.monotonic() - self._began
                finally:
                    self._end_runs()
        finally:
            self._referee.close()
            self._connections.close()
        return self._make_report()

    # -- the thread that called

    def _wait(self) -> None:
        """Until every living node is ready, or nothing more can come of it."""
        due = 0.0
        while True:
            with self._lock:
                self._news.wait(_TICK_INTERVAL)
                if self._fatal is not None:
                    raise self._fatal
                self._tick(time.monotonic())
                self._drop_stragglers()
                self._check_quorum()
                over = self._is_over()
                if over:
                    self._lose_incomplete()
                    self._check_quorum()
                told, self._told = self._told, []
                if over or time.monotonic() >= due:
                    due = time.monotonic() + _TICK_INTERVAL
                    told.append(self._record_status())
            for event in told:
                self._progress(event)
            if over:
                return

    def _tick(self, now: float) -> None:
        if not self._startup and self._can_start(now):
            self._startup = now - self._started
            self._select_own_reads()
            self._dispatch_orders(self._tracker.begin(now))
        self._dispatch_orders(self._tracker.tick(now))

    def _can_start(self, now: float) -> bool:
        """Tell whether to begin: all are there or known not to be, or long enough was waited."""
        joined = sum(member.joined or bool(member.why) for member in self._members.values())
        enough = joined >= self._settings.least * self._expected
        if enough and joined + len(self._absent) >= self._expected > 0:
            return True
        return bool(joined) and self._is_arrival_over(now)

    def _is_arrival_over(self, now: float) -> bool:
        return now - self._began > self._settings.arrival.total_seconds()

    def _is_over(self) -> bool:
        living = [member for member in self._members.values() if not member.why]
        if not self._startup or not all(map(self._has_all, living)) or self._referee.is_busy:
            return False
        coming = self._knocking & self._absent.keys()
        waited = time.monotonic() - self._began
        return not coming or waited > min(
            _LATECOMER_TIMEOUT, self._settings.arrival.total_seconds()
        )

    def _has_all(self, member: _DrivenNode) -> bool:
        """Tell whether nothing more comes to a node: it is ready, or an archive is unusable."""
        return len(member.files | member.unusable.keys()) == len(self._catalogue.files)

    def _lose_incomplete(self) -> None:
        """Count nodes as lost that lack what was in an archive. They have given until now."""
        for member in self._members.values():
            for number, why in sorted(member.unusable.items()):
                origin = self._catalogue.files[number].origin
                self._lose(member, f"{origin} was not unpacked, all else is there: {why}")

    def _record_status(self) -> Event:
        self._curve.append((time.monotonic() - self._began, self._had))
        living = [member for member in self._members.values() if not member.why]
        figures = {
            "bytes": self._had,
            "of": self._catalogue.size * len(living),
            "moved": sum(m.from_store + m.from_peers for m in self._members.values()),
            "nodes": len(living),
            "ready": sum(member.ready for member in living),
            "seconds": round(time.monotonic() - self._began, 2),
        }
        return Event("swarm.progress", "", figures)

    def _check_quorum(self) -> None:
        lost = {self._format_name(m.node): m.why for m in self._members.values() if m.why}
        over = self._is_arrival_over(time.monotonic())
        for absent in self._absent.values():
            if over or absent.id not in self._knocking:
                lost[self._format_name(absent)] = absent.why
        if not self._expected or len(lost) > (1 - self._settings.least) * self._expected + 1e-9:
            reasons = "; ".join(f"{name}: {why}" for name, why in sorted(lost.items())[:5])
            raise errors.WorkerError(
                f"{len(lost)} of {self._expected} nodes are lost, and at least "
                f"{self._settings.least:.0%} must live ({reasons or 'the cluster has none'}). Run "
                "it again when they are back: what the others have stays."
            )

    def _drop_stragglers(self) -> None:
        """Go on without nodes that have stopped.

        One that still lacks bytes may be waiting for the others until half of them are ready. One
        that says that it has all bytes reads, unpacks or syncs its disk; alone, it may take as long
        as a slow disk does. One that says for ever that it goes on is waited for as long as the
        slowest node would take.
        """
        members = [member for member in self._members.values() if not member.why]
        slow = [member for member in members if not self._has_all(member)]
        done = [member.seconds for member in members if member.ready]
        compared = len(done) >= max(1, len(members) // 2)
        stalled = self._settings.limits.stall_timeout.total_seconds()
        # How long it takes to be done with the files is no one node's word.
        working = (
            _STRAGGLER * max(done) if len(done) > 1 else self._catalogue.size / _SLOW_DISK_RATE
        )
        now = time.monotonic()
        for member in slow:
            quiet = now - member.moved
            if compared and member.joined and not member.until:
                member.until = now + stalled + self._compute_time_limit(member)
            if member.until and now > member.until:
                self._lose(
                    member,
                    f"it goes on, and is not ready {now - self._began:.0f} s after the start, the "
                    f"others after {max(done, default=0.0):.0f} s",
                )
            elif member.joined and self._tracker.lacks(member.node.id):
                if compared and quiet > stalled:
                    self._lose(member, f"it received no byte for {quiet:.0f} s")
            elif (member.joined or compared) and quiet > max(stalled, working):
                others = f", the others after {max(done):.0f} s in all" if done else ""
                self._lose(member, f"it was not ready {quiet:.0f} s after its last byte{others}")

    def _compute_time_limit(self, member: _DrivenNode) -> float:
        """Return the seconds that a node may take for what it lacks, and for all of its files."""
        rates = [
            (one.from_store + one.from_peers) / max(one.seconds, 1e-3)
            for one in self._members.values()
            if one.ready and one.from_store + one.from_peers > 0
        ]
        rate = max(_LEAST_RATE, min(rates) / _SLOWEST if len(rates) > 1 else 0.0)
        has = sum(self._tracker.list_held_sizes(member.node.id, self._sizes))
        return (2 * self._catalogue.size - has) / rate

    # -- nodes come and go

    def _add_node(self, node: Node | AbsentNode) -> None:
        if isinstance(node, AbsentNode):
            with self._lock:
                self._absent[node.id] = node
                self._news.notify_all()
            return
        member = _DrivenNode(node)
        thread = threading.Thread(
            target=self._follow, args=(member,), name=f"events-{node.name}", daemon=True
        )
        with self._lock:
            if self._ending:
                return
            self._members[node.id] = member
            self._threads.append(thread)
        thread.start()

    def _follow(self, member: _DrivenNode) -> None:
        """All that has to do with one node: start its run, then hear what happens there."""
        try:
            if not self._connect_node(member):
                return
            sender = threading.Thread(
                target=self._send_orders, args=(member,), name="orders", daemon=True
            )
            sender.start()
            self._poll_events(member)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not leave a run hanging
            with self._lock:
                self._fatal = self._fatal or errors.WorkerError(
                    f"{self._format_name(member.node)}: {type(error).__name__}: {error}"
                )
                self._news.notify_all()

    def _connect_node(self, member: _DrivenNode) -> bool:
        with self._lock:
            peers = {m.node.id: m.node for m in self._members.values() if m.joined}
        known = {each: _pack_endpoint(node) for each, node in peers.items()}
        body = b"\n".join((json.dumps(known).encode(), self._plan))
        while True:
            try:
                if not self._identify(member):
                    return False
                have = self._start_run(member, body)
                break
            except (HttpStatusError, ProtocolError, TlsError) as error:
                if not isinstance(error, HttpStatusError) or error.status != http.client.LOCKED:
                    self._lock_and_lose(member, _describe_refusal(error))
                    return False
                if not self._wait_to_retry(member, _describe_refusal(error)):
                    return False
            except TimeoutError:
                if not self._wait_to_retry(
                    member, f"it did not answer for {_ANSWER_TIMEOUT:.0f} s"
                ):
                    return False
            except (OSError, http.client.HTTPException) as error:
                if not self._wait_to_retry(
                    member, f"it cannot be reached ({errors.one_line(error)})"
                ):
                    return False
        with self._lock:
            self._join(member, have, set(peers))
        return True

    def _start_run(self, member: _DrivenNode, body: bytes) -> list[tuple[int, str]]:
        """Start the run on a node, and see that the node answers while it looks at what it has.

        Returns:
            The pieces that the node has, with their digests.

        Raises:
            RefusedError: The node refused.
            UnfitError: It answered what no agent does.
            OSError, http.client.HTTPException: It cannot be reached, or fell silent.
        """
        opened, silent = threading.Event(), threading.Event()
        connections = ConnectionPool(
            _ANSWER_TIMEOUT
        )  # of its own: it is broken off when the node is silent

        def watch() -> None:
            while not opened.wait(_RETRY_INTERVAL):
                place = member.node.place
                try:
                    with self._connections.request(place, "GET", "/agent") as answer:
                        read_body(answer, 4096)
                except HttpStatusError:
                    continue
                except (OSError, http.client.HTTPException):
                    silent.set()
                    connections.close()
                    return

        watcher = threading.Thread(target=watch, name=f"open-{member.node.name}", daemon=True)
        watcher.start()
        try:
            said = self._send_request(
                member, "PUT", "", body, timeout=_START_TIMEOUT, connections=connections
            )
            return self._check.read_pieces(said)
        except (OSError, http.client.HTTPException) as error:
            if silent.is_set():
                raise TimeoutError from error
            raise
        finally:
            opened.set()
            connections.close()

    def _identify(self, member: _DrivenNode) -> bool:
        """Ask an agent who it is, as all that follows names it. False if it is another node's."""
        try:
            place = identify(member.node.place, member.node.key, _ANSWER_TIMEOUT)
        except (ValueError, RecursionError):
            raise ProtocolError("no identity") from None
        identity = place.identity
        member.node = replace(member.node, place=place)
        with self._lock:
            same = self._identities.setdefault(identity, [])
            twin = next((one for one in same if _is_same_agent(one.place, place)), member.node)
            if twin is member.node:
                same.append(twin)
            is_another = twin.id != member.node.id
            if is_another:
                self._lose(
                    member,
                    f"its address leads to the agent of {self._format_name(twin)}: name each node "
                    "once",
                )
        return not is_another

    def _wait_to_retry(self, member: _DrivenNode, why: str) -> bool:
        """Wait a moment, and tell whether to try a host again that did not answer or was busy."""
        with self._lock:
            if self._ending:
                return False
            node = member.node
            self._absent[node.id] = AbsentNode(node.id, node.name, why)
            self._knocking.add(node.id)
            self._members.pop(node.id, None)
            self._news.wait(_RETRY_INTERVAL)
            return not self._ending

    def _join(self, member: _DrivenNode, have: list[tuple[int, str]], known: set[str]) -> None:
        identity = member.node.id
        self._absent.pop(identity, None)
        self._members[identity] = member
        for other in self._members.values():
            if other.joined and not other.why:
                other.orders.put({"join": identity, "place": _pack_endpoint(member.node)})
                if other.node.id not in known:
                    member.orders.put({"join": other.node.id, "place": _pack_endpoint(other.node)})
        member.joined, member.moved = True, time.monotonic()
        member.cached = sum(self._sizes[number] for number, _ in have)
        self._had += member.cached
        for number in self._void:
            member.orders.put({"void": number})
        orders = self._tracker.add_node(
            identity,
            have,
            time.monotonic(),
            zone=member.node.zone,
        )
        self._dispatch_orders(orders)
        self._news.notify_all()

    def _make_run_spec(self, sources: list[str]) -> bytes:
        """Return the body that starts a run on a node, made once: it may be large."""
        settings, limits = self._settings, self._settings.limits
        return json.dumps(
            {
                "catalogue": self._catalogue.to_json(),
                "sources": sources,
                "key": self._key.hex(),
                "check": settings.check,
                "slots": limits.node_store + limits.down + 4,
                "ca": self._read_authorities(),
                "unpacked": {
                    "bytes": settings.unpacked_bytes,
                    "members": settings.unpacked_members,
                },
            }
        ).encode()

    def _read_authorities(self) -> str | None:
        files = [spec.ca_file for spec in self._settings.stores.values() if spec.ca_file]
        return "\n".join(file.read_text() for file in files) or None

    def _lock_and_lose(self, member: _DrivenNode, why: str) -> None:
        with self._lock:
            self._lose(member, why)

    def _lose(self, member: _DrivenNode, why: str) -> None:
        if member.why or self._ending:
            return
        member.why = why or "it gave no reason"
        member.orders.put(None)
        self._told.append(Event("node.lost", self._format_name(member.node), {"why": member.why}))
        self._had -= sum(self._tracker.list_held_sizes(member.node.id, self._sizes))
        self._dispatch_orders(self._tracker.remove_node(member.node.id, time.monotonic()))
        self._news.notify_all()

    def _format_name(self, node: Node | AbsentNode) -> str:
        """Return the name of a node, with its id where another node has the same name."""
        known = [*(member.node for member in self._members.values()), *self._absent.values()]
        if any(other.name == node.name and other.id != node.id for other in known):
            return f"{node.name} ({node.id})"
        return node.name

    # -- talking to a node

    def _send_request(
        self,
        member: _DrivenNode,
        method: str,
        tail: str,
        body: bytes = b"",
        *,
        timeout: float = _ANSWER_TIMEOUT,
        connections: ConnectionPool | None = None,
    ) -> Any:
        path = f"/runs/{self._name}{tail}"
        node = member.node

        def sign_headers() -> dict[str, str]:
            return {AUTH_HEADER: sign(node.key, method, path, body, to=node.place.identity)}

        with (connections or self._connections).request(
            node.place, method, path, sign_headers, body or None, timeout=timeout
        ) as answer:
            longest = self._check.max_answer_bytes
            said = read_body(answer, longest)
        if len(said) > longest:
            raise ProtocolError("more than there is to say")
        try:
            return json.loads(said) if said else None
        except (ValueError, RecursionError):
            raise ProtocolError("no JSON") from None

    def _send_orders(self, member: _DrivenNode) -> None:
        while (order := member.orders.get()) is not None:
            batch = [order]
            while not member.orders.empty():
                more = member.orders.get()
                if more is None:
                    member.orders.put(None)
                    break
                batch.append(more)
            try:
                self._send_request(member, "POST", "/orders", json.dumps(batch).encode())
            except (HttpStatusError, OSError, http.client.HTTPException, ProtocolError) as error:
                self._lock_and_lose(member, f"it took no orders ({_describe_refusal(error)})")
                return

    def _poll_events(self, member: _DrivenNode) -> None:
        after = 0
        while not (self._ending or member.why):
            try:
                said = self._send_request(member, "GET", f"/events?after={after}")
                events = self._check.read_events(said)
            except (HttpStatusError, OSError, http.client.HTTPException) as error:
                self._lock_and_lose(member, f"it no longer answers ({_describe_refusal(error)})")
                return
            except ProtocolError as error:
                self._lock_and_lose(member, str(error))
                return
            after += len(events)
            with self._lock:
                for event in events:
                    self._handle_event(member, event)
                if events:
                    self._news.notify_all()

    def _dispatch_orders(self, orders: list[Order]) -> None:
        for order in orders:
            told: dict[str, Any] = {"p": order.piece}
            if order.drop:
                told["drop"] = True
                self._had -= self._sizes[order.piece]
            else:
                told |= {"s": order.source, "d": order.digest}
            self._members[order.node].orders.put(told)
        for number in self._tracker.take_disputed():
            self._referee.read(number)
        for name in self._tracker.take_hopeless():
            self._lose(self._members[name], "what it has, or reads, is not what the store has")

    # -- what happened

    def _handle_event(self, member: _DrivenNode, event: dict[str, Any]) -> None:
        if member.why or self._ending:
            return
        match event["e"]:
            case "received":
                if self._tracker.lacks(member.node.id):
                    member.moved = time.monotonic()
            case "done":
                self._handle_done(member, event["p"], event["s"], event["d"], event["b"])
            case "had":
                self._count_bytes(member, event["s"], event["b"])
                self._dispatch_orders(
                    self._tracker.cancel_transfer(
                        member.node.id, event["p"], event["s"], time.monotonic()
                    )
                )
            case "failed":
                self._handle_failed(member, event)
            case "retry":
                member.failures += 1
            case "files":
                self._handle_files(member, event["f"])
            case "unusable":
                member.unusable[event["f"]] = event["why"]
            case "mismatch":
                self._handle_mismatch(member, event["f"], event["d"])
            case _:
                self._lose(member, event["why"])

    def _handle_done(
        self, member: _DrivenNode, number: int, source: str, digest: str, size: int
    ) -> None:
        name, now = member.node.id, time.monotonic()
        self._count_bytes(member, source, size)
        if source == STORE:
            self._failing.pop(number, None)
        if not self._tracker.has(name, number):
            self._had += size
            member.moved = now
        self._dispatch_orders(self._tracker.complete_transfer(name, number, source, digest, now))

    def _count_bytes(self, member: _DrivenNode, source: str, size: int) -> None:
        if source == STORE:
            member.from_store += size
        else:
            member.from_peers += size

    def _handle_failed(self, member: _DrivenNode, event: dict[str, Any]) -> None:
        member.failures += 1
        number, source, status = event["p"], event["s"], event["status"]
        now = time.monotonic()
        wrong: bool = event["wrong"]
        giver = self._members.get(source)
        if wrong and giver is not None and source not in member.accused:
            member.accused.add(source)  # it may say so for ever
            self._told.append(
                Event("node.untrusted", self._format_name(giver.node), {"piece": number})
            )
        if source == STORE:
            since = self._failing.setdefault(number, now)
            if status in FINAL_STATUSES or now - since > self._settings.patience.total_seconds():
                self._blaming.setdefault(number, {})[member.node.id] = event["why"]
                self._referee.read(number)  # one node ends no run
        self._dispatch_orders(
            self._tracker.fail_transfer(member.node.id, number, source, now, wrong=wrong)
        )

    def _handle_store_failure(self, number: int, status: int, why: str) -> None:
        """End the run if the driver itself finds an object gone, or cannot read it for too long."""
        origins = sorted(
            {self._catalogue.files[s.file].origin for s in self._catalogue.pieces[number]}
        )
        where = (
            origins[0] if len(origins) == 1 else f"{origins[0]} or one of {len(origins)} beside it"
        )
        if status in FINAL_STATUSES:
            self._fatal = errors.ChangedError(
                f"{where} was replaced or removed while it was being read ({status}), so the run "
                "has stopped rather than mix two versions. Run it again for what is there now."
            )
            return
        now = time.monotonic()
        since = self._failing.setdefault(number, now)
        if now - since > self._settings.patience.total_seconds():
            kind = errors.DeniedError if status in _DENIED_STATUSES else errors.UnavailableError
            self._fatal = kind(
                f"{where} could not be read for {now - since:.0f} s ({why}). Run it again when the "
                "store answers: what is on the nodes stays."
            )

    def _handle_files(self, member: _DrivenNode, numbers: list[int]) -> None:
        if not member.files.issuperset(numbers):
            member.files.update(numbers)
            member.moved = time.monotonic()
        if len(member.files) == len(self._catalogue.files) and not member.ready:
            member.ready = True
            member.seconds = time.monotonic() - self._began
            figures = {"seconds": round(member.seconds, 2)}
            self._told.append(Event("node.ready", self._format_name(member.node), figures))

    # -- what the driver reads itself

    def _select_own_reads(self) -> None:
        """Choose pieces that the driver reads itself, of those that nothing says anything of.

        They are drawn at random, up to a limit: all of them where they are few. Nodes that lie
        alike are found out by them, and a single node has nobody else who reads what it read.
        """
        pieces = [number for number in self._unproven if self._tracker.is_lacked(number)]
        random.SystemRandom().shuffle(pieces)
        left = _OWN_READ_LIMIT
        for number in pieces:
            left -= self._sizes[number]
            if left < 0:
                break
            self._own.add(number)
            self._referee.read(number)

    def _is_open(self, number: int) -> bool:
        """Tell whether a piece is the driver's own, disputed, or said by a node to be gone."""
        with self._lock:
            if number in self._own or self._tracker.is_disputed(number):
                return True
            return any(not self._members[name].why for name in self._blaming.get(number, ()))

    def _handle_settled(self, number: int, digest: str) -> None:
        with self._lock:
            self._failing.pop(number, None)
            self._settle_pieces({number: digest})
            for name, why in self._blaming.pop(number, {}).items():
                where = self._catalogue.files[self._catalogue.pieces[number][0].file].origin
                self._lose(
                    self._members[name],
                    f"it cannot read {where} from the store, and the driver can: {why}",
                )
            self._news.notify_all()

    def _settle_pieces(self, pieces: dict[int, str]) -> bool:
        """Tell the tracker what pieces are; returns whether a node had one of them wrong."""
        orders: list[Order] = []
        for number, digest in pieces.items():
            orders += self._tracker.settle_piece(number, digest, time.monotonic())
        self._dispatch_orders(orders)
        for name in set(self._tracker.quarantined) - self._untrusted:
            self._untrusted.add(name)
            self._told.append(
                Event("node.untrusted", self._format_name(self._members[name].node), {})
            )
        return any(order.drop for order in orders)

    def _handle_unreadable(self, number: int, error: FetchError) -> None:
        with self._lock:
            self._handle_store_failure(number, error.status, str(error))
            self._news.notify_all()

    def _handle_fault(self, error: BaseException) -> None:
        with self._lock:
            self._fatal = self._fatal or errors.WorkerError(errors.one_line(error))
            self._news.notify_all()

    # -- an object that is not what its digest says

    def _handle_mismatch(self, member: _DrivenNode, number: int, parts: str) -> None:
        """Have a file read by the driver, as a node says that its digest does not fit.

        The driver reads the file. After that, segments that are right and do not fit are a lie, or
        a broken machine; others are on their way to be replaced.
        """
        file = self._catalogue.files[number]
        if number in self._void or not file.digest:
            return
        right = self._audited.get(number)
        if right is None:
            if number not in self._mismatched:
                self._told.append(Event("file.mismatch", file.origin, {}))
            self._mismatched.setdefault(number, set()).add(member.node.id)
            self._referee.audit(number)
        elif parts == right:
            self._lose(member, f"its bytes of {file.origin} are not those that the store has")

    def _is_doubted(self, number: int) -> bool:
        with self._lock:
            return number not in self._audited and any(
                not self._members[name].why for name in self._mismatched.get(number, ())
            )

    def _handle_audit(self, audit: FileAudit) -> None:
        """Settle a file that the driver has read: what differs is replaced everywhere."""
        file = self._catalogue.files[audit.file]
        with self._lock:
            if audit.digest != file.digest and file.sha256:
                self._fail_corrupt(audit.file)
                self._news.notify_all()
                return
            if audit.digest != file.digest:  # its ETag is no MD5: it was encrypted by the store
                self._void.add(audit.file)
                for member in self._members.values():
                    if member.joined and not member.why:
                        member.orders.put({"void": audit.file})
            self._audited[audit.file] = audit.parts
            accusers = self._mismatched.pop(audit.file, set())
            changed = self._settle_pieces(audit.pieces)
            if not changed and audit.file not in self._void:
                self._count_false_alarms(accusers, file.origin)
            self._news.notify_all()

    def _count_false_alarms(self, names: set[str], origin: str) -> None:
        for name in names:
            self._vain[name] = self._vain.get(name, 0) + 1
            if self._vain[name] >= _MAX_FALSE_ALARMS:
                why = f"it finds files wrong that are right in the store, {origin} for one"
                self._lose(self._members[name], why)

    def _fail_corrupt(self, number: int) -> None:
        file = self._catalogue.files[number]
        self._fatal = errors.CorruptError(
            f"{file.origin} is not the bytes that its digest {file.sha256} says, also when it is "
            "read again. Upload it anew, or correct the record that has the digest. It has no "
            "final name on any node."
        )

    # -- the end

    def _end_runs(self) -> None:
        with self._lock:
            self._ending = True
            members = [member for member in self._members.values() if member.joined]
            self._news.notify_all()
        enders = [
            threading.Thread(target=self._end_run, args=(member,), daemon=True)
            for member in members
        ]
        for thread in enders:
            thread.start()
        for thread in [*enders, *self._threads]:
            thread.join(_ANSWER_TIMEOUT)

    def _end_run(self, member: _DrivenNode) -> None:
        member.orders.put(None)
        if member.why:
            return
        try:
            self._send_request(member, "DELETE", "")
        except (HttpStatusError, OSError, http.client.HTTPException, ProtocolError):
            return  # it ends the run itself when it hears nothing for a while

    def _make_report(self) -> PrewarmReport:
        quarantined = set(self._tracker.quarantined)
        nodes = [
            NodeReport(
                name=self._format_name(m.node),
                ready=m.ready and not m.why,
                why=m.why,
                cached=m.cached,
                from_store=m.from_store,
                from_peers=m.from_peers,
                failures=m.failures,
                seconds=round(m.seconds, 3),
                trusted=m.node.id not in quarantined,
            )
            for m in self._members.values()
        ]
        nodes += [
            NodeReport(self._format_name(m), False, m.why, 0, 0, 0, 0, 0.0, True)  # noqa: FBT003
            for m in self._absent.values()
        ]
        files = self._catalogue.files
        unverified = {n for n, file in enumerate(files) if not file.digest or n in self._void}
        unconfirmed = {
            segment.file
            for number in self._unproven
            if not self._tracker.is_decided(number)
            for segment in self._catalogue.pieces[number]
            if segment.size
        }
        return PrewarmReport(
            files=len(self._catalogue.files),
            size=self._catalogue.size,
            unverified=len(unverified),
            unconfirmed=len(unverified & unconfirmed),
            driver_bytes=self._referee.received,
            seconds=round(self._seconds, 3),
            startup=round(self._startup, 3),
            nodes=tuple(sorted(nodes, key=lambda node: node.name)),
            direct=self._tracker.direct,
            curve=tuple(self._curve),
        )


def _is_same_agent(one: Endpoint, other: Endpoint) -> bool:
    """Tell whether two places that state one identity are of one agent.

    Anybody may ask an agent for its identity, and state it. Nobody shows its certificate; over
    loopback none is shown.
    """
    fingerprints = {one.fingerprint, other.fingerprint}
    return len(fingerprints) == 1 or "" in fingerprints


def _pack_endpoint(node: Node) -> list[Any]:
    place = node.place
    return [place.scheme, place.host, place.port, place.identity, place.fingerprint]


def _read_reason(said: Any) -> str:
    """Return the reason that a refusal states.

    Raises:
        ValueError: It states none.
    """
    match said:
        case {"why": str(why)} if why.strip():
            return why
        case _:
            raise ValueError("no reason")


def _describe_refusal(error: BaseException) -> str:
    """Return the reason of a refusal or a broken connection, in one line."""
    if isinstance(error, HttpStatusError):
        text = str(error).partition(" ")[2]
        try:
            return clean_text(_read_reason(json.loads(text)))
        except (ValueError, RecursionError):
            return clean_text(str(error))
    return errors.one_line(error)
