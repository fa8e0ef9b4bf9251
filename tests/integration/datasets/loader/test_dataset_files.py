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
from millrace.storage import delete_one, put
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


def flip(body: bytes, at: int) -> bytes:
    return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]


LARGE = random.Random(5).randbytes(5 * BLOCK_SIZE)
DAMAGES = {
    "flipped": (flip(LARGE, 2 * BLOCK_SIZE + 9), 1),
    "cut": (LARGE[: 3 * BLOCK_SIZE + 7], 2),
    "longer": (LARGE + b"more", 0),
    "empty": (b"", 5),
}


@pytest.mark.parametrize("stores", [1, 2])
@pytest.mark.parametrize("damage", DAMAGES)
def test_only_the_damaged_blocks_of_a_cached_file_are_fetched(
    world: Mirrors, tmp_path: Path, damage: str, stores: int
):
    key, digest, blocks = "large", compute_digest(LARGE), hash_blocks(LARGE)
    world.put(key, LARGE, LARGE)
    damaged, count = DAMAGES[damage]
    files = DatasetFiles(world.specs[:stores], cache=DiskCache(tmp_path, 20 << 20))
    lent = files.lend_file(key, len(LARGE), digest)
    assert lent is not None
    lent.path.write_bytes(damaged)
    world.reset()
    for _ in range(2):
        mended = files.lend_file(key, len(LARGE), digest, blocks=lambda: blocks)
        assert mended is not None
        assert mended.path.read_bytes() == LARGE
    requests = [each for proxy in world.proxies for each in proxy.list_requests()]
    assert sum(each["sent"] for each in requests if each["status"] == 206) == count * BLOCK_SIZE


def test_damaged_blocks_are_fetched_from_a_store_that_has_them(world: Mirrors, tmp_path: Path):
    key, digest, at = "large", compute_digest(LARGE), 2 * BLOCK_SIZE
    files = DatasetFiles(world.specs, cache=DiskCache(tmp_path, 20 << 20))
    world.put(key, flip(LARGE, at), LARGE)
    for damaged in (flip(LARGE, at + 5), LARGE[:at]):
        lent = files.lend_file(key, len(LARGE), digest, blocks=hash_blocks(LARGE))
        assert lent is not None
        assert lent.path.read_bytes() == LARGE
        lent.path.write_bytes(damaged)
    put(world.stores[1], key, flip(LARGE, at))
    with pytest.raises(errors.CorruptError, match="digests of their blocks"):
        files.lend_file(key, len(LARGE), digest, blocks=hash_blocks(LARGE))
    assert lent.path.read_bytes() == damaged  # its intact blocks are used later
    assert list((tmp_path / "parts").iterdir()) == []


def test_a_damaged_file_is_never_mended_by_digests_of_another(world: Mirrors, tmp_path: Path):
    world.put(KEY, WRONG, WRONG)
    put(world.stores[1], KEY, BODY)
    files = DatasetFiles(world.specs[1:], cache=DiskCache(tmp_path, 20 << 20))
    for _ in range(2):
        lent = files.lend_file(KEY, len(BODY), DIGEST)
        assert lent is not None
        assert lent.path.read_bytes() == BODY
        lent.path.write_bytes(WRONG)
    wrong = DatasetFiles(world.specs[:1], cache=DiskCache(tmp_path, 20 << 20))
    with pytest.raises(errors.CorruptError, match="do not have the digest of the object"):
        wrong.lend_file(KEY, len(BODY), DIGEST, blocks=hash_blocks(WRONG))


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
