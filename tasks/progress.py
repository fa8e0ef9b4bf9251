"""Progress of the engine, as a live progress artifact."""

import abc
import contextvars
import logging
import threading
import time
from collections import Counter
from types import TracebackType
from typing import Self, cast
from uuid import UUID

from prefect import get_run_logger
from prefect.artifacts import create_progress_artifact, update_progress_artifact

from millrace.checkpoints.progress_events import CooldownProgressed, ImportStarted, PartStored
from millrace.cleanup.progress_events import ObjectsCopied, ObjectsListed
from millrace.datasets.progress_events import (
    PartitionEnded,
    PartitionOpened,
    PartitionsPending,
    PlanCommitted,
    ShardCommitted,
    WorkerLost,
)
from millrace.deletion import ObjectsDeleted
from millrace.errors import format_error
from millrace.gradients.progress_events import (
    GradientAccepted,
    GradientRefused,
    LinkApplied,
    PayloadConverted,
    QuotaExceeded,
    RosterChanged,
    WindowMerged,
    WorkersAwaited,
)
from millrace.progress import Event
from millrace.rentals.progress_events import (
    MachineMissing,
    MachineReady,
    MachineReleased,
    OfferTaken,
    OutputPrinted,
    PriceRaised,
    RentalCostUpdated,
    RentalFailed,
    RentalInterrupted,
    RentalWaiting,
)
from millrace.schemas.rental import ReleaseReason
from millrace.swarm.progress_events import (
    FileMismatched,
    NodeAccused,
    NodeLost,
    NodeMisread,
    NodeUntrusted,
    PrewarmProgressed,
)
from tasks.formatting import format_count, format_duration, format_rate, format_size
from tasks.reports import escape

logger = logging.getLogger("millrace.flows")

_UPDATE_INTERVAL = 2.0  # seconds between two updates of the artifact
_STOP_TIMEOUT = 60.0  # seconds that the end of a run waits for the last update


class LiveProgress(abc.ABC):
    """Callback for events of the engine, and context manager that shows the progress.

    A call only counts the event. A thread updates the artifact every two seconds. If the server
    does not answer, only the progress is lost.

    Attributes:
        bytes_by_second: Bytes in each second since the start.
    """

    def __init__(self, key: str) -> None:
        """Begin to count.

        Args:
            key: Key of the artifact.
        """
        self.bytes_by_second: Counter[int] = Counter()
        self._key = key
        self._began = time.monotonic()
        self._log = get_run_logger()
        self._lock = threading.Lock()
        self._shown = self._end = ""
        self._artifact: UUID | None = None
        self._stop = threading.Event()
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name="progress", daemon=True
        )

    def __enter__(self) -> Self:
        """Show the progress."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Show the final progress, and the error that ended the block."""
        with self._lock:
            if error is None:
                self._complete()
            elif isinstance(error, Exception):
                self._end = f" Failed: {escape(format_error(error))}"  # Prefect shows Markdown
            else:
                self._end = " Stopped."
        self._stop.set()
        self._thread.join(_STOP_TIMEOUT)

    def __call__(self, event: Event) -> None:
        """Count an event."""
        with self._lock:
            self._handle_event(event)

    @property
    def percent(self) -> float:
        """Percentage of the progress."""
        with self._lock:
            return min(100.0, 100 * self._compute_share())

    @property
    def sentence(self) -> str:
        """Progress in words."""
        with self._lock:
            return self._describe(time.monotonic() - self._began) + self._end

    @abc.abstractmethod
    def _handle_event(self, event: Event) -> None: ...

    @abc.abstractmethod
    def _complete(self) -> None:
        """Mark all work as done."""

    @abc.abstractmethod
    def _compute_share(self) -> float: ...

    @abc.abstractmethod
    def _describe(self, seconds: float) -> str: ...

    def _add_bytes(self, size: int) -> None:
        self.bytes_by_second[int(time.monotonic() - self._began)] += size

    def _run(self) -> None:
        has_failed = is_last = False
        interval = 0.0
        while not is_last:
            is_last = self._stop.wait(interval)
            interval = _UPDATE_INTERVAL
            try:
                self._show()
            except Exception as error:  # noqa: BLE001 - only the progress is lost
                if not has_failed:
                    logger.warning("The progress is not shown for now: %s", type(error).__name__)
                has_failed = True

    def _show(self) -> None:
        sentence = self.sentence
        if self._artifact is None:
            created = create_progress_artifact(self.percent, self._key, sentence)
            self._artifact = cast("UUID", created)
        elif sentence != self._shown:
            update_progress_artifact(self._artifact, self.percent, sentence)
        self._shown = sentence


