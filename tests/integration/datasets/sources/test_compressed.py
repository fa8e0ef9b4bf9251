"""Compressed JSON lines: each row once, from any cursor, without what lies before a seek point."""

import gzip
import json
import os
import random
import secrets
import struct
import subprocess
import sys
import zlib
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace import PipelineSettings, errors, shard_dataset
from millrace.datasets.progress_events import ShardCommitted
from millrace.datasets.sample import Sample
from millrace.datasets.sources import (
    Division,
    SourceSettings,
    compressed,
    open_files,
    open_source,
    partition_source,
)
from millrace.keys.datasets import DatasetKeys
from millrace.storage import list_objects, open_store, put, read
from tests.stores import make_spec
from tests.support.examples import scale_examples

KEYS = DatasetKeys("d")
STEP = 16 << 10
INTERVAL = 256 << 10  # of seek points, in most of these tests


def open_partitions(store, dataset, *, holdout=0.0, any_version=False):
    """Divide the source in a store; return its partitions, and the source."""
    division = Division(1 << 20, 10_000, 0, holdout)
    divided = partition_source(SourceSettings(), open_files(store.spec), KEYS, division)
    source = open_source(divided.record, open_files(store.spec), dataset, any_version=any_version)
    return divided.partitions, source


def make_memory():
    return open_store(f"memory://{secrets.token_hex(8)}")


