"""Rows of one column: exactly the rows that pyarrow reads, from few bytes, and never wrong ones."""

import random
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace import errors
from millrace.datasets import thrift
from millrace.datasets.loader.column import (
    ColumnLayout,
    ReadRows,
    measure_groups,
    read_layout,
    read_rows,
)
from millrace.datasets.loader.layout_encoding import decode_layout, encode_layout
from millrace.datasets.sources.files import Patterns
from millrace.datasets.sources.local_files import LocalFiles
from millrace.datasets.sources.table import iterate_files
from millrace.schemas.dataset import FileRef

ROWS = 2000


def make_table() -> pa.Table:
    rng = random.Random(1)
    return pa.table(
        {
            "text": [
                None if rng.random() < 0.05 else "".join(rng.choices("ab é", k=rng.randrange(99)))
                for _ in range(ROWS)
            ],
            "number": list(range(ROWS)),
            "flag": [rng.random() < 0.5 for _ in range(ROWS)],
            "repeated": [f"v{row % 3}" for row in range(ROWS)],
            "tokens": [[rng.randrange(99)] * rng.randrange(4) for _ in range(ROWS)],
            "nested": [[[1, row], [2]] for row in range(ROWS)],
            "struct": [{"a": row, "b": str(row % 7)} for row in range(ROWS)],
        }
    )


TABLE = make_table()
PAGED = [name for name in TABLE.column_names if name != "struct"]


def write(folder: Path, *, page_rows: int = 100, group: int = 1000, **options: Any) -> FileRef:
    defaults = {"write_page_index": True, "write_page_checksum": True, "use_dictionary": False}
    cast("Any", pq).write_table(
        TABLE, folder / "a.parquet", row_group_size=group, max_rows_per_page=page_rows,
        write_batch_size=page_rows, **(defaults | options),
    )  # fmt: skip
    return describe(folder)


def describe(folder: Path) -> FileRef:
    ((_, file, _),) = iterate_files(LocalFiles(folder).collect(Patterns()), local=True)
    return file


