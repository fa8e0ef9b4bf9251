"""Pages of a dataset of Millrace in a store: the rows of the samples, by few and small requests."""

import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace import errors
from millrace.datasets.formats.base import FieldType
from millrace.datasets.formats.parquet import PagesFormat
from millrace.datasets.loader import Page, PageLoader
from millrace.datasets.loader.column import read_rows
from millrace.datasets.loader.page_index import index_pages
from millrace.datasets.sample import Sample
from millrace.keys.datasets import DatasetKeys
from millrace.storage import StoreSpec, list_objects, open_store, put
from millrace.testing.r2 import R2Proxy
from millrace.testing.rgw import RGW
from tests.soak.faults import make_faults, make_r2_store
from tests.support.formats import make_objects

KEYS = DatasetKeys("corpus")
SIZES = (2500, 149, 1851, 1)


@pytest.fixture
def texts() -> list[str]:
    rng = random.Random(1)
    words = [rng.randbytes(6).hex() for _ in range(3000)]
    return [" ".join(rng.choices(words, k=rng.randrange(1, 90))) for _ in range(sum(SIZES))]


@pytest.fixture
def dataset(rgw: RGW, r2: R2Proxy, bucket: str, texts: list[str]) -> StoreSpec:
    """Four files of a ``pages`` dataset."""
    spec = StoreSpec.model_validate(make_r2_store(rgw, r2, bucket).make_spec(""))
    store, start = open_store(spec), 0
    parts: list[Sequence[Sample]] = []
    for size in SIZES:
        parts.append(
            [Sample(f"k{n}", {"txt": texts[n].encode()}, n) for n in range(start, start + size)]
        )
        start += size
    for key, body in make_objects(PagesFormat(), KEYS, {"txt": FieldType.STR}, parts).items():
        put(store, key, body)
    r2.reset()
    return spec


def expect(texts: list[str], pages: Sequence[Page]) -> list[list[str]]:
    starts = [sum(SIZES[:number]) for number in range(len(SIZES))]
    return [texts[starts[page.file] + page.start : starts[page.file] + page.end] for page in pages]


def test_each_page_has_its_rows_while_the_store_fails(
    dataset: StoreSpec, r2: R2Proxy, texts: list[str]
) -> None:
    r2.set_faults(make_faults(3, stall_seconds=0.2))
    loader = PageLoader(dataset)
    assert len(loader) == 3 * 9 + 2 + 2 * 10 + 1
    pages = [page for window in range(10) for page in loader.draw(7, window, 6)]
    assert len(set(pages)) == len(loader)
    assert [values.to_pylist() for values in loader.read(pages)] == expect(texts, pages)
    assert sum(r2.count_fired().values()) > 5
    assert loader.counts.pages == 60
    assert loader.counts.whole_groups == 0


def test_a_page_is_one_request(dataset: StoreSpec, r2: R2Proxy) -> None:
    """And a file is one request when the dataset is opened, beside the listing."""
    loader = PageLoader(dataset)
    assert len(r2.list_requests()) == 1 + len(SIZES)
    r2.reset()
    pages = loader.draw(7, 0, 6)
    list(loader.read(pages))
    assert len(r2.list_requests()) == 6


def test_200_files_with_an_index_are_opened_by_two_requests(
    rgw: RGW, r2: R2Proxy, bucket: str, texts: list[str]
) -> None:
    """The listing and the index. The places of all pages are one more, when a page is read."""
    spec = StoreSpec.model_validate(make_r2_store(rgw, r2, bucket).make_spec(""))
    store = open_store(spec)
    parts = [[Sample("k", {"txt": text.encode()}, 0)] for text in texts[:200]]
    for key, body in make_objects(PagesFormat(), KEYS, {"txt": FieldType.STR}, parts).items():
        put(store, key, body)
    report = index_pages(spec)
    assert (report.files, report.rows, report.differing) == (200, 200, ())
    r2.reset()
    loader = PageLoader(spec)
    assert len(r2.list_requests()) == 2
    pages = loader.draw(7, 0, 6)
    found = [values.to_pylist() for values in loader.read(pages)]
    assert found == [[texts[page.file]] for page in pages]
    assert len(r2.list_requests()) == 2 + 1 + 6


def test_a_cached_page_is_no_request(dataset: StoreSpec, r2: R2Proxy) -> None:
    loader, other = PageLoader(dataset), PageLoader(dataset)
    pages = loader.draw(7, 0, 6)
    list(loader.read(pages))
    r2.reset()
    loader.close()
    list(other.read(pages))
    assert len(r2.list_requests()) == 6  # the pages of a loader go with it
    list(other.read(pages))
    assert len(r2.list_requests()) == 6
    assert (other.counts.pages, other.counts.cached) == (12, 6)
    with pytest.raises(errors.ConfigurationError, match="was closed"):
        list(loader.read(pages))


