"""Samples of tar files: those of webdataset's reader, or of Python's tarfile, from any cursor."""

import contextlib
import gzip
import io
import random
import secrets
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset.tariterators import group_by_keys, tar_file_expander

from millrace import PipelineSettings, errors, shard_dataset
from millrace.datasets.progress_events import ShardCommitted
from millrace.datasets.repair import repair_dataset
from millrace.datasets.sample import BadRow, LargeFile, Sample
from millrace.datasets.sources import (
    Division,
    SourceSettings,
    open_files,
    open_source,
    partition_source,
    tars,
)
from millrace.keys.datasets import DatasetKeys
from millrace.storage import exists, list_objects, open_store, put, read
from tests.stores import make_spec
from tests.support.examples import scale_examples
from tests.support.web import Site, serve

KEYS = DatasetKeys("d")
FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def make_memory():
    return open_store(f"memory://{secrets.token_hex(8)}")


def make_tar(members, *, tar_format=tarfile.PAX_FORMAT):
    """Return a tar file of members: pairs of a name and bytes, or headers of Python's tarfile."""
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w", format=tar_format) as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                is_folder = member.type in {tarfile.DIRTYPE, tarfile.AREGTYPE}
                tar.addfile(member, None if is_folder else io.BytesIO(bytes(member.size)))
                continue
            info = tarfile.TarInfo(member[0])
            info.size = len(member[1])
            tar.addfile(info, io.BytesIO(member[1]))
    return body.getvalue()


def make_info(name, kind, **values):
    """Return the header of a member that is no plain file."""
    info = tarfile.TarInfo(name)
    info.type = kind
    for attribute, value in values.items():
        setattr(info, attribute, value)
    return info


class Opened:
    """A source of tar files, its partitions, and the store of the dataset."""

    def __init__(self, files, *, dataset=None, holdout=0.0, any_version=False, **source):
        self.dataset = dataset or make_memory()
        chosen = SourceSettings(kind="webdataset", **source)
        divided = partition_source(chosen, files, KEYS, Division(1 << 20, 10, None, holdout))
        self.partitions = divided.partitions
        self.source = open_source(divided.record, files, self.dataset, any_version=any_version)

    def read(self, cursor=0):
        """Return the rows of all partitions, each from a cursor on."""
        return [
            row
            for one in self.partitions
            for row in self.source.iterate_rows(one.source_range, cursor)
        ]


def read_rows(*bodies, **options):
    """Return the rows of tar files."""
    store = make_memory()
    for number, body in enumerate(bodies):
        put(store, f"{number}.tar", body)
    return Opened(open_files(store.spec), **options).read()


def show(rows):
    """Return the key and the fields of each sample."""
    assert [row for row in rows if not isinstance(row, Sample)] == []
    return [(row.key, dict(row.fields)) for row in rows]


def read_by_webdataset(*bodies):
    """Return the key and the fields of each sample, as webdataset groups the members."""
    streams = [{"url": str(n), "stream": io.BytesIO(body)} for n, body in enumerate(bodies)]
    found = []
    for sample in group_by_keys(tar_file_expander(streams)):
        fields = {name: data for name, data in sample.items() if not name.startswith("__")}
        found.append((sample["__key__"], fields))
    return found


