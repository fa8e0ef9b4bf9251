"""Handling of what agents say: each event reaches the part of the driver that it concerns."""

import time

from millrace.swarm.driving.file_audits import FileAuditor
from millrace.swarm.driving.members import Member
from millrace.swarm.driving.own_reads import OwnReads
from millrace.swarm.driving.run_state import RunState
from millrace.swarm.messages import (
    BytesReceived,
    DigestMismatch,
    FilesReady,
    FileUnusable,
    NodeEvent,
    NodeFailed,
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
        reads: Pieces that the driver reads itself.
        audits: Files that the driver reads.
        files: Number of files.
        began: Time of the call.
    """

    def __init__(
        self, state: RunState, reads: OwnReads, audits: FileAuditor, *, files: int, began: float
    ) -> None:
        self._state, self._reads, self._audits = state, reads, audits
        self._files, self._began = files, began

    def handle(self, member: Member, event: NodeEvent) -> None:
        """Handle an event of a member. Nothing is believed of a lost one, or after the end."""
        if member.why or self._state.is_ending:
            return
        match event:
            case BytesReceived():
                if self._state.tracker.lacks(member.node.id):
                    member.moved = time.monotonic()
            case PieceWritten():
                self._handle_written(member, event)
            case PieceRedundant():
                self._handle_redundant(member, event)
            case PieceFailed():
                self._handle_failed(member, event)
            case ReadRetried():
                member.counts.failures += 1
            case FilesReady(files):
                self._handle_ready(member, files)
            case FileUnusable(file, reason):
                member.unusable[file] = reason
            case DigestMismatch(file, digest):
                self._audits.note_mismatch(member, file, digest)
            case NodeFailed(reason):
                self._state.lose(member, reason)

    def _handle_written(self, member: Member, event: PieceWritten) -> None:
        state, name, number, now = self._state, member.node.id, event.piece, time.monotonic()
        _count_bytes(member, event.source, event.size)
        if event.source == STORE:
            self._reads.note_read(number)
        if not state.tracker.has(name, number):
            state.held += event.size
            member.moved = now
        state.dispatch(
            state.tracker.complete_transfer(name, number, event.source, event.digest, now)
        )

    def _handle_redundant(self, member: Member, event: PieceRedundant) -> None:
        state = self._state
        _count_bytes(member, event.source, event.size)
        state.dispatch(
            state.tracker.cancel_transfer(
                member.node.id, event.piece, event.source, time.monotonic()
            )
        )

    def _handle_failed(self, member: Member, event: PieceFailed) -> None:
        state = self._state
        member.counts.failures += 1
        number, source, wrong = event.piece, event.source, event.is_wrong
        now = time.monotonic()
        giver = state.members.get(source)
        if wrong and giver is not None and source not in member.accused:
            member.accused.add(source)  # it may say so for ever, and of a node that gave nothing
            state.tell(
                NodeAccused(
                    node=state.members.format_name(giver.node),
                    piece=number,
                    accuser=state.members.format_name(member.node),
                )
            )
        if source == STORE:
            self._reads.note_failure(member, number, event.status, event.reason)
        state.dispatch(
            state.tracker.fail_transfer(member.node.id, number, source, now, wrong=wrong)
        )
        if wrong:
            state.tell_untrusted()

    def _handle_ready(self, member: Member, numbers: list[int]) -> None:
        if not member.files.issuperset(numbers):
            member.files.update(numbers)
            member.moved = time.monotonic()
        if len(member.files) == self._files and not member.ready:
            member.ready = True
            member.seconds = time.monotonic() - self._began
            name = self._state.members.format_name(member.node)
            self._state.tell(NodeReady(node=name, seconds=round(member.seconds, 2)))


def _count_bytes(member: Member, source: str, size: int) -> None:
    if source == STORE:
        member.counts.from_store += size
    else:
        member.counts.from_peers += size
