"""The driver's own pieces, and its conclusions from the nodes' reports."""

import pytest

from millrace import errors
from millrace.progress import Event
from millrace.swarm.driving.driver_reader import FileDigests
from millrace.swarm.driving.event_handler import EventHandler
from millrace.swarm.driving.file_checks import FileChecks
from millrace.swarm.driving.piece_checks import PieceChecks
from millrace.swarm.driving.reports import ProgressRecorder, report_nodes
from millrace.swarm.driving.stragglers import StragglerFinder
from millrace.swarm.messages import (
    BytesReceived,
    DropPiece,
    FetchPiece,
    FilesReady,
    FileUnusable,
    NodeFailed,
    PieceDropped,
    PieceFailed,
    PieceWritten,
    ReadRetried,
    VoidDigest,
    compute_commitment,
)
from millrace.swarm.nodes import AbsentNode
from millrace.swarm.piece_readers import FetchError
from millrace.swarm.progress_events import (
    FileMismatched,
    NodeAccused,
    NodeLost,
    NodeMisread,
    NodeReady,
    NodeUntrusted,
)
from tests.oracle import compute_blake3
from tests.unit.swarm.driving.runs import SIZE, Run, make_catalogue, make_file

RIGHT = compute_blake3(b"right")


def make_piece_checks(run: Run, store_timeout: float = 60.0) -> tuple[PieceChecks, list[int]]:
    requested: list[int] = []
    return PieceChecks(run.state, make_catalogue(), store_timeout, requested.append), requested


def test_of_unproven_pieces_the_driver_reads_sixteen_mib():
    run = Run("a", pieces=40)
    pieces, requested = make_piece_checks(run)
    pieces.request_sample(list(range(40)), [SIZE] * 40)
    assert len(requested) == len(set(requested)) == 16
    assert all(pieces.is_useful(number) for number in requested)
    assert not any(pieces.is_useful(number) for number in set(range(40)) - set(requested))


def test_of_pieces_that_are_larger_than_the_sample_the_driver_reads_one():
    run = Run("a", pieces=40)
    pieces, requested = make_piece_checks(run)
    pieces.request_sample(list(range(40)), [64 << 20] * 40)
    assert len(requested) == 1


def test_a_piece_without_room_in_the_sample_leaves_room_for_smaller_ones():
    run = Run("a", pieces=40)
    pieces, requested = make_piece_checks(run)
    pieces.request_sample(list(range(40)), [15 << 20] * 20 + [1 << 20] * 20)
    assert len(requested) in {2, 16}


def test_one_node_that_says_that_an_object_is_gone_makes_the_driver_look():
    run = Run("ab")
    pieces, requested = make_piece_checks(run)
    pieces.note_failure(run["a"], 1, 503, "busy")
    assert requested == []
    pieces.note_failure(run["a"], 1, 404, "gone")
    assert requested == [1]
    assert pieces.is_useful(1)
    pieces.handle_digest(1, RIGHT)
    assert "it cannot read s3://bucket/b from the store, and the driver can" in run["a"].lost_reason
    assert not pieces.is_useful(1)
    assert run.state.fatal is None


def test_an_object_that_the_driver_finds_gone_ends_the_run():
    run = Run("a")
    pieces, _ = make_piece_checks(run)
    pieces.handle_failure(0, FetchError("busy", 503))
    assert run.state.fatal is None
    pieces.handle_failure(0, FetchError("gone", 404))
    assert isinstance(run.state.fatal, errors.ChangedError)


@pytest.mark.parametrize(
    ("status", "kind"), [(503, errors.UnavailableError), (403, errors.DeniedError)]
)
def test_a_store_that_fails_for_longer_than_patience_ends_the_run(status, kind):
    run = Run("a")
    pieces, _ = make_piece_checks(run, store_timeout=-1.0)
    pieces.handle_failure(0, FetchError("no", status))
    assert isinstance(run.state.fatal, kind)


