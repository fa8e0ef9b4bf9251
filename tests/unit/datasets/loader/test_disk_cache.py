"""Files on the disk of a node: bounded, verified, and not removed while they are read."""

import errno
import fcntl
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import get_context
from pathlib import Path

import pytest

from millrace import errors
from millrace.datasets.loader import disk_cache
from millrace.datasets.loader.disk_cache import DiskCache, LentFile
from millrace.digest import compute_digest

KB = 1000


def make(number: int, size: int = 10 * KB) -> bytes:
    return random.Random(number).randbytes(size)


class Source:
    """Bodies to fetch, and how often each was."""

    def __init__(self) -> None:
        self.fetched: list[str] = []

    def lend(self, cache: DiskCache, body: bytes) -> LentFile | None:
        digest = compute_digest(body)

        def download(file: int, _: Path | None) -> None:
            self.fetched.append(digest)
            os.pwrite(file, body, 0)

        return cache.lend(digest, len(body), download)


def read(lent: LentFile | None) -> bytes:
    assert lent is not None
    with lent:
        return lent.path.read_bytes()


@pytest.fixture
def source() -> Source:
    return Source()


def test_a_file_is_fetched_once_also_for_another_cache_in_the_folder(tmp_path, source):
    body = make(1)
    for _ in range(3):
        cache = DiskCache(tmp_path, 100 * KB)
        assert read(source.lend(cache, body)) == body
    assert len(source.fetched) == 1
    assert cache.held_bytes == len(body)


def test_the_files_that_were_used_last_are_kept(tmp_path, source):
    cache = DiskCache(tmp_path, 30 * KB)
    bodies = [make(n) for n in range(5)]
    for body in (*bodies[:3], bodies[0], *bodies[3:]):
        assert read(source.lend(cache, body)) == body
        assert cache.held_bytes <= 30 * KB
    assert len(source.fetched) == 5
    assert read(source.lend(cache, bodies[0])) == bodies[0]
    assert len(source.fetched) == 5
    assert read(source.lend(cache, bodies[1])) == bodies[1]
    assert len(source.fetched) == 6


def test_no_file_is_removed_while_it_is_lent(tmp_path, source, caplog):
    cache = DiskCache(tmp_path, 25 * KB)
    first, second = source.lend(cache, make(1)), source.lend(cache, make(2))
    assert source.lend(cache, make(3)) is None
    assert source.lend(cache, make(4)) is None
    assert caplog.text.count("are read without the cache") == 1
    assert "all files in it are in use" in caplog.text
    assert read(first) == make(1)
    assert read(source.lend(cache, make(3))) == make(3)
    assert read(second) == make(2)
    assert cache.held_bytes <= 25 * KB


@pytest.mark.parametrize("is_warmed", [False, True])
def test_no_process_waits_for_a_file_that_another_one_keeps(tmp_path, source, is_warmed):
    """Two trainings that keep each other's next files would wait for ever."""
    body, warmed = make(1), tmp_path / "warmed"
    warmed.write_bytes(body)
    kept: list[LentFile | None] = []

    def lend(cache: DiskCache) -> LentFile | None:
        if is_warmed:
            return cache.lend_from(warmed, compute_digest(body), len(body))
        return source.lend(cache, body)

    class LateCache(DiskCache):
        """A cache that finds no file, and locks the name after another process has fetched it."""

        def _hold(self, name: str, mode: int) -> AbstractContextManager[int]:
            if mode == fcntl.LOCK_EX:
                kept.append(lend(DiskCache(tmp_path / "cache", 100 * KB)))
                mode |= fcntl.LOCK_NB
            return super()._hold(name, mode)

    assert read(lend(LateCache(tmp_path / "cache", 100 * KB))) == body
    assert [read(one) for one in kept] == [body]
    assert len(source.fetched) == (not is_warmed)


def test_a_file_that_is_larger_than_the_cache_is_not_cached(tmp_path, source):
    cache = DiskCache(tmp_path, 5 * KB)
    assert source.lend(cache, make(1)) is None
    assert source.fetched == []
    assert list((tmp_path / "parts").iterdir()) == []


def test_a_lent_file_that_is_forgotten_is_free_again(tmp_path, source):
    cache = DiskCache(tmp_path, 10 * KB)
    assert source.lend(cache, make(1)) is not None
    assert read(source.lend(cache, make(2))) == make(2)


@pytest.mark.parametrize("damage", ["bytes", "size", "mark", "none"])
def test_a_torn_file_of_another_boot_is_fetched_again(tmp_path, source, damage, monkeypatch):
    """The time and the size of the file are those of the mark, as after a crash of the machine."""
    body = make(1)
    with DiskCache(tmp_path, 100 * KB).lend(
        compute_digest(body), len(body), lambda file, _: os.pwrite(file, body, 0)
    ) as lent:
        path = lent.path
    before = path.stat()
    if damage == "bytes":
        path.write_bytes(body[:5000] + bytes(5000))
    elif damage == "size":
        os.truncate(path, 5000)
    elif damage == "mark":
        (tmp_path / "locks" / path.name).write_bytes(b'{"boot": "')
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    monkeypatch.setattr(disk_cache, "_read_boot", lambda: "the next boot")
    assert read(source.lend(DiskCache(tmp_path, 100 * KB), body)) == body
    assert len(source.fetched) == (damage in {"bytes", "size"})


