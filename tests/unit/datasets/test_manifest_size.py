"""A dataset of more shards than its manifest can name is refused before the first shard."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from millrace import errors
from millrace.datasets import (
    PipelineSettings,
    plan_dataset,
    preflight_dataset,
    shard_dataset,
)
from millrace.datasets.manifest_size import check_manifest_size
from millrace.datasets.plan import commit_plan
from millrace.digest import compute_digest, dump_canonical_json
from millrace.keys.datasets import DatasetKeys
from millrace.schemas.dataset import DatasetPlan, Manifest, Partition, SampleList
from millrace.storage import list_objects, open_store

SHARD = 230  # bytes of a shard in the manifest, about


def make_settings(folder: Path, **sharding: Any) -> PipelineSettings:
    """A dataset of 100 kB, in one partition by default."""
    (folder / "source").mkdir(exist_ok=True)
    row = json.dumps({"text": "x" * 980}) + "\n"
    (folder / "source" / "rows.jsonl").write_text(row * 100)
    return PipelineSettings.model_validate(
        {
            "dataset": "rows",
            "source": {"url": (folder / "source").as_uri(), "columns": {"txt": "text"}},
            "store": {"url": (folder / "store").as_uri()},
            "sharding": {"shard_bytes": 10240, **sharding},
            "execution": {"workers": 0},
        }
    )


def make_plan(folder: Path, partitions: int, samples: int, **sharding: Any) -> DatasetPlan:
    """A plan whose partitions have a known number of samples of a byte."""
    plan = plan_dataset(make_settings(folder, **sharding))
    found = SampleList(listing="x", digest=compute_digest(b""), samples=samples, size=samples)
    made = [Partition(name=f"train-{n:05d}", split="train", source_range=found)
            for n in range(partitions)]  # fmt: skip
    return plan.model_copy(update={"partitions": tuple(made)})


def limit_shards(monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    """Let a manifest name about this number of shards at most."""
    monkeypatch.setattr(Manifest, "record_bytes", shards * SHARD)


def test_far_too_many_shards_are_refused_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(tmp_path, formats=["webdataset", "mds"])
    limit_shards(monkeypatch, 4)  # of each format two, and nine are expected
    (refusal,) = preflight_dataset(settings)[1].refusals
    assert "rows would have about 18 shards, and its manifest can name about 4: " in refusal
    assert "raise `shard_bytes` and `shard_samples`, or name fewer `formats`, or" in refusal
    with pytest.raises(errors.ConfigurationError) as refused:
        shard_dataset(settings)
    assert str(refused.value) == refusal
    assert not list(list_objects(open_store(settings.store), "rows/"))
    larger = make_settings(tmp_path, formats=["webdataset", "mds"], shard_bytes=200_000)
    assert shard_dataset(larger).new_shards == 2


def test_an_estimate_that_filters_may_correct_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep = {"kind": "filter", "field": "txt", "min_size": 2000}
    settings = make_settings(tmp_path, transforms=[keep])
    limit_shards(monkeypatch, 3)
    found = preflight_dataset(settings)[1]
    assert found.refusals == ()
    (note,) = (one for one in found.notes if "manifest" in one)
    assert note.startswith("Unless most of its source is left out, rows would have about 9 shards")
    allowed = settings.model_dump() | {"execution": {"workers": 0, "allow_empty": True}}
    assert shard_dataset(PipelineSettings.model_validate(allowed)).samples == 0
    assert note in caplog.text


def test_a_plan_that_was_committed_before_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(tmp_path)
    store, keys, plan = open_store(settings.store), DatasetKeys("rows"), plan_dataset(settings)
    commit_plan(store, keys, plan, {})
    limit_shards(monkeypatch, 1)
    assert commit_plan(store, keys, plan, {}) == plan
    assert preflight_dataset(settings)[1].refusals == ()


@pytest.mark.parametrize(
    ("partitions", "samples", "shard_samples", "said"),
    [(10, 1, 100, "`partition_bytes` and `partition_files`"), (1, 1000, 100, "`shard_samples`")],
)
def test_shards_that_a_plan_must_have_are_refused_above_the_limit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    partitions: int,
    samples: int,
    shard_samples: int,
    said: str,
) -> None:
    plan = make_plan(tmp_path, partitions, samples, shard_samples=shard_samples)
    limit_shards(monkeypatch, 12)
    assert check_manifest_size(plan) == ""
    limit_shards(monkeypatch, 8)
    with pytest.raises(errors.ConfigurationError, match="would have about 10 shards") as refused:
        check_manifest_size(plan)
    assert said in str(refused.value)


def test_rows_that_transforms_may_drop_are_only_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = {"kind": "filter", "field": "txt", "min_size": 2}
    plan = make_plan(tmp_path, 1, 1000, shard_samples=100, transforms=[keep])
    limit_shards(monkeypatch, 8)
    assert "would have about 10 shards" in check_manifest_size(plan)
    limit_shards(monkeypatch, 2)
    with pytest.raises(errors.ConfigurationError):
        check_manifest_size(plan)


def test_the_estimate_of_a_shard_is_near_its_bytes_in_a_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = shard_dataset(make_settings(tmp_path)).manifest
    assert len(manifest.shards) > 9
    sizes = [len(dump_canonical_json(asdict(shard))) + 1 for shard in manifest.shards]
    assert SHARD * 0.9 < min(sizes) <= max(sizes) < SHARD * 1.5
    plan = make_plan(tmp_path, len(sizes), 1)
    monkeypatch.setattr(Manifest, "record_bytes", sum(sizes))
    assert check_manifest_size(plan) == ""
    monkeypatch.setattr(Manifest, "record_bytes", sum(sizes) // 2)
    with pytest.raises(errors.ConfigurationError):
        check_manifest_size(plan)
