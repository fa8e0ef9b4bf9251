"""Reports of rented machines. Only objects that changed since the last refresh are read."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from millrace import errors
from millrace.keys.rentals import MachineKeys
from millrace.rentals.messages import LOG_CHUNK_BYTES, MachineHeartbeat, ProgramExit, SetupReport
from millrace.storage import Stat, Store, head, list_objects, read, read_range

M = TypeVar("M", bound=BaseModel)

_MAX_REPORT_BYTES = 2 * LOG_CHUNK_BYTES
_TAIL_LINES = 50  # last lines of the log that are kept
_MAX_CHUNKS_PER_REFRESH = 20  # chunks of the log that one refresh reads
_MAX_LAST_CHUNKS = 2  # newest chunks that are read when the program has ended
_MAX_OBJECTS = 20_000  # objects of a machine that one refresh lists
_MAX_LINES_PER_CHUNK = 2000
_MAX_LINES = 200_000  # lines of the log that are reported for each machine
_MAX_LINE_LENGTH = 500
_ERROR_LINES = 5  # last lines of a failed command's output that are reported
_ANSI_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_URL_CREDENTIALS = re.compile(r"://[^/@\s]+@")


class _LogChunk(NamedTuple):
    """A part of a log that was read.

    Attributes:
        text: Its lines.
        key: Key of its object; empty for a sentence about others.
    """

    text: str
    key: str = ""


@dataclass(slots=True)
class MachineReports:
    """Reports of one machine so far.

    Attributes:
        store: Store of the reports.
        keys: Keys of the machine.
        setup: Last report on the installation.
        heartbeat: Last heartbeat.
        program_exit: Report on the end of the program.
        new_lines: Lines of the log that the last refresh has read.
        tail: Last lines of the log.
    """

    store: Store
    keys: MachineKeys
    setup: SetupReport | None = None
    heartbeat: MachineHeartbeat | None = None
    program_exit: ProgramExit | None = None
    new_lines: list[str] = field(default_factory=list[str])
    tail: list[str] = field(default_factory=list[str])
    _seen_stats: dict[str, Stat] = field(default_factory=dict[str, Stat])
    _line_count: int = 0
    _last_log: str = ""

    def refresh(self) -> bool:
        """Read the changed reports; return whether any report has changed.

        Costs one listing, which begins after the last chunk of the log that was read, two requests
        for the messages whose keys are before it, and one read for each changed object.

        Raises:
            UnavailableError: The store does not answer.
        """
        self.new_lines = []
        stats = self._list_unread()
        changed = {key for key, stat in stats.items() if self._seen_stats.get(key) != stat}
        logs = sorted(key for key in stats if key.startswith(self.keys.logs))
        has_ended = self.keys.program_exit in stats
        chunks = self._read_logs([stats[key] for key in logs], has_ended=has_ended)
        messages = (
            ("setup", self.keys.setup, SetupReport),
            ("heartbeat", self.keys.heartbeat, MachineHeartbeat),
            ("program_exit", self.keys.program_exit, ProgramExit),
        )
        for name, key, kind in messages:
            if key in changed and (message := self._read_message(stats[key], kind)) is not None:
                setattr(self, name, message)
        for chunk in chunks:  # after all reads: the next refresh repeats those of one that fails
            self._add_lines(chunk.text)
            self._last_log = chunk.key or self._last_log
        self._seen_stats |= {key: stats[key] for _, key, _ in messages if key in stats}
        return bool(changed.intersection(key for _, key, _ in messages) or logs)

    def _list_unread(self) -> dict[str, Stat]:
        """List the messages, and the chunks of the log after the last one that was read.

        The messages come first: a machine reports the end of its program after its log.
        """
        stats: dict[str, Stat] = {}
        for key in (self.keys.heartbeat, self.keys.program_exit) if self._last_log else ():
            with suppress(errors.NotFoundError):
                stats[key] = head(self.store, key)
        listed = list_objects(self.store, self.keys.prefix, after=self._last_log)
        return stats | {stat.key: stat for stat in islice(listed, _MAX_OBJECTS)}

    def _read_logs(self, unread: Sequence[Stat], *, has_ended: bool) -> list[_LogChunk]:
        """Read chunks of the log.

        Args:
            unread: Chunks that no refresh has read, in their order.
            has_ended: Whether the program has ended. No refresh follows then, so the newest chunks
                are read, too.
        """
        first, others = unread[:_MAX_CHUNKS_PER_REFRESH], unread[_MAX_CHUNKS_PER_REFRESH:]
        newest = others[-_MAX_LAST_CHUNKS:] if has_ended else others[:0]
        chunks = [_LogChunk(self._read_text(stat), stat.key) for stat in first]
        if has_ended and len(others) > len(newest):
            count, url = len(others) - len(newest), self.store.make_url(self.keys.logs)
            chunks.append(_LogChunk(f"({count:,} files of the log are only in {url})"))
        return chunks + [_LogChunk(self._read_text(stat), stat.key) for stat in newest]

    def _add_lines(self, text: str) -> None:
        lines = [clean_line(line) for line in text.splitlines()[:_MAX_LINES_PER_CHUNK]]
        capacity = _MAX_LINES - self._line_count
        self._line_count += len(lines)
        self.new_lines += lines[: max(0, capacity)]
        if 0 <= capacity < len(lines):
            url = self.store.make_url(self.keys.logs)
            self.new_lines.append(f"(only {_MAX_LINES:,} lines are shown; the others are in {url})")
        self.tail = [*self.tail, *lines][-_TAIL_LINES:]

    def _read_message(self, stat: Stat, kind: type[M]) -> M | None:
        """Return the message in an object; None if it is invalid."""
        try:
            return kind.model_validate_json(self._read_text(stat))
        except ValidationError:
            return None

    def _read_text(self, stat: Stat) -> str:
        """Return the beginning of an object's text; empty if the object was deleted."""
        end = min(stat.size, _MAX_REPORT_BYTES)
        if not end:
            return ""
        try:
            return read_range(self.store, stat.key, 0, end).decode(errors="replace")
        except errors.NotFoundError:
            return ""


