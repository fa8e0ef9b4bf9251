"""Samples of sharded datasets in a store: exactly once, over kills, faults and worker processes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from millrace import PipelineSettings, errors, shard_dataset
from millrace.datasets.loader import ShardLoader
from millrace.datasets.loader.readers import offset_table
from millrace.storage import StoreSpec, list_objects, open_store, put, read
from millrace.testing.faults import Faults
from millrace.testing.key import connect
from millrace.testing.process import REPOSITORY
from millrace.testing.r2 import R2Proxy
from millrace.testing.rgw import RGW
from tests.oracle import S3Bucket, judge_epoch
from tests.soak.faults import make_faults, make_r2_store
from tests.support.mirrors import Mirrors, start_mirrors

FORMATS = ["webdataset", "litdata", "mds", "parquet"]
ROWS = 600
DATASET = "corpus"


@pytest.fixture(scope="module")
def stored(rgw: RGW, tmp_path_factory: pytest.TempPathFactory) -> StoreSpec:
    """A dataset that Millrace sharded, in four formats."""
    source = tmp_path_factory.mktemp("source")
    rows = [{"text": f"row {n} " + "words " * (n % 50), "n": n} for n in range(ROWS)]
    (source / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = {
        "url": f"s3://{rgw.create_bucket('shard-loader')}/below",
        "endpoint": rgw.endpoint,
        "credentials": {
            "access_key_id": rgw.full.access_key_id,
            "secret_access_key": rgw.full.secret_access_key,
        },
    }
    shard_dataset(
        PipelineSettings.model_validate(
            {
                "dataset": DATASET,
                "source": {
                    "url": source.as_uri(), "kind": "jsonl", "columns": {"txt": "text", "cls": "n"}
                },
                "store": store,
                "sharding": {
                    "formats": FORMATS, "types": {"txt": "str", "cls": "int"},
                    "shard_bytes": 40_000, "partition_bytes": 60_000,
                },
                "execution": {"workers": 0},
            }
        )
    )  # fmt: skip
    return StoreSpec.model_validate(store)


@pytest.fixture
def judge(rgw: RGW) -> Callable[[list[tuple[str, str]]], str]:
    """Function that judges what was received of an epoch; an empty text is right."""
    bucket = S3Bucket(connect(rgw.endpoint, rgw.full), "shard-loader", "below")

    def judge(received: list[tuple[str, str]]) -> str:
        verdict = judge_epoch(bucket, DATASET, received)
        return "" if verdict.is_correct else str(verdict)

    return judge


def get_pairs(samples: list[Any]) -> list[tuple[str, str]]:
    return [(sample["__key__"], sample["txt"]) for sample in samples]


def test_every_format_has_the_samples_in_the_same_order(
    stored: StoreSpec, judge: Callable[[list[tuple[str, str]]], str]
) -> None:
    found = [list(ShardLoader(stored, DATASET, format=name, seed=5)) for name in FORMATS]
    assert judge(get_pairs(found[0])) == ""
    assert all(one == found[0] for one in found)
    assert all(isinstance(sample["cls"], int) for sample in found[0])


def test_a_state_of_one_format_goes_on_in_another(
    stored: StoreSpec, judge: Callable[[list[tuple[str, str]]], str]
) -> None:
    received: list[Any] = []
    state: Any = None
    for name in FORMATS:
        loader = ShardLoader(stored, DATASET, format=name, seed=5)
        if state:
            loader.load_state_dict(state)
        iterator = iter(loader)
        received += [next(iterator) for _ in range(ROWS // 5)]
        state = loader.state_dict()
    received += list(loader)
    assert judge(get_pairs(received)) == ""


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_spawned_workers_resume_with_another_number_of_workers(
    stored: StoreSpec, judge: Callable[[list[tuple[str, str]]], str]
) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    received: list[Any] = []
    state: Any = None
    for workers, batches in ((2, 7), (1, 11), (0, None)):
        dataset = ShardLoader(stored, DATASET, format="mds", seed=2).as_torch_dataset()
        if state is not None:
            dataset.load_state_dict(state)
        options: Any = {"multiprocessing_context": "spawn"} if workers else {}
        loader = StatefulDataLoader(
            dataset, batch_size=16, num_workers=workers, collate_fn=list, **options
        )
        iterator = iter(loader)
        for number, batch in enumerate(iterator, 1):
            received += batch
            if number == batches:
                break
        state = loader.state_dict()
        del iterator
    assert judge(get_pairs(received)) == ""


@pytest.mark.parametrize("transforms", [False, True])
def test_an_error_within_a_batch_loses_no_sample(
    stored: StoreSpec,
    transforms: bool,
    monkeypatch: pytest.MonkeyPatch,
    judge: Callable[[list[tuple[str, str]]], str],
) -> None:
    calls = 0

    def fail_once(sample: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise KeyboardInterrupt
        return sample

    def open_loader() -> ShardLoader:
        steps: Any = {"transform": fail_once} if transforms else {}
        return ShardLoader(stored, DATASET, format="mds", seed=2, batch_size=4, **steps)

    if not transforms:  # an error while a row is decoded
        original = offset_table._StoredRows.__getitem__  # pyright: ignore[reportPrivateUsage]

        def decode(rows: Any, index: int) -> Any:
            return fail_once(original(rows, index))

        monkeypatch.setattr(offset_table._StoredRows, "__getitem__", decode)
    loader, received = open_loader(), list[Any]()
    batches = iter(loader)
    received += next(batches)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert len(received) == 4
    again = open_loader()
    again.load_state_dict(loader.state_dict())
    for batch in again:
        received += batch
    assert judge(get_pairs(received)) == ""


def test_a_refused_iterator_moves_nothing(stored: StoreSpec) -> None:
    loader = ShardLoader(stored, DATASET, format="mds", seed=2, transform=lambda sample: sample)
    old = iter(loader)
    next(old)
    new = iter(loader)
    next(new)
    before = loader.state_dict()
    with pytest.raises(
        errors.ConfigurationError, match="A later iteration of the loader has begun"
    ):
        next(old)
    assert loader.state_dict() == before


def test_the_epoch_has_ended_with_its_last_short_batch(stored: StoreSpec) -> None:
    loader = ShardLoader(stored, DATASET, format="mds", seed=2, batch_size=ROWS - 1)
    batches = iter(loader)
    assert len(next(batches)) == ROWS - 1
    assert loader.epoch == 0
    assert len(next(batches)) == 1
    assert loader.epoch == 1
    assert next(batches, None) is None


def test_a_process_that_is_killed_loses_and_repeats_nothing(
    stored: StoreSpec, tmp_path: Path, judge: Callable[[list[tuple[str, str]]], str]
) -> None:
    received: list[tuple[str, str]] = []
    state: Any = None
    for world_size, boundary in ((1, 3), (2, 5), (4, 1), (1, None)):
        states: list[Any] = []
        for rank in range(world_size):
            call = {
                "store": stored.reveal_secrets(), "rank": rank, "world_size": world_size,
                "streams": 8, "state": state,
            }  # fmt: skip
            steps = list(train_until_kill(call, boundary))
            received += [tuple(pair) for step in steps for pair in step["received"]]
            states.append(steps[-1]["state"])
        assert all(one == states[0] for one in states)
        state = states[0]
    assert judge(received) == ""


def train_until_kill(call: dict[str, Any], boundary: int | None) -> Iterator[dict[str, Any]]:
    """Yield what a process reports after each batch, and kill it after a number of batches."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.shard_training"],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        process.stdin.write(json.dumps(call) + "\n")
        process.stdin.flush()
        for number, line in enumerate(process.stdout, 1):
            yield json.loads(line)
            if number == boundary:
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == (0 if boundary is None else -signal.SIGKILL)


