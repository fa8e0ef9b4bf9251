"""Tasks of a campaign: its lease, its progress and its report."""

import math
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, Protocol

from prefect import task
from prefect.cache_policies import NO_CACHE

from millrace import cluster, errors, gradients
from millrace.campaigns.worker import (
    TrainingPlan,
    check_local_command,
    check_repository_command,
    find_joined_workers,
    read_median_metric,
)
from millrace.checkpoints.cooldown.membership import derive_epoch, read_epoch
from millrace.gradients import ChainLink, RunSettings, WindowRules
from millrace.keys import CampaignKeys, DatasetKeys
from millrace.lease import Heartbeat, HeldLease, Holder, StoreClock, await_lease
from millrace.records import Record, commit_once, fetch, find_changes
from millrace.remote import CodeRepository
from millrace.rentals import list_attempts
from millrace.schemas.checkpoint import EpochRecord
from millrace.schemas.dataset import Manifest
from millrace.storage import Store, StoreSpec, delete, exists, open_store
from tasks.formatting import format_count, format_duration, format_size, make_artifact_key
from tasks.plot import draw_line
from tasks.reports import (
    Markdown,
    escape,
    format_bold,
    format_code,
    format_image,
    format_markdown,
    format_table,
    join_blocks,
    publish_report,
)
from tasks.retries import RETRY_DELAYS, should_retry

_TTL = timedelta(minutes=1)
_MAX_FAULT_LENGTH = 2000  # characters of an error, which may have the last lines of a worker
_POLL_INTERVAL = 1.0  # seconds between two checks for workers that join


class CampaignWorkers(Protocol):
    """The workers of a campaign, wherever they run."""

    @property
    def is_over(self) -> bool:
        """True if all of them have ended."""
        ...

    def raise_failure(self) -> None:
        """Raise the error that has ended the workers, if any."""
        ...

    def describe_end(self) -> str:
        """Return how the workers ended, and their last output."""
        ...


class PinnedTraining(Record):
    """Record of the settings of a campaign's training that cannot change under its name."""

    record_kind: ClassVar[str] = "campaign-training"

    workers: int
    windows_per_epoch: int
    run: RunSettings
    dataset: str | None


