"""Tasks that verify, copy and import checkpoints."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from millrace import audit, errors
from millrace.checkpoints import (
    HubSpec,
    ImportedCheckpoint,
    SavedSource,
    StoreDestination,
    VerifyDepth,
    destinations,
    find_jobs,
    open_destination,
    survey,
    verify,
)
from millrace.checkpoints.destinations import CopiedCheckpoint
from millrace.checkpoints.find import is_removed
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
    format_unfinished,
    join,
    join_blocks,
    publish_report,
)
from tasks.retries import retried_task


@dataclass(frozen=True, slots=True)
class CheckpointVerification:
    """Result of the verification of one checkpoint.

    Attributes:
        job: Job of the checkpoint.
        step: Step of the checkpoint.
        files: Number of files; 0 if the metadata cannot be read.
        size: Bytes of the files.
        faults: A sentence for each damaged file.
    """

    job: str
    step: int
    files: int
    size: int
    faults: tuple[str, ...]


@retried_task
def list_jobs(spec: StoreSpec) -> list[str]:
    """List the jobs that may have checkpoints."""
    return list(find_jobs(open_store(spec, make_folder=False)))


@retried_task
def verify_job(spec: StoreSpec, job: str, depth: VerifyDepth) -> list[CheckpointVerification]:
    """Verify every checkpoint of a job. Changes nothing."""
    store = open_store(spec, make_folder=False)
    found: list[CheckpointVerification] = []
    for step, checkpoint in survey(store, job):
        if isinstance(checkpoint, errors.CorruptError):
            found.append(CheckpointVerification(job, step, 0, 0, (str(checkpoint),)))
            continue
        faults = verify(store, checkpoint, check=depth)
        if faults and is_removed(store, checkpoint):
            continue
        files, whole = len(checkpoint.parts), checkpoint.size
        found.append(CheckpointVerification(job, step, files, whole, tuple(faults.values())))
    at_fault = sum(bool(seen.faults) for seen in found)
    get_run_logger().info(
        "%s: %s, %d damaged", job, format_count(len(found), "checkpoint"), at_fault
    )
    return found


def check_verification(
    url: str, jobs: Sequence[str], found: Sequence[CheckpointVerification]
) -> None:
    """Check that no verified checkpoint is damaged, and that each named job has a checkpoint.

    Args:
        url: URL of the bucket.
        jobs: Named jobs; empty if all jobs were verified.
        found: Results of the verification.

    Raises:
        CorruptError: A checkpoint is damaged.
        NotFoundError: A named job has no checkpoint.
    """
    damaged = [seen for seen in found if seen.faults]
    if damaged:
        names = ", ".join(f"{seen.job} step {seen.step}" for seen in damaged[:5])
        raise errors.CorruptError(
            f"Damaged at {url}: {format_count(len(damaged), 'checkpoint')} ({names}). The report "
            "names each file. Earlier checkpoints can be loaded. Save these steps again."
        )
    verified = {seen.job for seen in found}
    missing = [job for job in dict.fromkeys(jobs) if job not in verified]
    if missing:
        raise errors.NotFoundError(
            f"{url} has no checkpoint of {', '.join(missing[:5])}: correct the names of the jobs, "
            "or give none to verify all jobs."
        )


@retried_task
def check_checkpoint_destination(target: StoreSpec | HubSpec, job: str) -> None:
    """Refuse a destination that a job cannot save to, before anything is read."""
    audit.check_checkpoint_destination(open_destination(target), job)


@retried_task
def copy_checkpoint(source: SavedSource, target: StoreSpec | HubSpec, job: str) -> CopiedCheckpoint:
    """Copy a checkpoint into a bucket or the Hub, verified on both sides."""
    origin, wanted = source.open()
    with CheckpointProgress(make_artifact_key("progress", "save", job), wanted.size) as progress:
        return destinations.copy_and_measure(
            StoreDestination(origin), wanted, open_destination(target), job, progress=progress
        )


@retried_task
def import_checkpoint(
    source: StoreSpec | HubSpec, target: StoreSpec, job: str, step: int | None, only: str
) -> ImportedCheckpoint:
    """Save a checkpoint of another tool as one of a job."""
    from millrace.checkpoints import importing  # noqa: PLC0415 - imports torch

    key = make_artifact_key("progress", "import", job)
    with CheckpointProgress(key, waiting="Looking for weights.") as progress:
        return importing.import_checkpoint(
            source, open_store(target), job, step=step, only=only, progress=progress
        )


@task(cache_policy=NO_CACHE)
def report_import(done: ImportedCheckpoint, url: str) -> None:
    """Publish the report of the imported checkpoint."""
    publish_report(
        describe_import(done, url), key="imported-checkpoint", description="Imported checkpoint"
    )


def describe_import(done: ImportedCheckpoint, url: str) -> Markdown:
    """Return the report of the imported checkpoint.

    Args:
        done: Imported checkpoint.
        url: URL of the bucket.
    """
    found = done.checkpoint
    return join_blocks(
        format_markdown(
            "**Step {:,}** of {} is in {}: {}, {} in {}. It was imported from {}:",
            found.step, format_code(found.job), format_code(url),
            format_count(done.tensors, "tensor"),
            format_size(found.size), format_count(len(found.parts), "file"),
            format_code(done.source),
        ),
        format_table(("File",), ((format_code(name),) for name in done.files)),
    )  # fmt: skip


@task(cache_policy=NO_CACHE)
def report_copy(saved: CopiedCheckpoint, target: StoreSpec | HubSpec) -> None:
    """Publish the report of the copied checkpoint, with a link to the destination's page."""
    publish_report(
        describe_copy(saved, _find_page(target)),
        key="saved-checkpoint",
        description="Saved checkpoint",
    )


