"""The end of an epoch, as Prefect sees it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from millrace.checkpoints import MemberSettings, Seen, watch
from millrace.checkpoints.over_ray import members_on_ray
from millrace.lease import Holder, StoreClock
from millrace.models.checkpoint import Ended, Outcome
from millrace.storage import StoreSpec, open_store
from tasks.progress import CheckpointProgress
from tasks.retries import PAUSES, passing
from tasks.words import artifact_key, count, duration, rate, size


@dataclass(frozen=True, slots=True)
class EndedEpoch:
    """The end of an epoch, and what went wrong on the nodes of a cluster.

    Attributes:
        seen: As the bucket tells it.
        without: Nodes that had no checkpoint, and why.
        faults: Members that failed, and how.
    """

    seen: Seen
    without: Mapping[str, str]
    faults: Mapping[str, str]


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def watch_epoch(place: StoreSpec, job: str, epoch: int, patience: timedelta) -> EndedEpoch:
    """Wait until members elsewhere have ended an epoch."""
    return EndedEpoch(_watched(place, job, epoch, patience), {}, {})


@task(cache_policy=NO_CACHE)
def race_on_ray(settings: MemberSettings, address: str | None, patience: timedelta) -> EndedEpoch:
    """Have the nodes of a Ray cluster end an epoch with what they have on their disks."""
    log = get_run_logger()
    with members_on_ray(settings, address) as members:
        log.info("%s: %s", count(len(members.names), "member"), ", ".join(members.names))
        for name, why in members.without.items():
            log.warning("%s takes no part: %s", name, why)
        seen = _watched(settings.store, settings.job, settings.epoch, patience)
    return EndedEpoch(seen, members.without, members.faults)


def _watched(place: StoreSpec, job: str, epoch: int, patience: timedelta) -> Seen:
    store = open_store(place, make_folder=False)
    clock = StoreClock.read(store, job, Holder.this_process())
    with CheckpointProgress(artifact_key("progress", "cool-down")) as progress:
        return watch(store, job, epoch, patience=patience, clock=clock, progress=progress)


@task(cache_policy=NO_CACHE)
def report_epoch(place: str, job: str, epoch: int, ended: EndedEpoch) -> None:
    """Leave a report that a person wants to read."""
    create_markdown_artifact(
        describe(place, job, epoch, ended), key="cool-down", description="How an epoch ended"
    )


def describe(place: str, job: str, epoch: int, ended: EndedEpoch) -> str:
    """The report, as Markdown."""
    seen = ended.seen
    lines = [_verdict(place, job, epoch, seen), ""]
    lines += [
        "| member | came to | sent | verified of others | seconds | |",
        "|---|---|--:|--:|--:|---|",
    ]
    for name in sorted({*seen.members, *ended.faults}):
        lines.append(_row(name, seen, ended.faults.get(name, "")))
    lines += [""] + [f"`{name}` took no part: {why}" for name, why in sorted(ended.without.items())]
    return "\n".join(lines).rstrip() + "\n"


def _verdict(place: str, job: str, epoch: int, seen: Seen) -> str:
    what = f"Epoch {epoch} of `{job}` in `{place}`"
    if seen.epoch is None:
        return f"**{what} has not ended** after {duration(seen.seconds)}."
    if seen.checkpoint is None:
        at = f"at step {seen.epoch.step:,}: {seen.epoch.why}"
        return f"**{what} went on without a checkpoint** {at}."
    racers = [one for one in seen.ended.values() if one.sent]
    longest = max((one.seconds for one in racers), default=0.0)
    pace = f" at {rate(seen.checkpoint.size, longest)}" if longest else ""
    by = f"committed by `{seen.epoch.member}`" if seen.epoch.member else "committed by this run"
    return (
        f"{what} ended with **step {seen.epoch.step:,}**: {size(seen.checkpoint.size)} in "
        f"{count(len(seen.checkpoint.parts), 'file')}, {by}, uploaded by "
        f"{count(len(racers), 'member')} that lived{pace}."
    )


def _row(name: str, seen: Seen, fault: str) -> str:
    one = seen.ended.get(name)
    if one is None:
        state = "under way" if name in seen.living else "dead"
        return f"| `{name}` | {state} | | | | {fault} |"
    cells = (_outcome(one), size(one.sent), size(one.checked), f"{one.seconds:.1f}")
    said = one.reason + (
        f" {count(one.replaced, 'damaged file')} replaced." if one.replaced else ""
    )
    return f"| `{name}` | {' | '.join(cells)} | {fault or said} |"


def _outcome(one: Ended) -> str:
    return f"**{one.outcome}**" if one.outcome is Outcome.COMMITTED else str(one.outcome)
