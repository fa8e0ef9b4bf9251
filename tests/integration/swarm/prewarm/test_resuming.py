"""Runs that continue where an earlier run was stopped."""

import os
import time
from pathlib import Path

import pytest

from benchmarks.rig.store import FaultKind, RigFault, RigStore
from millrace import errors
from millrace.swarm import LimitSettings, Request, Unpacking, prewarm
from tests.support.swarm.prewarms import MIB, below, fill, mounted, tarred
from tests.support.swarm.swarms import Agent, Heard, make_settings, read_files, start_agent, stop

_READS = 2  # concurrent reads from the store until a run is stopped


class EnoughError(Exception):
    """The test has seen enough of a run."""


def stop_here() -> None:
    raise EnoughError


def test_a_run_that_was_broken_off_goes_on_where_it_was(store, nodes):
    contents = fill(store, "broken-off")
    settings = make_settings(store, nodes, **below("broken-off"))
    store.inject_fault(
        RigFault(FaultKind.STALL, key="broken-off/large.bin", offset=9 * MIB, seconds=60)
    )
    with pytest.raises(EnoughError):
        prewarm(settings, progress=Heard(0.9, stop_here))
    assert "large.bin" not in read_files(nodes[0].root)
    first = store.read_counts().bytes
    store.reset()
    report = prewarm(settings)
    assert [read_files(node.root) for node in nodes] == [contents] * 3
    assert min(node.cached for node in report.nodes) > 0.5 * report.size
    assert first + store.read_counts().bytes < 1.5 * report.size


def test_an_agent_that_was_killed_goes_on_from_its_journal(store, nodes, tmp_path):
    contents = fill(store, "journal")
    settings = make_settings(store, nodes[:1], **below("journal"))
    store.inject_fault(
        RigFault(FaultKind.STALL, key="journal/large.bin", offset=9 * MIB, seconds=60)
    )
    with pytest.raises(errors.WorkerError, match=r"no longer answers|orders"):
        prewarm(settings, progress=Heard(0.7, nodes[0].kill))
    stop(nodes[0])
    nodes[0] = start_agent("n0", nodes[0].root)
    store.reset()
    report = prewarm(make_settings(store, nodes[:1], **below("journal")))
    assert read_files(nodes[0].root) == contents
    assert report.nodes[0].cached > 0.5 * report.size


def broken_off(store: RigStore, agent: Agent, prefix: str, **more: object) -> int:
    """Run until half of the bytes are there, and an object stalls; bytes that left the store."""

    key = f"{prefix}/large.bin"
    store.inject_fault(RigFault(FaultKind.STALL, key=key, offset=9 * MIB, seconds=60, times=None))
    limits = LimitSettings(store_reads_per_node=_READS)
    settings = make_settings(store, [agent], limits=limits, **(below(prefix) | more))
    with pytest.raises(EnoughError):
        prewarm(settings, progress=Heard(0.5, stop_here))
    read = store.read_counts().bytes
    store.reset()
    return read


@pytest.mark.parametrize("change", ["an object more", "another destination", "larger pieces"])
def test_pieces_are_known_by_object_and_range(store, nodes, change):
    contents = fill(store, "ranges")
    read = broken_off(store, nodes[0], "ranges")
    request, piece_size = Request(prefix="ranges"), 256 * 1024
    if change == "an object more":
        store.put("more", contents["even.bin"])
    elif change == "another destination":
        request = Request(prefix="ranges", destination="moved")
        contents = {f"moved/{name}": body for name, body in contents.items()}
    else:
        piece_size = 512 * 1024
    requests = [request]
    if change == "an object more":
        requests.insert(0, Request(key="more"))
        contents["more"] = contents["even.bin"]
    settings = make_settings(store, nodes[:1], requests=requests, piece_size=piece_size)
    report = prewarm(settings)
    assert report.nodes[0].ready
    assert {name: read_files(nodes[0].root)[name] for name in contents} == contents
    again = _READS * piece_size  # what was on its way
    if change == "another destination":  # files that were whole have a name there already
        again += sum(len(body) for name, body in contents.items() if "large" not in name)
    assert read + store.read_counts().bytes <= report.size + again
    assert partial_files(nodes[0].root) == []


