"""Fetch pieces on a node: from the store or from other nodes, several at once.

This module owns the queue of orders, the threads that carry them out, and their connections.
"""

import queue
import threading
from collections.abc import Callable

from millrace.swarm.assembler import Assembler
from millrace.swarm.catalogue import combine_segment_blocks
from millrace.swarm.messages import (
    FetchPiece,
    NodeEvent,
    PieceFailed,
    PieceRedundant,
    PieceWritten,
    ReadRetried,
    compute_commitment,
)
from millrace.swarm.piece_readers import (
    BufferPool,
    FetchError,
    PeerReader,
    StoreReader,
    hash_segments,
)
from millrace.swarm.protocol import ConnectionPool, Endpoint
from millrace.swarm.run_spec import RunSpec

_STALL_TIMEOUT = 10.0  # seconds without a byte after which a transfer has failed
_LONGEST_REASON = 300  # characters


class PieceFetcher:
    """Carries out orders to fetch pieces, and passes the pieces to the assembler.

    Args:
        run: Name of the run.
        spec: Specification of the run.
        peers: Endpoint of each other agent, by the id of its node; agents may be added.
        assembler: Assembler that writes the pieces.
        emit: Called with each event.
        on_fault: Called with an unexpected error.
    """

    def __init__(
        self,
        run: str,
        spec: RunSpec,
        peers: dict[str, Endpoint],
        assembler: Assembler,
        *,
        emit: Callable[[NodeEvent], None],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._catalogue, self._assembler = spec.catalogue, assembler
        self._emit, self._on_fault = emit, on_fault
        self._orders: queue.SimpleQueue[FetchPiece | None] = queue.SimpleQueue()
        self._sizes = spec.catalogue.list_piece_sizes()
        self._buffers = BufferPool(max(self._sizes, default=0))
        self._store_pool = ConnectionPool(_STALL_TIMEOUT, ca=spec.ca)
        self._peer_pool = ConnectionPool(_STALL_TIMEOUT)
        self._store = StoreReader(
            spec.catalogue,
            spec.sources,
            self._store_pool,
            on_retry=self._report_retry,
            mirrors=spec.mirrors,
        )
        self._peers = PeerReader(run, spec.key, peers, self._peer_pool)
        self._threads = [
            threading.Thread(target=self._run_orders, name=f"fetch-{i}", daemon=True)
            for i in range(spec.slots)
        ]

    @property
    def received(self) -> int:
        """Bytes that the node has received, with those of incomplete pieces."""
        return self._store_pool.received + self._peer_pool.received

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, order: FetchPiece) -> None:
        """Add an order to the queue."""
        self._orders.put(order)

    def leave_out_mirrors(self, number: int) -> None:
        """Read the files of a dropped piece no more from the mirrors that have sent it."""
        self._store.leave_out_mirrors(number)

    def stop(self) -> None:
        """Break off all transfers, and end the threads."""
        self._store.close()
        self._store_pool.close()
        self._peer_pool.close()
        for _ in self._threads:
            self._orders.put(None)

    def join(self) -> None:
        """Wait for the end of the threads."""
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _report_retry(self, reason: str) -> None:
        self._emit(ReadRetried(reason[:_LONGEST_REASON]))

    def _run_orders(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                self._fetch(order)
            except Exception as error:  # noqa: BLE001 - the driver is told
                self._on_fault(error)

    def _fetch(self, order: FetchPiece) -> None:
        number, source, assembler = order.piece, order.source, self._assembler
        if assembler.has(number):  # another source was faster
            self._emit(PieceRedundant(number, source, 0))
            return
        with self._buffers.borrow(self._sizes[number]) as data:
            try:
                if source:
                    self._peers.read_piece(number, source, data, lambda: assembler.has(number))
                else:
                    self._store.read_piece(number, data, order.turn)
            except FetchError as error:
                if assembler.has(number):
                    self._emit(PieceRedundant(number, source, 0))
                    return
                reason = str(error)[:_LONGEST_REASON]
                self._emit(PieceFailed(number, source, reason, error.status))
                return
            self._write(order, data)

    def _write(self, order: FetchPiece, data: memoryview) -> None:
        number, source = order.piece, order.source
        block_digests = hash_segments(self._catalogue.pieces[number], data)
        digest = combine_segment_blocks(block_digests)
        if order.commitment and compute_commitment(digest) != order.commitment:
            if not source and self._store.leave_out_mirrors(number):
                self._report_retry("a mirror has sent wrong bytes")
                self._fetch(order)
                return
            self._emit(
                PieceFailed(
                    number, source, "the bytes do not have the digest of the order", is_wrong=True
                )
            )
            return
        if self._assembler.write(number, data, block_digests):
            self._emit(PieceWritten(number, source, digest, len(data)))
        else:  # another source was faster, and may have sent other bytes
            self._emit(PieceRedundant(number, source, len(data)))
