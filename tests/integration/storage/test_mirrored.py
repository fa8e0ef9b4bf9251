"""Objects are read from several stores that have copies: from those that answer and are equal."""

import logging
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from millrace import errors
from millrace.digest import BLOCK_SIZE, combine_blocks, compute_digest, hash_blocks
from millrace.storage import copy_reader, head, open_store, put, read_range
from millrace.storage.mirror_policy import MirrorPolicy
from millrace.storage.mirrored import MirroredReader
from millrace.storage.mirrored_download import download
from millrace.storage.mirrored_objects import MirroredObject
from millrace.testing.faults import Faults
from millrace.testing.r2 import Fault, R2Proxy
from millrace.testing.rgw import RGW
from millrace.threads import DaemonThreadPool
from tests.support.mirrors import Mirrors, start_mirrors

BODY = random.Random(1).randbytes(2 * BLOCK_SIZE + 5000)
OTHER = BODY[:-1] + bytes([BODY[-1] ^ 1])
LONG_REST = MirrorPolicy(first_pause=1000.0, longest_pause=4000.0)
FIRST_CHANGED = bytes([BODY[0] ^ 1]) + BODY[1:]


@pytest.fixture(scope="module")
def proxies(rgw: RGW, server_folder: Path) -> Iterator[list[R2Proxy]]:
    """Three endpoints, each with its own faults, in front of one RGW."""
    with start_mirrors(rgw, server_folder / "mirrors", 3) as started:
        yield started


@pytest.fixture
def world(rgw: RGW, proxies: list[R2Proxy]) -> Mirrors:
    return Mirrors.make(rgw, proxies)


def read_all(
    reader: MirroredReader, item: MirroredObject, count: int, *, is_checked: bool = False
) -> None:
    """Read ranges, and compare each with the bytes that were written."""
    generator = random.Random(5)
    for _ in range(count):
        start = generator.randrange(len(BODY) - 40_000)
        expected = BODY[start : start + 40_000]
        check = partial(compare, expected) if is_checked else None
        assert reader.read_range(item, start, start + 40_000, check=check) == expected


def compare(expected: bytes, data: bytes) -> None:
    if data != expected:
        raise errors.CorruptError("the page does not have its checksum")


def test_equal_etags_prove_copies_without_further_requests(world: Mirrors):
    item = world.put("a", BODY, BODY, BODY)
    reader = MirroredReader(world.stores)
    read_all(reader, item, 12)
    assert sum(world.count()) == 12
    assert min(world.count()) > 0
    report = reader.make_report()
    assert report.further_share == 0
    assert [one.served_bytes for one in report.locations] == [40_000 * n for n in world.count()]


def test_one_slow_and_one_dead_location_cost_few_further_requests(world: Mirrors):
    item = world.put("a", BODY, BODY, BODY)
    slow, dead, _ = world.proxies
    slow.set_delays(0.02, 0.4, seed=1)
    dead.set_faults(Faults(error500=1.0))
    reader = MirroredReader(world.stores, policy=LONG_REST)
    reads = 300
    read_all(reader, item, reads)
    assert slow.count_delayed() > 0
    assert dead.count_fired()["error500"] == 3
    report = reader.make_report()
    assert [one.failures for one in report.locations] == [0, 3, 0]
    assert report.further_share <= 0.05
    assert report.reads == reads
    assert sum(one.requests for one in report.locations) == sum(world.count())


@pytest.mark.parametrize("is_checked", [False, True])
def test_a_read_that_stalls_is_sent_to_another_location(world: Mirrors, is_checked: bool):
    item = world.put("a", BODY, BODY, BODY)
    if is_checked:  # so that the copies have different ETags
        world.put_parts(1, "a", BODY)
    reader = MirroredReader(world.stores[:2], policy=MirrorPolicy(hedge_share=1.0))
    read_all(reader, item, 60, is_checked=is_checked)
    for _ in range(10):  # the request that stalls may itself be a hedge, which then loses
        world.proxies[0].fail_next(Fault.STALL, 1, "GET", stall_seconds=60)
        while world.proxies[0].count_pending():
            read_all(reader, item, 1, is_checked=is_checked)
        first, second = reader.make_report().locations
        if second.won_hedges:
            break
    assert second.won_hedges >= 1
    assert second.hedges - second.won_hedges <= first.served_bytes // 40_000
    assert first.failures == second.failures == 0


