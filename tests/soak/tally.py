"""Counts of a soak."""

from collections import Counter
from dataclasses import dataclass, field

from tests.oracle import Verdict
from tests.soak.case import Case
from tests.soak.place import Place
from tests.soak.targets import COMPLETE, Target, Victim


@dataclass(slots=True)
class Tally:
    """Counts of kills and faults, and of their results.

    Attributes:
        kills: By boundary and victim.
        places: Counted kills by the place of the dataset.
        cases: Datasets made.
        halves: Unfinished files that killed processes left, and the garbage collection removed.
        lost: Rows.
        doubled: Rows.
        different: Shards.
        wrong: What else was not as it should be, and where.
    """

    kills: Counter[tuple[str, Victim]] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)
    cases: int = 0
    halves: int = 0
    lost: int = 0
    doubled: int = 0
    different: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def counted(self) -> int:
        """Kills before completion."""
        return self.places.total()

    def kill(self, target: Target, place: Place) -> None:
        """Count a kill."""
        self.kills[target.boundary, target.victim] += 1
        if target.boundary != COMPLETE:
            self.places[place.name] += 1

    def judge(self, case: Case, verdict: Verdict) -> None:
        """Add the verdict on a case."""
        self.cases += 1
        self.halves += len(verdict.partial_files)
        self.lost += verdict.lost
        self.doubled += verdict.duplicated
        self.different += verdict.differing
        if not verdict.is_correct:
            self.wrong.append(f"{case}: {verdict}")

    def fail(self, case: Case, error: Exception) -> None:
        """Add a case that came to no verdict."""
        self.cases += 1
        self.wrong.append(f"{case}: {error}")
