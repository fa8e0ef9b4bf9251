"""A whole campaign: from a dataset's source to published weights."""

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
from flows.aggregate_gradients import InitialWeightsInput, aggregate_gradients
from flows.campaign_plan import (
    CampaignPlan,
    DataSettings,
    LocalWorkers,
    PublishSettings,
    RentedWorkers,
    TrainingSettings,
)
from flows.clean_bucket import clean_bucket
from flows.cooldown import run_cooldown
from flows.prewarm import FilesRequest, RentedMachines, prewarm
from flows.release_machines import release_machines
from flows.rent_machines import RentalOptions, rent_machines
from flows.save_checkpoint import CheckpointInput, save_checkpoint
from flows.shard_dataset import shard_dataset
from millrace.campaigns.worker import TrainingPlan, make_training_program
from millrace.cleanup import CleanupKind, CleanupResult, Rule
from millrace.errors import HeldError, MillraceError, UnavailableError, format_error
from millrace.gradients import AggregatorSettings, FollowSettings, RunSettings
from millrace.keys import CampaignKeys
from millrace.rentals import RentalSettings, RentalTimeouts
from millrace.storage import Right, StoreSpec
from tasks.campaigning import (
    CampaignSummary,
    TrainingProgress,
    await_workers,
    begin_warming,
    check_cluster,
    check_command,
    check_dataset_complete,
    check_plan,
    end_warming,
    has_joined_worker,
    hold_campaign_lease,
    is_warming,
    pin_plan,
    read_training_progress,
    report_campaign,
    summarize_campaign,
)
from tasks.formatting import format_count
from tasks.forms import draw_form
from tasks.local_workers import LocalWorkerProcesses
from tasks.locations import check_right, make_store_spec, refuse_temporary, require_location
from tasks.merging import AggregationResult, begin_chain, check_weights
from tasks.renting import (
    RentalReference,
    RentalSupervisor,
    has_unreturned_machines,
    make_release_hook,
    require_ledger,
)

_WARM_TIMEOUT = timedelta(hours=1)  # longest wait of workers for their files


@dataclass(frozen=True, slots=True)
class _CampaignContext:
    """The plan of a campaign, its bucket, and the stores to read and to write."""

    plan: CampaignPlan
    bucket: Bucket | str
    read_spec: StoreSpec
    write_spec: StoreSpec

    @property
    def keys(self) -> CampaignKeys:
        return CampaignKeys(self.plan.name)

    def make_run_settings(self, training: TrainingSettings) -> RunSettings:
        """Return the settings that all workers of the run share."""
        windows = training.epochs * training.windows_per_epoch
        return RunSettings(run=self.keys.run, windows=windows, **training.run.model_dump())

    def list_uids(self, training: TrainingSettings) -> tuple[str, ...]:
        """Return the names of all workers."""
        return tuple(self.keys.uid(number) for number in range(training.workers))

    def make_training_plan(self, training: TrainingSettings) -> TrainingPlan:
        """Return the plan that the workers carry out."""
        machines = training.machines
        local = isinstance(machines, LocalWorkers)
        return TrainingPlan(
            campaign=self.plan.name,
            workers=training.workers,
            run=self.make_run_settings(training),
            command=training.command,
            restarts=training.restarts,
            windows_per_epoch=training.windows_per_epoch,
            cooldown=training.cooldown,
            dataset=self.plan.data.dataset if self.plan.data else None,
            data_folder=machines.data_folder if local else Path("data"),
            prewarm_timeout=_WARM_TIMEOUT if not local and machines.prewarm else None,
        )

    def read_progress(self, training: TrainingSettings) -> TrainingProgress:
        """Return the progress of the training."""
        return read_training_progress(
            self.write_spec, self.make_run_settings(training), self.keys.job, training.epochs
        )


def make_run_name() -> str:
    """Return ``campaign-NAME``, for the list of runs."""
    parameters: dict[str, Any] = flow_run.parameters or {}
    plan = parameters.get("plan")
    name = plan.get("name") if isinstance(plan, dict) else getattr(plan, "name", None)
    return f"campaign-{name}"


