"""Trust between nodes: wrong votes, wrong bytes, and failed uploads.

This module owns the conduct of each node (`NodeTrust`) and the accusations of wrong bytes
(`Accusations`).
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

_MIN_ACCUSERS = 2  # nodes that must report wrong bytes of an uploader; one alone may lie
_MAX_FAILED_UPLOADS = 8  # failed uploads in a row after which a node avoids the uploader
_MAX_WRONG_VOTES = 2  # after which a node is not trusted; one may be a bit error in memory
_FAULTY_VOTES = 8  # wrong votes after which a node is faulty, since its reads are often wrong


@dataclass(slots=True)
class NodeTrust:
    """Conduct of one node, and of other nodes towards this node.

    Attributes:
        is_trusted: Whether the votes of the node count, and other nodes fetch from it.
        wrong_votes: Number of its votes, and of its reads, that differ from the digests of the
            driver.
        excluded: Nodes that sent wrong bytes to this node.
        failed_uploads: Number of failed uploads to this node in a row, by their uploader.
    """

    is_trusted: bool = True
    wrong_votes: int = 0
    excluded: set[str] = field(default_factory=set[str])
    failed_uploads: Counter[str] = field(default_factory=Counter[str])

    def count_wrong_vote(self) -> None:
        """Count a vote, or a read, that differs from the digest of the driver."""
        self.wrong_votes += 1

    @property
    def has_lost_vote(self) -> bool:
        """True if the node has too many wrong votes to be trusted."""
        return self.wrong_votes >= _MAX_WRONG_VOTES

    @property
    def has_become_faulty(self) -> bool:
        """True directly after the wrong vote that makes the node faulty."""
        return self.wrong_votes == _FAULTY_VOTES

    def count_failed_upload(self, uploader: str) -> bool:
        """Count a failed upload; return whether there are too many in a row."""
        self.failed_uploads[uploader] += 1
        return self.failed_uploads[uploader] >= _MAX_FAILED_UPLOADS

    def clear_failed_uploads(self, uploader: str) -> None:
        """Forget the failed uploads of a node, which has uploaded a piece."""
        self.failed_uploads.pop(uploader, None)

    @property
    def avoids_any(self) -> bool:
        """True if the node may avoid an uploader."""
        return bool(self.excluded or self.failed_uploads)

    def avoids(self, uploader: str) -> bool:
        """Tell whether the node no longer fetches from an uploader."""
        return (
            uploader in self.excluded or self.failed_uploads.get(uploader, 0) >= _MAX_FAILED_UPLOADS
        )

    def avoids_all(self, names: Collection[str]) -> bool:
        """Tell whether the node avoids all of these nodes; true if there are none."""
        if not self.avoids_any:
            return not names
        return all(self.avoids(name) for name in names)


class Accusations:
    """Accusations of nodes that sent wrong bytes.

    One accusation is not enough, since the memory of the accuser may be damaged.
    """

    def __init__(self) -> None:
        self._accusers: dict[str, set[str]] = {}

    def accuse(self, accuser: str, uploader: str) -> bool:
        """Note an accusation; return whether enough nodes have accused the uploader."""
        accusers = self._accusers.setdefault(uploader, set())
        accusers.add(accuser)
        return len(accusers) >= _MIN_ACCUSERS