class CountingFiles(LocalFiles):
    """Files that count requests and bytes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.requests: list[tuple[int, int]] = []

    def iterate_blocks(self, file: FileRef, start: int, end: int, **options: Any) -> Any:
        self.requests.append((start, end))
        return super().iterate_blocks(file, start, end, **options)


def read(
    folder: Path, file: FileRef, column: str, start: int, end: int
) -> tuple[ColumnLayout, ReadRows]:
    files = LocalFiles(folder)
    layout = read_layout(files, file, column)
    return layout, read_rows(files, file, layout, start, end)


OPTIONS = list(
    product([True, False], ["1.0", "2.0"], ["zstd", "snappy", "none"], [True, False], [300, 5000])
)


@pytest.mark.parametrize(("index", "version", "compression", "dictionary", "group"), OPTIONS)
def test_the_rows_are_those_that_were_written(
    index, version, compression, dictionary, group, tmp_path
):
    file = write(
        tmp_path, group=group, page_rows=37, write_page_index=index, data_page_version=version,
        compression=compression, use_dictionary=dictionary,
    )  # fmt: skip
    rng = random.Random(f"{index} {version} {compression} {dictionary} {group}")
    for column in TABLE.column_names:
        start = rng.randrange(ROWS - 1)
        end = min(ROWS, start + rng.choice([1, 100, 700]))
        layout, found = read(tmp_path, file, column, start, end)
        assert layout.rows == ROWS
        assert (
            found.values.to_pylist() == TABLE.column(column).slice(start, end - start).to_pylist()
        )
        assert found.is_exact == (index and column in PAGED)


@pytest.mark.parametrize("index", [True, False])
def test_the_values_of_few_rows_keep_no_memory_of_others(index: bool, tmp_path: Path) -> None:
    file = write(tmp_path, group=ROWS, page_rows=ROWS, write_page_index=index)
    for column in TABLE.column_names:
        _, found = read(tmp_path, file, column, 500, 520)
        assert found.values.to_pylist() == TABLE.column(column).slice(500, 20).to_pylist()
        _, whole = read(tmp_path, file, column, 0, ROWS)
        assert found.values.get_total_buffer_size() < whole.values.get_total_buffer_size() // 20


@pytest.mark.parametrize("column", ["text", "struct"])
@pytest.mark.parametrize("index", [True, False])
def test_a_row_group_that_is_read_as_a_whole_has_its_size(
    index: bool, column: str, tmp_path: Path
) -> None:
    file = write(tmp_path, group=500, write_page_index=index)
    layout = decode_layout(encode_layout(read_layout(LocalFiles(tmp_path), file, column)))
    metadata = pq.ParquetFile(tmp_path / file.path).metadata
    sizes = [
        sum(
            one.total_uncompressed_size
            for one in map(metadata.row_group(group).column, range(metadata.num_columns))
            if one.path_in_schema.split(".")[0] == column
        )
        for group in range(4)
    ]
    is_exact = index and column == "text"
    assert measure_groups(layout, 600, 700) == (0 if is_exact else sizes[1])
    assert measure_groups(layout, 0, ROWS) == (0 if is_exact else max(sizes))


def test_a_row_group_that_is_too_large_to_be_read_as_a_whole_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, write_page_index=False)
    monkeypatch.setattr("millrace.datasets.loader.column._MAX_RAW_BYTES", 9_000)
    with pytest.raises(
        errors.ConfigurationError,
        match=r"a\.parquet has a row group .* no index of its pages.*smaller row groups, or with",
    ):
        read(tmp_path, file, "text", 500, 600)
    with pytest.raises(
        errors.ConfigurationError, match=r"the column has several parts.*smaller row groups\.$"
    ):
        read(tmp_path, file, "struct", 500, 600)
    file = write(tmp_path)
    assert read(tmp_path, file, "text", 500, 600)[1].is_exact


def test_a_read_of_one_page_fetches_one_page(tmp_path):
    """And the layout of a file is one request, with the places of all its pages."""
    file = write(tmp_path, group=ROWS)
    files = CountingFiles(tmp_path)
    layout = read_layout(files, file, "text")
    assert len(files.requests) == 1
    found = read_rows(files, file, layout, 500, 600)
    assert len(files.requests) == 2
    start, end = files.requests[1]
    whole = pq.ParquetFile(tmp_path / file.path).metadata.row_group(0).column(0)
    assert found.fetched == end - start < whole.total_compressed_size // 15


def test_rows_of_two_pages_fetch_two_pages(tmp_path):
    file = write(tmp_path, group=ROWS)
    layout, one = read(tmp_path, file, "text", 500, 600)
    _, two = read(tmp_path, file, "text", 550, 650)
    (parts,) = layout.groups
    sizes = np.diff(parts[0].bounds[1:])
    assert (one.fetched, two.fetched) == (sizes[5], sizes[5] + sizes[6])


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [True, False])
def test_no_flipped_bit_of_a_page_is_read_as_a_value(dictionary, version, tmp_path):
    """Wherever the bit is in the fetched bytes: its checksum or its header does not fit."""
    file = write(tmp_path, use_dictionary=dictionary, data_page_version=version)
    path = tmp_path / file.path
    body, rng = path.read_bytes(), random.Random(3)
    layout, intact = read(tmp_path, file, "repeated", 500, 600)
    (part,) = layout.groups[0]
    places = [*range(*part.bounds[:2]), *range(*part.bounds[6:8])]
    for place in rng.sample(places, min(len(places), 150)):
        path.write_bytes(
            body[:place] + bytes([body[place] ^ 1 << rng.randrange(8)]) + body[place + 1 :]
        )
        try:
            found = read_rows(LocalFiles(tmp_path), describe(tmp_path), layout, 500, 600)
        except errors.CorruptError:
            continue
        assert found.values.to_pylist() == intact.values.to_pylist()


def test_a_damaged_footer_is_an_error_or_changes_nothing(tmp_path):
    file = write(tmp_path)
    path = tmp_path / file.path
    body, rng = path.read_bytes(), random.Random(4)
    footer = len(body) - 8 - int.from_bytes(body[-8:-4], "little")
    expected = TABLE.column("text").slice(500, 100).to_pylist()
    outcomes = {"read": 0, "refused": 0}
    for _ in range(300):
        place = rng.randrange(footer, len(body))
        path.write_bytes(body[:place] + bytes([rng.randrange(256)]) + body[place + 1 :])
        try:
            layout, found = read(tmp_path, describe(tmp_path), "text", 500, 600)
        except (errors.CorruptError, errors.NotFoundError, errors.ConfigurationError):
            outcomes["refused"] += 1
            continue
        outcomes["read"] += 1
        if layout.rows == ROWS:
            assert found.values.to_pylist() == expected
    assert min(outcomes.values()) > 20


@pytest.mark.parametrize("index", [True, False])
def test_a_dictionary_may_be_named_as_the_first_data_page(index: bool, tmp_path: Path) -> None:
    """Some writers do so, and name no dictionary."""
    file = write(tmp_path, use_dictionary=True, write_page_index=index)
    path = tmp_path / file.path
    body = path.read_bytes()
    end = len(body) - 8 - int.from_bytes(body[-8:-4], "little")
    footer, _ = thrift.decode_struct(body[end:-8])
    for group in footer[4].content:
        for chunk in group[1].content:
            metadata = chunk[3].content
            if 11 in metadata:
                metadata[9] = metadata.pop(11)
    changed = thrift.encode_struct(footer)
    path.write_bytes(body[:end] + changed + len(changed).to_bytes(4, "little") + b"PAR1")
    assert pq.read_table(path).equals(TABLE)
    for column in TABLE.column_names:
        _, found = read(tmp_path, describe(tmp_path), column, 1500, 1600)
        assert found.values.to_pylist() == TABLE.column(column).slice(1500, 100).to_pylist()
        assert found.is_exact == (index and column in PAGED)


def test_a_column_that_is_not_there_is_named_beside_those_that_are(tmp_path):
    file = write(tmp_path)
    with pytest.raises(errors.NotFoundError, match=r"no column 'txt'.*text, number, flag"):
        read_layout(LocalFiles(tmp_path), file, "txt")


@pytest.mark.parametrize("body", [b"", b"PAR1", b"text", b"PAR1" * 3, bytes(100_000)])
def test_what_is_no_parquet_file_is_refused(body, tmp_path):
    (tmp_path / "a.parquet").write_bytes(body)
    with pytest.raises(errors.CorruptError, match=r"a\.parquet is no parquet file"):
        read_layout(LocalFiles(tmp_path), describe(tmp_path), "text")


def test_a_file_that_was_written_again_is_refused(tmp_path):
    file = write(tmp_path)
    layout = read_layout(LocalFiles(tmp_path), file, "text")
    write(tmp_path, compression="none")
    with pytest.raises(errors.ChangedError, match=r"a\.parquet"):
        read_rows(LocalFiles(tmp_path), file, layout, 0, 1)


@pytest.mark.parametrize(("start", "end"), [(5, 5), (-1, 5), (0, ROWS + 1)])
def test_rows_that_are_not_there_are_refused(start, end, tmp_path):
    file = write(tmp_path)
    with pytest.raises(ValueError, match="no rows from"):
        read(tmp_path, file, "text", start, end)
