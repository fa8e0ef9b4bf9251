"""A run on a node: connects the assembler, the fetcher, the archives and the events.

This module owns the time of the last request of the driver, and the order of the end of a run.
"""

import queue
import threading
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from millrace.errors import MillraceError, StoppedError
from millrace.swarm.archives.run_archives import ArchiveUnpacker
from millrace.swarm.assembler import Assembler
from millrace.swarm.event_log import EventLog
from millrace.swarm.fetcher import PieceFetcher
from millrace.swarm.messages import (
    AddPeer,
    DigestMismatch,
    DropPiece,
    FetchPiece,
    FilesReady,
    FileUnusable,
    NodeEvent,
    NodeFailed,
    PieceDropped,
    VoidDigest,
    decode_order,
    encode_message,
)
from millrace.swarm.protocol import Endpoint
from millrace.swarm.run_spec import RunSpec

_LONG_POLL_TIMEOUT = 1.0  # seconds that a request for events waits at most, which is the heartbeat
_UNPACKERS = 16  # archives that are unpacked at once; each has open folders
_END = -1  # in place of the number of an archive, before all of them
_DRIVER_TIMEOUT = 15.0  # seconds without a request for events after which the driver counts as dead


class NodeRun:
    """One run on one node.

    Args:
        name: Name of the run.
        root: Folder that all destinations are below.
        spec: Files, keys and limits of the run.
        peers: Endpoint of each agent that has joined, by the id of its node.

    Attributes:
        name: Name of the run.
        key: Key that nodes sign their requests to each other with.
        began: Start of the run.
        heard: Time of the last request of the driver.
        assembler: Assembler of the files.
    """

    def __init__(self, name: str, root: Path, spec: RunSpec, peers: dict[str, Endpoint]) -> None:
        self.name, self.key = name, spec.key
        self._files, self._peers = spec.catalogue.files, peers
        self.began = datetime.now(UTC)
        self.heard = time.monotonic()
        self._events = EventLog(self._count_progress, _LONG_POLL_TIMEOUT)
        self.assembler = Assembler(
            root,
            spec.catalogue,
            check=spec.check,
            on_finished=self._report_finished,
            on_dropped=self._report_dropped,
            on_mismatch=self._report_mismatch,
            on_fault=self._report_fault,
        )
        self._fetcher = PieceFetcher(
            name,
            spec,
            peers,
            self.assembler,
            emit=self._events.append,
            on_fault=self._report_fault,
        )
        self._archives = ArchiveUnpacker(root, spec.catalogue, self.assembler, spec.unpack_limits)
        # Archives to unpack, by their numbers. Bytes arrive in about this order, and arrive also
        # while no thread waits for them, so an archive that waits for a thread delays no other one.
        self._packed: queue.PriorityQueue[int] = queue.PriorityQueue()
        self._unpacked: set[int] = set()  # reported archives; changed under the assembler's lock
        archives = [number for number, file in enumerate(self._files) if file.unpack]
        for number in archives:
            self._packed.put(number)
        self._threads = [
            threading.Thread(target=self._unpack_all, name=f"unpack-{i}", daemon=True)
            for i in range(min(_UNPACKERS, len(archives)))
        ]

    def open(self) -> list[tuple[int, str]]:
        """Start the run.

        Returns:
            The pieces that the node has already, with their digests.

        Raises:
            StoppedError: The run was interrupted.
        """
        have = self.assembler.open()
        self._fetcher.start()
        for thread in self._threads:
            thread.start()
        return have

    def interrupt(self) -> None:
        """End `open` before the next file: it raises `StoppedError`. Then call `close`."""
        self.assembler.interrupt()

    def close(self) -> None:
        """End the run. Transfers are broken off; written data stays for the next run."""
        self._fetcher.stop()
        self.assembler.stop()
        for _ in self._threads:
            self._packed.put(_END)
        self._fetcher.join()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self.assembler.close()
        self._events.wake()

    def is_driven(self) -> bool:
        """Tell whether the driver has asked for events within `_DRIVER_TIMEOUT`."""
        return time.monotonic() - self.heard <= _DRIVER_TIMEOUT

    def take_orders(self, orders: list[dict[str, Any]]) -> None:
        """Carry out orders of the driver, given as JSON objects."""
        for data in orders:
            match decode_order(data):
                case AddPeer(node, endpoint):
                    self._peers[node] = endpoint
                case VoidDigest(file):
                    self.assembler.void_digest(file)
                case DropPiece(piece):
                    self._fetcher.leave_out_mirrors(piece)
                    self.assembler.drop(piece)
                case FetchPiece() as order:
                    self._fetcher.submit(order)

    def poll_events(self, after: int) -> list[dict[str, Any]]:
        """Wait a while for events, and return their JSON objects.

        Args:
            after: Number of events that the driver has received before.
        """
        self.heard = time.monotonic()
        return [encode_message(event) for event in self._events.poll(after)]

    def _count_progress(self) -> int:
        return self._fetcher.received + self._archives.written

    def _report_fault(self, error: BaseException) -> None:
        self._events.append(NodeFailed(describe_error(error)))

    def _report_mismatch(self, number: int, combined: str) -> None:
        self._events.append(DigestMismatch(number, combined))

    def _report_dropped(self, piece: int, files: list[int]) -> None:
        self._events.append(PieceDropped(piece, files))
        for number in self._unpacked.intersection(files):
            self._unpacked.discard(number)
            self._packed.put(number)

    def _report_finished(self, numbers: list[int]) -> None:
        """Report files with final names. An archive is reported once it is unpacked."""
        if plain := [number for number in numbers if not self._files[number].unpack]:
            self._events.append(FilesReady(plain))

    def _unpack_all(self) -> None:
        """Unpack one archive after another, until the run ends."""
        while (number := self._packed.get()) != _END:
            try:
                self._unpack(number)
            except StoppedError:
                return  # the run has ended

    def _unpack(self, number: int) -> None:
        """Unpack an archive while it arrives, and again if pieces of it were dropped meanwhile.

        A failure affects only this archive. If pieces are dropped later, the archive is queued.

        Raises:
            StoppedError: The run ended before.
        """
        while True:
            event: NodeEvent = FilesReady([number])
            drops = self.assembler.count_drops(number)
            try:
                drops = self._archives.unpack(number)
            except StoppedError:
                raise
            except Exception as error:  # noqa: BLE001 - the driver is told
                event = FileUnusable(number, describe_error(error))
            report = partial(self._report_unpacked, number, event)
            if self.assembler.call_unless_dropped(number, drops, report):
                return

    def _report_unpacked(self, number: int, event: NodeEvent) -> None:
        self._unpacked.add(number)
        self._events.append(event)


def describe_error(error: BaseException) -> str:
    """Return the text of an error of Millrace, or the type and text of another error."""
    return str(error) if isinstance(error, MillraceError) else f"{type(error).__name__}: {error}"
