"""Run the program of a rented machine, and write its reports into the store.

The machine does not have the API key of the account. Its credentials allow access to its own folder
and to the prefixes of the program's storage grants. They expire at the machine's deadline.
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
from millrace.keys.rentals import MachineKeys
from millrace.processes import adopt_orphans, kill_descendants, list_descendants
from millrace.rentals.guest.traffic import STATE_FILE, count_traffic
from millrace.rentals.messages import (
    LOG_CHUNK_BYTES,
    MAX_FILES_BYTES,
    GuestConfig,
    GuestFiles,
    MachineHeartbeat,
    ProgramExit,
    make_program_environment,
)
from millrace.storage import Store, create, exists, list_objects, open_store, put, read

_RETRY_TIMEOUT = timedelta(seconds=20)  # time in which one request is retried
_STOP_TIMEOUT = 30.0  # seconds from SIGTERM to SIGKILL
_MAX_CHUNKS_PER_HEARTBEAT = 20  # chunks of the log; an owner reads as many at each poll


class GuestProgram:
    """Program of a machine, and its reports.

    Args:
        config: Configuration of the machine.
        folder: Folder of the clone.
    """

    def __init__(self, config: GuestConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._store: Store = open_store(
            config.store.model_copy(update={"retry_timeout": _RETRY_TIMEOUT})
        )
        self._keys = MachineKeys(config.prefix)
        self._heartbeat_count = self._chunk_count = self._uploaded_bytes = 0
        self._pending_bytes = 0  # size of a chunk whose upload had no answer
        self._log = logging.getLogger(__name__)

    def run(self) -> int:
        """Run the program to its end, and return its exit code.

        After a restart of the container, a program that has ended before is not run again.

        Raises:
            MillraceError: The store could not be read. The program has not run.
        """
        if exists(self._store, self._keys.program_exit):
            return 0
        logs = list(list_objects(self._store, self._keys.logs))
        self._chunk_count = len(logs)  # chunks from before a restart of the container
        for name, text in self._read_files().items():
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        began = time.monotonic()
        with tempfile.TemporaryFile(buffering=0) as output:
            code = self._run_process(output)
            self._report_exit(ProgramExit(code=code, seconds=time.monotonic() - began), output)
        return code

    def _read_files(self) -> dict[str, str]:
        return GuestFiles.model_validate_json(
            read(self._store, self._keys.files, max_size=MAX_FILES_BYTES)
        ).texts

    def _run_process(self, output: IO[bytes]) -> int:
        """Run the program, and send heartbeats until it ends; return its exit code."""
        spared = list_descendants(os.getpid())
        overrides = {"PYTHONUNBUFFERED": "1", "PWD": str(self._folder)}
        environment = {**make_program_environment(os.environ, self._config), **overrides}
        venv = self._folder / ".venv" / "bin"
        environment["PATH"] = f"{venv}:{environment.get('PATH', os.defpath)}"
        try:
            program = subprocess.Popen(
                list(self._config.command),
                cwd=self._folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            output.write(f"{' '.join(self._config.command)}: {error}\n".encode())
            return 127

        def handle_sigterm(_: int, __: FrameType | None) -> None:
            if program.poll() is None:  # otherwise another process may have its number
                _stop_process(program)

        signal.signal(signal.SIGTERM, handle_sigterm)
        while True:
            due = time.monotonic() + self._config.heartbeat_interval
            self._send_heartbeat(output, due)
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = program.wait(max(0.0, due - time.monotonic()))
                kill_descendants(excluded=spared)  # processes in sessions of their own
                return code

    def _report_exit(self, report: ProgramExit, output: IO[bytes]) -> None:
        """Upload the rest of the log, then the report, until the store has both.

        Without the report, the owner would run the program again on another machine. Heartbeats
        continue. The deadline of the machine ends the tries.
        """
        while True:
            due = time.monotonic() + self._config.heartbeat_interval
            while self._upload_log_chunk(output) and time.monotonic() < due:
                pass
            is_log_complete = self._uploaded_bytes == os.fstat(output.fileno()).st_size
            if is_log_complete and self._send_message(self._keys.program_exit, report):
                return
            self._send_heartbeat(output, due)
            time.sleep(max(0.0, due - time.monotonic()))

    def _send_heartbeat(self, output: IO[bytes], due: float) -> None:
        """Send a heartbeat, then new output: at least one chunk, and others until a time.

        Args:
            output: Output of the program.
            due: Time of the next heartbeat, by the monotonic clock.
        """
        received = sent = 0
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError, TypeError):
            received, sent = count_traffic(self._folder.parent / STATE_FILE)
        self._heartbeat_count += 1
        heartbeat = MachineHeartbeat(number=self._heartbeat_count, received=received, sent=sent)
        self._send_message(self._keys.heartbeat, heartbeat)
        for _ in range(_MAX_CHUNKS_PER_HEARTBEAT):
            if not self._upload_log_chunk(output) or time.monotonic() >= due:
                return

    def _upload_log_chunk(self, output: IO[bytes]) -> bool:
        """Upload the next chunk of the log; return whether there may be more.

        After a failure, the next call uploads the same bytes, since the chunk may be stored.
        """
        size = self._pending_bytes or LOG_CHUNK_BYTES
        chunk = os.pread(output.fileno(), size, self._uploaded_bytes)
        if not chunk:
            return False
        self._pending_bytes = len(chunk)
        try:
            with contextlib.suppress(
                errors.ExistsError
            ):  # an earlier upload, whose answer was lost
                create(self._store, self._keys.make_log_key(self._chunk_count), chunk)
        except errors.MillraceError as error:
            self._log.warning("the log could not be uploaded: %s", errors.format_error(error))
            return False  # the next heartbeat tries again
        self._uploaded_bytes += len(chunk)
        self._pending_bytes = 0
        self._chunk_count += 1
        return len(chunk) == size

    def _send_message(self, key: str, message: BaseModel) -> bool:
        """Write a message; return whether the store has it."""
        try:
            put(self._store, key, message.model_dump_json().encode())
        except errors.MillraceError as error:
            self._log.warning("the report could not be written: %s", errors.format_error(error))
            return False
        return True


def _stop_process(program: "subprocess.Popen[Any]") -> None:
    """Stop the program and its process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(_STOP_TIMEOUT)
            return


def main(environ: Mapping[str, str], folder: Path) -> None:
    """Run the program that the environment configures, and report its exit."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    adopt_orphans()
    GuestProgram(GuestConfig.from_environment(environ), folder).run()


if __name__ == "__main__":
    main(os.environ, Path(sys.argv[1]))
