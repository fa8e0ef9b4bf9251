"""A whole campaign: from a dataset's source to published weights."""

from prefect import flow, get_run_logger

from flows.campaign_epochs import make_aggregator, run_epoch
from flows.campaign_machines import rent_workers
from flows.campaign_plan import CampaignPlan, PublishSettings, hooks, make_run_name
from flows.clean_bucket import clean_bucket
from flows.release_machines import release_machines
from flows.save_checkpoint import CheckpointInput, save_checkpoint
from flows.shard_dataset import shard_dataset
from millrace import campaigns
from millrace.campaigns import Campaign, CampaignLease, CampaignSummary, PublishedWeights, Training
from millrace.checkpoints import open_destination
from millrace.errors import CorruptError, format_error
from millrace.storage import Right
from tasks import campaign_tasks
from tasks.forms import draw_form
from tasks.locations import check_right
from tasks.merging import ensure_run_begun


@draw_form
@flow(name="campaign", flow_run_name=make_run_name, on_crashed=hooks, on_cancellation=hooks)
def run_campaign(plan: CampaignPlan) -> CampaignSummary:
    """Run all stages of a campaign, by the flows that also run alone.

    Another start resumes a campaign that was killed or cancelled, with its open stages. Machines
    are released in every case but a pause, in which they stay: cancel a campaign instead.

    Args:
        plan: Plan of the campaign. A stage that is left out is skipped.
    """
    plan = plan.resolve_bucket()
    campaign = plan.make_campaign()
    check_right(plan.bucket, Right.WRITE, plan.name)
    # A start that finds the campaign held leaves the report of the other one.
    held = campaigns.hold_campaign_lease(campaign.write_store, plan.name)
    with held as lease, campaign_tasks.report_failure(campaign, lease=lease):
        published = run_stages(plan, campaign, lease)
    with campaign_tasks.report_failure(campaign, published):
        rules = campaign.make_cleaning_rules()  # a held lease protects the campaign's objects
        cleaned = clean_bucket(plan.bucket, rules, dry_run=False) if rules else None
    summary = campaign_tasks.summarize_campaign(campaign, cleaned, published)
    campaign_tasks.report_campaign(summary)
    return summary


def run_stages(
    plan: CampaignPlan, campaign: Campaign, lease: CampaignLease
) -> PublishedWeights | None:
    """Run all stages but the cleaning. No machine waits for another stage: waiting costs money."""
    data, training, publish = plan.data, campaign.training, plan.publish
    if publish is not None:
        publish.check_destination()
    if training is not None:
        campaign_tasks.check_training(training)
        if publish is not None:
            campaign_tasks.check_publication(training, publish.make_spec(), publish.job)
        if campaign_tasks.is_dataset_settled(training):
            data = None
    if data is not None and data.source is not None:
        settings = (data.sharding, data.execution)
        shard_dataset(data.dataset, data.source, plan.bucket, *settings, machines=data.machines)
    elif data is not None:
        campaign_tasks.check_dataset_complete(campaign.read_store, data.dataset)
    if training is not None:
        train(plan, training, lease)
        campaign_tasks.check_gradients_taken(training)
        if publish is not None:
            return publish_weights(plan, training, publish, lease)
    return None


def train(plan: CampaignPlan, training: Training, lease: CampaignLease) -> None:
    """Train the epochs that have not ended yet."""
    lease.refuse_if_lost()  # the sharding may have taken long
    campaign_tasks.commit_training(training)
    progress, rental = campaign_tasks.read_training_progress(training), plan.rental
    if progress.has_ended:
        if rental is not None and campaign_tasks.has_unreleased_machines(training):
            release_machines(*rental)
        return
    if not progress.has_begun:  # before machines cost money, which then get its weights
        ensure_run_begun(training.aggregator_settings)
    group = rent_workers(training, rental) if rental else campaign_tasks.run_local_workers(training)
    with group as workers:
        campaign_tasks.await_workers(training, workers)
        for epoch in progress.find_open_epochs(training):
            run_epoch(plan, training, epoch, workers, lease)
        workers.wait_until_done(training.cooldown_timeout)


def publish_weights(
    plan: CampaignPlan, training: Training, publish: PublishSettings, lease: CampaignLease
) -> PublishedWeights:
    """Publish the weights after the last window; damaged ones are made again from the chain."""
    lease.refuse_if_lost()
    aggregate = make_aggregator(plan, training, lease)
    step = campaigns.ensure_final_weights_saved(training, aggregate)
    source = CheckpointInput(bucket=plan.bucket, job=training.weights_job, step=step)
    try:
        save_checkpoint(source, publish.job, publish.bucket, publish.hub)
    except CorruptError as error:
        get_run_logger().warning("The final weights are made again: %s", format_error(error))
        campaigns.repair_final_weights(training, aggregate)
        save_checkpoint(source, publish.job, publish.bucket, publish.hub)
    destination = open_destination(publish.make_spec(), make_folder=False)
    return PublishedWeights(destination.url, publish.job, step)
