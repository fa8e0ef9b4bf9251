"""What the engine reports, as one live progress artifact."""

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

from millrace.progress import Event
from tasks.words import count, rate, size

logger = logging.getLogger("millrace.flows")

_EVERY = 2.0  # seconds between two updates of the artifact
_PATIENCE = 5.0  # seconds that the end of a run waits for the last update


class LiveProgress:
    """Listens to the engine, and shows how far it is while the block lasts.

    Calling it only counts; a thread of its own tells the server, every two seconds. A server
    that does not answer costs the picture and nothing else.

    Attributes:
        pace: Bytes committed in each second since the beginning.
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
        self._splits = self._ended = self._shards = self._size = 0
        self._through: dict[str, float] = {}
        self._shown = ""
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
        """Show it for the last time."""
        if error is None:
            with self._lock:  # also what another run has done meanwhile
                self._ended = self._splits
                self._through.clear()
        self._stop.set()
        self._thread.join(_PATIENCE)

    def __call__(self, event: Event) -> None:
        """Count what happened."""
        figures = event.figures
        with self._lock:
            match event.name:
                case "plan.committed":
                    self._splits = int(figures["splits"])
                    self._log.info(
                        "%s of %s planned as %s",
                        count(int(figures["files"]), "file"),
                        size(int(figures["bytes"])),
                        count(self._splits, "split"),
                    )
                case "splits.left":
                    self._ended = self._splits - int(figures["splits"])
                case "split.opened":
                    self._through[event.subject] = float(figures.get("through", 0))
                case "shard.committed":
                    self._shards += 1
                    self._size += int(figures["bytes"])
                    self.pace[int(time.monotonic() - self._began)] += int(figures["bytes"])
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

    @property
    def percent(self) -> float:
        """How far it is, by splits and by the parts of those that are open."""
        with self._lock:
            done = self._ended + sum(self._through.values())
            return min(100.0, 100 * done / self._splits) if self._splits else 0.0

    @property
    def sentence(self) -> str:
        """How far it is, in words."""
        with self._lock:
            if not self._splits:
                return "Reading the source's listing."
            return (
                f"{self._ended} of {count(self._splits, 'split')} ended; this run has made "
                f"{count(self._shards, 'shard')}, {size(self._size)}, at "
                f"{rate(self._size, time.monotonic() - self._began)}."
            )

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
