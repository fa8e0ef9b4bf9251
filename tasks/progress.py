"""Progress of the engine, as one live progress artifact."""

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

from millrace.errors import one_line
from millrace.progress import Event
from tasks.reports import escape
from tasks.words import duration, format_count, rate, size

logger = logging.getLogger("millrace.flows")

_EVERY = 2.0  # seconds between two updates of the artifact
_PATIENCE = 5.0  # seconds that the end of a run waits for the last update


class LiveProgress(abc.ABC):
    """Listens to the engine, and shows how far it is while the block lasts.

    Calling it only counts; a thread of its own tells the server, every two seconds. A server
    that does not answer costs the picture and nothing else.

    Attributes:
        pace: Bytes in each second since the beginning.
    """

    def __init__(self, key: str) -> None:
        """Begin to count.

        Args:
            key: The artifact's.
        """
        self.pace: Counter[int] = Counter()
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
        """Show it."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Show it for the last time, and how it ended."""
        with self._lock:
            if error is None:
                self._complete()
            elif isinstance(error, Exception):
                self._end = f" Failed: {escape(one_line(error))}"  # Prefect shows Markdown
            else:
                self._end = " Stopped."
        self._stop.set()
        self._thread.join(_PATIENCE)

    def __call__(self, event: Event) -> None:
        """Count what happened."""
        with self._lock:
            self._count(event)

    @property
    def percent(self) -> float:
        """Percentage of the progress."""
        with self._lock:
            return min(100.0, 100 * self._share())

    @property
    def sentence(self) -> str:
        """Progress in words."""
        with self._lock:
            return self._words(time.monotonic() - self._began) + self._end

    @abc.abstractmethod
    def _count(self, event: Event) -> None: ...

    @abc.abstractmethod
    def _complete(self) -> None:
        """All of it is done, whatever was counted."""

    @abc.abstractmethod
    def _share(self) -> float: ...

    @abc.abstractmethod
    def _words(self, seconds: float) -> str: ...

    def _add(self, size: int) -> None:
        self.pace[int(time.monotonic() - self._began)] += size

    def _run(self) -> None:
        try:
            self._artifact = cast("UUID", create_progress_artifact(0.0, self._key, self.sentence))
            while not self._stop.wait(_EVERY):
                self._show()
            self._show()
        except Exception as error:  # noqa: BLE001 - the picture is lost, the work is not
            logger.warning("The progress is no longer shown: %s", type(error).__name__)

    def _show(self) -> None:
        sentence = self.sentence
        if self._artifact is not None and sentence != self._shown:
            update_progress_artifact(self._artifact, self.percent, sentence)
            self._shown = sentence


class ShardProgress(LiveProgress):
    """Progress of a dataset: splits that ended, and the parts of those that are open."""

    _splits = _ended = _shards = _size = 0

    def __init__(self, key: str) -> None:
        """Begin to count.

        Args:
            key: The artifact's.
        """
        super().__init__(key)
        self._through: dict[str, float] = {}

    def _count(self, event: Event) -> None:
        figures = event.figures
        match event.name:
            case "plan.committed":
                self._splits = int(figures["splits"])
                self._log.info(
                    "%s of %s planned as %s",
                    format_count(int(figures["files"]), "file"),
                    size(int(figures["bytes"])),
                    format_count(self._splits, "split"),
                )
            case "splits.left":
                self._ended = self._splits - int(figures["splits"])
            case "split.opened":
                self._through[event.subject] = float(figures.get("through", 0))
            case "shard.committed":
                self._shards += bool(figures["samples"])  # else only bad rows were committed
                self._size += int(figures["bytes"])
                self._add(int(figures["bytes"]))
                if "split" in figures:
                    self._through[str(figures["split"])] = float(figures["through"])
            case "split.ended":
                self._ended += 1
                self._through.pop(event.subject, None)
                self._log.info("%s ended, %d of %d", event.subject, self._ended, self._splits)
            case "worker.lost":
                self._log.warning("A worker %s; another takes its place", figures["how"])
            case _:
                pass

    def _complete(self) -> None:
        self._ended = self._splits  # also what another run has done meanwhile
        self._through.clear()

    def _share(self) -> float:
        done = self._ended + sum(self._through.values())
        return done / self._splits if self._splits else 0.0

    def _words(self, seconds: float) -> str:
        if not self._splits:
            return "Reading the source's listing."
        return (
            f"{self._ended} of {format_count(self._splits, 'split')} ended; this run has made "
            f"{format_count(self._shards, 'shard')}, {size(self._size)}, at "
            f"{rate(self._size, seconds)}."
        )


