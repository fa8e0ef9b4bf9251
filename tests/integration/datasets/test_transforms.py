"""Datasets with transforms are made exactly once, wherever their runs are stopped."""

import gzip
import io
import json
import os
import random
import tarfile
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers

from millrace import PipelineSettings, errors, shard_dataset
from millrace.dataset_ledger import iterate_partition_ledgers
from millrace.datasets import (
    plan_garbage,
    preflight_dataset,
    repair_dataset,
    stall_watch,
    verify_dataset,
)
from millrace.datasets.loader import ShardLoader
from millrace.datasets.progress_events import (
    PartitionOpened,
    PartitionStalled,
    ShardCommitted,
    ShardEncoded,
    ShardUploaded,
)
from millrace.datasets.sources import SourceKind
from millrace.keys.datasets import DatasetKeys
from millrace.storage import delete, list_objects, open_store, read
from millrace.testing.byte_level import END
from tests.stores import make_spec
from tests.support.transforms import train_tokenizer

CODE = """
def split(sample, rng):
    words = sample["txt"].split()
    if "raise" in words:
        raise ValueError("a text that raises")
    return [{"txt": word, "json": {"draw": rng.random()}} for word in words]
"""
WORDS = ["the", "quick", "fox", "mill", "race", "wheel", "é"]


class StoppedByTestError(Exception):
    """Stop of a run at a boundary."""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "source").mkdir()
    rng = random.Random(5)
    for number in range(2):
        lines = [
            json.dumps({"text": " ".join(rng.choices(WORDS, k=rng.randint(1, 20)))})
            for _ in range(40)
        ]
        lines[7], lines[30] = json.dumps({"text": "raise"}), "not json"
        (tmp_path / "source" / f"{number}.jsonl").write_text("\n".join(lines))
    (tmp_path / "clean.py").write_text(CODE)
    (tmp_path / "tokenizer.json").write_bytes(train_tokenizer())
    return tmp_path


def make_settings(folder: Path, store: str, transforms, *, workers=0):
    return PipelineSettings.model_validate(
        {
            "dataset": "d",
            "source": {"url": f"file://{folder}/source", "columns": {"txt": "text"}},
            "store": {"url": f"file://{folder}/{store}"},
            "sharding": {
                "shard_samples": 7 if any("pack" in one for one in transforms) else 60,
                "partition_bytes": 2048,
                "transforms": transforms,
            },
            "execution": {"workers": workers, "max_quarantined": 0.2},
        }
    )


def make_split(folder):
    return [{"kind": "function", "function": f"{folder}/clean.py:split"}]


def make_packed(folder):
    tokenizer = {"tokenizer": f"{folder}/tokenizer.json", "end_token": END, "pack": 32}
    return [{"kind": "tokenize", **tokenizer}]


TRANSFORMS = [make_split, make_packed]


def read_objects(settings):
    """Return the bytes of what a dataset consists of, without leases and times."""
    store = open_store(settings.store)
    parts = ("d/shards/", "d/quarantine/", "d/transforms/")
    keys = [stat.key for part in parts for stat in list_objects(store, part)]
    commits = [stat.key for stat in list_objects(store, "d/commits/")]
    records = {key: json.loads(read(store, key)) for key in commits}
    for record in records.values():
        record.pop("nonce", None)
    return {key: read(store, key) for key in keys} | records


