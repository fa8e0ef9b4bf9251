"""One case: a dataset made in a store of its own, by one driver after another, and then judged."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.oracle import Verdict, judge
from tests.soak.child import Child, Ended, Said
from tests.soak.material import Material
from tests.soak.place import LocalPlace, Place

DATASET = "data/corpus"


class CaseError(Exception):
    """A driver did not end as it should have."""


@dataclass(slots=True)
class Case:
    """Case: a dataset, its store, and the way in which it is made.

    Attributes:
        name: Unique in the soak: a prefix of the place.
        material: The source.
        place: Where the shards go.
        folder: For the children's working directories.
        workers: Processes of each driver.
        uploads: Of each worker.
        store_source: Read the source from the place, not from its folder.
    """

    name: str
    material: Material
    place: Place
    folder: Path
    workers: int = 2
    uploads: int = 2
    store_source: bool = False
    children: list[Child] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.material.name} to {self.place.name}, "
            f"workers {self.workers}, uploads {self.uploads}"
        )

    def make_config(self) -> dict[str, Any]:
        """The pipeline's settings."""
        if self.store_source:
            source = self.place.make_source(self.material)
        else:
            source = {"url": self.material.folder.as_uri()}
        return {
            "dataset": DATASET,
            "source": {**self.material.source, **source},
            "store": self.place.make_spec(self.name),
            "sharding": self.material.sharding,
            "execution": {
                "workers": self.workers,
                "uploads": self.uploads,
                "lease_timeout": "3s",
                "max_quarantined": 0.2,  # the material has bad rows on purpose
            },
        }

    def start(self, do: str = "shard") -> Child:
        """Another driver, with an empty working directory of its own."""
        folder = self.folder / self.name / f"run-{len(self.children)}"
        child = Child({"do": do, "config": self.make_config()}, folder)
        self.children.append(child)
        return child

    def run_undisturbed(self, do: str = "shard") -> dict[str, Any]:
        """A driver that is never killed; what it reports."""
        with self.start(do) as child:
            while not isinstance(heard := child.hear(), Ended):
                assert heard is not None
                nobody_died(child, heard)
                child.go()
        return finished(heard)

    def judge(self, reference: Mapping[str, str] | None) -> Verdict:
        """The oracle's verdict, and whether anything of the drivers was left on the machine."""
        verdict = self._look(reference)
        if verdict.is_correct and verdict.partial_files:
            self.run_undisturbed("collect")
            halves = verdict.partial_files
            verdict = self._look(reference)
            verdict.problems += [f"{half} was not collected" for half in verdict.partial_files]
            verdict.partial_files = halves
        for child in self.children:
            for pid in child.find_orphans():
                verdict.problems.append(f"process {pid} outlived its driver")
                child.kill(pid)
            verdict.problems += [
                f"{name} was left on the machine" for name in child.list_leftovers()
            ]
        return verdict

    def _look(self, reference: Mapping[str, str] | None) -> Verdict:
        return judge(
            self.place.open_bucket(self.name),
            DATASET,
            rows=self.material.rows,
            bad_rows=self.material.bad_rows,
            reference=reference,
        )


def nobody_died(child: Child, said: Said) -> None:
    """Hold an event against the rule that workers only die when they are killed.

    Raises:
        CaseError: One did, and nobody had.
    """
    if said.kind == "worker.lost":
        raise CaseError(f"worker {said.pid} was lost, and nobody killed it:\n{child.read_tail()}")


def finished(ended: Ended) -> dict[str, Any]:
    """Return the report of a driver that ended by itself.

    Raises:
        CaseError: It did not.
    """
    if ended.code != 0 or ended.report is None:
        raise CaseError(f"a driver ended with code {ended.code}:\n{ended.tail}")
    return ended.report


class References:
    """The shards of each material, as a run makes them that nobody disturbs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._place = LocalPlace(folder / "reference")
        self._known: dict[str, dict[str, str]] = {}

    def compute_digests(self, material: Material) -> dict[str, str]:
        """SHA-256 of each shard."""
        if material.name not in self._known:
            case = Case(material.name, material, self._place, self._folder / "runs", workers=1)
            case.run_undisturbed()
            verdict = case.judge(None)
            if not verdict.is_correct:
                raise CaseError(f"{case}, never disturbed: {verdict}")
            self._known[material.name] = verdict.digests
        return self._known[material.name]
