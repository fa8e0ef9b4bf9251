"""Report of the scores of workers."""

import tracemalloc
from collections.abc import Iterator

from millrace.gradients import WindowScores
from millrace.schemas.scores import (
    CopiedGradient,
    ScoringRules,
    Standing,
    WindowEvidence,
)
from tasks.scoring import describe_scores


def make_scores(windows: int, workers: int) -> Iterator[WindowScores]:
    """Yield the scores of a run, in whose second window a worker copied."""
    for window in range(1, windows + 1):
        uids = [f"worker-{number}-{window % 2}" for number in range(workers)]
        copies = {uids[0]: CopiedGradient(earlier=uids[1], overlap=0.5)} if window == 2 else {}
        evidence = WindowEvidence(
            window=window, evaluations={}, copies=copies, missing=(),
            valid=tuple(f"{uid}-of-{window}" for uid in uids for _ in range(50)),
        )  # fmt: skip
        standing = Standing(mu=1.0, sigma=1.0, score=float(window), weight=0.5)
        yield WindowScores.model_construct(
            run="runs/one",
            rules=ScoringRules(),
            evidence=evidence,
            standings=dict.fromkeys(uids, standing),
        )


def test_a_report_of_scores_holds_the_evidence_of_one_window_at_a_time() -> None:
    tracemalloc.start()
    report = describe_scores("memory://runs", make_scores(2000, 4))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000
    assert "**2,000 windows** of `runs/one` scored, up to window 2,000" in report
    assert "50% of `worker-1-0`" in report
    assert "Without scores" not in report