class WarmingMarker(Record):
    """Record that the machines of a campaign wait for their files."""

    record_kind: ClassVar[str] = "campaign-warming"

    campaign: str


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Progress of a campaign's training, by what is committed.

    Attributes:
        last_window: Number of the newest merged window; -1 before the run has begun.
        ended_epochs: Numbers of the epochs that have ended.
    """

    last_window: int
    ended_epochs: frozenset[int]


@dataclass(frozen=True, slots=True)
class CampaignSummary:
    """Summary of a campaign so far, by what is committed.

    Attributes:
        name: Name of the campaign.
        url: URL of its store.
        samples: Samples of its dataset; 0 if it has none, or the dataset is not complete.
        shards: Shards of its dataset, likewise.
        windows: Number of windows in which a gradient was merged.
        step: Step of the weights.
        gradients: Number of gradients that were taken.
        sent_bytes: Bytes of the gradients.
        dense_bytes: Bytes of the same changes in float32.
        losses: Loss of the weights by the median worker, by the number of the window before.
        epoch_steps: Step of the checkpoint of each ended epoch; None where it has none.
        machines: Number of machines that were rented.
        dollars: Cost of the machines.
        deleted_objects: Number of objects that this run has deleted.
        seconds: Duration of this run.
    """

    name: str
    url: str
    samples: int = 0
    shards: int = 0
    windows: int = 0
    step: int = 0
    gradients: int = 0
    sent_bytes: int = 0
    dense_bytes: int = 0
    losses: Mapping[int, float] = field(default_factory=dict[int, float])
    epoch_steps: Mapping[int, int | None] = field(default_factory=dict[int, int | None])
    machines: int = 0
    dollars: float = 0.0
    deleted_objects: int = 0
    seconds: float = 0.0


@contextmanager
def hold_campaign_lease(spec: StoreSpec, name: str) -> Generator[None]:
    """Hold the lease of a campaign while the block lasts, or take over that of a dead process.

    Raises:
        HeldError: A living process holds the lease.
    """
    store, keys, holder = open_store(spec), CampaignKeys(name), Holder.this_process()
    clock = StoreClock.read(store, name, holder)
    held = await_lease(store, keys.lease, holder, _TTL, clock)
    if isinstance(held, HeldLease):
        raise errors.HeldError(
            f"The campaign {name} is led by process {held.holder.pid} on {held.holder.host}, which "
            "lives: leave it to that, or cancel it first."
        )
    with Heartbeat(_TTL) as heart:
        heart.keep(held)
        yield


@task(
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=should_retry,
)
def check_dataset_complete(spec: StoreSpec, dataset: str) -> None:
    """Refuse a dataset that is missing or not complete."""
    if not exists(open_store(spec, make_folder=False), DatasetKeys(dataset).manifest):
        raise errors.NotFoundError(
            f"{dataset} is not complete at {spec.url}: give the campaign its source, or shard it."
        )


@task(
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=should_retry,
)
def read_training_progress(
    spec: StoreSpec, run: RunSettings, job: str, epochs: int
) -> TrainingProgress:
    """Return the progress of the training."""
    store = open_store(spec)
    ended = {epoch for epoch in range(epochs) if _read_epoch_end(store, job, epoch) is not None}
    return TrainingProgress(gradients.find_newest_window(store, run.chain), frozenset(ended))


def _read_epoch_end(store: Store, job: str, epoch: int) -> EpochRecord | None:
    """Return the end of an epoch, by its record, or by its votes if the record is damaged."""
    try:
        return read_epoch(store, job, epoch)
    except errors.NotFoundError:
        return None
    except errors.CorruptError:
        return derive_epoch(store, job, epoch)


@task(
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=should_retry,
)
def check_plan(spec: StoreSpec, plan: TrainingPlan) -> None:
    """Refuse a plan that differs from the pinned one, before anything is created or rented.

    Raises:
        ConflictError: The plan differs in what cannot change; the message names the values.
    """
    with suppress(errors.NotFoundError):  # nothing is pinned yet
        store = open_store(spec, make_folder=False)
        _refuse_changes(plan, fetch(store, CampaignKeys(plan.campaign).plan, PinnedTraining))


@task(
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=should_retry,
)
def pin_plan(spec: StoreSpec, plan: TrainingPlan) -> None:
    """Commit the settings that cannot change, or refuse a plan that differs from the pinned one.

    Raises:
        ConflictError: The plan differs in what cannot change; the message names the values.
    """
    key = CampaignKeys(plan.campaign).plan
    _refuse_changes(plan, commit_once(open_store(spec), key, _make_pinned_training(plan)).record)


def _make_pinned_training(plan: TrainingPlan) -> PinnedTraining:
    return PinnedTraining(**{name: getattr(plan, name) for name in PinnedTraining.model_fields})


def _refuse_changes(plan: TrainingPlan, pinned: PinnedTraining) -> None:
    found = find_changes(pinned, _make_pinned_training(plan))
    free = [f"run.{name}" for name in WindowRules.model_fields]
    changes = [
        f"{_describe_field(path)} was {_format_value(old)}, and is {_format_value(new)} now"
        for path, (old, new) in found.items()
        if not path.startswith(tuple(free))
    ]
    if changes:
        raise errors.ConflictError(
            f"{plan.campaign} was begun with another plan: {'; '.join(changes)}. Go on as it was, "
            "or give this one another name, and begin it with the weights of that."
        )


def _describe_field(path: str) -> str:
    """Return the name of a pinned field in the plan of a campaign."""
    known = {
        "workers": "training.workers",
        "windows_per_epoch": "training.windows_per_epoch",
        "run.windows": "the number of all windows (training.epochs x training.windows_per_epoch)",
        "dataset": "data.dataset",
    }
    return known.get(path) or f"training.run.{path.removeprefix('run.')}"


def _format_value(value: Any) -> str:
    return "nothing" if value is None else str(value)


@task(
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=should_retry,
)
def check_command(command: tuple[str, ...], program: Path | CodeRepository) -> None:
    """Refuse a training command that cannot run, before anything is created or rented.

    Args:
        command: Program and arguments.
        program: The folder that local workers run in, or the repository that machines clone.

    Raises:
        ConfigurationError: The program, the file or the module does not exist.
    """
    if isinstance(program, Path):
        check_local_command(command, program)
    else:
        check_repository_command(command, program)


@task(cache_policy=NO_CACHE)
def check_cluster(address: str) -> None:
    """Refuse a Ray cluster that cannot be reached, before anything is created or rented.

    Raises:
        ConfigurationError: There is no such cluster, or Ray is not installed here.
    """
    cluster.check_reachable(address)


def has_joined_worker(spec: StoreSpec, run: RunSettings, uids: Sequence[str]) -> bool:
    """Decide whether any worker has ever joined a run."""
    try:
        return bool(find_joined_workers(open_store(spec, make_folder=False), run, uids))
    except errors.NotFoundError:
        return False  # the run has not begun


@task(cache_policy=NO_CACHE)
def await_workers(
    spec: StoreSpec,
    run: RunSettings,
    workers: CampaignWorkers,
    uids: Sequence[str],
    timeout: timedelta,
) -> int:
    """Wait until enough workers have joined a run for its first window to open.

    The quorum is enough. After the timeout, one worker is enough.

    Args:
        spec: Store of the campaign, with read credentials.
        run: The run, which has begun.
        workers: Processes or machines of the workers.
        uids: Names of the workers.
        timeout: Longest wait.

    Returns:
        Number of workers that have joined.

    Raises:
        UnavailableError: No worker has joined in this time.
        WorkerError, MachineError: The workers have failed, or have ended.
    """
    store = open_store(spec, make_folder=False)
    deadline = time.monotonic() + timeout.total_seconds()
    enough = min(max(1, run.gather.quorum), len(uids))
    while True:
        found = len(find_joined_workers(store, run, uids))
        if found >= enough:
            return found
        workers.raise_failure()
        if workers.is_over:
            raise errors.WorkerError(
                f"All workers have ended, and none has joined the run. {workers.describe_end()}"
            )
        if time.monotonic() > deadline:
            if found:
                return found
            raise errors.UnavailableError(
                f"No worker has joined {run.run} in {timeout}: see the lines that they print. "
                "Let the script call `Worker.join` and `begin`, or raise `training.join_timeout`."
            )
        time.sleep(_POLL_INTERVAL)


@task(
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=should_retry,
)
def begin_warming(spec: StoreSpec, name: str) -> None:
    """Have machines wait for their files when they come up."""
    commit_once(open_store(spec), CampaignKeys(name).warming, WarmingMarker(campaign=name))


@task(
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=should_retry,
)
def is_warming(spec: StoreSpec, name: str) -> bool:
    """Decide whether machines wait for their files."""
    return exists(open_store(spec), CampaignKeys(name).warming)


@task(
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=should_retry,
)
def end_warming(spec: StoreSpec, name: str) -> None:
    """Have machines wait for their files no longer."""
    delete(open_store(spec), [CampaignKeys(name).warming])


@task(
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=should_retry,
)
def summarize_campaign(
    spec: StoreSpec,
    name: str,
    *,
    dataset: str | None,
    run: RunSettings | None,
    workers: int,
    epochs: int,
) -> CampaignSummary:
    """Summarize a campaign so far.

    Args:
        spec: Store of the campaign, with read credentials.
        name: Name of the campaign.
        dataset: Dataset of the training, if any.
        run: Settings of the run, if there is a training.
        workers: Number of workers whose losses are read.
        epochs: Number of epochs.
    """
    store, keys = open_store(spec, make_folder=False), CampaignKeys(name)
    found = CampaignSummary(name=name, url=store.url)
    if dataset is not None and exists(store, DatasetKeys(dataset).manifest):
        manifest = fetch(store, DatasetKeys(dataset).manifest, Manifest)
        samples = sum(manifest.samples.values())
        found = replace(found, samples=samples, shards=len(manifest.shards))
    last = -1 if run is None else gradients.find_newest_window(store, run.chain)
    if run is not None and last >= 0:
        found = _add_windows(found, list(gradients.iterate_links(store, run.chain)))
        uids = [keys.uid(number) for number in range(workers)]
        reported = read_median_metric(store, run.gradients, uids, "loss", last_window=last + 1)
        losses = {window - 1: value for window, value in reported.items()}
        ends = {epoch: _read_epoch_end(store, keys.job, epoch) for epoch in range(epochs)}
        steps = {epoch: end.step if end.root else None for epoch, end in ends.items() if end}
        found = replace(found, losses=losses, epoch_steps=steps)
    now = datetime.now(UTC)
    rented = [one for one in list_attempts(store, name) if one.contract is not None]
    return replace(
        found, machines=len(rented), dollars=sum(one.compute_cost(now) for one in rented)
    )


def _add_windows(found: CampaignSummary, windows: Sequence[ChainLink]) -> CampaignSummary:
    if not windows:
        return found
    taken = [one for link in windows for one in link.taken.values()]
    values = sum(math.prod(shape) for shape in windows[-1].shapes)
    return replace(
        found,
        windows=sum(bool(link.taken) for link in windows),
        step=windows[-1].step,
        gradients=len(taken),
        sent_bytes=sum(one.size for one in taken),
        dense_bytes=4 * values * len(taken),
    )


@task(cache_policy=NO_CACHE)
def report_campaign(found: CampaignSummary, fault: str = "") -> None:
    """Publish the report."""
    publish_report(
        describe(found, fault),
        key=make_artifact_key("campaign", found.name),
        description="Result of the campaign so far",
    )


def describe(found: CampaignSummary, fault: str = "", *, with_picture: bool = True) -> Markdown:
    """Return the report.

    Args:
        found: Summary of the campaign.
        fault: Error that ended the campaign; empty without one.
        with_picture: Whether the losses are drawn.
    """
    drawn = Markdown()
    if found.losses and with_picture:
        drawn = format_image(_plot_losses(found), "the loss over the windows")
    return join_blocks(
        _write_headline(found, fault),
        format_table(("Stage", "Result"), list(_make_rows(found).items())),
        drawn,
    )


def _write_headline(found: CampaignSummary, fault: str) -> Markdown:
    subject = format_markdown("{}, in {}", format_bold(found.name), format_code(found.url))
    if fault:
        again = "Start it again: it goes on from here."
        return format_markdown(
            "{}, **is not over**: {} {}", subject, escape(fault, _MAX_FAULT_LENGTH), again
        )
    trained = f": {format_count(found.windows, 'window')} trained" if found.windows else " is done"
    losses = [found.losses[window] for window in sorted(found.losses)]
    fell = f", the loss from {losses[0]:.3f} to {losses[-1]:.3f}" if len(losses) > 1 else ""
    paid = f", for ${found.dollars:.2f}" if found.machines else ""
    return format_markdown(
        "{}{}{}{}, in {}.", subject, trained, fell, paid, format_duration(found.seconds)
    )


def _make_rows(found: CampaignSummary) -> dict[str, str]:
    """Return the rows of the report by their headings; a skipped stage has no row."""
    rows: dict[str, str] = {}
    if found.shards:
        rows["Dataset"] = (
            f"{format_count(found.samples, 'sample')} in {format_count(found.shards, 'shard')}"
        )
    if found.windows:
        rows["Windows"] = f"{found.windows:,}, up to step {found.step:,}"
    if found.gradients:
        sent, dense = format_size(found.sent_bytes), format_size(found.dense_bytes)
        smaller = f"{found.dense_bytes / found.sent_bytes:.0f} times smaller"
        rows["Gradients"] = f"{found.gradients:,}: {sent} instead of {dense}, {smaller}"
    if found.epoch_steps:
        rows["Checkpoints"] = ", ".join(
            f"epoch {epoch}: {f'step {step:,}' if step is not None else 'none'}"
            for epoch, step in found.epoch_steps.items()
        )
    if found.machines:
        rows["Machines"] = f"{found.machines:,} rented, ${found.dollars:.2f}"
    if found.deleted_objects:
        rows["Cleaned"] = format_count(found.deleted_objects, "object")
    return rows


def _plot_losses(found: CampaignSummary) -> str:
    title = "Loss of the merged weights: median of the workers"
    return draw_line(found.losses, title, "windows merged", "loss")