def read_by_tarfile(body):
    """Return the fields of each key in the order of first members, as tarfile reads the file."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(body)) as tar:
        for info in tar:
            key, _, extension = info.name.rpartition("/")[2].partition(".")
            folder = info.name[: len(info.name) - len(key) - len(extension) - 1]
            data = tar.extractfile(info).read()
            found.setdefault(folder + key, {})[extension.lower()] = data
    return list(found.items())


def list_members(group):
    """Return the names and the data of the members of samples, given by their keys."""
    return [(f"{key}.{e}", data) for key, fields in group.items() for e, data in fields.items()]


NAMES = st.sampled_from(
    ["a", "b", "dir/a", "./c", "x.y/d", "Ünï", "n" * 90, "p/" * 60 + "deep", "l" * 300, "sp ace"]
)
GROUPS = st.dictionaries(
    NAMES,
    st.dictionaries(
        st.sampled_from(["jpg", "JSON", "seg.png", "cls"]),
        st.binary(max_size=1500),
        min_size=1,
        max_size=3,
    ),
    max_size=6,
)


@settings(deadline=None, max_examples=scale_examples(100))
@given(groups=st.lists(GROUPS, min_size=1, max_size=2), tar_format=st.sampled_from(FORMATS[1:]))
def test_samples_are_those_of_webdataset(groups, tar_format):
    bodies = [make_tar(list_members(group), tar_format=tar_format) for group in groups]
    assert show(read_rows(*bodies)) == read_by_webdataset(*bodies)


@settings(deadline=None, max_examples=scale_examples(100))
@given(
    group=GROUPS, seed=st.integers(0, 99), tar_format=st.sampled_from(FORMATS[1:]),
    holdout=st.sampled_from([0.0, 0.3]),
)  # fmt: skip
def test_members_in_any_order_make_the_samples_from_any_cursor(group, seed, tar_format, holdout):
    members = list_members(group)
    random.Random(seed).shuffle(members)
    body = make_tar(members, tar_format=tar_format)
    store = make_memory()
    put(store, "a.tar", body)
    opened = Opened(open_files(store.spec), holdout=holdout)
    assert show(opened.read()) == read_by_tarfile(body)
    for one in opened.partitions:
        rows = list(opened.source.iterate_rows(one.source_range, 0))
        fractions = [one.source_range.compute_fraction_before(row.next_cursor) for row in rows]
        assert fractions == sorted(fractions)
        for index, row in enumerate(rows):
            after = opened.source.iterate_rows(one.source_range, row.next_cursor)
            assert list(after) == rows[index + 1 :]


MIXED = [
    ("a.jpg", b"1"), ("b.jpg", b"22"), ("b.txt", b"B"), ("c.jpg", b""), ("a.txt", b"A"),
    ("c.txt", b"C"),
]  # fmt: skip


def test_a_sample_whose_members_are_apart_is_one_sample_where_its_first_member_is():
    assert show(read_rows(make_tar(MIXED))) == [
        ("a", {"jpg": b"1", "txt": b"A"}),
        ("b", {"jpg": b"22", "txt": b"B"}),
        ("c", {"jpg": b"", "txt": b"C"}),
    ]
    assert [key for key, _ in read_by_webdataset(make_tar(MIXED))] == ["a", "b", "c", "a", "c"]


def test_a_key_in_two_tar_files_is_a_sample_of_each_and_never_one_of_both():
    bodies = [make_tar([("0.txt", b"x"), ("1.txt", b"y")]), make_tar([("0.jpg", b"z")])]
    assert show(read_rows(*bodies)) == [
        ("0", {"txt": b"x"}),
        ("1", {"txt": b"y"}),
        ("0", {"jpg": b"z"}),
    ]
    assert read_by_webdataset(*bodies) == show(read_rows(*bodies))


def test_a_name_twice_in_a_tar_file_costs_its_sample():
    for extra in [("a.JPG", b"2"), ("a.jpg", b"1")]:
        bad, good = read_rows(make_tar([("a.jpg", b"1"), ("b.jpg", b"1"), extra]))
        assert (bad.where, bad.reason) == (
            "0.tar, sample a", "two files of one sample have the same extension"
        )  # fmt: skip
        assert good.key == "b"


@pytest.mark.parametrize("tar_format", FORMATS)
def test_a_folder_has_no_data_whatever_its_size_is(tar_format):
    members = [
        ("a.txt", b"1"), make_info("folder", tarfile.DIRTYPE, size=1024), ("b.txt", b"2"),
        make_info("old/", tarfile.AREGTYPE, size=1024), ("c.txt", b"3"), ("d.txt", b"4"),
    ]  # fmt: skip
    body = make_tar(members, tar_format=tar_format)
    rows = show(read_rows(body))
    assert rows == [("a", {"txt": b"1"}), ("b", {"txt": b"2"}), ("c", {"txt": b"3"}),
                    ("d", {"txt": b"4"})]  # fmt: skip
    assert rows == read_by_webdataset(body)


def test_members_that_are_no_plain_files_cost_their_samples():
    members = [
        ("a.jpg", b"1"), make_info("a.txt", tarfile.SYMTYPE, linkname="/etc/passwd"),
        ("b.jpg", b"2"), make_info("b.txt", tarfile.LNKTYPE, linkname="a.jpg", size=0),
        ("c.jpg", b"3"), make_info("c.txt", tarfile.CHRTYPE),
        make_info("d.txt", tarfile.FIFOTYPE),
        ("e.jpg", b"5"), make_info("e.txt", b"Q", size=700),
        make_info("folder.jpg", tarfile.DIRTYPE), ("f.jpg", b"6"),
    ]  # fmt: skip
    rows = read_rows(make_tar(members, tar_format=tarfile.GNU_FORMAT))
    assert [(row.where, row.reason) for row in rows[:-1]] == [
        ("0.tar, sample a", "its member a.txt is a link"),
        ("0.tar, sample b", "its member b.txt is a link"),
        ("0.tar, sample c", "its member c.txt is a device"),
        ("0.tar, sample d", "its member d.txt is a pipe"),
        ("0.tar, sample e", "its member e.txt has the unknown type b'Q'"),
    ]
    assert show(rows[-1:]) == [("f", {"jpg": b"6"})]


@pytest.mark.parametrize("option", ["--format=gnu", "--format=posix"])
def test_sparse_members_cost_their_samples_and_no_others(tmp_path, option):
    with (tmp_path / "a.bin").open("wb") as file:
        for part in range(40):  # more parts than a header holds
            file.seek(part << 16)
            file.write(b"x" * 4096)
    (tmp_path / "b.bin").write_bytes(b"b" * 700)
    command = ["tar", "--sparse", option, "-cf", "t.tar", "a.bin", "b.bin"]
    subprocess.run(command, cwd=tmp_path, check=True)
    opened = Opened(open_files(open_store(tmp_path.as_uri()).spec))
    bad, good = opened.read()
    assert (bad.where, bad.reason) == ("t.tar, sample a", "its member a.bin is sparse")
    assert show([good]) == [("b", {"bin": b"b" * 700})]


@pytest.mark.parametrize("tar_format", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_tar_files_of_the_program_tar_are_read(tmp_path, tar_format):
    deep = tmp_path / "in" / ("d" * 60) / ("e" * (5 if tar_format == "v7" else 60))
    deep.mkdir(parents=True)
    for name in ("one.txt", "two.txt", "two.jpg"):
        (deep / name).write_text(name)
    command = ["tar", f"--format={tar_format}", "--sort=name", "-cf", "t.tar", "-C", "in", "."]
    subprocess.run(command, cwd=tmp_path, check=True)
    body = (tmp_path / "t.tar").read_bytes()
    assert len(show(read_rows(body))) == 2
    assert show(read_rows(body)) == read_by_tarfile_files(body)


def read_by_tarfile_files(body):
    """Return the samples of the plain files of a tar file that also has folders."""
    with tarfile.open(fileobj=io.BytesIO(body)) as tar:
        files = [(one.name, tar.extractfile(one).read()) for one in tar if one.isreg()]
    return read_by_tarfile(make_tar(files))


def test_names_without_a_key_make_one_bad_row_and_names_that_readers_skip_none():
    members = [
        ("__meta__", b""), ("__x__/a.txt", b""), ("a.jpg", b"1"), ("README", b"2"),
        ("d/._a.jpg", b"3"), ("b.jpg", b"4"), ("LICENSE", b""), ("x/", b""), ("COPYING", b""),
        ("c.__x__", b""), ("d\n.txt", b""), ("e.txt.", b"5"), ("f.", b"6"),
    ]  # fmt: skip
    rows = read_rows(make_tar(members))
    assert [row.key for row in rows if isinstance(row, Sample)] == ["a", "b", "e"]
    assert {row.where: row.reason for row in rows if isinstance(row, BadRow)} == {
        "0.tar, names": "members without a key by WebDataset's rule: README, d/._a.jpg, LICENSE "
        "and 2 more",
        "0.tar, sample c": "readers of WebDataset reserve names like __this__",
        "0.tar, sample d\\x0a": "its name has control characters",
    }


def test_names_that_are_no_text_cost_their_samples():
    info = tarfile.TarInfo("caf\udce9.txt")
    rows = read_rows(make_tar([info, ("b.txt", b"")], tar_format=tarfile.GNU_FORMAT))
    assert (rows[0].where, rows[0].reason) == ("0.tar, sample caf\\xe9", "its name is not UTF-8")
    assert show(rows[1:]) == [("b", {"txt": b""})]


GOOD = make_tar([("a.txt", b"x" * 600), ("b.txt", b"y" * 600), ("c.txt", b"z" * 600)])
LONG = make_tar([("n" * 300 + ".txt", b"1")], tar_format=tarfile.GNU_FORMAT)
PAX = make_tar([("é" * 100 + ".txt", b"1")])


def set_size(header, value):
    """Return a header with other bytes for its size, and the right checksum."""
    changed = header[:124] + value.ljust(12, b"\0") + header[136:148] + b" " * 8 + header[156:512]
    return changed[:148] + b"%06o\0 " % sum(changed) + changed[156:]


DAMAGED = {
    "text": (b"no tar file " * 100, "at byte 0: it is none"),
    "short": (b"no tar file", "at byte 0: the file is cut short"),
    "gzip": (gzip.compress(GOOD), r"at byte 0: the file is compressed.*decompressed"),
    "header": (GOOD[:1600] + b"!" + GOOD[1601:], "at byte 1536: a header is damaged"),
    "data": (GOOD[:2200], "byte 1536: the file is cut short: its last member lacks 448 bytes"),
    "in header": (GOOD[:1700], "at byte 1536: the file is cut short"),
    "in name": (LONG[:600], "at byte 0: the file is cut short"),
    "after name": (LONG[:1024], "at byte 1024: the file is cut short"),
    "zeros after name": (LONG[:1024] + bytes(1024), "at byte 1024: the file is cut short"),
    "huge name": (set_size(LONG, b"%011o" % (1 << 30)) + LONG[512:], "its records have 1073741824"),
    "huge data": (set_size(GOOD, b"\x80" + b"\x7f" * 11) + GOOD[512:], "is cut short: its last"),
    "negative": (set_size(GOOD, b"\xff" * 12) + GOOD[512:], "a size is negative"),
    "no number": (set_size(GOOD, b"1_0") + GOOD[512:], "a size is no number"),
    "pax length": (PAX[:512] + b"999999 " + PAX[519:], "pax records of a member cannot be read"),
    "pax zero": (PAX[:512] + b"0 path=" + PAX[519:], "pax records of a member cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["memory", "local"])
@pytest.mark.parametrize("body", list(DAMAGED))
def test_a_damaged_file_stops_the_run_before_its_first_sample(body, kind, tmp_path):
    data, said = DAMAGED[body]
    store = make_memory() if kind == "memory" else open_store(tmp_path.as_uri())
    put(store, "a.tar", data)
    opened = Opened(open_files(store.spec))
    with pytest.raises(errors.ConfigurationError, match=said):
        next(opened.source.iterate_rows(opened.partitions[0].source_range, 0))
    assert list(list_objects(opened.dataset)) == []


@settings(deadline=None, max_examples=scale_examples(100))
@given(
    body=st.sampled_from([GOOD, LONG, PAX]),
    changes=st.lists(st.tuples(st.integers(0, 2047), st.integers(0, 255)), min_size=1, max_size=4),
    has_checksums=st.booleans(),
)
def test_any_damage_gives_rows_or_a_sentence(body, changes, has_checksums):
    damaged = bytearray(body)
    for at, value in changes:
        damaged[at] = value
    if has_checksums:  # as a hostile writer makes them
        for at in range(0, len(damaged), 512):
            if damaged[at + 257 : at + 262] == b"ustar":
                damaged[at + 148 : at + 156] = b" " * 8
                damaged[at + 148 : at + 156] = b"%06o\0 " % sum(damaged[at : at + 512])
    rows = []
    with contextlib.suppress(errors.ConfigurationError):
        rows = read_rows(bytes(damaged))
    cursors = [row.next_cursor for row in rows]
    assert cursors == sorted(set(cursors))
    assert not rows or cursors[-1] == len(damaged)


def test_a_file_without_its_end_is_read_and_named():
    rows = read_rows(GOOD[: 3 * 1536])
    assert [row.key for row in rows[:3]] == ["a", "b", "c"]
    assert rows[3].reason == "the tar file has no end, and may be cut short"
    assert rows[3].next_cursor == 3 * 1536


def test_members_after_the_end_are_named():
    rows = read_rows(GOOD + make_tar([("lost.txt", b"1")]))
    assert [row.key for row in rows[:3]] == ["a", "b", "c"]
    assert rows[3].reason.startswith("the tar file goes on after its end")
    assert len(rows) == 4


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.tar.zst", "a.tar.bz2", "a.TAR.XZ"])
def test_compressed_files_are_refused_before_the_run(name):
    store = make_memory()
    put(store, name, gzip.compress(GOOD))
    include = ["*"] if name.isupper() or "TAR" in name else None
    with pytest.raises(errors.ConfigurationError, match=r"is compressed.*Decompress the file"):
        Opened(open_files(store.spec), include=include)


def test_columns_are_refused():
    with pytest.raises(ValueError, match=r"not for the kind `webdataset`.*transform `rename`"):
        SourceSettings(kind="webdataset", columns={"txt": "text"})


def test_files_beside_tar_files_are_left_out():
    store = make_memory()
    for name in ("a.tar", "a.tar.md5", "a.json"):
        put(store, name, GOOD)
    put(store, "empty.tar", b"")
    assert len(Opened(open_files(store.spec)).partitions) == 1


class Recorder:
    """Files of a source, with the ranges that were read of them."""

    def __init__(self, files):
        self._files, self.ranges = files, []

    def __getattr__(self, name):
        return getattr(self._files, name)

    def iterate_blocks(self, file, start, end, **options):
        self.ranges.append((start, end))
        return self._files.iterate_blocks(file, start, end, **options)


def make_large(count=40, size=300_000):
    """Return a tar file of samples of two members, of which the second is small."""
    dice = random.Random(0)
    members = [
        one
        for n in range(count)
        for one in ((f"{n:03d}.bin", dice.randbytes(size)), (f"{n:03d}.txt", b"%d" % n))
    ]
    return make_tar(members)


@pytest.mark.parametrize("is_held", [True, False])
def test_a_run_that_continues_reads_no_byte_before_its_cursor(tmp_path, monkeypatch, is_held):
    if not is_held:
        monkeypatch.setattr(tars, "_MAX_HELD_BYTES", 0)
    store = make_memory()
    body = make_large()
    put(store, "a.tar", body)
    files = Recorder(open_files(store.spec))
    opened = Opened(files)
    rows = opened.read()
    assert show(rows) == read_by_webdataset(body)
    cursor = rows[29].next_cursor
    files.ranges.clear()
    assert opened.read(cursor) == rows[30:]
    assert min(start for start, _ in files.ranges) >= cursor
    assert sum(end - start for start, end in files.ranges) <= len(body) - cursor


def test_a_file_of_moderate_size_is_sent_once_and_large_members_are_not_read_for_headers(
    monkeypatch,
):
    store = make_memory()
    body = make_large(6, 2 << 20)
    put(store, "a.tar", body)
    files = Recorder(open_files(store.spec))
    rows = Opened(files).read()
    assert files.ranges == [(0, len(body))]
    monkeypatch.setattr(tars, "_MAX_HELD_BYTES", 0)
    files.ranges.clear()
    opened = Opened(files)
    first = next(opened.source.iterate_rows(opened.partitions[0].source_range, 0))
    assert first == rows[0]
    for_headers = [end - start for start, end in files.ranges if end - start < 1 << 20]
    assert len(for_headers) <= 14
    assert sum(for_headers) < 2 << 20


def test_a_damaged_or_foreign_index_is_made_again():
    store = make_memory()
    put(store, "a.tar", make_tar(MIXED))
    opened = Opened(open_files(store.spec))
    rows = opened.read()
    key = opened.partitions[0].source_range.index
    index = read(opened.dataset, key)
    for damaged in (b"", b"\xff" * 50, index[:-9], index.replace(b'"jpg"', b'"png"')):
        put(opened.dataset, key, damaged)
        assert opened.read() == rows
    other = make_tar([(name, data + b"!") for name, data in MIXED])
    put(store, "a.tar", other)
    again = Opened(open_files(store.spec), dataset=opened.dataset)
    assert show(again.read()) == read_by_tarfile(other)


def test_a_file_that_changed_stops_the_run_and_a_repair_reads_it():
    store = make_memory()
    put(store, "a.tar", make_tar(MIXED))
    opened = Opened(open_files(store.spec))
    put(store, "a.tar", make_tar(MIXED[::-1]))
    with pytest.raises(errors.ChangedError, match="has changed since the plan was made"):
        opened.read()
    put(store, "a.tar", make_tar(MIXED))
    repair = Opened(open_files(store.spec), dataset=make_memory(), any_version=True)
    assert len(repair.read()) == 3
    assert not exists(repair.dataset, repair.partitions[0].source_range.index)


def test_large_samples_are_read_while_they_are_encoded(tmp_path):
    body = make_tar([("a.bin", b"1" * (33 << 20)), ("a.txt", b"t"), ("a.e", b""), ("b.txt", b"u")])
    for store in (make_memory(), open_store(tmp_path.as_uri())):
        put(store, "a.tar", body)
        first, second = Opened(open_files(store.spec)).read()
        assert isinstance(first.fields["bin"], LargeFile)
        assert b"".join(first.fields["bin"].blocks()) == b"1" * (33 << 20)
        assert b"".join(first.fields["txt"].blocks()) == b"t"
        assert first.fields["e"] == b""
        assert show([second]) == [("b", {"txt": b"u"})]


def test_a_sample_that_is_larger_than_a_shard_costs_itself(tmp_path):
    huge = tarfile.TarInfo("a.bin")
    huge.size = (1 << 30) + 1
    with (tmp_path / "a.tar").open("wb") as file:
        file.write(huge.tobuf())
        file.seek(huge.size + -huge.size % 512, io.SEEK_CUR)
        file.write(make_tar([("b.txt", b"1")]))
    bad, good = Opened(open_files(open_store(tmp_path.as_uri()).spec)).read()
    assert bad.reason.startswith("a sample of 1073741825 bytes is larger than a shard can be")
    assert show([good]) == [("b", {"txt": b"1"})]


HOSTILE = """
import resource, sys
from pathlib import Path
from millrace.storage import open_store
from tests.integration.datasets.sources.test_tars import Opened, open_files

