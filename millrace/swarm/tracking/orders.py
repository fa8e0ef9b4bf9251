"""Orders that the tracker gives to nodes."""

from dataclasses import dataclass

STORE = ""
"""Source of a piece that is read from the store."""


@dataclass(frozen=True, slots=True)
class Order:
    """Order to one node.

    Attributes:
        node: Node that carries out the order.
        piece: Number of the piece to fetch; with `drop`, to forget.
        source: Node that gives the piece; `STORE` for the store.
        digest: Digest that the piece must have; empty for a read from the store.
        drop: Whether the node must forget its copy, which is wrong or cannot be confirmed.
    """

    node: str
    piece: int
    source: str
    digest: str = ""
    drop: bool = False
