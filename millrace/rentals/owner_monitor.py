"""Release a rental that its owner did not release, such as after the owner's process was killed.

A Prefect worker that is stopped kills the processes of its runs with SIGKILL, without their hooks.
So an owner starts this file as a process with its own session, the monitor. An owner that leaves no
machine behind stops the monitor. Otherwise the monitor waits half a minute for a next owner, and
then releases the rental: if the owner's process ends, and if the owner gives up a release.

The file runs by its path, not as a module of the package, and imports the reaper only when needed.
So a waiting monitor takes no more memory than a bare interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

from millrace.processes import read_start_time

if TYPE_CHECKING:
    from millrace.rentals.settings import LedgerSettings

GRACE_PERIOD = 30.0  # seconds in which a next owner may take over the machines of a killed one
_POLL_INTERVAL = 1.0  # seconds between two checks of the owner
_MAX_RELEASE_TRIES = 30
_RETRY_INTERVAL = 60.0  # seconds between two tries
_HELD_TIMEOUT = 300.0  # seconds in which the next owner may end without a release
_HELD_POLL_INTERVAL = 5.0  # seconds between two reads of the next owner's lease


class OwnerMonitor:
    """Monitor of this process while it owns a rental. Use it as a context around the `Rental`.

    Args:
        settings: Store of the ledger, and the account.
        rental: Name of the rental.
        grace_period: Seconds in which a next owner may take over the machines.
    """

    _releasing: ClassVar[list[subprocess.Popen[bytes]]] = []  # monitors that outlive their context

    def __init__(
        self, settings: LedgerSettings, rental: str, *, grace_period: float = GRACE_PERIOD
    ) -> None:
        self._config = {
            "grace_period": grace_period,
            "owner": [os.getpid(), read_start_time(os.getpid())],
            "rental": rental,
            "ledger": settings.reveal_secrets(),
        }
        self._settings, self._rental = settings, rental
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> OwnerMonitor:
        package = str(Path(__file__).parents[2])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            # Not as an argument, which other processes can read. The pipe stays open.
            self._process.stdin.write(json.dumps(self._config).encode() + b"\n")
            self._process.stdin.flush()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        if self._is_released():
            self._process.kill()
            self._process.wait()
        else:
            self._releasing.append(self._process)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # a monitor that lives begins to release the rental

    def _is_released(self) -> bool:
        """Tell whether all machines of the rental are known to be released or detached."""
        from millrace import errors  # noqa: PLC0415
        from millrace.rentals.ledger import list_attempts  # noqa: PLC0415
        from millrace.storage import open_store  # noqa: PLC0415

        try:
            attempts = list_attempts(open_store(self._settings.store), self._rental)
        except errors.MillraceError:
            return False
        return all(one.is_detached or one.release_record is not None for one in attempts)


def watch_owner(config: dict[str, Any], pipe: IO[bytes]) -> None:
    """Wait until an owner ends or gives up, and release the rental unless another owner has it.

    Args:
        config: Configuration from `OwnerMonitor`.
        pipe: Pipe from the owner, which the owner closes when it gives up.
    """
    pid, start_time = config["owner"]
    while read_start_time(pid) == start_time:
        if select.select([pipe], [], [], _POLL_INTERVAL)[0]:
            break
    time.sleep(config["grace_period"])
    _release_rental(config)


def _release_rental(config: dict[str, Any]) -> None:
    from millrace import errors  # noqa: PLC0415
    from millrace.rentals.ledger import list_attempts  # noqa: PLC0415
    from millrace.rentals.outside_release import release_rental  # noqa: PLC0415
    from millrace.rentals.settings import LedgerSettings  # noqa: PLC0415
    from millrace.storage import open_store  # noqa: PLC0415

    settings, rental = LedgerSettings.model_validate(config["ledger"]), config["rental"]
    held_until = time.monotonic() + _HELD_TIMEOUT
    for _ in range(_MAX_RELEASE_TRIES):
        try:
            if list_attempts(open_store(settings.store), rental):
                release_rental(settings, rental, include_detached=False)
        except errors.HeldError:
            if not _await_free_lease(settings, rental, held_until):
                return  # another owner has the rental
            time.sleep(config["grace_period"])
        except (errors.ConfigurationError, errors.VersionError):
            return  # the settings rent nothing, or the machines are not those of this owner
        except Exception:  # noqa: BLE001 - machines are billed until a try succeeds
            time.sleep(_RETRY_INTERVAL)  # after the last try, the reaper and watchdogs remain
        else:
            return


def _await_free_lease(settings: LedgerSettings, rental: str, until: float) -> bool:
    """Wait until a rental has no owner; return False if it still has one at a time."""
    from millrace import errors  # noqa: PLC0415
    from millrace.keys.rentals import RentalKeys  # noqa: PLC0415
    from millrace.lease import Holder, StoreClock, find_holder  # noqa: PLC0415
    from millrace.storage import open_store  # noqa: PLC0415

    store, keys = open_store(settings.store), RentalKeys(rental)
    while time.monotonic() < until:
        with contextlib.suppress(errors.MillraceError):
            clock = StoreClock.read(store, keys.scope, Holder.describe_this_process())
            if find_holder(store, keys.lease, clock) is None:
                return True
        time.sleep(_HELD_POLL_INTERVAL)
    return False


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with open(0, "rb", buffering=0) as stdin:  # unbuffered, so that `select` sees the pipe's end
        watch_owner(json.loads(stdin.readline()), stdin)
