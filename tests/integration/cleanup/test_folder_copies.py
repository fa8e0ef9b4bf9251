"""Copies of folders: files that are no objects, links, names that no folder has, and races."""

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from millrace.checkpoints import (
    Saver,
    SaveSettings,
    iterate_checkpoints,
    read_checkpoint,
    verify,
)
from millrace.cleanup import (
    CopyOutcome,
    abort_uploads,
    compare_objects,
    copy_objects,
    copying,
    find_stale_uploads,
    object_copier,
)
from millrace.cli import main
from millrace.digest import compute_digest
from millrace.keys.checkpoints import CheckpointKeys
from millrace.storage import Stat, Store, StoreSpec, list_uploads, open_store, put, read
from tests.support.cleanup.material import BucketBuilder
from tests.support.fork_server import get_fork_server


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    return folder


def copy(source: Path, target: Path, *options: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["bucket", "copy", str(source), str(target), *options])
    return done.exit_code, done.output


def list_files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_files_that_no_store_of_a_folder_can_read_are_failures(source: Path, target: Path) -> None:
    (source / "a").mkdir()
    (source / "a/Invoice #12").write_bytes(b"bill")
    (source / "a/plain").write_bytes(b"plain")
    for options in (("--dry-run",), ()):
        code, shown = copy(source, target, *options)
        assert code == 1
        assert "a/Invoice #12: It was not copied: its name ends in # and digits" in shown
        assert "1 object could not be copied" in shown
    assert list_files(target) == {"a/plain": b"plain"}
    assert copy(source, target, "--match", "*plain")[0] == 0
    assert copy(source, target, "--exclude", "other", "--exclude", "*/Invoice*")[0] == 0


