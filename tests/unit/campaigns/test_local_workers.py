"""Lines that workers on this machine print."""

import io
import os

from millrace.campaigns.local_workers import iterate_printed_lines


def test_a_progress_bar_is_reported_while_its_line_goes_on() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as printed, os.fdopen(writer, "wb") as bar:
        for number in range(100):
            bar.write(b"\r%80d" % number)
        bar.flush()
        lines = iterate_printed_lines(printed)
        assert next(lines).strip() == "23"  # the line has no end yet
        bar.write(b"\r done\nthe next line\n")
        bar.close()
        assert [line.strip() for line in lines][-2:] == ["done", "the next line"]


def test_lines_are_cut() -> None:
    printed = io.BytesIO(b"first\r\n\n" + b"x" * 5000 + b"\nlast")
    assert list(iterate_printed_lines(printed)) == ["first", "", "x" * 2000, "last"]
