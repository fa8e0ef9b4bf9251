"""Pass each event of an agent to the part of the driver that needs it."""

import time

from millrace.swarm.driving.file_checks import FileChecks
from millrace.swarm.driving.members import Member
from millrace.swarm.driving.piece_checks import PieceChecks
from millrace.swarm.driving.run_state import RunState
from millrace.swarm.messages import (
    BytesReceived,
    DigestMismatch,
    FilesReady,
    FileUnusable,
    NodeEvent,
    NodeFailed,
    PieceDropped,
    PieceFailed,
    PieceRedundant,
    PieceWritten,
    ReadRetried,
)
from millrace.swarm.progress_events import NodeAccused, NodeReady
from millrace.swarm.tracker import STORE


class EventHandler:
    """Handler of the checked events of all members. Its caller holds the lock of the run.

    Args:
        state: Members and tracker of the run.
        pieces: Checks of pieces by the driver.
        files: Checks of files by the driver.
        file_count: Number of files.
        began: Time of the call.
    """

    def __init__(
        self,
        state: RunState,
        pieces: PieceChecks,
        files: FileChecks,
        *,
        file_count: int,
        began: float,
    ) -> None:
        self._state, self._pieces, self._files = state, pieces, files
        self._file_count, self._began = file_count, began

    def handle(self, member: Member, event: NodeEvent) -> None:
        """Handle an event of a member. Ignore events of lost members, and events after the end."""
        if member.is_lost or self._state.is_ending:
            return
        match event:
            case BytesReceived():
                member.last_progress = time.monotonic()
            case PieceWritten():
                self._handle_written(member, event)
            case PieceRedundant():
                self._handle_redundant(member, event)
            case PieceFailed():
                self._handle_failed(member, event)
            case ReadRetried():
                member.counts.failures += 1
            case FilesReady() | FileUnusable() | PieceDropped():
                self._handle_files(member, event)
            case DigestMismatch(file, digest):
                self._files.note_mismatch(member, file, digest)
            case NodeFailed(reason):
                self._state.lose(member, reason)

    def _handle_written(self, member: Member, event: PieceWritten) -> None:
        state, name, number, now = self._state, member.node.id, event.piece, time.monotonic()
        _count_bytes(member, event.source, event.size)
        if event.source == STORE:
            self._pieces.note_read(number)
        if not state.tracker.has(name, number):
            member.last_progress = now
        state.dispatch(
            state.tracker.complete_transfer(name, number, event.source, event.digest, now)
        )

    def _handle_redundant(self, member: Member, event: PieceRedundant) -> None:
        state = self._state
        _count_bytes(member, event.source, event.size)
        state.dispatch(
            state.tracker.note_redundant_transfer(
                member.node.id, event.piece, event.source, time.monotonic()
            )
        )

    def _handle_failed(self, member: Member, event: PieceFailed) -> None:
        state = self._state
        member.counts.failures += 1
        number, source, wrong = event.piece, event.source, event.is_wrong
        now = time.monotonic()
        uploader = state.members.get(source)
        if wrong and uploader is not None and source not in member.accused:
            member.accused.add(source)  # one event for each pair: the node may repeat its report
            state.report_progress(
                NodeAccused(
                    node=state.members.format_name(uploader.node),
                    piece=number,
                    accuser=state.members.format_name(member.node),
                )
            )
        if source == STORE and wrong:
            self._pieces.note_wrong_read(member, number)
        elif source == STORE:
            self._pieces.note_failure(member, number, event.status, event.reason)
        state.dispatch(
            state.tracker.fail_transfer(member.node.id, number, source, now, wrong=wrong)
        )
        if wrong:
            state.note_untrusted()

    def _handle_files(
        self, member: Member, event: FilesReady | FileUnusable | PieceDropped
    ) -> None:
        match event:
            case FilesReady(files):
                self._handle_ready(member, files)
            case FileUnusable(file, reason):
                member.unusable[file] = reason
            case PieceDropped(piece, files):
                member.note_dropped(piece, files)

    def _handle_ready(self, member: Member, numbers: list[int]) -> None:
        if not member.files.issuperset(numbers):
            member.files.update(numbers)
            member.last_progress = time.monotonic()
        if len(member.files) == self._file_count and not (member.ready or member.dropping):
            member.ready = True
            member.seconds = time.monotonic() - self._began
            name = self._state.members.format_name(member.node)
            self._state.report_progress(NodeReady(node=name, seconds=round(member.seconds, 2)))


def _count_bytes(member: Member, source: str, size: int) -> None:
    if source == STORE:
        member.counts.from_store += size
    else:
        member.counts.from_peers += size
