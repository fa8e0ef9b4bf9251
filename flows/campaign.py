"""A whole campaign: from a dataset's source to weights that are handed over."""

from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

from prefect import flow, get_run_logger
from prefect.runtime import flow_run

from blocks import Bucket
from flows.aggregate_gradients import First, aggregate_gradients
from flows.campaign_plan import Campaign, Data, HandOver, LocalWorkers, RentedWorkers, Training
from flows.clean_bucket import clean_bucket
from flows.cool_down import cool_down
from flows.prewarm import FilesRequest, RentedMachines, prewarm
from flows.provision import provision
from flows.release import release
from flows.save_checkpoint import Saved, save_checkpoint
from flows.shard_dataset import shard_dataset
from millrace.campaigns.worker import TrainingPlan, training_program
from millrace.cleanup import Cleaned, Rule, What
from millrace.errors import HeldError, MillraceError, UnavailableError, one_line
from millrace.gradients import AggregatorSettings, FollowSettings, RunSettings
from millrace.keys import CampaignKeys
from millrace.rentals import Patience, RentSettings
from millrace.storage import Right, StoreSpec
from tasks.campaigning import (
    Standing,
    Summary,
    await_workers,
    begin_warming,
    check_cluster,
    check_command,
    check_plan,
    end_warming,
    has_joined,
    is_warming,
    led,
    pin_plan,
    refuse_unsealed,
    report_campaign,
    standing_of,
    summarize,
)
from tasks.merging import Aggregated, begin_chain, check_weights
from tasks.places import check_right, needed, refuse_temporary, spec_of
from tasks.renting import Attended, RentedBy, giving_back, is_out, needed_stand
from tasks.words import format_count
from tasks.working import Workers

_WARMING = timedelta(hours=1)  # that workers wait for their files


@dataclass(frozen=True, slots=True)
class _Site:
    """A campaign, and where it goes on."""

    plan: Campaign
    bucket: Bucket | str
    reads: StoreSpec
    writes: StoreSpec

    @property
    def keys(self) -> CampaignKeys:
        return CampaignKeys(self.plan.name)

    def run(self, training: Training) -> RunSettings:
        """Return the settings that all workers of the run have in common."""
        windows = training.epochs * training.windows
        return RunSettings(run=self.keys.run, windows=windows, **training.rules.model_dump())

    def uids(self, training: Training) -> tuple[str, ...]:
        """Return the names of all workers."""
        return tuple(self.keys.uid(number) for number in range(training.workers))

    def work(self, training: Training) -> TrainingPlan:
        """Return the work of the workers."""
        machines = training.machines
        local = isinstance(machines, LocalWorkers)
        return TrainingPlan(
            campaign=self.plan.name,
            workers=training.workers,
            run=self.run(training),
            command=training.command,
            restarts=training.restarts,
            epoch=training.windows,
            cooldown=training.cooldown,
            dataset=self.plan.data.dataset if self.plan.data else None,
            root=machines.root if local else Path("data"),
            warm=_WARMING if not local and machines.warm else None,
        )

    def standing(self, training: Training) -> Standing:
        """Return the progress of the training."""
        return standing_of(self.writes, self.run(training), self.keys.job, training.epochs)


def run_name() -> str:
    """``campaign-NAME``, for the list of runs."""
    parameters: dict[str, Any] = flow_run.parameters or {}
    plan = parameters.get("plan")
    name = plan.get("name") if isinstance(plan, dict) else getattr(plan, "name", None)
    return f"campaign-{name}"


def rented(parameters: dict[str, Any]) -> RentedBy | None:
    """Return the rental that such a run uses."""
    plan: Campaign = parameters["plan"]
    machines = plan.training.machines if plan.training else None
    if not isinstance(machines, RentedWorkers):
        return None
    return plan.name, plan.bucket, machines.vast


@flow(
    name="campaign",
    flow_run_name=run_name,
    on_crashed=[giving_back(rented)],
    on_cancellation=[giving_back(rented)],
)
def campaign(plan: Campaign) -> Summary:
    """Shard, rent, warm, train, give back, hand over, clean: each the flow that also runs alone.

    Killed or cancelled at any moment, start it again: what is done is found, and the rest goes on.
    Machines go back whatever happens.

    Args:
        plan: Plan of the campaign. A part that is left out is not done.
    """
    began = monotonic()
    site = _site(plan)
    check_right(site.bucket, Right.WRITE, plan.name)
    try:
        with led(site.writes, plan.name):
            _work(site)
        deleted = _clean(site)  # now that nobody leads it: what is led is protected
    except MillraceError as error:
        with suppress(MillraceError):  # what has ended it says more
            report_campaign(_summary(site, monotonic() - began), one_line(error))
        raise
    found = replace(_summary(site, monotonic() - began), deleted=deleted)
    report_campaign(found)
    return found


