"""A campaign, as Prefect sees it: who leads it, how far it is, and what came of it."""

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
from millrace.campaigns.worker import TrainingPlan, check_here, check_repository, joined, measured
from millrace.checkpoints.cooldown.membership import derive_epoch, read_epoch
from millrace.gradients import ChainLink, RunSettings, WindowRules
from millrace.keys import CampaignKeys, DatasetKeys
from millrace.lease import Heartbeat, HeldLease, Holder, StoreClock, await_lease
from millrace.records import Record, commit_once, fetch, find_changes
from millrace.remote import CodeRepository
from millrace.rentals import attempts_of
from millrace.schemas.checkpoint import EpochRecord
from millrace.schemas.dataset import Manifest
from millrace.storage import Store, StoreSpec, delete, exists, open_store
from tasks.plot import line_plot
from tasks.reports import (
    Markdown,
    bold,
    code,
    document,
    escape,
    picture,
    publish,
    table,
    write,
)
from tasks.retries import PAUSES, passing
from tasks.words import artifact_key, duration, format_count, size

_TTL = timedelta(minutes=1)
_FAULT = 2000  # characters of what ended a campaign: the last lines of a worker are in it
_LOOK = 1.0  # seconds between two looks for workers that join


class Crew(Protocol):
    """The workers of a campaign, wherever they run."""

    @property
    def over(self) -> bool:
        """True if all of them have ended."""
        ...

    def refuse(self) -> None:
        """Raise what has ended them, if something has."""
        ...

    def last_words(self) -> str:
        """Return how they ended, and what was printed last."""
        ...


class Pinned(Record):
    """Record of the settings of a campaign's training that cannot change under its name."""

    record_kind: ClassVar[str] = "campaign-training"

    workers: int
    epoch: int
    run: RunSettings
    dataset: str | None


class Warming(Record):
    """Record that the machines of a campaign wait for their files."""

    record_kind: ClassVar[str] = "campaign-warming"

    campaign: str


