"""Warm the nodes of a cluster, and say what came of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prefect import task
from prefect.cache_policies import NO_CACHE

from millrace import swarm
from millrace.swarm import NodeReport, PrewarmReport, PrewarmSettings
from millrace.words import clean_text
from tasks.plot import pace_plot
from tasks.progress import SwarmProgress
from tasks.reports import Markdown, code, document, picture, publish, table, write
from tasks.retries import PAUSES, passing
from tasks.words import artifact_key, duration, format_count, rate, size


@dataclass(frozen=True, slots=True)
class Warmed:
    """Result of a run.

    Attributes:
        report: The engine's own.
        pace: Bytes that reached a node in each second of the run.
    """

    report: PrewarmReport
    pace: Mapping[int, int] = field(repr=False)


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def warm_nodes(settings: PrewarmSettings) -> Warmed:
    """Put what is missing on every node. Killed or cancelled, a later run goes on.

    Call it, do not submit it: a task in another thread does not hear that it is cancelled.
    """
    with SwarmProgress(artifact_key("progress", "prewarm")) as progress:
        report = swarm.prewarm(settings, progress=progress)
    return Warmed(report, dict(progress.pace))


@task(cache_policy=NO_CACHE)
def report_nodes(warmed: Warmed) -> None:
    """Leave a report that a person wants to read."""
    publish(describe(warmed), key="prewarm", description="The nodes, warmed")


def describe(warmed: Warmed) -> Markdown:
    """Return the report."""
    report = warmed.report
    ready = sum(node.ready for node in report.nodes)
    moved = sum(node.from_store + node.from_peers for node in report.nodes)
    whole = write(
        "**{} of {}** {} all of {}, {}, after {}. {} left the store, {} reached the nodes, at {}.",
        ready, format_count(len(report.nodes), "node"), "has" if ready == 1 else "have",
        format_count(report.files, "file"), size(report.size), duration(report.seconds),
        size(report.store_bytes), size(moved), rate(moved, report.seconds),
    )  # fmt: skip
    columns = (
        "Node", "Ready", ">There before", ">From the store", ">From nodes", ">Failed", ">Seconds",
    )  # fmt: skip
    direct = write("Nodes also read from the store what others had: {}.", report.direct)
    unverified = write(
        "{} unverified at the source: nothing says what the digest should be.",
        format_count(report.unverified, "file"),
    )
    unconfirmed = write(
        "Of {} of them a part was read by one node alone, which nobody has confirmed. Give their "
        "`sha256`, or run it on two nodes.",
        report.unconfirmed,
    )
    drawn = Markdown()
    if warmed.pace:
        plot = pace_plot(warmed.pace, report.seconds, "Bytes that reached a node")
        drawn = picture(plot, "MB/s over the seconds of this run")
    return document(
        whole,
        table(columns, map(_row, report.nodes)),
        direct if report.direct else Markdown(),
        unverified if report.unverified else Markdown(),
        unconfirmed if report.unconfirmed else Markdown(),
        drawn,
    )


def _row(node: NodeReport) -> Sequence[object]:
    state = "yes" if node.ready else f"no: {node.why}"
    if not node.trusted:
        state = f"{clean_text(state)} (gave wrong bytes)"
    sizes = [size(n) for n in (node.cached, node.from_store, node.from_peers)]
    return (code(node.name), state, *sizes, f"{node.failures:,}", f"{node.seconds:.1f}")
