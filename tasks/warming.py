"""Warm the nodes of a cluster, and say what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from millrace import swarm
from millrace.swarm import PrewarmReport, PrewarmSettings
from tasks.plot import pace_plot
from tasks.progress import SwarmProgress
from tasks.retries import PAUSES, passing
from tasks.words import artifact_key, count, duration, rate, size


@dataclass(frozen=True, slots=True)
class Warmed:
    """What a run came to.

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
    create_markdown_artifact(describe(warmed), key="prewarm", description="The nodes, warmed")


def describe(warmed: Warmed) -> str:
    """The report, as Markdown."""
    report = warmed.report
    ready = sum(node.ready for node in report.nodes)
    moved = sum(node.from_store + node.from_peers for node in report.nodes)
    whole = (
        f"**{ready} of {count(len(report.nodes), 'node')}** {'has' if ready == 1 else 'have'} all "
        f"of {count(report.files, 'file')}, {size(report.size)}, after "
        f"{duration(report.seconds)}. {size(report.store_bytes)} left the store, {size(moved)} "
        f"reached the nodes, at {rate(moved, report.seconds)}."
    )
    lines = [
        whole,
        "",
        "| Node | Ready | There before | From the store | From nodes | Failed | Seconds |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for node in report.nodes:
        state = "yes" if node.ready else f"no: {node.why}"
        state += "" if node.trusted else " (gave wrong bytes)"
        sizes = [size(n) for n in (node.cached, node.from_store, node.from_peers)]
        cells = [f"`{node.name}`", state, *sizes, f"{node.failures:,}", f"{node.seconds:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    if report.direct:
        lines += ["", f"Nodes also read from the store what others had: {report.direct}."]
    if report.unverified:
        said = f"{count(report.unverified, 'file')} unverified at the source: nothing says what "
        lines += ["", f"{said}the digest should be. All nodes have the same bytes."]
    if warmed.pace:
        picture = pace_plot(warmed.pace, report.seconds, "Bytes that reached a node")
        lines += ["", f"![MB/s over the seconds of this run]({picture})"]
    return "\n".join(lines) + "\n"
