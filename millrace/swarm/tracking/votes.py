"""Votes for the digest of one piece, and their decision.

A digest passes through these states:

| state     | meaning                                                                           |
| --------- | --------------------------------------------------------------------------------- |
| unproven  | nothing outside of the run gives the digest of the piece                          |
| known     | it is proven before the run, such as by a manifest; no vote counts                |
| decided   | enough nodes have read the same bytes from the store; other nodes fetch the piece |
| disputed  | votes differ, and the driver reads the piece                                      |
| settled   | the driver has read the piece, or the digest is known; no vote counts any longer  |
| confirmed | of one node's copy: the driver or another node has the same digest                |
| expected  | of one report: it is the known or decided digest, or that of a trusted vote       |
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class PieceVotes:
    """Reports of living nodes about the digest of one piece.

    Attributes:
        votes_needed: Number of equal votes that decide.
        digest: Decided digest; empty before. Other nodes fetch only decided pieces.
        is_settled: Whether no vote counts any longer: the driver has read the piece, or its digest
            is known before the run.
        digests: Digest of the copy of each living node that has one.
        voters: Nodes whose copies are votes: no other node has sent them in this run.
        known_digest: Digest that is known before the run; empty if there is none. No vote
            changes it.
    """

    votes_needed: int = 1
    digest: str = ""
    is_settled: bool = False
    digests: dict[str, str] = field(default_factory=dict[str, str])
    voters: set[str] = field(default_factory=set[str])
    known_digest: str = ""

    def set_known_digest(self, digest: str) -> None:
        """Decide the piece before the run: its digest is known."""
        self.known_digest = self.digest = digest
        self.is_settled = True

    def add(self, name: str, digest: str, *, vote: bool) -> None:
        """Note the copy of a node. It is a vote unless another node has sent it."""
        self.digests[name] = digest
        if vote:
            self.voters.add(name)

    def remove(self, name: str) -> bool:
        """Forget the copy of a node; return whether there was one."""
        self.voters.discard(name)
        return self.digests.pop(name, None) is not None

    def is_confirmed(self, name: str) -> bool:
        """Tell whether the driver, or another node, has the digest of a node's copy."""
        digest = self.digests.get(name)
        if digest is None or (self.is_settled and digest == self.digest):
            return digest is not None
        return any(found == digest for other, found in self.digests.items() if other != name)

    def list_voters(self, is_trusted: Callable[[str], bool]) -> list[str]:
        """Return the voters that are trusted, whose votes count."""
        return [name for name in self.voters if is_trusted(name)]

    def is_expected(self, digest: str, is_trusted: Callable[[str], bool]) -> bool:
        """Tell whether a digest is the known or decided one, or that of a trusted voter."""
        if self.known_digest:
            return digest == self.known_digest
        voters = self.list_voters(is_trusted)
        return digest in {self.digest, *(self.digests[name] for name in voters)}

    def count(self, is_trusted: Callable[[str], bool]) -> str | None:
        """Return the digest with enough votes; None if there is none, or if one is decided."""
        if self.digest or self.is_settled:
            return None
        votes = Counter(self.digests[name] for name in self.list_voters(is_trusted))
        digest, most = votes.most_common(1)[0] if votes else ("", 0)
        return digest if most >= self.votes_needed else None

    def is_disputed(self, is_trusted: Callable[[str], bool]) -> bool:
        """Tell whether votes differ, and the driver has not settled the piece."""
        votes = {self.digests[name] for name in self.list_voters(is_trusted)} | {self.digest}
        return not self.is_settled and len(votes - {""}) > 1

    def has_too_few(self, is_trusted: Callable[[str], bool]) -> bool:
        """Tell whether the piece has votes that count, but too few to decide."""
        return not self.digest and bool(self.list_voters(is_trusted))

    def has_support(self, is_trusted: Callable[[str], bool], *, held: bool) -> bool:
        """Tell whether the decided digest stays decided when a node is no longer trusted.

        Args:
            is_trusted: Tells whether the votes of a node count.
            held: Whether a trusted node has a copy.
        """
        votes = sum(self.digests[name] == self.digest for name in self.list_voters(is_trusted))
        return held and (self.votes_needed == 1 or votes >= self.votes_needed)
