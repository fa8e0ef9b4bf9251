"""Notes about rows, and the watch of them."""

import os

from millrace.datasets.stall_watch import STALL_TIMEOUT, RowNotes, Stall, StallWatch


def test_each_further_look_without_a_row_tells_a_longer_time() -> None:
    notes = RowNotes()
    watch = StallWatch(notes)
    assert watch.look() is None
    assert watch.look() == Stall("", STALL_TIMEOUT)
    notes.note_row("00000-1")
    notes.note_row("00000-1")
    assert watch.look() is None
    assert watch.look() == Stall("00000-1", STALL_TIMEOUT)
    assert watch.look() == Stall("00000-1", 2 * STALL_TIMEOUT)
    notes.begin_partition()
    assert watch.look() is None
    assert watch.look() == Stall("", STALL_TIMEOUT)


def test_another_process_sees_the_notes_also_of_long_and_broken_names() -> None:
    with os.fdopen(os.memfd_create("rows"), "wb") as memory:
        memory.truncate(RowNotes.SIZE)
        writer, reader = RowNotes(memory.fileno()), RowNotes(memory.fileno())
    for number, (name, shown) in enumerate(
        [("a", "a"), ("é" * 200, "é" * 119 + "\ufffd"), ("\udc80", "\\udc80"), ("", "")], start=1
    ):
        writer.note_row(name)
        assert reader.get_last() == (number, shown)
