"""Result of a copy of a bucket."""

from dataclasses import dataclass, field
from enum import StrEnum

from millrace.storage import ObjectFailure, Stat
from millrace.storage.folders import UnlistedEntry, UnlistedReason

_MAX_LISTED = 1000  # keys of conflicts and failures that are kept


@dataclass(frozen=True, slots=True)
class SkippedEntry:
    """Object, or entry of a folder, that is not copied.

    Attributes:
        key: Key of the object, or path below the folder.
        reason: Reason for which it is not copied.
    """

    key: str
    reason: str


class CopyOutcome(StrEnum):
    """Outcome of one object.

    Attributes:
        COPIED: The object was copied, and the copy is right.
        EQUAL: The destination had the same bytes already.
        MISSING: The destination lacks the object, which a dry run does not copy.
        CONFLICT: The destination has another object with the same key, which stays.
    """

    COPIED = "copied"
    EQUAL = "equal"
    MISSING = "missing"
    CONFLICT = "conflict"


@dataclass
class CopyResult:
    """Result of a copy.

    Attributes:
        source: URL of the source.
        destination: URL of the destination.
        objects: Number of objects by their outcome.
        sizes: Bytes of these objects.
        by_store: Bytes that the store has copied by itself.
        reused: Bytes that an earlier, killed copy had sent.
        conflicts: Keys of conflicts, up to 1,000.
        failures: Objects that could not be copied, up to 1,000.
        failed: Number of objects that could not be copied.
        skipped: Links to folders, links that lead nowhere, pipes, sockets and devices of a source
            folder, empty objects that mark folders, which are copied only into S3 and R2, and the
            identities of installations; up to 1,000.
        skipped_count: Number of them.
        seconds: Duration in seconds.
    """

    source: str
    destination: str
    objects: dict[CopyOutcome, int] = field(default_factory=lambda: dict.fromkeys(CopyOutcome, 0))
    sizes: dict[CopyOutcome, int] = field(default_factory=lambda: dict.fromkeys(CopyOutcome, 0))
    by_store: int = 0
    reused: int = 0
    conflicts: list[str] = field(default_factory=list[str])
    failures: list[ObjectFailure] = field(default_factory=list[ObjectFailure])
    failed: int = 0
    skipped: list[SkippedEntry] = field(default_factory=list[SkippedEntry])
    skipped_count: int = 0
    seconds: float = 0.0

    def add(self, stat: Stat, outcome: CopyOutcome) -> None:
        """Count an object."""
        self.objects[outcome] += 1
        self.sizes[outcome] += stat.size
        if outcome is CopyOutcome.CONFLICT and len(self.conflicts) < _MAX_LISTED:
            self.conflicts.append(stat.key)

    def add_failure(self, key: str, reason: str) -> None:
        """Count an object that could not be copied."""
        self.failed += 1
        if len(self.failures) < _MAX_LISTED:
            self.failures.append(ObjectFailure(key, reason))

    def add_unlisted(self, entry: UnlistedEntry) -> None:
        """Count an entry of the source that is not copied: a failure if it has bytes of its own."""
        if entry.reason is UnlistedReason.NAME:
            self.add_failure(entry.key, f"It was not copied: {entry.reason}. Rename it.")
            return
        self.add_skipped(entry.key, entry.reason)

    def add_skipped(self, key: str, reason: str) -> None:
        """Count an object, or an entry of the source, that is not copied."""
        self.skipped_count += 1
        if len(self.skipped) < _MAX_LISTED:
            self.skipped.append(SkippedEntry(key, reason))
