"""Counts of a soak."""

from collections import Counter
from dataclasses import dataclass, field

from tests.oracle import Verdict
from tests.soak.case import Case
from tests.soak.shared_stores import SharedStore
from tests.soak.targets import COMPLETE, Target, Victim


@dataclass(slots=True)
class Tally:
    """Counts of kills and faults, and of their results.

    Attributes:
        kills: Number of kills by boundary and victim.
        stores: Number of kills before completion by the store of the dataset.
        cases: Number of datasets.
        partial_files: Number of unfinished files of killed processes. The garbage collection
            removed them.
        lost: Number of lost rows.
        duplicated: Number of duplicated rows.
        differing: Number of differing shards.
        wrong: Descriptions of the cases with a fault.
    """

    kills: Counter[tuple[str, Victim]] = field(default_factory=Counter)
    stores: Counter[str] = field(default_factory=Counter)
    cases: int = 0
    partial_files: int = 0
    lost: int = 0
    duplicated: int = 0
    differing: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def counted(self) -> int:
        """Number of kills before completion."""
        return self.stores.total()

    def count_kill(self, target: Target, store: SharedStore) -> None:
        """Count a kill of a case in this store."""
        self.kills[target.boundary, target.victim] += 1
        if target.boundary != COMPLETE:
            self.stores[store.name] += 1

    def add_verdict(self, case: Case, verdict: Verdict) -> None:
        """Add the verdict of a case."""
        self.cases += 1
        self.partial_files += len(verdict.partial_files)
        self.lost += verdict.lost
        self.duplicated += verdict.duplicated
        self.differing += verdict.differing
        if not verdict.is_correct:
            self.wrong.append(f"{case}: {verdict}")

    def add_failure(self, case: Case, error: Exception) -> None:
        """Add a case that ended without a verdict."""
        self.cases += 1
        self.wrong.append(f"{case}: {error}")
