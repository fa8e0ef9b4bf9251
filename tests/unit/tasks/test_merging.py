"""The report of a run of gradients."""

import base64
import re
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree as ET

from millrace.gradients import (
    AggregatorSettings,
    ChainLink,
    Codec,
    ExclusionReason,
    MergeRule,
    MergeSettings,
    OuterOptimizer,
)
from millrace.records import commit_once
from millrace.schemas.chain import ExcludedWorker, TakenGradient, UpdateEntry
from millrace.storage import open_store
from tasks.merging import describe_windows, make_result
from tasks.plot import draw_windows

DIGEST = "blake3:" + "0" * 64


def link(
    window: int, norms: dict[str, float], out: dict[str, ExcludedWorker] | None = None
) -> ChainLink:
    taken = {
        uid: TakenGradient(
            scale=1,
            sum_factor=0.5,
            share=0.5,
            norm=norm,
            digest=DIGEST,
            size=1000,
            tokens=0,
            written=datetime(2026, 1, 1, tzinfo=UTC),
        )
        for uid, norm in norms.items()
    }
    return ChainLink(
        run="runs/one", window=window, step=10 * window,
        updates=(UpdateEntry(key="k", digest=DIGEST, size=2500, tensors=0),),
        codec=Codec(), names=(), shapes=(), outer=OuterOptimizer(),
        merge=MergeSettings(rule=MergeRule.CENTERED_CLIP), taken=taken,
        excluded=out or {}, seconds=1.5, scores="", previous="", state="",
    )  # fmt: skip


def test_each_window_and_each_worker_has_a_row():
    late = ExcludedWorker(reason=ExclusionReason.LATE, sentence="It | was late.")
    missing = ExcludedWorker(reason=ExclusionReason.MISSING, sentence="Nothing came.")
    report = describe_windows(
        "s3://bucket/runs/one",
        [
            link(7, {"a": 1.0, "b": 3.0, "c": 2.0}),
            link(8, {"a": 1.5}, {"b": late, "c": missing}),
            link(9, {}, dict.fromkeys("abc", missing)),
        ],
        skipped_windows=6,
    )
    assert "**3 windows** merged, up to window 9 at step 90. 4 gradients of 4.0 kB" in report
    assert "by the rule `centered clip`, applied by `sgd`" in report
    assert "| 7 | 70 | 3 | 0 | 1 / 2 / 3 | 3.0 kB | 2.5 kB | 1.5 s |" in report
    assert "| 8 | 80 | 1 | 1 late, 1 missing | 1.5 / 1.5 / 1.5 |" in report
    assert "| 9 | 90 | 0 | 3 missing |  | 0 bytes |" in report
    assert "6 earlier windows of this run not shown here." in report
    assert "| `a` | 2 | 0.5 | 1 missing | Nothing came. |" in report
    assert "| `b` | 1 | 0.5 | 1 late, 1 missing | Nothing came. |" in report


def test_a_run_that_merged_nothing_says_so():
    assert describe_windows("s3://bucket/runs/one", []).endswith(
        "no window was merged in this run.\n"
    )


def test_a_sentence_does_not_break_the_table():
    late = ExcludedWorker(reason=ExclusionReason.LATE, sentence="It | was late.")
    report = describe_windows("here", [link(1, {}, {"b": late})])
    assert r"It \| was late." in report


def drawn(uri: str) -> ET.Element:
    return ET.fromstring(base64.b64decode(uri.partition(",")[2]))


def test_the_picture_has_a_bar_a_window_and_a_line_of_norms():
    picture = drawn(draw_windows({3: 2, 4: 1, 5: 0}, {3: [1.0, 2.0], 4: [4.0], 5: []}, "a & b"))
    texts = [element.text for element in picture.iter() if element.text]
    assert {"a & b", "window", "3", "4", "5"} <= set(texts)
    bars = [element for element in picture.iter() if element.get("fill-opacity")]
    heights = [float(bar.get("height", "0")) for bar in bars]
    assert heights[0] == 2 * heights[1] > heights[2] == 0
    (line,) = [element for element in picture.iter() if element.tag.endswith("polyline")]
    points = re.findall(r"[\d.]+,([\d.]+)", line.get("points", ""))
    assert len(points) == 2
    assert float(points[0]) > float(points[1])  # a larger norm is higher


def test_a_window_without_anybody_can_be_drawn():
    assert drawn(draw_windows({1: 0}, {1: []}, "nobody")) is not None


def test_the_result_has_windows_that_an_earlier_try_has_merged(tmp_path: Path):
    """Its last save failed, so the task was tried again and found nothing to merge."""
    settings = AggregatorSettings.model_validate(
        {
            "store": {"url": tmp_path.as_uri()},
            "run": {"run": "runs/one", "windows": 9, "steps": 10},
            "workers": ["a"],
            "initial_weights": {"job": "first"},
        }
    )
    store, keys = open_store(settings.store), settings.run.chain_keys
    for window in (7, 8, 9):
        commit_once(store, keys.make_link_key(window), link(window, {"a": 1.0}))
    found = make_result(settings, None, 7, 0.0)
    assert (found.windows, found.newest_window, found.step) == (2, 9, 90)
    assert make_result(settings, link(8, {}), 7, 0.0).newest_window == 8
    nothing = make_result(settings, None, 9, 0.0)
    assert (nothing.windows, nothing.newest_window, nothing.step) == (0, 9, 0)
