"""Tasks that merge the windows of a run of gradients."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefect import Task, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from millrace import gradients
from millrace.checkpoints.progress_events import CheckpointDamaged
from millrace.errors import ConflictError
from millrace.gradients import AggregatorSettings, ChainLink, TemplarImportSettings
from millrace.progress import Event
from millrace.schemas.chain import count_reasons
from millrace.storage import open_store
from tasks.formatting import format_count, format_duration, format_size, make_artifact_key
from tasks.plot import draw_windows
from tasks.progress import WindowProgress
from tasks.reports import (
    Markdown,
    format_code,
    format_image,
    format_markdown,
    format_table,
    join_blocks,
    publish_report,
)
from tasks.retries import RETRY_DELAYS, retried_task, should_retry

_SHOWN = 200  # windows in a report
_ROWS = 50


@dataclass(frozen=True, slots=True)
class AggregationResult:
    """Result of a run of the aggregator.

    Attributes:
        windows: Number of windows that the run has merged.
        newest_window: Number of the newest merged window.
        step: Step of the weights after that window; 0 if none was merged.
        state_digest: Digest of the weights after that window.
        seconds: Duration of the run.
    """

    windows: int
    newest_window: int
    step: int
    state_digest: str
    seconds: float


@retried_task
def count_merged_windows(settings: AggregatorSettings | TemplarImportSettings) -> int:
    """Count the merged windows of a run: the number of the newest one."""
    return max(0, gradients.find_newest_window(open_store(settings.store), settings.run.chain_keys))


@retried_task
def ensure_run_begun(settings: AggregatorSettings) -> None:
    """Commit the first link of a run, for which workers wait. No window is opened."""
    gradients.ensure_run_begun(settings)


def should_retry_aggregator(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Decide whether a failed aggregator is tried again. After a conflict it loads the chain."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, ConflictError) or should_retry(task, run, state)


@task(
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=should_retry_aggregator,
)
def run_aggregator(settings: AggregatorSettings, after: int) -> AggregationResult:
    """Merge the windows after a given window. A later run continues after a kill or a cancellation.

    Call this task, do not submit it: a task in another thread cannot be cancelled.
    """
    log, began = get_run_logger(), time.monotonic()
    last = None
    last_window = settings.last_window
    planned = None if last_window is None else max(0, last_window - after)
    key = make_artifact_key("progress", "aggregate", settings.run.name)
    with WindowProgress(key, len(settings.workers), planned) as progress:

        def handle_event(event: Event) -> None:
            if isinstance(event, CheckpointDamaged):
                log.warning("%s: %s", event.job, event.damage)
            progress(event)

        for link in gradients.aggregate_run(settings, progress=handle_event):
            last = link
            log.info(
                "Window %d: %d taken, %d excluded", link.window, len(link.taken), len(link.excluded)
            )
    return make_result(settings, last, after, began)


@retried_task
def import_windows(settings: TemplarImportSettings, after: int) -> AggregationResult:
    """Import the windows of a Templar run. A later run continues after a kill."""
    log, began = get_run_logger(), time.monotonic()
    source, last = settings.templar, None
    planned = max(0, source.last_window - source.first_window + 1 - after)
    key = make_artifact_key("progress", "import", settings.run.name)
    with WindowProgress(key, 0, planned) as progress:
        for link in gradients.import_templar_run(settings, progress=progress):
            last = link
            log.info(
                "Templar's window %d as window %d: %d taken, %d excluded",
                source.first_window + link.window - 1, link.window, len(link.taken),
                len(link.excluded),
            )  # fmt: skip
    return make_result(settings, last, after, began)


@retried_task
def report_windows(settings: AggregatorSettings | TemplarImportSettings, after: int) -> None:
    """Publish a report of the windows after a given window, read from the chain."""
    store, keys = open_store(settings.store), settings.run.chain_keys
    last = gradients.find_newest_window(store, keys)
    first = max(after, last - _SHOWN)
    found = list(gradients.iterate_links(store, keys, after=first)) if last > first >= 0 else []
    publish_report(
        describe_windows(store.make_url(keys.job), found, skipped_windows=first - after),
        key="aggregated-gradients",
        description="Merged windows",
    )


def make_result(
    settings: AggregatorSettings | TemplarImportSettings,
    last: ChainLink | None,
    after: int,
    began: float,
) -> AggregationResult:
    """Return the result of a run.

    Args:
        settings: Settings of the run.
        last: Newest link that this try has made. If there is none, an earlier try may have made it.
        after: Number of the window after which the run began.
        began: Monotonic time at which it began.
    """
    seconds = round(time.monotonic() - began, 3)
    if last is None:
        store, keys = open_store(settings.store), settings.run.chain_keys
        newest = gradients.find_newest_window(store, keys)
        link = gradients.read_link(store, keys, newest) if newest > after else None
        last = link if isinstance(link, ChainLink) else None
    if last is None:
        return AggregationResult(0, after, 0, "", seconds)
    return AggregationResult(last.window - after, last.window, last.step, last.state, seconds)


def describe_windows(
    url: str, windows: Sequence[ChainLink], *, skipped_windows: int = 0
) -> Markdown:
    """Return the report of the merged windows."""
    if not windows:
        return join_blocks(
            format_markdown("{}: no window was merged in this run.", format_code(url))
        )
    last = windows[-1]
    taken = sum(len(link.taken) for link in windows)
    sent = sum(one.size for link in windows for one in link.taken.values())
    merged = sum(link.size for link in windows)
    whole = format_markdown(
        "{}: **{}** merged, up to window {:,} at step {:,}. {} of {} became updates "
        "of {} by the rule {}, applied by {}.",
        format_code(url), format_count(len(windows), "window"), last.window, last.step,
        format_count(taken, "gradient"), format_size(sent), format_size(merged),
        format_code(last.merge.rule), format_code(last.outer.kind),
    )  # fmt: skip
    columns = (
        ">Window", ">Step", ">Taken", ">Excluded", "L2 norms", ">Received",
        ">Merged", ">Time",
    )  # fmt: skip
    hidden = skipped_windows + max(0, len(windows) - _ROWS)
    earlier = format_markdown(
        "{} of this run not shown here.", format_count(hidden, "earlier window")
    )
    return join_blocks(
        whole,
        format_image(_plot_windows(windows), "participation and norms of the windows"),
        format_table(columns, map(_make_row, windows[-_ROWS:])),
        earlier if hidden else Markdown(),
        _tabulate_workers(windows),
    )


def _make_row(link: ChainLink) -> Sequence[object]:
    norms = sorted(one.norm for one in link.taken.values())
    return (
        f"{link.window:,}",
        f"{link.step:,}",
        len(link.taken),
        count_reasons(link.excluded.values()) or "0",
        f"{norms[0]:.3g} / {statistics.median(norms):.3g} / {norms[-1]:.3g}" if norms else "",
        format_size(sum(one.size for one in link.taken.values())),
        format_size(link.size),
        format_duration(link.seconds),
    )


def _tabulate_workers(windows: Sequence[ChainLink]) -> Markdown:
    """Tabulate how often each worker was taken, its factor, and its last exclusion."""
    names = sorted({uid for link in windows for uid in (*link.taken, *link.excluded)})
    columns = ("Worker", ">Taken", ">Mean factor", "Excluded", "Last reason")
    rows: list[Sequence[object]] = []
    for uid in names:
        factors = [link.taken[uid].sum_factor for link in windows if uid in link.taken]
        excluded = [link.excluded[uid] for link in windows if uid in link.excluded]
        mean = f"{statistics.fmean(factors):.3g}" if factors else ""
        why = excluded[-1].sentence if excluded else ""
        rows.append((format_code(uid), len(factors), mean, count_reasons(excluded) or "0", why))
    return format_table(columns, rows)


def _plot_windows(windows: Sequence[ChainLink]) -> str:
    return draw_windows(
        {link.window: len(link.taken) for link in windows},
        {link.window: [one.norm for one in link.taken.values()] for link in windows},
        "Gradients taken (bars), and their norms (line: median, strokes: least to most)",
    )
