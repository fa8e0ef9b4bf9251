from pathlib import Path

import pytest

from examples.demo import Size
from millrace.testing.process import REPOSITORY
from tests.support.demo import describe, run_demo

SMALL = Size(machines=2, windows=2, steps=10)


def test_the_figures_of_readme_are_those_of_the_demo() -> None:
    assert describe(Size()) in (REPOSITORY / "README.md").read_text()


@pytest.mark.soak
def test_the_demo(tmp_path: Path) -> None:
    run_demo(tmp_path / "millrace", SMALL)
