"""Files of a dataset come from the disk of the node, or from one of several stores."""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from millrace import errors
from millrace.datasets.loader.dataset_files import DatasetFiles
from millrace.datasets.loader.disk_cache import DiskCache
from millrace.digest import BLOCK_SIZE, compute_digest, hash_blocks
from millrace.storage import delete_one
from millrace.storage.mirrored_objects import MirroredObject
from millrace.testing.faults import Faults
from millrace.testing.r2 import R2Proxy
from millrace.testing.rgw import RGW
from tests.support.mirrors import Mirrors, start_mirrors

BODY = random.Random(3).randbytes(3 * BLOCK_SIZE + 500)
DIGEST, BLOCKS = compute_digest(BODY), hash_blocks(BODY)
WRONG = BODY[:-1] + bytes([BODY[-1] ^ 1])
KEY = "data/shards/tar/train/train-00000-000000.tar"


@pytest.fixture(scope="module")
def proxies(rgw: RGW, server_folder: Path) -> Iterator[list[R2Proxy]]:
    with start_mirrors(rgw, server_folder / "file-mirrors", 2) as started:
        yield started


@pytest.fixture
def world(rgw: RGW, proxies: list[R2Proxy]) -> Mirrors:
    made = Mirrors.make(rgw, proxies)
    made.put(KEY, BODY, BODY)
    return made


def test_a_file_is_fetched_once_for_the_node(world: Mirrors, tmp_path: Path):
    world.proxies[0].set_faults(Faults(error500=1.0))
    for _ in range(2):
        files = DatasetFiles(world.specs, cache=DiskCache(tmp_path, 10 << 20))
        for _ in range(2):
            path = files.fetch_file(KEY, len(BODY), DIGEST)
            assert path is not None
            assert path.read_bytes() == BODY
        files.close()
    served = [each["sent"] for each in world.proxies[1].list_requests() if each["status"] == 206]
    assert sum(served) == len(BODY)


def test_a_file_stays_until_it_is_released_as_often_as_it_was_fetched(
    world: Mirrors, tmp_path: Path
):
    cache = DiskCache(tmp_path, len(BODY))
    files = DatasetFiles(world.specs, cache=cache)
    world.put("other", WRONG, WRONG)
    first, again = (files.fetch_file(KEY, len(BODY), DIGEST) for _ in range(2))
    assert first == again
    assert first is not None
    other = "other", len(WRONG), compute_digest(WRONG)
    assert files.fetch_file(*other) is None
    files.release(first)
    assert files.fetch_file(*other) is None
    assert files.read_file(*other) == WRONG
    files.release(first)
    assert files.fetch_file(*other) is not None


def test_without_a_cache_there_is_no_path_but_the_bytes(world: Mirrors):
    files = DatasetFiles(world.specs)
    assert files.fetch_file(KEY, len(BODY), DIGEST) is None
    assert files.read_file(KEY, len(BODY), DIGEST, blocks=BLOCKS) == BODY


@pytest.mark.parametrize("name", [KEY, KEY[KEY.index("shards/") :]])
def test_a_warmed_node_asks_no_store(world: Mirrors, tmp_path: Path, name: str):
    warmed = tmp_path / "warmed"
    (warmed / name).parent.mkdir(parents=True)
    (warmed / name).write_bytes(BODY)
    files = DatasetFiles(world.specs, cache=DiskCache(tmp_path / "c", 10 << 20), warmed=[warmed])
    assert files.fetch_file(KEY, len(BODY), DIGEST) == warmed / name
    item = MirroredObject(KEY, len(BODY), digest=DIGEST)
    assert files.read_object(item, 5, 5000, check=partial(compare, 5)) == BODY[5:5000]
    assert world.count() == [0, 0]


def test_a_warmed_folder_without_the_files_is_named_once(
    world: Mirrors, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    files = DatasetFiles(world.specs, cache=DiskCache(tmp_path / "c", 10 << 20), warmed=[tmp_path])
    for _ in range(2):
        assert files.fetch_file(KEY, len(BODY), DIGEST) is not None
    (said,) = caplog.messages
    assert f"No warmed folder ({tmp_path}) has {KEY}, which is read from the store" in said


def test_each_range_is_of_a_copy_that_passes_the_check(world: Mirrors):
    world.put(KEY, WRONG, BODY)  # its first blocks are right
    files = DatasetFiles(world.specs)
    item = MirroredObject(KEY, len(BODY), digest=DIGEST, blocks=BLOCKS)
    for start in (0, BLOCK_SIZE - 5, len(BODY) - 600):
        for _ in range(6):
            found = files.read_object(item, start, start + 600, check=partial(compare, start))
            assert found == BODY[start : start + 600]
    assert [one.differing for one in files.make_report().locations] == [1, 0]


def compare(start: int, data: bytes) -> None:
    if data != BODY[start : start + len(data)]:
        raise errors.CorruptError("its bytes differ")


def test_a_file_that_no_location_has_is_an_error(world: Mirrors, tmp_path: Path):
    for store in world.stores:
        delete_one(store, KEY)
    files = DatasetFiles(world.specs, cache=DiskCache(tmp_path, 10 << 20))
    with pytest.raises(errors.NotFoundError, match="cannot be read from any of 2 locations"):
        files.fetch_file(KEY, len(BODY), DIGEST)
    assert list((tmp_path / "parts").iterdir()) == []