def partial_files(root: Path) -> list[Path]:
    return sorted(root.rglob(".*.part"))


def test_interrupted_requests_that_alternate_keep_each_others_pieces(store, nodes):
    contents = {prefix: fill(store, prefix) for prefix in ("one", "two")}
    read = 0
    for prefix in ("one", "two", "one", "two"):
        request = Request(prefix=prefix, destination=prefix)
        read += broken_off(store, nodes[0], prefix, requests=[request])
    assert len(partial_files(nodes[0].root)) >= 2
    for prefix in ("one", "two"):
        request = Request(prefix=prefix, destination=prefix)
        prewarm(make_settings(store, nodes[:1], requests=[request]))
    read += store.read_counts().bytes
    root = nodes[0].root
    assert {prefix: read_files(root / prefix) for prefix in contents} == contents
    size = sum(len(body) for each in contents.values() for body in each.values())
    assert read <= size + 4 * _READS * 256 * 1024  # what was on its way, each time
    assert partial_files(root) == []
    assert not (root / ".millrace" / "partial.jsonl").exists()


@pytest.mark.parametrize("size", [186 * MIB, 30 * MIB])
def test_pieces_of_another_request_are_kept_while_the_disk_has_room(store, nodes, size):
    fill(store, "early")
    root = nodes[0].root
    with mounted(root, 256 * MIB):
        broken_off(store, nodes[0], "early")
        left = partial_files(root)
        assert left
        store.generate("late", size)
        assert (
            prewarm(make_settings(store, nodes[:1], requests=[Request(key="late")])).nodes[0].ready
        )
        assert partial_files(root) == (left if size == 30 * MIB else [])
        assert (root / ".millrace" / "partial.jsonl").exists() == (size == 30 * MIB)


@pytest.mark.parametrize("why", ["replaced", "old"])
def test_what_no_request_needs_any_more_is_removed(store, nodes, why):
    contents = fill(store, f"left-{why}")
    broken_off(store, nodes[0], f"left-{why}")
    root = nodes[0].root
    left = partial_files(root)
    assert left
    store.put("other", b"other")
    requests = [Request(key="other")]
    if why == "replaced":
        store.put("left-replaced/large.bin", b"another content")
        requests.append(Request(prefix="left-replaced"))
    else:
        week_ago = time.time() - 7 * 24 * 3600 - 1
        for file in left:
            os.utime(file, (week_ago, week_ago))
    mine = root / ".0123456789abcdef.part"
    mine.write_text("not ours, whatever its name")
    prewarm(make_settings(store, nodes[:1], requests=requests))
    assert partial_files(root) == [mine]
    assert not (root / ".millrace" / "partial.jsonl").exists()
    found = read_files(root)
    assert {name: found[name] for name in ("even.bin", "other")} == {
        "even.bin": contents["even.bin"],
        "other": b"other",
    }


def test_a_folder_that_was_being_unpacked_is_removed(store, nodes):
    body = tarred({"a": os.urandom(2 * MIB), "b": os.urandom(MIB)}, "w")
    store.put("half.tar", body)
    store.put("other", b"other")
    request = Request(key="half.tar", unpack=Unpacking.TAR)
    settings = make_settings(store, nodes[:1], requests=[request])
    store.inject_fault(
        RigFault(FaultKind.STALL, key="half.tar", offset=len(body) - 100, times=None)
    )
    with pytest.raises(errors.WorkerError, match=r"no longer answers|orders"):
        prewarm(settings, progress=Heard(0.7, nodes[0].kill))
    stop(nodes[0])
    root = nodes[0].root
    assert list(root.glob(".*.unpacking"))
    nodes[0] = start_agent("n0", root)
    store.reset()
    left = {path.name for path in partial_files(root)}
    prewarm(make_settings(store, nodes[:1], requests=[Request(key="other")]))
    assert {path.name for path in root.iterdir()} == {".millrace", "other"} | left
