"""Runs in a rented machine: starts the program, and tells the bucket how it is.

No account's key is here: what the machine holds are credentials for its own folder and for the
parts of the store that the program was given, and they end with the rental.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import IO, Any

from pydantic import BaseModel

from millrace import errors
from millrace.keys import MachineKeys
from millrace.processes import adopt_orphans, kill_descendants, list_descendants
from millrace.rentals.guest.traffic import STATE, count_traffic
from millrace.rentals.messages import (
    FILES_BYTES,
    PIECE,
    Beat,
    GuestFiles,
    GuestOrder,
    ProgramEnd,
    environment_of,
)
from millrace.storage import Store, StoreSpec, create, exists, list_objects, open_store, put, read

_PATIENCE = timedelta(seconds=20)  # that one word to the bucket is tried for
_WAIT = 30.0  # seconds that the program has to end, once it is asked to


class GuestProgram:
    """A program that runs, and what is said of it.

    Args:
        order: What is to be run.
        folder: Of the clone.
    """

    def __init__(self, order: GuestOrder, folder: Path) -> None:
        self._order, self._folder = order, folder
        self._store: Store = open_store(order.store.model_copy(update={"patience": _PATIENCE}))
        self._keys = MachineKeys(order.prefix)
        self._beats = self._pieces = self._printed = 0  # what has been told so far
        self._log = logging.getLogger(__name__)

    def run(self) -> int:
        """Run the program to its end, unless that was done before; its exit code.

        Raises:
            MillraceError: What it came to could not be told.
        """
        if exists(self._store, self._keys.ended):
            return 0
        logs = list(list_objects(self._store, self._keys.logs))
        self._pieces = len(logs)  # of the container before it was started again
        for name, text in self._files().items():
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        began = time.monotonic()
        with tempfile.TemporaryFile() as printed:
            code = self._attend(printed)
            while self._tell_log(printed):
                pass
        seconds = time.monotonic() - began
        put(self._store, self._keys.ended, _encoded(ProgramEnd(code=code, seconds=seconds)))
        return code

    def _files(self) -> dict[str, str]:
        return GuestFiles.model_validate_json(
            read(self._store, self._keys.files, largest=FILES_BYTES)
        ).texts

    def _attend(self, printed: IO[bytes]) -> int:
        """Start the program, and tell how it is until it ends."""
        before = list_descendants(os.getpid())
        ours = {"PYTHONUNBUFFERED": "1", "PWD": str(self._folder)}
        environment = {**environment_of(os.environ, self._order), **ours}
        venv = self._folder / ".venv" / "bin"
        environment["PATH"] = f"{venv}:{environment.get('PATH', os.defpath)}"
        try:
            program = subprocess.Popen(
                list(self._order.command),
                cwd=self._folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            printed.write(f"{' '.join(self._order.command)}: {error}\n".encode())
            return 127

        def stop(_: int, __: FrameType | None) -> None:
            _stop(program)

        signal.signal(signal.SIGTERM, stop)
        while True:
            self._tell(printed)
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = program.wait(self._order.beat)
                kill_descendants(spare=before)  # what it has left in sessions of their own
                return code

    def _tell(self, printed: IO[bytes]) -> None:
        """Say that the machine lives, and what was printed meanwhile."""
        received = sent = 0
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError, TypeError):
            received, sent = count_traffic(self._folder.parent / STATE)
        self._beats += 1
        beat = Beat(number=self._beats, received=received, sent=sent)
        self._say(self._keys.beat, beat)
        self._tell_log(printed)

    def _tell_log(self, printed: IO[bytes]) -> bool:
        """Send the next piece of what was printed; whether there may be more."""
        piece = os.pread(printed.fileno(), PIECE, self._printed)
        if not piece:
            return False
        try:
            with contextlib.suppress(errors.ExistsError):  # its answer was lost
                create(self._store, self._keys.log(self._pieces), piece)
        except errors.MillraceError as error:
            self._log.warning("what is printed could not be told: %s", errors.one_line(error))
            return False  # with the next beat
        self._printed += len(piece)
        self._pieces += 1
        return len(piece) == PIECE

    def _say(self, key: str, said: BaseModel) -> None:
        try:
            put(self._store, key, _encoded(said))
        except errors.MillraceError as error:
            self._log.warning("the owner could not be told: %s", errors.one_line(error))


def _encoded(said: BaseModel) -> bytes:
    return said.model_dump_json().encode()


def _stop(program: "subprocess.Popen[Any]") -> None:
    """End the program, with all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(_WAIT)
            return


def main(environ: Mapping[str, str], folder: Path) -> None:
    """Run what the environment says, and tell what it came to."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    adopt_orphans()
    GuestProgram(GuestOrder.from_environment(environ), folder).run()


__all__ = ["GuestProgram", "StoreSpec", "main"]

if __name__ == "__main__":
    main(os.environ, Path(sys.argv[1]))
