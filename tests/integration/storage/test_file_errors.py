"""Errors of a folder that another try cannot mend are raised at once, with the path."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millrace import errors
from millrace.storage import (
    Store,
    abort_upload,
    copy,
    create,
    delete,
    exists,
    head,
    list_folders,
    list_objects,
    list_uploads,
    measure_upload,
    open_store,
    open_writer,
    put,
    read,
    read_and_hash,
)

NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that belongs to a user without rights, as whom the test runs."""
    with tempfile.TemporaryDirectory() as name:
        is_root = os.geteuid() == 0
        if is_root:
            os.chown(name, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        try:
            yield Path(name)
        finally:
            if is_root:
                os.seteuid(0)


def write_stream(store: Store, key: str) -> None:
    with open_writer(store, key) as writer:
        writer.write(b"2")


READS: dict[str, Callable[[Store, str], object]] = {
    "head": head,
    "read": read,
    "hash": lambda store, key: read_and_hash(store, key, [memoryview(bytearray(1))], size=1),
}
WRITES: dict[str, Callable[[Store, str], object]] = {
    "put": lambda store, key: put(store, key, b"2"),
    "create": lambda store, key: create(store, key, b"2"),
    "write": write_stream,
    "copy": lambda store, key: copy(store, "whole", key),
}


@pytest.mark.parametrize("verb", READS)
@pytest.mark.parametrize("key", ["secret", "closed/a", "loop", "n" * 300])
def test_a_file_that_cannot_be_read_is_named_at_once(folder: Path, verb: str, key: str) -> None:
    (folder / "secret").write_bytes(b"1")
    (folder / "secret").chmod(0)
    (folder / "closed").mkdir(mode=0)
    (folder / "loop").symlink_to("loop")
    with pytest.raises(errors.ConfigurationError, match=f"{key[:200]}.*(Correct|Choose|Remove)"):
        READS[verb](open_store(str(folder)), key)


@pytest.mark.parametrize("verb", WRITES)
def test_a_folder_that_cannot_be_written_is_named_at_once(folder: Path, verb: str) -> None:
    (folder / "whole").write_bytes(b"1")
    (folder / "fixed").mkdir(mode=0o555)
    for key in ("fixed/a", "fixed/below/a"):
        with pytest.raises(errors.DeniedError, match=r"/fixed/\w+: Permission denied\. Correct"):
            WRITES[verb](open_store(str(folder)), key)
    assert list((folder / "fixed").iterdir()) == []


def test_a_file_that_cannot_be_deleted_is_a_failure(folder: Path) -> None:
    (folder / "fixed").mkdir()
    (folder / "fixed" / "a").write_bytes(b"1")
    (folder / "b").write_bytes(b"1")
    (folder / "fixed").chmod(0o555)
    store = open_store(str(folder))
    (failure,) = delete(store, ["fixed/a", "b"])
    assert failure.key == "fixed/a"
    assert "Permission denied" in failure.reason
    assert not exists(store, "b")


def test_a_stream_that_fails_removes_its_own_partial_file_and_no_other(folder: Path) -> None:
    store = open_store(str(folder))
    (folder / "invoice#12").write_bytes(b"of a person")

    def fail() -> None:
        with open_writer(store, "invoice") as writer:
            writer.write(b"1")
            raise ValueError("enough")

    with open_writer(store, "invoice") as other:
        other.write(b"2")
        with pytest.raises(ValueError, match="enough"):
            fail()
    assert read(store, "invoice") == b"2"
    assert sorted(one.name for one in folder.iterdir()) == ["invoice", "invoice#12"]


def test_uploads_that_end_during_their_listing_are_left_out(folder: Path) -> None:
    """Other processes rename and remove partial files, and remove empty folders."""
    for name in ("a", "b", "c"):
        (folder / name).mkdir()
        for number in range(3):
            (folder / name / f"k#{number}").write_bytes(b"1")
    (folder / "#1").write_bytes(b"without a key")
    store = open_store(str(folder))
    uploads = list_uploads(store)
    first = next(uploads)
    for file in sorted(folder.rglob("k#*")):
        file.unlink()
    for subfolder in (folder / name for name in ("a", "b", "c")):
        subfolder.rmdir()
    assert list(uploads) == []
    assert measure_upload(store, first) == 0
    abort_upload(store, first)


def test_a_file_where_a_key_needs_a_folder_is_no_object(folder: Path) -> None:
    store = open_store(str(folder))
    put(store, "whole", b"1")
    put(store, "below/a", b"1")
    for key in ("whole/a", "below"):
        assert not exists(store, key)
        assert delete(store, [key]) == []
        for verb in ("put", "write"):
            with pytest.raises(errors.ConfigurationError, match="cannot be the beginning of other"):
                WRITES[verb](store, key)
    assert read(store, "whole") == read(store, "below/a") == b"1"


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda folder: (folder / "t\tb").write_bytes(b"1"), r"inner/t\\tb'"),
        (lambda folder: (folder / "n\nl").write_bytes(b"1"), r"inner/n\\nl'"),
        (lambda folder: Path(os.fsdecode(bytes(folder) + b"/a\xffb")).touch(), r"inner/a%FFb'"),
        (lambda folder: (folder / "up").symlink_to(".."), "inner/up.*Remove the link"),
        (lambda folder: (folder / "loop").symlink_to("loop"), "inner/loop.*Remove the link"),
        (lambda folder: (folder / "closed").mkdir(mode=0), "inner/closed: Permission denied"),
    ],
    ids=["tab", "line break", "no UTF-8", "link to a folder above", "link to itself", "closed"],
)
def test_what_no_listing_can_have_is_named_at_once(
    folder: Path, make: Callable[[Path], object], named: str
) -> None:
    inner = folder / "inner"
    inner.mkdir()
    make(inner)
    store = open_store(str(folder))
    with pytest.raises(errors.ConfigurationError, match=named):
        list(list_objects(store))
    assert list_folders(store) == ["inner"]
