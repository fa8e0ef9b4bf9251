"""The first samples that a plan shows are those of the run, and nothing is written."""

import gzip
import io
import json
import random
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from click.testing import CliRunner
from pyarrow import parquet

from millrace import PipelineSettings, errors, shard_dataset
from millrace.cli import main
from millrace.datasets import (
    PreviewedField,
    PreviewedRow,
    SamplePreview,
    preflight_dataset,
    preview,
    preview_samples,
)
from millrace.datasets.sources import parquet as parquet_source
from millrace.datasets.sources import tars
from millrace.datasets.sources.local_files import LocalFiles
from millrace.testing.byte_level import END
from tests.integration.datasets.test_bad_rows import encode_lines, make_settings
from tests.support.transforms import train_tokenizer
from tests.support.url_server import UrlHandler, serve_urls

TEXTS = [f"row {n} é " + "x" * (n % 90) for n in range(200)]
LINES = encode_lines(*({"text": text} for text in TEXTS))
TABLE = ("text,n\n" + "".join(f'"{text}",1\n' for text in TEXTS)).encode()
COLUMNS = {"columns": {"txt": "text"}}


def make_tar(members: dict[str, bytes]) -> bytes:
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return body.getvalue()


def make_parquet(texts: list[str]) -> bytes:
    body = io.BytesIO()
    parquet.write_table(pa.table({"text": texts}), body, row_group_size=20)
    return body.getvalue()


FILES = {f"{n:03}.{name}": text.encode() for n, text in enumerate(TEXTS) for name in ("txt", "cls")}
SOURCES: dict[str, tuple[dict[str, bytes], dict[str, Any]]] = {
    "jsonl": ({"a.jsonl": LINES}, COLUMNS),
    "jsonl.gz": ({"a.jsonl.gz": gzip.compress(LINES)}, COLUMNS),
    "jsonl.zst": ({"a.jsonl.zst": zstandard.compress(LINES)}, {}),
    "csv": ({"a.csv": TABLE, "b.csv": TABLE}, COLUMNS | {"kind": "csv"}),
    "csv.gz": ({"a.csv.gz": gzip.compress(TABLE)}, COLUMNS | {"kind": "csv"}),
    "parquet": ({"a.parquet": make_parquet(TEXTS)}, COLUMNS | {"kind": "parquet"}),
    "files": (FILES, {"kind": "files"}),
    "webdataset": ({"a.tar": make_tar(FILES)}, {"kind": "webdataset"}),
}