def describe_copy(saved: CopiedCheckpoint, page: str) -> Markdown:
    """Return the report of the copied checkpoint.

    Args:
        saved: Copied checkpoint.
        page: URL of the destination's page; empty if there is none.
    """
    found = saved.checkpoint
    rate = f", at {format_rate(saved.sent_bytes, saved.seconds)}" if saved.sent_bytes else ""
    return join_blocks(
        format_markdown(
            "**Step {:,}** of {} is in {}: {} in {}, every byte verified. This run sent {} "
            "in {}{}.",
            found.step, format_code(found.job), _format_destination(saved.url, page),
            format_size(found.size), format_count(len(found.parts), "file"),
            format_size(saved.sent_bytes),
            format_duration(saved.seconds), rate,
        )
    )  # fmt: skip


def _find_page(target: StoreSpec | HubSpec) -> str:
    """Return the URL of the web page of a repository of the Hub; empty for a bucket."""
    if not isinstance(target, HubSpec):
        return ""
    hub = target.endpoint or os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    return f"{hub.rstrip('/')}/{target.repo}/tree/{target.revision}"


def _format_destination(url: str, page: str) -> Markdown:
    try:
        return format_link(url, page) if page else format_code(url)
    except ValueError:  # an unusual name, which is shown without a link
        return format_code(url)


@task(cache_policy=NO_CACHE)
def report_checkpoints(
    url: str, found: list[CheckpointVerification], depth: VerifyDepth, end: str = ""
) -> None:
    """Publish the report of the verified checkpoints.

    Args:
        url: URL of the bucket.
        found: Result of each checkpoint.
        depth: Depth of the verification.
        end: Error that ended the run before all jobs were verified; empty without one.
    """
    publish_report(
        describe_verification(url, found, depth, end),
        key="verified-checkpoints",
        description="Result of the verification",
    )


def describe_verification(
    url: str, found: list[CheckpointVerification], depth: VerifyDepth, end: str = ""
) -> Markdown:
    """Return the report of the verified checkpoints.

    Args:
        url: URL of the bucket.
        found: Result of each checkpoint.
        depth: Depth of the verification.
        end: Error that ended the run before all jobs were verified; empty without one.
    """
    if not found:
        return format_markdown("{} has no checkpoint, so nothing was verified.", format_code(url))
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
        format_unfinished(end),
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