def read_heartbeat(store: Store, keys: MachineKeys) -> MachineHeartbeat | None:
    """Return the last heartbeat of a machine; None if there is none, or it is invalid.

    Raises:
        UnavailableError: The store does not answer.
    """
    return _fetch_report(store, keys.heartbeat, MachineHeartbeat)


def read_program_exit(store: Store, keys: MachineKeys) -> ProgramExit | None:
    """Return the report on the end of a program; None if there is none, or it is invalid.

    Raises:
        UnavailableError: The store does not answer.
    """
    return _fetch_report(store, keys.program_exit, ProgramExit)


def read_setup(store: Store, keys: MachineKeys) -> SetupReport | None:
    """Return the last report on an installation; None if there is none, or it is invalid.

    Raises:
        UnavailableError: The store does not answer.
    """
    return _fetch_report(store, keys.setup, SetupReport)


def _fetch_report(store: Store, key: str, kind: type[M]) -> M | None:
    try:
        return kind.model_validate_json(read(store, key, max_size=_MAX_REPORT_BYTES))
    except (errors.NotFoundError, errors.CorruptError, ValidationError):
        return None


def extract_error(output: str) -> str:
    """Return the last lines of a failed command's output, in one line, without secrets.

    The result lacks colours, blank lines, pip's notices, and passwords of URLs.
    """
    plain = _URL_CREDENTIALS.sub("://…@", _ANSI_ESCAPES.sub("", output))
    lines = [clean_line(line).strip() for line in plain.splitlines()]
    relevant = [line for line in lines if line and not line.startswith(("[notice]", "WARNING:"))]
    return " ".join(relevant[-_ERROR_LINES:])[-_MAX_LINE_LENGTH:]


def clean_line(text: str) -> str:
    """Return a shortened line of a machine's output, without control characters."""
    return "".join(one for one in text if one.isprintable())[:_MAX_LINE_LENGTH]
