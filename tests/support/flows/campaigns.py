"""Small campaigns: a few files of text, a model that learns little, and what came of them."""

import io
import json
import random
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

from millrace.testing.process import REPOSITORY

WORDS = ["the", "mill", "takes", "its", "water", "from", "a", "channel", "wheel", "below"]
EPOCHS, WINDOWS, WORKERS, STEPS = 2, 2, 2, 3


def make_text(folder: Path, files: int = 60) -> Counter[str]:
    """A corpus; what its files say."""
    folder.mkdir(parents=True)
    dice = random.Random(5)
    said: Counter[str] = Counter()
    for number in range(files):
        text = f"{number:05d} " + " ".join(dice.choices(WORDS, k=400))
        (folder / f"{number:05d}.txt").write_text(text)
        said[text] += 1
    return said


def make_plan_settings(
    name: str, bucket: Any, text: Path, machines: dict[str, Any]
) -> dict[str, Any]:
    """A campaign of two epochs of two windows, with two workers."""
    return {
        "name": name,
        "bucket": bucket,
        "data": {
            "dataset": f"{name}-text",
            "source": {"url": text.as_uri(), "kind": "files"},
            "sharding": {"shard_bytes": 32768, "partition_bytes": 65536, "holdout": 0.2},
            "execution": {"workers": 0, "lease_timeout": "PT5S"},
        },
        "training": {
            "command": ["python", "-m", "examples.tiny_lm.train"],
            "initial_weights": {"job": f"{name}/first", "tensors": "model."},
            "workers": WORKERS,
            "machines": machines,
            "epochs": EPOCHS,
            "windows_per_epoch": WINDOWS,
            "run": {
                "codec": {"k": 112},
                "steps": STEPS,
                "window_length": "PT10M",
                "gather": {"poll_interval": "PT0.3S", "quorum": WORKERS},
            },
            "cooldown": {"time": "PT1M"},
            "aggregation": {"lease_timeout": "PT5S"},
        },
        "publish": {"job": f"{name}/final", "bucket": bucket},
    }


def make_local_workers() -> dict[str, Any]:
    """Workers as processes of this machine."""
    return {"kind": "local", "folder": str(REPOSITORY)}


def find_shards(store: Path, dataset: str) -> dict[str, tuple[int, int]]:
    """Each shard's inode, and when it was written: another one would have others."""
    found = sorted((store / dataset / "shards").glob("webdataset/*/*.tar"))
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in found}


def find_committed_shards(store: Path, dataset: str) -> dict[str, tuple[int, int]]:
    """Return the shards that a commit names. Another leader makes the others again."""
    records = [
        json.loads(path.read_bytes())["record"]
        for path in (store / dataset / "commits").glob("*/*.json")
    ]
    shards = (shard for record in records for shard in record.get("shards", ()))
    committed = {shard["key"].rpartition("/")[2] for shard in shards}
    return {name: one for name, one in find_shards(store, dataset).items() if name in committed}


def read_texts(store: Path, dataset: str) -> Counter[str]:
    """Return the samples of all shards, by Python's own tar reader."""
    said: Counter[str] = Counter()
    for path in (store / dataset / "shards").glob("webdataset/*/*.tar"):
        with tarfile.open(fileobj=io.BytesIO(path.read_bytes())) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                said[file.read().decode()] += 1
    return said


def find_digests(store: Path, job: str) -> set[str]:
    """The files of a job's newest checkpoint, by what they are called: their digests."""
    newest = max((store / job / "checkpoints").glob("step_*/metadata.json"))
    record = json.loads(newest.read_text())["record"]
    return {part["digest"] for part in record["parts"]}


def find_faults(store: Path, name: str, text: Counter[str]) -> list[str]:
    """Return the differences from the state after a campaign, from the store alone."""
    wrong: list[str] = []
    if read_texts(store, f"{name}-text") != text:
        wrong.append("samples are lost, or doubled")
    chain = sorted(path.name for path in (store / name / "run/gathers/1/chain").glob("*.json"))
    if chain != [f"{number:09d}.json" for number in range(EPOCHS * WINDOWS + 1)]:
        wrong.append(f"the chain is {chain}")
    for path in sorted((store / name / "run/gathers/1/chain").glob("*.json"))[1:]:
        taken = json.loads(path.read_text())["record"]["taken"]
        if len(taken) != WORKERS:
            wrong.append(f"in {path.stem} only {sorted(taken)} were taken")
    if find_digests(store, f"{name}/final") != find_digests(store, f"{name}/run/gathers/1"):
        wrong.append("other weights were published than the chain has come to")
    steps = [path.parent.name for path in (store / name / "final").glob("**/metadata.json")]
    if steps != [f"step_{EPOCHS * WINDOWS * STEPS:09d}"]:
        wrong.append(f"the weights of {steps} were published")
    epochs = sorted(path.name for path in (store / name / "model/epochs").glob("*.json"))
    if epochs != [f"{number:06d}.json" for number in range(EPOCHS)]:
        wrong.append(f"the epochs are {epochs}")
    if left := list((store / name / "run").glob("worker-*/gradient-*")):
        wrong.append(f"{len(left)} gradients were not cleaned away")
    return wrong
