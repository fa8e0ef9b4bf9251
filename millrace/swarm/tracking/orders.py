"""Output of the tracker: orders to nodes, and matters for the driver.

The driver turns orders into messages (`millrace.swarm.messages`).
"""

from dataclasses import dataclass, field

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


@dataclass(slots=True)
class TrackerOutput:
    """Output that the parts of a tracker have made, and that the tracker has not handed over yet.

    Attributes:
        orders: Orders to nodes.
        disputed: Pieces whose votes differ.
        faulty: Nodes that reported bytes without the ordered digest, or too many wrong votes.
    """

    orders: list[PieceOrder] = field(default_factory=list[PieceOrder])
    disputed: list[int] = field(default_factory=list[int])
    faulty: list[str] = field(default_factory=list[str])

    def take_orders(self) -> list[PieceOrder]:
        """Remove and return the orders."""
        orders, self.orders = self.orders, []
        return orders

    def take_disputed(self) -> list[int]:
        """Remove and return the disputed pieces."""
        disputed, self.disputed = self.disputed, []
        return disputed

    def take_faulty(self) -> list[str]:
        """Remove and return the faulty nodes."""
        faulty, self.faulty = self.faulty, []
        return faulty
