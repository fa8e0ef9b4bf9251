"""Shard a dataset, and say what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from millrace import datasets
from millrace.datasets import PipelineSettings, ShardReport
from tasks.plot import pace_plot
from tasks.progress import ShardProgress
from tasks.reports import Markdown, bold, code, document, join, picture, publish, table, write
from tasks.retries import PAUSES, passing
from tasks.words import artifact_key, duration, format_count, rate, size


@dataclass(frozen=True, slots=True)
class Sharded:
    """Result of a run.

    Attributes:
        report: The engine's own.
        pace: Bytes committed in each second of the run.
    """

    report: ShardReport
    pace: Mapping[int, int] = field(repr=False)


@task(cache_policy=NO_CACHE, retries=3, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def cut_shards(settings: PipelineSettings, *, repair: bool = False) -> Sharded:
    """Cut what is missing of a dataset and seal it. Killed or cancelled, a later run goes on.

    Call it, do not submit it: a task in another thread does not hear that it is cancelled.
    """
    with ShardProgress(artifact_key("progress", settings.dataset)) as progress:
        report = datasets.shard_dataset(settings, progress=progress, repair=repair)
    return Sharded(report, dict(progress.pace))


@task(cache_policy=NO_CACHE, retries=3, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def repair_shards(settings: PipelineSettings) -> datasets.Repair:
    """Verify every shard of a complete dataset, and make again what is missing or damaged."""
    repaired = datasets.repair_dataset(settings)
    get_run_logger().info(
        "%s verified, %d made again: %s",
        format_count(repaired.shards, "shard"),
        len(repaired.made),
        ", ".join(repaired.made[:20]) or "-",
    )
    return repaired


@task(cache_policy=NO_CACHE)
def report_shards(made: Sharded) -> None:
    """Leave a report that a person wants to read."""
    publish(
        describe(made),
        key=artifact_key("shards", made.report.manifest.dataset),
        description=f"The dataset {made.report.manifest.dataset}, sealed",
    )


def describe(made: Sharded) -> Markdown:
    """Return the report."""
    report, manifest = made.report, made.report.manifest
    whole = write(
        "{} is complete: {} in {}, {}.",
        bold(manifest.dataset), format_count(report.samples, "sample"),
        format_count(len(manifest.shards), "shard"), size(manifest.size),
    )  # fmt: skip
    own = (
        "All of it was there before this run." if manifest.shards else "It was allowed to be empty."
    )
    if report.made:
        own = (
            f"This run made {format_count(report.made, 'shard')} of them in "
            f"{duration(report.seconds)}, {rate(report.bytes_made, report.seconds)}."
        )
    own_shards = f"{format_count(report.made, 'shard')}, {size(report.bytes_made)}"
    aside = f"{manifest.quarantined:,}"
    rows: list[tuple[object, object]] = [
        ("Splits", f"{report.splits:,}"),
        ("Shards", f"{len(manifest.shards):,}"),
        *(
            (write("Samples in {}", code(partition)), f"{samples:,}")
            for partition, samples in manifest.samples.items()
        ),
        ("Bytes", f"{manifest.size:,}"),
        ("Made by this run", f"{own_shards}, {format_count(report.samples_made, 'sample')}"),
        ("Rate of this run", rate(report.bytes_made, report.seconds) if report.made else "-"),
        (
            "Rows put aside",
            write("{} (below {})", aside, code(f"{report.url}/quarantine/"))
            if manifest.quarantined
            else aside,
        ),
        ("Manifest", code(report.manifest_key)),
        ("Dataset", code(report.url)),
    ]
    drawn = Markdown()
    if made.pace:
        plot = pace_plot(made.pace, report.seconds, f"{manifest.dataset}: bytes committed")
        drawn = picture(plot, "MB/s over the seconds of this run")
    return document(join((whole, own), " "), table(("", ""), rows), drawn)