def find_rental(parameters: dict[str, Any]) -> RentalReference | None:
    """Return the rental of a run with these parameters; None if the run rents nothing."""
    plan: CampaignPlan = parameters["plan"]
    machines = plan.training.machines if plan.training else None
    if not isinstance(machines, RentedWorkers):
        return None
    return plan.name, plan.bucket, machines.vast


@draw_form
@flow(
    name="campaign",
    flow_run_name=make_run_name,
    on_crashed=[make_release_hook(find_rental)],
    on_cancellation=[make_release_hook(find_rental)],
)
def run_campaign(plan: CampaignPlan) -> CampaignSummary:
    """Shard, rent, prewarm, train, release, publish and clean, each by the flow of that name.

    A campaign that was killed or cancelled is resumed by starting it again. It finds the finished
    stages and continues with the rest. Machines are released in every case.

    Args:
        plan: Plan of the campaign. A stage that is left out is skipped.
    """
    began = monotonic()
    context = _make_context(plan)
    check_right(context.bucket, Right.WRITE, plan.name)
    try:
        with hold_campaign_lease(context.write_spec, plan.name):
            _run_stages(context)
        deleted = _clean(context)  # after the lease: a held lease protects the campaign's objects
    except MillraceError as error:
        with suppress(MillraceError):  # the first error says more
            report_campaign(_summarize(context, monotonic() - began), format_error(error))
        raise
    found = replace(_summarize(context, monotonic() - began), deleted_objects=deleted)
    report_campaign(found)
    return found


def _run_stages(context: _CampaignContext) -> None:
    """Run all stages but the cleaning."""
    plan = context.plan
    if plan.training is not None:
        _check_training(context, plan.training)
    if plan.data is not None:
        _shard(context, plan.data)
    if plan.training is not None:
        _train(context, plan.training)
        if plan.publish is not None:
            _publish_weights(context, plan.training, plan.publish)


def _make_context(plan: CampaignPlan) -> _CampaignContext:
    if plan.training is not None and isinstance(plan.training.machines, LocalWorkers):
        refuse_temporary(Path(plan.training.machines.folder))
    bucket = require_location(plan.bucket)
    return _CampaignContext(
        plan, bucket, make_store_spec(bucket, Right.READ), make_store_spec(bucket, Right.WRITE)
    )


def _check_training(context: _CampaignContext, training: TrainingSettings) -> None:
    """Check a training before anything is created or rented for it."""
    check_plan(context.write_spec, context.make_training_plan(training))
    if context.read_progress(training).last_window < 0:
        initial_weights = _make_initial_weights(context, training)
        check_weights(initial_weights.make_initial_weights(), initial_weights.make_spec())
    machines = training.machines
    local = isinstance(machines, LocalWorkers)
    check_command(training.command, Path(machines.folder) if local else machines)
    if training.aggregation.ray is not None:
        check_cluster(training.aggregation.ray)


def _shard(context: _CampaignContext, data: DataSettings) -> None:
    """Shard the dataset before machines are rented: waiting machines cost money."""
    if data.source is None:
        check_dataset_complete(context.read_spec, data.dataset)
    else:
        shard_dataset(data.dataset, data.source, context.bucket, data.sharding, data.execution)


def _train(context: _CampaignContext, training: TrainingSettings) -> None:
    """Train the epochs that have not ended yet."""
    pin_plan(context.write_spec, context.make_training_plan(training))
    progress, last = context.read_progress(training), training.epochs - 1
    if (
        progress.last_window >= training.epochs * training.windows_per_epoch
        and last in progress.ended_epochs
    ):
        if isinstance(training.machines, RentedWorkers) and has_unreturned_machines(
            context.write_spec, context.plan.name
        ):
            release_machines(context.plan.name, context.bucket, training.machines.vast)
        return
    with _run_workers(context, training) as workers:
        if progress.last_window < 1:
            _begin_run(context, training, workers)
        for epoch in range(training.epochs):
            _train_epoch(context, training, epoch, workers)
        workers.wait_until_done(_compute_cooldown_timeout(training))


