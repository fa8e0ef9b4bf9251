"""Give a rental back when the process that owns it is killed.

A Prefect worker that is asked to end kills the processes of its runs with SIGKILL, and runs none of
their hooks. So an owner starts a process of this file, in a session of its own. The guard waits
until the owner has ended without stopping it, waits half a minute for a next owner, and
gives back what nobody has.

The file is run by its path, not as a module of the package, and imports what gives back only when
it is needed: a guard that waits takes the memory of a bare interpreter.
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
    from millrace.rentals.settings import StandSettings

GRACE = 30.0  # seconds in which a next owner may go on with the machines of one that was killed
_LOOK = 1.0  # seconds between two looks at the owner
_TRIES = 30
_PAUSE = 60.0  # seconds between two tries


class RentalGuard:
    """Watches this process while it owns a rental. Use it as a context around the rental's.

    Args:
        settings: Where the rental is written down, and who pays.
        rental: Its name.
        grace: Seconds in which a next owner may go on with the machines.
    """

    def __init__(self, settings: StandSettings, rental: str, *, grace: float = GRACE) -> None:
        self._told = {
            "grace": grace,
            "owner": [os.getpid(), read_start_time(os.getpid())],
            "rental": rental,
            "store": settings.store.reveal(),
            "account": {
                "api_key": settings.account.api_key.get_secret_value(),
                "server_url": settings.account.server_url,
            },
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RentalGuard:
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
            pipe.write(json.dumps(self._told).encode())  # not in its arguments: it holds secrets
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            return  # interrupted, perhaps while it gave back: the guard looks when this has ended
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def watch(told: dict[str, Any]) -> None:
    """Wait for the end of an owner, and give back what no other has by then."""
    pid, since = told["owner"]
    while read_start_time(pid) == since:
        time.sleep(_LOOK)
    time.sleep(told["grace"])
    _give_back(told)


def _give_back(told: dict[str, Any]) -> None:
    from pydantic import SecretStr  # noqa: PLC0415

    from millrace import errors  # noqa: PLC0415
    from millrace.rentals.reaper import release  # noqa: PLC0415
    from millrace.rentals.settings import Account, StandSettings  # noqa: PLC0415
    from millrace.storage import StoreSpec  # noqa: PLC0415

    account = Account(
        api_key=SecretStr(told["account"]["api_key"]), server_url=told["account"]["server_url"]
    )
    settings = StandSettings(store=StoreSpec(**told["store"]), account=account)
    for _ in range(_TRIES):
        try:
            release(settings, told["rental"], left=False)
        except (errors.HeldError, errors.NotFoundError):
            return  # it has a next owner, or never had a machine
        except Exception:  # noqa: BLE001 - machines are billed while it lasts, and nobody reads of it
            time.sleep(_PAUSE)  # the reaper and the watchdogs come after the last try
            continue
        return


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(json.loads(sys.stdin.read()))