def read_samples(settings):
    """Return the samples of all shards in order, by their keys."""
    samples = {}
    for key, body in sorted(read_objects(settings).items()):
        if key.endswith(".tar"):
            with tarfile.open(fileobj=io.BytesIO(body)) as members:
                for member in members:
                    name, _, extension = member.name.partition(".")
                    fields = samples.setdefault(name, {})
                    assert extension not in fields, "a key is used once"
                    fields[extension] = members.extractfile(member).read()
    return samples


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl.gz"])
def test_tables_and_compressed_lines_are_transformed_too(tmp_path, name):
    texts = [f"the mill {number}" for number in range(50)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    table = "text\n" + "".join(f"{text}\n" for text in texts)
    (tmp_path / "source").mkdir()
    body = table.encode() if name == "a.csv" else gzip.compress(lines.encode())
    (tmp_path / "source" / name).write_bytes(body)
    (tmp_path / "tokenizer.json").write_bytes(train_tokenizer())
    settings = make_settings(tmp_path, "out", make_packed(tmp_path))
    kind = "csv" if name == "a.csv" else "jsonl"
    source = settings.source.model_copy(update={"kind": SourceKind(kind)})
    shard_dataset(settings.model_copy(update={"source": source}))
    tokenizer = Tokenizer.from_str(train_tokenizer().decode())
    end = tokenizer.token_to_id(END)
    expected = [token for text in texts for token in (*tokenizer.encode(text).ids, end)]
    found = b"".join(sample["tokens"] for sample in read_samples(settings).values())
    assert np.frombuffer(found, "<u2").tolist() == expected


@pytest.mark.parametrize("make_transforms", TRANSFORMS)
@pytest.mark.parametrize("boundary", [ShardEncoded, ShardUploaded, ShardCommitted])
def test_a_run_that_is_stopped_again_and_again_makes_the_same_objects(
    folder, make_transforms, boundary
):
    undisturbed = make_settings(folder, "undisturbed", make_transforms(folder))
    shard_dataset(undisturbed)
    expected = read_objects(undisturbed)
    stops = 0

    def make_progress():
        seen = []

        def stop_at_second(event):
            if isinstance(event, boundary):
                seen.append(event)
                if len(seen) == 2:
                    raise StoppedByTestError

        return stop_at_second

    for attempt in range(3):  # each has one stop or more: workers may complete it meanwhile
        stopped = make_settings(folder, f"stopped-{attempt}", make_transforms(folder))
        while True:
            try:
                shard_dataset(stopped, progress=make_progress())
            except StoppedByTestError:
                stops += 1
                assert stops < 100
            else:
                break
        assert read_objects(stopped) == expected
    assert stops > 2
    positions = [record for key, record in expected.items() if "/commits/" in key]
    assert any(commit["record"].get("start_skip") for commit in positions), (
        "a shard begins within a row"
    )


def test_packed_shards_have_every_token_of_the_source(folder):
    settings = make_settings(folder, "store", make_packed(folder), workers=1)
    shard_dataset(settings)
    library = Tokenizer.from_str(train_tokenizer().decode())
    expected = []
    for file in sorted((folder / "source").iterdir()):
        for line in file.read_text().splitlines():
            if line.startswith("{"):
                ids = library.encode(json.loads(line)["text"]).ids
                expected.append((*ids, library.token_to_id(END)))
    tokens = [
        token
        for fields in read_samples(settings).values()
        for token in np.frombuffer(fields["tokens"], "<u2").tolist()
    ]
    documents, begin = [], 0
    for index, token in enumerate(tokens, start=1):
        if token == library.token_to_id(END):
            documents.append(tuple(tokens[begin:index]))
            begin = index
    assert sorted(documents) == sorted(expected)
    assert begin == len(tokens), "each partition ends with a whole document"


def test_a_worker_process_makes_the_same_samples_and_quarantines_the_texts_that_raise(folder):
    here = make_settings(folder, "here", make_split(folder))
    worker = make_settings(folder, "worker", make_split(folder), workers=1)
    shard_dataset(here)
    report = shard_dataset(worker)
    assert read_objects(here) == read_objects(worker)
    assert report.manifest.quarantined == 4
    bad = b"".join(body for key, body in read_objects(here).items() if "/quarantine/" in key)
    assert bad.count(b"split raised ValueError: a text that raises") == 2
    assert bad.count(b"not valid JSON") == 2


HANGING = """
import ctypes
import os
import struct
import time
from pathlib import Path

folder = Path({folder!r})
keys = []

def clean(sample):
    keys.append(sample["__key__"])
    if len(keys) == 4:
        (folder / "before").write_text(keys[2])
        {hang}()
    return sample

def wait():
    while not (folder / "is announced").exists():
        time.sleep(0.001)

def hold_lock():
    # `PyDLL` holds Python's lock (the GIL) during a call. This one waits for a byte, or a minute.
    pipe = os.open(folder / "pipe", os.O_RDWR)
    waited = ctypes.create_string_buffer(struct.pack("ihh", pipe, 1, 0))
    ctypes.PyDLL(None).poll(waited, 1, 60_000)
"""


@pytest.mark.parametrize(("workers", "hang"), [(0, "wait"), (1, "wait"), (1, "hold_lock")])
def test_a_function_that_hangs_is_announced_with_the_sample_before_it(
    folder, monkeypatch, caplog, workers, hang
):
    monkeypatch.setattr(stall_watch, "STALL_TIMEOUT", 0.01)
    (folder / "clean.py").write_text(HANGING.format(folder=str(folder), hang=hang))
    before = folder / "before"
    os.mkfifo(folder / "pipe")
    pipe = os.open(folder / "pipe", os.O_RDWR)
    pids = set()

    def progress(event):
        is_stalled = isinstance(event, PartitionStalled) and before.exists()
        if is_stalled and event.last_row == before.read_text():
            pids.add(event.pid)
            (folder / "is announced").touch()
            os.write(pipe, b"1")

    function = {"kind": "function", "function": f"{folder}/clean.py:clean"}
    settings = make_settings(folder, "store", [function], workers=workers)
    assert shard_dataset(settings, progress=progress).samples == 78
    os.close(pipe)
    (pid,) = pids
    assert (pid == os.getpid()) == (workers == 0)
    assert f"has got no sample for 0 minutes, after {before.read_text()}, in " in caplog.text


POOL = """
import multiprocessing

pool = None

def work(text):
    return text.upper()

def clean(sample):
    global pool
    if pool is None:
        pool = multiprocessing.get_context("fork").Pool(1)
    return {"txt": pool.apply(work, (sample["txt"],))}
"""


def test_a_function_may_work_in_forked_processes(folder):
    (folder / "clean.py").write_text(POOL)
    function = {"kind": "function", "function": f"{folder}/clean.py:clean"}
    settings = make_settings(folder, "store", [function], workers=1)
    assert shard_dataset(settings).samples == 78
    assert all(fields["txt"].isupper() for fields in read_samples(settings).values())


LASTING_CHILD = """
import os
import signal
from pathlib import Path

folder = Path({folder!r})

def clean(sample):
    if not (folder / "child").exists():
        (folder / "child").touch()
        if os.fork() == 0:
            (folder / "pipe").read_bytes()  # up to the end of the test
            os._exit(0)
        if {is_killed}:
            os.kill(os.getpid(), signal.SIGKILL)
    return sample
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_run_does_not_wait_for_a_process_that_a_function_has_forked(folder, is_killed):
    os.mkfifo(folder / "pipe")
    code = LASTING_CHILD.format(folder=str(folder), is_killed=is_killed)
    (folder / "clean.py").write_text(code)
    function = {"kind": "function", "function": f"{folder}/clean.py:clean"}
    settings = make_settings(folder, "store", [function], workers=1)
    assert shard_dataset(settings).samples == 78
    (folder / "pipe").write_bytes(b"")  # waits for the process, which still reads


@pytest.mark.parametrize(
    ("file", "body", "make_transforms"),
    [("clean.py", f"{CODE}\n", make_split), ("tokenizer.json", None, make_packed)],
)
def test_a_transform_that_changed_between_two_runs_is_refused(folder, file, body, make_transforms):
    settings = make_settings(folder, "store", make_transforms(folder))

    def stop(event):
        if isinstance(event, ShardCommitted):
            raise StoppedByTestError

    with pytest.raises(StoppedByTestError):
        shard_dataset(settings, progress=stop)
    (folder / file).write_text(body or train_tokenizer(300).decode())
    with pytest.raises(errors.ConflictError, match=r"other settings: transforms\.0\.digest"):
        shard_dataset(settings)
    with pytest.raises(errors.ConflictError, match=r"transforms \(\w+, now none\)"):
        shard_dataset(make_settings(folder, "store", []))


def test_a_worker_process_fetches_a_tokenizer_once_for_all_partitions(folder, r2, request):
    settings = make_settings(folder, "store", make_packed(folder), workers=2)
    settings = settings.model_copy(update={"store": make_spec("r2", request)})
    for number in range(2, 8):
        (folder / "source" / f"{number}.jsonl").write_text(json.dumps({"text": "the mill"}))
    workers: set[int] = set()
    partitions: set[str] = set()

    def note(event):
        if isinstance(event, PartitionOpened):
            workers.add(event.pid)
            partitions.add(event.partition)

    shard_dataset(settings, progress=note)
    reads = [
        one
        for one in r2.list_requests()
        if one["method"] == "GET" and "/d/transforms/" in one["path"]
    ]
    assert len(partitions) > 2 * len(workers)
    assert len(reads) == len(workers)


@pytest.mark.parametrize("make_transforms", TRANSFORMS)
def test_lost_shards_are_made_again_from_within_a_row(folder, make_transforms):
    settings = make_settings(folder, "store", make_transforms(folder))
    report = shard_dataset(settings)
    before = read_objects(settings)
    store = open_store(settings.store)
    keys = [shard.key for shard in report.manifest.shards]
    assert delete(store, keys) == []
    with pytest.raises(errors.ConflictError, match=r"transforms \(\w+, now none\)"):
        repair_dataset(make_settings(folder, "store", []))
    assert sorted(repair_dataset(settings).remade_keys) == sorted(keys)
    assert read_objects(settings) == before
    assert verify_dataset(store, "d").is_intact


def test_garbage_collection_keeps_the_objects_of_the_plan(folder):
    settings = make_settings(folder, "store", make_split(folder))
    shard_dataset(settings)
    store = open_store(settings.store)
    store_objects = read_objects(settings)
    (kept,) = [key for key in store_objects if key.startswith("d/transforms/")]
    orphan = f"d/transforms/{'0' * 64}.py"
    (folder / "store" / orphan).write_text("")
    found = plan_garbage(store, "d", min_age=timedelta(minutes=-1))
    keys = [planned.stat.key for planned in found.objects]
    assert orphan in keys
    assert kept not in keys


@pytest.mark.parametrize("formats", [["webdataset"], ["webdataset", "parquet"]])
def test_identifiers_pass_a_function_unchanged(tmp_path, formats):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/a.csv").write_text("sku,text\n007,one\n0012,two\nA-5,three\n13,four\n")
    (tmp_path / "same.py").write_text("def same(sample):\n    return sample\n")
    types = {"id": "str", "txt": "str"} if "parquet" in formats else {}
    function = {"kind": "function", "function": f"{tmp_path}/same.py:same"}
    settings = PipelineSettings.model_validate(
        {
            "dataset": "d",
            "source": {
                "url": f"file://{tmp_path}/source",
                "kind": "csv",
                "columns": {"id": "sku", "txt": "text"},
            },
            "store": {"url": f"file://{tmp_path}/store"},
            "sharding": {"formats": formats, "types": types, "transforms": [function]},
            "execution": {"workers": 0, "max_quarantined": 0},
        }
    )
    assert shard_dataset(settings).samples == 4
    ids = [fields["id"] for fields in read_samples(settings).values()]
    assert ids == [b"007", b"0012", b"A-5", b"13"]
    if "parquet" in formats:
        (shard,) = (tmp_path / "store/d/shards/parquet/train").glob("*.parquet")
        assert parquet.read_table(shard)["id"].to_pylist() == ["007", "0012", "A-5", "13"]


@pytest.fixture
def words(tmp_path):
    """A folder with a tokenizer of 70,001 words and a source of three texts."""
    vocabulary = {f"w{number}": number for number in range(70_000)} | {END: 70_000}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "source").mkdir()
    lines = [json.dumps({"text": text}) for text in ("w1 w2 w3", "w69999 w5", "w7 unknown", "w7")]
    (tmp_path / "source/a.jsonl").write_text("\n".join(lines))
    (tmp_path / "clean.py").write_text("def split(sample):\n    return sample\n")
    return tmp_path


def shard_words(folder, formats, transforms, types):
    settings = make_settings(folder, "store", transforms)
    sharding = {"formats": formats, "types": types, "seed": None, "transforms": transforms}
    return shard_dataset(
        PipelineSettings.model_validate(
            {
                **settings.model_dump(),
                "sharding": sharding,
                "execution": {"max_quarantined": 0.5, "workers": 1},
            }
        )
    )


@pytest.mark.parametrize("formats", [["tokens", "parquet"], ["webdataset"]])
@pytest.mark.parametrize("before", [[], make_split], ids=["alone", "after a function"])
def test_tokens_of_a_large_vocabulary_are_loaded_as_they_are(words, formats, before):
    tokenize = {"tokenizer": f"{words}/tokenizer.json", "end_token": END}
    transforms = [*(before(words) if before else []), tokenize]
    report = shard_words(words, formats, transforms, {})
    assert report.manifest.fields == {"tokens": "uint32[]"}
    assert report.manifest.quarantined == 1, "the tokenizer refuses the text with an unknown word"
    for name in formats:
        loader = ShardLoader(f"file://{words}/store", "d", format=name, shuffle=False)
        assert [sample["tokens"].tolist() for sample in loader] == [
            [1, 2, 3, 70_000],
            [69_999, 5, 70_000],
            [7, 70_000],
        ]


def test_a_type_that_the_ids_of_a_tokenizer_do_not_fit_is_refused(words):
    pack = {"tokenizer": f"{words}/tokenizer.json", "end_token": END, "pack": 4}
    with pytest.raises(errors.ConfigurationError, match=r'Write {tokens: "uint32\[\]"}'):
        shard_words(words, ["tokens"], [*make_split(words), pack], {"tokens": "uint16[]"})
    assert not (words / "store/d").exists()


MANY = """
def multiply(sample):
    if sample["txt"].startswith("bad"):
        raise ValueError("a text that raises")
    return [{"txt": f"{sample['txt']} {number}"} for number in range(20)]

def spoil(sample):
    if sample["txt"].endswith(" 7"):
        raise ValueError("a text that raises")
    return {"id": "none" if sample["txt"].endswith(" 9") else "1"}
"""


def make_many(folder, lines, transforms, **sharding):
    (folder / "source").mkdir()
    (folder / "source/a.jsonl").write_text("\n".join(lines))
    (folder / "many.py").write_text(MANY)
    (folder / "tokenizer.json").write_bytes(train_tokenizer())
    return PipelineSettings.model_validate(
        {
            "dataset": "d",
            "source": {"url": f"file://{folder}/source", "columns": {"txt": "text"}},
            "store": {"url": f"file://{folder}/store"},
            "sharding": {"transforms": transforms, **sharding},
            "execution": {"workers": 0, "max_quarantined": 0.1},
        }
    )


def read_ledger(settings):
    """Return rows and bad rows of the commits, and those of the end of the only partition."""
    store = open_store(settings.store)
    (ledger,) = iterate_partition_ledgers(store, DatasetKeys(settings.dataset))
    *commits, end = [(one.rows, one.bad_rows) for one in (*ledger.commits, ledger.end)]
    return commits, end


def test_samples_that_a_function_adds_hide_no_bad_rows(tmp_path):
    lines = [json.dumps({"text": f"bad {n}" if n % 5 == 0 else "good"}) for n in range(100)]
    step = {"kind": "function", "function": f"{tmp_path}/many.py:multiply"}
    settings = make_many(tmp_path, lines, [step], shard_samples=130)
    with pytest.raises(errors.QuarantineError, match=r"made no sample, above the limit of 10%"):
        shard_dataset(settings)
    execution = settings.execution.model_copy(update={"max_quarantined": 0.2})
    assert shard_dataset(settings.model_copy(update={"execution": execution})).samples == 1600
    commits, end = read_ledger(settings)
    assert end == (100, 20)
    assert [sum(numbers) for numbers in zip(*commits, strict=True)] == [100, 20]


def test_documents_that_share_a_packed_sample_are_rows_each(tmp_path):
    lines = ["{}" if n % 50 == 0 else '{"text": "fox"}' for n in range(1000)]
    (packed,) = make_packed(tmp_path)
    settings = make_many(tmp_path, lines, [{**packed, "pack": 512}])
    assert shard_dataset(settings).manifest.quarantined == 20
    assert read_ledger(settings)[1] == (1000, 20)


def test_a_row_of_which_some_samples_are_bad_counts_in_part(tmp_path):
    steps = [
        {"kind": "function", "function": f"{tmp_path}/many.py:{name}"}
        for name in ("multiply", "spoil")
    ]
    settings = make_many(
        tmp_path, ['{"text": "good"}'] * 200, steps, formats=["parquet"], types={"id": "int"},
        shard_samples=70,
    )  # fmt: skip
    report = shard_dataset(settings)
    assert (report.samples, report.manifest.quarantined) == (200 * 18, 200 * 2)
    rows, bad_rows = read_ledger(settings)[1]
    assert rows == 200
    assert bad_rows == pytest.approx(20)


COUNTING = """
calls = 0

def clean(sample):
    global calls
    calls += 1
    return {"txt": f"{sample['txt']} {calls}"}
"""


def test_a_function_that_makes_other_samples_at_each_call_is_named(tmp_path):
    lines = [json.dumps({"text": f"{n}"}) for n in range(30)]
    step = {"kind": "function", "function": f"{tmp_path}/counting.py:clean"}
    (tmp_path / "counting.py").write_text(COUNTING)
    settings = make_many(tmp_path, lines, [step], shard_samples=10)

    def stop(event):
        if isinstance(event, ShardUploaded):
            raise StoppedByTestError

    with pytest.raises(StoppedByTestError):
        shard_dataset(settings, progress=stop)
    with pytest.raises(errors.ConflictError, match="depends on more than its sample") as caught:
        shard_dataset(settings)
    assert "under another dataset name" in str(caught.value)
    assert "remove" not in str(caught.value)
    other = settings.model_copy(update={"dataset": "d2"})
    shard = shard_dataset(other).manifest.shards[0].key
    delete(open_store(settings.store), [shard])
    with pytest.raises(errors.ChangedError, match="depends on more than its sample"):
        repair_dataset(other)


def test_a_plan_takes_a_file_of_a_transform_from_the_dataset_as_a_run_does(folder):
    (folder / "clean.py").write_text("def clean(sample):\n    return {'txt': sample['txt']}\n")
    step = {"kind": "function", "function": f"{folder}/clean.py:clean"}
    shard_dataset(make_settings(folder, "store", [step]))
    (folder / "clean.py").unlink()
    (stored,) = (folder / "store/d/transforms").glob("*.py")
    settings = make_settings(folder, "store", [{**step, "digest": f"blake3:{stored.stem}"}])
    assert preflight_dataset(settings)[1].refusals == ()
    assert shard_dataset(settings).was_complete
    with pytest.raises(errors.NotFoundError, match="set `digest` to take the file"):
        preflight_dataset(make_settings(folder, "store", [step]))
