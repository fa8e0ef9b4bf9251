"""Progress on a terminal."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from millrace.progress import Event


class _Bar:
    """What every bar does: it is shown while its block lasts."""

    _bar: Progress

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._bar.stop()


class ProgressBar(_Bar):
    """A bar that counts splits, and shows what was committed and how fast."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("splits"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shards]} shards  {task.fields[samples]} samples"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("splits", total=None, shards=0, samples=0)
        self._shards = self._samples = 0

    def __call__(self, event: Event) -> None:
        match event.name:
            case "plan.committed":
                self._bar.update(self._task, total=float(event.figures["splits"]))
            case "splits.left":
                total = self._bar.tasks[self._task].total or 0.0
                self._bar.update(self._task, completed=total - float(event.figures["splits"]))
            case "shard.committed":
                self._shards += bool(event.figures["samples"])  # else only bad rows were committed
                self._samples += int(event.figures["samples"])
                self._bar.update(self._task, shards=self._shards, samples=self._samples)
            case "split.ended":
                self._bar.advance(self._task)
            case "worker.lost":
                self._bar.console.print(
                    f"A worker {event.figures['how']}; another takes its place."
                )
            case _:
                pass


class BytesBar(_Bar):
    """A bar of the bytes that all nodes of a swarm have, with their rate and what is left."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.fields[ready]} of {task.fields[nodes]} nodes"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("bytes", total=None, ready=0, nodes=0)

    def __call__(self, event: Event) -> None:
        figures = event.figures
        match event.name:
            case "swarm.progress":
                self._bar.update(
                    self._task,
                    completed=float(figures["bytes"]),
                    total=float(figures["of"]) or None,
                    ready=figures["ready"],
                    nodes=figures["nodes"],
                )
            case "node.lost":
                self._bar.console.print(f"{event.subject} is lost: {figures['why']}")
            case "node.untrusted":
                self._bar.console.print(f"{event.subject} gave wrong bytes, and is asked no more.")
            case "file.mismatch":
                self._bar.console.print(f"{event.subject} came out wrong, and is read again.")
            case _:
                pass


class ObjectsBar(_Bar):
    """A bar of the objects that cleaning has seen, and then of those that it has deleted."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("objects seen", total=None)

    def of(self, objects: int) -> None:
        """From now on it counts what is deleted of so many."""
        self._bar.update(self._task, description="deleted", completed=0, total=float(objects))

    def __call__(self, event: Event) -> None:
        if event.name in {"cleaning.seen", "cleaning.deleted"}:
            self._bar.update(self._task, completed=float(event.figures["objects"]))
