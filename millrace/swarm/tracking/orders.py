"""Orders of the tracker. The driver turns them into messages (`millrace.swarm.messages`)."""

from dataclasses import dataclass

STORE = ""
"""Source of a piece that is read from the store."""


@dataclass(frozen=True, slots=True)
class PieceOrder:
    """Order about one piece, to one node.

    Attributes:
        node: Node that carries out the order.
        piece: Number of the piece to fetch, or to forget with `drop`.
        source: Node that uploads the piece; `STORE` for the store.
        digest: Digest that the piece must have; empty for a read of a piece whose digest is not
            known.
        drop: Whether the node must forget its copy, which is wrong or cannot be confirmed.
    """

    node: str
    piece: int
    source: str
    digest: str = ""
    drop: bool = False
