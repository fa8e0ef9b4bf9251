"""Limits on the requests to one host, which all processes of this machine share.

The limits are locks and times in files of a folder for temporary files. A lock ends with its
process, however the process ends.
"""

import fcntl
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from operator import itemgetter
from pathlib import Path
from typing import Self

_BUCKETS = 4096  # files for all hosts: hosts of one bucket share their turns, not their pauses
_LONGEST_PAUSE = 3600.0  # seconds for which a host is asked nothing, whatever it says
_ANSWER_MEMORY = 3600.0  # seconds for which an answer of a host is remembered
_NOTE_INTERVAL = 60.0  # seconds between two notes of the answers of a host
_MAX_HOSTS = 64  # hosts of one bucket whose times are kept
_SLOT_INTERVAL = 0.01  # seconds between two looks for a free slot
_PAUSE, _ANSWER = "pause", "answer"
_MAX_TURN_BYTES = 1 << 20


class HostBusyError(Exception):
    """A host has asked for a longer pause than the caller can wait.

    Attributes:
        host: Name of the host.
        seconds: Rest of the pause.
    """

    def __init__(self, host: str, seconds: float) -> None:
        super().__init__(f"its host asks for a pause of {seconds:.0f} s")
        self.host, self.seconds = host, seconds


class HostLimits:
    """Limits on the requests to one host.

    Args:
        requests: Requests at a time to one host.
        interval: Shortest time between the starts of two requests to one host.
        folder: Folder of the locks; None for one of this user in the folder for temporary files.
    """

    def __init__(self, requests: int, interval: timedelta, folder: Path | None = None) -> None:
        self._requests, self._interval = requests, interval.total_seconds()
        self._folder = folder or _make_shared_folder()
        self._noted: dict[str, float] = {}  # time of the last note of each host

    @contextmanager
    def hold(
        self, host: str, longest_pause: float, sleep: Callable[[float], object] = time.sleep
    ) -> Generator[None]:
        """Wait until a request to a host may start, and count the request until the context ends.

        Args:
            host: Name of the host.
            longest_pause: Seconds to wait for the end of a pause that the host has asked for. The
                time to wait for other requests is not limited.
            sleep: Function that waits for some seconds. It returns a true value if the caller is
                stopped, and then nothing is waited for any more.

        Raises:
            HostBusyError: The pause is longer.
        """
        with self._lock_any_slot(host):
            wait = self._take_turn(host, longest_pause)
            # Meanwhile, the host may have asked another caller for a pause.
            while wait > 0 and not sleep(wait) and self._is_paused(host):
                wait = self._take_turn(host, longest_pause)
            yield

    def pause(self, host: str, seconds: float) -> None:
        """Start no request to a host for some time, since the host asks for it.

        Args:
            host: Name of the host.
            seconds: Length of the pause. Longer ones than an hour end after an hour.
        """
        until = time.monotonic() + min(seconds, _LONGEST_PAUSE)
        with self._lock_turns(host) as turns:
            found = _Turns.read(turns)
            found.pauses[host] = until
            found.write(turns)

    def note_answer(self, host: str) -> None:
        """Note that a host has answered, for all processes of this machine."""
        now = time.monotonic()
        if now - self._noted.get(host, -_NOTE_INTERVAL) < _NOTE_INTERVAL:
            return
        self._noted[host] = now
        with self._lock_turns(host) as turns:
            found = _Turns.read(turns)
            found.answers[host] = now
            found.write(turns)

    def has_answered(self, host: str) -> bool:
        """Decide whether a host has answered a process of this machine within the last hour."""
        with self._lock_turns(host) as turns:
            return host in _Turns.read(turns).answers

    def _is_paused(self, host: str) -> bool:
        """Decide whether the pause that a host has asked for is not over."""
        with self._lock_turns(host) as turns:
            return host in _Turns.read(turns).pauses

    def _take_turn(self, host: str, longest_pause: float) -> float:
        """Take the next turn of a host; return the seconds until it.

        Raises:
            HostBusyError: The host has asked for a longer pause.
        """
        with self._lock_turns(host) as turns:
            now = time.monotonic()
            found = _Turns.read(turns)
            pause = found.pauses.get(host, now) - now
            if pause > longest_pause:
                raise HostBusyError(host, pause)
            begin = now + pause  # requests after a pause are an interval apart, too
            # A time of another boot of this machine may be far away.
            turn = min(max(found.following, begin), begin + self._requests * self._interval)
            found.following = turn + self._interval
            found.write(turns)
        return turn - now

    @contextmanager
    def _lock_any_slot(self, host: str) -> Generator[None]:
        with self._lock(host, "queue"):  # only the first of those that wait looks for a free slot
            while (descriptor := self._try_slots(host)) is None:
                time.sleep(_SLOT_INTERVAL)
        try:
            yield
        finally:
            os.close(descriptor)

    def _try_slots(self, host: str) -> int | None:
        """Lock a free slot of a host; return None if there is none."""
        for slot in range(self._requests):
            descriptor = self._open(self._make_path(host, str(slot)))
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
            else:
                return descriptor
        return None

    def _lock_turns(self, host: str) -> AbstractContextManager[int]:
        return self._lock(host, "turns")

    @contextmanager
    def _lock(self, host: str, name: str) -> Generator[int]:
        descriptor = self._open(self._make_path(host, name))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)

    def _open(self, path: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:  # a program has cleaned the folder for temporary files
            with suppress(FileExistsError):
                self._folder.mkdir(mode=0o700)
            return os.open(path, flags, 0o600)

    def _make_path(self, host: str, name: str) -> Path:
        return self._folder / f"{zlib.crc32(host.encode()) % _BUCKETS:03x}-{name}"


def _make_shared_folder() -> Path:
    """Return a folder that only this user can write into."""
    folder = Path(tempfile.gettempdir()) / f"millrace-hosts-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if folder.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o022:
        return Path(tempfile.mkdtemp(prefix="millrace-hosts-"))  # another user has made it
    return folder


@dataclass(slots=True)
class _Turns:
    """Times of the hosts of one bucket, by the monotonic clock.

    Attributes:
        following: Time of the next turn.
        pauses: End of the pause of each host that has asked for one.
        answers: Time of an answer of each host that has answered within the last hour.
    """

    following: float = 0.0
    pauses: dict[str, float] = field(default_factory=dict[str, float])
    answers: dict[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def read(cls, descriptor: int) -> Self:
        """Read the times. Those of another boot of this machine are left out."""
        now, found = time.monotonic(), cls()
        try:
            first, *lines = os.pread(descriptor, _MAX_TURN_BYTES, 0).decode().split("\n")
            found.following = float(first)
            for line in lines:
                kind, time_text, host = line.split(" ", 2)
                at = float(time_text)
                seconds = at - now
                if kind == _PAUSE and 0 < seconds <= _LONGEST_PAUSE:
                    found.pauses[host] = at
                elif kind == _ANSWER and -_ANSWER_MEMORY <= seconds <= 0:
                    found.answers[host] = at
        except ValueError:  # empty or damaged
            return cls()
        return found

    def write(self, descriptor: int) -> None:
        """Write the times, of at most 64 hosts each."""
        lines = [f"{self.following!r}"]
        for kind, times in ((_PAUSE, self.pauses), (_ANSWER, self.answers)):
            latest = sorted(times.items(), key=itemgetter(1))[-_MAX_HOSTS:]
            lines += [f"{kind} {at!r} {host}" for host, at in latest]
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, "\n".join(lines).encode(), 0)