def test_the_metadata_of_checkpoints_is_copied_after_all_files(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(source.as_uri())
    steps = [CheckpointKeys("runs/one").make_folder_prefix(step) for step in (1, 2)]
    files = [f"{folder}parts/{number}" for folder in steps for number in range(50)]
    metadata = [f"{folder}metadata.json" for folder in steps]
    for key in (*files, *metadata, "zebra"):
        put(store, key, key.encode())
    missing: list[set[str]] = []
    copy_one = object_copier.ObjectCopier.copy

    def watch(copier: Any, stat: Stat, there: Stat | None) -> CopyOutcome:
        if stat.key in metadata:
            missing.append({*files, "zebra"} - list_files(target).keys())
        return copy_one(copier, stat, there)

    monkeypatch.setattr(object_copier.ObjectCopier, "copy", watch)
    copy_objects(store, open_store(target.as_uri()))
    assert missing == [set(), set()]
    assert list_files(target) == list_files(source)


@pytest.mark.parametrize(
    ("prefix", "folder"),
    [
        ("", ""),
        ("my data/", ""),
        ("", "my-job"),
        ("my data/", "my-job/checkpoints"),
        ("", "my-job/checkpoints/step_000000001"),
    ],
)
def test_a_checkpoint_is_copied_in_order_from_any_folder_above_or_within_it(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch, prefix: str, folder: str
) -> None:
    root = source / prefix
    BucketBuilder(open_store(root.as_uri())).put_checkpoint("my-job", 1, [b"one", b"two"])
    pin = root / CheckpointKeys("my-job").make_pin_key(1)
    pin.write_bytes(b"{}")  # its name sorts after the one of the metadata
    here = root / folder if folder else source
    metadata, part = (
        (root / key).relative_to(here).as_posix()
        for key in (
            CheckpointKeys("my-job").make_metadata_key(1),
            CheckpointKeys("my-job").make_part_key(1, compute_digest(b"two")),
        )
    )
    (target / part).parent.mkdir(parents=True, exist_ok=True)
    (target / part).write_bytes(b"TWO")
    order: list[str] = []
    copy_one = object_copier.ObjectCopier.copy

    def watch(copier: Any, stat: Stat, there: Stat | None) -> CopyOutcome:
        order.append(stat.key)
        return copy_one(copier, stat, there)

    monkeypatch.setattr(object_copier.ObjectCopier, "copy", watch)
    monkeypatch.setattr(copying, "_CONCURRENCY", 1)
    done = copy_objects(open_store(here.as_uri()), open_store(target.as_uri()))
    assert done.conflicts == [part]
    assert [(one.key, part in one.reason) for one in done.failures] == [(metadata, True)]
    assert not (target / metadata).exists()
    (target / part).unlink()
    order.clear()
    copy_objects(open_store(here.as_uri()), open_store(target.as_uri()))
    assert order[-1] == metadata
    assert (target / metadata).read_bytes() == (here / metadata).read_bytes()


def test_the_identity_of_an_installation_stays_also_in_a_copy_of_the_ledger_alone(
    source: Path, target: Path
) -> None:
    ledger = source / "_rentals"
    for key in ("installation.json", "fleet/owner.txt"):
        put(open_store(ledger.as_uri()), key, b"{}")
    code, shown = copy(ledger, target)
    assert (code, list_files(target)) == (0, {"fleet/owner.txt": b"{}"})
    assert "installation.json is not copied: it is the identity" in shown


@pytest.mark.parametrize("obstacle", ["folder", "other bytes"])
def test_a_checkpoint_stays_incomplete_until_all_of_its_files_are_copied(
    source: Path, target: Path, obstacle: str
) -> None:
    keys = CheckpointKeys("job")
    with Saver(open_store(source.as_uri()), "job", SaveSettings(part_bytes=4096)) as saver:
        for step in (1, 2):
            saver.save({"w": torch.full((2000,), step)}, step=step).result()
    part = read_checkpoint(open_store(source.as_uri()), "job", 2).parts[0]
    place = target / keys.make_part_key(2, part.digest)
    place.parent.mkdir(parents=True)
    if obstacle == "folder":
        place.mkdir()
    else:
        place.write_bytes(b"x" * part.size)
    for options in (("--dry-run",), ()):
        code, shown = copy(source, target, *options)
        assert code == 1
        assert (
            f"{keys.make_metadata_key(2)}: Its file {keys.make_part_key(2, part.digest)}" in shown
        )
    there = open_store(target.as_uri())
    assert [one.step for one in iterate_checkpoints(there, "job")] == [1]
    if obstacle == "folder":
        place.rmdir()
    assert copy(source, target, "--overwrite", "--yes")[0] == 0
    assert [verify(there, one) for one in iterate_checkpoints(there, "job")] == [{}, {}]


def test_partial_files_of_named_objects_fail_no_copy(source: Path, target: Path) -> None:
    (source / "words").mkdir()
    (source / "words/plan.json#1").write_bytes(b"half")
    (source / "plain").write_bytes(b"plain")
    for options in (("--dry-run",), ()):
        code, shown = copy(source, target, *options)
        assert code == 0, shown
        assert "words/plan.json#1 is not copied: it is a partial file" in shown
    assert list_files(target) == {"plain": b"plain"}


@pytest.mark.parametrize(
    "words", [["list"], ["usage"], ["clean", "--older-than", "1d", "--dry-run"]]
)
def test_every_listing_of_a_folder_names_files_that_it_lacks(
    source: Path, words: list[str]
) -> None:
    (source / "Invoice #12").write_bytes(b"bill")
    done = CliRunner().invoke(main, ["bucket", words[0], source.as_uri(), *words[1:]])
    assert done.exit_code == 0, done.output
    assert "Invoice #12 is left out: its name ends in # and digits" in done.output


KILLED = """
import os, signal, sys
from millrace.cleanup import copy_objects, object_copier
from millrace.storage import open_store

stream = object_copier.stream

def stream_and_kill(*arguments, **options):
    yield next(iter(stream(*arguments, **options)))
    os.kill(os.getpid(), signal.SIGKILL)

object_copier.stream = stream_and_kill
copy_objects(*map(open_store, sys.argv[1:]))
"""


@pytest.mark.parametrize("name", ["large", "ü" * 127 + "e"])
def test_a_partial_file_of_a_killed_copy_is_an_upload_and_removed_by_the_next_copy(
    source: Path, target: Path, name: str
) -> None:
    (source / name).write_bytes(b"x" * 100)
    for _ in range(2):
        child = get_fork_server("millrace.cleanup").start(KILLED, str(source), str(target))
        with child:
            assert child.wait() == -signal.SIGKILL
        assert len(list(target.iterdir())) == 1  # the second copy has removed that of the first
    spec = StoreSpec(url=target.as_uri())
    shown = CliRunner().invoke(main, ["bucket", "list", str(target)])
    assert shown.output == "0 objects, 0 bytes.\n"
    assert [name.startswith(one.key) for one in list_uploads(open_store(spec))] == [True]
    uploads = CliRunner().invoke(
        main, ["bucket", "abort-uploads", str(target), "--older-than", "0s", "--dry-run"]
    )
    assert "Would abort 1 upload" in uploads.output
    assert copy(source, target)[0] == 0
    assert list_files(target) == list_files(source)


def test_a_partial_file_of_a_live_copy_stays(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "a").write_bytes(b"x" * 100)
    stream = object_copier.stream

    def stream_beside_another_copy(store: Store, key: str, **options: Any) -> Any:
        monkeypatch.setattr(object_copier, "stream", stream)
        there = open_store(target.as_uri())
        assert copy_objects(store, there).objects[CopyOutcome.COPIED] == 1
        return stream(store, key, **options)

    monkeypatch.setattr(object_copier, "stream", stream_beside_another_copy)
    done = copy_objects(open_store(source.as_uri()), open_store(target.as_uri()))
    assert done.failures == []
    assert list_files(target) == list_files(source)


def test_abort_uploads_removes_partial_files_of_copies_and_no_others(
    source: Path, target: Path
) -> None:
    (source / "large").write_bytes(b"x" * 100)
    (target / "large#1").write_bytes(b"of another program")
    child = get_fork_server("millrace.cleanup").start(KILLED, str(source), str(target))
    with child:
        assert child.wait() == -signal.SIGKILL
    spec = StoreSpec(url=target.as_uri())
    found = find_stale_uploads(spec, older_than=timedelta(seconds=-60))
    assert [one.key for one in found.uploads] == ["large"]
    assert abort_uploads(spec, found).failures == ()
    assert list_files(target) == {"large#1": b"of another program"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_no_copy_is_written_through_a_link_below_the_destination(
    source: Path, target: Path, tmp_path: Path, overwrite: bool
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("x", "y"):
        (outside / name).write_bytes(b"precious")
    (source / "d").mkdir()
    (source / "d/x").write_bytes(b"backup")
    (source / "y").write_bytes(b"backup")
    (target / "d").symlink_to("../outside")
    (target / "y").symlink_to("../outside/y")
    here, there = open_store(source.as_uri()), open_store(target.as_uri())
    for done in (
        compare_objects(here, there.spec, overwrite=overwrite),
        copy_objects(here, there, overwrite=overwrite),
    ):
        assert [one.key for one in done.failures] == ["d/x"]
        assert "a folder of its path is a link" in done.failures[0].reason
        assert done.objects[CopyOutcome.CONFLICT] == (not overwrite)
    assert list_files(outside) == {"x": b"precious", "y": b"precious"}
    assert (target / "y").is_symlink() != overwrite  # a link itself may be replaced


def test_a_file_that_appears_during_a_copy_stays(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("same", "other", "folder"):
        (source / name).write_bytes(b"backup")
    stream = object_copier.stream

    def write_then_stream(store: Store, key: str, **options: Any) -> Any:
        yield from stream(store, key, **options)
        if key == "folder":
            (target / key).mkdir()
        elif not (target / key).exists():
            (target / key).write_bytes(b"backup" if key == "same" else b"precious")

    monkeypatch.setattr(object_copier, "stream", write_then_stream)
    done = copy_objects(open_store(source.as_uri()), open_store(target.as_uri()))
    assert done.conflicts == ["other"]
    assert [one.key for one in done.failures] == ["folder"]
    assert list_files(target) == {"same": b"backup", "other": b"precious"}


def test_where_there_are_no_hard_links_a_file_that_is_there_stays_too(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    (source / "a").write_bytes(b"backup")
    monkeypatch.setattr(os, "link", refuse)
    here, there = open_store(source.as_uri()), open_store(target.as_uri())
    assert copy_objects(here, there).objects[CopyOutcome.COPIED] == 1
    assert list_files(target) == {"a": b"backup"}
    (source / "b").write_bytes(b"backup")
    stream = object_copier.stream

    def write_then_stream(store: Store, key: str, **options: Any) -> Any:
        (target / "b").write_bytes(b"precious")
        return stream(store, key, **options)

    monkeypatch.setattr(object_copier, "stream", write_then_stream)
    assert copy_objects(here, there).conflicts == ["b"]
    assert list_files(target) == {"a": b"backup", "b": b"precious"}


@pytest.mark.parametrize("is_new", [True, False])
def test_a_dry_run_names_what_a_folder_cannot_have(
    target: Path, is_new: bool, request: pytest.FixtureRequest
) -> None:
    here = open_store("memory://keys-that-no-folder-has")
    good = ["both", "both!", "plain", "name " + "L" * 250]
    bad = ["both/child", "both/more/x", "Invoice #12", "L" * 256, f"{'ü' * 128}/x"]
    if is_new:
        target = target / "new"
    else:
        (target / "a").mkdir()
        (target / "file").write_bytes(b"precious")
        (target / "dangling").symlink_to("nowhere")
        bad += ["a", "file/x", "dangling"]
    for key in (*good, *bad):
        put(here, key, b"x")
    dry = compare_objects(here, StoreSpec(url=target.as_uri()))
    assert {one.key for one in dry.failures} == set(bad)
    assert dry.objects[CopyOutcome.MISSING] == len(good)
    assert target.exists() != is_new
    done = copy_objects(here, open_store(target.as_uri()))
    assert {one.key for one in done.failures} == set(bad)
    assert done.objects[CopyOutcome.COPIED] == len(good)
    assert {key: read(open_store(target.as_uri()), key) for key in good} == dict.fromkeys(
        good, b"x"
    )
    again = copy_objects(here, open_store(target.as_uri()))
    assert (again.failed, again.objects[CopyOutcome.EQUAL]) == (len(bad), len(good))


def test_stores_that_overlap_through_a_link_are_refused(source: Path, tmp_path: Path) -> None:
    (source / "a").write_bytes(b"x")
    (tmp_path / "alias").symlink_to(source)
    for there in (source / "sub", tmp_path / "alias/sub", tmp_path / "alias", tmp_path):
        for options in (("--dry-run",), ()):
            code, shown = copy(source, there, *options)
            assert (code, "overlap" in shown) == (2, True)
    assert list_files(source) == {"a": b"x"}
    assert list(source.iterdir()) == [source / "a"]


def test_links_and_pipes_of_the_source_are_named(source: Path, target: Path) -> None:
    (source / "folder").mkdir()
    (source / "folder/a").write_bytes(b"x")
    (source / "to folder").symlink_to("folder")
    (source / "to file").symlink_to("folder/a")
    (source / "folder/nowhere").symlink_to("absent")
    os.mkfifo(source / "pipe")
    code, shown = copy(source, target)
    assert (code, list_files(target)) == (0, {"folder/a": b"x", "to file": b"x"})
    assert "folder/nowhere is not copied: it is a link that leads nowhere." in shown
    assert "pipe is not copied: it is a pipe, a socket or a device." in shown
    assert "to folder is not copied: it is a link to a folder." in shown


def test_a_source_that_cannot_be_read_makes_no_folder(tmp_path: Path, rgw, bucket: str) -> None:
    settings = tmp_path / "source.yaml"
    settings.write_text(
        f"store:\n  url: s3://{bucket}\n  endpoint: {rgw.endpoint}\n  credentials:\n"
        "    access_key_id: nobody\n    secret_access_key: wrong\n"
    )
    code, _ = copy(settings, tmp_path / "new")
    assert code != 0
    assert not (tmp_path / "new").exists()