def test_a_file_that_is_written_again_is_an_error_that_names_it(
    dataset: StoreSpec, texts: list[str]
) -> None:
    loader = PageLoader(dataset)
    store = open_store(dataset)
    first = min(stat.key for stat in list_objects(store) if stat.key.endswith(".parquet"))
    put(store, first, b"other")
    with pytest.raises(errors.ChangedError, match=first):
        list(loader.read([Page(0, 0, 10)]))
    others = [Page(2, 0, 100)]
    assert [values.to_pylist() for values in loader.read(others)] == expect(texts, others)


def test_two_loaders_with_small_caches_read_in_several_threads(
    dataset: StoreSpec, texts: list[str]
) -> None:
    """The places of one file alone are larger than the cache."""
    loaders = [PageLoader(dataset, cache_bytes=size, concurrency=8) for size in (1, 5000)]
    for loader in loaders:
        pages = loader.draw(1, 0, len(loader))
        assert [values.to_pylist() for values in loader.read(pages)] == expect(texts, pages)


def test_files_of_others_are_read_by_row_groups_where_they_have_no_index(tmp_path: Path) -> None:
    rows = pa.table({"text": [f"row {n}" for n in range(1000)], "id": range(1000)})
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=400)
    loader = PageLoader(str(tmp_path), "id")
    (values,) = loader.read([Page(0, 350, 450)])
    assert values.to_pylist() == list(range(350, 450))
    assert loader.counts.whole_groups == 1


def test_row_groups_that_are_read_whole_are_few_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{n} " * 2000 for n in range(1000, 5000)]  # of equal size
    pq.write_table(
        pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=200, use_dictionary=False
    )
    loader = PageLoader(str(tmp_path), cache_bytes=0)
    lock, running, most = threading.Lock(), 0, 0

    def count_readers(*arguments: Any) -> Any:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        try:
            return read_rows(*arguments)
        finally:
            with lock:
                running -= 1

    group = sum(map(len, texts[-200:]))
    monkeypatch.setattr("millrace.datasets.loader.pages.read_rows", count_readers)
    monkeypatch.setattr("millrace.datasets.loader.pages.READ_AHEAD_BYTES", int(2.5 * group))
    pages = loader.draw(1, 0, len(loader))
    for page, values in zip(pages, loader.read(pages), strict=True):
        assert values.to_pylist() == texts[page.start : page.end]
        assert values.get_total_buffer_size() < group * 0.6
    assert most <= 2
    assert (loader.counts.pages, loader.counts.whole_groups) == (40, 40)
    monkeypatch.setattr("millrace.datasets.loader.pages.READ_AHEAD_BYTES", group // 2)
    assert sum(map(len, loader.read(pages))) == 4000  # one at a time


@pytest.mark.parametrize("copies", [1, 2])
def test_a_row_group_that_is_too_large_is_no_damage_of_a_copy(
    copies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / str(number) for number in range(copies)]
    for folder in folders:
        folder.mkdir()
        pq.write_table(pa.table({"text": ["x" * 999] * 1000}), folder / "a.parquet")
    monkeypatch.setattr("millrace.datasets.loader.column._MAX_RAW_BYTES", 500)
    loader = PageLoader([folder.as_uri() for folder in folders])
    with pytest.raises(errors.ConfigurationError, match=r"a\.parquet has a row group.*smaller"):
        list(loader.read(loader.draw(1, 0, 1)))
    mirrors = loader.make_mirror_report()
    assert (mirrors is None) == (copies == 1)
    assert not any(one.differing for one in (mirrors.locations if mirrors else ()))


@pytest.mark.parametrize(
    ("act", "kind", "text"),
    [
        (lambda folder: PageLoader(str(folder), "txt"), errors.NotFoundError, "columns are text"),
        (lambda folder: PageLoader(str(folder / "no")), errors.NotFoundError, "no"),
        (
            lambda folder: PageLoader(str(folder), include=["*.pq"]),
            errors.NotFoundError,
            r"no files that match \*\.pq",
        ),
        (lambda folder: PageLoader(str(folder), page_rows=0), errors.ConfigurationError, "one row"),
    ],
)
def test_what_cannot_be_opened_is_a_sentence(act, kind, text, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(kind, match=text):
        act(tmp_path)
