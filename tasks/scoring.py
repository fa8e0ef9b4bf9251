"""Tasks that score the workers of a run of gradients."""

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prefect import get_run_logger

from millrace import gradients
from millrace.gradients import ScorerSettings, WindowScores
from millrace.schemas.scores import CopiedGradient, Standing
from millrace.storage import open_store
from tasks.formatting import format_count
from tasks.plot import draw_lines
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

_ROWS = 100  # workers in a report
_LINES = 6  # workers in the plot
_SHOWN = 500  # windows in the plot


@dataclass(frozen=True, slots=True)
class ScoringResult:
    """Result of a run of the scorer.

    Attributes:
        windows: Number of windows that the run has scored.
        newest_window: Number of the newest scored window; 0 if the run has scored none.
        seconds: Duration of the run.
    """

    windows: int
    newest_window: int
    seconds: float


@retried_task
def score_windows(settings: ScorerSettings) -> ScoringResult:
    """Score the merged windows without scores. A later run continues after a kill."""
    log, began = get_run_logger(), time.monotonic()
    compute_loss = gradients.load_compute_loss(settings.loss, Path.cwd())
    windows = newest = 0
    for scores in gradients.score_run(
        open_store(settings.store),
        settings.chain_keys,
        compute_loss,
        settings.scoring,
    ):
        windows, newest = windows + 1, scores.evidence.window
        log.info(
            "Window %d: %s evaluated, %d copied", newest,
            format_count(len(scores.evidence.evaluations), "worker"), len(scores.evidence.copies),
        )  # fmt: skip
    return ScoringResult(windows, newest, round(time.monotonic() - began, 3))


@retried_task
def report_scores(settings: ScorerSettings) -> None:
    """Publish a report of the standings. All scores are computed again from their evidence."""
    store, keys = open_store(settings.store), settings.chain_keys
    publish_report(
        describe_scores(store.make_url(keys.scores), gradients.iterate_scores(store, keys)),
        key="scores-of-workers",
        description="Scores of workers",
    )


def describe_scores(url: str, found: Iterable[WindowScores]) -> Markdown:
    """Return the report of the scores of a run. One window's evidence at a time is in memory."""
    count = 0
    first: int | None = None
    last: WindowScores | None = None
    copies: dict[str, CopiedGradient] = {}
    shown: deque[tuple[int, dict[str, float]]] = deque(maxlen=_SHOWN)
    for last in found:
        count += 1
        first = last.evidence.window if first is None else first
        copies |= last.evidence.copies
        scores = {uid: standing.score for uid, standing in last.standings.items()}
        shown.append((last.evidence.window, scores))
    if first is None or last is None:
        return join_blocks(format_markdown("{}: no window has scores.", format_code(url)))
    ranked = last.rank()
    whole = format_markdown(
        "{}: **{}** of {} scored, up to window {:,}, by the formula {}. The scores follow from the "
        "recorded evidence.",
        format_code(url), format_count(count, "window"), format_code(last.run),
        last.evidence.window, format_code(last.rules.formula),
    )  # fmt: skip
    unscored = last.evidence.window - first + 1 - count
    gaps = format_markdown(
        "Without scores: {} between these, since the gradients were deleted before. Score a run "
        "before it is cleaned.", format_count(unscored, "window"),
    )  # fmt: skip
    columns = (
        "Worker", ">Weight", ">Score", ">Rating", ">Own pages", ">Evaluated", ">Missed", "Copied",
    )  # fmt: skip
    return join_blocks(
        whole,
        *((gaps,) if unscored else ()),
        format_image(_plot_scores(shown, [uid for uid, _ in ranked[:_LINES]]), "scores of workers"),
        format_table(columns, (_make_row(uid, one, copies.get(uid)) for uid, one in ranked), _ROWS),
    )


def _make_row(uid: str, standing: Standing, copied: CopiedGradient | None) -> Sequence[object]:
    return (
        format_code(uid),
        f"{standing.weight:.1%}",
        f"{standing.score:.2f}",
        f"{standing.mu:.1f} ± {standing.sigma:.1f}",
        f"{standing.use:+.2f}",
        format_count(standing.evaluations, "window"),
        standing.missed,
        _describe_copy(copied),
    )


def _describe_copy(copied: CopiedGradient | None) -> Markdown | str:
    if copied is None:
        return ""
    if not copied.earlier:
        return "an equal gradient"
    return format_markdown("{:.0%} of {}", copied.overlap, format_code(copied.earlier))


def _plot_scores(shown: Iterable[tuple[int, Mapping[str, float]]], uids: Sequence[str]) -> str:
    lines = {
        uid: {window: scores[uid] for window, scores in shown if uid in scores} for uid in uids
    }
    return draw_lines(lines, "Scores of the best workers", "windows merged", "score")
