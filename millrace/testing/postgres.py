"""PostgreSQL server in its own folder, with a Unix socket."""

import os
import pwd
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from millrace.testing.process import Child

_PROGRAMS = Path("/usr/lib/postgresql")  # Debian's folder, with one folder for each version
_START_TIMEOUT = 120.0  # seconds
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "N": ""}
_BYTES = re.compile(r"\\x([0-9a-f]{2})*")


def find_programs() -> Path | None:
    """Return the folder of the newest installed server's programs, or None."""
    found = sorted(_PROGRAMS.glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


class PostgresServer:
    """PostgreSQL server without a network address. It trusts every user of its socket.

    Attributes:
        url: URL of the database ``postgres`` for SQLAlchemy and asyncpg.
    """

    def __init__(self, programs: Path, folder: Path, *, is_durable: bool = True) -> None:
        """Create a cluster in a folder, and start its server as a user other than root.

        Args:
            programs: Folder of ``initdb`` and ``postgres``.
            folder: New folder for the cluster. The server's user must be able to enter its parents.
            is_durable: Whether writes survive a crash of the machine.
        """
        self._programs, self._folder = programs, folder
        folder.mkdir(parents=True)
        data, user = folder / "data", _find_user()
        change: list[str] = []
        if user is not None:
            os.chown(folder, user.pw_uid, user.pw_gid)
            ids = [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
            # The change of user comes first, as it unsets the signal.
            change = ["setpriv", *ids, "--pdeathsig", "KILL", "--"]
        subprocess.run(
            [*change, programs / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-N"],
            cwd=folder,
            check=True,
            capture_output=True,
        )
        serve = [str(programs / "postgres"), "-D", str(data), "-k", str(folder), "-h", ""]
        if not is_durable:
            for setting in ("fsync", "synchronous_commit", "full_page_writes"):
                serve += ["-c", f"{setting}=off"]
        self._child = Child([*change, *serve], log=folder.parent / "postgres.log", folder=folder)
        self.url = f"postgresql+asyncpg://postgres@/postgres?host={folder}"
        try:
            self._wait_until_ready()
        except BaseException:
            self._child.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the server."""
        self._child.stop()

    def read_values(self) -> Iterator[tuple[str, str]]:
        """Yield the name of the table and the text of each value in the database."""
        dump = subprocess.run(
            [self._programs / "pg_dump", "-h", self._folder, "-U", "postgres", "--data-only"],
            check=True,
            capture_output=True,
            text=True,
        )
        table = ""
        for line in dump.stdout.splitlines():
            if line.startswith("COPY "):
                table = line.split()[1].removeprefix("public.")
            elif line == "\\.":
                table = ""
            elif table:
                yield from ((table, _decode_value(field)) for field in line.split("\t"))

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT
        ask = [self._programs / "pg_isready", "-q", "-h", self._folder]
        while subprocess.run(ask, check=False).returncode:
            if not self._child.is_running() or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL does not start:\n{self._child.read_tail()}")
            time.sleep(0.1)


def _decode_value(field: str) -> str:
    """Decode a value in PostgreSQL's text format of COPY. Bytes are decoded as Latin-1."""
    text = _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[1]), field)
    return bytes.fromhex(text[2:]).decode("latin-1") if _BYTES.fullmatch(text) else text


def _find_user() -> pwd.struct_passwd | None:
    """Return the user for the server if this process is root's: PostgreSQL refuses root."""
    if os.getuid():
        return None
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")
