"""Pages are read from several stores that have the same files."""

import random
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace import errors
from millrace.datasets.loader import PageLoader
from millrace.datasets.loader.page_index import index_pages
from millrace.storage import StoreSpec, list_objects, put, read
from millrace.storage.mirror_locations import MirrorReport
from millrace.testing.faults import Faults
from millrace.testing.r2 import R2Proxy
from millrace.testing.rgw import RGW
from tests.soak.faults import make_faults
from tests.support.mirrors import Mirrors, start_mirrors

ROWS, FILES = 1000, 3


@pytest.fixture(scope="module")
def proxies(rgw: RGW, server_folder: Path) -> Iterator[list[R2Proxy]]:
    with start_mirrors(rgw, server_folder / "page-mirrors", 3) as started:
        yield started


def make_texts(file: int) -> list[str]:
    rng = random.Random(file)
    return [f"{file} {n} {rng.randbytes(rng.randrange(200)).hex()}" for n in range(ROWS)]


def make_parquet(texts: list[str], **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    cast("Any", pq).write_table(
        pa.table({"text": texts}), sink, row_group_size=500, max_rows_per_page=100,
        write_batch_size=100, write_page_index=True, use_dictionary=False,
        **({"write_page_checksum": True, "compression": "zstd"} | options),
    )  # fmt: skip
    return sink.getvalue().to_pybytes()


@pytest.fixture
def world(rgw: RGW, proxies: list[R2Proxy]) -> Mirrors:
    made = Mirrors.make(rgw, proxies, "/below/here")
    for file in range(FILES):
        body = make_parquet(make_texts(file))
        made.put(f"{file}.parquet", body, body, body)
    return made


def index_copies(world: Mirrors, *, includes_checksums: bool) -> None:
    """Make an index of the pages, and copy it to the other locations."""
    index_pages(world.specs[0], includes_checksums=includes_checksums)
    for stat in list(list_objects(world.stores[0], "_pages/")):
        for store in world.stores[1:]:
            put(store, stat.key, read(world.stores[0], stat.key))


def read_epoch(loader: PageLoader) -> None:
    """Read all pages, and compare their rows."""
    pages = loader.draw(3, 0, len(loader))
    assert len(pages) == FILES * ROWS // 100
    for page, values in zip(pages, loader.read(pages), strict=True):
        assert values.to_pylist() == make_texts(page.file)[page.start : page.end]


def report(loader: PageLoader) -> MirrorReport:
    found = loader.make_mirror_report()
    assert found is not None
    return found


def test_a_page_is_one_request_to_one_of_the_locations(world: Mirrors):
    loader = PageLoader(world.specs)
    world.reset()
    read_epoch(loader)
    counts = world.count()
    found = report(loader)
    hedges = sum(location.hedges for location in found.locations)  # of answers that took long
    assert sum(counts) == len(loader) + hedges
    assert min(counts) > 0
    assert found.further_share <= 0.05


@pytest.mark.soak
def test_pages_are_right_while_one_location_is_dead_and_others_fail(world: Mirrors):
    world.proxies[0].set_faults(Faults(error500=1.0))
    for number in (1, 2):
        world.proxies[number].set_faults(make_faults(number, stall_seconds=0.2))
    loader = PageLoader(world.specs)
    read_epoch(loader)
    assert sum(world.proxies[1].count_fired().values()) > 0
    assert sum(world.proxies[2].count_fired().values()) > 0
    assert report(loader).locations[0].served_bytes == 0


def test_a_damaged_page_is_read_elsewhere(world: Mirrors, caplog: pytest.LogCaptureFixture):
    damaged = bytearray(read(world.stores[1], "1.parquet"))
    for at in range(1000, len(damaged), 1000):
        damaged[at] ^= 1
    put(world.stores[1], "1.parquet", bytes(damaged))
    index_copies(world, includes_checksums=True)
    while True:
        loader = PageLoader(world.specs)  # another one keeps no page of the one before
        read_epoch(loader)
        if report(loader).locations[1].differing:  # a slow location serves few pages
            break
    (warning,) = [one.getMessage() for one in caplog.records if "is not used" in one.getMessage()]
    assert world.stores[1].url in warning
    assert "is not used for 1.parquet: its bytes " in warning
    assert "do not have the checksum in the index of the pages" in warning
    assert report(loader).locations[1].differing == 1


def test_a_copy_of_other_parts_is_used_and_one_of_another_version_is_not(
    world: Mirrors, caplog: pytest.LogCaptureFixture
):
    body = read(world.stores[1], "0.parquet")
    world.put_parts(1, "0.parquet", body)
    other = make_parquet([text.upper() for text in make_texts(0)])
    put(world.stores[2], "0.parquet", other[: len(body)].ljust(len(body), b"."))
    index_copies(world, includes_checksums=True)
    loader = PageLoader(world.specs)
    world.reset()
    read_epoch(loader)
    paths = [each["path"] for each in world.proxies[1].list_requests()]
    assert any("0.parquet" in path for path in paths)
    assert "0.parquet: its bytes" in caplog.text
    assert report(loader).locations[1].differing == 0
    assert report(loader).locations[2].differing == 1


@pytest.mark.parametrize("includes_checksums", [True, False])
def test_an_older_version_of_equal_size_is_not_used(
    includes_checksums: bool, world: Mirrors, caplog: pytest.LogCaptureFixture
):
    for file in range(FILES):  # with an index, a loader reads no end of a file when it is opened
        texts = make_texts(file)
        newer = make_parquet(texts, compression="none")
        texts[-100:] = [text.swapcase() for text in texts[-100:]]  # the last page
        older = make_parquet(texts, compression="none")
        assert len(newer) == len(older)
        world.put(f"{file}.parquet", newer, older, older)
    index_copies(world, includes_checksums=includes_checksums)
    said = "is not used for" if includes_checksums else "are not read from"
    while sum(store.url in caplog.text for store in world.stores[1:]) < 2:  # some are seldom asked
        loader = PageLoader(world.specs)
        read_epoch(loader)
        others = report(loader).locations[1:]
        if not includes_checksums:
            assert max(one.served_bytes for one in others) < 1000  # of the index
    assert said in caplog.text


def test_pages_without_checksums_are_read_from_copies_of_equal_etags(
    world: Mirrors, caplog: pytest.LogCaptureFixture
):
    for file in range(FILES):
        path, texts = f"{file}.parquet", make_texts(file)
        body = make_parquet(texts, compression="none", write_page_checksum=False)
        other = body.replace(texts[120].encode(), texts[120].swapcase().encode())
        assert body != other
        assert len(body) == len(other)
        world.put(path, body, other, body)
    while "has checksums of the pages" not in caplog.text:  # a slow location is seldom asked
        loader = PageLoader(world.specs)
        read_epoch(loader)
    assert caplog.text.count(f"millrace dataset index {world.stores[0].url} --checksums") == 1
    assert report(loader).locations[1].differing == 0
    assert min(report(loader).locations[n].served_bytes for n in (0, 2)) > 0


def test_a_folder_with_the_files_is_read_instead_of_the_stores(world: Mirrors, tmp_path: Path):
    for file in range(FILES):
        (tmp_path / f"{file}.parquet").write_bytes(read(world.stores[0], f"{file}.parquet"))
    index_copies(world, includes_checksums=True)
    loader = PageLoader([*world.specs, StoreSpec(url=tmp_path.as_uri())])
    world.reset()
    read_epoch(loader)
    assert report(loader).locations[3].served_bytes > 0
    (layouts,) = [
        each["path"] for proxy in world.proxies for each in proxy.list_requests()
    ]  # of all files
    assert layouts.endswith(".bin")


def test_a_bucket_names_its_mirrors(world: Mirrors):
    class Bucket:
        def make_read_specs(self) -> list[StoreSpec]:
            return world.specs

    read_epoch(PageLoader(Bucket()))


def test_files_that_are_replaced_everywhere_are_an_error(world: Mirrors):
    loader = PageLoader(world.specs)
    other = make_parquet(make_texts(7))
    for store in world.stores:
        for file in range(FILES):
            put(store, f"{file}.parquet", other)
    with pytest.raises(errors.ChangedError, match="was replaced or deleted"):
        read_epoch(loader)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ([], "at least one location"),
        (["s3://bucket", "https://host/data"], "https://host/data is no store"),
        (["hf://datasets/o/n", "s3://bucket"], "is no store"),
    ],
)
def test_locations_that_cannot_be_mirrors_are_refused(source: list[str], says: str):
    with pytest.raises(errors.ConfigurationError, match=says):
        PageLoader(source)


def test_no_location_can_be_listed(world: Mirrors):
    for proxy in world.proxies:
        proxy.set_faults(Faults(error500=1.0))
    timeout = {"retry_timeout": timedelta(seconds=1)}
    specs = [one.model_copy(update=timeout) for one in world.specs]
    with pytest.raises(errors.UnavailableError) as raised:
        PageLoader(specs)
    assert all(store.url in str(raised.value) for store in world.stores)
