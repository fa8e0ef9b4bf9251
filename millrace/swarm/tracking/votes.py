"""Votes for the digest of one piece, and what they decide."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class PieceVotes:
    """Statements of living nodes about the digest of one piece.

    Attributes:
        needs: Number of votes for the same digest that decide.
        digest: Decided digest; empty before. Only a decided piece is given to other nodes.
        is_settled: Whether the owner knows the digest: no vote counts any more.
        said: Digest of the copy that a living node has.
        voters: Those nodes of `said` that did not get their copy from another node in this run.
    """

    needs: int = 1
    digest: str = ""
    is_settled: bool = False
    said: dict[str, str] = field(default_factory=dict[str, str])
    voters: set[str] = field(default_factory=set[str])

    def add(self, name: str, digest: str, *, vote: bool) -> None:
        """Note the copy of a node; with `vote`, the node did not get the copy from a node."""
        self.said[name] = digest
        if vote:
            self.voters.add(name)

    def remove(self, name: str) -> bool:
        """Forget the copy of a node; return whether there was one."""
        self.voters.discard(name)
        return self.said.pop(name, None) is not None

    def list_voters(self, is_trusted: Callable[[str], bool]) -> list[str]:
        """Return the trusted nodes, whose votes count."""
        return [name for name in self.voters if is_trusted(name)]

    def count(self, is_trusted: Callable[[str], bool]) -> str | None:
        """Return the digest that has enough votes; None while none has, or one is decided."""
        if self.digest or self.is_settled:
            return None
        votes = Counter(self.said[name] for name in self.list_voters(is_trusted))
        digest, most = votes.most_common(1)[0] if votes else ("", 0)
        return digest if most >= self.needs else None

    def is_disputed(self, is_trusted: Callable[[str], bool]) -> bool:
        """Tell whether votes differ, and the owner has not said what the piece is."""
        votes = {self.said[name] for name in self.list_voters(is_trusted)} | {self.digest}
        return not self.is_settled and len(votes - {""}) > 1

    def is_waiting(self, is_trusted: Callable[[str], bool]) -> bool:
        """Tell whether the piece has a vote that counts, and too few to decide."""
        return not self.digest and bool(self.list_voters(is_trusted))

    def has_support(self, is_trusted: Callable[[str], bool], *, held: bool) -> bool:
        """Tell whether the decided digest stands though a node is trusted no more.

        Args:
            is_trusted: Whether the votes of a node count.
            held: Whether a trusted node has a copy.
        """
        votes = sum(self.said[name] == self.digest for name in self.list_voters(is_trusted))
        return held and (self.needs == 1 or votes >= self.needs)
