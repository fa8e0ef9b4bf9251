"""The windows of a run of gradients, as Prefect sees them."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from millrace import gradients
from millrace.gradients import AggregatorSettings, ChainLink, WeightsSource
from millrace.progress import Event
from millrace.schemas.chain import count_reasons
from millrace.storage import StoreSpec, open_store
from tasks.plot import windows_plot
from tasks.progress import WindowProgress
from tasks.reports import Markdown, code, document, picture, publish, table, write
from tasks.retries import PAUSES, passing
from tasks.words import artifact_key, duration, format_count, size

_SHOWN = 200  # windows in a report
_ROWS = 50


@dataclass(frozen=True, slots=True)
class Aggregated:
    """Result of a run of the aggregator.

    Attributes:
        windows: How many it has merged.
        last: The number of the last one.
        step: That the weights are at after it; 0 if it has merged none.
        state: The digest of the weights after it.
        seconds: How long it took.
    """

    windows: int
    last: int
    step: int
    state: str
    seconds: float


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def last_window(settings: AggregatorSettings) -> int:
    """Return the number of the newest window that is merged; 0 before the first."""
    return max(0, gradients.find_newest_window(open_store(settings.store), settings.run.chain))


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def check_weights(settings: WeightsSource, place: StoreSpec) -> None:
    """Refuse a checkpoint that no run can begin with, before anything is made or rented.

    Raises:
        NotFoundError, CorruptError: The checkpoint does not exist, or is damaged.
        ConfigurationError: It has no tensors of these names.
    """
    store = open_store(place, make_folder=False)
    gradients.check_weights(store, settings.job, step=settings.step, tensors=settings.tensors)


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def begin_chain(settings: AggregatorSettings) -> None:
    """Commit the first link of a run, which workers wait for; open no window."""
    gradients.begin_chain(settings)


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def aggregate_windows(settings: AggregatorSettings, before: int) -> Aggregated:
    """Merge window after window, behind one. Killed or cancelled, a later run goes on.

    Call it, do not submit it: a task in another thread does not hear that it is cancelled.
    """
    log, began = get_run_logger(), time.monotonic()
    last = None
    planned = _planned(settings, before)
    if planned is not None:  # so that a second try does not begin to count anew
        settings = settings.model_copy(update={"windows": None, "until": before + planned})
    key = artifact_key("progress", "aggregate", settings.run.run)
    with WindowProgress(key, len(settings.workers), planned) as progress:

        def tell(event: Event) -> None:
            if event.name == "checkpoint.damaged":
                log.warning("%s: %s", event.subject, event.figures["damage"])
            progress(event)

        for link in gradients.aggregate_run(settings, progress=tell):
            last = link
            log.info("Window %d: %d in, %d out", link.window, len(link.taken), len(link.out))
    seconds = round(time.monotonic() - began, 3)
    if last is None:
        return Aggregated(0, before, 0, "", seconds)
    return Aggregated(last.window - before, last.window, last.step, last.state, seconds)


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def report_windows(settings: AggregatorSettings, before: int) -> None:
    """Leave a report that a person wants to read, of the windows after one. The chain tells all."""
    store, keys = open_store(settings.store), settings.run.chain
    last = gradients.find_newest_window(store, keys)
    first = max(before, last - _SHOWN)
    found = list(gradients.iterate_links(store, keys, after=first)) if last > first >= 0 else []
    publish(
        describe(store.url_of(keys.job), found, skipped=first - before),
        key="aggregated-gradients",
        description="The windows that were merged",
    )


def describe(place: str, windows: Sequence[ChainLink], *, skipped: int = 0) -> Markdown:
    """Return the report."""
    if not windows:
        return document(write("{}: no window was merged in this run.", code(place)))
    last = windows[-1]
    taken = sum(len(link.taken) for link in windows)
    sent = sum(one.size for link in windows for one in link.taken.values())
    merged = sum(link.size for link in windows)
    whole = write(
        "{}: **{}** merged, up to window {:,} at step {:,}. {} of {} came to {}, by the rule {}, "
        "applied by {}.",
        code(place), format_count(len(windows), "window"), last.window, last.step,
        format_count(taken, "gradient"), size(sent), size(merged), code(last.rule),
        code(last.outer.kind),
    )  # fmt: skip
    columns = (
        ">window", ">step", ">in", ">out", "norm, least to most", ">received", ">merged",
        ">gathered in",
    )  # fmt: skip
    hidden = skipped + max(0, len(windows) - _ROWS)
    earlier = write("{} of this run not shown here.", format_count(hidden, "earlier window"))
    return document(
        whole,
        picture(_picture(windows), "participation and norms of the windows"),
        table(columns, map(_row, windows[-_ROWS:])),
        earlier if hidden else Markdown(),
        _workers(windows),
    )


def _row(link: ChainLink) -> Sequence[object]:
    norms = sorted(one.norm for one in link.taken.values())
    return (
        f"{link.window:,}",
        f"{link.step:,}",
        len(link.taken),
        count_reasons(link.out.values()) or "0",
        f"{norms[0]:.3g}, {statistics.median(norms):.3g}, {norms[-1]:.3g}" if norms else "",
        size(sum(one.size for one in link.taken.values())),
        size(link.size),
        duration(link.seconds),
    )


def _workers(windows: Sequence[ChainLink]) -> Markdown:
    """Tell who was in how often, with what weight, and why not."""
    names = sorted({uid for link in windows for uid in (*link.taken, *link.out)})
    columns = ("worker", ">in", ">mean weight", "out", "the last time, because")
    rows: list[Sequence[object]] = []
    for uid in names:
        weights = [link.taken[uid].weight for link in windows if uid in link.taken]
        out = [link.out[uid] for link in windows if uid in link.out]
        mean = f"{statistics.fmean(weights):.3g}" if weights else ""
        why = out[-1].sentence if out else ""
        rows.append((code(uid), len(weights), mean, count_reasons(out) or "0", why))
    return table(columns, rows)


def _picture(windows: Sequence[ChainLink]) -> str:
    return windows_plot(
        {link.window: len(link.taken) for link in windows},
        {link.window: [one.norm for one in link.taken.values()] for link in windows},
        "Gradients taken (bars), and their norms (line: median, band: least to most)",
    )


def _planned(settings: AggregatorSettings, before: int) -> int | None:
    """Return the largest number of windows, if that is known."""
    to_last = None if settings.last is None else max(0, settings.last - before)
    known = [number for number in (settings.windows, to_last) if number is not None]
    return min(known, default=None)
