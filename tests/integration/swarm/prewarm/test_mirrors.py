"""Nodes read objects also from mirrors of the store, where they have the same ETag."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.rig.store import FaultKind, RigFault, RigStore
from millrace.swarm import Request, prewarm
from tests.support.swarm.prewarms import MIB, below, fill
from tests.support.swarm.swarms import make_settings, make_spec, read_files


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[RigStore]:
    with RigStore.start(tmp_path / "mirror") as started:
        yield started


def warm(store: RigStore, mirror: RigStore, nodes, prefix: str):
    mirrors = {"s": [make_spec(mirror)]}
    report = prewarm(make_settings(store, nodes, mirrors=mirrors, **below(prefix)))
    assert [node.reason for node in report.nodes] == [""] * 3
    return report


def test_the_store_and_its_mirror_take_turns(store, mirror, nodes):
    contents = fill(store, "turns")
    assert fill(mirror, "turns") == contents
    warm(store, mirror, nodes, "turns")
    assert [read_files(node.root) for node in nodes] == [contents] * 3
    assert store.read_counts().requests["GetObject"] > 5
    assert mirror.read_counts().requests["GetObject"] > 5


def test_a_mirror_serves_all_if_the_store_fails_after_the_start(store, mirror, nodes):
    contents = fill(store, "fails-later")
    fill(mirror, "fails-later")
    store.inject_fault(RigFault(FaultKind.ERROR, times=None))
    report = warm(store, mirror, nodes, "fails-later")
    assert [read_files(node.root) for node in nodes] == [contents] * 3
    assert store.read_counts().fired["error"] > 0
    assert mirror.read_counts().bytes >= report.size


def test_objects_that_differ_or_are_missing_are_not_read_there(store, mirror, nodes, caplog):
    contents = fill(store, "differs")
    for name in contents.keys() - {"even.bin", "sub/small-007.txt"}:
        mirror.put(f"differs/{name}", contents[name])
    mirror.put("differs/large.bin", bytes(len(contents["large.bin"])))
    mirror.reset()
    warm(store, mirror, nodes, "differs")
    assert [read_files(node.root) for node in nodes] == [contents] * 3
    objects = mirror.read_counts().objects
    assert "differs/large.bin" not in objects or objects["differs/large.bin"].gets == 0
    assert "has no equal copy of 3 files, such as differs/even.bin" in caplog.text


def test_an_object_that_changes_in_the_mirror_is_read_from_the_store(store, mirror, nodes):
    contents = fill(store, "changes")
    fill(mirror, "changes")
    mirror.inject_fault(RigFault(FaultKind.DENY, key="changes/large.bin", times=None))
    warm(store, mirror, nodes, "changes")
    assert [read_files(node.root) for node in nodes] == [contents] * 3
    assert mirror.read_counts().fired["deny"] > 0


@pytest.mark.parametrize("digest", ["none", "md5", "sha256"])
def test_wrong_bytes_of_a_mirror_get_no_final_name(store, mirror, nodes, digest, monkeypatch):
    if digest == "none":  # as for the ETag of an upload in parts, which this store refuses
        monkeypatch.setattr("millrace.swarm.resolving.parse_etag", lambda *_: None)
    body, key = hashlib.shake_256(b"wrong").digest(40 * MIB + 17), f"wrong/{digest}"
    for server in (store, mirror):
        server.put(key, body)
    mirror.inject_fault(RigFault(FaultKind.FLIP, key=key, times=None))
    sha256 = hashlib.sha256(body).hexdigest() if digest == "sha256" else None
    settings = make_settings(
        store,
        nodes,
        mirrors={"s": [make_spec(mirror)]},
        requests=[Request(key=key, sha256=sha256)],
        piece_size=MIB,
    )
    report = prewarm(settings)
    assert [(node.reason, node.trusted) for node in report.nodes] == [("", True)] * 3
    assert [read_files(node.root) for node in nodes] == [{key: body}] * 3
    assert report.unverified == (digest == "none")
    assert mirror.read_counts().fired["flip"] > 0


def test_a_mirror_that_is_dead_costs_a_warning(store, mirror, nodes, caplog):
    contents = fill(store, "dead")
    mirror.stop()
    warm(store, mirror, nodes, "dead")
    assert [read_files(node.root) for node in nodes] == [contents] * 3
    assert "is not read: " in caplog.text
