"""Progress events of a distribution to the nodes of a cluster."""

from dataclasses import dataclass
from typing import ClassVar

from millrace.progress import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class PrewarmProgressed(Event):
    """Event a few times a second while a distribution runs, and at its end.

    Attributes:
        present: Bytes that all living nodes have.
        total: Bytes that all living nodes need.
        moved: Bytes that all nodes have received in this run.
        nodes: Number of living nodes.
        ready: Number of living nodes that have all files.
        seconds: Time since the start of the call.
    """

    kind: ClassVar[str] = "swarm.progress"

    present: int
    total: int
    moved: int
    nodes: int
    ready: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReady(Event):
    """Event after a node has all files.

    Attributes:
        node: Name of the node.
        seconds: Time since the start of the call.
    """

    kind: ClassVar[str] = "node.ready"

    node: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost(Event):
    """Event after the driver gave a node up.

    Attributes:
        node: Name of the node.
        reason: Reason in words.
    """

    kind: ClassVar[str] = "node.lost"

    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAccused(Event):
    """Event after a node reported a piece with wrong bytes; once for each accuser and node.

    Attributes:
        node: Name of the node that sent the piece.
        piece: Number of the piece.
        accuser: Name of the node that received the piece.
    """

    kind: ClassVar[str] = "node.accused"

    node: str
    piece: int
    accuser: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMisread(Event):
    """Event after a node read other bytes of a piece than the store has; once for each node.

    Attributes:
        node: Name of the node.
        piece: Number of the piece.
        origin: Origin of the file, such as ``s3://bucket/key``.
    """

    kind: ClassVar[str] = "node.misread"

    node: str
    piece: int
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUntrusted(Event):
    """Event after a node is proven to give wrong bytes; no node asks it for pieces any more.

    Attributes:
        node: Name of the node.
    """

    kind: ClassVar[str] = "node.untrusted"

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileMismatched(Event):
    """Event after the segments of a node's file do not fit the file's digest.

    Attributes:
        origin: Origin of the file, such as ``s3://bucket/key``.
    """

    kind: ClassVar[str] = "file.mismatch"

    origin: str
