"""A slice of `python -m tests.soak --only rentals`."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.soak
def test_whatever_happens_to_an_owner_nothing_is_left(tmp_path: Path) -> None:
    # A process of its own: it forks, and this one has threads.
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", "--only", "rentals", "--rentals", "10"],
        cwd=Path(__file__).resolve().parents[3],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "rentals 10 " in done.stdout
