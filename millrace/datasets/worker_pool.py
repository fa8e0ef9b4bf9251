"""Workers of a sharding run, and pools of them: interfaces for processes and for tasks of Ray."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from millrace.datasets.worker import PartitionJob
from millrace.lease import Lease


class Assignment(NamedTuple):
    """Partition that a worker shards.

    Attributes:
        job: Job of the partition.
        lease: Lease of this run on the partition.
    """

    job: PartitionJob
    lease: Lease


class WorkerExit(NamedTuple):
    """End of a worker that was not stopped.

    Attributes:
        cause: End of the worker, such as ``was killed by SIGKILL``.
        may_lack_memory: True if short memory is a likely reason.
    """

    cause: str
    may_lack_memory: bool


class PartitionWorker(ABC):
    """Worker that reads the rows of one partition at a time.

    Meanwhile the partition before may end: its last shards are uploaded.

    Attributes:
        pid: Id of the worker's process on its machine; 0 before it is known.
        reading: Partition whose rows the worker reads; None if the worker is idle.
        ending: Partition whose rows it has read, and whose end it has not reported.
    """

    pid: int = 0
    reading: Assignment | None = None
    ending: Assignment | None = None

    @abstractmethod
    def start(self, job: PartitionJob, lease: Lease) -> None:
        """Start to shard a partition."""

    @abstractmethod
    def acknowledge(self, number: int) -> None:
        """Let the worker continue after an event."""

    @abstractmethod
    def wait_for_exit(self) -> WorkerExit:
        """Return the end of a worker whose last message was empty."""

    @property
    def is_busy(self) -> bool:
        """True if the worker has a partition."""
        return bool(self.reading or self.ending)

    def note_read(self) -> None:
        """Note that the rows of the partition were read: the worker can read the next one."""
        assert self.reading is not None, "a worker has read a partition that it did not have"
        self.ending, self.reading = self.reading, None

    def finish(self) -> Assignment:
        """Return and remove the first partition of the worker, which has ended."""
        ended, self.ending = self.ending, None
        if ended is None:
            ended, self.reading = self.reading, None
        assert ended is not None, "a worker without a partition reported an end"
        return ended


class WorkerPool(ABC):
    """Workers of a run."""

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """True if a worker has a partition."""

    @abstractmethod
    def find_idle(self) -> PartitionWorker | None:
        """Return a worker that can read a partition, or None if there is none."""

    @abstractmethod
    def receive(self, timeout: float | None) -> tuple[PartitionWorker, dict[str, Any]] | None:
        """Return the next message of a worker; an empty message means that the worker has ended.

        Args:
            timeout: Seconds to wait; None to wait for a message. Also then, the result may be None
                when there may be another idle worker.
        """

    @abstractmethod
    def replace(self, worker: PartitionWorker) -> None:
        """Replace a worker that has ended."""
