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
    """Worker that shards one partition at a time.

    Attributes:
        pid: Id of the worker's process on its machine; 0 before it is known.
        assignment: Partition that the worker shards; None if it is idle.
    """

    pid: int = 0
    assignment: Assignment | None = None

    @abstractmethod
    def start(self, job: PartitionJob, lease: Lease) -> None:
        """Start to shard a partition."""

    @abstractmethod
    def acknowledge(self, number: int) -> None:
        """Let the worker continue after an event."""

    @abstractmethod
    def wait_for_exit(self) -> WorkerExit:
        """Return the end of a worker whose last message was empty."""

    def finish(self) -> Assignment:
        """Return the partition that the worker has ended, and mark the worker as idle."""
        assert self.assignment is not None, "a worker without a partition reported an end"
        assignment, self.assignment = self.assignment, None
        return assignment


class WorkerPool(ABC):
    """Workers of a run."""

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """True if a worker has a partition."""

    @abstractmethod
    def find_idle(self) -> PartitionWorker | None:
        """Return a worker without a partition, or None if there is none."""

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
