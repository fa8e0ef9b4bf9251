"""Notes about rows, and the watch of them."""

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from millrace.datasets import (
    PipelineSettings,
    dispatch,
    partition,
    preview_samples,
    shard_dataset,
    stall_watch,
)
from millrace.datasets.partition import ShardBuffers, write_partition
from millrace.datasets.progress_events import PartitionStalled
from millrace.datasets.sample import Row, Sample
from millrace.datasets.sources import SourceSettings, open_files, open_source, partition_source
from millrace.datasets.sources.base import Division
from millrace.datasets.stall_watch import STALL_TIMEOUT, RowNotes, Stall, StallWatch
from millrace.datasets.transforms import TransformChain, TransformedSource
from millrace.digest import compute_digest
from millrace.keys.datasets import DatasetKeys
from millrace.progress import Event, ignore_event
from millrace.schemas.dataset import ShardLayout
from millrace.storage import Store, create, open_store, put


def test_each_further_look_without_a_row_tells_a_longer_time() -> None:
    notes = RowNotes()
    watch = StallWatch(notes)
    assert watch.look() is None
    assert watch.look() == Stall("", STALL_TIMEOUT)
    notes.note_row("00000-1")
    notes.note_row("00000-1")
    assert watch.look() is None
    assert watch.look() == Stall("00000-1", STALL_TIMEOUT)
    assert watch.look() == Stall("00000-1", 2 * STALL_TIMEOUT)
    notes.begin_partition()
    assert watch.look() is None
    assert watch.look() == Stall("", STALL_TIMEOUT)


def test_another_process_sees_the_notes_also_of_long_and_broken_names() -> None:
    with os.fdopen(os.memfd_create("rows"), "wb") as memory:
        memory.truncate(RowNotes.SIZE)
        writer, reader = RowNotes(memory.fileno()), RowNotes(memory.fileno())
    for number, (name, shown) in enumerate(
        [("a", "a"), ("é" * 200, "é" * 119 + "\ufffd"), ("\udc80", "\\udc80"), ("", "")], start=1
    ):
        writer.note_row(name)
        assert reader.get_last() == (number, shown)


def test_a_partition_whose_last_shard_hangs_is_announced_with_its_last_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/a.jsonl").write_text('{"text": "a"}\n' * 9)
    settings = PipelineSettings.model_validate(
        {
            "dataset": "d",
            "source": {"url": (tmp_path / "source").as_uri(), "columns": {"txt": "text"}},
            "store": {"url": (tmp_path / "store").as_uri()},
            "execution": {"workers": 0},
        }
    )
    last = preview_samples(settings, 9).rows[-1].name
    watched: list[RowNotes] = []
    announced: list[str] = []
    is_announced = threading.Event()

    def watch(
        notes: RowNotes, report: Callable[[Stall], None]
    ) -> contextlib.AbstractContextManager[None]:
        watched.append(notes)  # of the reading, and then of the end
        return stall_watch.watch_in_thread(notes, report)

    def create_when_announced(store: Store, key: str, data: bytes | memoryview) -> None:
        assert is_announced.wait(60)
        create(store, key, data)

    def progress(event: Event) -> None:
        if isinstance(event, PartitionStalled) and len(watched) == 2:
            announced.append(event.last_row)
            is_announced.set()

    monkeypatch.setattr(stall_watch, "STALL_TIMEOUT", 0.01)
    monkeypatch.setattr(dispatch, "watch_in_thread", watch)
    monkeypatch.setattr(partition, "create", create_when_announced)
    assert shard_dataset(settings, progress=progress).samples == 9
    assert set(announced) == {last}


class NotesReader:
    """Transform that reads the notes when it is called. The samples stay as they are."""

    def __init__(self, notes: RowNotes, batch_rows: int = 1) -> None:
        self._notes, self.batch_rows = notes, batch_rows
        self.found: list[tuple[list[str], tuple[int, str]]] = []

    def apply(self, samples: Sequence[Sample]) -> list[list[Row]]:
        if samples:
            self.found.append(([sample.key for sample in samples], self._notes.get_last()))
        return [[sample] for sample in samples]


@pytest.mark.parametrize("shard_format", ["webdataset", "parquet"])
@pytest.mark.parametrize("has_batches_after", [False, True])
def test_a_transform_works_after_the_note_about_the_row_before(
    shard_format: str, has_batches_after: bool
) -> None:
    store = open_store(f"memory://{secrets.token_hex(8)}")
    put(store, "a.jsonl", b"".join(b'{"n": %d}\n' % number for number in range(9)))
    keys, files = DatasetKeys("d"), open_files(store.spec)
    divided = partition_source(
        SourceSettings(), files, keys, Division(1 << 20, 100, seed=None, holdout=0.0)
    )
    notes = RowNotes()
    first, second = NotesReader(notes), NotesReader(notes, batch_rows=256)
    chain = TransformChain([first, second] if has_batches_after else [first])
    layout = ShardLayout(
        formats=(shard_format,),
        fields={"json": "json"},
        writer={},
        shard_bytes=1 << 20,
        shard_samples=100,
    )
    write_partition(
        store,
        TransformedSource(open_source(divided.record, files, store), chain),
        keys,
        ShardBuffers(layout, 1),
        divided.partitions[0],
        plan_digest=compute_digest(b""),
        progress=ignore_event,
        notes=notes,
    )()
    names = [name for names, _ in first.found for name in names]
    assert len(names) == 9
    assert [name for _, (_, name) in first.found] == ["", *names[:-1]]
    counts = [count for _, (count, _) in first.found]
    assert counts == sorted(set(counts)), "each row is noted"
    assert notes.get_last()[1] == names[-1]
