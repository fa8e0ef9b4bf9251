"""Messages between the driver and the agents.

The driver sends orders, and an agent answers with events. A message is a JSON object: ``type``
names its class, and the other members are the fields of the class. Agents import this module, so it
needs only the standard library.
"""

import hashlib
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from millrace.swarm.protocol import Endpoint


def compute_commitment(digest: str) -> str:
    """Return a commitment to a digest: its SHA-256; empty if the digest is empty.

    A node compares the commitment with that of the bytes that it has received. The node cannot
    compute the digest from the commitment. So the digest in its report shows that it has the bytes.
    """
    return hashlib.sha256(digest.encode()).hexdigest() if digest else ""


@dataclass(frozen=True, slots=True)
class FetchPiece:
    """Order to fetch a piece.

    Attributes:
        piece: Number of the piece.
        source: Node that sends the piece; empty for the store.
        commitment: Commitment to the digest that the piece must have (`compute_commitment`); empty
            for a read from the store of a piece whose digest is not known.
        turn: Number of earlier reads of the piece from the store, by all nodes. Each read begins at
            another location of the store, so that one wrong mirror does not send two equal votes.
    """

    piece: int
    source: str
    commitment: str
    turn: int = 0


@dataclass(frozen=True, slots=True)
class DropPiece:
    """Order to forget a piece. Its copy is wrong, or cannot be confirmed."""

    piece: int


@dataclass(frozen=True, slots=True)
class VoidDigest:
    """Order to ignore the digest of a file, which is not a digest of the file's bytes."""

    file: int


@dataclass(frozen=True, slots=True)
class AddPeer:
    """Notice that a node has joined.

    Attributes:
        node: Id of the node.
        endpoint: Address of the node's agent.
    """

    node: str
    endpoint: Endpoint


Order: TypeAlias = FetchPiece | DropPiece | VoidDigest | AddPeer


@dataclass(frozen=True, slots=True)
class BytesReceived:
    """Bytes have arrived or were unpacked since the last answer, without another event.

    Attributes:
        total: Bytes that the agent has received and unpacked in this run, and 1 for each member of
            an archive.
    """

    total: int


@dataclass(frozen=True, slots=True)
class PieceWritten:
    """A piece has arrived and is on disk.

    Attributes:
        piece: Number of the piece.
        source: Node that sent the piece; empty for the store.
        digest: Digest of the piece (`combine_segment_blocks`).
        size: Bytes of the piece.
    """

    piece: int
    source: str
    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class PieceRedundant:
    """The node had a piece already when the transfer of the piece began or ended.

    Attributes:
        piece: Number of the piece.
        source: Source of the transfer; empty for the store.
        size: Bytes that the transfer moved.
    """

    piece: int
    source: str
    size: int


@dataclass(frozen=True, slots=True)
class PieceDropped:
    """The node has carried out a `DropPiece`. No file is ready that lacks the piece.

    Attributes:
        piece: Number of the piece.
        files: Files that lack a segment now. A `FilesReady` or `FileUnusable` before this event no
            longer counts for them.
    """

    piece: int
    files: list[int]


@dataclass(frozen=True, slots=True)
class PieceFailed:
    """A transfer has failed.

    Attributes:
        piece: Number of the piece.
        source: Source of the transfer; empty for the store.
        reason: Reason, as a sentence.
        status: HTTP status of the source; 0 if there was none.
        is_wrong: Whether the bytes did not have the digest of the order.
    """

    piece: int
    source: str
    reason: str
    status: int = 0
    is_wrong: bool = False


@dataclass(frozen=True, slots=True)
class ReadRetried:
    """A read from the store has failed, and is tried again."""

    reason: str


@dataclass(frozen=True, slots=True)
class FilesReady:
    """Files have their final names."""

    files: list[int]


@dataclass(frozen=True, slots=True)
class FileUnusable:
    """A file cannot be used, such as an archive that cannot be unpacked."""

    file: int
    reason: str


@dataclass(frozen=True, slots=True)
class DigestMismatch:
    """All bytes of a file have arrived, and do not have the digest of the file.

    Attributes:
        file: Number of the file.
        digest: Combined digest of the segments (`combine_segment_blocks`).
    """

    file: int
    digest: str


@dataclass(frozen=True, slots=True)
class NodeFailed:
    """The node cannot continue."""

    reason: str


NodeEvent: TypeAlias = (
    BytesReceived
    | PieceWritten
    | PieceRedundant
    | PieceDropped
    | PieceFailed
    | ReadRetried
    | FilesReady
    | FileUnusable
    | DigestMismatch
    | NodeFailed
)

ORDER_TYPES: dict[str, type[Order]] = {
    "fetch-piece": FetchPiece,
    "drop-piece": DropPiece,
    "void-digest": VoidDigest,
    "add-peer": AddPeer,
}
"""Classes of orders by their ``type``."""

EVENT_TYPES: dict[str, type[NodeEvent]] = {
    "bytes-received": BytesReceived,
    "piece-written": PieceWritten,
    "piece-redundant": PieceRedundant,
    "piece-dropped": PieceDropped,
    "piece-failed": PieceFailed,
    "read-retried": ReadRetried,
    "files-ready": FilesReady,
    "file-unusable": FileUnusable,
    "digest-mismatch": DigestMismatch,
    "node-failed": NodeFailed,
}
"""Classes of events by their ``type``."""

_TYPES: dict[type, str] = {kind: name for name, kind in (ORDER_TYPES | EVENT_TYPES).items()}
_FIELDS = {kind: tuple(each.name for each in fields(kind)) for kind in _TYPES}


def encode_message(message: Order | NodeEvent) -> dict[str, Any]:
    """Return the JSON object of a message."""
    kind = type(message)
    content = {name: getattr(message, name) for name in _FIELDS[kind]}
    if isinstance(message, AddPeer):
        content["endpoint"] = encode_endpoint(message.endpoint)
    return {"type": _TYPES[kind], **content}


def encode_endpoint(endpoint: Endpoint) -> dict[str, Any]:
    """Return the JSON object of an agent's address."""
    return {each.name: getattr(endpoint, each.name) for each in fields(endpoint)}


def decode_order(data: dict[str, Any]) -> Order:
    """Return the order of a JSON object.

    The driver is trusted, and its version was compared before.

    Raises:
        KeyError: The type is not one of an order.
        TypeError: A field is missing, or is not one of the order.
    """
    content = dict(data)
    kind = ORDER_TYPES[content.pop("type")]
    if kind is AddPeer:
        content["endpoint"] = Endpoint(**content["endpoint"])
    return kind(**content)