@cache
def make_lines(size, seed=0):
    """Return JSON lines of about a size, which deflate to about half."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(2000)]
    lines, total = [], 0
    while total < size:
        lines.append(json.dumps({"n": len(lines), "text": " ".join(rng.choices(words, k=60))}))
        total += len(lines[-1]) + 1
    return lines


def encode(lines):
    return "".join(f"{line}\n" for line in lines).encode()


def deflate_with_flushes(body):
    """Compress as `pigz` does: one member, whose blocks end at bytes now and then."""
    deflater = zlib.compressobj(6, wbits=31)
    parts = [
        deflater.compress(body[at : at + 100_000]) + deflater.flush(zlib.Z_SYNC_FLUSH)
        for at in range(0, len(body), 100_000)
    ]
    return b"".join((*parts, deflater.flush()))


def join_members(body):
    """Compress as `bgzip` does: members of up to 64 KiB, with an extra field in their headers."""
    members = []
    for at in range(0, len(body), 65280):
        part = zlib.compress(body[at : at + 65280], wbits=-15)
        checksum = zlib.crc32(body[at : at + 65280])
        members.append(
            b"\x1f\x8b\x08\x04" + bytes(6) + struct.pack("<HBBHH", 6, 66, 67, 2, len(part) + 25)
            + part + struct.pack("<II", checksum, len(body[at : at + 65280]))
        )  # fmt: skip
    return b"".join(members)


def run_gzip(body):
    """Compress with the program, which writes the name of the file into the header."""
    return subprocess.run(["gzip", "-9"], input=body, capture_output=True, check=True).stdout


def join_frames(body, size):
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    skipped = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"about"
    return b"".join(
        compressor.compress(body[at : at + size]) + skipped for at in range(0, len(body), size)
    )


ENCODERS = {
    "program.gz": run_gzip,
    "level 1.gz": lambda body: gzip.compress(body, 1),
    "flushed.gz": deflate_with_flushes,
    "members.gz": join_members,
    "two.GZ": lambda body: b"".join(map(gzip.compress, (body[: 1 << 20], body[1 << 20 :]))) + b"\0",
    "program.zst": lambda body: subprocess.run(
        ["zstd", "-5"], input=body, capture_output=True, check=True
    ).stdout,
    "frames.zst": lambda body: join_frames(body, 300_000),
}  # fmt: skip


@pytest.mark.parametrize("name", list(ENCODERS))
@pytest.mark.parametrize("holdout", [0.0, 0.3])
def test_every_row_comes_once_and_in_its_order(name, holdout):
    store, lines = make_memory(), make_lines(3 << 20)
    put(store, f"a.jsonl.{name}", ENCODERS[name](encode(lines)))
    partitions, source = open_partitions(store, make_memory(), holdout=holdout)
    rows = [
        [row.fields["json"].decode() for row in source.iterate_rows(one.source_range, 0)]
        for one in partitions
    ]
    assert [row for part in rows for row in part] == lines
    assert len(rows) == 1 + bool(holdout)
    if holdout:
        assert len(rows[1]) == pytest.approx(0.3 * len(lines), rel=0.1)


@settings(deadline=None, max_examples=scale_examples(60))
@given(
    parts=st.lists(
        st.lists(st.sampled_from(['{"a": 1}', "", "bad", '{"b": "xyz"}', "\r"]), max_size=8),
        min_size=1, max_size=5,
    ),
    last=st.booleans(), extension=st.sampled_from(["gz", "zst"]),
    holdout=st.sampled_from([0.0, 0.5]),
)  # fmt: skip
def test_any_members_give_the_rows_of_the_plain_file_from_any_cursor(
    parts, last, extension, holdout
):
    body = b"\n".join("\n".join(part).encode() for part in parts) + b"\n" * last
    cuts = sorted(random.Random(len(body)).sample(range(len(body) + 1), min(len(body), len(parts))))
    compress = gzip.compress if extension == "gz" else zstandard.ZstdCompressor().compress
    edges = [0, *cuts, len(body)]
    packed = b"".join(compress(body[a:b]) for a, b in pairwise(edges))
    plain, store = make_memory(), make_memory()
    put(plain, "a.jsonl", body)
    put(store, f"a.jsonl.{extension}", packed)
    found = []
    for each in (plain, store):
        partitions, source = open_partitions(each, make_memory(), holdout=holdout)
        rows = [list(source.iterate_rows(one.source_range, 0)) for one in partitions]
        found.append(sorted(_describe(row) for part in rows for row in part))
        for one, part in zip(partitions, rows, strict=True):
            for index, row in enumerate(part):
                rest = list(source.iterate_rows(one.source_range, row.next_cursor))
                assert rest == part[index + 1 :]
    assert found[0] == found[1]


def _describe(row):
    if isinstance(row, Sample):
        return row.key, row.fields["json"]
    return row.where.partition(",")[2], row.data


class CountedFiles:
    """Files of a source, with the offsets from which they were read."""

    def __init__(self, files):
        self._files, self.starts = files, []

    def __getattr__(self, name):
        return getattr(self._files, name)

    def iterate_blocks(self, file, start, end, **options):
        self.starts.append(start)
        return self._files.iterate_blocks(file, start, end, **options)


@pytest.mark.parametrize(
    "name",
    [
        "program.gz",
        "frames.zst",
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in ("level 1.gz", "flushed.gz", "members.gz", "two.GZ")
        ),
    ],
)
def test_a_run_that_continues_reads_from_the_last_seek_point(name, monkeypatch):
    monkeypatch.setattr(compressed, "SEEK_INTERVAL", INTERVAL)
    store, dataset = make_memory(), make_memory()
    body = ENCODERS[name](encode(make_lines(6 << 20)))
    put(store, f"a.jsonl.{name}", body)
    (partition,), source = open_partitions(store, dataset)
    rows = list(source.iterate_rows(partition.source_range, 0))
    points = list(list_objects(dataset, KEYS.partition_notes))
    assert len(points) >= 2
    assert all(KEYS.is_seek_point_or_index(stat.key) and KEYS.is_own(stat.key) for stat in points)
    files = CountedFiles(open_files(store.spec))
    division = Division(1 << 20, 10_000, 0, 0.0)
    record = partition_source(SourceSettings(), files, KEYS, division).record
    source = open_source(record, files, dataset)
    for index in range(0, len(rows), len(rows) // 20):
        cursor = rows[index].next_cursor
        assert list(source.iterate_rows(partition.source_range, cursor)) == rows[index + 1 :]
        reached = partition.source_range.locate(cursor)
        # The seek point is at a block of the next 128 KiB.
        assert files.starts[-1] >= reached - INTERVAL - (128 << 10) - 2 * STEP
    assert files.starts[-1] > len(body) // 2


@pytest.mark.parametrize("name", ["program.zst", "frames.zst", "program.gz"])
def test_a_file_of_one_long_frame_is_named_once(name, monkeypatch, caplog):
    monkeypatch.setattr(compressed, "SEEK_INTERVAL", INTERVAL)
    store = make_memory()
    put(store, f"a.jsonl.{name}", ENCODERS[name](encode(make_lines(6 << 20))))
    (partition,), source = open_partitions(store, make_memory())
    assert len(list(source.iterate_rows(partition.source_range, 0))) == len(make_lines(6 << 20))
    warning = (
        f"{store.make_url(f'a.jsonl.{name}')} has a frame of zstd of more than 524.3 kB: a run "
        "that continues reads the file from byte 0 again. Compress it in several frames, as "
        "`pzstd` does."
    )
    assert caplog.messages == ([warning] if name == "program.zst" else [])


def test_what_a_bit_of_any_position_begins_continues(monkeypatch):
    """Blocks begin at every bit of a byte; each needs other bits before it."""
    monkeypatch.setattr(compressed, "SEEK_INTERVAL", 1)
    store, dataset, bits = make_memory(), make_memory(), set()
    for number in range(2):
        put(store, f"{number:02d}.gz", gzip.compress(encode(make_lines(2 << 20, seed=number)), 6))
    partitions, source = open_partitions(store, dataset)
    found = [list(source.iterate_rows(one.source_range, 0)) for one in partitions]
    monkeypatch.undo()
    for one, rows in zip(partitions, found, strict=True):
        folder = one.source_range.seek_points
        for stat in list_objects(dataset, f"{folder}/"):
            point = json.loads(read(dataset, stat.key))["record"]
            bits.add(point["bit"])
            after = [row for row in rows if row.next_cursor >= point["cursor"]]
            rest = list(source.iterate_rows(one.source_range, after[0].next_cursor))
            assert rest == after[1:]
    assert bits == set(range(8))


NUMBERS = ["position", "bit", "offset", "checksum", "member_bytes"]


@pytest.mark.parametrize("change", ["none", "window", "other file", "no record", *NUMBERS])
def test_a_seek_point_that_does_not_fit_is_not_used(change, monkeypatch):
    monkeypatch.setattr(compressed, "SEEK_INTERVAL", INTERVAL)
    store, dataset = make_memory(), make_memory()
    put(store, "a.gz", gzip.compress(encode(make_lines(3 << 20))))
    (partition,), source = open_partitions(store, dataset)
    rows = list(source.iterate_rows(partition.source_range, 0))
    for stat in list(list_objects(dataset, KEYS.partition_notes)):
        point = json.loads(read(dataset, stat.key))
        match change:
            case "window":
                point["record"]["window"] = "A" * 8 + point["record"]["window"][8:]
            case "other file":
                point["record"]["file"]["etag"] = "other"
                point["record"]["window"] = ""
            case "no record":
                point = {"kind": "x"}
            case "none":
                pass
            case number:
                point["record"][number] ^= 1
        put(dataset, stat.key, json.dumps(point).encode())
    assert list(source.iterate_rows(partition.source_range, rows[-9].next_cursor)) == rows[-8:]


DAMAGES = {
    "cut": (lambda body: body[:-4], "it ends too early"),
    "cut in the middle": (lambda body: body[: len(body) // 2], "it ends too early"),
    "checksum": (lambda body: body[:-8] + b"abcd" + body[-4:], "checksum"),
    "length": (lambda body: body[:-4] + b"abcd", "checksum"),
    "more after it": (lambda body: body + b"more", "not gzip"),
    "bytes": (lambda body: body[:-9000] + b"\xff" * 900 + body[-8100:], "invalid|checksum|early"),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_damage_of_a_gzip_file_is_the_same_sentence_after_a_resume(damage, monkeypatch):
    monkeypatch.setattr(compressed, "SEEK_INTERVAL", INTERVAL)
    change, said = DAMAGES[damage]
    body = change(gzip.compress(encode(make_lines(3 << 20))))
    check_damage("a.jsonl.gz", body, said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda body: body[:-7], "it ends too early"),
        (lambda body: body[:-9] + b"\0" + body[-8:], "checksum|content|Data corruption|too early"),
        (lambda body: body[:-4] + b"abcd", "checksum"),
        (lambda body: body + b"\0more and more", "not zstd"),
        (lambda body: body + body[:3], "it ends too early"),
    ],
)
def test_damage_of_a_zstd_file_is_the_same_sentence_after_a_resume(change, said, monkeypatch):
    monkeypatch.setattr(compressed, "SEEK_INTERVAL", INTERVAL)
    body = encode(make_lines(3 << 20))
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    packed = compressor.compress(body[: 2 << 20]) + compressor.compress(body[2 << 20 :])
    check_damage("a.jsonl.zst", change(packed), said)


def check_damage(name, body, said):
    """Read a damaged file to its damage, from its beginning and from the last row before."""
    store, dataset = make_memory(), make_memory()
    put(store, name, body)
    (partition,), source = open_partitions(store, dataset)
    rows, sentences = [], []
    with pytest.raises(errors.ConfigurationError, match=said) as caught:
        collect(source.iterate_rows(partition.source_range, 0), rows)
    sentences.append(str(caught.value))
    assert any(True for _ in list_objects(dataset, KEYS.partition_notes))
    for row in (rows[-1], rows[len(rows) * 2 // 3]):
        with pytest.raises(errors.ConfigurationError) as caught:
            list(source.iterate_rows(partition.source_range, row.next_cursor))
        sentences.append(str(caught.value))
    assert len(set(sentences)) == 1
    assert f"{name} cannot be decompressed near byte" in sentences[0]
    assert "exclude" in sentences[0]


def collect(found, rows):
    """Add what is found to some rows, which stay if an error follows."""
    for row in found:
        rows.append(row)


def test_bytes_of_another_compression_are_a_sentence():
    store = make_memory()
    put(store, "a.jsonl.gz", zstandard.ZstdCompressor().compress(b'{"a":1}\n'))
    (partition,), source = open_partitions(store, make_memory())
    with pytest.raises(errors.ConfigurationError, match="bytes that are not gzip"):
        list(source.iterate_rows(partition.source_range, 0))


BOMB = """
import resource, sys
from pathlib import Path
from millrace import errors
from tests.integration.datasets.sources.test_compressed import make_memory, open_partitions
from millrace.storage import put

