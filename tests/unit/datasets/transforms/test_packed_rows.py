"""Rows that are packed are found by their names."""

import random

from millrace.datasets.transforms.packed_rows import PackedRows


def test_rows_are_found_by_their_names():
    rng = random.Random(1)
    wanted = {
        name: {"txt": rng.randbytes(rng.randrange(5)), "cls": b"%d" % number}
        for number, name in enumerate(["", "é", "\udc80", "a\0", *map(str, range(2000))])
    }
    rows = PackedRows()
    for name, values in wanted.items():
        rows.add(name, dict(sorted(values.items())) if rng.random() < 0.5 else values)
    assert rows.finish() is None
    assert len(rows) == len(wanted)
    assert {name: rows.find(name) for name in wanted} == wanted
    assert rows.find("2000") is None
    assert rows.find("\udc81") is None


def test_a_name_of_two_rows_is_returned():
    rows = PackedRows()
    for name in [*map(str, range(100)), "é", "\udc80", "é"]:
        rows.add(name, {"txt": b""})
    assert rows.finish() == "é"


def test_no_rows_have_no_names():
    rows = PackedRows()
    assert rows.finish() is None
    assert (len(rows), rows.find("a")) == (0, None)
