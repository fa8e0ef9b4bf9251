"""Datasets of several formats, made in one pass."""

import io
import tarfile
import threading
from collections import Counter
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow
import pytest
from pyarrow import parquet as pq
from tokenizers import Tokenizer

from millrace import PipelineSettings, errors, shard_dataset
from millrace.dataset_ledger import iterate_commits
from millrace.datasets import partition, repair_dataset, verify_dataset
from millrace.datasets.formats.shard_set import ShardSet
from millrace.datasets.progress_events import (
    IndexUploaded,
    ShardCommitted,
    ShardEncoded,
    ShardUploaded,
)
from millrace.keys.datasets import DatasetKeys
from millrace.progress import Event
from millrace.storage import Store, create, delete, list_objects, open_store, put, read
from millrace.testing.byte_level import END
from tests.support.flows.fixtures import make_jsonl, make_texts
from tests.support.format_readers import read_litdata, read_mds
from tests.support.transforms import train_tokenizer

TYPED = ["litdata", "mds", "pages", "parquet"]


class KilledError(Exception):
    """End of a run at a boundary."""


def make_settings(tmp_path: Path, formats: list[str], **sharding: Any) -> PipelineSettings:
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    (source / "a.jsonl").write_bytes(make_jsonl(make_texts(1500)) + b"no json\n")
    return PipelineSettings.model_validate(
        {
            "dataset": "words",
            "source": {"url": source.as_uri(), "columns": {"txt": "text"}},
            "store": {"url": (tmp_path / "out").as_uri()},
            "sharding": {
                "formats": formats,
                "shard_bytes": 65536,
                "partition_bytes": 40_000,
                **sharding,
            },
            "execution": {"workers": 0},
        }
    )


def read_objects(settings: PipelineSettings) -> dict[str, bytes]:
    store = open_store(settings.store)
    keys = [stat.key for stat in list_objects(store, "words/") if "/lease/" not in stat.key]
    return {key: read(store, key) for key in keys}


def read_tar(folder: Path) -> list[str]:
    texts: list[str] = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(fileobj=io.BytesIO(path.read_bytes())) as tar:
            texts += [tar.extractfile(member).read().decode() for member in tar]  # type: ignore[union-attr]
    return texts


def read_parquet(folder: Path, column: str) -> list[str]:
    files = sorted(folder.glob("*.parquet"))
    return [text for path in files for text in pq.read_table(path)[column].to_pylist()]


def test_one_pass_makes_every_format_of_the_same_samples(tmp_path, mosaicml):
    settings = make_settings(tmp_path, ["webdataset", *TYPED])
    report = shard_dataset(settings)
    texts = Counter(make_texts(1500))
    folder = tmp_path / "out/words/shards"
    assert report.samples == texts.total()
    assert report.manifest.quarantined == 1
    found = {
        "webdataset": read_tar(folder / "webdataset/train"),
        "parquet": read_parquet(folder / "parquet/train", "txt"),
        "pages": read_parquet(folder / "pages/train", "text"),
        "litdata": [item["txt"] for item in read_litdata(str(folder / "litdata/train"))],
        "mds": [item["txt"] for item in read_mds(mosaicml, folder / "mds/train")],
    }
    for name, own in found.items():
        assert Counter(own) == texts, name
    for shard in report.manifest.shards:
        assert shard.size <= 65536
    per_commit = Counter(Path(shard.key).stem for shard in report.manifest.shards)
    assert set(per_commit.values()) == {5}
    assert verify_dataset(open_store(settings.store), "words").is_intact


@pytest.mark.parametrize("boundary", [ShardEncoded, ShardUploaded, ShardCommitted, IndexUploaded])
def test_a_killed_run_continues_to_the_same_bytes(tmp_path, boundary):
    other = make_settings(tmp_path, ["webdataset", *TYPED])
    shard_dataset(other)
    expected = read_objects(other)
    settings = other.model_copy(
        update={"store": other.store.model_copy(update={"url": (tmp_path / "killed").as_uri()})}
    )
    reached = 0

    def kill(event: Event) -> None:
        nonlocal reached
        reached += isinstance(event, boundary)
        if reached == 3:
            raise KilledError

    with pytest.raises(KilledError):
        shard_dataset(settings, progress=kill)
    shard_dataset(settings)
    found = read_objects(settings)
    assert found.keys() == expected.keys()
    for key in expected:
        if "/shards/" in key or key.endswith(("index.json", ".bin")):
            assert found[key] == expected[key], key


