"""A bucket of Templar's, cleaned by rules and by presets."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from millrace.cleanup import CleanupSettings, execute, make_plan

OBJECTS = (
    "gradient-41-7-v0.2.80.pt",
    "gradient-42-7-v0.2.80.pt",
    "gradient-42-7-v0.2.8.pt",
    "checkpoint-40-1-v0.2.80.pt",
    "checkpoint-42-1-v0.2.80.pt",
    "start_window_v0.2.80.json",
    "start_window_v0.2.8.json",
    "aggregator-41-v0.2.8.pt",
    "gathers/0.2.8/41.npz",
    "checkpoints/0.2.80/42/__0_0.distcp",
    "notes.txt",
    "data/gradient-41-7-v0.2.80.pt",
)


@pytest.mark.parametrize(
    ("rules", "deleted"),
    [
        (
            [{"kinds": ["gradients"], "older_than": "0h", "keep_last": 1}],
            {"gradient-41-7-v0.2.80.pt"},
        ),
        (
            [{"kinds": ["checkpoints"], "older_than": "0h"}],
            {"checkpoint-40-1-v0.2.80.pt"},
        ),
        (
            [{"kinds": ["start windows"], "older_than": "0h"}],
            set[str](),
        ),
        (
            [{"preset": "clean_versions", "current_version": "0.2.80"}],
            {
                "gradient-42-7-v0.2.8.pt",
                "start_window_v0.2.8.json",
                "aggregator-41-v0.2.8.pt",
                "gathers/0.2.8/41.npz",
            },
        ),
        (
            [{"preset": "delete_gather", "version": "0.2.8"}],
            {"aggregator-41-v0.2.8.pt", "gathers/0.2.8/41.npz"},
        ),
        (
            [{"kinds": ["other"], "older_than": "0h", "match": "start_window*"}],
            {"start_window_v0.2.80.json", "start_window_v0.2.8.json"},
        ),
        ([{"preset": "cleanup_bucket"}], set[str]()),  # all are young
    ],
)
def test_a_cleaning_takes_templars_objects_as_it_takes_ours(
    tmp_path: Path, rules: list[dict[str, Any]], deleted: set[str]
) -> None:
    for key in OBJECTS:
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(b"x")
    settings = CleanupSettings.model_validate({"store": {"url": tmp_path.as_uri()}, "rules": rules})
    execute(settings, make_plan(settings).name)
    assert {key for key in OBJECTS if not (tmp_path / key).exists()} == deleted


def test_young_objects_stay(tmp_path: Path) -> None:
    (tmp_path / OBJECTS[0]).write_bytes(b"x")
    rule = {"kinds": ["gradients"], "older_than": timedelta(hours=1)}
    settings = CleanupSettings.model_validate(
        {"store": {"url": tmp_path.as_uri()}, "rules": [rule]}
    )
    assert make_plan(settings).objects == 0