def test_a_location_that_failed_is_probed_in_the_background_and_used_again(
    world: Mirrors, caplog: pytest.LogCaptureFixture
):
    item = world.put("a", BODY, BODY, BODY)
    late = 0.0
    clock = lambda: time.monotonic() + late  # noqa: E731 - of the variable
    reader = MirroredReader(world.stores[:2], policy=LONG_REST, clock=clock)
    world.proxies[1].set_faults(Faults(error500=1.0))
    read_all(reader, item, 20)
    assert world.proxies[1].count_fired()["error500"] == 3
    assert "is not read for a while" in caplog.text
    late += 1001
    read_all(reader, item, 5)
    until(lambda: world.proxies[1].count_fired()["error500"] == 4)
    world.proxies[1].reset()
    late += 2001
    read_all(reader, item, 1)
    until(lambda: not reader._locations[1].breaker.is_open)
    read_all(reader, item, 6)
    assert world.count()[1] >= 3


def until(holds) -> None:
    """Wait for what a thread in the background does."""
    while not holds():
        time.sleep(0.01)


def test_all_locations_may_fail_for_a_while(world: Mirrors):
    item = world.put("a", BODY, BODY, BODY)
    for proxy in world.proxies:
        proxy.fail_next(Fault.ERROR500, 2)
    reader = MirroredReader(world.stores)
    read_all(reader, item, 1)
    assert [proxy.count_fired()["error500"] for proxy in world.proxies] != [0, 0, 0]


def test_a_read_that_waits_for_a_thread_ends_when_the_reader_is_closed(
    monkeypatch: pytest.MonkeyPatch,
):
    store = open_store("memory://closed")
    items = list[MirroredObject]()
    for key in ("a", "b"):
        put(store, key, BODY)
        items.append(MirroredObject(key, len(BODY), head(store, key).etag or "", 0))
    arrived, waiting, go_on = threading.Event(), threading.Event(), threading.Event()

    def read_late(*args: Any, **more: Any) -> bytes:
        arrived.set()
        go_on.wait(60)
        return read_range(*args, **more)

    reader, callers = MirroredReader([store], concurrency=1), DaemonThreadPool(2, "callers")
    submit = DaemonThreadPool.submit

    def submit_and_tell(pool: DaemonThreadPool, *args: Any, **more: Any) -> Any:
        future = submit(pool, *args, **more)
        if arrived.is_set() and pool is not callers:
            waiting.set()
        return future

    monkeypatch.setattr(copy_reader, "read_range", read_late)
    monkeypatch.setattr(DaemonThreadPool, "submit", submit_and_tell)
    first = callers.submit(reader.read_range, items[0], 0, 9)
    assert arrived.wait(60)
    second = callers.submit(reader.read_range, items[1], 0, 9)
    assert waiting.wait(60)
    reader.close()
    with pytest.raises(errors.UnavailableError, match="The reader was closed"):
        second.result(60)
    go_on.set()
    assert first.result(60) == BODY[:9]
    with pytest.raises(errors.UnavailableError, match="The reader was closed"):
        reader.read_range(items[0], 0, 9)


def test_an_error_has_the_reason_of_each_location(world: Mirrors):
    item = world.put("a", BODY, OTHER, None)
    short = [store.with_retry_timeout(timedelta(0)) for store in world.stores]
    world.proxies[0].set_faults(Faults(error500=1.0))
    with pytest.raises(errors.UnavailableError) as raised:
        MirroredReader(short).read_range(item, 0, 10)
    text = str(raised.value)
    assert "a cannot be read from any of 3 locations" in text
    assert "status code: 500" in text
    assert "There is no" in text
    assert "no equal ETag proves its copy" in text


