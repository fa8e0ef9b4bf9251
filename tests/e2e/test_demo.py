from pathlib import Path

from examples.demo import Size
from millrace.testing.process import REPOSITORY
from tests.support.demo import describe, run_demo

SMALL = Size(machines=2, windows=2, steps=10)


def test_the_demo(tmp_path: Path) -> None:
    assert describe(Size()) in (REPOSITORY / "README.md").read_text()
    run_demo(tmp_path / "millrace", SMALL)
