"""Index of the pages: the same layouts as in the files, and stale or damaged ones are noticed."""

import json
import logging
import random
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace import errors
from millrace.datasets.loader import PageLoader
from millrace.datasets.loader.column import ColumnLayout, compute_checksums, read_layout
from millrace.datasets.loader.layout_encoding import decode_layout, encode_layout
from millrace.datasets.loader.page_index import (
    compress_row_groups,
    expand_row_groups,
    index_pages,
)
from millrace.datasets.sources.files import Patterns
from millrace.datasets.sources.local_files import LocalFiles
from millrace.datasets.sources.table import iterate_files
from millrace.keys.datasets import (
    DatasetKeys,
    is_page_index,
    make_page_index_key,
    make_page_layouts_key,
    parse_page_index,
)
from millrace.keys.kinds import ObjectKind, classify_key

ROWS = (1250, 1, 300)


def write(path: Path, rows: int, *, page_rows: int = 100, seed: int = 1, **options: Any) -> None:
    rng = random.Random(seed)
    texts = [rng.randbytes(rng.randrange(60)).hex() for _ in range(rows)]
    table = pa.table(
        {"text": texts, "struct": [{"a": row, "b": "x"} for row in range(rows)], "n": range(rows)}
    )
    defaults = {"write_page_index": True, "use_dictionary": False, "row_group_size": 500}
    cast("Any", pq).write_table(
        table, path, max_rows_per_page=page_rows, write_batch_size=page_rows,
        write_page_checksum=True, **(defaults | options),
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    for number, rows in enumerate(ROWS):
        write(tmp_path / f"{'deep/' * (number == 2)}{number}.parquet", rows, seed=number)
    return tmp_path


def read_all(loader: PageLoader) -> list[list[Any]]:
    pages = [loader.table[number] for number in range(len(loader))]
    return [values.to_pylist() for values in loader.read(pages)]


def describe(layout: ColumnLayout) -> Any:
    return (
        layout.schema,
        layout.starts.tolist(),
        layout.size,
        [
            [
                (
                    part.metadata,
                    part.bounds.tolist(),
                    None if part.first_rows is None else part.first_rows.tolist(),
                    None if part.checksums is None else part.checksums.tolist(),
                )
                for part in group
            ]
            for group in layout.groups
        ],
    )


@pytest.mark.parametrize("column", ["text", "struct", "n"])
@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("dictionary", [True, False])
def test_a_layout_is_decoded_as_it_was_encoded(
    column: str, index: bool, dictionary: bool, tmp_path: Path
) -> None:
    write(tmp_path / "a.parquet", 1234, write_page_index=index, use_dictionary=dictionary)
    ((_, file, _),) = iterate_files(LocalFiles(tmp_path).collect(Patterns()), local=True)
    files = LocalFiles(tmp_path)
    layout = read_layout(files, file, column)
    for one in (layout, compute_checksums(files, file, layout)):
        assert describe(decode_layout(encode_layout(one))) == describe(one)


def test_a_layout_takes_few_bytes_a_page(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 20_000, page_rows=10)
    files = LocalFiles(tmp_path)
    ((_, file, _),) = iterate_files(files.collect(Patterns()), local=True)
    layout = read_layout(files, file, "text")
    assert len(encode_layout(layout)) < 3 * 2000
    assert len(encode_layout(compute_checksums(files, file, layout))) < 7 * 2000


@given(data=st.binary(max_size=200))
def test_junk_is_no_layout(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"layout|zstd|frame"):
        decode_layout(data)


def test_no_flipped_bit_of_a_layout_goes_unnoticed(folder: Path) -> None:
    files = LocalFiles(folder)
    _, file, _ = next(iter(iterate_files(files.collect(Patterns(["0.parquet"])), local=True)))
    data, rng = encode_layout(read_layout(files, file, "text")), random.Random(1)
    good = describe(decode_layout(data))
    refused = 0
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << rng.randrange(8)
        try:
            assert describe(decode_layout(bytes(changed))) == good
        except ValueError:
            refused += 1
    assert refused >= len(data) - 8


@given(rows=st.lists(st.integers(0, 5)))
def test_runs_of_row_groups_are_expanded_again(rows: list[int]) -> None:
    assert expand_row_groups(compress_row_groups(rows)) == rows


def test_keys_of_indexes_are_those_of_the_dataset() -> None:
    """So garbage collection keeps them, and a deletion of the dataset deletes them."""
    prefix = DatasetKeys("a/b").make_shards_prefix("pages", "train")
    for column in ("text", "a column", "x" * 70, "é"):
        digest = f"blake3:{'0' * 64}"
        for key in (make_page_index_key(column, 3), make_page_layouts_key(column, digest)):
            assert is_page_index(key)
            found = classify_key(prefix + key)
            assert found is not None
            assert (found.kind, found.scope) == (ObjectKind.DATASET, "a/b")
            assert DatasetKeys("a/b").is_index(prefix + key)
        assert parse_page_index(column, make_page_index_key(column, 3)) == 3
    assert parse_page_index("text", make_page_index_key("other", 3)) is None
    assert not is_page_index("_pages/text.json")


def test_a_loader_with_an_index_reads_no_end_of_a_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read_all(PageLoader(str(folder), cache_bytes=1 << 20))
    report = index_pages(str(folder))
    assert (report.is_new, report.number, report.files, report.rows) == (True, 1, 3, sum(ROWS))
    assert len(report.missing) == 3

    def refuse(*given: Any) -> Any:
        raise AssertionError(given)

    monkeypatch.setattr("millrace.datasets.loader.pages.read_layout", refuse)
    for limit in (1 << 20, 1):
        assert read_all(PageLoader(str(folder), cache_bytes=limit)) == expected
    monkeypatch.setattr("millrace.datasets.loader.page_index._WHOLE_BYTES", 0)
    assert read_all(PageLoader(str(folder), cache_bytes=1 << 20)) == expected


def test_stale_entries_are_noticed_named_and_not_used(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index_pages(str(folder))
    write(folder / "0.parquet", 777, seed=9)
    write(folder / "3.parquet", 20)
    (folder / "1.parquet").unlink()
    with caplog.at_level(logging.WARNING):
        loader = PageLoader(str(folder))
    assert loader.stale == ("0.parquet",)
    assert "stale: 0.parquet was written since" in caplog.text
    assert sum(map(len, read_all(loader))) == 777 + 20 + ROWS[2]
    checked = index_pages(str(folder), is_check=True)
    assert (checked.is_current, checked.is_new) == (False, False)
    assert (checked.stale, checked.missing, checked.gone) == (
        ("0.parquet",), ("3.parquet",), ("1.parquet",),
    )  # fmt: skip
    assert not index_pages(str(folder), is_check=True).is_current
    again = index_pages(str(folder))
    assert (again.is_new, again.number, again.rows) == (True, 2, 777 + 20 + ROWS[2])
    current = index_pages(str(folder))
    assert (current.is_new, current.is_current, current.number) == (False, True, 2)
    caplog.clear()
    assert PageLoader(str(folder)).stale == ()
    assert not caplog.records


def test_only_changed_files_are_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index_pages(str(folder))
    write(folder / "1.parquet", 5, seed=9)
    read: list[str] = []

    def count(files: Any, file: Any, column: str) -> Any:
        read.append(file.path)
        return read_layout(files, file, column)

    monkeypatch.setattr("millrace.datasets.loader.page_index.read_layout", count)
    index_pages(str(folder))
    assert read == ["1.parquet"]
    assert sum(map(len, read_all(PageLoader(str(folder))))) == ROWS[0] + 5 + ROWS[2]


def test_checksums_are_made_once_and_kept_as_long_as_a_file_does_not_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def count(files: Any, file: Any, layout: ColumnLayout) -> ColumnLayout:
        read.append(file.path)
        return compute_checksums(files, file, layout)

    monkeypatch.setattr("millrace.datasets.loader.page_index.compute_checksums", count)
    assert index_pages(str(folder)).checked == 0
    checked = index_pages(str(folder), includes_checksums=True, is_check=True)
    assert (checked.is_current, len(checked.unchecked)) == (False, 3)
    made = index_pages(str(folder), include=["0*"], includes_checksums=True)
    assert (made.is_new, made.checked, read) == (True, 1, ["0.parquet"])
    made = index_pages(str(folder), includes_checksums=True)
    assert (made.is_new, made.checked, len(made.unchecked), len(read)) == (True, 3, 2, 3)
    assert not index_pages(str(folder), includes_checksums=True).is_new
    assert index_pages(str(folder)).checked == 3
    write(folder / "0.parquet", 300, seed=9)
    made = index_pages(str(folder))
    assert (made.is_new, made.checked, len(read)) == (True, 2, 3)
    assert index_pages(str(folder), includes_checksums=True).checked == 3
    assert read[3:] == ["0.parquet"]


def test_an_index_of_another_version_is_left_out_and_made_again(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = read_all(PageLoader(str(folder), cache_bytes=1 << 20))
    index_pages(str(folder))
    (path,) = (folder / "_pages").glob("*.json")
    path.write_bytes(path.read_bytes().replace(b'"version":2', b'"version":1'))
    with caplog.at_level(logging.WARNING):
        assert read_all(PageLoader(str(folder), cache_bytes=1 << 20)) == expected
    assert "page-index of version 1. This Millrace reads version 2" in caplog.text
    assert f"Make the index again: millrace dataset index {folder.as_uri()}" in caplog.text
    assert index_pages(str(folder)).number == 2


@pytest.mark.parametrize("damage", ["record", "layouts", "cut"])
def test_a_damaged_index_is_left_out_with_a_warning(
    damage: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = read_all(PageLoader(str(folder), cache_bytes=1 << 20))
    index_pages(str(folder))
    (path,) = (folder / "_pages").glob("*.json" if damage == "record" else "*.bin")
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 0xFF
    path.write_bytes(body[: len(body) // 2] if damage == "cut" else body)
    with caplog.at_level(logging.WARNING):
        assert read_all(PageLoader(str(folder), cache_bytes=1 << 20)) == expected
    assert "index of the pages is not used" in caplog.text
    assert not index_pages(str(folder), is_check=True).is_current
    assert index_pages(str(folder)).number == 2
    caplog.clear()
    assert read_all(PageLoader(str(folder), cache_bytes=1 << 20)) == expected
    assert not caplog.records


@pytest.mark.parametrize("column", ["text", "struct"])
@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("index", [True, False])
def test_files_and_row_groups_without_rows_are_passed_over(
    index: bool, dictionary: bool, column: str, tmp_path: Path
) -> None:
    options = {"write_page_index": index, "use_dictionary": dictionary}
    write(tmp_path / "a.parquet", 0, **options)
    write(tmp_path / "b.parquet", 250, **options)
    table = cast("Any", pq).read_table(tmp_path / "b.parquet")
    with cast("Any", pq).ParquetWriter(tmp_path / "c.parquet", table.schema, **options) as writer:
        for start, rows in ((0, 0), (0, 120), (120, 0), (120, 130), (250, 0)):
            writer.write_table(table.slice(start, rows))
    loader = PageLoader(tmp_path.as_uri(), column)
    pages = read_all(loader)
    assert list(chain.from_iterable(pages)) == table.column(column).to_pylist() * 2
    report = index_pages(tmp_path.as_uri(), column)
    assert (report.files, report.rows) == (3, 500)
    assert read_all(PageLoader(tmp_path.as_uri(), column)) == pages
    with pytest.raises(errors.ConfigurationError, match="have no rows"):
        PageLoader(tmp_path.as_uri(), column, include=("a.parquet",))


def test_files_whose_names_cannot_be_read_are_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pages = read_all(PageLoader(str(folder)))
    for name in ("b\tc.parquet", "b\nd.parquet"):
        write(folder / name, 10)
    with caplog.at_level(logging.WARNING):
        assert read_all(PageLoader(str(folder))) == pages
        assert index_pages(str(folder)).files == len(ROWS)
    said = r"2 files cannot be read by name, such as file:.*b\\x09c\.parquet: .*control characters"
    assert [bool(re.search(said, one.message)) for one in caplog.records] == [True, True]
    for act in (PageLoader, index_pages):
        with pytest.raises(errors.NotFoundError, match=rf"{said}.*Rename"):
            act(str(folder), include=["b*"])


def test_indexes_that_are_made_at_once_are_one(folder: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        reports = list(pool.map(lambda _: index_pages(str(folder)), range(6)))
    assert {report.number for report in reports} == {1}
    assert sorted(path.name for path in (folder / "_pages").iterdir()) == [
        "text-000001.json",
        next((folder / "_pages").glob("*.bin")).name,
    ]


def test_an_index_of_other_files_keeps_the_entries_of_the_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read_all(PageLoader(str(folder), cache_bytes=1 << 20))
    for pattern, rows in (("0*", ROWS[0]), ("1*", ROWS[1]), ("deep/*", ROWS[2])):
        report = index_pages(str(folder), include=[pattern])
        assert (report.is_new, report.files, report.rows, report.gone) == (True, 1, rows, ())
    monkeypatch.setattr("millrace.datasets.loader.pages.read_layout", None)
    assert read_all(PageLoader(str(folder), cache_bytes=1 << 20)) == expected


def test_each_column_has_its_own_index(folder: Path) -> None:
    for column in ("text", "n"):
        assert index_pages(str(folder), column).number == 1
    assert [row for page in read_all(PageLoader(str(folder), "n")) for row in page] == [
        row for rows in ROWS for row in range(rows)
    ]


@pytest.mark.parametrize("beginning", ["", "bucket/", "other/deep/"])
def test_files_that_templars_index_does_not_name_are_left_out(
    beginning: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = ("0.parquet", "1.parquet", "deep/2.parquet")
    expected = read_all(PageLoader(str(folder)))
    for path in ("00.parquet", "deep/0.parquet"):
        write(folder / path, 300)
    assert len(PageLoader(str(folder)).paths) == 5
    shards = [
        {"path": f"{beginning}{path}", "num_rows": rows}
        for path, rows in zip(paths, ROWS, strict=True)
    ]
    sizes = {"a": {"shards": shards[:1]}, "b": {"shards": shards[1:]}, "c": None}
    (folder / "_shard_sizes.json").write_text(json.dumps(sizes))
    index_pages(str(folder))  # of all files; it is not followed where Templar's index is there
    said = r"_shard_sizes\.json does not name 2 files, such as 00\.parquet.*Delete them"
    for _ in range(2):
        caplog.clear()
        loader = PageLoader(str(folder))
        assert loader.paths == list(paths)
        assert read_all(loader) == expected
        (record,) = caplog.records
        assert re.search(said, record.message)
        report = index_pages(str(folder))  # also of the second loader
        assert (report.files, report.rows, report.is_current) == (3, sum(ROWS), True)
    for path in ("00.parquet", "deep/0.parquet"):
        (folder / path).unlink()
    caplog.clear()
    assert read_all(PageLoader(str(folder))) == expected
    write(folder / "00.parquet", 300)
    assert not caplog.records
    assert PageLoader(str(folder), include=["00*"]).paths == ["00.parquet"]
    (folder / "1.parquet").unlink()  # then it is not the index of these files
    caplog.clear()
    assert PageLoader(str(folder)).paths == ["0.parquet", "00.parquet", "deep/2.parquet"]
    assert "names 1.parquet, which is not there, so all files are read" in caplog.text
    (folder / "_shard_sizes.json").write_text("{")
    with pytest.raises(errors.CorruptError, match=r"_shard_sizes\.json is no index"):
        PageLoader(str(folder))


def test_an_index_says_where_templars_has_other_rows(folder: Path) -> None:
    paths = ("0.parquet", "1.parquet", "deep/2.parquet")
    shards = [
        {"path": f"bucket/{path}", "num_rows": rows + (path == "1.parquet")}
        for path, rows in zip(paths, ROWS, strict=True)
    ]
    sizes = {"a": {"split": "train", "total_rows": 1, "shards": shards}}
    (folder / "_shard_sizes.json").write_text(json.dumps(sizes))
    (folder / "_metadata.yaml").write_text("configs: [{config_name: a}, {config_name: default}]")
    assert index_pages(str(folder)).differing == (
        "bucket/1.parquet has 1 rows, and _shard_sizes.json says 2.",
    )
    for pattern, number in (("0*", 0), ("1*", 1), ("deep/*", 0)):
        for is_check in (True, False):
            report = index_pages(str(folder), include=[pattern], is_check=is_check)
            assert (report.files, len(report.differing)) == (1, number)
    (folder / "1.parquet").unlink()
    assert index_pages(str(folder), include=["[02]*"]).differing == ()
    with pytest.raises(errors.NotFoundError, match=r"names bucket/1\.parquet, and there is no"):
        index_pages(str(folder), include=["[012]*"])


@pytest.mark.parametrize(
    ("act", "kind", "text"),
    [
        (lambda folder: index_pages(str(folder), "txt"), errors.NotFoundError, "no column 'txt'"),
        (lambda folder: index_pages(str(folder / "_")), errors.NotFoundError, "no folder"),
        (
            lambda folder: index_pages(str(folder), include=["*.pq"]),
            errors.NotFoundError,
            "no files that match",
        ),
        (
            lambda folder: index_pages("https://example.org/a.parquet"),
            errors.ConfigurationError,
            "does not write to",
        ),
    ],
)
def test_what_cannot_be_indexed_is_a_sentence(act, kind, text, folder: Path) -> None:
    with pytest.raises(kind, match=text):
        act(folder)
    assert np.all([not path.name.endswith("json") for path in folder.rglob("*")])


@pytest.mark.parametrize("runs", [[1, 1 << 40], [1], [1, 2, 3], [-1, 4], [4, -1], [1 << 31, 1]])
def test_an_index_with_row_groups_of_no_file_is_left_out(
    runs: list[int], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The owner of the files may have written any numbers, such as of a terabyte of memory."""
    expected = read_all(PageLoader(str(folder), cache_bytes=1 << 20))
    index_pages(str(folder))
    (path,) = (folder / "_pages").glob("*.json")
    record = json.loads(path.read_bytes())
    record["record"]["files"][0]["row_groups"] = runs
    path.write_text(json.dumps(record))
    with caplog.at_level(logging.WARNING):
        assert read_all(PageLoader(str(folder), cache_bytes=1 << 20)) == expected
    assert "index of the pages is not used" in caplog.text
