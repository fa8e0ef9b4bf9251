"""Lines are the same however a file is cut into sections."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.datasets.sources.lines import Line, Section, split_lines

_JUMP = 1000  # the cursor of a section is ahead of its offset by this for each section before it


def cut(body: bytes, places: list[int]) -> list[Section]:
    edges = sorted({0, len(body), *(place for place in places if place <= len(body))})
    return [
        Section(edges[n] + _JUMP * n, edges[n], body[edges[n] : edges[n + 1]])
        for n in range(len(edges) - 1)
    ]


def collect(sections: list[Section], end: int = 1 << 60) -> list[tuple[int, int, int, bytes]]:
    lines = split_lines(iter(sections), "a", end)
    return [
        (cursor, offset, after, held.pop())
        for one in lines
        for cursor, offset, after, held in one.take()
    ]


@given(
    body=st.lists(st.sampled_from([b"", b"x", b"yz" * 9, b"\r"]), max_size=9).map(b"\n".join),
    places=st.lists(st.integers(1, 60), max_size=5),
)
def test_lines_have_their_bytes_and_positions(body: bytes, places: list[int]) -> None:
    sections = cut(body, places)
    cursors = {
        section.offset + n: section.cursor + n
        for section in sections
        for n in range(len(section.data))
    }
    expected: list[tuple[int, int, int, bytes]] = []
    at = 0
    for line in body.splitlines(keepends=True) if b"\r" not in body else split(body):
        last = at + len(line) - 1
        expected.append((cursors[at], at, cursors[last] + 1, line.removesuffix(b"\n")))
        at += len(line)
    assert collect(sections) == expected


def split(body: bytes) -> list[bytes]:
    lines = [line + b"\n" for line in body.split(b"\n")]
    return [*lines[:-1], *([lines[-1][:-1]] if lines[-1] != b"\n" else [])]


def test_lines_are_given_in_parts_of_bounded_size() -> None:
    body = b"x" * 999 + b"\n"
    parts = list(split_lines(iter([Section(0, 0, body * 5000)]), "a", 1 << 60))
    assert sum(len(one.data) for one in parts) == 5000
    assert max(one.size for one in parts) < 400 << 10
    parts = list(split_lines(iter([Section(0, 0, b"\n" * (1 << 20))]), "a", 1 << 60))
    assert sum(len(one.data) for one in parts) == 1 << 20
    assert max(len(one.data) for one in parts) <= 1 << 16


def test_no_piece_is_read_after_the_end() -> None:
    read: list[int] = []

    def iterate() -> Iterator[Section]:
        for number in range(9):
            read.append(number)
            yield Section(10 * number, 10 * number, b"123456789\n")

    found = next(split_lines(iterate(), "a", 30))
    assert (len(found.data), read) == (3, [0, 1, 2])
    found.keep(10, 20)
    assert [line[:3] for line in found.take()] == [(10, 10, 20)]


def test_the_lines_before_an_error_are_there_before_the_error() -> None:
    def fail() -> Iterator[Section]:
        yield Section(0, 0, b"a\nb")
        raise OSError("gone")

    lines = split_lines(fail(), "a", 1 << 60)
    found: list[Line] = [*next(lines).take()]
    assert found == [(0, 0, 2, [b"a"])]
    with pytest.raises(OSError, match="gone"):
        next(lines)
