"""Tasks that verify and copy checkpoints."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from millrace import errors
from millrace.checkpoints import (
    HubSpec,
    SavedSource,
    StoreDestination,
    VerifyDepth,
    copy_checkpoint,
    find_jobs,
    iterate_checkpoints,
    open_destination,
    survey,
    verify,
)
from millrace.progress import Event
from millrace.schemas.checkpoint import Checkpoint
from millrace.storage import StoreSpec, open_store
from tasks.formatting import (
    format_count,
    format_duration,
    format_rate,
    format_size,
    make_artifact_key,
)
from tasks.progress import CheckpointProgress
from tasks.reports import (
    Markdown,
    format_code,
    format_link,
    format_markdown,
    format_table,
    join,
    join_blocks,
    publish_report,
)
from tasks.retries import RETRY_DELAYS, should_retry


@dataclass(frozen=True, slots=True)
class CheckpointVerification:
    """Result of the verification of one checkpoint.

    Attributes:
        job: Job of the checkpoint.
        step: Step of the checkpoint.
        files: Number of its files; 0 if its metadata cannot be read.
        size: Bytes of its files.
        faults: A sentence for each damaged file.
    """

    job: str
    step: int
    files: int
    size: int
    faults: tuple[str, ...]


@task(
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=should_retry,
)
def list_jobs(spec: StoreSpec) -> list[str]:
    """List the jobs that may have checkpoints."""
    return list(find_jobs(open_store(spec, make_folder=False)))


@task(
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=should_retry,
)
def verify_job(spec: StoreSpec, job: str, depth: VerifyDepth) -> list[CheckpointVerification]:
    """Verify every checkpoint of a job. Changes nothing."""
    store = open_store(spec, make_folder=False)
    found: list[CheckpointVerification] = []
    for step, checkpoint in survey(store, job):
        if isinstance(checkpoint, errors.CorruptError):
            found.append(CheckpointVerification(job, step, 0, 0, (str(checkpoint),)))
            continue
        faults = verify(store, checkpoint, check=depth)
        if faults and all(there.step != step for there in iterate_checkpoints(store, job)):
            continue  # retention has removed it meanwhile
        files, whole = len(checkpoint.parts), checkpoint.size
        found.append(CheckpointVerification(job, step, files, whole, tuple(faults.values())))
    at_fault = sum(bool(seen.faults) for seen in found)
    get_run_logger().info(
        "%s: %s, %d damaged", job, format_count(len(found), "checkpoint"), at_fault
    )
    return found


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that was copied to a destination.

    Attributes:
        url: URL of the destination.
        page: Web page of the destination; empty if it has none.
        checkpoint: The checkpoint as it was committed there.
        sent_bytes: Bytes that this run sent; the others were there before.
        seconds: Duration of the copy.
    """

    url: str
    page: str
    checkpoint: Checkpoint
    sent_bytes: int
    seconds: float


@task(
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=should_retry,
)
def check_destination(target: StoreSpec | HubSpec, job: str) -> None:
    """Refuse a destination that a job cannot save to, before anything is read."""
    found = open_destination(target).probe(job)
    if not found.is_ready:
        raise errors.DeniedError(f"{found.verdict}: {found.reason}")


@task(
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=should_retry,
)
def transfer_checkpoint(
    source: SavedSource, target: StoreSpec | HubSpec, job: str
) -> SavedCheckpoint:
    """Copy a checkpoint into a bucket or the Hub, verified on both sides."""
    began, sent = time.monotonic(), 0
    origin, wanted = source.open()
    destination = open_destination(target)
    with CheckpointProgress(make_artifact_key("progress", "save", job), wanted.size) as progress:

        def handle_event(event: Event) -> None:
            nonlocal sent
            if event.name == "checkpoint.part":
                sent += int(event.figures["sent"])
            progress(event)

        saved = copy_checkpoint(
            StoreDestination(origin), wanted, destination, job, progress=handle_event
        )
    seconds = time.monotonic() - began
    return SavedCheckpoint(destination.url, _find_page(target), saved, sent, seconds)


@task(cache_policy=NO_CACHE)
def report_saved(saved: SavedCheckpoint) -> None:
    """Publish the report."""
    publish_report(describe_saved(saved), key="saved-checkpoint", description="Saved checkpoint")


def describe_saved(saved: SavedCheckpoint) -> Markdown:
    """Return the report."""
    found = saved.checkpoint
    pace = f", at {format_rate(saved.sent_bytes, saved.seconds)}" if saved.sent_bytes else ""
    return join_blocks(
        format_markdown(
            "**Step {:,}** of {} is in {}: {} in {}, every byte verified. This run sent {} "
            "in {}{}.",
            found.step, format_code(found.job), _format_destination(saved),
            format_size(found.size), format_count(len(found.parts), "file"),
            format_size(saved.sent_bytes),
            format_duration(saved.seconds), pace,
        )
    )  # fmt: skip


def _find_page(target: StoreSpec | HubSpec) -> str:
    """Return the web page of a repository of the Hub; empty for a bucket."""
    if not isinstance(target, HubSpec):
        return ""
    hub = target.endpoint or os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    return f"{hub.rstrip('/')}/{target.repo}/tree/{target.revision}"


def _format_destination(saved: SavedCheckpoint) -> Markdown:
    try:
        return format_link(saved.url, saved.page) if saved.page else format_code(saved.url)
    except ValueError:  # an unusual name: it is shown, and not linked to
        return format_code(saved.url)


@task(cache_policy=NO_CACHE)
def report_checkpoints(url: str, found: list[CheckpointVerification], depth: VerifyDepth) -> None:
    """Publish the report."""
    publish_report(
        describe(url, found, depth),
        key="verified-checkpoints",
        description="Result of the verification",
    )


def describe(url: str, found: list[CheckpointVerification], depth: VerifyDepth) -> Markdown:
    """Return the report."""
    damaged = [seen for seen in found if seen.faults]
    extent = "every byte was read" if depth is VerifyDepth.DIGESTS else "sizes were compared"
    good = format_markdown("all as they were saved")
    verdict = format_markdown("**{} damaged**", len(damaged)) if damaged else good
    ordered = sorted(found, key=lambda seen: (seen.job, -seen.step))
    return join_blocks(
        format_markdown(
            "{}: {}, {}; {}.",
            format_code(url),
            format_count(len(found), "checkpoint"),
            verdict,
            extent,
        ),
        format_table(("Job", ">Step", ">Files", ">Size", "State"), map(_make_row, ordered)),
    )


def _make_row(seen: CheckpointVerification) -> Sequence[object]:
    state = join(seen.faults[:3] or ("intact",), "; ")
    if len(seen.faults) > 3:
        state = format_markdown("{}; and {:,} more", state, len(seen.faults) - 3)
    return (
        format_code(seen.job),
        f"{seen.step:,}",
        f"{seen.files:,}",
        format_size(seen.size),
        state,
    )
