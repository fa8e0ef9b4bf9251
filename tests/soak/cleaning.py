"""Clean a bucket with the objects of all roles, with kills, and compare it with the oracle."""

import itertools
import json
import multiprocessing
import os
import random
import signal
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

LARGE = 2**18  # repetitions of a text, so that its file has several blocks
VERSIONS = ("0.2.1", "0.2.10", "0.2.11")
BATCH, BATCHES_AT_ONCE = 1000, 8  # of a deletion; a killed one may have sent so many more
NO_AGE = timedelta(0)
RULES = (
    Rule(kinds=(CleanupKind.GRADIENTS,), version="<0.2.11", keep_last=2, older_than=NO_AGE),
    Rule(
        kinds=(CleanupKind.GRADIENTS,),
        version="0.2.11",
        keep_every=4,
        keep_last=1,
        older_than=NO_AGE,
    ),
    Rule(kinds=(CleanupKind.START_WINDOWS,), version="!=0.2.11", older_than=NO_AGE),
    # No object is so old.
    Rule(kinds=(CleanupKind.START_WINDOWS,), version="0.2.11", older_than=timedelta(hours=1)),
    Rule(kinds=(CleanupKind.GATHERS,), keep_last=3, older_than=NO_AGE),
    Rule(kinds=(CleanupKind.CHECKPOINTS,), keep_last=2, older_than=NO_AGE),
    Rule(
        kinds=(CleanupKind.CHECKPOINT_ORPHANS, CleanupKind.DATASET_ORPHANS, CleanupKind.TEMPORARY),
        older_than=NO_AGE,
    ),
    Rule(kinds=(CleanupKind.DATASETS,), name="old", older_than=NO_AGE),
)


@dataclass(frozen=True, slots=True)
class CleaningResult:
    """Result of a cleaning.

    Attributes:
        objects: Number of objects before the cleaning.
        planned: Number of objects in the plan.
        differing: Number of keys in which the plan and the oracle differ.
        killed: Number of processes that were killed after they had deleted a part of the plan.
        lost: Number of objects that were deleted and should be left.
        left: Number of objects that are left and should be deleted.
        faults: Faults of the checkpoints that are left.
    """

    objects: int
    planned: int
    differing: int
    killed: int
    lost: int
    left: int
    faults: tuple[str, ...]

    @property
    def wrong(self) -> int:
        """Number of all faults."""
        return self.differing + self.lost + self.left + len(self.faults)


