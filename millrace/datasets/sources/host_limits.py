"""Limits on the requests to one host, which all processes of this machine share.

The limits are locks and times in files of a folder for temporary files. A lock ends with its
process, however the process ends.
"""

import fcntl
import os
import random
import tempfile
import time
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from operator import itemgetter
from pathlib import Path

_BUCKETS = 4096  # files for all hosts: hosts of one bucket share their turns, not their pauses
_LONGEST_PAUSE = 3600.0  # seconds for which a host is asked nothing, whatever it says
_MAX_PAUSES = 64  # pauses of hosts of one bucket
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
            following, pauses = _read_turns(turns)
            _write_turns(turns, following, pauses | {host: until})

    def _is_paused(self, host: str) -> bool:
        """Decide whether the pause that a host has asked for is not over."""
        with self._lock_turns(host) as turns:
            return host in _read_turns(turns)[1]

    def _take_turn(self, host: str, longest_pause: float) -> float:
        """Take the next turn of a host; return the seconds until it.

        Raises:
            HostBusyError: The host has asked for a longer pause.
        """
        with self._lock_turns(host) as turns:
            now = time.monotonic()
            following, pauses = _read_turns(turns)
            pause = pauses.get(host, now) - now
            if pause > longest_pause:
                raise HostBusyError(host, pause)
            begin = now + pause  # requests after a pause are an interval apart, too
            # A time of another boot of this machine may be far away.
            turn = min(max(following, begin), begin + self._requests * self._interval)
            _write_turns(turns, turn + self._interval, pauses)
        return turn - now

    @contextmanager
    def _lock_any_slot(self, host: str) -> Generator[None]:
        paths = [self._make_path(host, str(slot)) for slot in range(self._requests)]
        random.shuffle(paths)
        for path in paths:
            descriptor = self._open(path)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                os.close(descriptor)
        else:
            descriptor = self._open(paths[0])
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def _lock_turns(self, host: str) -> Generator[int]:
        descriptor = self._open(self._make_path(host, "turns"))
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


def _read_turns(descriptor: int) -> tuple[float, dict[str, float]]:
    """Return the time of the next turn, and the end of each host's pause (monotonic clock).

    Pauses that are over are left out, and so are times of another boot of this machine.
    """
    now = time.monotonic()
    try:
        first, *lines = os.pread(descriptor, _MAX_TURN_BYTES, 0).decode().split("\n")
        ends = [line.split(" ", 1) for line in lines]
        pauses = {host: float(end) for end, host in ends}
        return float(first), {h: t for h, t in pauses.items() if 0 < t - now <= _LONGEST_PAUSE}
    except ValueError:  # empty or damaged
        return 0.0, {}


def _write_turns(descriptor: int, following: float, pauses: Mapping[str, float]) -> None:
    latest = sorted(pauses.items(), key=itemgetter(1))[-_MAX_PAUSES:]
    lines = [f"{following!r}", *(f"{end!r} {host}" for host, end in latest)]
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, "\n".join(lines).encode(), 0)
