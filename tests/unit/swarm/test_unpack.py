"""An archive becomes the tree that was packed, or is refused; nothing else is ever touched."""

import contextlib
import gzip
import io
import os
import random
import re
import stat
import struct
import tarfile
import tempfile
import time
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import ArchiveError, ConfigurationError, UnavailableError
from millrace.swarm.archives.unpack import (
    CONTENT_NAME,
    SINGLE_FILE_METHODS,
    Unpacking,
    UnpackLimits,
    UnpackResult,
    detect,
    unpack,
)
from tests.support.examples import scale_examples

TARS = [Unpacking.TAR, Unpacking.TAR_GZ, Unpacking.TAR_ZST]
ARCHIVES = [m for m in Unpacking if m is not Unpacking.AUTO and m not in SINGLE_FILE_METHODS]
LIMITS = UnpackLimits(bytes=1 << 20, members=100)


class Trickle:
    """A reader that gives a few bytes at a time, as a network does."""

    def __init__(self, data, seed=0, most=2000):
        self._data, self._random, self._most = io.BytesIO(data), random.Random(seed), most

    def read(self, size):
        return self._data.read(min(size, self._random.randint(1, self._most)))


class Endless:
    """A reader that repeats a block, and counts what it gave."""

    def __init__(self, begin, block):
        self._begin, self._block, self.given = begin, block, 0

    def read(self, size):
        data, self._begin = self._begin or self._block, b""
        self.given += len(data)
        assert len(data) <= size
        return data


def member(name, data=b"", **told):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in told.items():
        setattr(info, key, value)
    return info, data


def symlink(name, target):
    return member(name, type=tarfile.SYMTYPE, linkname=target)


def hardlink(name, target):
    return member(name, type=tarfile.LNKTYPE, linkname=target)


def folder(name, **told):
    return member(name, type=tarfile.DIRTYPE, **told)


def tar_of(*members, end=True):
    """A tar, its headers as told: `tarfile.open` would tidy names up."""
    found = b"".join(
        info.tobuf(tarfile.PAX_FORMAT) + data + bytes(-len(data) % 512) for info, data in members
    )
    return found + bytes(1024) * end


def raw_header(name, kind=b"0", size=0):
    """A ustar header with whatever bytes as its name."""
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, size
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT)[:512])
    block[:100] = name.ljust(100, b"\0")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def with_checksums(tar):
    """A tar that was damaged so that its headers still are valid."""
    tar = bytearray(tar)
    for at in range(0, len(tar) - 511, 512):
        if tar[at + 257 : at + 262] == b"ustar":
            tar[at + 148 : at + 156] = b" " * 8
            tar[at + 148 : at + 156] = b"%06o\0 " % sum(tar[at : at + 512])
    return bytes(tar)


def zip_of(*members, **told):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data, mode in members:
            info = zipfile.ZipInfo(name)
            info.filename = name  # not tidied up
            info.external_attr = mode << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            for key, value in told.items():
                setattr(info, key, value)
            file.writestr(info, data)
    return buffer.getvalue()


def packed(tar, method):
    if method in {Unpacking.TAR_GZ, Unpacking.GZ}:
        return gzip.compress(tar)
    if method in {Unpacking.TAR_ZST, Unpacking.ZST}:
        return zstandard.ZstdCompressor(write_checksum=True).compress(tar)
    return tar


def reader_of(data, method, seed=0):
    return io.BytesIO(data) if method is Unpacking.ZIP else Trickle(data, seed)


def tree_of(root):
    """All that is below a folder: path → what it is."""
    found = {}
    for path in sorted(root.rglob("*")):
        name, info = str(path.relative_to(root)), path.lstat()
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()))
        elif path.is_dir():
            found[name] = ("folder",)
        else:
            found[name] = ("file", path.read_bytes(), bool(info.st_mode & 0o100))
    return found


