"""Worker processes are started and ended together with their driver."""

import subprocess
import sys
from typing import Any

import pytest

from millrace.datasets import worker_processes
from millrace.datasets.worker_processes import ProcessPool

CHILD = """
import time
from millrace.processes import end_with_parent
end_with_parent()
print("ready", flush=True)
time.sleep(600)
"""
PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {CHILD!r}])
"""


def test_a_pool_that_cannot_start_a_process_stops_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        if len(started) == 2:
            raise OSError("no memory for a process")
        started.append(subprocess.Popen(*args, **options))
        return started[-1]

    stand_in = type("", (), {**vars(subprocess), "Popen": staticmethod(start)})
    monkeypatch.setattr(worker_processes, "subprocess", stand_in)
    with pytest.raises(OSError, match="no memory for a process"), ProcessPool(3):
        pass
    assert [process.returncode is not None for process in started] == [True, True]


def test_a_process_ends_with_its_parent_whatever_it_does() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        assert parent.stdout.readline() == b"ready\n"
        parent.kill()
        assert parent.stdout.read() == b""  # ends with the last process that can write there
