"""Write whole files of a folder, which appear when they are complete."""

import fcntl
import os
import re
import secrets
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from millrace.storage.open import Store
from millrace.storage.retry import translate_write_error

_PARTIAL_MARK = "#5710031"

PARTIAL_NAME = re.compile(rf".*{_PARTIAL_MARK}[0-9]{{13}}", re.DOTALL)
"""Name of a partial file of `write_file`."""

MAX_NAME = 255
"""Bytes of the longest name of a file."""


@contextmanager
def write_file(store: Store, key: str, *, overwrite: bool) -> Generator[BinaryIO]:
    """Open the file of a new object. The object appears when the block ends without an error.

    A killed process leaves a partial file, which `is_partial_file` knows by its name. The process
    has locked it while it lived, so `remove_partial_files` finds out that it is dead.

    Args:
        store: Folder to write to.
        key: Key that a folder can have, as `check_key` or `check_file_key` finds out.
        overwrite: Whether to replace a file that is there. If not, a file that another process
            has written meanwhile stays. On a file system without hard links, this is only looked
            up just before.

    Raises:
        ExistsError: There is a file, and ``overwrite`` is false.
        DeniedError: The folder cannot be written.
        ConfigurationError: Another file or folder is in the way of the file.
        NoSpaceError: The disk is full.
    """
    path = Path(store.location.bucket, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial, file = _open_partial_file(path)
        try:
            with file:
                yield file
                file.flush()
                if not overwrite:
                    _link(partial, path)
                else:
                    partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise translate_write_error(error, store, key) from error


def _open_partial_file(path: Path) -> tuple[Path, BinaryIO]:
    """Return a new, locked partial file, and its path."""
    while True:
        mark = f"{_PARTIAL_MARK}{secrets.randbelow(10**13):013}"
        name = os.fsencode(path.name)[: MAX_NAME - len(mark)].decode(errors="ignore")
        partial = path.with_name(f"{name}{mark}")
        file = partial.open("xb")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if partial.exists():  # otherwise another process has removed it before it was locked
            return partial, file
        file.close()


def _link(partial: Path, path: Path) -> None:
    """Give a file its name, unless there is a file of this name.

    Raises:
        FileExistsError: There is one.
    """
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:  # no hard links here
        if os.path.lexists(path):
            raise FileExistsError(f"{path} already exists") from None
        partial.replace(path)