def list_tree(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return the size and the time of each file and folder."""
    found = {path: path.stat() for path in [folder, *folder.rglob("*")]}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}


def read_first(folder: Path, count: int) -> dict[str, dict[str, bytes]]:
    """Return the first samples of the shards of a run."""
    samples: dict[str, dict[str, bytes]] = {}
    for path in sorted((folder / "out").rglob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, name = member.name.partition(".")
                opened = tar.extractfile(member)
                assert opened is not None
                samples.setdefault(key, {})[name] = opened.read()
    return dict(list(samples.items())[:count])


def describe(row: PreviewedRow) -> tuple[str, dict[str, tuple[int, str | None]], str]:
    fields = {name: (field.size, field.beginning) for name, field in row.fields.items()}
    return row.name, fields, row.reason


def begin(text: bytes) -> str:
    shown = " ".join(text.decode().split())
    return shown if len(shown) <= 60 else f"{shown[:59]}…"


@pytest.fixture(autouse=True)
def _temporary_files_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


@pytest.mark.parametrize("name", SOURCES)
def test_the_first_samples_are_those_of_the_run_and_nothing_is_written(tmp_path, name):
    files, source = SOURCES[name]
    settings = make_settings(tmp_path, files, source, partition_bytes=2048, shard_bytes=20480)
    before = list_tree(tmp_path)
    found = preview_samples(settings, 4)
    assert list_tree(tmp_path) == before
    shard_dataset(settings)
    assert [describe(row) for row in found.rows] == [
        (key, {n: (len(data), begin(data)) for n, data in fields.items()}, "")
        for key, fields in read_first(tmp_path, 4).items()
    ]
    assert (found.partition, found.notes, found.refusal) == ("train-00000", (), "")
    before = list_tree(tmp_path)
    assert preview_samples(settings, 4) == found
    assert list_tree(tmp_path) == before


def test_a_row_that_makes_no_sample_is_shown_with_its_place_and_reason(tmp_path):
    rows = [
        b'{"t": "a", "n": 1}\n',
        b"no json\n",
        b'{"t": "b", "n": "x"}\n',
        b'{"t": "c", "n": 2}\n',
    ]
    settings = make_settings(
        tmp_path, {"a.jsonl": b"".join(rows)}, {"columns": {"txt": "t", "cls": "n"}},
        formats=["webdataset", "mds"],
    )  # fmt: skip
    found = preview_samples(settings)
    assert [describe(row) for row in found.rows] == [
        ("00000-0000000000000", {"cls": (1, "1"), "txt": (1, "a")}, ""),
        ("a.jsonl, byte 19", {}, "not valid JSON"),
        ("00000-0000000000027", {}, "the field 'cls' is no integer of 64 bits: 'x'"),
        ("00000-0000000000048", {"cls": (1, "2"), "txt": (1, "c")}, ""),
    ]
    report = shard_dataset(settings)
    assert (report.samples, report.manifest.quarantined) == (2, 2)


def test_a_source_of_bad_rows_is_not_read_to_its_end(tmp_path):
    settings = make_settings(tmp_path, {"a.jsonl": b"no json\n" * 200}, {})
    _, found = preflight_dataset(settings, samples=2)
    assert [row.name for row in found.preview.rows] == ["a.jsonl, byte 0", "a.jsonl, byte 8"]
    assert found.preview.notes == (
        "There is no sample in the first 100 rows of train-00000.",
        "98 more rows made no sample.",
    )
    assert found.refusals == ()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"\n \n", "The first partition, train-00000, has no rows."),
        (b"", "The source has no rows."),
    ],
)
def test_a_source_without_rows_is_a_sentence(tmp_path, body, said):
    found = preview_samples(make_settings(tmp_path, {"a.jsonl": body}, {}))
    assert (found.rows, found.notes, found.refusal) == ((), (said,), "")


CODE = """
from pathlib import Path

def note():
    with (Path(__file__).parent / "calls").open("a") as calls:
        calls.write("x")
    print("printed by a function")

def change(sample):
    note()
    number = int(sample["txt"].split()[1])
    if number % 4 == 0:
        return None
    if number % 4 == 1:
        raise ValueError("an odd number")
    return [{"txt": sample["txt"]}, {"txt": "second"}]

def drop(sample):
    note()
"""


def make_transformed(folder: Path, function: str) -> PipelineSettings:
    (folder / "change.py").write_text(CODE.replace("__file__", repr(str(folder / "change.py"))))
    step = {"kind": "function", "function": f"{folder}/change.py:{function}"}
    return make_settings(folder, {"a.jsonl": LINES}, COLUMNS, transforms=[step])


def test_samples_are_shown_as_transforms_make_them(tmp_path, capfd):
    found = preview_samples(make_transformed(tmp_path, "change"), 3)
    rows = [(row.fields["txt"].beginning if row.fields else row.reason) for row in found.rows]
    assert rows[0] == "change raised ValueError: an odd number"
    assert rows[1:] == [begin(TEXTS[2].encode()), "second", begin(TEXTS[3].encode())]
    assert found.notes == ("The transforms dropped 1 of 4 rows.",)
    assert (tmp_path / "calls").read_text() == "xxxx"
    assert "printed" not in capfd.readouterr().out


def test_a_transform_that_drops_all_is_called_with_the_first_rows_only(tmp_path):
    settings = make_transformed(tmp_path, "drop")
    found = preview_samples(settings)
    assert found.notes == (
        "There is no sample in the first 100 rows of train-00000.",
        "The transforms dropped 100 of 100 rows.",
    )
    assert (tmp_path / "calls").read_text() == "x" * 100


@pytest.mark.parametrize("pack", [64, 1 << 20])
def test_tokens_are_shown_by_their_number_and_first_ids(tmp_path, pack):
    (tmp_path / "tokenizer.json").write_bytes(train_tokenizer())
    step = {"kind": "tokenize", "tokenizer": f"{tmp_path}/tokenizer.json", "end_token": END}
    settings = make_settings(
        tmp_path, {"a.jsonl": LINES}, COLUMNS, transforms=[step | {"pack": pack}]
    )
    found = preview_samples(settings, 1)
    (row,) = found.rows
    field = row.fields["tokens"]
    count, _, ids = str(field.beginning).partition(" integers: ")
    assert int(count.replace(",", "")) * 2 == field.size
    if pack == 64:
        assert (count, found.notes) == ("64", ())
        shard_dataset(settings)
        ((key, fields),) = read_first(tmp_path, 1).items()
        wanted = [int.from_bytes(fields["tokens"][i : i + 2], "little") for i in range(0, 16, 2)]
        assert (row.name, ids) == (key, ", ".join(map(str, wanted)) + ", …")
    else:
        said = "The last sample ends with the first 100 rows. In a run, it goes on."
        assert found.notes == (said,)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the bytes of each block that is read are appended."""
    sizes: list[int] = []
    iterate = LocalFiles.iterate_blocks

    def count(*args: Any, **options: Any) -> Any:
        for data in iterate(*args, **options):
            sizes.append(len(data))
            yield data

    monkeypatch.setattr(LocalFiles, "iterate_blocks", count)
    return sizes


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_a_huge_row_is_not_read(tmp_path, monkeypatch, name):
    monkeypatch.setattr(preview, "_MAX_READ_BYTES", 8 << 20)
    first = b'{"text": "short"}\n' if name == "a.jsonl" else b"text\nshort\n"
    body = first + b'"' + b"x" * (40 << 20) + b'"\n'
    source = COLUMNS | {"kind": name.removeprefix("a.")}
    settings = make_settings(tmp_path, {name: body}, source)
    sizes = count_reads(monkeypatch)
    found = preview_samples(settings)
    assert sum(sizes) < 20 << 20
    assert [row.fields["txt"].beginning for row in found.rows] == ["short"]
    said = "The next row takes more than 8 MiB of files, and a plan reads no more."
    assert (found.notes, found.refusal) == ((said,), "")


def test_a_large_file_of_a_sample_is_not_read(tmp_path, monkeypatch):
    settings = make_settings(tmp_path, {"a.mp4": b"", "a.txt": b"text"}, {"kind": "files"})
    with (tmp_path / "source/a.mp4").open("wb") as file:
        file.truncate(100 << 20)
    sizes = count_reads(monkeypatch)
    (row,) = preview_samples(settings).rows
    assert describe(row) == ("a", {"mp4": (100 << 20, None), "txt": (4, None)}, "")
    assert sizes == []


def test_of_a_large_row_group_only_the_first_pages_are_read(tmp_path, monkeypatch):
    generator = random.Random(0)
    texts = [f"{n} {generator.randbytes(1000).hex()}" for n in range(3000)]
    body = io.BytesIO()
    parquet.write_table(
        pa.table({"text": texts}),
        body,
        use_dictionary=False,
        data_page_size=64 << 10,
        write_batch_size=16,
    )
    monkeypatch.setattr(parquet_source, "_MAX_HELD_PART_BYTES", 1 << 20)
    monkeypatch.setattr(parquet_source, "_BUFFER_SIZE", 256 << 10)
    source = COLUMNS | {"kind": "parquet"}
    settings = make_settings(tmp_path, {"a.parquet": body.getvalue()}, source)
    sizes = count_reads(monkeypatch)
    found = preview_samples(settings)
    assert [row.fields["txt"].size for row in found.rows] == [len(text) for text in texts[:3]]
    assert sum(sizes) < 2 << 20 < len(body.getvalue()) / 2


def test_of_a_tar_file_only_the_first_headers_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tars, "_FIRST_BYTES", 1 << 20)
    members = {f"{n:02}.{name}": b"x" * (400 << 10) for n in range(12) for name in "abc"}
    settings = make_settings(tmp_path, {"a.tar": make_tar(members)}, {"kind": "webdataset"})
    sizes = count_reads(monkeypatch)
    found = preview_samples(settings, 20)
    assert [(row.name, len(row.fields)) for row in found.rows] == [("00", 3)]
    assert sum(sizes) < 4 << 20


