"""A run on a node: what it reports after the driver has replaced a piece."""

import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.swarm.archives.limits import UnpackLimits
from millrace.swarm.cache_index import CacheCheck
from millrace.swarm.catalogue import Catalogue, File, build_catalogue
from millrace.swarm.messages import DropPiece, encode_message
from millrace.swarm.node_run import NodeRun
from millrace.swarm.piece_readers import hash_segments
from millrace.swarm.run_spec import RunSpec
from tests.support.swarm.prewarms import MIB, tarred

BODY = b"weights" * 1000


def make_run(root: Path, *files: File) -> tuple[NodeRun, Catalogue]:
    catalogue = build_catalogue(files, MIB)
    limits = UnpackLimits(bytes=1 << 30, members=100)
    sources = ["file:///unused"] * len(files)
    spec = RunSpec(catalogue, sources, b"key", CacheCheck.FULL, 1, None, limits)
    run = NodeRun("run", root, spec, {})
    run.open()
    return run, catalogue


def write(run: NodeRun, catalogue: Catalogue, data: bytes, number: int = 0) -> None:
    """Write a piece of a run."""
    segments = catalogue.pieces[number]
    assert run.assembler.write(number, memoryview(data), hash_segments(segments, memoryview(data)))


def wait_events(run: NodeRun, count: int) -> list[dict[str, Any]]:
    """Wait until the run has so many events."""
    deadline = time.monotonic() + 60
    events: list[dict[str, Any]] = []
    while len(events) < count:
        assert time.monotonic() < deadline, events
        events += run.poll_events(len(events))
    return events


def test_a_file_is_reported_again_after_a_piece_of_it_was_dropped(tmp_path):
    run, catalogue = make_run(tmp_path, File("a", len(BODY), "etag", "s3://b/a"))
    write(run, catalogue, BODY[::-1])
    wait_events(run, 1)
    run.take_orders([encode_message(DropPiece(0)), encode_message(DropPiece(0))])
    write(run, catalogue, BODY)
    assert wait_events(run, 4) == [
        {"type": "files-ready", "files": [0]},
        {"type": "piece-dropped", "piece": 0, "files": [0]},
        {"type": "piece-dropped", "piece": 0, "files": []},
        {"type": "files-ready", "files": [0]},
    ]
    run.close()
    assert (tmp_path / "a").read_bytes() == BODY


def test_an_archive_is_unpacked_and_reported_again_after_a_piece_of_it_was_dropped(tmp_path):
    data = tarred({"weights.bin": BODY}, "w")
    wrong = data.replace(BODY, BODY[::-1])
    file = File("d.tar", len(data), "etag", "s3://b/d.tar", unpack="tar", into="d")
    run, catalogue = make_run(tmp_path, file)
    write(run, catalogue, wrong)
    wait_events(run, 1)
    assert (tmp_path / "d/weights.bin").read_bytes() == BODY[::-1]
    run.take_orders([encode_message(DropPiece(0))])
    write(run, catalogue, data)
    assert [event["type"] for event in wait_events(run, 3)] == [
        "files-ready",
        "piece-dropped",
        "files-ready",
    ]
    run.close()
    assert (tmp_path / "d/weights.bin").read_bytes() == BODY


@pytest.fixture
def few_files() -> Iterator[None]:
    """Let the process open only 100 more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(opened.name) for opened in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 100, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_archives_are_unpacked_with_few_open_files_in_whatever_order_they_arrive(
    tmp_path, few_files
):
    data, names = tarred({"x": b"x"}, "w"), [f"{number:03}" for number in range(200)]
    files = [
        File(f"{n}.tar", len(data), "etag", f"s3://b/{n}.tar", unpack="tar", into=n) for n in names
    ]
    run, catalogue = make_run(tmp_path, *files)
    for number in reversed(range(len(catalogue.pieces))):
        write(run, catalogue, data * len(catalogue.pieces[number]), number)
    events = wait_events(run, len(files))
    run.close()
    assert {event["type"] for event in events} == {"files-ready"}
    assert sorted(number for event in events for number in event["files"]) == list(range(200))
    assert {(tmp_path / name / "x").read_bytes() for name in names} == {b"x"}
