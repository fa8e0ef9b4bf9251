"""Pages come from several folders with copies of the files, and never from another version."""

import random
import shutil
from itertools import pairwise, product
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace import errors
from millrace.datasets.loader import PageLoader
from millrace.datasets.loader.column import compute_checksums, read_layout, read_rows
from millrace.datasets.loader.mirrored_files import open_loader_files
from millrace.datasets.loader.page_index import index_pages
from millrace.datasets.sources.files import Patterns
from millrace.datasets.sources.local_files import LocalFiles
from millrace.datasets.sources.table import iterate_files
from millrace.schemas.dataset import FileRef

ROWS, FILE = 1000, "a.parquet"
ROW = [f"row {number} {random.Random(number).randbytes(40).hex()}" for number in range(ROWS)]
OTHER = [*ROW[:400], *(text.swapcase() for text in ROW[400:500]), *ROW[500:]]


def write(folder: Path, texts: list[str], **options: Any) -> None:
    """Write a file whose size and end do not depend on the values."""
    folder.mkdir(exist_ok=True)
    table = pa.table({"text": texts, "pair": [{"a": text, "b": n} for n, text in enumerate(texts)]})
    defaults = {
        "compression": "none", "write_statistics": False, "write_page_index": True,
        "write_page_checksum": True, "use_dictionary": False, "store_schema": False,
    }  # fmt: skip
    cast("Any", pq).write_table(
        table, folder / FILE, row_group_size=500, max_rows_per_page=100, write_batch_size=100,
        **(defaults | options),
    )  # fmt: skip


def make_folders(tmp_path: Path, **options: Any) -> list[Path]:
    """Write the listed file, another version of equal size, and a copy."""
    folders = [tmp_path / name for name in ("listed", "other", "copy")]
    for folder, texts in zip(folders, (ROW, OTHER, ROW), strict=True):
        write(folder, texts, **options)
    listed, other = ((folder / FILE).read_bytes() for folder in folders[:2])
    assert (len(listed), listed[-(16 << 10) :]) == (len(other), other[-(16 << 10) :])
    assert listed != other
    return folders


def read_texts(loader: PageLoader, number: int) -> list[str]:
    """Read a page of 100 rows."""
    (values,) = loader.read([loader.table[number]])
    return values.to_pylist()


