"""A run on a node: what it reports after the driver has replaced a piece."""

import time
from pathlib import Path
from typing import Any

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
    limits = {"bytes": 1 << 30, "members": 100}
    sources = ["file:///unused"] * len(files)
    spec = RunSpec(catalogue, sources, b"key", CacheCheck.FULL, 1, None, limits)
    run = NodeRun("run", root, spec, {})
    run.open()
    return run, catalogue


def write(run: NodeRun, catalogue: Catalogue, data: bytes) -> None:
    """Write the only piece of a run."""
    segments = catalogue.pieces[0]
    assert run.assembler.write(0, memoryview(data), hash_segments(segments, memoryview(data)))


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
