"""Release a rental after its owner's process was killed.

A Prefect worker that is stopped kills the processes of its runs with SIGKILL, without their hooks.
So an owner starts this file as a process with its own session. An owner that ends normally stops
this process, the monitor. If the owner ends without stopping the monitor, the monitor waits half a
minute for a next owner. If there is none, the monitor releases the rental.

The file runs by its path, not as a module of the package, and imports the reaper only when needed.
So a waiting monitor takes no more memory than a bare interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.processes import read_start_time

if TYPE_CHECKING:
    from millrace.rentals.settings import LedgerSettings

GRACE_PERIOD = 30.0  # seconds in which a next owner may take over the machines of a killed one
_POLL_INTERVAL = 1.0  # seconds between two checks of the owner
_MAX_RELEASE_TRIES = 30
_RETRY_INTERVAL = 60.0  # seconds between two tries


class OwnerMonitor:
    """Monitor of this process while it owns a rental. Use it as a context around the `Rental`.

    Args:
        settings: Store of the ledger, and the account.
        rental: Name of the rental.
        grace_period: Seconds in which a next owner may take over the machines.
    """

    def __init__(
        self, settings: LedgerSettings, rental: str, *, grace_period: float = GRACE_PERIOD
    ) -> None:
        self._config = {
            "grace_period": grace_period,
            "owner": [os.getpid(), read_start_time(os.getpid())],
            "rental": rental,
            "ledger": settings.reveal_secrets(),
        }
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
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(
                json.dumps(self._config).encode()
            )  # not as an argument, which other processes can read
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            return  # interrupted, perhaps during a release, which the monitor continues
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def watch_owner(config: dict[str, Any]) -> None:
    """Wait for the end of an owner, and release the rental unless another owner has it."""
    pid, start_time = config["owner"]
    while read_start_time(pid) == start_time:
        time.sleep(_POLL_INTERVAL)
    time.sleep(config["grace_period"])
    _release_rental(config)


def _release_rental(config: dict[str, Any]) -> None:
    from millrace import errors  # noqa: PLC0415
    from millrace.rentals.outside_release import release_rental  # noqa: PLC0415
    from millrace.rentals.settings import LedgerSettings  # noqa: PLC0415

    settings = LedgerSettings.model_validate(config["ledger"])
    for _ in range(_MAX_RELEASE_TRIES):
        try:
            release_rental(settings, config["rental"], include_detached=False)
        except (errors.HeldError, errors.NotFoundError):
            return  # another owner has the rental, or the rental never had a machine
        except Exception:  # noqa: BLE001 - machines are billed until a try succeeds
            time.sleep(_RETRY_INTERVAL)  # after the last try, the reaper and watchdogs remain
            continue
        return


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch_owner(json.loads(sys.stdin.read()))
