"""A run on a node: orders in, events out, and the threads that fetch and unpack.

This module owns what a driver has told one node, and what it has not been told yet.
"""

import json
import queue
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from millrace.errors import ChangedError, MillraceError
from millrace.swarm.archives.run_archives import ArchiveUnpacker
from millrace.swarm.assembler import Assembler
from millrace.swarm.cache_index import CacheCheck
from millrace.swarm.messages import (
    AddPeer,
    BytesReceived,
    DigestMismatch,
    DropPiece,
    FetchPiece,
    FilesReady,
    FileUnusable,
    NodeEvent,
    NodeFailed,
    PieceFailed,
    PieceRedundant,
    PieceWritten,
    ReadRetried,
    VoidDigest,
    decode_order,
    encode_message,
)
from millrace.swarm.pieces import Catalogue, digest_of
from millrace.swarm.protocol import VERSION, ConnectionPool, Endpoint, ProtocolVersionError
from millrace.swarm.transfer import BufferPool, FetchError, PeerReader, StoreReader, hash_segments

_LONG_POLL_TIMEOUT = 1.0  # seconds that a request for events is held open at most: the heartbeat
_MAX_EVENTS = 1_000  # events in an answer; the rest comes with the next
_STALL_TIMEOUT = 10.0  # seconds without a byte after which a transfer has failed
_DRIVER_TIMEOUT = 15.0  # seconds after which a driver that asks for no events counts as gone


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Body of the request that starts a run.

    Two lines of JSON: the nodes that are there, and what every node is told alike.
    """

    catalogue: Catalogue
    sources: list[str]
    key: bytes
    peers: dict[str, Endpoint]
    check: CacheCheck
    slots: int
    ca: str | None
    unpacked: dict[str, int]

    @classmethod
    def parse(cls, body: bytes) -> "RunSpec":
        """Parse the body of a request.

        Raises:
            ValueError, KeyError: It is no such body.
            ProtocolVersionError: The driver has another version of the protocol.
        """
        peers, _, plan = body.partition(b"\n")
        data = json.loads(plan)
        if data.get("version") != VERSION:
            raise ProtocolVersionError(data.get("version"), "driver")
        return cls(
            catalogue=Catalogue.from_json(data["catalogue"]),
            sources=data["sources"],
            key=bytes.fromhex(data["key"]),
            peers={name: Endpoint(**place) for name, place in json.loads(peers).items()},
            check=CacheCheck(data["check"]),
            slots=data["slots"],
            ca=data["ca"],
            unpacked=data["unpacked"],
        )


class Run:
    """One run on one node.

    Args:
        name: Of the run.
        root: The folder that files go below.
        plan: What it is.
    """

    def __init__(self, name: str, root: Path, plan: RunSpec) -> None:
        self.name, self.key = name, plan.key
        self._plan = plan
        self._events: list[NodeEvent] = []
        self._news = threading.Condition()
        self._orders: queue.SimpleQueue[FetchPiece | None] = queue.SimpleQueue()
        self._sizes = plan.catalogue.list_piece_sizes()
        self._buffers = BufferPool(max(self._sizes, default=0))
        self.began = datetime.now(UTC)
        self.heard = time.monotonic()
        self.landing = Assembler(
            root,
            plan.catalogue,
            check=plan.check,
            finished=self._report_finished,
            mismatch=lambda number, digest: self._emit(DigestMismatch(number, digest)),
            fault=self._report_fault,
        )
        self._received = 0  # bytes, when the driver last asked
        self._to_store = ConnectionPool(_STALL_TIMEOUT, ca=plan.ca)
        self._to_peers = ConnectionPool(_STALL_TIMEOUT)
        self._store = StoreReader(
            plan.catalogue,
            plan.sources,
            self._to_store,
            lambda why: self._emit(ReadRetried(why[:300])),
        )
        self._peers = PeerReader(name, plan.key, plan.peers, self._to_peers)
        self._threads = [
            threading.Thread(target=self._run_orders, name=f"fetch-{i}", daemon=True)
            for i in range(plan.slots)
        ]
        self._archives = ArchiveUnpacker(root, plan.catalogue, self.landing, plan.unpacked)
        self._threads += [
            threading.Thread(target=self._unpack, args=(i,), name=f"unpack-{i}", daemon=True)
            for i, file in enumerate(plan.catalogue.files)
            if file.unpack
        ]

    def open(self) -> list[tuple[int, str]]:
        """Begin; returns the pieces that are here already, with their digests."""
        have = self.landing.open()
        for thread in self._threads:
            thread.start()
        return have

    def close(self) -> None:
        """End; transfers under way are broken off, what was written stays."""
        self._store.close()
        self._to_store.close()
        self._to_peers.close()
        for _ in range(self._plan.slots):
            self._orders.put(None)
        self.landing.stop()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self.landing.close()
        with self._news:
            self._news.notify_all()

    def is_driven(self) -> bool:
        """Tell whether the driver has asked for events a short while ago."""
        return time.monotonic() - self.heard <= _DRIVER_TIMEOUT

    def take_orders(self, orders: list[dict[str, Any]]) -> None:
        """Take orders, and nodes that have joined."""
        for data in orders:
            match decode_order(data):
                case AddPeer(node, endpoint):
                    self._plan.peers[node] = endpoint
                case VoidDigest(file):
                    self.landing.void_digest(file)
                case DropPiece(piece):
                    self.landing.drop(piece)
                case FetchPiece() as order:
                    self._orders.put(order)

    def poll_events(self, after: int) -> list[dict[str, Any]]:
        """Wait a while for events, and return the JSON objects of `_MAX_EVENTS` at most.

        Args:
            after: Number of events that the driver has already.
        """
        self.heard = time.monotonic()
        with self._news:
            if len(self._events) <= after:
                self._news.wait(_LONG_POLL_TIMEOUT)
            received = self._to_store.received + self._to_peers.received
            if len(self._events) <= after and received != self._received:
                self._events.append(BytesReceived(received))
            self._received = received
            return [encode_message(event) for event in self._events[after : after + _MAX_EVENTS]]

    def _emit(self, event: NodeEvent) -> None:
        with self._news:
            self._events.append(event)
            self._news.notify_all()

    def _report_fault(self, error: BaseException) -> None:
        self._emit(NodeFailed(describe_error(error)))

    def _run_orders(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                self._fetch(order)
            except Exception as error:  # noqa: BLE001 - told to the driver
                self._report_fault(error)

    def _fetch(self, order: FetchPiece) -> None:
        number, source = order.piece, order.source
        if self.landing.has(number):  # another source was quicker
            self._emit(PieceRedundant(number, source, 0))
            return
        with self._buffers.borrow(self._sizes[number]) as data:
            try:
                if source:
                    self._peers.read_piece(number, source, data, lambda: self.landing.has(number))
                else:
                    self._store.read_piece(number, data)
            except FetchError as error:
                if self.landing.has(number):
                    self._emit(PieceRedundant(number, source, 0))
                    return
                self._emit(PieceFailed(number, source, str(error)[:300], error.status))
                return
            self._write_piece(order, data)

    def _write_piece(self, order: FetchPiece, data: memoryview) -> None:
        number, source = order.piece, order.source
        parts = hash_segments(self._plan.catalogue.pieces[number], data)
        digest = digest_of(parts)
        if order.digest and digest != order.digest:
            self._emit(PieceFailed(number, source, "wrong bytes", is_wrong=True))
            return
        if self.landing.write(number, data, parts):
            self._emit(PieceWritten(number, source, digest, len(data)))
        else:  # another source was quicker, and its bytes may be others
            self._emit(PieceRedundant(number, source, len(data)))

    def _report_finished(self, numbers: list[int]) -> None:
        files = self._plan.catalogue.files
        if plain := [number for number in numbers if not files[number].unpack]:
            self._emit(FilesReady(plain))

    def _unpack(self, number: int) -> None:
        """Unpack an archive while it arrives. One that cannot be unpacked costs only itself."""
        try:
            self._archives.unpack(number)
        except ChangedError:
            return  # the run has ended
        except Exception as error:  # noqa: BLE001 - told to the driver
            self._emit(FileUnusable(number, describe_error(error)))
            return
        self._emit(FilesReady([number]))


def describe_error(error: BaseException) -> str:
    """Return the sentence of an error of ours, or the kind and text of another one."""
    return str(error) if isinstance(error, MillraceError) else f"{type(error).__name__}: {error}"
