"""Archives that nodes unpack while they arrive."""

import gzip
import hashlib
import io
import os
import secrets
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
import zstandard

from benchmarks.rig.store import FaultKind, RigFault
from millrace import errors
from millrace.swarm import Request, Unpacking, preview, prewarm
from tests.support.swarm.prewarms import MIB, below, fill, mounted, tarred
from tests.support.swarm.swarms import FLIP_ONCE, make_settings, read_files, start_agent, stop


def test_an_archive_is_unpacked_and_kept_and_known_again(store, nodes):
    members = {"a.txt": b"a", "b/c.bin": os.urandom(2 * MIB)}
    store.put("archives/data.tar.gz", tarred(members))
    request = Request(key="archives/data.tar.gz", unpack=Unpacking.AUTO, mode=0o600)
    settings = make_settings(store, nodes, requests=[request])
    assert [node.reason for node in prewarm(settings).nodes] == [""] * 3
    wanted = {f"archives/data/{name}": body for name, body in members.items()}
    for node in nodes:
        found = read_files(node.root)
        assert found.pop("archives/data.tar.gz")
        assert found == wanted
        assert (node.root / "archives/data/a.txt").stat().st_mode & 0o777 == 0o600
    store.reset()
    assert all(node.ready for node in prewarm(settings).nodes)
    assert store.read_counts().bytes < 1000  # its head tells what kind it is


def test_an_unpacked_folder_is_mended_and_replaced_while_all_of_it_is_ours(store, nodes):
    def wanted(name: str) -> dict[str, bytes]:
        return {"d/a.txt": name.encode(), "d/b/c.txt": b"c", "d.tar": tarred(members(name), "w")}

    def members(name: str) -> dict[str, bytes]:
        return {"a.txt": name.encode(), "b/c.txt": b"c"}

    settings = make_settings(
        store, nodes[:1], requests=[Request(key="d.tar", unpack=Unpacking.AUTO)], min_node_share=1.0
    )
    root = nodes[0].root
    store.put("d.tar", tarred(members("old"), "w"))
    prewarm(settings)
    (root / "d/mine.txt").write_text("mine")
    prewarm(settings)  # what lies beside its members does no harm
    (root / "d/mine.txt").unlink()
    (root / "d/b/c.txt").unlink()
    prewarm(settings)
    assert read_files(root) == wanted("old")
    shutil.rmtree(root / "d")
    (root / "d").mkdir()
    prewarm(settings)
    assert read_files(root) == wanted("old")
    store.put("d.tar", tarred(members("new"), "w"))
    prewarm(settings)
    assert read_files(root) == wanted("new")
    assert not list(root.glob(".*.replaced"))


@pytest.mark.parametrize("change", ["added", "changed"])
def test_an_unpacked_folder_that_is_not_all_ours_is_not_replaced(store, nodes, change):
    store.put("d.tar", tarred({"a.txt": b"a", "b.txt": b"b"}, "w"))
    request = Request(key="d.tar", unpack=Unpacking.AUTO, into="in/here")
    settings = make_settings(store, nodes[:1], requests=[request], min_node_share=1.0)
    prewarm(settings)
    mine = nodes[0].root / "in/here" / ("mine.txt" if change == "added" else "a.txt")
    mine.write_text("mine")
    store.put("d.tar", tarred({"a.txt": b"new"}, "w"))
    with pytest.raises(errors.WorkerError, match=f"did not unpack .*{mine.name}"):
        prewarm(settings)
    assert mine.read_text() == "mine"
    assert (nodes[0].root / "in/here/b.txt").read_bytes() == b"b"


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_an_archive_of_which_a_node_misread_a_piece_is_unpacked_right(store, nodes, tmp_path, mode):
    body = hashlib.shake_256(b"members").digest(2 * MIB)
    data = tarred({"weights.bin": body}, mode)
    store.put("d.archive", data)
    stop(nodes.pop())
    nodes.append(start_agent("flips", tmp_path / "flips", code=FLIP_ONCE))
    method = Unpacking.TAR if mode == "w" else Unpacking.TAR_GZ
    sha256 = hashlib.sha256(data).hexdigest()
    request = Request(key="d.archive", sha256=sha256, unpack=method, into="d")
    report = prewarm(make_settings(store, nodes, requests=[request], min_node_share=1.0))
    assert [node.reason for node in report.nodes] == [""] * 3
    wanted = {"d.archive": data, "d/weights.bin": body}
    assert [read_files(node.root) == wanted for node in nodes] == [True] * 3