class SwarmProgress(LiveProgress):
    """Progress of the nodes of a cluster: bytes that they have, of all that they are to have."""

    _had = _moved = _of = _nodes = _ready = 0

    def _count(self, event: Event) -> None:
        figures = event.figures
        match event.name:
            case "swarm.progress":
                self._add(int(figures["moved"]) - self._moved)
                self._moved = int(figures["moved"])
                self._had, self._of = int(figures["bytes"]), int(figures["of"])
                self._nodes, self._ready = int(figures["nodes"]), int(figures["ready"])
            case "node.ready":
                self._log.info("%s is ready after %s s", event.subject, figures["seconds"])
            case "node.lost":
                self._log.warning("%s is lost: %s", event.subject, figures["why"])
            case "node.untrusted":
                self._log.warning("%s gave wrong bytes; it is asked no more", event.subject)
            case "file.mismatch":
                self._log.warning("%s came out wrong, and is read again", event.subject)
            case _:
                pass

    def _complete(self) -> None:
        self._had = self._of

    def _share(self) -> float:
        return self._had / self._of if self._of else 0.0

    def _words(self, seconds: float) -> str:
        if not self._of:
            return "Looking for the files and the nodes."
        left = (self._of - self._had) * seconds / self._moved if self._moved else 0.0
        ahead = f", {duration(left)} to go" if left else ""
        return (
            f"{self._ready} of {format_count(self._nodes, 'node')} ready; {size(self._had)} of "
            f"{size(self._of)} there, at {rate(self._moved, seconds)}{ahead}."
        )


class CheckpointProgress(LiveProgress):
    """Progress of a checkpoint: bytes that are in its bucket."""

    _there = _members = 0

    def __init__(self, key: str, of: int = 0) -> None:
        """Begin to count.

        Args:
            key: The artifact's.
            of: Bytes of the checkpoint, where they are known.
        """
        super().__init__(key)
        self._of = of

    def _count(self, event: Event) -> None:
        figures = event.figures
        match event.name:
            case "cooldown.progress":
                self._there, self._of = int(figures["bytes"]), int(figures["of"])
                self._members = int(figures["members"])
            case "checkpoint.part":
                self._there += int(figures["bytes"])
            case _:
                pass

    def _complete(self) -> None:
        self._there = self._of

    def _share(self) -> float:
        return self._there / self._of if self._of else 0.0

    def _words(self, seconds: float) -> str:
        if not self._of:
            return "Waiting for the members to say what they have."
        through = f"; {format_count(self._members, 'member')} through" if self._members else ""
        return f"{size(self._there)} of {size(self._of)} there{through}."


