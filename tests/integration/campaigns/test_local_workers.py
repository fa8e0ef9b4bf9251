"""Workers of a campaign that run here."""

import subprocess
import sys
from datetime import timedelta

import pytest

from millrace.campaigns import LocalWorkerProcesses
from millrace.campaigns.progress_events import (
    LocalWorkerFailed,
    LocalWorkerLate,
    LocalWorkerPrinted,
)
from millrace.errors import WorkerError
from millrace.progress import Event
from tests.support.campaigns.training import MakeTraining

SOON = timedelta(minutes=5)


def test_what_workers_print_is_reported_line_by_line(make_training: MakeTraining) -> None:
    told: list[Event] = []
    command = (sys.executable, "-c", "print('I am {slot}')")
    with LocalWorkerProcesses(make_training(command=command), progress=told.append) as workers:
        workers.wait_until_done(SOON)
        assert workers.is_over
        workers.raise_failure()
        assert workers.describe_end().endswith("The last lines of worker-0:\nI am 0")
    assert set(told) == {
        LocalWorkerPrinted(uid="worker-0", text="I am 0"),
        LocalWorkerPrinted(uid="worker-1", text="I am 1"),
    }


def test_workers_that_have_all_failed_say_their_last_lines(make_training: MakeTraining) -> None:
    told: list[Event] = []
    command = (sys.executable, "-c", "import sys; print('the last line'); sys.exit(3)")
    training = make_training(command=command, restarts=0)
    with LocalWorkerProcesses(training, progress=told.append) as workers:
        workers.wait_until_done(SOON)
        with pytest.raises(WorkerError, match=r"(?s)All workers have failed: .*\nthe last line"):
            workers.raise_failure()
    failed = [(one.uid, one.code) for one in told if isinstance(one, LocalWorkerFailed)]
    assert failed == [("worker-0", 3), ("worker-1", 3)]


def test_workers_end_with_the_block(make_training: MakeTraining) -> None:
    told: list[Event] = []
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    with LocalWorkerProcesses(make_training(command=command), progress=told.append) as workers:
        workers.wait_until_done(timedelta(0))
        assert not workers.is_over
    assert workers.is_over
    late = [(one.uid, one.timeout) for one in told if isinstance(one, LocalWorkerLate)]
    assert late == [("worker-0", timedelta(0)), ("worker-1", timedelta(0))]


def test_a_group_with_the_number_of_an_ended_worker_gets_no_signal(
    make_training: MakeTraining,
) -> None:
    other = subprocess.Popen(
        ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    with LocalWorkerProcesses(make_training(command=("true",))) as workers:
        workers.wait_until_done(SOON)
        for process in workers._processes.values():
            process.pid = other.pid  # the system gives numbers of ended processes to new ones
    assert other.communicate(b"still alive")[0] == b"still alive"
