"""Tasks that prewarm the nodes of a cluster and report the result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prefect import task
from prefect.cache_policies import NO_CACHE

from millrace import swarm
from millrace.formatting import clean_text
from millrace.swarm import NodeReport, PrewarmReport, PrewarmSettings
from tasks.formatting import (
    format_count,
    format_duration,
    format_rate,
    format_size,
    make_artifact_key,
)
from tasks.plot import draw_rate
from tasks.progress import SwarmProgress
from tasks.reports import (
    Markdown,
    format_code,
    format_image,
    format_markdown,
    format_table,
    join_blocks,
    publish_report,
)
from tasks.retries import retried_task


@dataclass(frozen=True, slots=True)
class PrewarmResult:
    """Result of a run.

    Attributes:
        report: Report of the engine.
        bytes_by_second: Bytes that reached a node in each second of the run.
    """

    report: PrewarmReport
    bytes_by_second: Mapping[int, int] = field(repr=False)


@retried_task
def warm_nodes(settings: PrewarmSettings) -> PrewarmResult:
    """Copy the missing files to every node. After a kill or a cancellation, a later run continues.

    Call this task, do not submit it: a task in another thread cannot be cancelled.
    """
    with SwarmProgress(make_artifact_key("progress", "prewarm")) as progress:
        report = swarm.prewarm(settings, progress=progress)
    return PrewarmResult(report, dict(progress.bytes_by_second))


@task(cache_policy=NO_CACHE)
def report_nodes(warmed: PrewarmResult) -> None:
    """Publish the report of the nodes of a prewarm."""
    publish_report(describe_nodes(warmed), key="prewarm", description="Result of the prewarm")


def describe_nodes(warmed: PrewarmResult) -> Markdown:
    """Return the report of the nodes of a prewarm."""
    report = warmed.report
    ready = sum(node.ready for node in report.nodes)
    moved = sum(node.from_store + node.from_peers for node in report.nodes)
    whole = format_markdown(
        "**{} of {}** {} all of {}, {}, after {}. {} left the store, {} reached the nodes, at {}.",
        ready, format_count(len(report.nodes), "node"), "has" if ready == 1 else "have",
        format_count(report.files, "file"), format_size(report.size),
        format_duration(report.seconds), format_size(report.store_bytes), format_size(moved),
        format_rate(moved, report.seconds),
    )  # fmt: skip
    columns = (
        "Node", "Ready", ">There before", ">From the store", ">From nodes", ">Failed", ">Seconds",
    )  # fmt: skip
    direct = format_markdown("Nodes also read from the store what others had: {}.", report.direct)
    unverified = format_markdown(
        "{} unverified at the source: no record has the digest.",
        format_count(report.unverified, "file"),
    )
    unconfirmed = format_markdown(
        "Of {} of them a part was read by one node alone, which no other node has confirmed. Give "
        "the `sha256` of these files, or use two nodes.",
        report.unconfirmed,
    )
    drawn = Markdown()
    if warmed.bytes_by_second:
        plot = draw_rate(
            warmed.bytes_by_second, report.seconds, "Rate at which bytes reached the nodes"
        )
        drawn = format_image(plot, "rate in MB/s over the seconds of this run")
    return join_blocks(
        whole,
        format_table(columns, map(_make_row, report.nodes)),
        direct if report.direct else Markdown(),
        *(format_markdown("{}", reason) for reason in report.refused),
        unverified if report.unverified else Markdown(),
        unconfirmed if report.unconfirmed else Markdown(),
        drawn,
    )


def _make_row(node: NodeReport) -> Sequence[object]:
    state = "yes" if node.ready else f"no: {node.reason}"
    if not node.trusted:
        state = f"{clean_text(state)} (gave wrong bytes)"
    sizes = [format_size(n) for n in (node.cached, node.from_store, node.from_peers)]
    return (format_code(node.name), state, *sizes, f"{node.failures:,}", f"{node.seconds:.1f}")