def _begin_run(
    context: _CampaignContext,
    training: TrainingSettings,
    workers: RentalSupervisor | LocalWorkerProcesses,
) -> None:
    """Begin the run, and wait for its workers before the first window opens."""
    uids = context.list_uids(training)
    begin_chain(
        AggregatorSettings(
            run=context.make_run_settings(training),
            store=context.write_spec,
            workers=uids,
            initial_weights=_make_initial_weights(context, training).make_initial_weights(),
            **training.aggregation.model_dump(),
        )
    )
    await_workers(
        context.read_spec, context.make_run_settings(training), workers, uids, training.join_timeout
    )


def _make_initial_weights(
    context: _CampaignContext, training: TrainingSettings
) -> InitialWeightsInput:
    """Return the checkpoint with the initial weights, as the aggregator takes it."""
    initial_weights = training.initial_weights
    location = (
        context.bucket
        if initial_weights.bucket is None
        else require_location(initial_weights.bucket)
    )
    return InitialWeightsInput(
        **_make_location_fields(location),
        job=initial_weights.job,
        step=initial_weights.step,
        tensors=initial_weights.tensors,
    )


def _train_epoch(
    context: _CampaignContext,
    training: TrainingSettings,
    epoch: int,
    workers: RentalSupervisor | LocalWorkerProcesses,
) -> None:
    """Merge the windows of an epoch, and end the epoch."""
    end = (epoch + 1) * training.windows_per_epoch
    progress = context.read_progress(training)
    last, idle_windows = progress.last_window, 0
    while last < end:
        workers.raise_failure()
        done = _aggregate(context, training, end)
        # The aggregator ends early after a window in which no gradient was taken.
        idle_windows = idle_windows + 1 if done.windows == 1 else 1
        last = done.last_window
        if last < end and idle_windows >= training.aggregation.idle:
            workers.raise_failure()
            raise UnavailableError(
                f"In {format_count(idle_windows, 'window')} in a row nobody's gradient was taken. "
                f"{last} of {end} windows are merged: see what the workers say."
            )
    if epoch in progress.ended_epochs or progress.last_window > end:
        return
    try:
        run_cooldown(
            context.bucket,
            context.keys.job,
            epoch,
            timeout=_compute_cooldown_timeout(training),
            members=list(context.list_uids(training)),
        )
    except UnavailableError as error:
        get_run_logger().warning(
            "The training goes on without a checkpoint: %s", format_error(error)
        )


def _aggregate(
    context: _CampaignContext, training: TrainingSettings, end: int
) -> AggregationResult:
    """Merge windows up to `end`, or up to a window in which no gradient is taken."""
    aggregation = FollowSettings(**{**training.aggregation.model_dump(), "until": end, "idle": 1})
    done = aggregate_gradients(
        context.bucket,
        context.make_run_settings(training),
        list(context.list_uids(training)),
        initial_weights=_make_initial_weights(context, training),
        aggregation=aggregation,
    )
    if done is None:
        raise HeldError(f"{context.keys.run} is aggregated by another process, which is alive.")
    return done


def _compute_cooldown_timeout(training: TrainingSettings) -> timedelta:
    """Return the longest time that a cooldown may take."""
    cooldown = training.cooldown
    return cooldown.time * (cooldown.extensions + 2) + timedelta(minutes=1)


@contextmanager
def _run_workers(
    context: _CampaignContext, training: TrainingSettings
) -> Generator[RentalSupervisor | LocalWorkerProcesses]:
    """Start the workers, and stop them when the block ends."""
    machines = training.machines
    if isinstance(machines, LocalWorkers):
        with LocalWorkerProcesses(
            context.make_training_plan(training),
            context.read_spec,
            context.write_spec,
            Path(machines.folder),
        ) as workers:
            yield workers
        return
    with _rent_workers(context, training, machines) as workers:
        yield workers


