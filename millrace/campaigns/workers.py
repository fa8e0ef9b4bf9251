"""Workers of a campaign, wherever they run: whether they have joined, and how they end."""

import time
from datetime import timedelta
from typing import Protocol

from millrace.campaigns.campaign import Training
from millrace.campaigns.worker import find_joined_workers
from millrace.checkpoints.cooldown.membership import make_census
from millrace.errors import NotFoundError, UnavailableError, WorkerError
from millrace.lease import Holder, StoreClock, find_term_start
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


class _JoinedWorkers:
    """Workers that have joined the run since the campaign's leader has started.

    A worker that joined before and still lives counts too. The objects of earlier processes do not.

    Args:
        training: Training of the workers.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._store = open_store(training.read_store, make_folder=False)
        write_store = open_store(training.write_store)
        clock = StoreClock.read(write_store, training.campaign, Holder.describe_this_process())
        self._census = make_census(self._store, training.epoch_job, clock)
        self._started_at = find_term_start(write_store, training.keys.lease)

    def find(self, *, only_living: bool = False) -> set[str]:
        """Return the names of the workers.

        Args:
            only_living: Whether to leave out workers whose script has ended since.

        Raises:
            NotFoundError: The run has not begun.
        """
        run, uids, started_at = self._training.run, self._training.uids, self._started_at
        if started_at is None:  # no leader: any worker counts
            return find_joined_workers(self._store, run, uids)
        living = {uid: held.since for uid, held in self._census.find_holders().items()}
        since = {uid: min(started_at, living.get(uid, started_at)) for uid in uids}
        joined = find_joined_workers(self._store, run, uids, since)
        return joined & living.keys() if only_living else joined


def has_joined_worker(training: Training) -> bool:
    """Decide whether any worker has joined the run since the campaign's leader has started."""
    try:
        return bool(_JoinedWorkers(training).find())
    except NotFoundError:
        return False  # the run has not begun


def has_unreleased_machines(training: Training) -> bool:
    """Decide by the ledger whether a machine of the campaign is not released."""
    attempts = list_attempts(open_store(training.write_store), training.campaign)
    return any(one.release_record is None for one in attempts)


def await_workers(training: Training, workers: CampaignWorkers) -> int:
    """Wait until enough workers have joined the run for its next window to be merged.

    The quorum is enough. After `join_timeout`, one worker is enough. Workers count if they still
    live, also those of an earlier start of the campaign.

    Args:
        training: Training, whose run has begun.
        workers: Processes or machines of the workers.

    Returns:
        Number of living workers that have joined.

    Raises:
        UnavailableError: No worker has joined in this time.
        WorkerError, MachineError: The workers have failed, or have ended.
    """
    joined = _JoinedWorkers(training)
    run, timeout = training.run, training.options.join_timeout
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        found = len(joined.find(only_living=True))
        if found >= training.quorum:
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