@dataclass(frozen=True, slots=True)
class Standing:
    """Progress of a campaign's training, by what is committed.

    Attributes:
        window: The newest that is merged; -1 before the run has begun.
        ended: The epochs that have moved on.
    """

    window: int
    ended: frozenset[int]


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of a campaign so far, by what is committed.

    Attributes:
        name: The campaign's.
        url: Of its store.
        samples: Of its dataset; 0 if it has none, or it is not complete.
        shards: Likewise.
        windows: In which somebody's gradient was merged.
        step: That the weights are at.
        gradients: How many were taken.
        sent: Bytes of them.
        dense: Bytes of the same changes in float32.
        losses: What the median worker says that the weights are worth, by the window before them.
        epochs: That ended, each with the step of its checkpoint; None where it has none.
        machines: That were rented.
        dollars: That they have cost.
        deleted: Objects that were cleaned away by this run.
        seconds: That this run took.
    """

    name: str
    url: str
    samples: int = 0
    shards: int = 0
    windows: int = 0
    step: int = 0
    gradients: int = 0
    sent: int = 0
    dense: int = 0
    losses: Mapping[int, float] = field(default_factory=dict[int, float])
    epochs: Mapping[int, int | None] = field(default_factory=dict[int, int | None])
    machines: int = 0
    dollars: float = 0.0
    deleted: int = 0
    seconds: float = 0.0


@contextmanager
def led(place: StoreSpec, name: str) -> Generator[None]:
    """Lead a campaign while the block lasts. Who was killed is followed.

    Raises:
        HeldError: Somebody leads it, and lives.
    """
    store, keys, holder = open_store(place), CampaignKeys(name), Holder.this_process()
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


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def refuse_unsealed(place: StoreSpec, dataset: str) -> None:
    """Refuse a dataset that is to be there, and is not complete."""
    if not exists(open_store(place, make_folder=False), DatasetKeys(dataset).manifest):
        raise errors.NotFoundError(
            f"{dataset} is not complete at {place.url}: give the campaign its source, or shard it."
        )


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def standing_of(place: StoreSpec, run: RunSettings, job: str, epochs: int) -> Standing:
    """Return the progress of the training."""
    store = open_store(place)
    ended = {epoch for epoch in range(epochs) if _end_of(store, job, epoch) is not None}
    return Standing(gradients.find_newest_window(store, run.chain), frozenset(ended))


def _end_of(store: Store, job: str, epoch: int) -> EpochRecord | None:
    """Return how an epoch has ended, by its record, or by its votes where that is damaged."""
    try:
        return read_epoch(store, job, epoch)
    except errors.NotFoundError:
        return None
    except errors.CorruptError:
        return derive_epoch(store, job, epoch)


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def check_plan(place: StoreSpec, plan: TrainingPlan) -> None:
    """Refuse to go on with another training than was begun, before anything is made or rented.

    Raises:
        ConflictError: The plan differs in what cannot change; the message names the values.
    """
    with suppress(errors.NotFoundError):  # nothing is pinned yet
        store = open_store(place, make_folder=False)
        _refuse_changes(plan, fetch(store, CampaignKeys(plan.campaign).plan, Pinned))


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def pin_plan(place: StoreSpec, plan: TrainingPlan) -> None:
    """Commit what of a training cannot change, or refuse another one than was begun.

    Raises:
        ConflictError: The plan differs in what cannot change; the message names the values.
    """
    key = CampaignKeys(plan.campaign).plan
    _refuse_changes(plan, commit_once(open_store(place), key, _pinned(plan)).record)


def _pinned(plan: TrainingPlan) -> Pinned:
    return Pinned(**{name: getattr(plan, name) for name in Pinned.model_fields})


def _refuse_changes(plan: TrainingPlan, pinned: Pinned) -> None:
    found = find_changes(pinned, _pinned(plan))
    free = [f"run.{name}" for name in WindowRules.model_fields]
    said = [
        f"{_field(path)} was {_value(old)}, and is {_value(new)} now"
        for path, (old, new) in found.items()
        if not path.startswith(tuple(free))
    ]
    if said:
        raise errors.ConflictError(
            f"{plan.campaign} was begun with another plan: {'; '.join(said)}. Go on as it was, "
            "or give this one another name, and let it begin with the weights of that."
        )


def _field(path: str) -> str:
    """Return what a field of a pinned plan is called in the plan of a campaign."""
    known = {
        "workers": "training.workers",
        "epoch": "training.windows (of each epoch)",
        "run.windows": "the number of all windows (training.epochs x training.windows)",
        "dataset": "data.dataset",
    }
    return known.get(path) or f"training.rules.{path.removeprefix('run.')}"


def _value(value: Any) -> str:
    return "nothing" if value is None else str(value)


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def check_command(command: tuple[str, ...], where: Path | CodeRepository) -> None:
    """Refuse a training command that certainly cannot be run, before anything is made or rented.

    Args:
        command: Program and arguments.
        where: The folder that local workers run in, or the repository that machines clone.

    Raises:
        ConfigurationError: The program, the file or the module does not exist.
    """
    if isinstance(where, Path):
        check_here(command, where)
    else:
        check_repository(command, where)


@task(cache_policy=NO_CACHE)
def check_cluster(address: str) -> None:
    """Refuse a Ray cluster that cannot be reached, before anything is made or rented.

    Raises:
        ConfigurationError: There is no such cluster, or Ray is not installed here.
    """
    cluster.check_reachable(address)


def has_joined(place: StoreSpec, run: RunSettings, uids: Sequence[str]) -> bool:
    """Decide whether any worker has ever joined a run."""
    try:
        return bool(joined(open_store(place, make_folder=False), run, uids))
    except errors.NotFoundError:
        return False  # the run has not begun


@task(cache_policy=NO_CACHE)
def await_workers(
    place: StoreSpec, run: RunSettings, crew: Crew, uids: Sequence[str], patience: timedelta
) -> int:
    """Wait until enough workers have joined a run for its first window to open.

    Enough are those of the quorum. When the time is up, one is enough.

    Args:
        place: The campaign's store, to be read.
        run: The run, which has begun.
        crew: The workers' processes or machines.
        uids: The workers' names.
        patience: How long to wait.

    Returns:
        How many have joined.

    Raises:
        UnavailableError: No worker has joined in this time.
        WorkerError, MachineError: The workers have failed, or have ended.
    """
    store = open_store(place, make_folder=False)
    deadline = time.monotonic() + patience.total_seconds()
    enough = min(max(1, run.gather.quorum), len(uids))
    while True:
        found = len(joined(store, run, uids))
        if found >= enough:
            return found
        crew.refuse()
        if crew.over:
            raise errors.WorkerError(
                f"All workers have ended, and none has joined the run. {crew.last_words()}"
            )
        if time.monotonic() > deadline:
            if found:
                return found
            raise errors.UnavailableError(
                f"No worker has joined {run.run} in {patience}: see the lines that they print. "
                "Let the script call `Worker.join` and `begin`, or raise `training.arrival`."
            )
        time.sleep(_LOOK)


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def begin_warming(place: StoreSpec, name: str) -> None:
    """Have machines that come up wait for their files."""
    commit_once(open_store(place), CampaignKeys(name).warming, Warming(campaign=name))


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def is_warming(place: StoreSpec, name: str) -> bool:
    """Tell whether machines wait for their files."""
    return exists(open_store(place), CampaignKeys(name).warming)


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def end_warming(place: StoreSpec, name: str) -> None:
    """Have machines wait no longer."""
    delete(open_store(place), [CampaignKeys(name).warming])


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def summarize(
    place: StoreSpec,
    name: str,
    *,
    dataset: str | None,
    run: RunSettings | None,
    workers: int,
    epochs: int,
) -> Summary:
    """Summarize a campaign so far.

    Args:
        place: The campaign's store, to be read.
        name: The campaign's.
        dataset: What it trains on, if anything.
        run: Of its training, if there is one.
        workers: How many are heard.
        epochs: How many there are to be.
    """
    store, keys = open_store(place, make_folder=False), CampaignKeys(name)
    found = Summary(name=name, url=store.url)
    if dataset is not None and exists(store, DatasetKeys(dataset).manifest):
        manifest = fetch(store, DatasetKeys(dataset).manifest, Manifest)
        samples = sum(manifest.samples.values())
        found = replace(found, samples=samples, shards=len(manifest.shards))
    last = -1 if run is None else gradients.find_newest_window(store, run.chain)
    if run is not None and last >= 0:
        found = _trained(found, list(gradients.iterate_links(store, run.chain)))
        uids = [keys.uid(number) for number in range(workers)]
        said = measured(store, run.gradients, uids, "loss", last=last + 1)
        losses = {window - 1: value for window, value in said.items()}
        ends = {epoch: _end_of(store, keys.job, epoch) for epoch in range(epochs)}
        steps = {epoch: end.step if end.root else None for epoch, end in ends.items() if end}
        found = replace(found, losses=losses, epochs=steps)
    now = datetime.now(UTC)
    rented = [one for one in attempts_of(store, name) if one.contract is not None]
    return replace(found, machines=len(rented), dollars=sum(one.cost(now) for one in rented))


def _trained(found: Summary, windows: Sequence[ChainLink]) -> Summary:
    if not windows:
        return found
    taken = [one for link in windows for one in link.taken.values()]
    values = sum(math.prod(shape) for shape in windows[-1].shapes)
    return replace(
        found,
        windows=sum(bool(link.taken) for link in windows),
        step=windows[-1].step,
        gradients=len(taken),
        sent=sum(one.size for one in taken),
        dense=4 * values * len(taken),
    )


@task(cache_policy=NO_CACHE)
def report_campaign(found: Summary, fault: str = "") -> None:
    """Leave a report that a person wants to read."""
    publish(
        describe(found, fault),
        key=artifact_key("campaign", found.name),
        description="Result of the campaign so far",
    )


def describe(found: Summary, fault: str = "", *, with_picture: bool = True) -> Markdown:
    """Return the report.

    Args:
        found: What is committed.
        fault: What ended the campaign before its time; empty if nothing did.
        with_picture: Whether the losses are drawn.
    """
    drawn = Markdown()
    if found.losses and with_picture:
        drawn = picture(_picture(found), "the loss over the windows")
    return document(_headline(found, fault), table(("", ""), list(_rows(found).items())), drawn)


def _headline(found: Summary, fault: str) -> Markdown:
    what = write("{}, in {}", bold(found.name), code(found.url))
    if fault:
        again = "Start it again: it goes on from here."
        return write("{}, **is not over**: {} {}", what, escape(fault, _FAULT), again)
    trained = f": {format_count(found.windows, 'window')} trained" if found.windows else " is done"
    losses = [found.losses[window] for window in sorted(found.losses)]
    fell = f", the loss from {losses[0]:.3f} to {losses[-1]:.3f}" if len(losses) > 1 else ""
    paid = f", for ${found.dollars:.2f}" if found.machines else ""
    return write("{}{}{}{}, in {}.", what, trained, fell, paid, duration(found.seconds))


def _rows(found: Summary) -> dict[str, str]:
    """Return what there is, by what it is; a stage that was left out has no row."""
    rows: dict[str, str] = {}
    if found.shards:
        rows["Dataset"] = (
            f"{format_count(found.samples, 'sample')} in {format_count(found.shards, 'shard')}"
        )
    if found.windows:
        rows["Windows"] = f"{found.windows:,}, up to step {found.step:,}"
    if found.gradients:
        smaller = f"{found.dense / found.sent:.0f} times smaller"
        sent = f"{size(found.sent)} instead of {size(found.dense)}, {smaller}"
        rows["Gradients"] = f"{found.gradients:,}: {sent}"
    if found.epochs:
        rows["Checkpoints"] = ", ".join(
            f"epoch {epoch}: {f'step {step:,}' if step is not None else 'none'}"
            for epoch, step in found.epochs.items()
        )
    if found.machines:
        rows["Machines"] = f"{found.machines:,} rented, ${found.dollars:.2f}"
    if found.deleted:
        rows["Cleaned"] = format_count(found.deleted, "object")
    return rows


def _picture(found: Summary) -> str:
    title = "Loss of the merged weights, as the median worker says"
    return line_plot(found.losses, title, "windows merged")
