"""The end of an epoch, as Prefect sees it."""

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
from tasks.progress import CheckpointProgress
from tasks.reports import Markdown, bold, bullets, code, document, publish, table, write
from tasks.retries import PAUSES, passing
from tasks.words import artifact_key, duration, format_count, rate, size


@dataclass(frozen=True, slots=True)
class EndedEpoch:
    """The end of an epoch, and what went wrong on the nodes of a cluster.

    Attributes:
        seen: As the bucket tells it.
        without: Nodes that had no checkpoint, and why.
        faults: Members that failed, and how.
    """

    seen: EpochStatus
    without: Mapping[str, str]
    faults: Mapping[str, str]


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def watch_epoch(
    place: StoreSpec, job: str, epoch: int, patience: timedelta, members: Sequence[str] = ()
) -> EndedEpoch:
    """Wait until members elsewhere have ended an epoch, or end it for them."""
    return EndedEpoch(_watched(place, job, epoch, patience, members), {}, {})


@task(cache_policy=NO_CACHE)
def race_on_ray(settings: MemberSettings, address: str | None, patience: timedelta) -> EndedEpoch:
    """Have the nodes of a Ray cluster end an epoch with what they have on their disks."""
    log = get_run_logger()
    with run_members_on_ray(settings, address) as members:
        log.info("%s: %s", format_count(len(members.names), "member"), ", ".join(members.names))
        for name, why in members.without.items():
            log.warning("%s takes no part: %s", name, why)
        seen = _watched(settings.store, settings.job, settings.epoch, patience)
    return EndedEpoch(seen, members.without, members.faults)


def _watched(
    place: StoreSpec, job: str, epoch: int, patience: timedelta, members: Sequence[str] = ()
) -> EpochStatus:
    store = open_store(place, make_folder=False)
    clock = StoreClock.read(store, job, Holder.this_process())
    with CheckpointProgress(artifact_key("progress", "cool-down")) as progress:
        return watch_epoch_end(
            store, job, epoch, patience=patience, members=members, clock=clock, progress=progress
        )


@task(cache_policy=NO_CACHE)
def report_epoch(place: str, job: str, epoch: int, ended: EndedEpoch) -> None:
    """Leave a report that a person wants to read."""
    publish(
        describe(place, job, epoch, ended),
        key="cool-down",
        description="Result of the end of an epoch",
    )


def describe(place: str, job: str, epoch: int, ended: EndedEpoch) -> Markdown:
    """Return the report."""
    seen = ended.seen
    names = sorted({*seen.members, *ended.faults})
    return document(
        _verdict(place, job, epoch, seen),
        table(
            ("member", "came to", ">sent", ">verified of others", ">seconds", ""),
            [_row(name, seen, ended.faults.get(name, "")) for name in names],
        ),
        bullets(
            write("{} took no part: {}", code(name), why)
            for name, why in sorted(ended.without.items())
        ),
    )


def _verdict(place: str, job: str, epoch: int, seen: EpochStatus) -> Markdown:
    what = write("Epoch {} of {} in {}", epoch, code(job), code(place))
    if seen.epoch is None:
        return write("{} after {}.", bold(write("{} has not ended", what)), duration(seen.seconds))
    if seen.checkpoint is None:
        went_on = bold(write("{} went on without a checkpoint", what))
        return write("{} at step {:,}: {}.", went_on, seen.epoch.step, seen.epoch.why)
    racers = [one for one in seen.ended.values() if one.sent]
    longest = max((one.seconds for one in racers), default=0.0)
    uploaders = format_count(len(racers), "member") + " that lived"
    if longest:
        uploaders += f" at {rate(seen.checkpoint.size, longest)}"
    by = "committed by this run"
    if seen.epoch.member:
        by = write("committed by {}", code(seen.epoch.member))
    return write(
        "{} ended with **step {:,}**: {} in {}, {}, uploaded by {}.",
        what, seen.epoch.step, size(seen.checkpoint.size),
        format_count(len(seen.checkpoint.parts), "file"), by, uploaders,
    )  # fmt: skip


def _row(name: str, seen: EpochStatus, fault: str) -> Sequence[object]:
    one = seen.ended.get(name)
    if one is None:
        state = "under way" if name in seen.living else "dead"
        return (code(name), state, "", "", "", fault)
    replaced = f" {format_count(one.replaced, 'damaged file')} replaced." if one.replaced else ""
    said = fault or write("{}{}", one.reason, replaced)
    return (
        code(name), _outcome(one), size(one.sent), size(one.checked), f"{one.seconds:.1f}", said,
    )  # fmt: skip


def _outcome(one: CooldownRecord) -> object:
    return bold(one.outcome) if one.outcome is CooldownOutcome.COMMITTED else str(one.outcome)
