"""Checkpoints, as Prefect sees them."""

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
from tasks.progress import CheckpointProgress
from tasks.reports import Markdown, code, document, join, publish, table, write
from tasks.retries import PAUSES, passing
from tasks.words import artifact_key, duration, format_count, rate, size


@dataclass(frozen=True, slots=True)
class SeenCheckpoint:
    """Result of the verification of one checkpoint.

    Attributes:
        job: Whose.
        step: Which.
        files: How many it has; 0 if its metadata cannot be read.
        size: Bytes of them.
        damage: A sentence for each file at fault.
    """

    job: str
    step: int
    files: int
    size: int
    damage: tuple[str, ...]


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def all_jobs(place: StoreSpec) -> list[str]:
    """List the jobs that may have checkpoints."""
    return list(find_jobs(open_store(place, make_folder=False)))


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def verify_job(place: StoreSpec, job: str, check: VerifyDepth) -> list[SeenCheckpoint]:
    """Look at every checkpoint of a job. Changes nothing."""
    store = open_store(place, make_folder=False)
    found: list[SeenCheckpoint] = []
    for step, checkpoint in survey(store, job):
        if isinstance(checkpoint, errors.CorruptError):
            found.append(SeenCheckpoint(job, step, 0, 0, (str(checkpoint),)))
            continue
        damage = verify(store, checkpoint, check=check)
        if damage and all(there.step != step for there in iterate_checkpoints(store, job)):
            continue  # retention has removed it meanwhile
        files, whole = len(checkpoint.parts), checkpoint.size
        found.append(SeenCheckpoint(job, step, files, whole, tuple(damage.values())))
    at_fault = sum(bool(seen.damage) for seen in found)
    get_run_logger().info(
        "%s: %s, %d damaged", job, format_count(len(found), "checkpoint"), at_fault
    )
    return found


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that was brought into a bucket.

    Attributes:
        place: Where to.
        checkpoint: As it was committed there.
        sent: Bytes that this run sent; the others were there already.
        seconds: How long it took.
    """

    place: str
    checkpoint: Checkpoint
    sent: int
    seconds: float


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def check_destination(place: StoreSpec | HubSpec, job: str) -> None:
    """Refuse a place that a job could not save to, before anything was read."""
    found = open_destination(place).probe(job)
    if not found.is_ready:
        raise errors.DeniedError(f"{found.verdict}: {found.reason}")


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def transfer_checkpoint(
    source: SavedSource, place: StoreSpec | HubSpec, job: str
) -> SavedCheckpoint:
    """Copy a checkpoint into a bucket or the Hub, verified on both sides."""
    began, sent = time.monotonic(), 0
    origin, wanted = source.open()
    destination = open_destination(place)
    with CheckpointProgress(artifact_key("progress", "save", job), wanted.size) as progress:

        def tell(event: Event) -> None:
            nonlocal sent
            if event.name == "checkpoint.part":
                sent += int(event.figures["sent"])
            progress(event)

        saved = copy_checkpoint(StoreDestination(origin), wanted, destination, job, progress=tell)
    return SavedCheckpoint(destination.url, saved, sent, time.monotonic() - began)


@task(cache_policy=NO_CACHE)
def report_saved(saved: SavedCheckpoint) -> None:
    """Leave a report that a person wants to read."""
    publish(describe_saved(saved), key="saved-checkpoint", description="Saved checkpoint")


def describe_saved(saved: SavedCheckpoint) -> Markdown:
    """Return the report."""
    found = saved.checkpoint
    pace = f", at {rate(saved.sent, saved.seconds)}" if saved.sent else ""
    return document(
        write(
            "**Step {:,}** of {} is in {}: {} in {}, every byte verified. This run sent {} of them "
            "in {}{}.",
            found.step, code(found.job), code(saved.place), size(found.size),
            format_count(len(found.parts), "file"), size(saved.sent), duration(saved.seconds), pace,
        )
    )  # fmt: skip


@task(cache_policy=NO_CACHE)
def report_checkpoints(place: str, found: list[SeenCheckpoint], check: VerifyDepth) -> None:
    """Leave a report that a person wants to read."""
    publish(
        describe(place, found, check),
        key="verified-checkpoints",
        description="Result of the verification",
    )


def describe(place: str, found: list[SeenCheckpoint], check: VerifyDepth) -> Markdown:
    """Return the report."""
    damaged = [seen for seen in found if seen.damage]
    looked = "every byte was read" if check is VerifyDepth.DIGESTS else "sizes were looked at"
    good = write("all as they were saved")
    verdict = write("**{} damaged**", len(damaged)) if damaged else good
    ordered = sorted(found, key=lambda seen: (seen.job, -seen.step))
    return document(
        write(
            "{}: {}, {}; {}.", code(place), format_count(len(found), "checkpoint"), verdict, looked
        ),
        table(("job", ">step", ">files", ">bytes", "state"), map(_row, ordered)),
    )


def _row(seen: SeenCheckpoint) -> Sequence[object]:
    state = join(seen.damage[:3] or ("intact",), "; ")
    if len(seen.damage) > 3:
        state = write("{}; and {:,} more", state, len(seen.damage) - 3)
    return (code(seen.job), f"{seen.step:,}", f"{seen.files:,}", size(seen.size), state)