def test_a_file_that_was_changed_in_this_boot_is_fetched_again(tmp_path, source):
    cache, body = DiskCache(tmp_path, 100 * KB), make(1)
    lent = source.lend(cache, body)
    lent.path.write_bytes(bytes(len(body)))
    lent.close()
    assert read(source.lend(cache, body)) == body
    assert len(source.fetched) == 2


def test_a_damaged_file_stays_until_the_mended_one_has_its_name(tmp_path, source):
    cache, body = DiskCache(tmp_path, 100 * KB), make(1)
    damaged = body[:5000] + bytes(5000)
    kept = source.lend(cache, body)
    kept.path.write_bytes(damaged)
    found: list[bytes] = []
    digest = compute_digest(body)

    def fail(file: int, path: Path | None) -> None:
        found.append(path.read_bytes())
        os.pwrite(file, b"half", 0)
        raise errors.UnavailableError("no store answers")

    def mend(file: int, path: Path | None) -> None:
        found.append(path.read_bytes())
        os.pwrite(file, body, 0)

    with kept, kept.path.open("rb") as reader:
        with pytest.raises(errors.UnavailableError):
            cache.lend(digest, len(body), fail)
        assert cache.held_bytes == len(body)
        assert read(cache.lend(digest, len(body), mend)) == body
        assert found == [damaged, damaged]
        assert reader.read() == damaged  # a reader keeps the file that it has opened


def test_a_damaged_file_without_room_beside_it_is_fetched_as_a_whole(tmp_path, source, caplog):
    cache, body, other = DiskCache(tmp_path, 25 * KB), make(1), make(2)
    with source.lend(cache, other):
        source.lend(cache, body).close()
        (path,) = (one for one in (tmp_path / "files").iterdir() if one.read_bytes() == body)
        path.write_bytes(bytes(len(body)))

        def download(file: int, damaged: Path | None) -> None:
            assert damaged is None
            os.pwrite(file, body, 0)

        assert read(cache.lend(compute_digest(body), len(body), download)) == body
    assert cache.held_bytes == 20 * KB
    assert caplog.text == ""


def test_threads_that_want_one_file_fetch_it_once(tmp_path, source):
    cache, body = DiskCache(tmp_path, 100 * KB), make(1)
    found: list[bytes] = []
    barrier = threading.Barrier(8)

    def run() -> None:
        barrier.wait()
        found.append(read(source.lend(cache, body)))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [body] * 8
    assert len(source.fetched) == 1


