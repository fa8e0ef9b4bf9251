"""Trust between nodes: wrong votes, wrong bytes, and transfers that a node did not give.

This module owns the conduct of each node (`NodeTrust`) and the accusations of wrong bytes
(`Accusations`).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

_MIN_ACCUSERS = 2  # nodes that must say that one gives wrong bytes; one alone may lie
_MAX_REFUSALS = 8  # in a row, after which a node asks a giver no more that has given it nothing
_MAX_WRONG_VOTES = 2  # that cost a node its vote: one may be a bit that flipped in its memory
_HOPELESS = 8  # wrong votes after which a node is of no use: it cannot read what the store has


@dataclass(slots=True)
class NodeTrust:
    """Conduct of one node, and its experience with the nodes that give to it.

    Attributes:
        is_trusted: Whether the votes of the node count, and other nodes fetch from it.
        wrong_votes: Number of its votes that the owner has found wrong.
        shunned: Nodes that gave it wrong bytes.
        refusals: Number of failed transfers in a row, by their giver.
    """

    is_trusted: bool = True
    wrong_votes: int = 0
    shunned: set[str] = field(default_factory=set[str])
    refusals: Counter[str] = field(default_factory=Counter[str])

    def count_wrong_vote(self) -> None:
        """Count a vote that the owner has found wrong."""
        self.wrong_votes += 1

    @property
    def has_lost_vote(self) -> bool:
        """True if the node was wrong too often for its votes to count."""
        return self.wrong_votes >= _MAX_WRONG_VOTES

    @property
    def has_become_hopeless(self) -> bool:
        """True if the last wrong vote is the one after which the node is given up."""
        return self.wrong_votes == _HOPELESS

    def count_refusal(self, giver: str) -> bool:
        """Count a transfer that a giver did not give; return whether there are too many."""
        self.refusals[giver] += 1
        return self.refusals[giver] >= _MAX_REFUSALS

    def clear_refusals(self, giver: str) -> None:
        """Forget the failed transfers of a giver, which has given a piece."""
        self.refusals.pop(giver, None)

    def avoids(self, giver: str) -> bool:
        """Tell whether the node asks a giver no more."""
        return giver in self.shunned or self.refusals.get(giver, 0) >= _MAX_REFUSALS

    def avoids_all(self, givers: Iterable[str]) -> bool:
        """Tell whether the node asks none of these givers any more; of none at all, true."""
        return all(self.avoids(giver) for giver in givers)


class Accusations:
    """Accusations of nodes that gave wrong bytes.

    The memory of the accuser may be damaged, so one accuser alone is not believed.
    """

    def __init__(self) -> None:
        self._accusers: dict[str, set[str]] = {}

    def accuse(self, accuser: str, giver: str) -> bool:
        """Note an accusation; return whether enough nodes have made it to be believed."""
        accusers = self._accusers.setdefault(giver, set())
        accusers.add(accuser)
        return len(accusers) >= _MIN_ACCUSERS
