"""Shard on three nodes of a Ray cluster on a rig, and kill one of them in the middle."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.ray_shards import FILE_SIZE, Corpus, start_cluster, start_driver
from millrace.datasets import PipelineSettings, shard_dataset

NODES, FILES = 3, 24
SHARD_SIZE = FILE_SIZE // 4  # so that a partition has several commits


def run_on_ray(report: Callable[[str], None]) -> list[str]:
    """Kill a node after a third of the commits, and return what is wrong with the dataset."""
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        corpus = Corpus.make(Path(name), FILES)
        expected = _shard_here(Path(name), corpus)
    with (
        start_cluster(corpus, NODES) as (rig, store, ray),
        start_driver(rig.nodes[0], "millrace", store, ray, SHARD_SIZE) as driver,
    ):
        assert driver.stdout is not None
        kinds: list[str] = []
        last: dict[str, Any] = {}
        for line in driver.stdout:
            last = json.loads(line)
            kinds.append(last.get("kind", ""))
            commits = kinds.count("shard.committed")
            if kinds[-1] == "shard.committed" and commits == len(expected) // 3:
                rig.nodes[-1].kill()
    wrong: list[str] = []
    if driver.returncode:
        wrong.append(f"the driver ended with exit code {driver.returncode}")
    if last.get("shards") != expected:
        wrong.append("the shards differ from those of one machine")
    if not last.get("intact"):
        wrong.append("the dataset does not verify")
    lost = kinds.count("worker.lost")
    if not lost:
        wrong.append("no task was lost")
    report(
        f"ray: {len(expected)} shards on {NODES} nodes in {last.get('seconds', 0):.1f} s, one "
        f"node killed, {lost} of its tasks lost; wrong {len(wrong)}"
    )
    return wrong


def _shard_here(folder: Path, corpus: Corpus) -> dict[str, str]:
    """Shard the corpus on this machine, and return the digests of the shards by key."""
    (folder / "source").mkdir()
    for number, body in enumerate(corpus.files):
        (folder / "source" / f"{number:05d}.jsonl").write_bytes(body)
    settings = PipelineSettings.model_validate(
        {
            "dataset": "text",
            "source": {"url": (folder / "source").as_uri(), "columns": {"txt": "text"}},
            "store": {"url": (folder / "made").as_uri()},
            "sharding": {"shard_bytes": SHARD_SIZE, "partition_bytes": FILE_SIZE},
        }
    )
    shards = shard_dataset(settings).manifest.shards
    return {shard.key: shard.digest for shard in shards}
