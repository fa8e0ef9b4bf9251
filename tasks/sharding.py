"""Tasks that shard a dataset and report the result."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from pydantic import Field

from blocks import VastCredentials
from millrace import datasets
from millrace.datasets import PipelineSettings, ShardReport
from millrace.progress import Event
from millrace.rented_sharding import (
    ShardingMachineSettings,
    VastSettings,
    make_rental_name,
    shard_on_machines,
)
from millrace.schemas.dataset import ManifestShard
from tasks.assets import make_asset_key
from tasks.formatting import (
    format_count,
    format_duration,
    format_rate,
    format_size,
    make_artifact_key,
)
from tasks.plot import draw_rate
from tasks.progress import RentalProgress, ShardProgress
from tasks.renting import make_account, require_credentials
from tasks.reports import (
    Markdown,
    format_bold,
    format_code,
    format_image,
    format_markdown,
    format_table,
    join,
    join_blocks,
    publish_report,
)
from tasks.retries import RETRY_DELAYS, should_retry

_retried_task = task(
    cache_policy=NO_CACHE,
    retries=3,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=should_retry,
)
"""Decorator like `retried_task`, with one more retry: a later try continues from the ledger."""


class ShardingMachinesInput(ShardingMachineSettings):
    """Rented machines that shard a dataset."""

    vast: VastCredentials | str = Field(
        default="vast", description="The Vast.ai Credentials block that pays, or its name."
    )

    def make_settings(self) -> VastSettings:
        """Return the machines with the account that pays.

        Raises:
            ConfigurationError: There is no block of this name.
        """
        account = make_account(require_credentials(self.vast))
        return VastSettings(
            account=account,
            **{name: getattr(self, name) for name in ShardingMachineSettings.model_fields},
        )


@dataclass(frozen=True, slots=True)
class ShardingResult:
    """Result of a run.

    Attributes:
        report: Report of the engine.
        bytes_by_second: Bytes committed in each second of the run.
    """

    report: ShardReport
    bytes_by_second: Mapping[int, int] = field(repr=False)


@_retried_task
def make_shards(settings: PipelineSettings, *, repair: bool = False) -> ShardingResult:
    """Make the missing shards of a dataset, and finalize the dataset.

    A later run continues after a kill or a cancellation. Call this task, do not submit it: a task
    in another thread cannot be cancelled.
    """
    with ShardProgress(make_artifact_key("progress", settings.dataset)) as progress:
        report = datasets.shard_dataset(settings, progress=progress, accept_changed_source=repair)
    return ShardingResult(report, dict(progress.bytes_by_second))


@task(cache_policy=NO_CACHE)
def make_shards_on_machines(settings: PipelineSettings, machines: VastSettings) -> ShardingResult:
    """Make the missing shards of a dataset on rented machines, and release the machines.

    A later run continues after a kill or a cancellation. Call this task, do not submit it.
    """
    shards_key = make_artifact_key("progress", settings.dataset)
    machines_key = make_artifact_key("progress", "machines", make_rental_name(settings.dataset))
    with (
        ShardProgress(shards_key) as shard_progress,
        RentalProgress(machines_key, machines.machines) as rental_progress,
    ):

        def progress(event: Event) -> None:
            shard_progress(event)
            rental_progress(event)

        report = shard_on_machines(settings, machines, progress=progress)
    return ShardingResult(report, dict(shard_progress.bytes_by_second))


@_retried_task
def repair_shards(settings: PipelineSettings) -> datasets.Repair:
    """Verify every shard of a complete dataset, and make missing or damaged shards again."""
    repaired = datasets.repair_dataset(settings)
    get_run_logger().info(
        "%s verified, %s made again: %s",
        format_count(repaired.shards, "shard"),
        len(repaired.remade_keys) or "none",
        ", ".join(repaired.remade_keys[:20]) or "-",
    )
    for stray in repaired.strays[:20]:
        get_run_logger().warning("Not repaired: %s: %s", stray.key, stray.reason)
    return repaired


@task(cache_policy=NO_CACHE)
def report_shards(made: ShardingResult) -> None:
    """Publish the report of the shards of a dataset."""
    publish_report(
        describe_shards(made),
        key=make_artifact_key("shards", made.report.manifest.dataset),
        description=f"The dataset {made.report.manifest.dataset}, complete",
    )


def describe_shards(made: ShardingResult) -> Markdown:
    """Return the report of the shards of a dataset."""
    report, manifest = made.report, made.report.manifest
    whole = format_markdown(
        "{} is complete: {} in {}, {}.",
        format_bold(manifest.dataset), format_count(report.samples, "sample"),
        format_count(len(manifest.shards), "shard"), format_size(manifest.size),
    )  # fmt: skip
    own = "All shards were there before this run."
    if not manifest.shards:
        own = "The dataset was allowed to be empty."
    if report.new_shards:
        own = (
            f"This run made {format_count(report.new_shards, 'shard')} of them in "
            f"{format_duration(report.seconds)}, {format_rate(report.new_bytes, report.seconds)}."
        )
    own_shards = f"{format_count(report.new_shards, 'shard')}, {format_size(report.new_bytes)}"
    quarantined = f"{manifest.quarantined:,}"
    if report.dollars is not None:
        own += f" The rented machines have cost ${report.dollars:.2f}."
    rows: list[tuple[object, object]] = [
        ("Partitions", f"{report.partitions:,}"),
        *(
            (format_markdown("Format {}", format_code(name)), _describe_format(shards))
            for name, shards in _group_by_format(manifest.shards).items()
        ),
        *(
            (format_markdown("Samples in {}", format_code(split)), f"{samples:,}")
            for split, samples in manifest.samples.items()
        ),
        ("Bytes", f"{manifest.size:,}"),
        ("Made by this run", f"{own_shards}, {format_count(report.new_samples, 'sample')}"),
        (
            "Rate of this run",
            format_rate(report.new_bytes, report.seconds) if report.new_shards else "-",
        ),
        (
            "Rows in quarantine",
            format_markdown("{} (below {})", quarantined, format_code(f"{report.url}/quarantine/"))
            if manifest.quarantined
            else quarantined,
        ),
        *((("Rows dropped by transforms", f"{manifest.dropped:,}"),) if manifest.dropped else ()),
        *(
            (("Cost of rented machines", f"${report.dollars:.2f}"),)
            if report.dollars is not None
            else ()
        ),
        *(
            (format_markdown("Read from {}", format_code(location)), format_size(size))
            for location, size in report.served.items()
        ),
        ("Manifest", format_code(report.manifest_key)),
        ("Dataset", format_code(report.url)),
        *((("Asset", format_code(asset)),) if (asset := make_asset_key(report.url)) else ()),
    ]
    drawn = Markdown()
    if made.bytes_by_second:
        plot = draw_rate(
            made.bytes_by_second, report.seconds, f"{manifest.dataset}: rate of this run"
        )
        drawn = format_image(plot, "rate in MB/s over the seconds of this run")
    warnings = [format_markdown("{} {}", format_bold("Warning:"), one) for one in report.warnings]
    return join_blocks(
        join((whole, own), " "), *warnings, format_table(("Figure", "Value"), rows), drawn
    )


def _group_by_format(shards: Iterable[ManifestShard]) -> Mapping[str, Sequence[ManifestShard]]:
    """Return the shards of each format, in the order of the formats' names."""
    groups: dict[str, list[ManifestShard]] = {}
    for shard in sorted(shards, key=lambda one: one.format):
        groups.setdefault(shard.format, []).append(shard)
    return groups


def _describe_format(shards: Sequence[ManifestShard]) -> str:
    samples = format_count(sum(one.samples for one in shards), "sample")
    size = format_size(sum(one.size for one in shards))
    return f"{format_count(len(shards), 'shard')}, {samples}, {size}"