def _work(site: _Site) -> None:
    """All that makes something."""
    plan = site.plan
    if plan.training is not None:
        _check_training(site, plan.training)
    if plan.data is not None:
        _shard(site, plan.data)
    if plan.training is not None:
        _train(site, plan.training)
        if plan.hand_over is not None:
            _hand_over(site, plan.training, plan.hand_over)


def _site(plan: Campaign) -> _Site:
    if plan.training is not None and isinstance(plan.training.machines, LocalWorkers):
        refuse_temporary(Path(plan.training.machines.folder))
    bucket = needed(plan.bucket)
    return _Site(plan, bucket, spec_of(bucket, Right.READ), spec_of(bucket, Right.WRITE))


def _check_training(site: _Site, training: Training) -> None:
    """Check what can be known of a training before anything is made or rented for it."""
    check_plan(site.writes, site.work(training))
    if site.standing(training).window < 0:
        first = _first(site, training)
        check_weights(first.beginning(), first.store())
    machines = training.machines
    local = isinstance(machines, LocalWorkers)
    check_command(training.command, Path(machines.folder) if local else machines)
    if training.follow.ray is not None:
        check_cluster(training.follow.ray)


def _shard(site: _Site, data: Data) -> None:
    """Before anything is rented: machines that wait for a dataset cost what they cost."""
    if data.source is None:
        refuse_unsealed(site.reads, data.dataset)
    else:
        shard_dataset(data.dataset, data.source, site.bucket, data.cut, data.run)


def _train(site: _Site, training: Training) -> None:
    """Train what is not trained yet, with as many workers as there are to be."""
    pin_plan(site.writes, site.work(training))
    stands, last = site.standing(training), training.epochs - 1
    if stands.window >= training.epochs * training.windows and last in stands.ended:
        if isinstance(training.machines, RentedWorkers) and is_out(site.writes, site.plan.name):
            release(site.plan.name, site.bucket, training.machines.vast)
        return
    with _crew(site, training) as crew:
        if stands.window < 1:
            _await_workers(site, training, crew)
        for epoch in range(training.epochs):
            _train_epoch(site, training, epoch, crew)
        crew.finish(_cooling(training))


def _await_workers(site: _Site, training: Training, crew: Attended | Workers) -> None:
    """Begin the run, and open no window before workers have joined it."""
    uids = site.uids(training)
    begin_chain(
        AggregatorSettings(
            run=site.run(training),
            store=site.writes,
            workers=uids,
            begin=_first(site, training).beginning(),
            **training.follow.model_dump(),
        )
    )
    await_workers(site.reads, site.run(training), crew, uids, training.arrival)


def _first(site: _Site, training: Training) -> First:
    """Return the checkpoint whose weights the run begins with, as the aggregator takes it."""
    first = training.first
    place = site.bucket if first.bucket is None else needed(first.bucket)
    return First(**_place(place), job=first.job, step=first.step, tensors=first.tensors)


def _train_epoch(site: _Site, training: Training, epoch: int, crew: Attended | Workers) -> None:
    """Merge the windows of an epoch, and see it end."""
    end = (epoch + 1) * training.windows
    stands = site.standing(training)
    last, alone = stands.window, 0
    while last < end:
        crew.refuse()
        done = _aggregate(site, training, end)
        # It ends before its time after a window that nobody's gradient was taken in.
        alone = alone + 1 if done.windows == 1 else 1
        last = done.last
        if last < end and alone >= training.follow.idle:
            crew.refuse()
            raise UnavailableError(
                f"In {format_count(alone, 'window')} on end nobody's gradient was taken, and "
                f"{last} of "
                f"{end} windows are merged: see what the workers say."
            )
    if epoch in stands.ended or stands.window > end:
        return
    try:
        cool_down(
            site.bucket,
            site.keys.job,
            epoch,
            patience=_cooling(training),
            members=list(site.uids(training)),
        )
    except UnavailableError as error:
        get_run_logger().warning("The training goes on without: %s", one_line(error))


