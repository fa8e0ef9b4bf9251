"""Worker processes are started and ended together with their driver."""

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from millrace.datasets import worker_processes
from millrace.datasets.worker_processes import ProcessPool, WorkerProcess

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


def test_ctrl_c_reaches_no_worker_before_its_main_function() -> None:
    with ProcessPool(1) as pool:
        worker = pool.find_idle()
        assert isinstance(worker, WorkerProcess)
        os.kill(worker.pid, signal.SIGINT)
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert worker.wait_for_exit().cause == "exited with code 0"
