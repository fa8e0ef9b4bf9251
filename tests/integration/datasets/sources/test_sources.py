"""Sources give every row once, however they are divided, from any cursor, or stop."""

import io
import json
import os
import random
import secrets
import tarfile
import tempfile

import pyarrow
import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from millrace import PipelineSettings, errors, shard_dataset
from millrace.datasets.sample import BadRow, Sample
from millrace.datasets.sources import (
    Division,
    SourceKind,
    SourceSettings,
    jsonl,
    open_files,
    open_source,
    partition_source,
)
from millrace.datasets.sources.files import Patterns, list_files
from millrace.datasets.sources.table import unpack_row
from millrace.keys.datasets import DatasetKeys
from millrace.schemas.dataset import FileRef
from millrace.storage import StoreSpec, create, delete, open_store, put
from tests.stores import make_spec
from tests.support.examples import scale_examples
from tests.support.url_server import serve_urls

KEYS = DatasetKeys("d")


def rows_of(
    source_settings, store, *, partition_bytes=1 << 20, partition_files=10_000, seed=0, holdout=0.0
):
    """Divide a source, and read all its partitions: split → rows."""
    dataset = open_store(f"memory://{secrets.token_hex(8)}")
    division = Division(partition_bytes, partition_files, seed, holdout)
    partitioned = partition_source(source_settings, open_files(store.spec), KEYS, division)
    for key, body in partitioned.objects.items():
        create(dataset, key, body)
    source = open_source(
        partitioned.record,
        open_files(store.spec),
        dataset,
        allow_private=source_settings.allow_private,
    )
    rows = {}
    for partition in partitioned.partitions:
        rows.setdefault(partition.split, []).extend(source.iterate_rows(partition.source_range, 0))
    return partitioned, source, rows


FILE_KINDS = [kind for kind in SourceKind if kind is not SourceKind.HUGGINGFACE]
"""The kinds whose files may lie anywhere."""


def encode_rows(kind, rows, url="http://127.0.0.1:1"):
    """Encode rows as one file of a source of this kind. A list of URLs has this URL only."""
    if kind is SourceKind.URLS:
        return f"{url}\n".encode() * len(rows)
    if kind is SourceKind.PARQUET:
        body = io.BytesIO()
        parquet.write_table(pyarrow.Table.from_pylist(rows), body)
        return body.getvalue()
    if kind is SourceKind.CSV:
        values = [",".join(map(str, row.values())) for row in rows]
        return "".join(f"{line}\n" for line in [",".join(rows[0]), *values]).encode()
    if kind is SourceKind.WEBDATASET:
        body = io.BytesIO()
        with tarfile.open(fileobj=body, mode="w") as tar:
            for number in range(len(rows)):
                tar.addfile(tarfile.TarInfo(f"{number}.txt"))
        return body.getvalue()
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


