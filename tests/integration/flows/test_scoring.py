"""The flow that scores the workers of a run, and its report."""

from pathlib import Path

import pytest

from flows.score_gradients import score_gradients
from millrace.gradients import ScorerOptions, iterate_scores
from millrace.storage import open_store, put, read
from tasks.scoring import describe_scores
from tests.prefect_server import PrefectServer
from tests.support.scored_run import ScoredRun

LOSS = """
import zlib
import torch


def make():
    def compute_loss(weights, window, uid):
        pages = torch.Generator().manual_seed(zlib.crc32(f"{window} {uid}".encode()))
        x = torch.randn(32, 64, generator=pages)
        with torch.no_grad():
            return torch.nn.functional.mse_loss(x @ weights["a"], x).item()

    return compute_loss
"""


def test_windows_are_scored_and_the_report_has_the_standings(
    prefect_api: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loss_of_this_test.py").write_text(LOSS)
    monkeypatch.syspath_prepend(tmp_path)
    store = open_store((tmp_path / "bucket").as_uri())
    run = ScoredRun(store, ["w0", "w1", "w2", "w3"], {"w3": "copy"})
    for _ in run.merge_windows(3):
        pass
    given = {"bucket": (tmp_path / "bucket").as_uri(), "run": "runs/one"}
    given["loss"] = "loss_of_this_test:make"

    done = prefect_api.call(score_gradients, **given, scoring=ScorerOptions(until=2))
    assert done.code == 0, done.output
    done = prefect_api.call(score_gradients, **given)
    assert done.code == 0, done.output
    scores = list(iterate_scores(store, run.keys))
    assert [one.evidence.window for one in scores] == [1, 2, 3]
    report = prefect_api.read_artifacts(done.run)["scores-of-workers"]
    assert "**3 windows** of `runs/one` scored, up to window 3" in report
    assert "| `w3` | 0.0% | 0.00 |" in report
    assert "100% of `w" in report
    assert "Without scores" not in report
    assert "Without scores: 1 window between these" in describe_scores("url", scores[::2])

    key = run.keys.make_scores_key(2)
    put(store, key, read(store, key).replace(b'"missed":0', b'"missed":1'))
    done = prefect_api.call(score_gradients, **given)
    assert done.code == 1
    assert "do not follow from their evidence" in done.output


def test_a_loss_that_is_no_function_is_a_sentence(
    prefect_api: PrefectServer, tmp_path: Path
) -> None:
    given = {"bucket": (tmp_path / "bucket").as_uri(), "run": "runs/one"}
    done = prefect_api.call(score_gradients, **given, loss="no_such_module:make")
    assert done.code == 1
    assert "no_such_module cannot be loaded" in done.output