def fill_bucket(make_store: Callable[[], Any], objects: int, seed: int) -> None:
    """Write about so many objects: three versions, all roles, and unreferenced files."""
    generator = random.Random(seed)
    unit = max(1, objects // 86)  # the numbers below are multiples of it
    with ThreadPoolExecutor(16) as pool:
        builder = BucketBuilder(make_store(), pool)
        for version in VERSIONS:
            for run, share in (("run", 16), ("exp/run", 6)):
                workers = [f"w{number}" for number in range(8)]
                for window in range(unit * share // len(workers)):
                    for uid in workers:
                        builder.put_gradient(run, uid, window, version)
                for uid in workers:
                    builder.put_start_window(run, uid, 0, version)
            windows = 3 * unit // 2
            builder.put_chain("run", version, windows, {windows // 2: 0, windows // 3: 0})
        builder.put_lease("exp/run/gathers/0.2.10", "aggregator")
        builder.put_lease("run/gathers/0.2.10", "aggregator", ended=True)
        for job in ("job", "exp/job"):
            last = 1 + unit // 8
            for step in range(1, last + 1):
                text = f"{job} {step}".encode()
                builder.put_checkpoint(
                    job, step, [text, *([text * LARGE] if step in {1, 2, last} else [])]
                )
                for stray in (f"parts/{step:064x}.safetensors", f"block_digests/{step:064x}.bin"):
                    builder.put(f"{job}/checkpoints/step_{step:09d}/{stray}")
        builder.put_pin("job", 1)
        for name, share in (("words", 6), ("old", 5)):
            builder.put_dataset(name, unit * share // 2, orphans=unit // 10)
        for number in range(unit):
            key = generator.choice(
                [
                    f"w1/gradient-{number:09d}-w1-v0.2.1.safetensors",
                    f"gathers/0.2.1/{number:09d}-{number:064x}.safetensors",
                    f"shards/webdataset/train/train-00000-{number:06d}.tar",
                    f"mine/{number}.txt",
                    f"_probe-{number:08x}",
                ]
            )
            builder.put(key)
        builder.wait_for_writes()


def list_by_boto3(client: Any, bucket: str, prefix: str) -> Callable[[], list[ListedObject]]:
    """Return a function that lists all objects below a bucket's prefix, without Millrace."""

    def read(key: str) -> bytes:
        return client.get_object(Bucket=bucket, Key=prefix + key)["Body"].read()

    def list_all() -> list[ListedObject]:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [
            ListedObject(key, stat["Size"], stat["LastModified"], partial(read, key))
            for page in pages
            for stat in page.get("Contents", [])
            for key in [stat["Key"].removeprefix(prefix)]
        ]

    return list_all


def clean_with_kills(
    spec: StoreSpec, list_all: Callable[[], list[ListedObject]], *, kills: int, seed: int
) -> CleaningResult:
    """Plan a cleaning, execute it with kills, and compare the plan and the result with the oracle.

    Args:
        spec: Store to clean.
        list_all: Function that lists the objects of the store without Millrace.
        kills: Number of processes that are killed before one executes the rest.
        seed: Seed of the times of the kills.
    """
    generator = random.Random(seed)
    settings = CleanupSettings(store=spec, rules=RULES)
    objects = list_all()
    rules = [
        {**rule.model_dump(mode="json"), "older_than": rule.older_than / timedelta(hours=1)}
        for rule in RULES
    ]
    expected = Judge(objects, rules, datetime.now(UTC) + timedelta(minutes=5)).list_deletions()
    plan = make_plan(settings)
    with open_plan(open_store(spec), plan.name) as (_, entries):
        found = {entry.stat.key: entry.rule_index for entry in entries}
    keys = found.keys() | expected.keys()
    differing = [key for key in keys if found.get(key) != expected.get(key)]
    killed = 0
    most_batches = max(1, len(found) // BATCH // kills - BATCHES_AT_ONCE)  # enough for all kills
    for _ in range(kills):
        before = _count_left(spec, found)
        was_killed = _execute_and_kill(settings, plan.name, generator.randint(1, most_batches))
        killed += was_killed and 0 < _count_left(spec, found) < before
    execute(settings, plan.name)
    left = [thing for thing in list_all() if not thing.key.startswith("_clean/")]
    after = {thing.key for thing in left}
    expected_left = {thing.key for thing in objects} - expected.keys()
    return CleaningResult(
        len(objects), len(found), len(differing), killed,
        len(expected_left - after), len(after - expected_left),
        tuple(judge_checkpoints(ListedBucket(left), is_cleaned=True)),
    )  # fmt: skip


def _count_left(spec: StoreSpec, planned: dict[str, int]) -> int:
    """Count the planned objects that still exist."""
    return sum(stat.key in planned for stat in list_objects(open_store(spec)))


def _execute_and_kill(settings: CleanupSettings, plan: str, batches: int) -> bool:
    """Execute a plan in a process, and kill it after it has deleted objects of so many batches.

    Batches whose objects were deleted by an earlier process do not count.

    Returns:
        Whether it was killed before its end.
    """
    spawn = multiprocessing.get_context("spawn")
    parent_end, child_end = spawn.Pipe()
    arguments = json.dumps({"spec": settings.store.reveal_secrets(), "plan": plan})
    process = spawn.Process(target=_execute, args=(child_end, arguments))
    process.start()
    child_end.close()
    try:
        for number in itertools.count(1):
            if parent_end.recv() == "done":
                process.join()
                return False
            if number == batches:
                break
            parent_end.send("go on")
    except (EOFError, BrokenPipeError):  # the process failed
        process.join()
        return False
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    return process.exitcode == -signal.SIGKILL


def _execute(pipe: Any, arguments: str) -> None:
    """Execute a plan in this process, and send a message after each batch with a deleted object.

    Each message waits for an answer, so that a slow parent process kills no later than it means to.
    """
    data = json.loads(arguments)
    settings = CleanupSettings(store=StoreSpec.model_validate(data["spec"]), rules=RULES)
    deleted = 0

    def send_event(event: Event) -> None:
        nonlocal deleted
        if isinstance(event, ObjectsDeleted) and event.objects > deleted:
            deleted = event.objects
            pipe.send("deleted")
            pipe.recv()

    execute(settings, data["plan"], progress=send_event)
    pipe.send("done")