def _aggregate(site: _Site, training: Training, end: int) -> Aggregated:
    """Merge windows up to one, or to one in which nobody's gradient is taken."""
    care = FollowSettings(**{**training.follow.model_dump(), "until": end, "idle": 1})
    done = aggregate_gradients(
        site.bucket,
        site.run(training),
        list(site.uids(training)),
        first=_first(site, training),
        care=care,
    )
    if done is None:
        raise HeldError(f"{site.keys.run} is aggregated by another process, which lives.")
    return done


def _cooling(training: Training) -> timedelta:
    """Return the longest time that the end of an epoch may take."""
    cooldown = training.cooldown
    return cooldown.time * (cooldown.extensions + 2) + timedelta(minutes=1)


@contextmanager
def _crew(site: _Site, training: Training) -> Generator[Attended | Workers]:
    """Yield the workers; they are stopped when the block ends."""
    machines = training.machines
    if isinstance(machines, LocalWorkers):
        with Workers(site.work(training), site.reads, site.writes, Path(machines.folder)) as crew:
            yield crew
        return
    with _rented(site, training, machines) as crew:
        yield crew


@contextmanager
def _rented(site: _Site, training: Training, machines: RentedWorkers) -> Generator[Attended]:
    """Rented machines that train: owned from the first to the last, given back whatever happens."""
    name, plan = site.plan.name, site.work(training)
    stand = needed_stand(site.bucket, machines.vast)
    program, reach = training_program(plan, site.writes, machines)
    patience = Patience.model_validate({f: getattr(machines, f) for f in Patience.model_fields})
    settings = RentSettings(
        name=name,
        store=stand.store,
        account=stand.account,
        request=machines.request,
        program=program,
        count=training.workers,
        reach=reach,
        role_arn=machines.role_arn,
        **patience.model_dump(),
    )
    if plan.warm is not None and not is_out(site.writes, name):  # those that are out train
        begin_warming(site.writes, name)
    with Attended(settings, lambda: has_joined(site.reads, plan.run, site.uids(training))) as crew:
        provision(
            name, site.bucket, machines.vast, machines.request, program, training.workers,
            list(reach), machines.role_arn, patience, dry_run=False,
        )  # fmt: skip
        if plan.dataset is not None and is_warming(site.writes, name):
            _warm(site, plan.dataset, machines)
        yield crew
    release(name, site.bucket, machines.vast)


def _warm(site: _Site, dataset: str, machines: RentedWorkers) -> None:
    """Bring the dataset to all machines. What is not brought, they fetch."""
    try:
        prewarm(
            [FilesRequest(**_place(site.bucket), dataset=dataset)],
            "/",
            RentedMachines(rental=site.plan.name, bucket=site.bucket, vast=machines.vast),
        )
    except MillraceError as error:
        get_run_logger().warning("Workers read the store themselves: %s", one_line(error))
    end_warming(site.writes, site.plan.name)


def _hand_over(site: _Site, training: Training, wanted: HandOver) -> None:
    """Bring the newest weights that the chain proves to where they are wanted."""
    saved = Saved(**_place(site.bucket), job=site.run(training).chain.job)
    bucket = None if wanted.bucket is None else needed(wanted.bucket)
    save_checkpoint(saved, wanted.job, bucket, wanted.hub)


def _clean(site: _Site) -> int:
    """Delete what is not needed any more; how many objects went."""
    rules = site.plan.clean
    if rules is None:
        rules = [Rule(what=(What.GRADIENTS,), older_than=timedelta(0), name=site.keys.run)]
    if not rules:
        return 0
    done = clean_bucket(site.bucket, rules, dry_run=False)
    return done.deleted if isinstance(done, Cleaned) else 0


def _summary(site: _Site, seconds: float) -> Summary:
    plan, training = site.plan, site.plan.training
    found = summarize(
        site.reads,
        plan.name,
        dataset=plan.data.dataset if plan.data else None,
        run=site.run(training) if training else None,
        workers=training.workers if training else 0,
        epochs=training.epochs if training else 0,
    )
    return replace(found, seconds=round(seconds, 1))


def _place(place: Bucket | str) -> dict[str, Any]:
    """Return a bucket, as `tasks.places.InputLocation` names it."""
    return {"bucket": place} if isinstance(place, Bucket) else {"url": place}