def test_shards_are_not_emptied_while_they_are_uploaded_after_a_fault(tmp_path, monkeypatch):
    settings = make_settings(tmp_path, ["parquet", "webdataset"])
    shard_dataset(settings)
    expected = read_objects(settings)
    closed: list[ShardSet] = []
    closing, over = threading.Event(), threading.Event()
    close, reset = ShardSet.close, ShardSet.reset

    def close_second_late(shards: ShardSet) -> list[memoryview]:
        closed.append(shards)
        if len(closed) == 2:
            closing.set()
            assert over.wait(60)  # the fault, with what follows it: a reset, or a wait for this
        return close(shards)

    def note_reset(shards: ShardSet) -> None:
        reset(shards)
        if shards in closed[1:]:
            over.set()

    def note_wait(uploads: tuple[Future[Any], ...]) -> None:
        if not all(upload.done() for upload in uploads):
            over.set()
        wait(uploads)

    def fail_first(store: Store, key: str, data: memoryview) -> None:
        if "-000000." in key:
            assert closing.wait(60)
            raise KilledError
        create(store, key, data)

    monkeypatch.setattr(partition, "create", fail_first)
    monkeypatch.setattr(partition, "wait", note_wait)
    monkeypatch.setattr(ShardSet, "close", close_second_late)
    monkeypatch.setattr(ShardSet, "reset", note_reset)
    killed = settings.model_copy(
        update={"store": settings.store.model_copy(update={"url": (tmp_path / "k").as_uri()})}
    )
    with pytest.raises(KilledError):
        shard_dataset(killed)
    made = {key: body for key, body in read_objects(killed).items() if "/shards/" in key}
    assert sum("-000001." in key for key in made) == 2
    assert made == {key: expected[key] for key in made}


def test_lost_shards_and_indexes_of_every_format_are_made_again(tmp_path):
    settings = make_settings(tmp_path, ["webdataset", *TYPED])
    manifest = shard_dataset(settings).manifest
    store, before = open_store(settings.store), read_objects(settings)
    lost = [next(one.key for one in manifest.shards if one.format == name) for name in TYPED]
    damaged = [key for key in before if "/shards/" in key and key.endswith((".json", ".yaml"))]
    assert len(damaged) == 5
    delete(store, lost)
    for key in damaged:
        put(store, key, b"{}")
    assert {fault.key for fault in verify_dataset(store, "words").all_faults} == {*lost, *damaged}
    assert set(repair_dataset(settings).remade_keys) == {*lost, *damaged}
    assert read_objects(settings) == before


def test_a_sample_that_one_format_cannot_hold_is_in_no_format(tmp_path):
    settings = make_settings(tmp_path, ["webdataset", "parquet"], types={"txt": "int"})
    path = tmp_path / "source/a.jsonl"
    path.write_bytes(make_jsonl(["1", "2", "three", "4"]))
    settings = settings.model_copy(
        update={"execution": settings.execution.model_copy(update={"max_quarantined": 0.5})}
    )
    report = shard_dataset(settings)
    assert (report.samples, report.manifest.quarantined) == (3, 1)
    folder = tmp_path / "out/words/shards"
    assert sorted(read_tar(folder / "webdataset/train")) == ["1", "2", "4"]
    assert sorted(read_parquet(folder / "parquet/train", "txt")) == [1, 2, 4]
    (bad,) = (tmp_path / "out/words/quarantine").iterdir()
    assert "no integer of 64 bits" in bad.read_text()


def test_batches_of_samples_are_committed_as_single_samples_are(tmp_path):
    rows = [{"id": n, "text": f"text {n} " * (n % 40)} for n in range(1200)]
    rows[100]["id"] = "no number"
    rows[101]["text"] = None
    rows[500]["text"] = "long " * 20_000
    rows[501]["id"] = 1.5
    found: list[list[Any]] = []
    for formats in (["litdata", "mds"], ["litdata", "mds", "webdataset"]):
        folder = tmp_path / "-".join(formats)
        folder.mkdir()
        settings = make_settings(
            folder, formats, shard_bytes=1 << 20, shard_samples=70, types={"cls": "int"}
        )
        lines = [orjson.dumps(row) if row["text"] else b"no json" for row in rows]
        (folder / "source" / "a.jsonl").write_bytes(b"\n".join(lines))
        columns = {"columns": {"cls": "id", "txt": "text"}}
        source = settings.source.model_copy(update=columns)
        execution = settings.execution.model_copy(update={"max_quarantined": 1.0})
        settings = settings.model_copy(update={"source": source, "execution": execution})
        shard_dataset(settings)
        entries = iterate_commits(open_store(settings.store), DatasetKeys("words"))
        found.append(
            [
                (
                    *(entry.start_position, entry.next_position, entry.samples, entry.quarantined),
                    *(one.digest for one in entry.shards if one.format != "webdataset"),
                )
                for entry in sorted(entries, key=lambda entry: (entry.partition, entry.number))
            ]
        )
    batched, single = found
    assert sum(entry[3] for entry in batched) > 2
    assert len(batched) > 17
    assert batched == single