def test_threads_with_more_files_than_fit_keep_the_bound(tmp_path, source):
    cache = DiskCache(tmp_path, 45 * KB)
    bodies = [make(n) for n in range(12)]
    faults: list[object] = []
    peaks: list[int] = []

    def run(seed: int) -> None:
        generator = random.Random(seed)
        for _ in range(40):
            body = generator.choice(bodies)
            lent = source.lend(cache, body)
            peaks.append(cache.held_bytes)
            if lent is not None and read(lent) != body:
                faults.append(seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert max(peaks) <= 45 * KB
    assert len(source.fetched) < 160


def test_an_error_of_the_download_leaves_nothing(tmp_path, source):
    cache, body = DiskCache(tmp_path, 100 * KB), make(1)

    def fail(file: int, _: Path | None) -> None:
        os.pwrite(file, b"half", 0)
        raise errors.UnavailableError("no store answers")

    with pytest.raises(errors.UnavailableError):
        cache.lend(compute_digest(body), len(body), fail)
    assert cache.held_bytes == 0
    assert read(source.lend(cache, body)) == body


@pytest.mark.parametrize("stage", ["reservation", "download"])
def test_a_full_disk_means_no_caching_and_one_warning(tmp_path, source, stage, monkeypatch, caplog):
    cache = DiskCache(tmp_path, 100 * KB)
    assert read(source.lend(cache, make(1))) == make(1)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if stage == "reservation":
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        for number in (2, 3):
            assert source.lend(cache, make(number)) is None
    else:
        for number in (2, 3):
            body = make(number)
            assert cache.lend(compute_digest(body), len(body), refuse) is None
    assert caplog.text.count("No space left on device") == 1
    assert list((tmp_path / "parts").iterdir()) == []
    monkeypatch.undo()
    assert read(source.lend(cache, make(2))) == make(2)


def test_a_file_of_a_warmed_folder_is_used_where_it_is(tmp_path, monkeypatch, caplog):
    body, hashed = make(1), []
    warmed = tmp_path / "warmed"
    warmed.mkdir()
    (warmed / "a").write_bytes(body)
    (warmed / "b").write_bytes(bytes(len(body)))
    compute = disk_cache.compute_file_digest

    def compute_digest_of(path: Path, *rest: object) -> str:
        hashed.append(path.name)
        return compute(path, *rest)

    monkeypatch.setattr(disk_cache, "compute_file_digest", compute_digest_of)
    digest = compute_digest(body)
    for _ in range(3):
        cache = DiskCache(tmp_path / "cache", 100 * KB)
        lent = cache.lend_from(warmed / "a", digest, len(body))
        assert lent.path == warmed / "a"
        assert read(lent) == body
    assert hashed == ["a"]
    for _ in range(3):
        assert cache.lend_from(warmed / "b", digest, len(body)) is None
        assert cache.lend_from(warmed / "c", digest, len(body)) is None
        assert cache.lend_from(warmed / "a", digest, len(body) + 1) is None
    assert hashed == ["a", "b"]
    assert caplog.text.count("is not used") == 1
    assert cache.held_bytes == 0
    assert (warmed / "b").exists()


def assert_no_lock_is_held(folder: Path) -> None:
    paths = [*(folder / "locks").iterdir(), *(folder / "files").iterdir(), folder / "lock"]
    assert len(paths) > 1
    for path in paths:
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_warmed_file_that_cannot_be_read_is_left_out_and_not_locked(tmp_path, source, caplog):
    warmed, body = tmp_path / "warmed", make(1)
    warmed.mkdir()  # a folder has a size, and no process can read it, also not that of root
    wanted = warmed, compute_digest(body), warmed.stat().st_size
    cache = DiskCache(tmp_path / "cache", 100 * KB)
    assert read(source.lend(cache, body)) == body
    for _ in range(2):
        assert cache.lend_from(*wanted) is None
        assert_no_lock_is_held(cache.folder)
    assert DiskCache(cache.folder, 100 * KB).lend_from(*wanted) is None
    messages = [one.getMessage() for one in caplog.records]
    assert len(messages) == 2  # one of each cache
    assert all(one.startswith(f"{warmed} cannot be read (Is a directory)") for one in messages)


def test_an_error_of_the_disk_leaves_no_lock(tmp_path, source, monkeypatch, caplog):
    cache, body = DiskCache(tmp_path / "cache", 100 * KB), make(1)
    (tmp_path / "warmed").write_bytes(body)
    wanted = tmp_path / "warmed", compute_digest(body), len(body)
    assert read(source.lend(cache, body)) == read(cache.lend_from(*wanted)) == body

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "utime", refuse)
    assert source.lend(cache, body) is None
    assert cache.lend_from(*wanted) is None
    assert_no_lock_is_held(cache.folder)
    assert caplog.text.count("Input/output error") == 1
    assert "Correct the folder or its permissions" in caplog.text
    assert "Make more room" not in caplog.text
    monkeypatch.undo()
    assert read(source.lend(cache, body)) == read(cache.lend_from(*wanted)) == body


def test_a_name_is_always_that_of_a_digest(tmp_path, source):
    with pytest.raises(ValueError, match="is not a blake3 digest"):
        DiskCache(tmp_path, KB).lend("blake3:../../x", 1, print)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(errors.ConfigurationError, match="cannot be made"):
        DiskCache(tmp_path / "file", KB)


def test_files_of_other_programs_in_the_folder_stay(tmp_path, source):
    """The folder may be that of a project, which has such folders of its own."""
    others = []
    for name in ("files", "parts"):
        (tmp_path / name / "folder").mkdir(parents=True)
        others += [tmp_path / name / "photo.jpg", tmp_path / name / "folder" / "notes"]
    for path in others:
        path.write_bytes(bytes(20 * KB))
    cache = DiskCache(tmp_path, 15 * KB)
    for number in (1, 2):
        assert read(source.lend(cache, make(number))) == make(number)
        assert cache.held_bytes == 10 * KB
    assert [path.stat().st_size for path in others] == [20 * KB] * 4


@contextmanager
def fork_child() -> Iterator[None]:
    """Fork a process that lives until the end of the context."""
    context = get_context("fork")
    begun = context.Event()

    def live() -> None:
        begun.set()
        time.sleep(600)

    child = context.Process(target=live)
    child.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        child.kill()
        child.join()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_that_is_forked_during_a_download_holds_no_lock(tmp_path, source):
    """Such as a worker of a `DataLoader`, while its parent reads samples of its own."""
    cache, body = DiskCache(tmp_path, 100 * KB), make(1)
    begun, go_on = threading.Event(), threading.Event()

    def fail(*_: object) -> None:
        begun.set()
        assert go_on.wait(60)
        raise errors.UnavailableError("no store answers")

    def run() -> None:
        with pytest.raises(errors.UnavailableError):
            cache.lend(compute_digest(body), len(body), fail)

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(60)
    with fork_child():
        go_on.set()
        thread.join()
        assert_no_lock_is_held(tmp_path)
        assert read(source.lend(cache, body)) == body


def test_a_file_that_is_lent_during_a_fork_is_free_when_it_is_closed(tmp_path, source):
    cache = DiskCache(tmp_path, 10 * KB)
    lent = source.lend(cache, make(1))
    with fork_child():
        assert source.lend(cache, make(2)) is None
        lent.close()
        assert_no_lock_is_held(tmp_path)
        assert read(source.lend(cache, make(2))) == make(2)
