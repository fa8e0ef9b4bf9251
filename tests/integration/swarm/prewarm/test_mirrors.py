"""Nodes read objects also from mirrors of the store, where they have the same ETag."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.rig.store import Fault, FaultKind, Store
from millrace.swarm import prewarm
from tests.support.swarm.prewarms import below, fill
from tests.support.swarm.swarms import make_settings, make_spec, read_files


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Store]:
    with Store.start(tmp_path / "mirror") as started:
        yield started


def warm(store: Store, mirror: Store, nodes, prefix: str):
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
    store.inject_fault(Fault(FaultKind.ERROR, times=None))
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
    mirror.inject_fault(Fault(FaultKind.DENY, key="changes/large.bin", times=None))
    warm(store, mirror, nodes, "changes")
    assert [read_files(node.root) for node in nodes] == [contents] * 3
    assert mirror.read_counts().fired["deny"] > 0


def test_a_mirror_that_is_dead_costs_a_warning(store, mirror, nodes, caplog):
    contents = fill(store, "dead")
    mirror.stop()
    warm(store, mirror, nodes, "dead")
    assert [read_files(node.root) for node in nodes] == [contents] * 3
    assert "is not read: " in caplog.text