store = make_memory()
put(store, sys.argv[2], Path(sys.argv[1]).read_bytes())
(partition,), source = open_partitions(store, make_memory())
now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + int(sys.argv[3]),) * 2)
try:
    print(sum(1 for _ in source.iterate_rows(partition.source_range, 0)), "rows")
except errors.ConfigurationError as error:
    print(error)
"""


def make_gzip_bomb(byte, size):
    deflater, block = zlib.compressobj(1, wbits=31), byte * (1 << 20)
    return b"".join([*(deflater.compress(block) for _ in range(size >> 20)), deflater.flush()])


def make_zstd_bomb(byte, size):
    """Compress to blocks of 4 bytes, which become 128 KiB each."""
    block = (128 << 10) << 3 | 1 << 1
    blocks = (block.to_bytes(3, "little") + byte) * (size >> 17)
    return b"\x28\xb5\x2f\xfd\x00\x38" + blocks + b"\x01\x00\x00"


BOMBS = [pytest.param(make_gzip_bomb, marks=pytest.mark.soak), make_zstd_bomb]


@pytest.mark.parametrize("make", BOMBS)
def test_a_bomb_without_an_end_of_a_line_stops_at_the_largest_row(make, tmp_path):
    body = make(b"x", 1 << 30)
    assert len(body) < 5 << 20
    # A row of 256 MiB, and little more.
    said = run_limited(tmp_path, body, make, 320 << 20)
    assert "is longer than 268435456 bytes" in said


@pytest.mark.parametrize("make", BOMBS)
def test_a_bomb_of_lines_takes_no_memory(make, tmp_path):
    assert run_limited(tmp_path, make(b"\n", 2 << 20), make, 48 << 20) == "0 rows"


def run_limited(folder, body, make, memory):
    (folder / "bomb").write_bytes(body)
    name = "a.gz" if make is make_gzip_bomb else "a.zst"
    root = Path(__file__).parents[4]
    ran = subprocess.run(
        [sys.executable, "-c", BOMB, str(folder / "bomb"), name, str(memory)],
        capture_output=True, text=True, check=False, cwd=root,
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},  # others reserve addresses for each thread
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_a_zstd_frame_that_needs_too_much_memory_is_a_sentence():
    store = make_memory()
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    put(store, "a.zst", compressor.compress(b'{"a":1}\n') + compressor.flush())
    (partition,), source = open_partitions(store, make_memory())
    with pytest.raises(errors.ConfigurationError, match="too much memory"):
        list(source.iterate_rows(partition.source_range, 0))


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("kind", ["local", "rgw"])
@pytest.mark.parametrize("extension", ["gz", "zst"])
def test_a_run_that_was_stopped_makes_the_shards_of_one_that_was_not(
    kind, extension, request, tmp_path_factory, monkeypatch
):
    monkeypatch.setattr(compressed, "SEEK_INTERVAL", INTERVAL)
    store = open_store(make_spec(kind, request))
    body = encode(make_lines(3 << 20))
    packed = gzip.compress(body) if extension == "gz" else join_frames(body, 500_000)
    put(store, f"in/a.jsonl.{extension}", packed)
    put(store, f"in/b.jsonl.{extension}", packed[: len(packed)])
    made = []
    for name in ("straight", "stopped"):
        folder = tmp_path_factory.mktemp(name)
        settings_ = PipelineSettings.model_validate(
            {
                "dataset": "d",
                "source": {"columns": {"txt": "text"}, **store.spec.reveal_secrets()},
                "store": {"url": folder.as_uri()},
                "sharding": {"shard_bytes": "256KiB", "holdout": 0.1},
                "execution": {"workers": 0},
            }
        )
        stops = 0
        while name == "stopped" and stops < 6:
            commits = 0

            def stop(event, limit=stops):
                nonlocal commits
                commits += isinstance(event, ShardCommitted)
                if commits > limit:
                    raise StoppedError

            with pytest.raises(StoppedError):
                shard_dataset(settings_, progress=stop)
            stops += 1
        report = shard_dataset(settings_)
        assert report.manifest.quarantined == 0
        made.append([(shard.key, shard.digest, shard.samples) for shard in report.manifest.shards])
    assert made[0] == made[1]
    assert sum(samples for _, _, samples in made[0]) == 2 * len(make_lines(3 << 20))


@pytest.mark.parametrize("name", ["a.jsonl.bz2", "a.jsonl.xz", "a.JSONL.ZIP"])
def test_another_compression_is_refused_with_what_to_do(name):
    store = make_memory()
    put(store, name, b"x")
    with pytest.raises(errors.ConfigurationError, match=r"decompress it first, or compress it as"):
        open_partitions(store, make_memory())
