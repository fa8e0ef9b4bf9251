"""Start and stop worker processes."""

import os
import signal

from millrace.datasets.worker_processes import ProcessPool, WorkerProcess


def test_ctrl_c_reaches_no_worker_before_its_main_function():
    with ProcessPool(1) as pool:
        worker = pool.find_idle()
        assert isinstance(worker, WorkerProcess)
        os.kill(worker.pid, signal.SIGINT)
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert worker.wait_for_exit().cause == "exited with code 0"