MIB = 1 << 20
opened = Opened(open_files(open_store(Path(sys.argv[1]).as_uri()).spec))
now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + 512 * MIB,) * 2)
try:
    print(sum(1 for _ in opened.source.iterate_rows(opened.partitions[0].source_range, 0)))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        pytest.param(
            "names",
            "whose names take more memory than a worker should use",
            marks=pytest.mark.soak,
        ),
        ("extensions", "the file is cut short"),
    ],
)
def test_hostile_files_take_little_memory(tmp_path, kind, said):
    """Long names fill the memory of an index; a chain of long names has no member at its end."""
    with (tmp_path / "a.tar").open("wb") as file:
        if kind == "names":
            for number in range(400):
                name = f"{number:0900000d}.txt"
                file.write(make_tar([(name, b"")], tar_format=tarfile.GNU_FORMAT)[:-10240])
        else:
            one = LONG[:1024]
            for _ in range(20):
                file.write(one * 1000)
            file.write(bytes(1024))
    ran = subprocess.run(
        [sys.executable, "-c", HOSTILE, str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[4],
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert said in ran.stdout


@pytest.mark.parametrize("kind", ["local", "rgw"])
def test_a_dataset_of_tar_files_is_made_by_workers(kind, request, tmp_path_factory):
    store = open_store(make_spec(kind, request))
    wanted = Counter()
    for number in range(3):
        members = [
            (f"{number}/{n}.{name}", f'"{number} {n} {name}"'.encode())
            for name in ("txt", "json")
            for n in range(200)
        ]
        put(store, f"{number}.tar", make_tar(members))
        wanted.update(data for _, data in members)
    report = shard_dataset(
        PipelineSettings.model_validate(
            {
                "dataset": "d",
                "source": {"kind": "webdataset", **store.spec.reveal_secrets()},
                "sharding": {"shard_bytes": 102_400},
                "store": {"url": tmp_path_factory.mktemp("out").as_uri()},
                "execution": {"workers": 1},
            }
        )
    )
    assert (report.samples, report.manifest.quarantined) == (600, 0)
    folder = Path(open_store(report.url).location.bucket)
    found = Counter()
    for shard in report.manifest.shards:
        for _, fields in read_by_webdataset((folder / shard.key[2:]).read_bytes()):
            assert len(fields) == 2
            found.update(fields.values())
    assert found == wanted


class StopError(Exception):
    """A run is stopped by its test."""


def test_a_stopped_run_and_a_repair_make_the_shards_of_a_whole_run(tmp_path):
    members = [(f"{n}.{name}", b"%d" % n * 200) for name in ("txt", "json") for n in range(300)]
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.tar").write_bytes(make_tar(members))

    def make_settings(name):
        return PipelineSettings.model_validate(
            {
                "dataset": name,
                "source": {"kind": "webdataset", "url": folder.as_uri()},
                "sharding": {"shard_bytes": 102_400},
                "store": {"url": (tmp_path / "out").as_uri()},
                "execution": {"workers": 0},
            }
        )

    def stop(event):
        if isinstance(event, ShardCommitted) and event.number == 1:
            raise StopError

    whole = shard_dataset(make_settings("whole"))
    with pytest.raises(StopError):
        shard_dataset(make_settings("stopped"), progress=stop)
    stopped = shard_dataset(make_settings("stopped"))
    digests = [shard.digest for shard in whole.manifest.shards]
    assert len(digests) > 4
    assert [shard.digest for shard in stopped.manifest.shards] == digests

    lost = tmp_path / "out" / stopped.manifest.shards[2].key
    body = lost.read_bytes()
    lost.unlink()
    (folder / "a.tar").write_bytes(make_tar(members))  # the same bytes, written again
    repair_dataset(make_settings("stopped"))
    assert lost.read_bytes() == body


def test_tar_files_of_a_web_server_are_read_by_ranges():
    body = make_large(10, 1000)
    site = Site(files={"/data/a.tar": body})
    with serve(site):
        chosen = {"url": f"{site.url}/data", "paths": ["a.tar"], "allow_private": True}
        spec = open_store(f"memory://{secrets.token_hex(8)}").spec.model_copy(
            update={"url": chosen["url"]}
        )
        files = open_files(spec, paths=chosen["paths"], allow_private=True)
        assert show(Opened(files).read()) == read_by_webdataset(body)
        site.has_ranges = False
        files = open_files(spec, paths=chosen["paths"], allow_private=True)
        with pytest.raises(errors.ConfigurationError, match="the server sends no parts of files"):
            Opened(files)