class WindowProgress(LiveProgress):
    """Progress of a run of gradients: windows merged, and workers that have sent."""

    _merged = _number = _came = _refused = 0

    def __init__(self, key: str, workers: int, windows: int | None = None) -> None:
        """Begin to count.

        Args:
            key: The artifact's.
            workers: How many are asked first in each window.
            windows: How many will be merged at most, where that is known.
        """
        super().__init__(key)
        self._workers, self._windows = workers, windows
        self._stored: dict[str, tuple[int, int]] = {}

    def _count(self, event: Event) -> None:
        figures = event.figures
        match event.name:
            case "gradient.taken":
                self._came += 1
                self._add(int(figures["bytes"]))
            case "gradient.refused":
                self._refused += 1
                self._log.warning("%s is out: %s", event.subject, figures["reason"])
            case "quota.exceeded":
                self._warn_of_quota(event.subject, int(figures["objects"]), int(figures["bytes"]))
            case "chain.applied":
                self._number = int(figures["window"])
            case "window.merged":
                self._number, self._merged = int(figures["window"]), self._merged + 1
                self._came = self._refused = 0
            case _:
                pass

    def _warn_of_quota(self, uid: str, objects: int, stored: int) -> None:
        """Warn of a worker that stores too much: once, and again when it is twice as much."""
        before, before_size = self._stored.get(uid, (0, 0))
        if objects < 2 * before and stored < 2 * before_size:
            return
        self._stored[uid] = objects, stored
        self._log.warning(
            "%s stores %s, %s, below its prefix: more than `gather` allows. Rules of cleaning for "
            "gradients and junk remove what nobody needs.",
            uid, format_count(objects, "object"), size(stored),
        )  # fmt: skip

    def _complete(self) -> None:
        self._windows = self._merged

    def _share(self) -> float:
        if self._windows is None:  # nobody knows when it ends: how far the open window is
            return min(1.0, self._came / self._workers)
        return self._merged / self._windows if self._windows else 1.0

    def _words(self, seconds: float) -> str:
        refused = f", {self._refused} refused" if self._refused else ""
        return (
            f"{format_count(self._merged, 'window')} merged by this run, the last is "
            f"{self._number}; to "
            f"the next {self._came} of {format_count(self._workers, 'worker')} came{refused}."
        )


class CleaningProgress(LiveProgress):
    """Progress of a cleaning: objects that were seen, or of a plan deleted."""

    _seen = _deleted = _size = 0

    def __init__(self, key: str, of: int = 0) -> None:
        """Begin to count.

        Args:
            key: The artifact's.
            of: Objects of the plan that is executed; 0 while one is made.
        """
        super().__init__(key)
        self._of = of

    def _count(self, event: Event) -> None:
        figures = event.figures
        match event.name:
            case "cleaning.seen":
                self._seen = int(figures["objects"])
            case "cleaning.deleted":
                self._add(int(figures["bytes"]) - self._size)
                self._deleted, self._size = int(figures["objects"]), int(figures["bytes"])
            case _:
                pass

    def _complete(self) -> None:
        self._of = self._deleted

    def _share(self) -> float:
        return self._deleted / self._of if self._of else 0.0

    def _words(self, seconds: float) -> str:
        if not self._of and not self._deleted:
            return f"{format_count(self._seen, 'object')} seen."
        return (
            f"{format_count(self._deleted, 'object')} of {self._of:,} deleted, {size(self._size)}."
        )


class RentalProgress(LiveProgress):
    """Progress of a rental: machines that run, and their cost."""

    _dollars = 0.0

    def __init__(self, key: str, of: int) -> None:
        """Begin to count.

        Args:
            key: The artifact's.
            of: How many machines there are to be.
        """
        super().__init__(key)
        self._of = of
        self._ready: set[str] = set()

    def _count(self, event: Event) -> None:
        figures = event.figures
        match event.name:
            case "rental.cost":
                self._dollars = float(figures["dollars"])
            case "rental.offer":
                self._log.info(
                    "%s: takes %s in %s for $%.3f an hour",
                    event.subject, figures["gpu"], figures["place"], figures["dph"],
                )  # fmt: skip
            case "rental.raised":
                self._log.warning(
                    "%s: costs $%.3f an hour, and was offered for $%.3f",
                    event.subject, figures["dph"], figures["offered"],
                )  # fmt: skip
            case "rental.ready":
                self._ready.add(event.subject)
                self._log.info("%s: its program runs", event.subject)
            case "rental.missing":
                self._log.warning("%s: not replaced yet: %s", event.subject, figures["why"])
            case "rental.returned":
                self._ready.discard(event.subject)
                self._log.info("%s: given back, %s", event.subject, figures["said"])
            case "machine.printed":
                self._log.info("%s| %s", event.subject, figures["text"])
            case _:
                pass

    def _complete(self) -> None:
        pass  # each that runs was counted

    def _share(self) -> float:
        return len(self._ready) / self._of

    def _words(self, seconds: float) -> str:
        return (
            f"{len(self._ready)} of {format_count(self._of, 'machine')} run, ${self._dollars:.2f}."
        )
