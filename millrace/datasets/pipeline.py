"""Plan, shard and finalize a dataset."""

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from millrace import cluster, errors
from millrace.dataset_ledger import fetch_plan
from millrace.datasets.card import check_readme, make_card, write_card
from millrace.datasets.dispatch import shard_all_partitions
from millrace.datasets.finalize import finalize_dataset
from millrace.datasets.manifest_size import check_manifest_size
from millrace.datasets.plan import (
    check_committed,
    check_manifest,
    check_source,
    commit_plan,
    find_committed_plan,
    list_planned_files,
    make_plan,
)
from millrace.datasets.plan_digest import compute_plan_digest
from millrace.datasets.preview import SamplePreview, preview_partition
from millrace.datasets.progress_events import (
    LocationFailed,
    PartitionStalled,
    PlanCommitted,
    ShardCommitted,
    SourceRead,
)
from millrace.datasets.quarantine import QuarantineLimit
from millrace.datasets.settings import PipelineSettings
from millrace.datasets.sources import (
    MirroredFiles,
    PartitionedSource,
    SourceFiles,
    StoredDigests,
    complete_spec,
    is_store_url,
)
from millrace.datasets.sources.mirrors import log_fault
from millrace.datasets.worker import PartitionJob, PartitionJobs
from millrace.keys.datasets import DatasetKeys
from millrace.keys.names import RESERVED_FOLDERS
from millrace.progress import Event, Progress, ignore_event
from millrace.records import fetch
from millrace.schemas.dataset import DatasetPlan, Manifest, Partition, SourceRecord
from millrace.settings import load_settings
from millrace.storage import (
    Backend,
    Location,
    Store,
    StoreSpec,
    exists,
    list_objects,
    open_store,
)
from millrace.storage.overlap import locate_prefix

_DIVISION_ERRORS = (errors.ConfigurationError, errors.CorruptError, errors.NotFoundError)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShardReport:
    """A complete dataset, and the work of this run.

    Attributes:
        url: URL of the dataset.
        manifest_key: Key of the manifest.
        manifest: Manifest of the dataset.
        source: Source of the samples at its revision.
        partitions: Number of partitions in the plan.
        seconds: Duration of this run.
        new_shards: Number of shards that this run committed. Other runs committed the rest.
        new_samples: Number of samples in the new shards.
        new_bytes: Bytes of the new shards.
        was_complete: Whether the dataset was complete before this run.
        dollars: Cost of all rented machines of the dataset; None if this run rented none.
        served: Bytes that this run read from each location of a source with mirrors, by its name;
            empty without mirrors.
        warnings: Sentences that a person should read although the run has succeeded.
    """

    url: str
    manifest_key: str
    manifest: Manifest = field(repr=False)
    source: SourceRecord = field(repr=False)
    partitions: int
    seconds: float
    new_shards: int
    new_samples: int
    new_bytes: int
    was_complete: bool = False
    dollars: float | None = None
    served: Mapping[str, int] = field(default_factory=dict[str, int])
    warnings: tuple[str, ...] = ()

    @property
    def manifest_url(self) -> str:
        """URL of the manifest."""
        return f"{self.url.removesuffix(self.manifest.dataset)}{self.manifest_key}"

    @property
    def samples(self) -> int:
        """Number of samples in the dataset."""
        return sum(self.manifest.samples.values())


def plan_dataset(settings: PipelineSettings) -> DatasetPlan:
    """Plan the partitions of a dataset. Lists the source, writes nothing.

    Raises:
        NotFoundError: The source has no files.
    """
    keys = DatasetKeys(settings.dataset)
    return make_plan(keys, settings.source, settings.source.open_files(), settings.sharding)[0]


def _make_or_reuse_plan(
    settings: PipelineSettings, keys: DatasetKeys, files: SourceFiles, store: Store | None = None
) -> tuple[DatasetPlan, PartitionedSource]:
    """Plan a dataset. If no location answers that could be listed, use the committed plan.

    Raises:
        ChangedError: The source cannot be divided, and it differs from that of the committed plan.
        MillraceError: The source cannot be divided.
    """
    transforms_store = store or _open_for_pinned_transforms(settings)
    try:
        return make_plan(keys, settings.source, files, settings.sharding, transforms_store)
    except errors.MillraceError as error:
        committed = None
        if isinstance(files, MirroredFiles) and not files.is_listed:
            committed = _find_committed_plan(settings, keys, store)
        if committed is None:
            if isinstance(error, _DIVISION_ERRORS):
                _check_source(settings, keys, files, store)
            raise
    return make_plan(keys, settings.source, files, settings.sharding, transforms_store, committed)


