"""Follow a dataset that other machines make, by its ledger in the store."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from millrace import errors
from millrace.dataset_ledger import fetch_plan
from millrace.datasets.pipeline import ShardReport, write_card_and_warn
from millrace.datasets.plan import check_manifest
from millrace.datasets.progress_events import (
    PartitionEnded,
    PartitionsPending,
    PlanCommitted,
    ShardCommitted,
)
from millrace.datasets.settings import PipelineSettings
from millrace.keys.datasets import DatasetKeys
from millrace.progress import Progress
from millrace.records import Record, fetch, iterate_records
from millrace.schemas.dataset import DatasetPlan, Manifest, PartitionEnd, ShardCommit
from millrace.storage import Stat, Store, exists

R = TypeVar("R", bound=Record)


class LedgerFollower:
    """Follower of the ledger of a dataset that other machines make.

    Each commit is read once. Commits from before the first poll are not reported.

    Args:
        store: Store of the dataset.
        dataset: Name of the dataset.
        progress: Receives `PlanCommitted`, `PartitionsPending`, `ShardCommitted` and
            `PartitionEnded`.
    """

    def __init__(self, store: Store, dataset: str, progress: Progress) -> None:
        self._store, self._keys, self._progress = store, DatasetKeys(dataset), progress
        self._plan: DatasetPlan | None = None
        self._has_reported_partitions = False
        self._is_first = True
        self._seen: set[str] = set()
        self._old_shards: set[str] = set()

    @property
    def is_complete(self) -> bool:
        """True if the dataset is complete."""
        return exists(self._store, self._keys.manifest)

    def poll(self) -> None:
        """Report the commits since the last poll. The first poll only notes the commits.

        Costs a listing of the ledger, and a read of each new commit. After an error, the next poll
        reports what this one has not.
        """
        if not self._seen:  # a plan without commits may be replaced
            self._read_plan()
        if self._plan is None:
            self._is_first = False
            return
        partitions = {one.name: one for one in self._plan.partitions}
        # All commits of an ended partition are listed after its end.
        ends = list(self._read_new(PartitionEnd, self._keys.parse_end))
        commits = self._read_new(ShardCommit, self._keys.parse_commit)
        if not self._has_reported_partitions:
            ended = len(ends) if self._is_first else 0
            self._progress(PartitionsPending(partitions=len(partitions) - ended))
            self._has_reported_partitions = True
        for key, commit in commits:
            if self._is_first:
                self._old_shards.update(shard.key for shard in commit.shards)
            elif commit.partition in partitions:
                partition = partitions[commit.partition]
                self._progress(ShardCommitted.describe(commit, partition))
            self._seen.add(key)
        for key, end in ends:
            if not self._is_first and end.partition in partitions:
                self._progress(PartitionEnded.describe(end))
            self._seen.add(key)
        self._is_first = False

    def make_report(
        self, settings: PipelineSettings, seconds: float, dollars: float
    ) -> ShardReport:
        """Return the report of the complete dataset, and write its card if no machine has.

        Args:
            settings: Settings of the dataset.
            seconds: Duration of the run.
            dollars: Cost of the machines.

        Raises:
            NotFoundError: The dataset is not complete.
            ConflictError: The manifest is of another plan.
        """
        manifest = fetch(self._store, self._keys.manifest, Manifest)
        plan = fetch_plan(self._store, self._keys)
        check_manifest(self._store, self._keys, plan, manifest)
        new = [shard for shard in manifest.shards if shard.key not in self._old_shards]
        return ShardReport(
            url=self._store.make_url(self._keys.dataset),
            manifest_key=self._keys.manifest,
            manifest=manifest,
            source=plan.source,
            partitions=len(plan.partitions),
            seconds=seconds,
            new_shards=len(new),
            new_samples=sum(shard.samples for shard in new if shard.format in manifest.formats[:1]),
            new_bytes=sum(shard.size for shard in new),
            dollars=dollars,
            warnings=tuple(write_card_and_warn(settings, self._store, plan, manifest)),
        )

    def _read_plan(self) -> None:
        """Read the plan, and report it if it is another than before."""
        try:
            plan = fetch_plan(self._store, self._keys)
        except errors.NotFoundError:
            return
        if plan == self._plan:
            return
        self._plan, self._has_reported_partitions = plan, False
        self._progress(
            PlanCommitted(
                key=self._keys.plan,
                partitions=len(plan.partitions),
                files=plan.source.files,
                size=plan.source.size,
            )
        )

    def _read_new(self, kind: type[R], parse: Callable[[str], object]) -> Iterator[tuple[str, R]]:
        """Yield the key and the record of each intact record that no poll has reported before."""

        def is_new(stat: Stat) -> bool:
            return stat.key not in self._seen and parse(stat.key) is not None

        for stat, record in iterate_records(self._store, self._keys.commits, kind, wanted=is_new):
            if isinstance(record, errors.CorruptError):
                self._seen.add(stat.key)
            else:
                yield stat.key, record
