"""Show progress as a bar on a terminal, or as lines of text without a terminal."""

import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from millrace.cleanup.progress_events import ObjectsCopied, ObjectsListed
from millrace.datasets.progress_events import (
    PartitionEnded,
    PartitionsPending,
    PlanCommitted,
    ShardCommitted,
    WorkerLost,
)
from millrace.deletion import ObjectsDeleted
from millrace.formatting import format_count, replace_unprintable
from millrace.progress import Event
from millrace.swarm.progress_events import (
    FileMismatched,
    NodeAccused,
    NodeLost,
    NodeMisread,
    NodeUntrusted,
    PrewarmProgressed,
)
from millrace.terminal import echo, make_console

_LINE_INTERVAL = 5.0  # seconds between two lines, without a terminal


class _TerminalBar:
    """Bar that is shown while the block lasts. Without a terminal, lines of text are printed.

    A line is printed at the first event, then at most every five seconds, and at the end.
    """

    _progress: Progress
    _task: TaskID
    _last_line: tuple[float, str] | None = None

    def __enter__(self) -> Self:
        if self._progress.console.is_terminal:
            self._progress.start()
        return self

    def format_line(self) -> str:
        """Return the content of the bar as one line; empty while the total is unknown."""
        task = self._progress.tasks[self._task]
        return "" if task.total is None else self._format_task(task, task.total)

    def _format_task(self, task: Task, total: float) -> str:
        """Return the state of a task with a known total as one line."""
        raise NotImplementedError

    def _print_above(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(replace_unprintable(text))

    def _print_line_if_due(self) -> None:
        if self._last_line is None or time.monotonic() - self._last_line[0] >= _LINE_INTERVAL:
            self._print_line()

    def _print_line(self) -> None:
        line = "" if self._progress.console.is_terminal else self.format_line()
        if line and (self._last_line is None or line != self._last_line[1]):
            self._last_line = (time.monotonic(), line)
            with suppress(OSError):  # the work does not fail for its progress, as on a full disk
                echo(line, err=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._print_line()
        if self._progress.console.is_terminal:
            self._progress.stop()


class PartitionsBar(_TerminalBar):
    """Bar of the partitions that have ended, with the committed shards and samples."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("partitions"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[made]}"),
            TimeElapsedColumn(),
            console=make_console(stderr=True),
        )
        self._task = self._progress.add_task("partitions", total=None, made="")
        self._partitions = self._shards = self._samples = 0

    def __call__(self, event: Event) -> None:
        """Show an event."""
        match event:
            case PlanCommitted():
                # The total follows with the next event, which a complete dataset does not have.
                self._partitions = event.partitions
            case PartitionsPending():
                ended = self._partitions - event.partitions
                self._progress.update(self._task, total=self._partitions, completed=ended)
            case ShardCommitted():
                self._shards += len(event.keys)
                self._samples += event.samples
                shards = format_count(self._shards, "shard")
                made = f"{shards}  {format_count(self._samples, 'sample')}"
                self._progress.update(self._task, made=made)
            case PartitionEnded():
                self._progress.advance(self._task)
            case WorkerLost():
                self._print_above(f"A worker {event.cause}; another takes its place.")
            case _:
                return
        self._print_line_if_due()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Stop the bar, and hide it if no partition was counted."""
        if self._progress.tasks[self._task].total is None:
            self._progress.update(self._task, visible=False)
        super().__exit__(kind, error, tb)

    def _format_task(self, task: Task, total: float) -> str:
        return (
            f"{task.completed:.0f} of {format_count(round(total), 'partition')}, "
            f"{format_count(self._shards, 'shard')}, {format_count(self._samples, 'sample')}"
        )


class BytesBar(_TerminalBar):
    """Bar of the bytes that all nodes of a swarm have, with rate and remaining time."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.fields[ready]} of {task.fields[nodes]} nodes"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=make_console(stderr=True),
        )
        self._task = self._progress.add_task("bytes", total=None, ready=0, nodes=0)

    def __call__(self, event: Event) -> None:
        """Show an event."""
        match event:
            case PrewarmProgressed():
                self._progress.update(
                    self._task,
                    completed=float(event.present),
                    total=float(event.total) or None,
                    ready=event.ready,
                    nodes=event.nodes,
                )
            case NodeLost():
                self._print_above(f"{event.node} is lost: {event.reason}")
            case NodeAccused():
                self._print_above(f"{event.accuser} says that {event.node} gave it wrong bytes.")
            case NodeMisread():
                self._print_above(f"{event.node} read wrong bytes of {event.origin}.")
            case NodeUntrusted():
                self._print_above(f"{event.node} gave wrong bytes, and gets no more requests.")
            case FileMismatched():
                self._print_above(f"{event.origin} has wrong bytes, and is read again.")
            case _:
                return
        self._print_line_if_due()

    def _format_task(self, task: Task, total: float) -> str:
        return (
            f"{decimal(int(task.completed))} of {decimal(int(total))} on "
            f"{task.fields['ready']} of {task.fields['nodes']} nodes"
        )


class ObjectsBar(_TerminalBar):
    """Bar of the objects that a cleanup has listed, and then of the deleted objects."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=make_console(stderr=True),
        )
        self._task = self._progress.add_task("objects seen", total=None)

    def start_deleting(self, objects: int) -> None:
        """Count deleted objects from now on.

        Args:
            objects: Number of objects to delete.
        """
        self._progress.update(self._task, description="deleted", completed=0, total=float(objects))

    def start_copying(self) -> None:
        """Count compared and copied objects from now on, whose total is not known."""
        self._progress.update(self._task, description="compared or copied")

    def __call__(self, event: Event) -> None:
        """Show an event."""
        if isinstance(event, ObjectsListed | ObjectsDeleted | ObjectsCopied):
            self._progress.update(self._task, completed=float(event.objects))
            self._print_line_if_due()

    def format_line(self) -> str:
        """Return the count of the objects, also while the total is unknown."""
        task = self._progress.tasks[self._task]
        whole = "" if task.total is None else f" of {task.total:.0f}"
        return f"{task.description}: {task.completed:.0f}{whole}"