class ShardProgress(LiveProgress):
    """Progress of a dataset: partitions that ended, and the fractions of the open ones."""

    _partitions = _ended = _shards = _size = _logged_tenths = 0

    def __init__(self, key: str) -> None:
        """Begin to count.

        Args:
            key: Key of the artifact.
        """
        super().__init__(key)
        self._fractions: dict[str, float] = {}

    def _handle_event(self, event: Event) -> None:
        match event:
            case PlanCommitted():
                self._partitions = event.partitions
                self._log.info(
                    "%s of %s planned as %s",
                    format_count(event.files, "file"),
                    format_size(event.size),
                    format_count(self._partitions, "partition"),
                )
            case PartitionsPending():
                self._ended = self._partitions - event.partitions
            case PartitionOpened():
                self._fractions[event.partition] = event.fraction
            case ShardCommitted():
                self._shards += len(event.keys)
                self._size += event.size
                self._add_bytes(event.size)
                self._fractions[event.partition] = event.fraction
            case PartitionEnded():
                self._ended += 1
                self._fractions.pop(event.partition, None)
                self._log_tenth()
            case WorkerLost():
                self._log.warning("A worker %s; another takes its place", event.cause)
            case _:
                pass

    def _log_tenth(self) -> None:
        """Log each tenth of the partitions, since there may be thousands of partitions."""
        tenth = 10 * self._ended // self._partitions if self._partitions else 0
        if tenth > self._logged_tenths:
            self._logged_tenths = tenth
            self._log.info(
                "%d of %s ended", self._ended, format_count(self._partitions, "partition")
            )

    def _complete(self) -> None:
        self._ended = self._partitions  # another run may have ended some partitions
        self._fractions.clear()

    def _compute_share(self) -> float:
        done = self._ended + sum(self._fractions.values())
        return done / self._partitions if self._partitions else 0.0

    def _describe(self, seconds: float) -> str:
        if not self._partitions:
            return "Reading the source's listing."
        return (
            f"{self._ended} of {format_count(self._partitions, 'partition')} ended; this run has "
            f"made {format_count(self._shards, 'shard')}, {format_size(self._size)}, at "
            f"{format_rate(self._size, seconds)}."
        )


class SwarmProgress(LiveProgress):
    """Progress of the nodes of a cluster: present bytes of all bytes."""

    _present_bytes = _moved_bytes = _total_bytes = _nodes = _ready = 0

    def _handle_event(self, event: Event) -> None:
        match event:
            case PrewarmProgressed():
                self._add_bytes(event.moved - self._moved_bytes)
                self._moved_bytes = event.moved
                self._present_bytes, self._total_bytes = event.present, event.total
                self._nodes, self._ready = event.nodes, event.ready
            case NodeLost():
                self._log.warning("%s is lost: %s", event.node, event.reason)
            case NodeAccused():
                self._log.warning("%s says that %s gave it wrong bytes", event.accuser, event.node)
            case NodeMisread():
                self._log.warning("%s read wrong bytes of %s", event.node, event.origin)
            case NodeUntrusted():
                self._log.warning("%s gave wrong bytes, and gets no more requests", event.node)
            case FileMismatched():
                self._log.warning("%s has wrong bytes, and is read again", event.origin)
            case _:
                pass

    def _complete(self) -> None:
        self._present_bytes = self._total_bytes

    def _compute_share(self) -> float:
        return self._present_bytes / self._total_bytes if self._total_bytes else 0.0

    def _describe(self, seconds: float) -> str:
        if not self._total_bytes:
            return "Looking for the files and the nodes."
        remaining_seconds = (
            (self._total_bytes - self._present_bytes) * seconds / self._moved_bytes
            if self._moved_bytes
            else 0.0
        )
        ahead = f", {format_duration(remaining_seconds)} to go" if remaining_seconds else ""
        present, total = format_size(self._present_bytes), format_size(self._total_bytes)
        return (
            f"{self._ready} of {format_count(self._nodes, 'node')} ready; {present} of {total} "
            f"there, at {format_rate(self._moved_bytes, seconds)}{ahead}."
        )