def test_a_copy_with_another_etag_is_read_only_if_its_bytes_are_checked(world: Mirrors):
    item = world.put("a", BODY, None, None)
    world.put_parts(1, "a", BODY)
    world.reset()
    world.proxies[0].set_faults(Faults(error500=1.0))
    reader = MirroredReader([one.with_retry_timeout(timedelta(0)) for one in world.stores[:2]])
    assert reader.name_unproven(item) == []  # its ETag may be equal
    for _ in range(2):
        with pytest.raises(errors.UnavailableError, match="no equal ETag proves its copy"):
            reader.read_range(item, 0, 1000)
    assert [world.stores[1].url in name for name in reader.name_unproven(item)] == [True]
    assert world.count()[1] == 1  # it was refused, and is not asked again
    checked: list[bytes] = []
    for _ in range(3):
        assert reader.read_range(item, 0, 1000, check=checked.append) == BODY[:1000]
    assert checked == [BODY[:1000]] * 3
    operations = [each["operation"] for each in world.proxies[1].list_requests()]
    assert operations == ["GetObject"] * 4


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_copy_that_differs_is_dropped_aloud(
    world: Mirrors, is_listed: bool, caplog: pytest.LogCaptureFixture
):
    item = world.put("a", BODY, None, None)
    world.put_parts(1, "a", FIRST_CHANGED)
    reader = MirroredReader(world.stores[:2])
    if not is_listed:
        item = MirroredObject("a", item.size)
    check = partial(compare, BODY[:9000])
    for _ in range(6):
        assert reader.read_range(item, 0, 9000, check=check) == BODY[:9000]
    (warning,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    text = warning.getMessage()
    assert world.stores[1].url in text
    assert " is not used for a: the page does not have its checksum." in text
    first, second = reader.make_report().locations
    assert (first.differing, second.differing) == (0, 1)
    assert (first.served_bytes, second.served_bytes) == (6 * 9000, 0)


def test_a_copy_that_differs_in_a_range_is_left_out_when_this_range_is_read(world: Mirrors):
    item = world.put("a", BODY, None, None)
    world.put_parts(1, "a", OTHER)  # in its last byte
    reader = MirroredReader([world.stores[1], world.stores[0]])
    item = MirroredObject("a", item.size, item.etag, 1)
    read_all(reader, item, 20, is_checked=True)
    assert reader.make_report().locations[0].served_bytes > 0
    end = item.size - 5
    while not reader.make_report().locations[0].differing:  # the listed one may be asked first
        check = partial(compare, BODY[end:])
        assert reader.read_range(item, end, item.size, check=check) == BODY[end:]


def test_a_copy_of_another_size_is_no_copy(world: Mirrors, caplog: pytest.LogCaptureFixture):
    item = world.put("a", BODY, BODY + b"1", BODY[:-1])
    reader = MirroredReader(world.stores)
    for _ in range(9):
        check = partial(compare, BODY[:900])
        assert reader.read_range(item, 0, 900, check=check) == BODY[:900]
    for size in (len(BODY) + 1, len(BODY) - 1):
        assert f"a has {size:,} bytes, not {len(BODY):,}.\n" in caplog.text


def test_a_location_of_which_several_objects_differ_is_left_out(
    world: Mirrors, caplog: pytest.LogCaptureFixture
):
    items = [world.put(f"k{n}", BODY, OTHER, BODY) for n in range(4)]
    reader = MirroredReader(world.stores)
    for item in items:
        for _ in range(6):
            check = partial(compare, BODY[-9:])
            assert reader.read_range(item, len(BODY) - 9, len(BODY), check=check) == BODY[-9:]
    report = reader.make_report()
    assert [one.is_dropped for one in report.locations] == [False, True, False]
    assert report.locations[1].differing == 3
    assert report.locations[1].served_bytes == 0
    assert "is not used any more: 3 of its objects differ" in caplog.text


def test_a_copy_that_is_written_again_is_not_mixed_with_the_others(
    world: Mirrors, caplog: pytest.LogCaptureFixture
):
    item = world.put("a", BODY, BODY, BODY)
    reader = MirroredReader(world.stores)
    read_all(reader, item, 6)
    put(world.stores[1], "a", OTHER)
    put(world.stores[0], "a", OTHER)
    read_all(reader, item, 6)
    assert (
        caplog.text.count("is not used for a") == 1
    )  # the listed one; the other has no equal ETag
    put(world.stores[2], "a", OTHER)
    with pytest.raises(errors.ChangedError, match="cannot be read from any of 3"):
        read_all(reader, item, 1)


def test_missing_copies_are_counted_and_named_once(
    world: Mirrors, caplog: pytest.LogCaptureFixture
):
    items = [world.put(f"k{n}", BODY, None, BODY) for n in range(5)]
    reader = MirroredReader(world.stores)
    for item in items:
        read_all(reader, item, 6)
    report = reader.make_report()
    assert not report.locations[1].is_dropped
    assert report.locations[1].missing >= 3
    assert caplog.text.count("it has no such object") == 1


def test_a_folder_is_read_before_all_stores(world: Mirrors, tmp_path: Path):
    item = world.put("a", BODY, BODY, BODY)
    folder = open_store(tmp_path.as_uri())
    put(folder, "a", BODY)
    reader = MirroredReader([*world.stores, folder])
    read_all(reader, item, 20, is_checked=True)
    assert world.count() == [0, 0, 0]
    (tmp_path / "a").unlink()
    read_all(reader, item, 20, is_checked=True)
    assert sum(world.count()) > 0


@pytest.mark.parametrize("has_blocks", [True, False])
@pytest.mark.parametrize("algorithm", ["blake3", "sha256"])
def test_a_download_has_the_digest_although_a_location_differs(
    world: Mirrors, has_blocks: bool, algorithm: str, caplog: pytest.LogCaptureFixture
):
    body = random.Random(2).randbytes(20 * BLOCK_SIZE + 77)
    wrong = body[:-1] + bytes([body[-1] ^ 1])
    world.put("a", wrong, body, body)
    blocks = hash_blocks(body)
    digest = (
        combine_blocks(blocks) if algorithm == "blake3" else f"sha256:{sha256(body).hexdigest()}"
    )
    known = blocks if has_blocks and algorithm == "blake3" else b""
    item = MirroredObject("a", len(body), digest=digest, blocks=known)
    reader = MirroredReader(world.stores)
    with tempfile.TemporaryFile() as file:
        for _ in range(3):
            file.write(b"before")
            file.flush()
            download(reader, item, file.fileno())
            file.seek(0)
            assert file.read() == body
    report = reader.make_report()
    assert report.locations[0].differing <= 1


def test_a_download_that_no_location_has_is_an_error(world: Mirrors):
    world.put("a", OTHER, OTHER, None)
    item = MirroredObject("a", len(BODY), digest=compute_digest(BODY))
    with tempfile.TemporaryFile() as file, pytest.raises(errors.CorruptError, match="any"):
        download(MirroredReader(world.stores), item, file.fileno())


def test_a_download_that_fails_waits_for_no_read_and_writes_nothing_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store, body = open_store("memory://late"), bytes(9 * BLOCK_SIZE)  # two parts
    put(store, "a", body)
    item = MirroredObject("a", len(body), digest=compute_digest(body))
    begun, go_on = threading.Event(), threading.Event()

    def read_late(*args: Any, **more: Any) -> bytes:
        if args[2] == 0:
            assert begun.wait(60)
            raise errors.DeniedError("no rights")
        begun.set()
        assert go_on.wait(60)
        return read_range(*args, **more)

    monkeypatch.setattr(copy_reader, "read_range", read_late)
    with (tmp_path / "part").open("wb") as file, (tmp_path / "other").open("wb") as other:
        with pytest.raises(errors.DeniedError, match="no rights"):
            download(MirroredReader([store]), item, file.fileno())
        os.dup2(other.fileno(), file.fileno())  # another file has the descriptor of a closed one
        go_on.set()
        for thread in threading.enumerate():
            if thread.name.startswith(("download", "mirror-")):
                thread.join(60)
    assert (tmp_path / "other").read_bytes() == b""