@pytest.fixture
def into(tmp_path):
    """A folder to unpack into; after the test, all beside it is as it was."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"secret")
    os.utime(tmp_path / "outside" / "secret", (1, 1))
    (tmp_path / "x").write_bytes(b"x")
    before = outside(tmp_path)
    path = tmp_path / "into"
    path.mkdir()
    yield path
    assert outside(tmp_path) == before


def outside(root):
    found = {}
    for path in sorted(root.rglob("*")):
        if (root / "into") not in [path, *path.parents]:
            info = path.lstat()
            what = (info.st_mode, info.st_uid, info.st_nlink, info.st_mtime_ns, info.st_ino)
            # A folder's times and links change with what is in it: its listing says as much.
            found[str(path)] = what[:2] if path.is_dir() else (*what, path.read_bytes())
    return found


def unpack_tar(tar, into, *, method=Unpacking.TAR, limits=LIMITS, **told):
    return unpack(Trickle(packed(tar, method)), method, into, limits=limits, **told)


def refused(tar, into, words, **told):
    with pytest.raises(ArchiveError, match=words) as caught:
        unpack_tar(tar, into, **told)
    return str(caught.value)


PARTS = st.text(
    st.characters(exclude_characters="/\\\0", exclude_categories=["Cs"]), min_size=1, max_size=12
).filter(lambda part: part not in {".", ".."})
TREES = st.dictionaries(
    st.lists(PARTS, min_size=1, max_size=4).map(tuple),
    st.one_of(st.none(), st.tuples(st.binary(max_size=3000), st.booleans())),
    max_size=8,
)


@settings(deadline=None, max_examples=scale_examples(60))
@given(
    tree=TREES,
    method=st.sampled_from(ARCHIVES),
    headers=st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
    seed=st.integers(0, 1000),
)
def test_the_tree_that_was_packed_is_unpacked(tree, method, headers, seed):
    with tempfile.TemporaryDirectory() as name:
        packed_from, into = Path(name, "from"), Path(name, "into")
        packed_from.mkdir()
        into.mkdir()
        for parts, what in tree.items():
            path = packed_from.joinpath(*parts)
            if any(above.is_file() for above in [path, *path.parents]) or path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if what is None:
                path.mkdir()
            else:
                path.write_bytes(what[0])
                path.chmod(0o755 if what[1] else 0o644)
        buffer = io.BytesIO()
        if method is Unpacking.ZIP:
            with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
                for path in sorted(packed_from.rglob("*")):
                    file.write(path, path.relative_to(packed_from))
        else:
            with tarfile.open(fileobj=buffer, mode="w", format=headers) as file:
                file.add(packed_from, ".")
        data = packed(buffer.getvalue(), method)
        done = unpack(reader_of(data, method, seed), method, into, limits=LIMITS)
        found = tree_of(packed_from)
        assert tree_of(into) == found
        files = [what[1] for what in found.values() if what[0] == "file"]
        assert done == UnpackResult(len(files), sum(map(len, files)))


class Watched:
    """Gives an archive piece by piece, each only once what the one before holds is on the disk."""

    def __init__(self, pieces, into):
        self._pieces, self._into, self._wanted = iter(pieces), into, None
        self.seen = []

    def read(self, size):
        if self._wanted is not None:
            path, data = self._wanted
            assert (self._into / path).read_bytes() == data
            self.seen.append(path)
        piece, self._wanted = next(self._pieces, (b"", None))
        assert len(piece) <= size
        return piece


@pytest.mark.parametrize("method", TARS)
def test_a_member_is_on_the_disk_before_the_next_has_arrived(into, method):
    members = [member(f"d/{i}", random.Random(i).randbytes(5000)) for i in range(5)]
    if method is Unpacking.TAR_GZ:
        encoder = zlib.compressobj(wbits=31)
        flush, end = zlib.Z_SYNC_FLUSH, encoder.flush
    elif method is Unpacking.TAR_ZST:
        encoder = zstandard.ZstdCompressor().compressobj()
        flush, end = zstandard.COMPRESSOBJ_FLUSH_BLOCK, encoder.flush
    pieces = []
    for info, data in members:
        piece = tar_of((info, data), end=False)
        if method is not Unpacking.TAR:
            piece = encoder.compress(piece) + encoder.flush(flush)
        pieces.append((piece, (info.name, data)))
    tail = bytes(1024)
    pieces.append((tail if method is Unpacking.TAR else encoder.compress(tail) + end(), None))
    watched = Watched(pieces, into)
    assert unpack(watched, method, into, limits=LIMITS) == UnpackResult(5, 25_000)
    assert watched.seen == [f"d/{i}" for i in range(5)]


@pytest.mark.parametrize("method", ARCHIVES)
def test_an_archive_is_read_from_a_path_too(into, tmp_path, method):
    path = into.parent / "into.archive"
    if method is Unpacking.ZIP:
        path.write_bytes(zip_of(("a/b", b"b", 0o100755)))
    else:
        path.write_bytes(packed(tar_of(member("a/b", b"b", mode=0o755)), method))
    assert unpack(path, method, into, limits=LIMITS) == UnpackResult(1, 1)
    assert tree_of(into) == {"a": ("folder",), "a/b": ("file", b"b", True)}
    path.unlink()


@pytest.mark.parametrize("method", ARCHIVES)
def test_an_archive_without_members_is_an_empty_folder(into, method):
    data = zip_of() if method is Unpacking.ZIP else packed(tar_of(), method)
    assert unpack(reader_of(data, method), method, into, limits=LIMITS) == UnpackResult(0, 0)
    assert tree_of(into) == {}


def test_an_archive_is_read_to_its_last_byte(into):
    data = gzip.compress(tar_of(member("a", b"a")) + bytes(100_000)) + bytes(512)
    reader = Trickle(data)
    unpack(reader, Unpacking.TAR_GZ, into, limits=LIMITS)
    assert reader.read(1) == b""


@pytest.mark.parametrize("method", [Unpacking.TAR_GZ, Unpacking.TAR_ZST])
def test_frames_one_after_another_are_one_archive(into, method):
    tar = tar_of(*(member(f"{i}", bytes([i]) * 1000) for i in range(5)))
    data = b"".join(packed(tar[at : at + 700], method) for at in range(0, len(tar), 700))
    if method is Unpacking.TAR_ZST:
        data = struct.pack("<II", 0x184D2A50, 3) + b"abc" + data  # a frame that is skipped
    assert unpack(Trickle(data), method, into, limits=LIMITS) == UnpackResult(5, 5000)


NAMES = {
    "../x": "'..' in its name",
    "a/../../x": "'..' in its name",
    "a/..": "'..' in its name",
    "..": "'..' in its name",
    "/etc/x": "absolute",
    "//x": "absolute",
    "a\\..\\x": "backslash",
    "": "without a name",
    ".": "with the name of a folder",
    "./": "with the name of a folder",
    "a/.": "with the name of a folder",
    "n" * 256: "too long",
    "/".join(["n" * 100] * 30): "too long",
    "/".join("n" * 65): "more than 64 folders",
}


@pytest.mark.parametrize(
    ("name", "method"),
    [(name, Unpacking.TAR) for name in NAMES]
    # In a zip, what ends in a slash is a folder; and zipfile writes no empty name.
    + [(name, Unpacking.ZIP) for name in NAMES if name not in {"", "./"}],
)
def test_a_name_that_leads_out_or_is_odd_is_refused(into, name, method):
    if method is Unpacking.ZIP:
        data = zip_of((name, b"bad", 0o100644))
    else:
        data = tar_of(member("good", b"good"), member(name, b"bad", pax_headers={"path": name}))
    with pytest.raises(ArchiveError, match=NAMES[name]):
        unpack(reader_of(data, method), method, into, limits=LIMITS)
    assert set(tree_of(into)) <= {"good"}


def test_a_name_of_bytes_that_are_no_text_is_kept(into):
    unpack_tar(raw_header(b"caf\xe9") + bytes(1024), into)
    assert [os.fsencode(path.name) for path in into.iterdir()] == [b"caf\xe9"]


def test_a_zips_name_is_unicode_also_where_it_does_not_say_so(into):
    # As Info-ZIP and macOS write it; the other is what MS-DOS wrote.
    data = zip_of(("XXXX", b"", 0o100644), ("YY", b"", 0o100644))
    data = data.replace(b"XXXX", "aüb".encode()).replace(b"YY", b"\x81b")
    unpack(io.BytesIO(data), Unpacking.ZIP, into, limits=LIMITS)
    assert set(tree_of(into)) == {"aüb", "üb"}


def test_nul_in_a_name_is_refused(into):
    refused(tar_of(member("a\0b", pax_headers={"path": "a\0b"})), into, "NUL")
    body = b"a\0../../x\0"
    gnu = raw_header(b"././@LongLink", b"L", len(body)) + body.ljust(512, b"\0")
    refused(gnu + raw_header(b"x") + bytes(1024), into, "NUL|'..'")
    data = zip_of(("aXb", b"", 0o100644)).replace(b"aXb", b"a\0b")
    with pytest.raises(ArchiveError):
        unpack(io.BytesIO(data), Unpacking.ZIP, into, limits=LIMITS)
    assert tree_of(into) == {}


def test_names_as_tar_writes_them_are_taken(into):
    members = [folder("./"), folder("./a/"), member("./a//b", b"1"), member("a/./c", b"2")]
    assert unpack_tar(tar_of(*members), into) == UnpackResult(2, 2)
    assert set(tree_of(into)) == {"a", "a/b", "a/c"}


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("l", "/etc/passwd"),
        ("l", "../outside"),
        ("l", ".."),
        ("a/b/l", "../../.."),
        ("a/l", "../../into/../outside/secret"),
        ("l", "a/../../outside"),
        ("l", "a/b/.."),  # b may be a link
        ("l", "..\\outside"),
        ("l", ""),
        ("l", "t" * 3000),
    ],
)
@pytest.mark.parametrize("method", [Unpacking.TAR, Unpacking.ZIP])
def test_a_link_that_may_lead_out_is_refused(into, name, target, method):
    if method is Unpacking.ZIP:
        data = zip_of((name, target, stat.S_IFLNK | 0o777))
    else:
        data = tar_of(symlink(name, target))
    with pytest.raises(ArchiveError, match="link"):
        unpack(reader_of(data, method), method, into, limits=LIMITS)
    assert tree_of(into) == {}


def test_a_chain_of_links_that_leads_out_is_refused(into):
    # Each is inside, read by its letters; together they are not (CVE-2025-4517's shape).
    chain = [symlink("a/b/up", "../.."), symlink("out", "a/b/up/..")]
    assert "'out'" in refused(tar_of(*chain), into, "lead out")
    assert tree_of(into) == {}


STEPS = st.lists(st.sampled_from(["a", "b", "l", "m", "..", "."]), min_size=1, max_size=5)


@settings(deadline=None, max_examples=scale_examples(300))
@given(st.lists(st.tuples(st.sampled_from(["link", "hard", "file", "folder"]), STEPS, STEPS)))
def test_no_mixture_of_links_and_files_leads_out(told):
    """Check that unpacked members, also those before a refusal, are inside of the folder."""
    made = []
    for kind, steps, onwards in told:
        name = "/".join(step for step in steps if step not in {"..", "."}) or "a"
        target = "/".join(onwards)
        if kind == "link":
            made.append(symlink(name, target))
        elif kind == "hard":
            made.append(hardlink(name, target))
        else:
            made.append(folder(name) if kind == "folder" else member(name, b"data"))
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory).resolve()
        into = root / "into"
        into.mkdir()
        with contextlib.suppress(ArchiveError):
            unpack_tar(tar_of(*made), into)
        check_inside(root)


def check_inside(root):
    """Check that a folder has only the folder ``into``, and that nothing there leads out."""
    into = root / "into"
    assert list(root.iterdir()) == [into]
    for path in into.rglob("*"):
        try:
            end = path.resolve()
        except (OSError, RuntimeError):  # leads round and round
            continue
        assert end.is_relative_to(into)


@pytest.mark.parametrize(
    "later",
    [
        member("l/x", b"bad"),
        member("l", b"bad"),
        folder("l"),
        folder("l/x/y"),
        symlink("l/x", "y"),
        hardlink("l", "a"),
        hardlink("l/x", "a"),
    ],
)
def test_nothing_is_written_through_a_link_of_the_archive(into, later):
    refused(tar_of(member("a", b"a"), symlink("l", "d"), folder("d"), later), into, "'l")
    assert set(tree_of(into)) == {"a", "d"}


def test_nothing_is_written_through_a_link_that_is_made_at_the_end(into):
    # The folder is there before the link of its name: the link is refused, not followed.
    message = refused(tar_of(member("l/x", b"x"), symlink("l", "d")), into, "twice")
    assert "'l'" in message
    assert set(tree_of(into)) == {"l", "l/x"}


def test_links_inside_are_made(into):
    done = unpack_tar(
        tar_of(
            symlink("snapshots/1/model", "../../blobs/abc"),
            symlink("snapshots/latest", "1"),
            symlink("self", "."),
            symlink("nowhere", "not/there"),
            symlink("again", "x"),
            symlink("again", "blobs"),
            member("blobs/abc", b"weights"),
        ),
        into,
    )
    assert done == UnpackResult(6, 7)
    assert (into / "snapshots/latest/model").read_bytes() == b"weights"
    assert (into / "self").readlink() == Path()
    assert (into / "again/abc").is_file()


def test_what_is_packed_twice_is_unpacked_once(into):
    """`tar -cf x.tar f f l l`: the second time, as links to themselves."""
    made = [member("f", b"data"), hardlink("f", "f"), symlink("l", "f"), hardlink("l", "l")]
    assert unpack_tar(tar_of(*made), into) == UnpackResult(2, 4)
    assert (into / "l").read_bytes() == b"data"


def test_links_in_a_zip_are_made(into):
    data = zip_of(("l", b"d/f", stat.S_IFLNK | 0o777), ("d/f", b"data", 0o100644))
    assert unpack(io.BytesIO(data), Unpacking.ZIP, into, limits=LIMITS) == UnpackResult(2, 4)
    assert (into / "l").read_bytes() == b"data"


def test_hard_links_are_to_earlier_files(into):
    members = [member("a", b"data"), hardlink("d/b", "a"), hardlink("d/b", "d/b")]
    links = [symlink("d/s", "../a"), hardlink("e/s", "d/s")]
    assert unpack_tar(tar_of(*members, *links), into) == UnpackResult(4, 4)
    assert (into / "a").samefile(into / "d/b")
    assert (into / "e/s").readlink() == Path("../a")


def test_hard_links_are_copied_where_the_file_system_has_none(into, monkeypatch):
    def none(*_, **__):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", none)
    made = [member("a", b"data", mode=0o755, mtime=99), hardlink("d/b", "a")]
    assert unpack_tar(tar_of(*made), into) == UnpackResult(2, 8)
    assert (into / "d/b").read_bytes() == b"data"
    assert (into / "d/b").stat().st_mtime == 99
    assert (into / "d/b").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    "target",
    ["../outside/secret", "/etc/passwd", "a/../../x", "later", "d", "d/none", "none/a", "a/b", ""],
)
def test_a_hard_link_to_anything_else_is_refused(into, target):
    members = [member("a", b"a"), folder("d"), hardlink("l", target), member("later")]
    refused(tar_of(*members), into, "'l'")
    assert set(tree_of(into)) == {"a", "d"}


@pytest.mark.parametrize("kind", [b"3", b"4", b"6", b"S", b"D", b"M", b"V", b"Z", b"\xff"])
def test_what_is_neither_file_nor_folder_nor_link_is_refused(into, kind):
    refused(raw_header(b"odd", kind) + bytes(1024), into, "'odd' is neither")
    assert tree_of(into) == {}


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK])
def test_devices_in_a_zip_are_refused(into, kind):
    with pytest.raises(ArchiveError, match="'odd' is neither"):
        unpack(io.BytesIO(zip_of(("odd", b"", kind))), Unpacking.ZIP, into, limits=LIMITS)


@pytest.mark.parametrize("version", ["GNU.sparse.map", "GNU.sparse.major"])
def test_sparse_files_are_refused(into, version):
    refused(tar_of(member("a", b"1", pax_headers={version: "1"})), into, "--sparse")


@pytest.mark.parametrize("mode", [0o7777, 0o4755, 0o2711, 0o1777])
@pytest.mark.parametrize("method", [Unpacking.TAR, Unpacking.ZIP])
def test_no_bit_that_gives_rights_is_kept(into, mode, method):
    if method is Unpacking.ZIP:
        data = zip_of(("d/", b"", stat.S_IFDIR | mode), ("d/f", b"", stat.S_IFREG | mode))
    else:
        data = tar_of(folder("d", mode=mode), member("d/f", mode=mode, uid=12345, gid=12345))
    unpack(reader_of(data, method), method, into, limits=LIMITS)
    for path in [into / "d", into / "d/f"]:
        assert stat.S_IMODE(path.stat().st_mode) == mode & 0o755 | 0o600
        assert path.stat().st_uid == os.getuid()


def test_permissions_may_be_chosen(into):
    members = [member("a/run", mode=0o700), member("a/data", mode=0o444), folder("b", mode=0)]
    unpack_tar(tar_of(*members), into, mode=0o640)
    modes = {str(p.relative_to(into)): p.stat().st_mode & 0o7777 for p in into.rglob("*")}
    assert modes == {"a": 0o750, "a/run": 0o750, "a/data": 0o640, "b": 0o750}


def test_a_folder_may_be_filled_though_the_archive_says_it_is_read_only(into):
    unpack_tar(tar_of(folder("a", mode=0o500), member("a/b", b"", mode=0)), into)
    assert (into / "a").stat().st_mode & 0o777 == 0o700
    assert (into / "a/b").stat().st_mode & 0o777 == 0o600


def test_everything_is_given_to_the_owner(into):
    members = [member("a/b", b"", uid=7), symlink("a/l", "b")]
    unpack_tar(tar_of(*members), into, owner=(1234, 1235))
    for path in into.rglob("*"):
        assert (path.lstat().st_uid, path.lstat().st_gid) == (1234, 1235)


def test_times_are_kept_where_they_are_sane(into):
    now = time.time()
    times = {"a": 0, "b": 1_000_000_000.25, "far": now + 10**9, "before": -1, "never": 2**70}
    members = [member(name, mtime=mtime) for name, mtime in times.items()]
    members += [member("nan", pax_headers={"mtime": "nan"})]
    unpack_tar(tar_of(*members), into)
    found = {path.name: path.stat().st_mtime for path in into.iterdir()}
    assert (found.pop("a"), found.pop("b")) == (0, 1_000_000_000.25)
    assert all(now - 10 < mtime < now + 100 for mtime in found.values())


def test_times_of_a_zip_are_utc_on_every_machine(into, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    data = zip_of(("a", b"", 0o100644), date_time=(2001, 9, 9, 1, 46, 40))
    unpack(io.BytesIO(data), Unpacking.ZIP, into, limits=LIMITS)
    monkeypatch.undo()
    time.tzset()
    assert (into / "a").stat().st_mtime == 1_000_000_000


def test_a_later_file_replaces_an_earlier_one(into):
    members = [member("a", b"old", mode=0o755), hardlink("b", "a"), member("./a", b"new!")]
    assert unpack_tar(tar_of(*members, folder("d"), folder("d/")), into) == UnpackResult(2, 7)
    assert (into / "a").read_bytes() == b"new!"
    assert (into / "b").read_bytes() == b"old"


@pytest.mark.parametrize(
    "members",
    [
        [member("a", b"1"), folder("a")],
        [member("a", b"1"), member("a/b")],
        [folder("a"), member("a", b"1")],
        [folder("a"), member("b"), hardlink("a", "b")],
        [member("a", b"1"), symlink("a", "b")],
        [folder("a"), symlink("a", "b")],
    ],
)
def test_what_is_there_twice_as_different_things_is_refused(into, members):
    refused(tar_of(*members), into, "'a(/b)?' (is in the archive twice|lies below)")


def zeros(size):
    """A tar.gz of a file of zeros, compressed as it is made."""
    encoder = zlib.compressobj(9, wbits=31)
    found = [encoder.compress(raw_header(b"zeros", size=size))]
    found += [encoder.compress(bytes(1 << 20)) for _ in range(size >> 20)]
    return b"".join([*found, encoder.compress(bytes(1024)), encoder.flush()])


def size_of(root):
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def peak_of(function):
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_bomb_of_zeros_ends_at_the_limit(into):
    bomb = zeros(100 << 20)
    assert len(bomb) < 200_000

    def run():
        with pytest.raises(ArchiveError, match="more than 1048576 bytes"):
            unpack(io.BytesIO(bomb), Unpacking.TAR_GZ, into, limits=LIMITS)

    assert peak_of(run) < 40 << 20
    assert size_of(into) <= LIMITS.bytes


def test_a_bomb_of_zstd_eats_no_memory(into):
    header = raw_header(b"zeros", size=1 << 32)
    encoder = zstandard.ZstdCompressor(1).compressobj()
    bomb = [encoder.compress(header)] + [encoder.compress(bytes(1 << 22)) for _ in range(100)]
    data = b"".join([*bomb, encoder.flush()])
    assert len(data) < 60_000

    def run():
        with pytest.raises(ArchiveError, match="more than 1048576 bytes"):
            unpack(io.BytesIO(data), Unpacking.TAR_ZST, into, limits=LIMITS)

    assert peak_of(run) < 150 << 20


def test_a_zstd_window_that_memory_would_not_hold_is_refused(into):
    parameters = zstandard.ZstdCompressionParameters(window_log=28)
    encoder = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = encoder.compress(tar_of()) + encoder.flush()
    with pytest.raises(ArchiveError, match="memory"):
        unpack(io.BytesIO(data), Unpacking.TAR_ZST, into, limits=LIMITS)


@pytest.mark.parametrize("count", [100, 101])
@pytest.mark.parametrize("method", [Unpacking.TAR, Unpacking.ZIP])
def test_members_are_counted(into, count, method):
    if method is Unpacking.ZIP:
        data = zip_of(*((f"{i}", b"", 0o100644) for i in range(count)))
    else:
        data = tar_of(*(folder(f"{i}") for i in range(count)))
    reader = reader_of(data, method)
    if count <= LIMITS.members:
        unpack(reader, method, into, limits=LIMITS)
    else:
        with pytest.raises(ArchiveError, match="more than 100 members"):
            unpack(reader, method, into, limits=LIMITS)
        assert len(tree_of(into)) <= LIMITS.members


def test_implied_folders_are_counted(into):
    members = [member("/".join([str(i), *"abcdefghi", "f"])) for i in range(50)]
    refused(tar_of(*members), into, "more than 100 members")
    assert len(tree_of(into)) <= LIMITS.members


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K"])
def test_an_extended_header_without_end_eats_no_memory(into, kind):
    reader = Endless(raw_header(b"long", kind, 1 << 32), bytes(1 << 19))
    with pytest.raises(ArchiveError, match="extended header of"):
        unpack(reader, Unpacking.TAR, into, limits=LIMITS)
    assert reader.given < 1 << 20


@pytest.mark.parametrize("kind", [b"x", b"g"])
def test_extended_headers_one_after_another_end(into, kind):
    block = raw_header(b"long", kind, 13) + b"13 comment=a\n".ljust(512, b"\0")
    with pytest.raises(ArchiveError, match="extended headers in a row"):
        unpack(Endless(b"", block), Unpacking.TAR, into, limits=LIMITS)


@pytest.mark.parametrize(
    "record",
    [
        b"x",
        b"5 a=b\n",
        b"999 path=a\n",
        b"0 path=a\n",
        b"-1 path=a\n",
        b"10 path=a!",
        b" a=b\n",
        b"12345678901\n",
    ],
)
def test_a_damaged_extended_header_is_refused(into, record):
    header = raw_header(b"pax", b"x", len(record)) + record.ljust(512, b"\0")
    refused(header + raw_header(b"x") + bytes(1024), into, "extended header")


@pytest.mark.parametrize("size", ["-1", "x", "", "1e3", "9" * 30])
def test_a_size_that_is_none_is_refused(into, size):
    refused(tar_of(member("a", b"1", pax_headers={"size": size})), into, "'a' has a malformed size")


def test_zeros_without_end_after_a_tars_end_are_refused(into):
    with pytest.raises(ArchiveError, match="after the end of the tar"):
        unpack(Endless(tar_of(), bytes(1 << 20)), Unpacking.TAR, into, limits=LIMITS)


def test_a_second_tar_behind_the_first_is_not_passed_over(into):
    refused(tar_of(member("a")) + tar_of(member("b")), into, "several tars")


@pytest.mark.parametrize("method", TARS)
def test_a_tar_cut_anywhere_is_refused_or_whole(into, method):
    data = packed(tar_of(member("a", b"1" * 700), member("b/c", os.urandom(600))), method)
    whole = len(data) - 512 if method is Unpacking.TAR else len(data)
    for cut in {*range(0, len(data), 37), len(data) - 1}:
        with tempfile.TemporaryDirectory(dir=into) as name:
            if cut >= whole:
                assert unpack(Trickle(data[:cut]), method, Path(name), limits=LIMITS).files == 2
                continue
            with pytest.raises(ArchiveError, match="is cut off"):
                unpack(Trickle(data[:cut]), method, Path(name), limits=LIMITS)


@pytest.mark.parametrize("method", ARCHIVES)
def test_a_damaged_archive_is_refused_or_unpacked_inside(into, method):
    chance = random.Random(5)
    if method is Unpacking.ZIP:
        data = zip_of(("a", b"1" * 700, 0o100755), ("b/c", chance.randbytes(600), 0o100644))
    else:
        links = [symlink("d/l", "../" + "a" * 120), hardlink("h", "a" * 120)]
        data = packed(tar_of(member("a" * 120, b"1" * 700, mtime=1.5), *links), method)
    refused_rounds = 0
    for i in range(600):
        damaged = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.2:
            del damaged[chance.randrange(len(data)) :]
        if method is Unpacking.TAR and i % 2:
            at = chance.choice([found.start() for found in re.finditer(rb"(?<!a)aaa|d/l", data)])
            damaged[at : at + 3] = b"../"  # at the beginning of a name, or in a link's target
            damaged = with_checksums(damaged)
        with tempfile.TemporaryDirectory(dir=into) as name:
            root = Path(name).resolve()
            (root / "into").mkdir()
            try:
                unpack(reader_of(bytes(damaged), method), method, root / "into", limits=LIMITS)
            except ArchiveError:
                refused_rounds += 1
            check_inside(root)
    assert 0 < refused_rounds < 600


@pytest.mark.parametrize("method", ARCHIVES)
@pytest.mark.parametrize("size", [0, 1, 511, 5000])
def test_garbage_is_refused(into, method, size):
    data = random.Random(size).randbytes(size)
    with pytest.raises(ArchiveError):
        unpack(reader_of(data, method), method, into, limits=LIMITS)
    assert tree_of(into) == {}


@pytest.mark.parametrize("method", sorted(SINGLE_FILE_METHODS))
@pytest.mark.parametrize("size", [0, 1, 511, 5000])
def test_what_is_not_compressed_is_refused(into, method, size):
    data = random.Random(size).randbytes(size)
    with pytest.raises(ArchiveError):
        unpack(Trickle(data), method, into, limits=LIMITS)
    assert size_of(into) == 0


@pytest.mark.parametrize("method", sorted(SINGLE_FILE_METHODS))
@pytest.mark.parametrize("size", [512, 10240, 100_000])
def test_compressed_zeros_are_a_file_and_no_tar_without_members(method, size):
    assert detect("disk.img", packed(bytes(size) + b"end", method)[:8192]) is method
    assert detect("disk.img", packed(bytes(size), method)) is method


@pytest.mark.parametrize("method", sorted(SINGLE_FILE_METHODS))
def test_a_compressed_file_cut_anywhere_is_refused(into, method):
    data = packed(b"text " * 40 + random.Random(1).randbytes(300), method)
    for cut in range(len(data)):
        with (
            tempfile.TemporaryDirectory(dir=into) as name,
            pytest.raises(ArchiveError, match="is cut off"),
        ):
            unpack(Trickle(data[:cut]), method, Path(name), limits=LIMITS)


@pytest.mark.parametrize("method", sorted(SINGLE_FILE_METHODS))
def test_a_compressed_file_with_a_wrong_checksum_is_refused(into, method):
    data = packed(random.Random(2).randbytes(5000), method)
    for at in range(1, 5 if method is Unpacking.ZST else 9):  # XXH64; CRC-32 and size
        damaged = bytearray(data)
        damaged[-at] ^= 1
        with (
            tempfile.TemporaryDirectory(dir=into) as name,
            pytest.raises(ArchiveError, match="is damaged"),
        ):
            unpack(Trickle(bytes(damaged)), method, Path(name), limits=LIMITS)


@pytest.mark.parametrize("method", sorted(SINGLE_FILE_METHODS))
def test_a_damaged_compressed_file_is_refused_or_becomes_what_it_was(into, method):
    chance = random.Random(3)
    body = chance.randbytes(400) + b"1" * 400
    data = packed(body, method)
    refusals = 0
    for _ in range(600):
        damaged = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(data))] = chance.randrange(256)
        with tempfile.TemporaryDirectory(dir=into) as name:
            try:
                unpack(Trickle(bytes(damaged)), method, Path(name), limits=LIMITS)
            except ArchiveError:
                refusals += 1
            else:
                assert tree_of(Path(name)) == {CONTENT_NAME: ("file", body, False)}
    assert refusals > 500


@pytest.mark.parametrize("method", sorted(SINGLE_FILE_METHODS))
def test_what_follows_a_compressed_file_is_refused_but_for_zeros(into, method):
    data = packed(b"body", method)
    unpack(Trickle(data + bytes(700)), method, into, limits=LIMITS)
    assert tree_of(into) == {CONTENT_NAME: ("file", b"body", False)}
    with (
        tempfile.TemporaryDirectory(dir=into) as name,
        pytest.raises(ArchiveError, match="is damaged"),
    ):
        unpack(Trickle(data + b"more than eight bytes"), method, Path(name), limits=LIMITS)


@pytest.mark.parametrize("method", sorted(SINGLE_FILE_METHODS))
def test_compressed_files_one_after_another_are_one(into, method):
    unpack(Trickle(packed(b"a", method) + packed(b"b", method)), method, into, limits=LIMITS)
    assert tree_of(into) == {CONTENT_NAME: ("file", b"ab", False)}


@pytest.mark.parametrize("method", sorted(SINGLE_FILE_METHODS))
def test_a_bomb_that_is_one_file_ends_at_the_limit(into, method):
    encoder = (
        zlib.compressobj(9, wbits=31)
        if method is Unpacking.GZ
        else zstandard.ZstdCompressor(1).compressobj()
    )
    data = b"".join([*(encoder.compress(bytes(1 << 20)) for _ in range(100)), encoder.flush()])
    assert len(data) < 200_000

    def run():
        with pytest.raises(ArchiveError, match="more than 1048576 bytes"):
            unpack(io.BytesIO(data), method, into, limits=LIMITS)

    assert peak_of(run) < 150 << 20
    assert size_of(into) <= LIMITS.bytes


def test_a_zip_that_says_less_than_it_holds_is_refused(into):
    data = bytearray(zip_of(("a", bytes(1 << 19), 0o100644)))
    for signature, at in [(b"PK\x01\x02", 24), (b"PK\x03\x04", 22)]:
        struct.pack_into("<I", data, data.index(signature) + at, 10)
    with pytest.raises(ArchiveError, match="damaged"):
        unpack(io.BytesIO(data), Unpacking.ZIP, into, limits=LIMITS)
    assert size_of(into) <= 10


def test_a_zip_that_says_more_than_it_holds_is_refused(into):
    data = bytearray(zip_of(("a", b"1234567", 0o100644)))
    for signature, at in [(b"PK\x01\x02", 24), (b"PK\x03\x04", 22)]:
        struct.pack_into("<I", data, data.index(signature) + at, 1000)
    with pytest.raises(ArchiveError, match=r"damaged|another length"):
        unpack(io.BytesIO(data), Unpacking.ZIP, into, limits=LIMITS)


def test_a_bomb_of_a_zip_ends_at_the_limit(into):
    data = zip_of(("a", bytes(1 << 19), 0o100644), ("b", bytes(100 << 20), 0o100644))
    with pytest.raises(ArchiveError, match="more than 1048576 bytes"):
        unpack(io.BytesIO(data), Unpacking.ZIP, into, limits=LIMITS)
    assert size_of(into) <= LIMITS.bytes


def test_members_of_a_zip_that_share_bytes_are_refused(into):
    data = zip_of(("a", b"a" * 1000, 0o100644), ("b", b"b" * 1000, 0o100644))
    at = data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 1)
    damaged = bytearray(data)
    struct.pack_into("<I", damaged, at + 42, 0)  # b is where a is
    with pytest.raises(ArchiveError, match="overlap"):
        unpack(io.BytesIO(damaged), Unpacking.ZIP, into, limits=LIMITS)
    assert set(tree_of(into)) <= {"a"}


def test_a_zip_of_more_entries_than_it_says_is_counted_before_memory_is_eaten(into):
    data = bytearray(zip_of(*((f"{i}", b"", 0o100644) for i in range(1000))))
    struct.pack_into("<HH", data, len(data) - 22 + 8, 1, 1)
    with pytest.raises(ArchiveError, match="more than 100 members"):
        unpack(io.BytesIO(data), Unpacking.ZIP, into, limits=LIMITS)
    assert tree_of(into) == {}


def test_an_encrypted_zip_is_refused(into):
    data = bytearray(zip_of(("a", b"1", 0o100644)))
    for signature, at in [(b"PK\x01\x02", 8), (b"PK\x03\x04", 6)]:
        data[data.index(signature) + at] |= 1
    with pytest.raises(ArchiveError, match="'a' is encrypted"):
        unpack(io.BytesIO(data), Unpacking.ZIP, into, limits=LIMITS)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_whose_memory_has_no_bound_is_refused(into, method):
    data = zip_of(("a", bytes(1000), 0o100644), compress_type=method)
    with pytest.raises(ArchiveError, match="other than by deflate"):
        unpack(io.BytesIO(data), Unpacking.ZIP, into, limits=LIMITS)


def test_a_zip_needs_to_be_whole(into):
    with pytest.raises(ConfigurationError, match="give the path"):
        unpack(Trickle(zip_of()), Unpacking.ZIP, into, limits=LIMITS)


def test_an_error_of_the_network_is_not_the_archives(into):
    class Broken:
        def read(self, _):
            raise UnavailableError("The store is away.")

    for method in TARS:
        with pytest.raises(UnavailableError):
            unpack(Broken(), method, into, limits=LIMITS)


def test_no_descriptor_is_left_open(into):
    before = len(list(Path("/proc/self/fd").iterdir()))
    deep = member("/".join("abcdefgh") + "/f", b"data")
    with pytest.raises(ArchiveError):
        unpack_tar(tar_of(deep, hardlink("l", "a/b/c/f")), into)
    (into / "second").mkdir()
    with pytest.raises(ArchiveError):
        unpack_tar(tar_of(deep, member("long", b"1" * 5000))[:4000], into / "second")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_folder_that_is_not_empty_is_not_unpacked_into(into):
    (into / "there").touch()
    with pytest.raises(ConfigurationError, match="not empty"):
        unpack_tar(tar_of(), into)


def test_how_to_unpack_is_decided_before(into):
    with pytest.raises(ConfigurationError, match="detect"):
        unpack(Trickle(tar_of()), Unpacking.AUTO, into, limits=LIMITS)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("a.tar", Unpacking.TAR),
        ("a/b.TAR", Unpacking.TAR),
        ("a.tar.gz", Unpacking.TAR_GZ),
        ("a.tgz", Unpacking.TAR_GZ),
        ("a.tar.zst", Unpacking.TAR_ZST),
        ("a.tzst", Unpacking.TAR_ZST),
        ("a.zip", Unpacking.ZIP),
    ],
)
def test_a_name_says_what_an_archive_is(name, method):
    assert detect(name, b"") is method


@pytest.mark.parametrize("method", ARCHIVES)
def test_where_the_name_does_not_say_the_content_does(method):
    tar = tar_of(member("a", b"a"))
    data = zip_of(("a", b"a", 0o100644)) if method is Unpacking.ZIP else packed(tar, method)
    assert detect("archive", data[:262]) is method


@pytest.mark.parametrize("head", [b"", b"P", b"hello" * 100, bytes(512)])
def test_what_is_no_archive_is_not_guessed(head):
    with pytest.raises(ConfigurationError, match=r"a\.bin is no archive.*tar\.zst"):
        detect("a.bin", head)


def test_an_empty_zip_is_known_by_its_content():
    assert detect("archive", zip_of()) is Unpacking.ZIP
