"""Epochs of a campaign's training: their windows are merged, and each ends before the next."""

from flows.aggregate_gradients import aggregate_gradients
from flows.campaign_plan import CampaignPlan
from flows.cooldown import run_cooldown
from millrace import campaigns
from millrace.campaigns import (
    CampaignLease,
    CampaignWorkers,
    MergedWindows,
    RunAggregator,
    Training,
)
from millrace.errors import UnavailableError
from tasks import campaign_tasks
from tasks.retries import tolerate

_COOLDOWNS = 2  # runs of `cooldown` for an epoch: the second after an outage of the store


def run_epoch(
    plan: CampaignPlan,
    training: Training,
    epoch: int,
    workers: CampaignWorkers,
    lease: CampaignLease,
) -> None:
    """Merge the windows of an epoch, and end the epoch.

    Raises:
        HeldError: Another process has taken over the campaign.
    """
    campaigns.merge_epoch(training, epoch, workers, make_aggregator(plan, training, lease))
    lease.refuse_if_lost()
    if campaign_tasks.needs_cooldown(training, epoch):
        end_epoch(plan, training, epoch)


def end_epoch(plan: CampaignPlan, training: Training, epoch: int) -> None:
    """End an epoch, with a checkpoint or without one.

    Workers wait for this before they begin a window of the next epoch.

    Raises:
        UnavailableError: The epoch has not ended: the store did not answer.
    """
    job, timeout = training.epoch_job, training.cooldown_timeout
    for _ in range(_COOLDOWNS):
        with tolerate(UnavailableError, f"Epoch {epoch} has no checkpoint"):
            run_cooldown(plan.bucket, job, epoch, timeout=timeout, members=training.uids)
        if campaign_tasks.has_epoch_ended(training, epoch):
            return
    raise UnavailableError(
        f"Epoch {epoch} of {job} has not ended, and no worker goes on before: see the runs of "
        "`cooldown` for the reason, and start the campaign again."
    )


def make_aggregator(plan: CampaignPlan, training: Training, lease: CampaignLease) -> RunAggregator:
    """Return a function that runs an aggregator of the training, while this process leads."""

    def aggregate(last_window: int) -> MergedWindows | None:
        lease.refuse_if_lost()
        return aggregate_gradients(
            plan.bucket,
            training.run,
            training.uids,
            initial_weights=plan.training and plan.training.initial_weights,
            until=last_window,
            aggregation=training.aggregation_until_idle,
        )

    return aggregate