def test_a_file_that_cannot_be_read_is_a_refusal(tmp_path):
    body = gzip.compress(LINES)[:12] + b"damage" * 100
    settings = make_settings(tmp_path, {"a.jsonl.gz": body}, {})
    _, found = preflight_dataset(settings, samples=3)
    (refusal,) = found.refusals
    assert refusal.startswith("The first rows cannot be read: ")
    assert "a.jsonl.gz cannot be decompressed" in refusal
    with pytest.raises(errors.MillraceError, match="cannot be decompressed"):
        shard_dataset(settings)


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (errors.DeniedError("no right"), True),
        (errors.CorruptError("other bytes"), True),
        (RuntimeError("a fault of a library"), True),
        (errors.UnavailableError("no answer"), False),
        (errors.ChangedError("written again"), False),
    ],
)
def test_only_an_error_that_stays_is_a_refusal(tmp_path, monkeypatch, error, refused):
    settings = make_settings(tmp_path, {"a.jsonl": LINES}, {})

    def fail(*_: object, **__: object) -> Any:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(LocalFiles, "iterate_blocks", fail)
        _, found = preflight_dataset(settings, samples=3)
    said = f"The first rows cannot be read: {error}"
    assert found.refusals == (said,) * refused
    assert found.preview.notes == (said,) * (not refused)
    shard_dataset(settings)
    monkeypatch.setattr(LocalFiles, "iterate_blocks", fail)
    _, found = preflight_dataset(settings, samples=3)
    assert (found.state, found.refusals) == ("complete", ())


