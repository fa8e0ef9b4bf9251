"""A worker reads the next partition while the last shard of the one before is uploaded."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from millrace import errors
from millrace.datasets import PipelineSettings, partition, shard_dataset
from millrace.datasets.loader import ShardLoader
from millrace.datasets.progress_events import PartitionOpened, ShardUploaded, WorkerLost
from millrace.datasets.worker_pool import PartitionWorker
from millrace.datasets.worker_processes import WorkerProcess
from millrace.keys.datasets import CommitName, DatasetKeys
from millrace.progress import Event
from millrace.records import fetch
from millrace.schemas.dataset import DatasetPlan
from millrace.storage import create, delete, list_objects, open_store

ROWS = 300


def make_settings(folder: Path, workers: int) -> PipelineSettings:
    """Return the settings of a dataset of three partitions, each of one shard."""
    source = folder / "source"
    source.mkdir()
    for name in "abc":
        rows = (json.dumps({"text": f"{name}{number}"}) for number in range(ROWS))
        (source / f"{name}.jsonl").write_text("\n".join(rows))
    return PipelineSettings.model_validate(
        {
            "dataset": "d",
            "source": {"url": source.as_uri(), "columns": {"txt": "text"}},
            "store": {"url": (folder / "store").as_uri()},
            "execution": {"workers": workers, "uploads": 1},
        }
    )


def read_texts(settings: PipelineSettings) -> list[str]:
    loader = ShardLoader(settings.store, settings.dataset, shuffle=False)
    return sorted(sample["txt"] for sample in loader)


TEXTS = sorted(f"{name}{number}" for name in "abc" for number in range(ROWS))


def test_the_process_of_the_run_reads_the_next_partition_during_an_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, opened, second = make_settings(tmp_path, 0), list[str](), threading.Event()

    def create_late(*args: Any) -> Any:
        assert second.wait(60), "the second partition waits for the end of the first"
        return create(*args)

    def note_opened(event: Event) -> None:
        if isinstance(event, PartitionOpened):
            opened.append(event.partition)
            if len(opened) == 2:
                second.set()

    monkeypatch.setattr(partition, "create", create_late)
    shard_dataset(settings, progress=note_opened)
    assert len(opened) == 3
    assert read_texts(settings) == TEXTS


@pytest.mark.parametrize("workers", [0, 1])
def test_the_error_of_a_partition_that_ends_is_that_of_the_run(
    tmp_path: Path, workers: int
) -> None:
    settings, opened = make_settings(tmp_path, workers), list[str]()
    store = open_store(settings.store)
    shard_dataset(settings)
    keys = DatasetKeys(settings.dataset)
    delete(store, {stat.key for stat in list_objects(store, keys.dataset)} - {keys.plan})
    (first, *_) = fetch(store, keys.plan, DatasetPlan).partitions
    key = keys.make_shard_key("webdataset", first.split, CommitName(first.name, 0), "tar", "")
    create(store, key, b"another program's")

    def note_opened(event: Event) -> None:
        if isinstance(event, PartitionOpened):
            opened.append(event.partition)

    with pytest.raises(errors.ConflictError, match="is already there with other bytes"):
        shard_dataset(settings, progress=note_opened)
    assert 1 <= len(opened) <= 2
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("put", "commit", "end"))]


class HeldWorkers:
    """Lets the first upload of a worker end when the worker has opened its second partition.

    Args:
        monkeypatch: Fixture of the test.
        kills: Whether the worker is killed then.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, kills: bool) -> None:
        self._acknowledge = WorkerProcess.acknowledge
        self._kills = kills
        self._held: list[tuple[WorkerProcess, int]] = []
        self._is_held = False
        self.opened: list[str] = []
        self.lost = 0

        def acknowledge(worker: WorkerProcess, number: int) -> None:
            self._acknowledge_or_hold(worker, number)

        monkeypatch.setattr(WorkerProcess, "acknowledge", acknowledge)

    def note(self, event: Event) -> None:
        """Receive the progress of the run."""
        self._is_held = isinstance(event, ShardUploaded) and len(self.opened) == 1
        self.lost += isinstance(event, WorkerLost)
        if isinstance(event, PartitionOpened):
            self.opened.append(event.partition)

    def _acknowledge_or_hold(self, worker: WorkerProcess, number: int) -> None:
        if self._is_held:
            self._held.append((worker, number))
            return
        if len(self.opened) == 2 and self._held:
            held, self._held = self._held, []
            if self._kills:
                assert count_partitions(worker) == 2
                os.kill(worker.pid, signal.SIGKILL)
                return
            for one in held:
                self._acknowledge(*one)
        self._acknowledge(worker, number)


def count_partitions(worker: PartitionWorker) -> int:
    return bool(worker.reading) + bool(worker.ending)


@pytest.mark.parametrize("kills", [False, True])
def test_a_worker_reads_the_next_partition_during_an_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: bool
) -> None:
    settings, held = make_settings(tmp_path, 1), HeldWorkers(monkeypatch, kills=kills)
    shard_dataset(settings, progress=held.note)
    assert held.lost == kills
    assert len(held.opened) == 3 + 2 * kills  # both partitions of a killed worker are opened again
    assert read_texts(settings) == TEXTS