def test_a_zip_is_unpacked_when_it_is_whole(store, nodes):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as opened:
        opened.writestr("x/y.txt", "y" * 1000)
    store.put("archives/data.zip", out.getvalue())
    request = Request(key="archives/data.zip", unpack=Unpacking.ZIP, into="unpacked/here")
    report = prewarm(make_settings(store, nodes, requests=[request]))
    assert [node.reason for node in report.nodes] == [""] * 3
    assert read_files(nodes[1].root)["unpacked/here/x/y.txt"] == b"y" * 1000


def hostile_archives() -> dict[str, bytes]:
    """Each would write outside its folder, or fill the disk."""
    found = {
        "traversal": tarred({"ok": b"", "../../escaped": b"x"}),
        "absolute": tarred({"/tmp/millrace-escaped": b"x"}),
        "bomb": tarred({"zeros": bytes(20 * MIB)}),
    }
    kinds = {
        "link": (tarfile.SYMTYPE, "../../../etc"),
        "hardlink": (tarfile.LNKTYPE, "/etc/passwd"),
        "device": (tarfile.CHRTYPE, ""),
    }
    for name, (kind, target) in kinds.items():
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            info = tarfile.TarInfo("member")
            info.type, info.linkname = kind, target
            tar.addfile(info)
        found[name] = out.getvalue()
    return found


@pytest.mark.parametrize("kind", ["traversal", "absolute", "bomb", "link", "hardlink", "device"])
def test_a_hostile_archive_leaves_nothing_behind(store, nodes, kind):
    store.put(f"{kind}.tar", hostile_archives()[kind])
    method = Unpacking.TAR_GZ if kind in {"traversal", "absolute", "bomb"} else Unpacking.TAR
    request = Request(key=f"{kind}.tar", unpack=method, into="into")
    settings = make_settings(store, nodes[:1], requests=[request], unpacked_bytes=10 * MIB)
    with pytest.raises(errors.WorkerError, match=r"archive|member"):
        prewarm(settings)
    root = nodes[0].root
    assert not (root / "into").exists()
    assert set(read_files(root.parent)) <= {f"n0/{kind}.tar"}
    assert not list(root.glob(".*.unpacking"))
    assert not Path("/tmp/millrace-escaped").exists()


def test_a_node_that_has_failed_takes_part_in_the_next_run_at_once(store, nodes):
    store.put("damaged.tar", b"no archive" * 100)
    contents = fill(store, "next")
    request = Request(key="damaged.tar", unpack=Unpacking.TAR, into="into")
    with pytest.raises(errors.WorkerError, match="was not unpacked"):
        prewarm(make_settings(store, nodes[:1], requests=[request]))
    report = prewarm(make_settings(store, nodes[:1], **below("next")))
    assert report.startup < 5.0
    assert contents.items() <= read_files(nodes[0].root).items()


@pytest.mark.parametrize(
    ("key", "into", "wanted"),
    [
        ("g/words.json.gz", None, "g/words.json"),
        ("g/words.json.gz", "in", "in/words.json"),
        ("g/words.json.zst", None, "g/words.json"),
    ],
)
def test_a_compressed_file_that_is_no_archive_becomes_one_file(store, nodes, key, into, wanted):
    body = os.urandom(MIB) + bytes(MIB)
    packed = gzip.compress(body) if key.endswith("gz") else zstandard.compress(body)
    store.put(key, packed)
    request = Request(key=key, unpack=Unpacking.AUTO, into=into, mode=0o600)
    settings = make_settings(store, nodes[:1], requests=[request])
    root = nodes[0].root
    for _ in range(2):  # the second time it is known again
        assert prewarm(settings).nodes[0].ready
        assert read_files(root) == {key: packed, wanted: body}
        assert (root / wanted).stat().st_mode & 0o777 == 0o600
    store.put(key, gzip.compress(b"new") if key.endswith("gz") else zstandard.compress(b"new"))
    prewarm(settings)
    assert read_files(root)[wanted] == b"new"
    (root / wanted).write_bytes(b"mine")
    store.put(key, packed)
    with pytest.raises(errors.WorkerError, match="Millrace did not unpack"):
        prewarm(settings)
    assert (root / wanted).read_bytes() == b"mine"


