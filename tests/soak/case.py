"""Make a dataset with one driver after another, and judge it with the oracle."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.oracle import Verdict, judge
from tests.soak.child import Announcement, Child, DriverExit
from tests.soak.formats import FormatReaders
from tests.soak.shared_stores import FolderStore, SharedStore
from tests.soak.source_data import SourceData

DATASET = "data/corpus"


class CaseError(Exception):
    """A driver or a worker ended unexpectedly."""


@dataclass(slots=True)
class Case:
    """Case of a soak: a dataset and the drivers that make it.

    Attributes:
        name: Name of the case and prefix in the store. Unique in the soak.
        source: Source data of the dataset.
        store: Store of the dataset.
        folder: Folder for the working directories of the drivers.
        workers: Number of workers of each driver.
        uploads: Number of parallel uploads of each worker.
        store_source: Whether the drivers read the source data from the store, not from its folder.
        children: Drivers of the case, in the order of their starts.
    """

    name: str
    source: SourceData
    store: SharedStore
    folder: Path
    workers: int = 2
    uploads: int = 2
    store_source: bool = False
    children: list[Child] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.source.name} to {self.store.name}, "
            f"workers {self.workers}, uploads {self.uploads}"
        )

    def make_settings(self) -> dict[str, Any]:
        """Return the settings of the pipeline."""
        if self.source.location is not None:
            location = self.source.location
        elif self.store_source:
            location = self.store.make_source(self.source)
        else:
            location = {"url": self.source.folder.as_uri()}
        return {
            "dataset": DATASET,
            "source": {**self.source.source, **location},
            "store": self.store.make_spec(self.name),
            "sharding": self.source.sharding,
            "execution": {
                "workers": self.workers,
                "uploads": self.uploads,
                "lease_timeout": "3s",
                "max_quarantined": 0.2,  # the source data has bad rows
                "downloads": {"host_interval": "0s", "requests_per_host": 64},
            },
        }

    def start(self, command: str = "shard") -> Child:
        """Start a driver with an empty working directory."""
        folder = self.folder / self.name / f"run-{len(self.children)}"
        child = Child({"do": command, "config": self.make_settings()}, folder)
        self.children.append(child)
        return child

    def run_undisturbed(self, command: str = "shard") -> dict[str, Any]:
        """Run a driver to its end, and return its report.

        Raises:
            CaseError: The driver or a worker ended unexpectedly.
        """
        with self.start(command) as child:
            while not isinstance(message := child.read_message(), DriverExit):
                assert message is not None
                check_worker_alive(child, message)
                child.release()
        return require_report(message)

    def judge(self, reference: Mapping[str, str] | None) -> Verdict:
        """Return the verdict of the oracle, with processes and files that the drivers left.

        Unfinished files are collected first, and must not remain.
        """
        verdict = self._compute_verdict(reference)
        if verdict.is_correct and verdict.partial_files:
            self.run_undisturbed("collect")
            partial_files = verdict.partial_files
            verdict = self._compute_verdict(reference)
            verdict.problems += [f"{name} was not collected" for name in verdict.partial_files]
            verdict.partial_files = partial_files
        for child in self.children:
            for pid in child.wait_for_orphans():
                verdict.problems.append(f"process {pid} outlived its driver")
                child.kill(pid)
            verdict.problems += [
                f"{name} was left on the machine" for name in child.list_leftovers()
            ]
        return verdict

    def _compute_verdict(self, reference: Mapping[str, str] | None) -> Verdict:
        return judge(
            self.store.open_bucket(self.name),
            DATASET,
            rows=self.source.rows,
            bad_rows=self.source.bad_rows,
            reference=reference,
            val_share=self.source.sharding.get("holdout", 0.0),
        )


def check_worker_alive(child: Child, announcement: Announcement) -> None:
    """Check that an announcement is not the loss of a worker.

    Raises:
        CaseError: A worker that was not killed was lost.
    """
    if announcement.kind == "worker.lost":
        raise CaseError(
            f"worker {announcement.pid} was lost, and was not killed:\n{child.read_tail()}"
        )


def require_report(driver_exit: DriverExit) -> dict[str, Any]:
    """Return the report of a driver that ended by itself.

    Raises:
        CaseError: The driver failed or was killed.
    """
    if driver_exit.code != 0 or driver_exit.report is None:
        raise CaseError(f"a driver ended with code {driver_exit.code}:\n{driver_exit.tail}")
    return driver_exit.report


class References:
    """Digests of the shards that an undisturbed run makes of source data.

    The readers of all formats read them, too.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._readers = FormatReaders(folder / "packages")
        self._store = FolderStore(folder / "reference")
        self._digests: dict[str, dict[str, str]] = {}

    def compute_digests(self, source: SourceData) -> dict[str, str]:
        """Return the digests of the shards by their names. Makes the dataset at the first call.

        Raises:
            CaseError: The undisturbed run has a fault.
        """
        if source.name not in self._digests:
            case = Case(source.name, source, self._store, self._folder / "runs", workers=1)
            case.run_undisturbed()
            verdict = case.judge(None)
            made = self._folder / "reference" / source.name / DATASET
            verdict.problems += self._readers.find_faults(made, source)
            if not verdict.is_correct:
                raise CaseError(f"{case}, undisturbed: {verdict}")
            self._digests[source.name] = verdict.digests
        return self._digests[source.name]
