"""The whole way: plan, cut, seal. What the flow, the command and Python call alike."""

import os
import time
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

from millrace import errors, settings
from millrace.datasets.finalize import plan_digest, seal
from millrace.datasets.plan import check_pinned, make_plan, pin_plan
from millrace.datasets.pool import run_splits
from millrace.datasets.quarantine import QuarantineLimit
from millrace.datasets.repair import remake_shards
from millrace.datasets.settings import PipelineSettings
from millrace.datasets.worker import Job
from millrace.keys import DatasetKeys
from millrace.progress import Event, Progress, silent
from millrace.records import fetch
from millrace.schemas.dataset import DatasetPlan, Manifest
from millrace.storage import Backend, Location, Store, exists, open_store


@dataclass(frozen=True, slots=True)
class ShardReport:
    """A dataset that is sealed, and what this run had to do for it.

    Attributes:
        url: Of the dataset.
        manifest_key: Below the store's URL.
        manifest: What was sealed.
        splits: How many the plan has.
        seconds: That this run took.
        made: Shards that this run committed; the others were there before, or made elsewhere.
        samples_made: In those.
        bytes_made: Of those.
    """

    url: str
    manifest_key: str
    manifest: Manifest = field(repr=False)
    splits: int
    seconds: float
    made: int
    samples_made: int
    bytes_made: int

    @property
    def samples(self) -> int:
        """Samples in the dataset."""
        return sum(self.manifest.samples.values())


def plan_dataset(config: PipelineSettings) -> DatasetPlan:
    """Plan how a dataset would be cut: reads the source's listing, writes nothing.

    Raises:
        NotFoundError: The source has no files.
    """
    keys = DatasetKeys(config.dataset)
    return make_plan(
        keys, config.source, open_store(config.source.store, make_folder=False), config.cut
    )[0]


@dataclass(frozen=True, slots=True)
class Preflight:
    """State of the place where a dataset's shards will be, as far as reading shows it.

    Attributes:
        url: URL of the dataset.
        state: Whether the dataset is new there, begun or complete; empty if that is not known.
        unchecked: What reading does not show, or was not possible, in sentences.
        refusals: Why `shard_dataset` will refuse, in sentences; empty if it will not.
        largest: Bytes of the largest sample; None where only reading the source shows it.
    """

    url: str
    state: str
    unchecked: tuple[str, ...]
    refusals: tuple[str, ...]
    largest: int | None = None


_PREFLIGHT = timedelta(seconds=10)  # that the destination may take to answer


def check_destination(config: PipelineSettings) -> tuple[DatasetPlan, Preflight]:
    """Plan a dataset, and find out by reading whether it can be made. Writes nothing.

    Raises:
        NotFoundError: The source has no files.
    """
    keys = DatasetKeys(config.dataset)
    source = open_store(config.source.store, make_folder=False)
    plan, pieces = make_plan(keys, config.source, source, config.cut)
    patience = min(config.store.patience, _PREFLIGHT)
    spec = config.store.model_copy(update={"patience": patience})
    account = spec.account_id or os.environ.get("R2_ACCOUNT_ID")
    place = Location.parse(spec.url, account_id=account)
    url = str(place)
    unchecked = ["Whether the credentials may write there is not checked: planning writes nothing."]
    refusals: list[str] = []
    state = ""
    try:
        store = open_store(spec, make_folder=False)
        _refuse_overlap(source, store, config.dataset)
        begun = check_pinned(store, keys, plan, pieces.listings)
        complete = exists(store, keys.manifest)
        state = "complete" if complete else "begun, and gone on with" if begun else "new"
    except errors.NotFoundError as error:
        if place.backend is Backend.FILE:
            state = "new: the run makes the folder"
        else:
            refusals.append(str(error))
    except (errors.ConflictError, errors.ChangedError, errors.ConfigurationError) as error:
        refusals.append(str(error))
    except errors.UnavailableError as error:
        refusals.append(f"{url} does not answer: {errors.one_line(error)}")
    except errors.MillraceError as error:
        unchecked.append(f"What is there cannot be read: {errors.one_line(error)}")
    where = f"{url}/{config.dataset}"
    found = Preflight(where, state, tuple(unchecked), tuple(refusals), pieces.largest)
    return plan, found