def _open_for_pinned_transforms(settings: PipelineSettings) -> Store | None:
    """Open the store of a dataset if the settings name digests of files that it may have.

    None if there are no such settings, or if the store cannot be opened: the caller finds out why.
    """
    if not any(getattr(one, "digest", None) for one in settings.sharding.transforms):
        return None
    with contextlib.suppress(errors.MillraceError):
        return _open_for_preflight(settings)
    return None


def _check_source(
    settings: PipelineSettings, keys: DatasetKeys, files: SourceFiles, store: Store | None
) -> None:
    """Check whether a source that cannot be divided has changed since the plan was made.

    Args:
        settings: Settings of the dataset.
        keys: Names of the dataset.
        files: Files of the source.
        store: Store of the dataset; None if the caller finds what is wrong with it.

    Raises:
        ChangedError: The source has other files than the committed plan.
    """
    if store is not None:
        check_source(store, keys, settings.source, files)
        return
    try:
        check_source(_open_for_preflight(settings), keys, settings.source, files)
    except errors.ChangedError:
        raise
    except errors.MillraceError:
        return


@dataclass(frozen=True, slots=True)
class Preflight:
    """Result of the checks before a dataset is made. The checks only read.

    Attributes:
        url: URL of the dataset.
        state: State of the dataset: new, begun or complete; empty if the state is unknown.
        unchecked: A sentence for each check that was not possible.
        open_partitions: Number of partitions that have not ended.
        notes: Sentences about the source that a person should read before the run.
        refusals: A sentence for each reason why `shard_dataset` will refuse the settings.
        largest_sample: Bytes of the largest sample; None if only a read of the source would show
            the size.
        preview: First rows of the dataset; empty if none were asked for.
    """

    url: str
    state: str
    unchecked: tuple[str, ...]
    refusals: tuple[str, ...]
    largest_sample: int | None = None
    open_partitions: int = 0
    notes: tuple[str, ...] = ()
    preview: SamplePreview = field(default_factory=SamplePreview)


_PREFLIGHT_TIMEOUT = timedelta(seconds=10)  # longest wait for an answer of the destination


def preflight_dataset(
    settings: PipelineSettings, *, samples: int = 0
) -> tuple[DatasetPlan, Preflight]:
    """Plan a dataset, and check whether `shard_dataset` can make the shards. Writes nothing.

    Args:
        settings: Settings of the dataset.
        samples: Number of the first samples to read, with the limits of `preview_samples`.

    Raises:
        NotFoundError: The source has no files.
        ChangedError: The source cannot be divided, and it differs from that of the committed plan.
    """
    keys = DatasetKeys(settings.dataset)
    files = _open_files(settings, keys)
    plan, partitioned = _make_or_reuse_plan(settings, keys, files)
    account = settings.store.account_id or os.environ.get("R2_ACCOUNT_ID")
    location = Location.parse(settings.store.url, account_id=account)
    url = str(location)
    unchecked = (
        "Whether the credentials may write there is not checked, since a plan writes nothing.",
    )
    refusals: list[str] = []
    notes = list(partitioned.notes)
    begun, complete, state = None, False, ""
    ended: set[str | None] = set()
    try:
        store = _open_for_preflight(settings)
        _refuse_overlap(settings, store)
        if settings.card:
            check_readme(store, keys)
        begun = check_committed(store, keys, plan, partitioned.objects)
        complete = exists(store, keys.manifest)
        if begun:
            plan = plan.model_copy(update={"partitions": begun.partitions})
            ended = {keys.parse_end(stat.key) for stat in list_objects(store, keys.commits)}
        if begun and complete:
            check_manifest(store, keys, begun, fetch(store, keys.manifest, Manifest))
        state = "complete" if complete else "begun; the run continues it" if begun else "new"
    except errors.NotFoundError as error:
        if location.backend is Backend.FILE:
            state = "new: the run makes the folder"
        else:
            refusals.append(str(error))
    except errors.UnavailableError as error:
        refusals.append(f"{url} does not answer: {errors.format_error(error)}")
    except errors.MillraceError as error:  # the run meets the same error
        refusals.append(str(error))
    if settings.execution.ray:
        try:
            cluster.check_reachable(settings.execution.ray)
        except errors.ConfigurationError as error:
            refusals.append(str(error))
    if begun is None and not complete:
        size_notes, size_refusals = _judge_manifest_size(plan)
        notes += size_notes
        refusals += size_refusals
    preview = preview_partition(settings, plan, partitioned.objects, files, samples)
    if preview.refusal and preview.partition not in ended:
        refusals.append(preview.refusal)
    where = f"{url}/{settings.dataset}"
    found = Preflight(
        url=where,
        state=state,
        unchecked=unchecked,
        refusals=tuple(refusals),
        largest_sample=partitioned.largest_sample,
        open_partitions=sum(one.name not in ended for one in plan.partitions),
        notes=(*notes, *_describe_empty_splits(plan, [one.split for one in plan.partitions])),
        preview=preview,
    )
    return plan, found