@pytest.mark.parametrize("ending", ["gz", "zst"])
@pytest.mark.parametrize(
    ("damage", "says"),
    [("cut", "is cut off"), ("flipped", "is damaged"), ("bomb", "holds more than")],
)
def test_a_damaged_compressed_file_costs_only_itself(store, nodes, ending, damage, says):
    def packed(body: bytes) -> bytes:
        if ending == "gz":
            return gzip.compress(body)
        return zstandard.ZstdCompressor(write_checksum=True).compress(body)

    contents = fill(store, "with")
    key, body = f"words.txt.{ending}", secrets.token_bytes(MIB)
    bad = bytearray(packed(bytes(20 * MIB) if damage == "bomb" else body))
    if damage == "cut":
        del bad[-3:]
    elif damage == "flipped":
        bad[-3] ^= 1
    store.put(key, bytes(bad))
    archive = Request(key=key, unpack=Unpacking.AUTO)
    requests = [archive, Request(prefix="with")]
    settings = make_settings(store, nodes[:1], requests=requests, unpacked_bytes=10 * MIB)
    with pytest.raises(errors.WorkerError, match=says):
        prewarm(settings)
    root = nodes[0].root
    assert read_files(root) == contents | {key: bytes(bad)}
    assert not list(root.glob(".*.unpacking"))
    # The agent would wait 15 s for the driver that failed; the test of a full disk has it do so.
    stop(nodes[0])
    nodes[0] = start_agent(nodes[0].name, root)
    settings = make_settings(store, nodes[:1], requests=requests, unpacked_bytes=10 * MIB)
    good = packed(body)
    store.put(key, good)
    assert prewarm(settings).nodes[0].ready
    assert read_files(root) == contents | {key: good, "words.txt": body}


def test_a_tar_is_known_by_its_content_where_its_name_says_gz(store, nodes):
    store.put("a.gz", tarred({"x": b"x"}))
    request = Request(key="a.gz", unpack=Unpacking.AUTO)
    assert prewarm(make_settings(store, nodes[:1], requests=[request])).nodes[0].ready
    assert read_files(nodes[0].root)["a/x"] == b"x"


@pytest.mark.parametrize("key", ["empty.json.gz", "empty.tar", "empty"])
def test_an_empty_object_is_no_archive(store, nodes, key):
    store.put(key, b"")
    request = Request(key=key, unpack=Unpacking.AUTO)
    with pytest.raises(errors.ConfigurationError, match=f"{key} is empty, and no archive"):
        preview(make_settings(store, nodes[:1], requests=[request]))


def test_a_bad_archive_costs_only_itself(store, nodes):
    """Also where it comes first, and is known to be bad before the rest has begun."""
    contents = fill(store, "behind")
    store.put("first.tar", os.urandom(2000))
    archive = Request(key="first.tar", unpack=Unpacking.TAR)
    settings = make_settings(store, nodes, requests=[archive, Request(prefix="behind")])
    slow = RigFault(FaultKind.STALL, key="behind/large.bin", offset=0, seconds=2)
    store.inject_fault(slow)
    with pytest.raises(errors.WorkerError, match=r"first\.tar was not unpacked.*no tar"):
        prewarm(settings)
    for node in nodes:
        found = read_files(node.root)
        assert found.pop("first.tar")
        assert found == contents


@pytest.mark.parametrize("key", ["bomb.tar.gz", "bomb.gz"])
def test_an_archive_that_is_larger_than_the_disk_leaves_the_node_as_it_was(store, nodes, key):
    contents = fill(store, "beside")
    zeros = bytes(160 * MIB)
    store.put(key, tarred({"zeros": zeros}) if "tar" in key else gzip.compress(zeros, 1))
    archive = Request(key=key, unpack=Unpacking.AUTO)
    root = nodes[0].root
    with mounted(root, 128 * MIB):
        settings = make_settings(store, nodes[:1], requests=[archive, Request(prefix="beside")])
        with pytest.raises(errors.WorkerError, match="does not fit on the disk"):
            prewarm(settings)
        found = read_files(root)
        assert found.pop(key)
        assert found == contents
        assert shutil.disk_usage(root).free > 64 * MIB
        assert prewarm(make_settings(store, nodes[:1], **below("beside"))).nodes[0].ready
