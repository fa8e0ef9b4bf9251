"""README's demo by the letter, on a clone in which nothing is installed."""

import re
from pathlib import Path

from tests.support.readme import block, make_clone


def test_the_demo(tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "millrace")
    shown = clone.run(block("Demo", "console"))
    assert re.search(r"^  10 windows, 250 steps of each of 4 workers$", shown, re.MULTILINE)
    assert re.search(r"books: 4 machines rented, .*\n  0 left$", shown, re.MULTILINE), shown