CUT = "é" * 239 + "a€" + "x" * 1000  # the 480th byte is within a character


@pytest.mark.parametrize(
    ("name", "data", "shown"),
    [
        ("txt", b"", ""),
        ("txt", b" a\n\x1b[31m\tred\xe2\x80\xae ", "a \ufffd[31m red\ufffd"),
        ("txt", "Köln".encode("latin-1"), r"K\xf6ln"),
        ("txt", CUT.encode(), "é" * 59 + "…"),
        ("txt", b" " * 1000 + b"late", "…"),
        ("html", "<p>é</p>".encode(), "<p>é</p>"),
        ("jpg", b"\xff\xd8\xff\xe0", None),
        ("bin", b"a\x00b", None),
        ("json", b'{"a":\n1}', '{"a": 1}'),
    ],
)
def test_a_field_is_shown_by_its_first_characters(name, data, shown):
    assert preview._describe_field(name, data, {}) == PreviewedField(len(data), shown)


def test_of_a_list_of_urls_as_many_are_requested_as_asked_for(tmp_path):
    def answer(handler: UrlHandler) -> None:
        if int(handler.path[1:]) >= 2:
            site.is_closing.wait()
        handler.send(b"\xff body")

    with serve_urls(answer) as site:
        lines = "".join(f"{site.url}/{n}\n" for n in range(50))
        source = {"kind": "urls", "allow_private": True, "urls": {"content_field": "jpg"}}
        settings = make_settings(tmp_path, {"a.txt": lines.encode()}, source)
        assert preflight_dataset(settings)[1].preview == SamplePreview()
        assert site.requests.total() == 0
        found = preview_samples(settings, 2)
        assert [row.fields["jpg"] for row in found.rows] == [PreviewedField(6, None)] * 2
        assert 2 <= site.requests.total() <= 3


def write_job(folder: Path, settings: PipelineSettings) -> str:
    path = folder / "job.yaml"
    source = {"url": settings.source.url, "columns": {"txt": "text"}}
    job = {"dataset": "d", "source": source, "store": {"url": settings.store.url}}
    path.write_text(json.dumps(job))
    return str(path)


def test_plan_prints_the_samples_and_no_control_characters(tmp_path):
    rows = [{"text": "\x1b[2Jgone\u202e"}, {"text": None}, {"text": "second"}]
    job = write_job(tmp_path, make_settings(tmp_path, {"a.jsonl": encode_lines(*rows)}, COLUMNS))
    done = CliRunner().invoke(main, ["plan", job])
    assert done.exit_code == 0, done.output
    assert done.output.endswith(
        "First rows of train-00000:\n"
        "  00000-0000000000000\n"
        "    txt (11 bytes): \ufffd[2Jgone\ufffd\n"
        "  a.jsonl, byte 32 makes no sample: the column 'text' is null\n"
        "  00000-0000000000047\n"
        "    txt (6 bytes): second\n"
    )
    done = CliRunner().invoke(main, ["plan", job, "--samples", "1", "--json"])
    assert json.loads(done.stdout)["samples"] == [
        {
            "key": "00000-0000000000000",
            "fields": {"txt": {"bytes": 11, "beginning": "\ufffd[2Jgone\ufffd"}},
        }
    ]
    assert "First rows" not in CliRunner().invoke(main, ["plan", job, "--samples", "0"]).output
    assert CliRunner().invoke(main, ["plan", job, "--samples", "21"]).exit_code == 2


def test_plan_requests_urls_only_if_it_is_told_to(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/a.txt").write_text("http://127.0.0.1:1/a\n")
    source = {"url": (tmp_path / "source").as_uri(), "kind": "urls"}
    job = {"dataset": "d", "source": source, "store": {"url": (tmp_path / "out").as_uri()}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    done = CliRunner().invoke(main, ["plan", str(tmp_path / "job.yaml")])
    assert done.exit_code == 0, done.output
    assert "The first samples are shown with --samples" in done.output
    done = CliRunner().invoke(main, ["plan", str(tmp_path / "job.yaml"), "--samples", "1"])
    assert "makes no sample: " in done.output
