"""Clean a bucket of all roles, killed in the middle: the oracle says what is to be left."""

import json
import multiprocessing
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from millrace.cleanup import CleanupKind, CleanupSettings, Rule, execute, make_plan
from millrace.cleanup.plans import open_plan
from millrace.deletion import ObjectsDeleted
from millrace.progress import Event
from millrace.storage import StoreSpec, list_objects, open_store
from tests.oracle import judge_checkpoints
from tests.support.cleanup.judge import Judge, ListedBucket, ListedObject
from tests.support.cleanup.material import BucketBuilder

LARGE = 2**18  # repetitions of a text, whose file has several blocks
VERSIONS = ("0.2.1", "0.2.10", "0.2.11")
NOW = timedelta(0)
RULES = (
    Rule(kinds=(CleanupKind.GRADIENTS,), version="<0.2.11", keep_last=2, older_than=NOW),
    Rule(
        kinds=(CleanupKind.GRADIENTS,), version="0.2.11", keep_every=4, keep_last=1, older_than=NOW
    ),
    Rule(kinds=(CleanupKind.START_WINDOWS,), version="!=0.2.11", older_than=NOW),
    Rule(kinds=(CleanupKind.GATHERS,), keep_last=3, older_than=NOW),
    Rule(kinds=(CleanupKind.CHECKPOINTS,), keep_last=2, older_than=NOW),
    Rule(
        kinds=(CleanupKind.CHECKPOINT_ORPHANS, CleanupKind.DATASET_ORPHANS, CleanupKind.TEMPORARY),
        older_than=NOW,
    ),
    Rule(kinds=(CleanupKind.DATASETS,), name="old", older_than=NOW),
)


@dataclass(frozen=True, slots=True)
class Came:
    """Result of a cleaning.

    Attributes:
        objects: In the bucket before.
        planned: Of them in the plan.
        differing: Keys in which the plan and the oracle differ.
        killed: Processes that were killed when they had deleted some of it and not all.
        lost: Keys that are gone and should not be.
        left: Keys that are there and should not be.
        unfit: Faults of the checkpoints that are left.
    """

    objects: int
    planned: int
    differing: int
    killed: int
    lost: int
    left: int
    unfit: tuple[str, ...]

    @property
    def wrong(self) -> int:
        return self.differing + self.lost + self.left + len(self.unfit)


def fill(store_of: Callable[[], Any], objects: int, seed: int) -> None:
    """About so many objects: of three versions, of all roles, and some that only look like ours."""
    dice = random.Random(seed)
    unit = max(1, objects // 86)  # of all that is made below, about so many
    with ThreadPoolExecutor(16) as pool:
        place = BucketBuilder(store_of(), pool)
        for version in VERSIONS:
            for run, share in (("run", 16), ("exp/run", 6)):
                workers = [f"w{number}" for number in range(8)]
                for window in range(unit * share // len(workers)):
                    for uid in workers:
                        place.put_gradient(run, uid, window, version)
                for uid in workers:
                    place.put_start_window(run, uid, 0, version)
            windows = 3 * unit // 2
            place.put_chain("run", version, windows, {windows // 2: 0, windows // 3: 0})
        place.put_lease("exp/run/gathers/0.2.10", "aggregator")
        place.put_lease("run/gathers/0.2.10", "aggregator", ended=True)
        for job in ("job", "exp/job"):
            last = 1 + unit // 8
            for step in range(1, last + 1):
                text = f"{job} {step}".encode()
                place.put_checkpoint(
                    job, step, [text, *([text * LARGE] if step in {1, 2, last} else [])]
                )
                for stray in (f"parts/{step:064x}.safetensors", f"block_digests/{step:064x}.bin"):
                    place.put(f"{job}/checkpoints/step_{step:09d}/{stray}")
        place.put_pin("job", 1)
        for name, share in (("words", 6), ("old", 5)):
            place.put_dataset(name, unit * share // 2, orphans=unit // 10)
        for number in range(unit):
            key = dice.choice(
                [
                    f"w1/gradient-{number:09d}-w1-v0.2.1.safetensors",
                    f"gathers/0.2.1/{number:09d}-{number:064x}.safetensors",
                    f"shards/train-00000-{number:06d}.tar",
                    f"mine/{number}.txt",
                    f"_probe-{number:08x}",
                ]
            )
            place.put(key)
        place.wait_for_writes()


def list_by_boto3(client: Any, bucket: str, prefix: str) -> Callable[[], list[ListedObject]]:
    """Return a function that lists all objects below a bucket's prefix, without Millrace."""

    def read(key: str) -> bytes:
        return client.get_object(Bucket=bucket, Key=prefix + key)["Body"].read()

    def look() -> list[ListedObject]:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [
            ListedObject(key, stat["Size"], stat["LastModified"], partial(read, key))
            for page in pages
            for stat in page.get("Contents", [])
            for key in [stat["Key"].removeprefix(prefix)]
        ]

    return look


def clean(
    spec: StoreSpec, list_all: Callable[[], list[ListedObject]], *, kills: int, seed: int
) -> Came:
    """Plan, hold the plan against the oracle, execute it with kills, and look what is left.

    Args:
        spec: What is cleaned.
        list_all: Lists it, without Millrace.
        kills: How many processes are killed before one may end.
        seed: Of when they are.
    """
    dice = random.Random(seed)
    config = CleanupSettings(store=spec, rules=RULES)
    things = list_all()
    rules = [{**rule.model_dump(mode="json"), "older_than": 0} for rule in RULES]
    expected = Judge(things, rules, datetime.now(UTC) + timedelta(minutes=5)).list_deletions()
    plan = make_plan(config)
    with open_plan(open_store(spec), plan.name) as (_, entries):
        found = {entry.stat.key: entry.rule_index for entry in entries}
    every = found.keys() | expected.keys()
    differing = [key for key in every if found.get(key) != expected.get(key)]
    killed = 0
    for _ in range(kills):
        before = _left(spec, found)
        dead = _killed(config, plan.name, dice.randrange(1, 4 if kills == 1 else 12))
        killed += dead and 0 < _left(spec, found) < before
    execute(config, plan.name)
    left = [thing for thing in list_all() if not thing.key.startswith("_clean/")]
    after = {thing.key for thing in left}
    wanted = {thing.key for thing in things} - expected.keys()
    return Came(
        len(things), len(found), len(differing), killed, len(wanted - after), len(after - wanted),
        tuple(judge_checkpoints(ListedBucket(left), is_cleaned=True)),
    )  # fmt: skip


def _left(spec: StoreSpec, planned: dict[str, int]) -> int:
    """Count the planned objects that still exist."""
    return sum(stat.key in planned for stat in list_objects(open_store(spec)))


def _killed(config: CleanupSettings, plan: str, batches: int) -> bool:
    """Have a process execute a plan, and kill it after so many batches; whether it was killed."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    told = json.dumps({"spec": config.store.reveal_secrets(), "plan": plan})
    process = spawn.Process(target=_execute, args=(theirs, told))
    process.start()
    theirs.close()
    said: Counter[str] = Counter()
    try:
        while said[ObjectsDeleted.kind] < batches:
            said[ours.recv()] += 1
    except EOFError:  # it had no more to do
        process.join()
        return False
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    return process.exitcode == -signal.SIGKILL and said["done"] == 0


def _execute(pipe: Any, told: str) -> None:
    data = json.loads(told)
    config = CleanupSettings(store=StoreSpec.model_validate(data["spec"]), rules=RULES)

    def tell(event: Event) -> None:
        pipe.send(event.kind)

    execute(config, data["plan"], progress=tell)
    pipe.send("done")
