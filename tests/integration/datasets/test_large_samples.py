"""Samples larger than a shard: in memory once, whatever their number."""

import hashlib
import io
import os
import subprocess
import sys

import pytest
import webdataset

from millrace.datasets import PipelineSettings, preflight_dataset, shard_dataset, verify_dataset
from millrace.datasets.formats.webdataset import TarEncoder
from millrace.datasets.sample import LargeFile, Sample
from millrace.datasets.sources.local_files import LocalFiles
from millrace.errors import ConfigurationError
from millrace.storage import list_objects, open_store, read

MIB, GIB = 1 << 20, 1 << 30
RUN = """
import re, sys
from pathlib import Path
from millrace.datasets import PipelineSettings, shard_dataset

def peak():
    # Not ru_maxrss: that begins with the peak of the process that started this one.
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def run(name, source):
    shard_dataset(PipelineSettings.model_validate({
        "dataset": name, "source": {"kind": "files", "url": source},
        "store": {"url": sys.argv[1]}, "sharding": {"shard_bytes": "4MiB"},
        "execution": {"workers": 0, "uploads": 2},
    }))
    return peak()

print(run("few", sys.argv[2]), run("large", sys.argv[3]))
"""


def write_files(folder, sizes):
    folder.mkdir()
    for name, size in sizes.items():
        (folder / name).write_bytes(os.urandom(MIB) * (size // MIB))
    return folder.as_uri()


def test_large_samples_are_in_memory_once_and_one_at_a_time(tmp_path):
    small = write_files(tmp_path / "small", {f"{n}.bin": 2 * MIB for n in range(6)})
    sizes = {f"{n}.bin": 96 * MIB for n in range(3)}
    large = write_files(tmp_path / "large", sizes)
    ran = subprocess.run(
        [sys.executable, "-c", RUN, (tmp_path / "store").as_uri(), small, large],
        capture_output=True,
        text=True,
        check=True,
    )
    before, after = map(int, ran.stdout.split()[-2:])
    assert after - before <= 1.25 * 96 * MIB
    store = open_store((tmp_path / "store").as_uri())
    assert verify_dataset(store, "large").shards == 3


def test_the_shard_of_a_large_sample_is_what_webdatasets_own_writer_makes(tmp_path):
    source = write_files(tmp_path / "source", {"a.bin": 33 * MIB, "a.txt": MIB, "b.txt": MIB})
    (tmp_path / "source" / "a.empty").write_bytes(b"")
    settings = PipelineSettings.model_validate(
        {
            "dataset": "d",
            "source": {"kind": "files", "url": source},
            "store": {"url": (tmp_path / "store").as_uri()},
            "sharding": {"shard_bytes": "4MiB"},
            "execution": {"workers": 0},
        }
    )
    shard_dataset(settings)
    store = open_store((tmp_path / "store").as_uri())
    made = {
        hashlib.sha256(read(store, found.key)).hexdigest()
        for found in list_objects(store)
        if found.key.endswith(".tar")
    }
    expected: set[str] = set()
    for key, extensions in {"a": ["bin", "empty", "txt"], "b": ["txt"]}.items():
        target = io.BytesIO()
        writer = webdataset.TarWriter(target, encoder=False, mtime=0)
        fields = {e: (tmp_path / "source" / f"{key}.{e}").read_bytes() for e in extensions}
        writer.write({"__key__": key, **fields})
        writer.close()
        expected.add(hashlib.sha256(target.getvalue()).hexdigest())
    assert made == expected


@pytest.mark.parametrize("sizes", [{"a.bin": GIB + 1}, {"a.bin": GIB, "a.txt": 1}])
def test_a_sample_of_more_than_a_gib_is_refused_before_anything_is_read(
    tmp_path, monkeypatch, sizes
):
    (tmp_path / "source").mkdir()
    for name, size in sizes.items():
        (tmp_path / "source" / name).touch()
        os.truncate(tmp_path / "source" / name, size)
    settings = PipelineSettings.model_validate(
        {
            "dataset": "d",
            "source": {"kind": "files", "url": (tmp_path / "source").as_uri()},
            "store": {"url": (tmp_path / "store").as_uri()},
            "execution": {"workers": 0},
        }
    )
    reads = []

    def note(call):
        def noted(files, file, *told, **named):
            reads.append(file.path)
            return call(files, file, *told, **named)

        return noted

    for name in ("read", "iterate_blocks"):
        monkeypatch.setattr(LocalFiles, name, note(getattr(LocalFiles, name)))
    for make in (preflight_dataset, shard_dataset):
        with pytest.raises(ConfigurationError, match=r"a\.bin: a sample of 1073741825 bytes"):
            make(settings)
    os.truncate(tmp_path / "source" / "a.bin", GIB - 1)
    plan, _ = preflight_dataset(settings)
    assert len(plan.partitions) == 1  # a shard can be as large as this
    assert reads == []
    os.truncate(tmp_path / "source" / "a.bin", 1)
    preflight_dataset(settings, samples=1)
    assert sorted(reads) == sorted(sizes)


def test_a_buffer_that_a_large_sample_made_grow_shrinks_again():
    encoder = TarEncoder(MIB)
    file = LargeFile(3 * MIB, lambda: iter([bytes(MIB)] * 3))
    encoder.prepare(Sample("a", {"bin": file}, 1))
    encoder.append()
    assert len(encoder.close().obj) > 3 * MIB
    encoder.reset()
    encoder.prepare(Sample("b", {"txt": b"text"}, 2))
    encoder.append()
    assert len(encoder.close().obj) == MIB


@pytest.mark.soak
def test_large_rows_of_json_lines_are_held_five_times_at_most(tmp_path):
    for name, rows, size in (("small", 6, 2 * MIB), ("large", 3, 64 * MIB)):
        (tmp_path / name).mkdir()
        with (tmp_path / name / "a.jsonl").open("w") as file:
            for _ in range(rows):
                file.write('{"text": "')
                for _ in range(size // MIB):
                    file.write("x" * MIB)
                file.write('"}\n')
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            RUN.replace('"kind": "files"', '"kind": "jsonl", "columns": {"txt": "text"}'),
            (tmp_path / "store").as_uri(),
            (tmp_path / "small").as_uri(),
            (tmp_path / "large").as_uri(),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    before, after = map(int, ran.stdout.split()[-2:])
    # Four times where the shard before is uploaded by then; what it takes is not ours to say.
    assert (after - before) / (64 * MIB) <= 5
    assert verify_dataset(open_store((tmp_path / "store").as_uri()), "large").shards == 3
