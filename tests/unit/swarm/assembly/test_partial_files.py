"""Partial files that an earlier run left, or that another program removes."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from millrace import errors
from millrace.swarm import targets
from millrace.swarm.cache_index import read_identity, read_index
from millrace.swarm.catalogue import File, build_catalogue
from millrace.swarm.targets import Targets
from tests.oracle import compute_blake3
from tests.unit.swarm.assembly.test_user_files import MIB, OLD, USERS, Run, make_file, prewarm

open_file = os.open


def find_partial(root: Path) -> Path:
    return next((root / "model").glob(".*.part"))


def open_as_user(path: Path, flags: int, *mode: int) -> int:
    """Open a file as a user who is not root does."""
    wants_write = flags & (os.O_WRONLY | os.O_RDWR)
    if wants_write and os.path.lexists(path) and not path.stat().st_mode & 0o200:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return open_file(path, flags, *mode)


@pytest.mark.parametrize("mode", [0o444, 0o000])
def test_a_run_continues_after_a_kill_when_the_file_had_its_final_mode(tmp_path, monkeypatch, mode):
    file = make_file(mode=mode)
    run = Run(tmp_path, {file: OLD})
    run.assembler.open()
    run.write(0)
    run.assembler.close()
    find_partial(tmp_path).chmod(mode)
    monkeypatch.setattr(targets.os, "open", open_as_user)
    run = Run(tmp_path, {file: OLD})
    assert [number for number, _ in run.assembler.open()] == [0]
    run.write(1)
    run.assembler.close()
    assert run.finished == [0]
    assert (tmp_path / "model" / "m").stat().st_mode & 0o777 == mode


def allocate_without_system_call(descriptor: int, start: int, size: int) -> None:
    """Read existing blocks and extend the file, as glibc does if a file system cannot allocate."""
    for at in range(start, os.fstat(descriptor).st_size, MIB):
        os.pread(descriptor, 1, at)
    os.ftruncate(descriptor, max(os.fstat(descriptor).st_size, start + size))


def test_a_run_continues_on_a_file_system_that_cannot_allocate(tmp_path, monkeypatch):
    monkeypatch.setattr(targets.os, "posix_fallocate", allocate_without_system_call)
    for number in range(2):
        run = Run(tmp_path, {make_file(): OLD})
        run.assembler.open()
        run.write(number)
        run.assembler.close()
    assert run.finished == [0]


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Targets:
    """Return 9 targets on a disk that is mounted below the root, and one on that of the root."""
    files = [File(f"mount/{n}", MIB, "etag", f"s3://b/{n}") for n in range(9)]
    files.append(File("a", MIB, "etag", "s3://b/a"))
    monkeypatch.setattr(targets, "_find_disk", lambda folder: (folder, folder.name == "mount"))
    return Targets(tmp_path, build_catalogue(files, MIB))


def test_a_disk_below_the_root_is_synced(tmp_path, mounted, monkeypatch):
    synced: list[Path] = []
    for name in ("sync", "sync_file_system"):
        monkeypatch.setattr(targets, name, synced.append)
    mounted.sync_partials(mounted.by_file)
    assert synced == [mounted.by_file[9].partial, tmp_path / "mount"]


@pytest.mark.parametrize("full", ["mount", ""])
def test_each_disk_needs_space_for_its_files_only(tmp_path, mounted, monkeypatch, full):
    needed = {tmp_path: MIB, tmp_path / "mount": 9 * MIB}

    def measure(folder: Path) -> SimpleNamespace:
        lacks = folder == tmp_path / full
        return SimpleNamespace(free=needed[folder] + targets.SPARE_BYTES + 10 - 11 * lacks)

    monkeypatch.setattr(targets.shutil, "disk_usage", measure)
    with pytest.raises(errors.NoSpaceError, match=f"{tmp_path / full} has "):
        mounted.check_space(mounted.by_file)
    assert mounted.measure_spare_room(mounted.by_file) == -1
    full = "neither"
    mounted.check_space(mounted.by_file)
    assert mounted.measure_spare_room(mounted.by_file) == 10


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (errno.ENOSPC, errors.NoSpaceError),
        (errno.EDQUOT, errors.NoSpaceError),
        (errno.EIO, OSError),
    ],
)
def test_only_a_full_disk_is_reported_as_one(tmp_path, monkeypatch, code, error):
    def refuse(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(targets.os, "posix_fallocate", refuse)
    with pytest.raises(error, match=os.strerror(code)):
        prewarm(tmp_path, make_file())


def test_a_partial_file_that_another_program_removes_is_not_created_again(tmp_path):
    run = Run(tmp_path, {make_file(digest=compute_blake3(OLD)): OLD})
    run.assembler.open()
    run.write(0)
    find_partial(tmp_path).unlink()
    with pytest.raises(errors.CorruptError, match="was removed"):
        run.write(1)
    run.assembler.close()
    assert run.finished == []
    assert not (tmp_path / "model" / "m").exists()


WRONG = USERS[:MIB] + OLD[MIB:]
LINKED = make_file(links=("model/n",))


def read_model(root: Path) -> dict[str, bytes]:
    """Return the files with final names."""
    files = (root / "model").iterdir()
    return {file.name: file.read_bytes() for file in files if not file.name.startswith(".")}


@pytest.fixture(params=["links", "copies"])
def further(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further destinations are hard links, or copies where links are impossible."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    if request.param == "copies":
        monkeypatch.setattr(targets.os, "link", refuse)


@pytest.mark.usefixtures("further")
@pytest.mark.parametrize("later", [LINKED, make_file(), make_file(path="model/n")])
def test_a_dropped_piece_takes_all_final_names_and_is_not_used_after_a_kill(tmp_path, later):
    run = Run(tmp_path, {LINKED: WRONG})
    run.assembler.open()
    run.write_all()
    run.assembler.stop()
    assert read_model(tmp_path) == {"m": WRONG, "n": WRONG}
    run.assembler.drop(0)
    assert read_model(tmp_path) == {}
    run.assembler.close()
    run = Run(tmp_path, {later: OLD})
    assert [number for number, _ in run.assembler.open()] == [1]
    run.write(0)
    run.assembler.close()
    names = {Path(name).name for name in (later.path, *later.links)}
    assert read_model(tmp_path) == dict.fromkeys(names, OLD)
    assert run.faults == []


def test_the_index_has_a_digest_that_comes_later_for_each_destination(tmp_path):
    digest = compute_blake3(OLD)
    for known in ("", digest, ""):
        assert prewarm(tmp_path, make_file(links=LINKED.links, digest=known)).finished == [0]
        newest = read_index(tmp_path / ".millrace" / "files.jsonl")["model/n"][-1]
        assert newest.seen == read_identity(tmp_path / "model" / "n")
    assert newest.digest == digest


@pytest.mark.usefixtures("further")
@pytest.mark.parametrize("saved", [False, True])
def test_a_dropped_piece_of_a_recognised_file_takes_the_names_that_no_user_took(tmp_path, saved):
    prewarm(tmp_path, LINKED)
    run = Run(tmp_path, {LINKED: OLD})
    run.assembler.open()
    if saved:
        (tmp_path / "saved").write_bytes(USERS)
        (tmp_path / "saved").rename(tmp_path / "model" / "n")
    run.assembler.drop(0)
    assert read_model(tmp_path) == ({"n": USERS} if saved else {})
    run.write(0)
    run.assembler.close()
    assert read_model(tmp_path) == {"m": OLD, "n": USERS if saved else OLD}
    assert ["during the run" in str(each) for each in run.faults] == [True] * saved


@pytest.mark.usefixtures("further")
@pytest.mark.parametrize("is_linked", [False, True])
def test_a_piece_that_is_dropped_while_the_links_are_made(tmp_path, monkeypatch, is_linked):
    run, link = Run(tmp_path, {LINKED: WRONG}), targets.Targets.link

    def drop(*arguments) -> None:
        if is_linked:
            link(*arguments)
        run.assembler.drop(0)
        if not is_linked:
            link(*arguments)

    monkeypatch.setattr(targets.Targets, "link", drop)
    run.assembler.open()
    run.write_all()
    run.assembler.close()
    assert read_model(tmp_path) == {}
    assert run.faults == run.finished == []
