"""Batches of windows: each worker has its own, and anyone has the same again."""

import secrets
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from millrace import errors
from millrace.campaigns.worker import WindowLoader, Worker
from millrace.datasets.formats import FieldType
from millrace.datasets.sample import Sample
from millrace.gradients import TrainingWindow
from millrace.storage import Store, open_store
from tests.support.campaigns.workers import Make, finalize_dataset
from tests.support.shard_datasets import write_dataset

WORKERS, BATCH, STEPS = 3, 4, 5
SIZES = (40, 7, 60, 13, 31)  # of shards: 151 samples, so 50 of each worker, in 12 batches


@pytest.fixture(scope="module")
def url() -> str:
    url, numbers = f"memory://{secrets.token_hex(8)}", iter(range(sum(SIZES)))
    parts = [[next(numbers) for _ in range(size)] for size in SIZES]
    samples = [[Sample(f"k{n}", {"txt": b"%d" % n}, n) for n in part] for part in parts]
    write_dataset(open_store(url), "words", ["webdataset"], {"txt": FieldType.STR}, samples)
    return url


def open_loader(url: str, number: int, **options: Any) -> WindowLoader:
    values = {"run": "runs/one", "workers": WORKERS, "batch_size": BATCH, "steps": STEPS} | options
    return WindowLoader(url, "words", number=number, **values)


def load_texts(loader: WindowLoader, window: int) -> list[str]:
    batches = list(loader.load(window))
    assert [len(batch) for batch in batches] == [BATCH] * STEPS
    return [sample["txt"] for batch in batches for sample in batch]


def test_workers_have_different_samples_in_an_epoch_and_all_of_them_over_epochs(url: str) -> None:
    per_epoch = 12 * BATCH  # of a worker, whose epochs are not those of the windows
    received = [
        [text for window in range(1, 25) for text in load_texts(open_loader(url, number), window)]
        for number in range(WORKERS)
    ]
    for epoch in range(24 * STEPS // 12):
        own = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
        counts = Counter(text for texts in received for text in texts[own])
        assert counts.total() == WORKERS * per_epoch
        assert set(counts.values()) == {1}
    assert len({text for texts in received for text in texts}) == sum(SIZES)
    assert received[0][:per_epoch] != received[0][per_epoch : 2 * per_epoch]


def test_a_window_is_the_same_for_whoever_loads_it_and_whenever(url: str) -> None:
    loader = open_loader(url, 1)
    expected = {window: load_texts(loader, window) for window in (1, 2, 3, 9)}
    assert load_texts(loader, 2) == expected[2]
    assert load_texts(open_loader(url, 1), 9) == expected[9]
    assert len({tuple(texts) for texts in expected.values()}) == 4
    assert load_texts(open_loader(url, 2), 2) != expected[2]
    assert load_texts(open_loader(url, 1, run="runs/two"), 2) != expected[2]


def digest_all(*fields: dict[str, bytes]) -> str:
    """Return the digest of one batch with all samples of a dataset."""
    there = f"memory://{secrets.token_hex(8)}"
    samples = [Sample(f"k{n}", values, n) for n, values in enumerate(fields)]
    types = {"cls": FieldType.INT, "txt": FieldType.STR}
    write_dataset(open_store(there), "words", ["webdataset"], types, [samples])
    batches = open_loader(there, 0, workers=1, batch_size=len(fields), steps=1).load(1)
    (batch,) = batches
    assert len(batch) == len(fields)
    return batches.digest


def test_the_digest_is_that_of_the_samples(url: str) -> None:
    first, second = open_loader(url, 0).load(3), open_loader(url, 0).load(3)
    nothing = first.digest
    assert list(first) == list(second)
    assert first.digest == second.digest != nothing
    same = digest_all({"cls": b"1", "txt": b"a"}, {"cls": b"2", "txt": b"b"})
    assert same == digest_all({"cls": b"1", "txt": b"a"}, {"cls": b"2", "txt": b"b"})
    others = [
        digest_all({"cls": b"1", "txt": b"a"}, {"cls": b"2", "txt": b"c"}),
        digest_all({"cls": b"1", "txt": b"a"}, {"cls": b"3", "txt": b"b"}),
        digest_all({"cls": b"1", "txt": b"ab"}, {"cls": b"2", "txt": b""}),
        digest_all({"cls": b"1", "txt": b"a"}, {"cls": b"2"}),
    ]
    assert len({same, *others}) == 5


def test_fewer_samples_than_a_batch_for_each_worker_are_a_sentence(url: str) -> None:
    with pytest.raises(errors.ConfigurationError, match="151 samples, fewer than a batch of 51"):
        open_loader(url, 0, batch_size=51)


def test_a_worker_loads_its_batches_and_a_validator_the_same(
    store: Store, make: Make, tmp_path: Path
) -> None:
    finalize_dataset(store, 5)
    settings = make(number=1, workers=2)
    batches = Worker(settings).load_batches(TrainingWindow(2, 0, settings.run.steps), 1)
    texts = [[sample["txt"] for sample in batch] for batch in batches]
    assert len(texts) == settings.run.steps
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["_cache"]
    validator = WindowLoader(
        store.spec, "text", run="small/run", number=1, workers=2, batch_size=1,
        steps=settings.run.steps,
    )  # fmt: skip
    again = validator.load(2)
    assert [[sample["txt"] for sample in batch] for batch in again] == texts
    assert again.digest == batches.digest
    with pytest.raises(errors.ConfigurationError, match="names no dataset"):
        Worker(make(dataset=None)).load_batches(TrainingWindow(1, 0, 1), 1)