def test_a_store_that_fails_loses_no_samples(
    rgw: RGW, r2: R2Proxy, stored: StoreSpec, judge: Callable[[list[tuple[str, str]]], str]
) -> None:
    r2.reset()
    spec = StoreSpec.model_validate(make_r2_store(rgw, r2, "shard-loader").make_spec("below"))
    loader = ShardLoader(spec, DATASET, streams=4)
    r2.set_faults(make_faults(3, stall_seconds=0.2))
    assert judge(get_pairs(list(loader))) == ""
    assert sum(r2.count_fired().values()) > 3


def test_a_shard_that_is_replaced_in_the_epoch_is_an_error_that_names_it(
    stored: StoreSpec,
) -> None:
    store = open_store(stored)
    loader = ShardLoader(stored, DATASET, format="litdata", shuffle=False, shuffle_window=10)
    iterator = iter(loader)
    next(iterator)
    key = loader.table.shards[-1].key
    body = read(store, key)
    changed = bytearray(body)
    changed[len(body) // 2] ^= 255
    try:
        put(store, key, bytes(changed))
        with pytest.raises(errors.CorruptError, match="it was replaced or is damaged") as error:
            list(iterator)
        assert key in str(error.value)
        put(store, key, body + b"more")
        with pytest.raises(errors.ChangedError, match=f"{key} was replaced"):
            list(loader)
    finally:
        put(store, key, body)
    assert len(list(loader)) > 0


def test_a_cache_saves_the_requests_of_the_next_epoch(
    rgw: RGW, r2: R2Proxy, stored: StoreSpec, tmp_path: Path
) -> None:
    r2.reset()
    spec = StoreSpec.model_validate(make_r2_store(rgw, r2, "shard-loader").make_spec("below"))
    loader = ShardLoader(spec, DATASET, cache=tmp_path)
    assert len(list(loader)) == ROWS
    assert len(list(tmp_path.glob("files/*"))) == len(loader.table.shards)
    r2.reset()
    assert len(list(loader)) == ROWS
    assert r2.list_requests() == []


@pytest.mark.soak
def test_an_epoch_ends_right_while_one_store_is_dead_and_another_fails(
    rgw: RGW, stored: StoreSpec, server_folder: Path, judge: Callable[[list[tuple[str, str]]], str]
) -> None:
    store = open_store(stored)
    with start_mirrors(rgw, server_folder / "shard-mirrors", 3) as proxies:
        world = Mirrors.make(rgw, proxies)
        for stat in list_objects(store, DATASET):
            world.put(stat.key, *[read(store, stat.key)] * 3)
        loader = ShardLoader(world.specs, DATASET)
        proxies[0].set_faults(Faults(error500=1.0))
        proxies[1].set_faults(make_faults(1, stall_seconds=0.2))
        assert judge([(sample["__key__"], sample["txt"]) for sample in loader]) == ""
        found = loader.make_mirror_report().locations
        assert sum(proxies[1].count_fired().values()) > 0
        assert found[0].served_bytes == 0
        assert found[0].failures > 0
        assert found[2].served_bytes > 0


def read_in_child(loader: ShardLoader, answers: Connection) -> None:
    try:
        next(iter(loader))
        answers.send("read")
    except errors.ConfigurationError as error:
        answers.send(str(error))
    finally:
        answers.close()
        os._exit(0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_fork_does_not_hang(stored: StoreSpec) -> None:
    loader = ShardLoader(stored, DATASET)
    next(iter(loader))
    context = get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=read_in_child, args=(loader, theirs))
    child.start()
    theirs.close()
    assert "multiprocessing_context='spawn'" in ours.recv()
    child.join()