class CheckpointProgress(LiveProgress):
    """Progress of a checkpoint: bytes in its bucket."""

    _stored_bytes = _members = 0

    def __init__(
        self,
        key: str,
        total_bytes: int = 0,
        *,
        waiting: str = "Waiting for the votes of the members.",
    ) -> None:
        """Begin to count.

        Args:
            key: Key of the artifact.
            total_bytes: Bytes of the checkpoint; 0 if unknown.
            waiting: Text while the number of bytes is unknown.
        """
        super().__init__(key)
        self._total_bytes, self._waiting = total_bytes, waiting

    def _handle_event(self, event: Event) -> None:
        match event:
            case CooldownProgressed():
                self._stored_bytes, self._total_bytes = event.stored, event.size
                self._members = event.members
            case ImportStarted():
                self._total_bytes = event.size
            case PartStored():
                self._stored_bytes += event.size
            case _:
                pass

    def _complete(self) -> None:
        self._stored_bytes = self._total_bytes

    def _compute_share(self) -> float:
        return self._stored_bytes / self._total_bytes if self._total_bytes else 0.0

    def _describe(self, seconds: float) -> str:
        if not self._total_bytes:
            return self._waiting
        through = f"; {format_count(self._members, 'member')} through" if self._members else ""
        return (
            f"{format_size(self._stored_bytes)} of {format_size(self._total_bytes)} there{through}."
        )


class WindowProgress(LiveProgress):
    """Progress of a run of gradients: windows merged, and workers that have sent."""

    _merged = _window = _received = _refused = _registered = 0

    def __init__(self, key: str, workers: int, windows: int | None = None) -> None:
        """Begin to count.

        Args:
            key: Key of the artifact.
            workers: Number of workers that are asked first in each window.
            windows: Largest number of windows to merge, if known.
        """
        super().__init__(key)
        self._workers, self._windows = workers, windows
        self._stored: dict[str, tuple[int, int]] = {}

    def _handle_event(self, event: Event) -> None:
        match event:
            case GradientAccepted() | PayloadConverted():
                self._received += 1
                self._add_bytes(event.size)
            case GradientRefused():
                self._refused += 1
                self._log.warning(
                    "The gradient of %s is refused: %s", event.uid, event.reason.label
                )
            case QuotaExceeded():
                self._warn_of_quota(event.uid, event.objects, event.size)
            case WorkersAwaited():
                self._log.info(
                    "Window %d waits for workers to register: %d of %d",
                    event.window, event.found, event.quorum,
                )  # fmt: skip
            case RosterChanged():
                self._registered = event.active
                self._log.info("Window %d: %s", event.window, event.describe())
            case LinkApplied():
                self._window = event.window
            case WindowMerged():
                self._window, self._merged = event.window, self._merged + 1
                self._received = self._refused = 0
            case _:
                pass

    def _warn_of_quota(self, uid: str, objects: int, stored: int) -> None:
        """Warn of a worker that stores too much: once, and again when the amount has doubled."""
        before, before_size = self._stored.get(uid, (0, 0))
        if objects < 2 * before and stored < 2 * before_size:
            return
        self._stored[uid] = objects, stored
        self._log.warning(
            "%s stores %s, %s, below its prefix: more than `gather` allows. Cleaning rules for "
            "gradients delete those of merged windows, and rules for junk other objects after the "
            "run. Those of a campaign stay until its end.",
            uid, format_count(objects, "object"), format_size(stored),
        )  # fmt: skip

    def _complete(self) -> None:
        self._windows = self._merged

    def _compute_share(self) -> float:
        if self._windows is None:  # the total is unknown: share of the open window
            return min(1.0, self._received / max(1, self._workers + self._registered))
        return self._merged / self._windows if self._windows else 1.0

    def _describe(self, seconds: float) -> str:
        workers = self._workers + self._registered
        if workers and self._received <= workers:
            came = f"{self._received} of {format_count(workers, 'worker')}"
        else:  # an import, reserves, or workers that registered before this aggregator began
            came = format_count(self._received, "gradient")
        refused = f", {self._refused} refused" if self._refused else ""
        return (
            f"{format_count(self._merged, 'window')} merged by this run, the last is "
            f"{self._window}; to the next {came} came{refused}."
        )