LINES = st.lists(
    st.one_of(
        st.dictionaries(st.text(max_size=5), st.text(max_size=30), max_size=3).map(json.dumps),
        st.sampled_from(["", "  ", "not json", "[1]", "null"]),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=scale_examples(150))
@given(
    files=st.lists(LINES, min_size=1, max_size=3),
    partition_bytes=st.integers(5, 400),
    ending=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
    holdout=st.sampled_from([0.0, 0.2, 0.5]),
)
def test_any_cut_gives_every_line_once(files, partition_bytes, ending, last, holdout):
    store = open_store(f"memory://{secrets.token_hex(8)}")
    wanted = []
    for i, lines in enumerate(files):
        body = ending.join(lines) + (ending if last else "")
        put(store, f"{i}.jsonl", body.encode())
        wanted += [line for line in lines if line.strip()]
    _, _, rows = rows_of(SourceSettings(), store, partition_bytes=partition_bytes, holdout=holdout)
    found = [row for part in rows.values() for row in part]
    samples = [row for row in found if isinstance(row, Sample)]
    bad = [row.data.decode() for row in found if isinstance(row, BadRow)]
    good = [line for line in wanted if line.startswith("{")]
    assert sorted(row.fields["json"].decode() for row in samples) == sorted(good)
    assert sorted(bad) == sorted(line for line in wanted if not line.startswith("{"))
    assert len({row.key for row in samples}) == len(samples)


@settings(deadline=None, max_examples=scale_examples(60))
@given(LINES, st.integers(5, 200))
def test_every_cursor_goes_on_exactly_after_its_row(lines, partition_bytes):
    store = open_store(f"memory://{secrets.token_hex(8)}")
    put(store, "a.jsonl", "\n".join(lines).encode())
    partitioned, source, _ = rows_of(SourceSettings(), store, partition_bytes=partition_bytes)
    for partition in partitioned.partitions:
        whole = list(source.iterate_rows(partition.source_range, 0))
        for i, row in enumerate(whole):
            after = source.iterate_rows(partition.source_range, row.next_cursor)
            assert list(after) == whole[i + 1 :]


def test_a_holdout_is_its_share_of_the_bytes():
    store = open_store(f"memory://{secrets.token_hex(8)}")
    lines = [json.dumps({"i": i, "text": "x" * 90}) for i in range(2000)]
    put(store, "a.jsonl", "\n".join(lines).encode())
    _, _, rows = rows_of(SourceSettings(), store, partition_bytes=50_000, holdout=0.1)
    assert len(rows["val"]) == pytest.approx(200, abs=2)
    assert len(rows["val"]) + len(rows["train"]) == 2000


def test_columns_become_fields_and_a_row_without_one_is_quarantined():
    store = open_store(f"memory://{secrets.token_hex(8)}")
    rows = [{"t": "é", "n": 1, "x": None}, {"t": "b"}, {"t": [1], "n": {"a": 1.5}}]
    put(store, "a.jsonl", "\n".join(map(json.dumps, rows)).encode())
    chosen = SourceSettings(columns={"txt": "t", "n.json": "n"})
    _, _, found = rows_of(chosen, store)
    first, second, third = found["train"]
    assert first.fields == {"txt": "é".encode(), "n.json": b"1"}
    assert third.fields == {"txt": b"[1]", "n.json": b'{"a":1.5}'}
    assert (second.reason, second.where) == ("no column 'n'", "a.jsonl, byte 35")


def test_numbers_of_a_column_keep_every_digit():
    store = open_store(f"memory://{secrets.token_hex(8)}")
    wide = 2**200 + 1
    lines = [
        f'{{"n": {wide}}}',
        f'{{"n": [1, {{"é": {-wide}, "f": 0.5}}]}}',
        f'{{"n": {2**64 - 1}}}',
    ]
    put(store, "a.jsonl", "\n".join(lines).encode())
    _, _, rows = rows_of(SourceSettings(columns={"n.json": "n"}), store)
    fields = [row.fields["n.json"].decode() for row in rows["train"]]
    assert fields == [f"{wide}", f'[1,{{"é":{-wide},"f":0.5}}]', f"{2**64 - 1}"]


@pytest.mark.parametrize(
    "columns",
    [{"a/b": "t"}, {"": "t"}, {"__bad__": "t"}, {"x.__url__": "t"}, {"TXT": "t", "txt": "u"}],
)
def test_fields_that_readers_could_not_read_back_are_refused(columns):
    with pytest.raises(ValueError, match=r"read the field|upper and lower"):
        SourceSettings(columns=columns)


def test_a_row_that_cannot_be_written_is_quarantined():
    store = open_store(f"memory://{secrets.token_hex(8)}")
    deep = '{"t": ' + "[" * 800 + "]" * 800 + "}"
    put(store, "a.jsonl", f'{deep}\n{{"t": 1}}\n'.encode())
    _, _, rows = rows_of(SourceSettings(columns={"txt": "t"}), store)
    assert [type(row).__name__ for row in rows["train"]] == ["BadRow", "Sample"]


def test_a_row_that_takes_many_times_its_size_of_memory_is_quarantined(monkeypatch):
    """A dataset is anybody's: 256 MiB of small objects would take 9 GiB."""
    monkeypatch.setattr(jsonl, "_MAX_CONTAINERS", 100_000)
    store = open_store(f"memory://{secrets.token_hex(8)}")
    many = json.dumps({"t": "x", "a": [{"a": []}] * 110_000})
    few = json.dumps({"t": "y" * (2 << 20), "a": [{"a": []}] * 40_000})
    put(store, "a.jsonl", f'{many}\n{few}\n{{"t": "z"}}\n'.encode())
    given = SourceSettings(kind=SourceKind.JSONL, columns={"txt": "t"})
    _, _, rows = rows_of(given, store, partition_bytes=1 << 30)
    first, second, third = rows["train"]
    assert isinstance(first, BadRow)
    assert first.reason == "more objects and arrays than memory holds"
    assert [len(one.fields["txt"]) for one in (second, third)] == [2 << 20, 1]


def test_the_empty_objects_that_show_a_folder_are_no_samples(request):
    store = open_store(make_spec("rgw", request))
    put(store, "imgs/a.txt", b"1")
    client = request.getfixturevalue("rgw").make_client(request.getfixturevalue("rgw").full)
    for marker in ("imgs/", "nothing/below/", "/"):
        client.put_object(Bucket=store.location.bucket, Key=f"below/here/{marker}", Body=b"")
    partitioned, _, rows = rows_of(SourceSettings(kind=SourceKind.FILES), store)
    assert [row.key for row in rows["train"]] == ["imgs/a"]
    assert (partitioned.record.files, partitioned.record.markers) == (1, 3)


def test_a_marker_whose_slash_the_store_drops_is_no_sample():
    store = open_store(f"memory://{secrets.token_hex(8)}")
    for key, data in {"imgs": b"", "imgs!": b"", "imgs/a.txt": b"1", "none": b""}.items():
        put(store, key, data)
    partitioned, _, rows = rows_of(SourceSettings(kind=SourceKind.FILES), store)
    assert sorted(row.key for row in rows["train"]) == ["imgs!", "imgs/a", "none"]
    assert partitioned.record.markers == 1


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # for the limits of hosts
    with serve_urls(lambda handler: handler.send(b"body")) as site:
        yield site


BAD_KEYS = ["a//b.txt", "/lead.txt", "c\x01d.txt", "x/../y.txt", "line\nbreak.txt"]


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_a_key_that_no_client_takes_costs_itself(kind, request, rgw, site):
    store = open_store(make_spec("rgw", request))
    body = encode_rows(kind, [{"a": 1}], site.url)
    for key in BAD_KEYS:
        rgw.make_client(rgw.full).put_object(
            Bucket=store.location.bucket, Key=f"below/here/{key}", Body=body
        )
    put(store, "good.txt", body)
    chosen = SourceSettings(kind=kind, include=["*"], allow_private=True)
    _, _, rows = rows_of(chosen, store)
    bad = {row.where: row.reason for row in rows["train"] if isinstance(row, BadRow)}
    assert len([row for row in rows["train"] if isinstance(row, Sample)]) == 1
    assert set(bad) == {
        "a//b.txt", "/lead.txt", "c\\x01d.txt", "x/../y.txt", "line\\x0abreak.txt"
    }  # fmt: skip
    assert bad["a//b.txt"].startswith("its key has an empty or a relative segment")
    assert bad["c\\x01d.txt"] == "its name has control characters"


def test_a_local_name_that_is_no_text_costs_itself(tmp_path):
    for name in (b"caf\xe9.txt", b"tab\t.txt", b"good.txt"):
        (tmp_path / os.fsdecode(name)).write_bytes(b"1")
    store = open_store(tmp_path.as_uri())
    _, _, rows = rows_of(SourceSettings(kind=SourceKind.FILES), store)
    bad = {row.where: row.reason for row in rows["train"] if isinstance(row, BadRow)}
    assert bad == {
        "caf\\xe9.txt": "its name is not UTF-8",
        "tab\\x09.txt": "its name has control characters",
    }


NAMES = [
    "Screenshot 2024-01-01 at 9.41.00\u202fAM",  # macOS writes a narrow no-break space
    "\u5199\u771f\u3000\u4e00",  # an ideographic space
    "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",  # a zero-width non-joiner
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",  # a family, joined
    "\u2028line\u2029", "\ue000private", "soft\u00adhyphen", "\ufeffmark", "\U000e0067tag",
]  # fmt: skip


# webdataset leaves local files for the garbage collector to close.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["local", "rgw"])
def test_names_that_people_have_come_back_from_webdataset(kind, request, tmp_path_factory):
    store = open_store(make_spec(kind, request))
    for number, name in enumerate(NAMES):
        put(store, f"in/{name}/{name}.png", str(number).encode())
    report = shard_dataset(
        PipelineSettings.model_validate(
            {
                "dataset": "d",
                "source": {"kind": "files", **store.spec.reveal_secrets()},
                "store": {"url": tmp_path_factory.mktemp("out").as_uri()},
                "execution": {"workers": 0},
            }
        )
    )
    assert report.manifest.quarantined == 0
    out = open_store(report.url)
    shards = [f"{out.location.bucket}/{s.key[2:]}" for s in report.manifest.shards]
    read_back = {}
    for sample in webdataset.WebDataset(shards, shardshuffle=False):
        fields = [name for name in sample if not name.startswith("__")]
        assert len(fields) == 1
        read_back[f"{sample['__key__']}.{fields[0]}"] = sample[fields[0]]
    # Fields are in lower case, from the first dot on.
    wanted = {}
    for number, name in enumerate(NAMES):
        head, dot, tail = f"{name}.png".partition(".")
        wanted[f"in/{name}/{head}{dot}{tail.lower()}"] = str(number).encode()
    assert read_back == wanted


def test_many_small_files_make_several_partitions():
    store = open_store(f"memory://{secrets.token_hex(8)}")
    for i in range(20):
        put(store, f"{i:02d}.txt", b"1")
        put(store, f"{i:02d}.json", b"{}")
    partitioned, _, rows = rows_of(SourceSettings(kind=SourceKind.FILES), store, partition_files=10)
    assert [partition.source_range.samples for partition in partitioned.partitions] == [5] * 4
    assert len(rows["train"]) == 20


def test_linked_folders_are_followed_once(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_text("1")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "link").symlink_to(tmp_path / "real")
    (tmp_path / "source" / "link" / "round").symlink_to(tmp_path / "source" / "link")
    store = open_store((tmp_path / "source").as_uri())
    _, _, rows = rows_of(SourceSettings(kind=SourceKind.FILES), store)
    assert [row.key for row in rows["train"]] == ["link/a"]


@pytest.mark.parametrize(
    ("include", "exclude", "paths"),
    [
        (["*"], [], ["other/a.txt", "v1/sub/b.txt"]),
        (["*"], ["latest/*"], ["other/a.txt", "v1/sub/b.txt"]),
        (["*"], ["v1/*"], ["latest/sub/b.txt", "other/a.txt"]),
        (["v1/*"], [], ["v1/sub/b.txt"]),
        (["latest/*"], [], ["latest/sub/b.txt"]),
        (["latest/*", "v1/*"], [], ["v1/sub/b.txt"]),
        (["newest/*"], [], ["newest/sub/b.txt"]),
    ],
)
def test_a_folder_with_several_paths_is_read_by_the_first_that_matches(
    tmp_path, include, exclude, paths
):
    for path in ("other/a.txt", "v1/sub/b.txt"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("1")
    for link in ("newest", "latest"):
        (tmp_path / link).symlink_to("v1")
    files = open_files(StoreSpec(url=tmp_path.as_uri()))
    assert [file.path for file in _list(files, include, exclude)] == paths


@pytest.mark.parametrize(
    ("exclude", "paths"),
    [([], ["a/x.txt"]), (["a/*"], ["b/x.txt"]), (["a/*", "b/*"], ["c/again/x.txt"])],
)
def test_a_folder_elsewhere_is_read_by_the_first_link_that_matches(tmp_path, exclude, paths):
    elsewhere, source = tmp_path / "elsewhere", tmp_path / "source"
    for folder in (elsewhere, source / "c"):
        folder.mkdir(parents=True)
    (elsewhere / "x.txt").write_text("1")
    (elsewhere / "round").symlink_to(elsewhere)
    for link in ("c/again", "b", "a"):
        (source / link).symlink_to(elsewhere)
    files = open_files(StoreSpec(url=source.as_uri()))
    assert [file.path for file in _list(files, ["*"], exclude)] == paths


def test_folders_that_all_link_to_each_other_are_read_once(tmp_path):
    names = [f"{number:02d}" for number in range(30)]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("1")
    for name in names:
        for other in names:
            (tmp_path / name / f"to-{other}").symlink_to(tmp_path / other)
    files = open_files(StoreSpec(url=tmp_path.as_uri()))
    assert [file.path for file in _list(files, ["*"], [])] == [f"{name}/a.txt" for name in names]


def _list(files, include, exclude):
    return [unpack_row(row) for row in list_files(files, Patterns(include, exclude)).rows]


@pytest.mark.parametrize(("link", "target"), [("latest", "."), ("sub/up", "..")])
def test_a_link_to_the_source_itself_is_not_followed(tmp_path, link, target):
    (tmp_path / "source" / "sub").mkdir(parents=True)
    (tmp_path / "source" / "a.txt").write_text("1")
    (tmp_path / "source" / link).symlink_to(target)
    store = open_store((tmp_path / "source").as_uri())
    _, _, rows = rows_of(SourceSettings(kind=SourceKind.FILES), store)
    assert [row.key for row in rows["train"]] == ["a"]


@pytest.mark.parametrize("target", ["missing", "loop.txt", "a.txt/below"])
def test_a_link_that_leads_nowhere_is_left_out(tmp_path, target):
    (tmp_path / "a.txt").write_text("1")
    (tmp_path / "loop.txt").symlink_to(target)
    _, _, rows = rows_of(SourceSettings(kind=SourceKind.FILES), open_store(tmp_path.as_uri()))
    assert [row.key for row in rows["train"]] == ["a"]


def test_a_link_that_cannot_be_followed_is_an_error_with_a_sentence(tmp_path):
    (tmp_path / "a.txt").write_text("1")
    (tmp_path / "b.txt").symlink_to("x" * 300)
    with pytest.raises(
        errors.MillraceError, match=r"b\.txt cannot be listed \(File name too long\)"
    ):
        rows_of(SourceSettings(kind=SourceKind.FILES), open_store(tmp_path.as_uri()))


@pytest.mark.parametrize("kind", ["whole", "blocks"])
@pytest.mark.parametrize(
    ("target", "error", "said"),
    [
        ("folder", errors.MillraceError, r"a\.txt cannot be read \(Is a directory\)"),
        ("a.txt", errors.ChangedError, r"a\.txt has changed.*it is gone"),
        ("b.txt/below", errors.ChangedError, r"a\.txt has changed.*it is gone"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_with_a_sentence(
    tmp_path, kind, target, error, said
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "b.txt").write_text("1")
    (tmp_path / "a.txt").symlink_to(target)
    files = open_files(StoreSpec(url=tmp_path.as_uri()))
    file = FileRef(path="a.txt", size=1, etag="x")
    with pytest.raises(error, match=said):
        files.read(file) if kind == "whole" else list(files.iterate_blocks(file, 0, 1))


def test_a_byte_order_mark_is_no_part_of_the_first_row():
    store = open_store(f"memory://{secrets.token_hex(8)}")
    put(store, "a.jsonl", b'\xef\xbb\xbf{"a":1}\n{"a":2}')
    _, _, rows = rows_of(SourceSettings(), store)
    assert [row.fields["json"] for row in rows["train"]] == [b'{"a":1}', b'{"a":2}']


def test_nothing_that_matches_is_said(tmp_path):
    store = open_store(tmp_path.as_uri())
    with pytest.raises(errors.NotFoundError, match="include patterns"):
        rows_of(SourceSettings(include=["*.jsonl"]), store)


FILES = {
    "a/cat.jpg": b"jpg",
    "a/cat.json": b"{}",
    "a/cat.seg.png": b"png",
    "b/dog.JPG": b"JPG",
    "README": b"read me",
    "__main__.py": b"main",
    "__a.b__": b"odd",
    "__x__/in.py": b"skipped by readers unless its name is kept from them",
}


@pytest.mark.parametrize("kind", ["local", "rgw"])
def test_files_that_share_their_name_are_one_sample(kind, request):
    store = open_store(make_spec(kind, request))
    for path, data in FILES.items():
        put(store, path, data)
    put(store, ".hidden", b"no key")
    put(store, "y.__url__", b"readers fail at it")
    put(store, "b/two.txt", b"1")
    put(store, "b/two.TXT", b"2")
    _, _, rows = rows_of(SourceSettings(kind=SourceKind.FILES), store, partition_bytes=20)
    samples = {row.key: row.fields for row in rows["train"] if isinstance(row, Sample)}
    assert samples == {
        "a/cat": {"jpg": b"jpg", "json": b"{}", "seg.png": b"png"},
        "b/dog": {"jpg": b"JPG"},
        "README": {"bin": b"read me"},
        "__main__": {"py": b"main"},
        "./__a": {"b__": b"odd"},
        "./__x__/in": {"py": FILES["__x__/in.py"]},
    }
    bad = {row.where: row.reason for row in rows["train"] if isinstance(row, BadRow)}
    assert set(bad) == {".hidden", "y.__url__", "b/two.TXT, b/two.txt"}


def test_a_seed_shuffles_files_the_same_way_every_time(tmp_path):
    store = open_store(tmp_path.as_uri())
    for i in range(50):
        put(store, f"{i:03d}.txt", bytes(i))
    chosen = SourceSettings(kind=SourceKind.FILES)
    orders = [
        [row.key for row in rows_of(chosen, store, partition_bytes=100, seed=seed)[2]["train"]]
        for seed in (1, 1, 2, None)
    ]
    assert orders[0] == orders[1] != orders[2]
    assert orders[3] == sorted(orders[0])


@pytest.mark.parametrize("kind", ["local", "rgw"])
@pytest.mark.parametrize("source_kind", FILE_KINDS)
@pytest.mark.parametrize("change", ["rewritten", "longer", "gone"])
def test_a_source_that_changed_stops_the_run(kind, source_kind, change, request, tmp_path):
    store = open_store(make_spec(kind, request))
    rng = random.Random(0)
    rows = [{"a": rng.random()}] * 3
    body = encode_rows(source_kind, rows)
    put(store, "a.file", body)
    chosen = SourceSettings(kind=source_kind, include=["*"])
    division = Division(partition_bytes=1 << 20, partition_files=10_000, seed=0, holdout=0.0)
    partitioned = partition_source(chosen, open_files(store.spec), KEYS, division)
    dataset = open_store(f"memory://{secrets.token_hex(8)}")
    for key, body in partitioned.objects.items():
        create(dataset, key, body)
    match change:
        case "rewritten":
            put(store, "a.file", body[::-1])
            if kind == "local":  # a clock that did not move would be the only thing in its way
                os.utime(tmp_path / "a.file", ns=(1, 1))
        case "longer":
            put(store, "a.file", encode_rows(source_kind, [*rows, {"a": 2.0}]) + b"\n")
        case "gone":
            assert delete(store, ["a.file"]) == []
    source = open_source(partitioned.record, open_files(store.spec), dataset)
    with pytest.raises(errors.ChangedError, match="has changed since the plan was made"):
        list(source.iterate_rows(partitioned.partitions[0].source_range, 0))