def test_what_a_node_says_of_the_store_does_not_shorten_the_patience_of_the_driver(monkeypatch):
    """A single failed read of the driver, after the reports of a node, ends no run."""
    run, now = Run("ab"), [1000.0]
    monkeypatch.setattr("millrace.swarm.driving.piece_checks.time.monotonic", lambda: now[0])
    pieces, requested = make_piece_checks(run, store_timeout=60.0)
    pieces.note_failure(run["a"], 1, 500, "error")
    now[0] += 61
    pieces.note_failure(run["a"], 1, 500, "error")
    assert requested == [1]
    pieces.handle_failure(1, FetchError("busy", 503))
    assert run.state.fatal is None
    now[0] += 16
    pieces.handle_failure(1, FetchError("busy", 503))
    assert isinstance(run.state.fatal, errors.UnavailableError)


def test_a_node_whose_read_the_driver_finds_right_in_the_store_is_named_and_then_lost():
    run = Run("ab", known={0: RIGHT})
    pieces, requested = make_piece_checks(run)
    handler = EventHandler(run.state, pieces, make_file_checks(run)[0], file_count=2, began=0.0)
    wrong = PieceFailed(0, "", "wrong bytes", is_wrong=True)
    handler.handle(run["a"], wrong)
    assert requested == [0]
    assert pieces.is_useful(0)
    assert run.take_events() == []
    pieces.handle_digest(0, RIGHT)
    assert run.take_events() == [(NodeMisread, "a")]
    assert not pieces.is_useful(0)
    told: list[tuple[type[Event], str]] = []
    for _ in range(7):
        handler.handle(run["a"], wrong)
        told += run.take_events()
    assert requested == [0]  # the driver has read it
    assert told == [(NodeUntrusted, "a"), (NodeLost, "a")]
    assert run["a"].lost_reason == (
        "it reported bytes that the store does not have: check its memory and its disk"
    )
    assert run["b"].lost_reason == ""
    assert run.state.fatal is None


def test_a_piece_that_does_not_have_its_known_digest_in_the_store_ends_the_run():
    run = Run("ab", known={0: RIGHT})
    pieces, _ = make_piece_checks(run)
    pieces.note_wrong_read(run["a"], 0)
    pieces.handle_digest(0, compute_blake3(b"other"))
    assert isinstance(run.state.fatal, errors.CorruptError)
    assert str(run.state.fatal).startswith("s3://bucket/a does not have its digest")
    assert run.take_events() == []


def test_a_node_that_doubts_a_file_whose_pieces_are_known_makes_the_driver_read_nothing():
    run = Run("ab", known={0: RIGHT})
    requested: list[int] = []
    catalogue = make_catalogue(make_file("a", RIGHT), make_file("b"))
    files = FileChecks(run.state, catalogue, requested.append, lambda _: True, known={0: RIGHT})
    files.note_mismatch(run["a"], 0, compute_blake3(b"other"))  # what differs is being replaced
    assert run["a"].lost_reason == ""
    files.note_mismatch(run["b"], 0, RIGHT)
    assert "it reports a wrong digest of" in run["b"].lost_reason
    assert requested == []


def make_file_checks(
    run: Run, digest: str = RIGHT, *, is_etag_md5: bool = True
) -> tuple[FileChecks, list[int]]:
    requested: list[int] = []
    catalogue = make_catalogue(make_file("a", digest), make_file("b"))
    return FileChecks(run.state, catalogue, requested.append, lambda _: is_etag_md5), requested


def test_a_node_that_says_again_that_a_right_file_is_wrong_is_lost():
    run = Run("ab")
    files, requested = make_file_checks(run)
    files.note_mismatch(run["a"], 0, "other")
    files.note_mismatch(run["b"], 1, "other")  # nothing says what that file is
    assert requested == [0]
    assert files.is_doubted(0)
    assert run.take_events() == [(FileMismatched, "s3://bucket/a")]
    files.handle_digests(FileDigests(0, RIGHT, "combined", {0: "x"}))
    assert not files.is_doubted(0)
    files.note_mismatch(run["b"], 0, "other")  # what differs is being replaced
    assert run["b"].lost_reason == ""
    files.note_mismatch(run["b"], 0, "combined")
    assert "it reports a wrong digest of" in run["b"].lost_reason


@pytest.mark.parametrize("digest", [RIGHT, f"sha256:{0:064x}", f"md5:{0:032x}"])
def test_an_object_that_is_not_what_its_digest_says_ends_the_run(digest):
    run = Run("a")
    files, _ = make_file_checks(run, digest)
    files.handle_digests(FileDigests(0, "other", "combined", {0: "x"}))
    assert isinstance(run.state.fatal, errors.CorruptError)
    assert files.void == set()
    assert run.take_orders("a") == []


