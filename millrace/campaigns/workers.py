"""Workers of a campaign, wherever they run: whether they have joined, and how they end."""

import time
from datetime import timedelta
from typing import Protocol

from millrace.campaigns.campaign import Training
from millrace.campaigns.worker import find_joined_workers
from millrace.errors import NotFoundError, UnavailableError, WorkerError
from millrace.rentals import list_attempts
from millrace.storage import open_store

_POLL_INTERVAL = 1.0  # seconds between two checks for workers that join


class CampaignWorkers(Protocol):
    """The workers of a campaign, wherever they run."""

    @property
    def is_over(self) -> bool:
        """True if all of them have ended."""
        ...

    def raise_failure(self) -> None:
        """Raise the error that has ended the workers, if any."""
        ...

    def describe_end(self) -> str:
        """Return how the workers ended, and their last output."""
        ...

    def wait_until_done(self, timeout: timedelta) -> None:
        """Wait until all workers have ended by themselves, or the timeout has passed."""
        ...


def has_joined_worker(training: Training) -> bool:
    """Decide whether any worker has ever joined the run."""
    store = open_store(training.read_store, make_folder=False)
    try:
        return bool(find_joined_workers(store, training.run, training.uids))
    except NotFoundError:
        return False  # the run has not begun


def has_unreleased_machines(training: Training) -> bool:
    """Decide by the ledger whether a machine of the campaign is not released."""
    attempts = list_attempts(open_store(training.write_store), training.campaign)
    return any(one.release_record is None for one in attempts)


def await_workers(training: Training, workers: CampaignWorkers) -> int:
    """Wait until enough workers have joined the run for its first window to open.

    The quorum is enough. After `join_timeout`, one worker is enough.

    Args:
        training: Training, whose run has begun.
        workers: Processes or machines of the workers.

    Returns:
        Number of workers that have joined.

    Raises:
        UnavailableError: No worker has joined in this time.
        WorkerError, MachineError: The workers have failed, or have ended.
    """
    store = open_store(training.read_store, make_folder=False)
    run, uids, timeout = training.run, training.uids, training.rules.join_timeout
    deadline = time.monotonic() + timeout.total_seconds()
    enough = min(max(1, run.gather.quorum), len(uids))
    while True:
        found = len(find_joined_workers(store, run, uids))
        if found >= enough:
            return found
        workers.raise_failure()
        if workers.is_over:
            raise WorkerError(
                f"All workers have ended, and none has joined the run. {workers.describe_end()}"
            )
        if time.monotonic() > deadline:
            if found:
                return found
            raise UnavailableError(
                f"No worker has joined {run.name} in {timeout}: see the lines that they print. "
                "Let the script call `Worker.join` and `begin_window`, or raise "
                "`training.join_timeout`."
            )
        time.sleep(_POLL_INTERVAL)
