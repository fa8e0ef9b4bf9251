"""Check the answers of agents to the driver.

An agent may send anything. A wrong answer costs only the node of the agent.
"""

import re
from collections.abc import Callable, Container, Sequence
from typing import Any, cast

from millrace.formatting import clean_text
from millrace.swarm.messages import (
    EVENT_TYPES,
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
from millrace.swarm.tracking.orders import STORE

_DIGEST = re.compile("blake3:[0-9a-f]{64}")
_LONGEST_SENTENCE = 500  # characters of a reason that are kept
_MAX_EVENTS_BYTES = 2 << 20  # bytes of events in an answer, without the numbers of files
_FILE_NUMBER_BYTES = 16  # bytes of a file's number in an event at most


class ProtocolError(Exception):
    """An answer is not one that an agent of this version sends.

    Args:
        what: Part of the answer that is wrong, as a noun phrase.
    """

    def __init__(self, what: str) -> None:
        super().__init__(
            f"it sent {what}, which no agent of this version of Millrace sends: install the same "
            "version there, or use another machine"
        )


class EventChecker:
    """Checks the answers of agents against the pieces, files and nodes of the run.

    Args:
        sizes: Bytes of each piece.
        files: Number of files.
        nodes: Ids of the nodes; further nodes may be added.
        known: Pieces whose digests are known before the run, so that a node may find its own read
            of them wrong.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        files: int,
        nodes: Container[str],
        known: Container[int] = (),
    ) -> None:
        self._sizes, self._count, self._nodes, self._known = sizes, files, nodes, known
        piece, source, file = self._check_piece, self._check_source, self._check_file
        moved = {"piece": piece, "source": source}
        self._fields: dict[type[NodeEvent], dict[str, Callable[[Any], Any]]] = {
            BytesReceived: {"total": _check_count},
            PieceWritten: {**moved, "digest": _check_digest, "size": _check_count},
            PieceRedundant: {**moved, "size": _check_count},
            PieceDropped: {"piece": piece, "files": self._check_files},
            PieceFailed: {
                **moved, "reason": _check_sentence, "status": _check_count, "is_wrong": _check_flag
            },
            ReadRetried: {"reason": _check_sentence},
            FilesReady: {"files": self._check_files},
            FileUnusable: {"file": file, "reason": _check_sentence},
            DigestMismatch: {"file": file, "digest": _check_digest},
            NodeFailed: {"reason": _check_sentence},
        }  # fmt: skip

    @property
    def max_answer_bytes(self) -> int:
        """Longest answer in bytes: the list of the pieces that a node has."""
        return (1 << 20) + 400 * (len(self._sizes) + self._count)

    @property
    def max_events_bytes(self) -> int:
        """Longest answer with events, in bytes. An agent limits the events of one answer.

        An answer may name each file twice: as dropped, and as ready.
        """
        return _MAX_EVENTS_BYTES + 2 * _FILE_NUMBER_BYTES * self._count

    def read_pieces(self, answer: Any) -> list[tuple[int, str]]:
        """Return the pieces that a node has, with their digests.

        Raises:
            ProtocolError: The answer is not such a list.
        """
        rows = _check_list(answer.get("have") if isinstance(answer, dict) else None)  # pyright: ignore[reportUnknownMemberType]
        found: dict[int, str] = {}
        for row in rows:
            pair = _check_list(row)
            if len(pair) != 2:
                raise ProtocolError("a piece without a digest")
            found[self._check_piece(pair[0])] = _check_digest(pair[1])
        return list(found.items())

    def read_events(self, answer: Any) -> list[NodeEvent]:
        """Return the events of a node.

        Raises:
            ProtocolError: The answer is not a list of events, or a field has a wrong value.
        """
        return [self._check_event(event) for event in _check_list(answer)]

    def _check_event(self, value: Any) -> NodeEvent:
        data = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
        kind = data.get("type")
        event_class = EVENT_TYPES.get(kind) if isinstance(kind, str) else None
        if event_class is None:
            raise ProtocolError("an event of an unknown type")
        fields = self._fields[event_class]
        event = event_class(**{name: check(data.get(name)) for name, check in fields.items()})
        match event:
            case PieceWritten(piece=piece, size=size) if size != self._sizes[piece]:
                raise ProtocolError("a piece with a wrong size")
            case PieceRedundant(piece=piece, size=size) if size not in {0, self._sizes[piece]}:
                raise ProtocolError("a piece with a wrong size")
            case PieceFailed(piece=piece, source=source, is_wrong=True) if (
                source == STORE and piece not in self._known
            ):
                raise ProtocolError("a report of wrong bytes for a piece whose digest is not known")
            case _:
                return event

    def _check_piece(self, value: Any) -> int:
        return _check_number(value, len(self._sizes))

    def _check_file(self, value: Any) -> int:
        return _check_number(value, self._count)

    def _check_files(self, value: Any) -> list[int]:
        return [self._check_file(number) for number in _check_list(value)]

    def _check_source(self, value: Any) -> str:
        if isinstance(value, str) and (value == STORE or value in self._nodes):
            return value
        raise ProtocolError("a piece from an unknown node")


def _check_list(value: Any) -> list[Any]:
    if isinstance(value, list):
        return cast("list[Any]", value)
    raise ProtocolError("a value that is not a list")


def _check_number(value: Any, end: int) -> int:
    if type(value) is int and 0 <= value < end:
        return value
    raise ProtocolError("a number out of range")


def _check_count(value: Any) -> int:
    return _check_number(value, 1 << 62)


def _check_flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ProtocolError("a flag that is neither true nor false")


def _check_digest(value: Any) -> str:
    if isinstance(value, str) and _DIGEST.fullmatch(value):
        return value
    raise ProtocolError("a malformed digest")


def _check_sentence(value: Any) -> str:
    if isinstance(value, str):
        return clean_text(value, _LONGEST_SENTENCE)
    raise ProtocolError("a reason that is not text")