def test_an_etag_that_is_no_md5_is_void_for_every_node():
    run = Run("a")
    files, _ = make_file_checks(run, f"md5:{0:032x}", is_etag_md5=False)
    files.handle_digests(FileDigests(0, "other", "combined", {0: "x"}))
    assert files.void == {0}
    assert VoidDigest(0) in run.take_orders("a")
    assert run.state.fatal is None


def make_handler(run: Run) -> EventHandler:
    pieces, _ = make_piece_checks(run)
    files, _ = make_file_checks(run)
    return EventHandler(run.state, pieces, files, file_count=2, began=0.0)


def test_a_piece_of_another_digest_than_ordered_is_not_counted():
    run = Run("ab", known={0: RIGHT})
    handler, state = make_handler(run), run.state
    state.dispatch(state.tracker.begin(0.0))
    handler.handle(run["a"], PieceWritten(0, "", "other", SIZE))
    assert run["a"].is_lost
    assert state.held == 0
    recorder = ProgressRecorder(2 * SIZE, began=0.0)
    assert recorder.record(state, 1.0).present == 0
    assert recorder.curve == [(1.0, 0)]


def test_what_a_node_says_is_counted_until_it_is_lost():
    run = Run("ab")
    handler, state = make_handler(run), run.state
    state.dispatch(state.tracker.begin(0.0))
    done = PieceWritten(0, "", RIGHT, SIZE)
    handler.handle(run["a"], done)
    assert state.held == SIZE
    handler.handle(run["a"], ReadRetried("slow"))
    handler.handle(run["a"], FilesReady([0, 1]))
    assert run["a"].ready
    assert run.take_events() == [(NodeReady, "a")]
    counts = run["a"].counts
    assert (counts.from_store, counts.failures, counts.moved) == (SIZE, 1, SIZE)
    handler.handle(run["a"], NodeFailed("full"))
    handler.handle(run["a"], ReadRetried("slow"))
    assert run["a"].lost_reason == "full"
    assert counts.failures == 1


def test_an_uploader_is_reported_once_by_each_node_that_accuses_it():
    run = Run("ab")
    handler = make_handler(run)
    failed = PieceFailed(0, "id-b", "", is_wrong=True)
    for _ in range(3):
        handler.handle(run["a"], failed)
    # What nobody has ordered from it proves nothing: it is an accusation, and names who makes it.
    assert run.take_events() == [(NodeAccused, "b")]
    assert not run.state.tracker.untrusted_nodes


def test_an_uploader_that_two_nodes_accuse_of_what_was_ordered_is_untrusted():
    run = Run("abc", pieces=1)
    handler, state = make_handler(run), run.state
    state.dispatch(state.tracker.begin(0.0))
    reader = next(name for name in "abc" if run.take_orders(name))
    handler.handle(run[reader], PieceWritten(0, "", RIGHT, SIZE))
    wrong = PieceFailed(0, f"id-{reader}", "", is_wrong=True)
    told: list[tuple[str, str]] = []
    for name in set("abc") - {reader}:
        assert FetchPiece(0, f"id-{reader}", compute_commitment(RIGHT)) in run.take_orders(name)
        handler.handle(run[name], wrong)
        told += run.take_events()
    assert told == [(NodeAccused, reader)] * 2 + [(NodeUntrusted, reader)]


def test_an_order_does_not_tell_the_digest_of_a_piece():
    run = Run("ab", pieces=1, known={0: RIGHT})
    handler, state = make_handler(run), run.state
    state.dispatch(state.tracker.begin(0.0))
    orders = {name: run.take_orders(name) for name in "ab"}
    reader = next(name for name in "ab" if orders[name])
    handler.handle(run[reader], PieceWritten(0, "", RIGHT, SIZE))
    other = "b" if reader == "a" else "a"
    told = [*orders[reader], *run.take_orders(other)]
    assert told == [
        FetchPiece(0, source, compute_commitment(RIGHT)) for source in ("", f"id-{reader}")
    ]
    assert RIGHT.removeprefix("blake3:") not in repr(told)