class CleaningProgress(LiveProgress):
    """Progress of a cleaning: objects that were listed, or deleted by a plan."""

    _seen = _deleted = _size = 0

    def __init__(self, key: str, total: int = 0) -> None:
        """Begin to count.

        Args:
            key: Key of the artifact.
            total: Number of objects of the executed plan; 0 while a plan is made.
        """
        super().__init__(key)
        self._total = total

    def _handle_event(self, event: Event) -> None:
        match event:
            case ObjectsListed():
                self._seen = event.objects
            case ObjectsDeleted():
                self._add_bytes(event.size - self._size)
                self._deleted, self._size = event.objects, event.size
            case _:
                pass

    def _complete(self) -> None:
        self._total = self._deleted

    def _compute_share(self) -> float:
        return self._deleted / self._total if self._total else 0.0

    def _describe(self, seconds: float) -> str:
        if not self._total and not self._deleted:
            return f"{format_count(self._seen, 'object')} seen."
        deleted = format_count(self._deleted, "object")
        return f"{deleted} of {self._total:,} deleted, {format_size(self._size)}."


class CopyProgress(LiveProgress):
    """Progress of a copy: objects that were compared or copied. Their total is not known."""

    _objects = _size = 0
    _is_over = False

    def _handle_event(self, event: Event) -> None:
        if isinstance(event, ObjectsCopied):
            self._add_bytes(event.size - self._size)
            self._objects, self._size = event.objects, event.size

    def _complete(self) -> None:
        self._is_over = True

    def _compute_share(self) -> float:
        return float(self._is_over)

    def _describe(self, seconds: float) -> str:
        return (
            f"{format_count(self._objects, 'object')} compared or copied, "
            f"{format_size(self._size)}, at {format_rate(self._size, seconds)}."
        )


class RentalProgress(LiveProgress):
    """Progress of a rental: machines that run, machines that are done, and their cost."""

    _dollars = 0.0

    def __init__(self, key: str, total: int) -> None:
        """Begin to count.

        Args:
            key: Key of the artifact.
            total: Number of machines of the rental, until an event says how many it needs.
        """
        super().__init__(key)
        self._total = total
        self._ready: set[str] = set()
        self._done: set[str] = set()

    def _handle_event(self, event: Event) -> None:
        match event:
            case RentalCostUpdated():
                self._total, self._dollars = event.machines, event.dollars
            case OfferTaken():
                self._log.info(
                    "%s: takes %s in %s for $%.3f an hour",
                    event.machine, event.gpu, event.location, event.dollars_per_hour,
                )  # fmt: skip
            case PriceRaised():
                self._log.warning(
                    "%s: costs $%.3f an hour, and was offered for $%.3f",
                    event.machine, event.dollars_per_hour, event.offered,
                )  # fmt: skip
            case MachineReady():
                self._ready.add(event.machine)
                self._log.info("%s: its program runs", event.machine)
            case MachineMissing():
                self._log.warning("%s: not replaced yet: %s", event.machine, event.message)
            case MachineReleased():
                self._ready.discard(event.machine)
                if event.reason is ReleaseReason.DONE:
                    self._done.add(event.machine)
                self._log.info("%s: released, %s", event.machine, event.message)
            case RentalWaiting():
                self._log.info("Waiting for %s: %s", event.rental, event.message)
            case RentalFailed():
                self._log.warning("%s: %s", event.rental, event.message)
            case RentalInterrupted():
                self._log.warning(
                    "Machines are being released: wait. Machines that are not released are billed."
                )
            case OutputPrinted():
                self._log.info("%s| %s", event.machine, event.text)
            case _:
                pass

    def _complete(self) -> None:
        pass  # each machine that runs or is done was counted

    def _compute_share(self) -> float:
        return (len(self._ready) + len(self._done)) / self._total

    def _describe(self, seconds: float) -> str:
        machines = format_count(self._total, "machine")
        done = f", {len(self._done)} done" if self._done else ""
        return f"{len(self._ready)} of {machines} run{done}, ${self._dollars:.2f}."
