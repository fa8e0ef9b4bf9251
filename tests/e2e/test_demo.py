import fcntl
import sys
from pathlib import Path

import pytest

from examples import demo
from examples.demo import Size
from millrace.testing.process import REPOSITORY
from tests.support.demo import describe, run_demo

SMALL = Size(machines=2, windows=2, steps=10)


def test_the_figures_of_readme_are_those_of_the_demo() -> None:
    assert describe(Size()) in (REPOSITORY / "README.md").read_text()


def test_a_second_demo_leaves_the_ledger_of_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "HOME", tmp_path)
    monkeypatch.setattr(demo, "STORE", tmp_path / "store")
    monkeypatch.setattr(sys, "argv", ["demo"])
    ledger = tmp_path / "store" / "_rentals"
    ledger.mkdir(parents=True)
    with (tmp_path / "lock").open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match=f"Another demo runs in {tmp_path}: wait until"):
            demo.main()
    assert ledger.exists()
    assert not (tmp_path / "prefect").exists()


@pytest.mark.soak
def test_the_demo(tmp_path: Path) -> None:
    run_demo(tmp_path / "millrace", SMALL)