def test_reports_name_every_node_and_the_bytes_that_all_have():
    run = Run("ba")
    run["a"].ready = True
    run.state.members.add_absent(AbsentNode("c", "c", "gone"))
    run.state.lose(run["b"], "broken")
    reports = report_nodes(run.state.members, {"id-a"})
    assert [(node.name, node.ready, node.reason, node.trusted) for node in reports] == [
        ("a", True, "", False),
        ("b", False, "broken", True),
        ("c", False, "gone", True),
    ]
    recorder = ProgressRecorder(2 * SIZE, 10.0)
    progress = recorder.record(run.state, 12.0)
    assert (progress.total, progress.nodes, progress.seconds) == (2 * SIZE, 1, 2.0)
    assert recorder.curve == [(2.0, 0)]


def test_pieces_of_files_without_a_digest_are_unproven():
    catalogue = make_catalogue(make_file("a", RIGHT), make_file("b"))
    assert catalogue.list_unproven_pieces() == [1]


def test_a_node_with_all_pieces_that_unpacks_an_archive_has_not_stopped():
    run = Run("n")
    for piece in (0, 1):
        run.state.tracker.complete_transfer("id-n", piece, "", RIGHT, 0.0)
    run["n"].last_progress = -1e6
    make_handler(run).handle(run["n"], BytesReceived(5))
    assert run["n"].last_progress > -1e6


def make_wrong_reader() -> tuple[Run, EventHandler, PieceChecks]:
    """Make a run whose nodes have two files, of which `b` on the node n has wrong bytes."""
    run, wrong = Run("nm", needs=2), compute_blake3(b"wrong")
    pieces, _ = make_piece_checks(run)
    files, _ = make_file_checks(run, "")
    handler = EventHandler(run.state, pieces, files, file_count=2, began=0.0)
    run.state.dispatch(run.state.tracker.begin(0.0))
    handler.handle(run["n"], PieceWritten(0, "", RIGHT, SIZE))
    handler.handle(run["m"], PieceWritten(1, "", RIGHT, SIZE))
    handler.handle(run["m"], PieceWritten(0, "", RIGHT, SIZE))
    for name in "nm":
        handler.handle(run[name], FilesReady([0, 1]))
    assert not run.state.is_finished(run["n"], 2)  # its vote for the last piece is not known
    handler.handle(run["n"], PieceWritten(1, "", wrong, SIZE))
    assert run.disputed == [1]
    assert run.state.is_finished(run["n"], 2)
    return run, handler, pieces


def test_a_node_that_is_to_drop_a_piece_is_not_ready_before_its_files_are_right():
    run, handler, pieces = make_wrong_reader()
    node = run["n"]
    pieces.handle_digest(1, RIGHT)
    assert DropPiece(1) in run.take_orders("n")
    assert not node.ready
    assert not run.state.is_finished(node, 2)
    handler.handle(node, FilesReady([0, 1]))  # sent before the order
    handler.handle(node, PieceDropped(1, [1]))
    assert not run.state.is_finished(node, 2)
    handler.handle(node, PieceWritten(1, "id-m", RIGHT, SIZE))
    assert not run.state.is_finished(node, 2)
    assert not node.ready
    handler.handle(node, FilesReady([1]))
    assert run.state.is_finished(node, 2)
    assert node.ready
    assert run.state.is_finished(run["m"], 2)


def test_an_archive_without_a_dropped_piece_may_be_usable_again():
    run, handler, pieces = make_wrong_reader()
    node = run["n"]
    node.files.discard(1)
    handler.handle(node, FileUnusable(1, "damaged"))
    pieces.handle_digest(1, RIGHT)
    handler.handle(node, PieceDropped(1, [1]))
    assert node.unusable == {}


def test_a_node_that_drops_a_piece_without_an_order_stays_as_it_is():
    run, handler, _ = make_wrong_reader()
    handler.handle(run["n"], PieceDropped(1, [1]))
    assert run["n"].files == {0, 1}


def test_a_node_that_drops_a_piece_late_in_a_run_has_not_stopped():
    run, _, pieces = make_wrong_reader()
    finder = StragglerFinder(run.state, 2, 2 * SIZE, 10.0, 0.0)
    assert finder.find(0.0) == []
    for name in "nm":
        run[name].last_progress = -1e6
    pieces.handle_digest(1, RIGHT)
    assert finder.find(run["n"].last_progress + 9.0) == []