@pytest.mark.parametrize("index", ["none", "without checksums"])
def test_another_version_is_not_read_when_the_listed_one_is_gone(
    index: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listed, other, _ = make_folders(tmp_path)
    if index != "none":
        index_pages(str(listed))
    with PageLoader([str(listed), str(other)]) as loader:
        assert read_texts(loader, 0) == ROW[:100]
        (listed / FILE).unlink()
        with pytest.raises(errors.NotFoundError) as raised:
            read_texts(loader, 4)
    text = str(raised.value)
    assert f"{listed.as_uri()}: There is no" in text
    assert f"{other.as_uri()}: no equal ETag proves its copy" in text
    assert f"millrace dataset index {listed.as_uri()} --checksums" in text
    (warning,) = [message for message in caplog.messages if "--checksums" in message]
    assert f"{FILE} and perhaps other files are not read from {other.as_uri()}" in warning


@pytest.mark.parametrize(
    ("index", "dictionary", "header_checksums", "column"),
    list(product([True, False], [True, False], [True, False], ["text", "pair"])),
)
def test_a_copy_with_the_checksums_of_the_index_serves_and_one_that_differs_is_left_out(
    index: bool,
    dictionary: bool,
    header_checksums: bool,
    column: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folders = listed, other, _ = make_folders(
        tmp_path,
        write_page_index=index,
        use_dictionary=dictionary,
        write_page_checksum=header_checksums,
    )
    assert index_pages(str(listed), column, includes_checksums=True).checked == 1
    expected = cast("Any", pq).read_table(listed / FILE).column(column).to_pylist()
    with PageLoader([str(one) for one in folders], column) as loader:
        assert read_texts(loader, 0) == expected[:100]
        (listed / FILE).unlink()
        for number in range(10):
            assert read_texts(loader, number) == expected[100 * number : 100 * number + 100]
        report = loader.make_mirror_report()
    assert report is not None
    assert [location.differing for location in report.locations] == [0, 1, 0]
    assert report.locations[2].served_bytes > 0
    (warning,) = [message for message in caplog.messages if "its bytes" in message]
    assert f"{other.as_uri()} is not used for {FILE}: its bytes " in warning
    assert "do not have the checksum in the index of the pages" in warning


def test_a_page_is_checked_each_time_it_is_read(tmp_path: Path) -> None:
    listed, other, _ = make_folders(tmp_path)
    index_pages(str(listed), includes_checksums=True)
    with PageLoader([str(listed), str(other)]) as loader:
        assert read_texts(loader, 0) == ROW[:100]
        (listed / FILE).unlink()
        for number in (1, 2, 3):
            assert read_texts(loader, number) == ROW[100 * number : 100 * number + 100]
        with pytest.raises(errors.CorruptError, match="cannot be read from any of 2 locations"):
            read_texts(loader, 4)


def test_checksums_that_were_stored_later_are_used_by_a_new_loader(tmp_path: Path) -> None:
    """Although loaders of a process share what they have read of an index."""
    listed, _, copy = make_folders(tmp_path)
    index_pages(str(listed))
    with PageLoader([str(listed), str(copy)]) as before:
        assert read_texts(before, 0) == ROW[:100]
        index_pages(str(listed), includes_checksums=True)
        with PageLoader([str(listed), str(copy)]) as loader:
            assert read_texts(loader, 0) == ROW[:100]
            (listed / FILE).unlink()
            assert read_texts(loader, 1) == ROW[100:200]


@pytest.mark.parametrize(("index", "column"), list(product([True, False], ["text", "pair"])))
def test_no_other_bytes_are_ever_read_as_values(index: bool, column: str, tmp_path: Path) -> None:
    """Whatever a copy has instead: its headers are covered, and no other bytes are used."""
    listed, _, copy = make_folders(
        tmp_path, write_page_index=index, use_dictionary=True, write_page_checksum=False
    )
    files = LocalFiles(listed)
    file = find(files)
    layout = compute_checksums(files, file, read_layout(files, file, column))
    expected = cast("Any", pq).read_table(listed / FILE).column(column).to_pylist()
    body, rng = (copy / FILE).read_bytes(), random.Random(f"{index} {column}")
    read = 0
    for _ in range(60):
        size = rng.choice([1, 30, 3000])
        target, source = (rng.randrange(len(body) - size) for _ in range(2))
        piece = rng.choice([body[source : source + size], rng.randbytes(size)])
        (copy / FILE).write_bytes(body[:target] + piece + body[target + size :])
        copies = open_loader_files([str(listed), str(copy)])
        (listed / FILE).rename(tmp_path / "away")
        try:
            found = read_rows(copies, file, layout, 200, 700)
        except errors.CorruptError:
            continue
        finally:
            (tmp_path / "away").rename(listed / FILE)
        assert found.values.to_pylist() == expected[200:700]
        read += 1
    assert 0 < read < 60


@pytest.mark.parametrize(("index", "column"), list(product([True, False], ["text", "pair"])))
def test_checksums_are_those_of_the_bytes_in_whatever_blocks_they_come(
    index: bool, column: str, tmp_path: Path
) -> None:
    class SmallBlocks(LocalFiles):
        def iterate_blocks(self, file: FileRef, start: int, end: int, **options: Any) -> Any:
            return super().iterate_blocks(file, start, end, block=777)

    write(tmp_path, ROW, write_page_index=index, use_dictionary=True)
    files, body = SmallBlocks(tmp_path), (tmp_path / FILE).read_bytes()
    layout = read_layout(files, find(files), column)
    for parts in compute_checksums(files, find(files), layout).groups:
        for part in parts:
            bounds = part.bounds.tolist()
            expected = [crc32(body[a:b]) for a, b in pairwise(bounds)]
            assert part.checksums is not None
            assert part.checksums.tolist() == expected
            assert np.all(part.checksums[1:] > 0)


def test_an_index_is_made_of_a_copy_that_was_moved_with_it(tmp_path: Path) -> None:
    """Its entries are of the other location's ETags, so they are stale until it is made again."""
    listed, _, copy = make_folders(tmp_path)
    index_pages(str(listed), includes_checksums=True)
    shutil.copytree(listed / "_pages", copy / "_pages")
    report = index_pages(str(copy), includes_checksums=True)
    assert (report.stale, report.checked, report.number) == ((FILE,), 1, 2)


def find(files: LocalFiles) -> FileRef:
    """Return the only file."""
    ((_, file, _),) = iterate_files(files.collect(Patterns([FILE])), local=True)
    return file