def preview_samples(settings: PipelineSettings, count: int = 3) -> SamplePreview:
    """Read the first samples of a dataset, as a run would make them. Writes nothing.

    The rows are those of the first partition of the split ``train``. At most 100 rows are looked
    at, and 64 MiB of files are read. Of a list of URLs, `count` URLs are requested.

    Args:
        settings: Settings of the dataset.
        count: Number of samples, and largest number of rows that make none.

    Raises:
        NotFoundError: The source has no files.
        MillraceError: The source cannot be divided.
    """
    return preflight_dataset(settings, samples=count)[1].preview


def _describe_empty_splits(plan: DatasetPlan, splits: Sequence[str]) -> list[str]:
    """Return a sentence for each split without samples, if a share of the source is held out.

    Args:
        plan: Plan of the dataset.
        splits: Splits with samples, or with partitions if there are no samples yet.
    """
    if not plan.holdout or not splits:
        return []
    return [
        f"The split `{split}` has no samples: with `holdout: {plan.holdout:g}`, it has no whole "
        f"row of the source that makes a sample. Correct `holdout` under another dataset name."
        for split in ("train", "val")
        if split not in splits
    ]


def _judge_manifest_size(plan: DatasetPlan) -> tuple[list[str], list[str]]:
    """Return a note and a refusal about the number of shards of a new dataset, at most one each."""
    try:
        note = check_manifest_size(plan)
    except errors.ConfigurationError as error:
        return [], [str(error)]
    return [note] if note else [], []


def _open_for_preflight(settings: PipelineSettings) -> Store:
    """Open the store of a dataset to read it, without a long wait and without a new folder."""
    timeout = min(settings.store.retry_timeout, _PREFLIGHT_TIMEOUT)
    spec = settings.store.model_copy(update={"retry_timeout": timeout})
    return open_store(spec, make_folder=False)