def test_files_of_tokens_become_arrays_that_numpy_maps(tmp_path):
    source = tmp_path / "files"
    source.mkdir()
    expected = [np.arange(n, dtype="<u2") for n in range(1, 200)]
    for number, tokens in enumerate(expected):
        (source / f"{number:04d}.tokens").write_bytes(tokens.tobytes())
    data = {
        "dataset": "words",
        "source": {"url": source.as_uri(), "kind": "files"},
        "store": {"url": (tmp_path / "out").as_uri()},
        "sharding": {
            "formats": ["tokens"],
            "types": {"tokens": "uint16[]"},
            "shard_bytes": 10_240,
        },
        "execution": {"workers": 0},
    }
    settings = PipelineSettings.model_validate(data)
    assert shard_dataset(settings).samples == 199
    found: Counter[bytes] = Counter()
    for path in sorted((tmp_path / "out/words/shards/tokens/train").glob("*.npy")):
        with path.open("rb") as file:
            tokens, ends = np.load(file), np.load(file)
        found.update(one.tobytes() for one in np.split(tokens, ends[:-1].astype(int)))
    assert found == Counter(tokens.tobytes() for tokens in expected)


def test_packed_tokens_of_parquet_are_the_same_in_every_format(tmp_path):
    texts = make_texts(300)
    source = tmp_path / "source"
    source.mkdir()
    pq.write_table(pyarrow.table({"text": texts}), source / "a.parquet", row_group_size=50)
    (tmp_path / "tokenizer.json").write_bytes(train_tokenizer())
    step = {
        "kind": "tokenize",
        "tokenizer": str(tmp_path / "tokenizer.json"),
        "end_token": END,
        "pack": 64,
    }
    data = {
        "dataset": "words",
        "source": {"url": source.as_uri(), "kind": "parquet", "columns": {"txt": "text"}},
        "store": {"url": (tmp_path / "out").as_uri()},
        "sharding": {
            "formats": ["litdata", "parquet", "tokens", "webdataset"],
            "transforms": [step],
            "shard_bytes": 10_240,
            "partition_bytes": 1 << 30,
            "seed": None,
        },
        "execution": {"workers": 0},
    }
    shard_dataset(PipelineSettings.model_validate(data))
    tokenizer = Tokenizer.from_str(train_tokenizer().decode())
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    expected = [token for one in ids for token in (*one, tokenizer.token_to_id(END))]
    folder = tmp_path / "out/words/shards"
    from_numpy = np.concatenate([np.load(path) for path in sorted(folder.glob("tokens/*/*.npy"))])
    assert from_numpy.tolist() == expected
    rows = read_parquet(folder / "parquet/train", "tokens")
    assert [token for row in rows for token in row] == expected
    assert {len(row) for row in rows[:-1]} == {64}
    items = read_litdata(str(folder / "litdata/train"))
    assert [token for item in items for token in item["tokens"].tolist()] == expected


@pytest.mark.parametrize(
    ("source", "sharding", "message"),
    [
        ({}, {"formats": ["tokens"]}, r"takes one field of the type `uint16\[\]`"),
        ({}, {"formats": ["parquet"], "types": {"jpg": "bytes"}}, "`types` has 'jpg'"),
        ({}, {"types": {"txt": "str"}}, "Remove `types`, or add a format"),
        ({"columns": {"body": "text"}}, {"formats": ["pages"]}, "needs a field `text` or"),
        ({}, {"transforms": [{"field": "json", "min_size": 1}]}, "filter needs the field 'json'"),
        ({}, {"transforms": [{"fields": {"a": "b"}}]}, "rename needs the field 'a'"),
        (
            {"kind": "files", "columns": None},
            {"formats": ["mds"]},
            "which neither files nor functions name",
        ),
    ],
)
def test_fields_that_a_format_cannot_have_are_refused_before_a_write(
    tmp_path, source, sharding, message
):
    settings = make_settings(tmp_path, ["webdataset"])
    data = {
        "dataset": "words",
        "source": {"url": settings.source.url, "columns": {"txt": "text"}} | source,
        "store": {"url": settings.store.url},
        "sharding": sharding,
    }
    with pytest.raises(errors.ConfigurationError, match=message):
        shard_dataset(PipelineSettings.model_validate(data))
    assert not (tmp_path / "out/words").exists()


@pytest.mark.parametrize("formats", [[], ["tar"], ["mds", "mds"]])
def test_unknown_and_repeated_formats_are_refused(tmp_path, formats):
    with pytest.raises(ValueError, match="formats"):
        make_settings(tmp_path, formats)