def shard_dataset(
    config: PipelineSettings, *, progress: Progress = silent, repair: bool = False
) -> ShardReport:
    """Cut a dataset into shards in a store, each exactly once, and seal its manifest.

    May be killed at any time, anywhere: running it again, on any machine, goes on from what is
    committed. Several runs at once share the splits.

    Args:
        config: Which dataset, from where, to where, and how.
        progress: Called at each boundary, in this thread; with no workers, in one at a time.
        repair: Whether `repair_dataset` follows: then the source of a complete dataset may have
            changed.

    Raises:
        ConflictError: The dataset was planned otherwise.
        ChangedError: The source is not what it was when the dataset was planned.
        QuarantineError: More rows make no sample than the settings allow, or none does.
        MillraceError: What else stopped it; its sentence says what to do.
    """
    began = time.monotonic()
    store = open_store(config.store)
    keys = DatasetKeys(config.dataset)
    source = open_store(config.source.store, make_folder=False)
    _refuse_overlap(source, store, config.dataset)
    plan, pieces = make_plan(keys, config.source, source, config.cut)
    try:
        plan = pin_plan(store, keys, plan, pieces.listings, progress)
    except errors.ChangedError:
        if not (repair and exists(store, keys.manifest)):
            raise
        plan = fetch(store, keys.plan, DatasetPlan)
    progress(
        Event(
            "plan.committed",
            keys.plan,
            {"splits": len(plan.splits), "bytes": plan.source.size, "files": plan.source.files},
        )
    )
    counted = _Counted(progress)
    if exists(store, keys.manifest):
        manifest = fetch(store, keys.manifest, Manifest)
    else:
        limit = QuarantineLimit(store, keys, plan, config.run)
        limit.resume(plan)
        run_splits(
            store,
            keys,
            _jobs(config, plan),
            workers=config.run.workers,
            lease=config.run.lease,
            progress=limit.watch(counted),
        )
        remake = partial(remake_shards, store, plan, source, progress=progress)
        manifest = seal(store, keys, plan, progress, check=limit.check, remake=remake)
    return ShardReport(
        url=store.url_of(config.dataset),
        manifest_key=keys.manifest,
        manifest=manifest,
        splits=len(plan.splits),
        seconds=time.monotonic() - began,
        made=counted.shards,
        samples_made=counted.samples,
        bytes_made=counted.size,
    )


def run_pipeline(
    config: PipelineSettings, *, prefix: str | None = None, progress: Progress = silent
) -> ShardReport:
    """`shard_dataset` under another dataset name, if one is given."""
    if prefix is not None:
        config = config.model_copy(update={"dataset": prefix})
    return shard_dataset(config, progress=progress)


def run_from_file(
    path: str | Path, *, prefix: str | None = None, progress: Progress = silent
) -> ShardReport:
    """`run_pipeline` with the settings of a YAML or TOML file.

    Raises:
        ConfigurationError: The file is missing, wrong, or names a variable that is not set.
    """
    return run_pipeline(
        settings.load(Path(path), PipelineSettings), prefix=prefix, progress=progress
    )


def _refuse_overlap(source: Store, target: Store, dataset: str) -> None:
    if f"{target.url_of(dataset)}/".startswith(f"{source.url}/"):
        raise errors.ConfigurationError(
            f"The dataset would lie inside of its own source, {source.url}, and change it: name "
            "another store, or a source folder beside it."
        )


def _jobs(config: PipelineSettings, plan: DatasetPlan) -> list[Job]:
    digest = plan_digest(plan)
    return [
        Job(
            dataset=plan.dataset,
            plan=digest,
            layout=plan.layout,
            source=plan.source,
            source_store=config.source.store,
            store=config.store,
            split=split,
            uploads=config.run.uploads,
        )
        for split in plan.splits
    ]


class _Counted:
    """Passes events on, and counts what this run commits."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.shards = self.samples = self.size = 0

    def __call__(self, event: Event) -> None:
        if event.name == "shard.committed":
            self.shards += bool(event.figures["samples"])  # else only bad rows were committed
            self.samples += int(event.figures["samples"])
            self.size += int(event.figures["bytes"])
        self._progress(event)