def shard_dataset(
    settings: PipelineSettings,
    *,
    progress: Progress = ignore_event,
    accept_changed_source: bool = False,
    wait: bool = True,
) -> ShardReport:
    """Write the shards of a dataset to a store, each exactly once, and finalize the dataset.

    The process may be killed at any time. A later run, on any machine, continues from the last
    commit. Concurrent runs share the partitions. If the dataset is complete, nothing is written,
    except for a dataset card that is missing or has other settings.

    Args:
        settings: Settings of the dataset.
        progress: Called at each boundary, in this thread; with `workers: 0`, in one thread at a
            time.
        accept_changed_source: Whether a complete dataset is accepted although its source has
            changed, as before `repair_dataset`.
        wait: Whether to wait for partitions that other runs hold. At least one of several runs must
            wait, to continue the partitions of runs that are killed.

    Raises:
        ConfigurationError: The records under this name are those of a dataset with another name,
            or a new dataset would have more shards than its manifest can name.
        ConflictError: The dataset was planned or made with other settings, or a dataset card would
            replace a file of other origin.
        ChangedError: The source has changed since the dataset was planned.
        QuarantineError: More rows make no sample than the settings allow, or there is no sample.
        HeldError: `wait` is false, and other runs work on all open partitions.
        MillraceError: Another error stopped the run. The message names the remedy.
    """
    began = time.monotonic()
    store = open_store(settings.store)
    keys = DatasetKeys(settings.dataset)
    files = _open_files(settings, keys, store)
    _refuse_overlap(settings, store)
    if settings.card:
        check_readme(store, keys)
    try:
        plan, partitioned = _make_or_reuse_plan(settings, keys, files, store)
        plan = commit_plan(store, keys, plan, partitioned.objects, progress)
    except errors.ChangedError:
        if not (accept_changed_source and exists(store, keys.manifest)):
            raise
        plan = fetch_plan(store, keys)
    progress(
        PlanCommitted(
            key=keys.plan,
            partitions=len(plan.partitions),
            files=plan.source.files,
            size=plan.source.size,
        )
    )
    counter = _CommitCounter(progress)
    was_complete = exists(store, keys.manifest)
    if was_complete:
        manifest = fetch(store, keys.manifest, Manifest)
        check_manifest(store, keys, plan, manifest)
    else:
        limit = QuarantineLimit(store, keys, plan, settings.execution)
        limit.resume(plan)

        def store_digests() -> None:
            if isinstance(files, MirroredFiles):
                files.store_digests(list_planned_files(store, plan))

        shard_all_partitions(
            store,
            keys,
            _make_jobs(settings, plan, files, store.spec.model_copy(update={"url": store.url})),
            plan=plan,
            execution=settings.execution,
            progress=limit.wrap_progress(counter),
            prepare=store_digests,
            wait=wait,
        )
        manifest = finalize_dataset(store, keys, plan, files=files, limit=limit, progress=progress)
    warnings = write_card_and_warn(settings, store, plan, manifest, progress)
    return ShardReport(
        url=store.make_url(settings.dataset),
        manifest_key=keys.manifest,
        manifest=manifest,
        source=plan.source,
        partitions=len(plan.partitions),
        seconds=time.monotonic() - began,
        new_shards=counter.shards,
        new_samples=counter.samples,
        new_bytes=counter.size,
        was_complete=was_complete,
        served=counter.count_served(files),
        warnings=tuple(warnings),
    )


def write_card_and_warn(
    settings: PipelineSettings,
    store: Store,
    plan: DatasetPlan,
    manifest: Manifest,
    progress: Progress = ignore_event,
) -> list[str]:
    """Write the dataset card, if the settings have one and it is missing or another one.

    Args:
        settings: Settings of the dataset.
        store: Store of the dataset.
        plan: Plan of the dataset.
        manifest: Manifest of the complete dataset.
        progress: Callback, as for `shard_dataset`.

    Returns:
        Sentences that a person should read although the dataset is complete.
    """
    warnings = _describe_empty_splits(plan, [split for split, n in manifest.samples.items() if n])
    if settings.card:
        card = make_card(settings.card, plan)
        if sentence := write_card(store, card, manifest, progress=progress):
            warnings.append(sentence)
    return warnings


def run_from_file(
    path: str | Path, *, dataset: str | None = None, progress: Progress = ignore_event
) -> ShardReport:
    """Call `shard_dataset` with the settings of a YAML or TOML file.

    Args:
        path: Path of the file.
        dataset: Name of the dataset, instead of the name in the file.
        progress: Callback, as for `shard_dataset`.

    Raises:
        ConfigurationError: The file is missing, invalid, or names a variable that is not set.
        MillraceError: The run failed, with the errors of `shard_dataset`.
    """
    settings = load_settings(Path(path), PipelineSettings, template="millrace init")
    if dataset is not None:
        settings = settings.model_copy(update={"dataset": dataset})
    return shard_dataset(settings, progress=progress)


def _open_files(
    settings: PipelineSettings, keys: DatasetKeys, store: Store | None = None
) -> SourceFiles:
    """Open the files of a source, as the plan pins them if there is one.

    Args:
        settings: Settings of the dataset.
        keys: Names of the dataset.
        store: Store of the dataset; None if the caller finds what is wrong with it.
    """
    committed = None
    if settings.source.url.startswith("hf://") or settings.source.mirrors:
        committed = _find_committed_plan(settings, keys, store)
    digests = StoredDigests(store, keys) if store else None
    return settings.source.open_files(committed.source if committed else None, digests)


