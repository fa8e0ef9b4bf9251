"""Tasks of a campaign: its checks, its progress, its workers and its report."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from millrace import campaigns
from millrace.campaigns import (
    Campaign,
    CampaignLease,
    CampaignSummary,
    LocalWorkerProcesses,
    PublishedWeights,
    Training,
)
from millrace.campaigns.progress_events import (
    LocalWorkerFailed,
    LocalWorkerLate,
    LocalWorkerPrinted,
)
from millrace.errors import HeldError, MillraceError, format_error
from millrace.progress import Event
from millrace.rentals import LedgerSettings, RentalSupervisor
from tasks.formatting import format_count, format_duration, format_size, make_artifact_key
from tasks.plot import draw_line
from tasks.renting import make_supervisor
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
from tasks.retries import retried_task
from tasks.stages import StageRun, format_stages, list_stage_runs

_MAX_FAULT_LENGTH = 2000  # characters of an error, which may contain a worker's last lines

check_training = retried_task(campaigns.check_training)
check_publication = retried_task(campaigns.check_publication)
is_dataset_settled = retried_task(campaigns.is_dataset_settled)
check_dataset_complete = retried_task(campaigns.check_dataset_complete)
commit_training = retried_task(campaigns.commit_training)
read_training_progress = retried_task(campaigns.read_training_progress)
needs_cooldown = retried_task(campaigns.needs_cooldown)
check_gradients_taken = retried_task(campaigns.check_gradients_taken)
has_epoch_ended = retried_task(campaigns.has_epoch_ended)
has_unreleased_machines = retried_task(campaigns.has_unreleased_machines)
await_workers = task(cache_policy=NO_CACHE)(campaigns.await_workers)
commit_prewarm_marker = retried_task(campaigns.commit_prewarm_marker)
delete_prewarm_marker = retried_task(campaigns.delete_prewarm_marker)
summarize_campaign = retried_task(campaigns.summarize_campaign)


def run_local_workers(training: Training) -> LocalWorkerProcesses:
    """Return a context manager that runs the workers here, and logs their output."""
    log = get_run_logger()

    def handle_event(event: Event) -> None:
        match event:
            case LocalWorkerPrinted():
                log.info("%s| %s", event.uid, event.text)
            case LocalWorkerLate():
                log.warning("%s has not ended in %s", event.uid, event.timeout)
            case LocalWorkerFailed():
                log.warning(
                    "%s ended with code %d: the lines above show the reason", event.uid, event.code
                )
            case _:
                pass

    return LocalWorkerProcesses(training, progress=handle_event)


def supervise_machines(training: Training, ledger: LedgerSettings) -> RentalSupervisor:
    """Return the handle of the rental of the workers' machines.

    Args:
        training: Training of the workers.
        ledger: Ledger of rentals, and the account that pays.
    """
    settings = training.make_rental(ledger)
    return make_supervisor(
        settings,
        partial(campaigns.has_joined_worker, training),
        quorum=training.quorum,
        ready_timeout=training.options.join_timeout,
    )


@contextmanager
def report_failure(
    campaign: Campaign,
    published: PublishedWeights | None = None,
    lease: CampaignLease | None = None,
) -> Generator[None]:
    """Log the error that ends a campaign, publish the report, and raise the error.

    Args:
        campaign: Campaign.
        published: Destination of the final weights, if they were published.
        lease: Lease by which this process leads the campaign; None after the lease has ended.
    """
    try:
        yield
    except MillraceError as error:
        if isinstance(error, HeldError) and lease is not None and lease.is_lost():
            raise  # the process that leads the campaign reports it
        get_run_logger().error("The campaign is not over: %s", format_error(error))
        with suppress(MillraceError):  # the first error says more
            summary = summarize_campaign(campaign, published=published)
            report_campaign(summary, format_error(error))
        raise


@task(cache_policy=NO_CACHE)
def report_campaign(found: CampaignSummary, fault: str = "") -> None:
    """Publish the report of the campaign."""
    publish_report(
        describe_campaign(found, fault, stages=list_stage_runs()),
        key=make_artifact_key("campaign", found.name),
        description="Result of the campaign so far",
    )


def describe_campaign(
    found: CampaignSummary,
    fault: str = "",
    *,
    stages: Sequence[StageRun] = (),
    with_picture: bool = True,
) -> Markdown:
    """Return the report of the campaign.

    Args:
        found: Summary of the campaign.
        fault: Error that ended the campaign; empty without one.
        stages: Runs of this start of the campaign, which the report links.
        with_picture: Whether the losses are drawn.
    """
    drawn = Markdown()
    if found.losses and with_picture:
        drawn = format_image(_plot_losses(found), "the loss over the windows")
    return join_blocks(
        _write_headline(found, fault),
        format_table(("Stage", "Result"), list(_make_rows(found).items())),
        drawn,
        format_stages(stages),
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
        if found.uncounted_windows:
            cleaned = format_count(found.uncounted_windows, "window")
            rows["Windows"] += f", without the first {cleaned}, whose records were cleaned"
    if found.gradients:
        sent, dense = format_size(found.sent_bytes), format_size(found.dense_bytes)
        rows["Gradients"] = f"{found.gradients:,}: {sent} instead of {dense}"
        if found.sent_bytes:  # an aggregator may have stated 0
            smaller = f"{found.dense_bytes / found.sent_bytes:.0f} times smaller"
            rows["Gradients"] += f", {smaller}"
    if found.epoch_steps:
        rows["Checkpoints"] = ", ".join(
            f"epoch {epoch}: {f'step {step:,}' if step is not None else 'none'}"
            for epoch, step in found.epoch_steps.items()
        )
    if (weights := found.published) is not None:
        rows["Weights"] = format_markdown(
            "step {:,} of {} in {}", weights.step, format_code(weights.job),
            format_code(weights.url),
        )  # fmt: skip
    if found.machines:
        rows["Machines"] = f"{found.machines:,} rented, ${found.dollars:.2f}"
    if found.deleted_objects:
        rows["Cleaned"] = format_count(found.deleted_objects, "object")
    return rows


def _plot_losses(found: CampaignSummary) -> str:
    title = "Loss of the merged weights: median of the workers"
    return draw_line(found.losses, title, "windows merged", "loss")