@contextmanager
def _rent_workers(
    context: _CampaignContext, training: TrainingSettings, machines: RentedWorkers
) -> Generator[RentalSupervisor]:
    """Rent machines that train, and release them when the block ends, whatever happens."""
    name, plan = context.plan.name, context.make_training_plan(training)
    ledger = require_ledger(context.bucket, machines.vast)
    program, storage_grants = make_training_program(plan, context.write_spec, machines)
    timeouts = RentalTimeouts.model_validate(
        {f: getattr(machines, f) for f in RentalTimeouts.model_fields}
    )
    options = RentalOptions(
        storage_grants=storage_grants, role_arn=machines.role_arn, timeouts=timeouts
    )
    settings = RentalSettings(
        name=name,
        store=ledger.store,
        account=ledger.account,
        request=machines.request,
        program=program,
        machines=training.workers,
        storage_grants=storage_grants,
        role_arn=machines.role_arn,
        **timeouts.model_dump(),
    )
    if plan.prewarm_timeout is not None and not has_unreturned_machines(
        context.write_spec, name
    ):  # rented machines already train
        begin_warming(context.write_spec, name)
    with RentalSupervisor(
        settings,
        lambda: has_joined_worker(context.read_spec, plan.run, context.list_uids(training)),
    ) as supervisor:
        rent_machines(
            name, context.bucket, machines.vast, machines.request, program, training.workers,
            options, dry_run=False,
        )  # fmt: skip
        if plan.dataset is not None and is_warming(context.write_spec, name):
            _prewarm_machines(context, plan.dataset, machines)
        yield supervisor
    release_machines(name, context.bucket, machines.vast)


def _prewarm_machines(context: _CampaignContext, dataset: str, machines: RentedWorkers) -> None:
    """Copy the dataset to all machines. A machine fetches the shards that it lacks."""
    try:
        prewarm(
            [FilesRequest(**_make_location_fields(context.bucket), dataset=dataset)],
            "/",
            RentedMachines(rental=context.plan.name, bucket=context.bucket, vast=machines.vast),
        )
    except MillraceError as error:
        get_run_logger().warning("Workers read the store themselves: %s", format_error(error))
    end_warming(context.write_spec, context.plan.name)


def _publish_weights(
    context: _CampaignContext, training: TrainingSettings, settings: PublishSettings
) -> None:
    """Copy the newest weights that the chain proves to their destination."""
    saved = CheckpointInput(
        **_make_location_fields(context.bucket), job=context.make_run_settings(training).chain.job
    )
    bucket = None if settings.bucket is None else require_location(settings.bucket)
    save_checkpoint(saved, settings.job, bucket, settings.hub)


def _clean(context: _CampaignContext) -> int:
    """Delete what the rules take, and return the number of deleted objects."""
    rules = context.plan.cleaning_rules
    if rules is None:
        rules = [
            Rule(kinds=(CleanupKind.GRADIENTS,), older_than=timedelta(0), name=context.keys.run)
        ]
    if not rules:
        return 0
    done = clean_bucket(context.bucket, rules, dry_run=False)
    return done.deleted_objects if isinstance(done, CleanupResult) else 0


def _summarize(context: _CampaignContext, seconds: float) -> CampaignSummary:
    plan, training = context.plan, context.plan.training
    found = summarize_campaign(
        context.read_spec,
        plan.name,
        dataset=plan.data.dataset if plan.data else None,
        run=context.make_run_settings(training) if training else None,
        workers=training.workers if training else 0,
        epochs=training.epochs if training else 0,
    )
    return replace(found, seconds=round(seconds, 1))


def _make_location_fields(location: Bucket | str) -> dict[str, Any]:
    """Return the fields of `tasks.locations.InputLocation` for a bucket."""
    return {"bucket": location} if isinstance(location, Bucket) else {"url": location}