def _find_committed_plan(
    settings: PipelineSettings, keys: DatasetKeys, store: Store | None
) -> DatasetPlan | None:
    if store is not None:
        return find_committed_plan(store, keys)
    with contextlib.suppress(errors.MillraceError):
        return find_committed_plan(_open_for_preflight(settings), keys)
    return None


def _refuse_overlap(settings: PipelineSettings, store: Store) -> None:
    """Refuse a source with the dataset in it, or in a folder of the dataset's objects.

    Files of a source among the shards would be taken for leftovers, and deleted.

    Raises:
        ConfigurationError: A location of the source and the dataset overlap.
    """
    bucket, own = locate_prefix(store, settings.dataset)
    for spec in settings.source.list_locations():
        if not is_store_url(spec.url):
            continue
        try:
            origin = open_store(spec, make_folder=False)
        except errors.NotFoundError:  # a mirror may be missing
            continue
        other_bucket, path = locate_prefix(origin)
        if bucket != other_bucket:
            continue
        # A source is also read through links to folders.
        is_linked = f"{store.make_url(settings.dataset)}/".startswith(f"{origin.url}/")
        if own.startswith(path) or is_linked:
            raise errors.ConfigurationError(
                f"The dataset would lie inside of its own source, {origin.url}, and change it: "
                "name another store, or a source folder beside it."
            )
        folder = path.removeprefix(own).partition("/")[0]
        if path.startswith(own) and folder in RESERVED_FOLDERS:
            raise errors.ConfigurationError(
                f"The source {origin.url} lies in the folder {folder!r} of the dataset itself, "
                "whose runs delete leftovers there: give the dataset another name, or move the "
                "files of the source."
            )


def _make_jobs(
    settings: PipelineSettings, plan: DatasetPlan, files: SourceFiles, store: StoreSpec
) -> PartitionJobs:
    """Return the jobs of all partitions. The source is at the URL of this run's settings.

    The stores are complete except for the credentials of the environment: a worker on another
    machine has other variables, and another working directory.
    """
    digest = compute_plan_digest(plan)
    mirrors: list[StoreSpec] = []
    if settings.source.mirrors:
        source_store, *mirrors = settings.source.list_locations()
    else:
        source_store = complete_spec(settings.source.store.model_copy(update={"url": files.url}))

    def make_job(partition: Partition) -> PartitionJob:
        return PartitionJob(
            dataset=plan.dataset,
            plan_digest=digest,
            layout=plan.layout,
            source=plan.source,
            source_store=source_store,
            mirrors=tuple(mirrors),
            allow_private=settings.source.allow_private,
            downloads=settings.execution.downloads,
            store=store,
            partition=partition,
            uploads=settings.execution.uploads,
        )

    return PartitionJobs(make_job, plan.partitions)


class _CommitCounter:
    """Forwards events, counts the commits of this run, and logs the faults of locations once."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.shards = self.samples = self.size = 0
        self._served: Counter[str] = Counter()
        self._logged: set[tuple[str, bool]] = set()

    def __call__(self, event: Event) -> None:
        match event:
            case ShardCommitted():
                self.shards += len(event.keys)
                self.samples += event.samples
                self.size += event.size
            case PartitionStalled():
                logger.warning(
                    "%s has got no sample for %.0f minutes, %s, in process %d. If a function, the "
                    "source or the store hangs, correct it and run it again: the run continues.",
                    event.partition,
                    event.seconds / 60,
                    f"after {event.last_row}" if event.last_row else "and none before",
                    event.pid,
                )
            case SourceRead():
                self._served.update(event.served)
            case LocationFailed() if (event.location, event.differs) not in self._logged:
                self._logged.add((event.location, event.differs))
                log_fault(event.location, event.reason, event.differs)
            case _:
                pass
        self._progress(event)

    def count_served(self, files: SourceFiles) -> dict[str, int]:
        """Return the bytes that this run read from each location of a source with mirrors."""
        if isinstance(files, MirroredFiles):
            self._served.update(files.served)
        return dict(self._served)
