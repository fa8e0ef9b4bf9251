"""A dataset is finalized from its ledger, of which only a part is in memory."""

import gc
import json
import random
import secrets
from pathlib import Path

import pytest

from millrace import errors
from millrace.dataset_ledger import iterate_commits, iterate_partition_ledgers
from millrace.datasets import PipelineSettings, plan_dataset, shard_dataset
from millrace.datasets.finalize import finalize_dataset
from millrace.datasets.plan import commit_plan
from millrace.datasets.plan_digest import compute_plan_digest
from millrace.datasets.progress_events import ManifestComputed
from millrace.datasets.quarantine import QuarantineLimit
from millrace.digest import compute_digest, hash_blocks
from millrace.keys.datasets import CommitName, DatasetKeys
from millrace.progress import Event, Progress, ignore_event
from millrace.records import commit_once, fetch
from millrace.schemas.dataset import (
    CommittedShard,
    DatasetPlan,
    Manifest,
    PartitionEnd,
    ShardCommit,
)
from millrace.storage import Store, delete, list_objects, open_store, put, read

KEYS = DatasetKeys("rows")
BODY = b"shard"


def make_settings(folder: Path, store: str, partitions: int) -> PipelineSettings:
    """A dataset whose partitions have one row each."""
    (folder / "source").mkdir()
    rows = (json.dumps({"text": f"{number:09d}"}) for number in range(partitions))
    (folder / "source" / "rows.jsonl").write_text("".join(f"{row:1023}\n" for row in rows))
    return PipelineSettings.model_validate(
        {
            "dataset": "rows",
            "source": {"url": (folder / "source").as_uri(), "columns": {"txt": "text"}},
            "store": {"url": store},
            "sharding": {
                "partition_bytes": 1024,
                "shard_bytes": 1 << 16,
                "holdout": 0.2,
                "formats": ["webdataset", "mds"],
            },
            "execution": {"workers": 0},
        }
    )


def finalize(settings: PipelineSettings, progress: Progress = ignore_event) -> Manifest:
    store = open_store(settings.store)
    plan = fetch(store, KEYS.plan, DatasetPlan)
    limit = QuarantineLimit(store, KEYS, plan, settings.execution)
    files = settings.source.open_files()
    return finalize_dataset(store, KEYS, plan, files=files, limit=limit, progress=progress)


def fill_ledger(store: Store, plan: DatasetPlan) -> None:
    """Commit a shard of each partition, in a random order."""
    digest = compute_plan_digest(plan)
    partitions = list(plan.partitions)
    random.Random(0).shuffle(partitions)
    for partition in partitions:
        name = CommitName(partition.name, 0)
        key = KEYS.make_shard_key("webdataset", partition.split, name, "tar")
        shard = CommittedShard(
            format="webdataset", key=key, size=len(BODY), digest=compute_digest(BODY)
        )
        commit = ShardCommit(
            partition=partition.name, number=0, shards=(shard,), samples=1, start_cursor=0,
            next_cursor=1, plan_digest=digest,
        )  # fmt: skip
        end = PartitionEnd(
            partition=partition.name, commits=1, samples=1, size=len(BODY), quarantined=0,
            plan_digest=digest,
        )  # fmt: skip
        put(store, key, BODY)
        commit_once(store, KEYS.make_commit_key(name), commit)
        commit_once(store, KEYS.make_end_key(partition.name), end)


@pytest.mark.parametrize("backend", ["folder", "memory"])
def test_the_manifest_has_the_shards_in_the_order_of_their_commits(tmp_path, backend):
    url = (tmp_path / "store").as_uri() if backend == "folder" else f"memory://{tmp_path.name}"
    settings = make_settings(tmp_path, url, partitions=30)
    manifest = shard_dataset(settings).manifest
    store = open_store(settings.store)
    commits = sorted(iterate_commits(store, KEYS), key=lambda one: (one.partition, one.number))
    assert [(one.key, one.digest, one.size) for one in manifest.shards] == [
        (shard.key, shard.digest, shard.size) for one in commits for shard in one.shards
    ]
    assert (len(manifest.shards), manifest.samples) == (60, {"train": 24, "val": 6})
    assert read(store, KEYS.block_digests) == b"".join(
        hash_blocks(read(store, shard.key)) for shard in manifest.shards
    )
    ledgers = list(iterate_partition_ledgers(store, KEYS))
    assert [one.partition for one in ledgers] == [one.partition for one in commits]
    assert all(one.end and one.end.commits == len(one.commits) == 1 for one in ledgers)
    before = read(store, KEYS.index)
    delete(store, [KEYS.manifest, KEYS.index])
    assert finalize(settings) == manifest
    assert read(store, KEYS.index) == before


@pytest.fixture
def ledger(tmp_path: Path) -> tuple[PipelineSettings, Store]:
    """Settings and store of a dataset of 40 ended partitions, without a manifest."""
    settings = make_settings(tmp_path, f"memory://{secrets.token_hex(8)}", partitions=40)
    store = open_store(settings.store)
    fill_ledger(store, commit_plan(store, KEYS, plan_dataset(settings), {}))
    return settings, store


@pytest.mark.parametrize(
    ("lost", "what"),
    [
        ("train-00007/000000", "ledger of train-00007 has 0 commits, and its end record names 1"),
        ("train-00007/end", "train-00007/end"),
    ],
)
def test_a_ledger_with_a_gap_is_refused(ledger, lost, what):
    settings, store = ledger
    delete(store, [f"{KEYS.commits}{lost}.json"])
    with pytest.raises((errors.ConflictError, errors.NotFoundError), match=what):
        finalize(settings)
    assert not list(list_objects(store, KEYS.manifest))


def test_a_partition_without_any_record_is_refused(ledger):
    settings, store = ledger
    delete(store, [f"{KEYS.commits}train-00007/{name}.json" for name in ("000000", "end")])
    with pytest.raises(errors.NotFoundError, match="train-00007/end"):
        finalize(settings)


@pytest.mark.parametrize("name", ["000000", "end"])
def test_a_damaged_record_is_named_rather_than_the_gap_that_it_leaves(ledger, name):
    settings, store = ledger
    put(store, f"{KEYS.commits}train-00007/{name}.json", b"nonsense")
    with pytest.raises(errors.CorruptError, match=rf"train-00007/{name}\.json is not a record"):
        finalize(settings)


def test_the_end_of_another_plan_is_refused(ledger):
    settings, store = ledger
    key = KEYS.make_end_key("train-00007")
    end = fetch(store, key, PartitionEnd)
    delete(store, [key])
    commit_once(store, key, end.model_copy(update={"plan_digest": compute_digest(b"another")}))
    with pytest.raises(errors.ConflictError, match="train-00007 has a commit of another plan"):
        finalize(settings)


def count_commits() -> int:
    """Return the number of commits in memory."""
    gc.collect()
    return sum(type(one) is ShardCommit for one in gc.get_objects())


def test_no_commit_is_in_memory_when_the_manifest_is_made(ledger):
    settings, store = ledger
    assert len(list(iterate_commits(store, KEYS))) == 40
    held: list[int] = []

    def count(event: Event) -> None:
        if isinstance(event, ManifestComputed):
            held.append(count_commits())

    before = count_commits()
    assert len(finalize(settings, count).shards) == 40
    assert held == [before]
