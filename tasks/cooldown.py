"""Tasks of a cooldown, the end of an epoch."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from millrace.checkpoints import EpochStatus, MemberSettings, watch_epoch_end
from millrace.checkpoints.cooldown.ray_members import run_members_on_ray
from millrace.lease import Holder, StoreClock
from millrace.schemas.checkpoint import CooldownOutcome, CooldownRecord
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
    format_bold,
    format_bullets,
    format_code,
    format_markdown,
    format_table,
    join_blocks,
    publish_report,
)
from tasks.retries import retried_task


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """The end of an epoch, and the faults on the nodes of a cluster.

    Attributes:
        status: Status of the epoch by its records.
        absent_nodes: Reasons of the nodes that had no checkpoint, by node.
        faults: Errors of the members that failed, by member.
    """

    status: EpochStatus
    absent_nodes: Mapping[str, str]
    faults: Mapping[str, str]


@retried_task
def watch_epoch(
    spec: StoreSpec, job: str, epoch: int, timeout: timedelta, members: Sequence[str] = ()
) -> EpochEnd:
    """Wait until members elsewhere have ended an epoch, or end the epoch for them."""
    return EpochEnd(_watch_with_progress(spec, job, epoch, timeout, members), {}, {})


@task(cache_policy=NO_CACHE)
def run_cooldown_on_ray(
    settings: MemberSettings, address: str | None, timeout: timedelta
) -> EpochEnd:
    """Have the nodes of a Ray cluster end an epoch with the checkpoints on their disks."""
    log = get_run_logger()
    began = time.monotonic()
    with run_members_on_ray(settings, address, timeout) as members:
        log.info("%s: %s", format_count(len(members.names), "member"), ", ".join(members.names))
        for name, why in members.without.items():
            log.warning("%s takes no part: %s", name, why)
        left = timeout - timedelta(seconds=time.monotonic() - began)
        status = _watch_with_progress(settings.store, settings.job, settings.epoch, left)
    return EpochEnd(status, members.without, members.faults)


def _watch_with_progress(
    spec: StoreSpec, job: str, epoch: int, timeout: timedelta, members: Sequence[str] = ()
) -> EpochStatus:
    store = open_store(spec, make_folder=False)
    clock = StoreClock.read(store, job, Holder.describe_this_process())
    with CheckpointProgress(make_artifact_key("progress", "cooldown")) as progress:
        return watch_epoch_end(
            store, job, epoch, timeout=timeout, members=members, clock=clock, progress=progress
        )


@task(cache_policy=NO_CACHE)
def report_epoch(url: str, job: str, epoch: int, ended: EpochEnd) -> None:
    """Publish the report of the end of an epoch."""
    publish_report(
        describe_epoch_end(url, job, epoch, ended),
        key="cooldown",
        description="Result of the end of an epoch",
    )


def describe_epoch_end(url: str, job: str, epoch: int, ended: EpochEnd) -> Markdown:
    """Return the report of the end of an epoch."""
    status = ended.status
    names = sorted({*status.members, *ended.faults})
    return join_blocks(
        _write_headline(url, job, epoch, status),
        format_table(
            ("Member", "Result", ">Sent", ">Verified of others", ">Seconds", "Reason"),
            [_make_row(name, status, ended.faults.get(name, "")) for name in names],
        ),
        format_bullets(
            format_markdown("{} took no part: {}", format_code(name), why)
            for name, why in sorted(ended.absent_nodes.items())
        ),
    )


def _write_headline(url: str, job: str, epoch: int, status: EpochStatus) -> Markdown:
    subject = format_markdown("Epoch {} of {} in {}", epoch, format_code(job), format_code(url))
    if status.epoch is None:
        return format_markdown(
            "{} after {}.",
            format_bold(format_markdown("{} has not ended", subject)),
            format_duration(status.seconds),
        )
    if status.epoch.root is None:
        went_on = format_bold(format_markdown("{} went on without a checkpoint", subject))
        return format_markdown(
            "{} at step {:,}: {}.", went_on, status.epoch.step, status.epoch.reason
        )
    by = "committed by this run"
    if status.epoch.member:
        by = format_markdown("committed by {}", format_code(status.epoch.member))
    if status.checkpoint is None:  # another destination than the bucket
        return format_markdown(
            "{} ended with **step {:,}** in {}, {}.",
            subject, status.epoch.step, format_code(status.epoch.destination), by,
        )  # fmt: skip
    senders = [one for one in status.ended.values() if one.sent]
    longest = max((one.seconds for one in senders), default=0.0)
    rate = format_rate(status.checkpoint.size, longest) if longest else ""
    return format_markdown(
        "{} ended with **step {:,}**: {} in {}, {}, uploaded{} by {} that finished.",
        subject, status.epoch.step, format_size(status.checkpoint.size),
        format_count(len(status.checkpoint.parts), "file"), by,
        format_markdown(" at {}", rate) if rate else "",
        format_count(len(senders), "member"),
    )  # fmt: skip


def _make_row(name: str, status: EpochStatus, fault: str) -> Sequence[object]:
    one = status.ended.get(name)
    if one is None:
        state = "under way" if name in status.living else "dead"
        return (format_code(name), state, "", "", "", fault)
    replaced = format_markdown(" {} replaced.", format_count(one.replaced, "damaged file"))
    reason = fault or format_markdown("{}{}", one.reason, replaced if one.replaced else "")
    return (
        format_code(name), _format_outcome(one), format_size(one.sent), format_size(one.checked),
        f"{one.seconds:.1f}", reason,
    )  # fmt: skip


def _format_outcome(one: CooldownRecord) -> object:
    match one.outcome:
        case CooldownOutcome.COMMITTED:
            return format_bold(one.outcome)
        case CooldownOutcome.LOST:
            return "lost the race"  # to commit: another member was first
        case _:
            return str(one.outcome)
