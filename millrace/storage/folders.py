"""Files of a folder that are no objects of it, and keys that a folder cannot have.

obstore neither lists nor writes files whose names end in ``#`` and digits, since its own partial
files have such names. Partial files of `write_file` have them, too, so no listing shows them.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from millrace import errors
from millrace.storage.file_writer import MAX_NAME, PARTIAL_NAME
from millrace.storage.locations import Backend
from millrace.storage.open import Store
from millrace.storage.retry import translate_error
from millrace.storage.write import LinkFinder, UnfinishedUpload, list_uploads

_HIDDEN = re.compile(r".*#[0-9]+", re.DOTALL)


class UnlistedReason(StrEnum):
    """Reason for which a listing of a folder leaves an entry out, or a copy an object."""

    NAME = "its name ends in # and digits, which obstore keeps for partial files"
    UNFINISHED = "it is a partial file of a process that was killed, or that writes now"
    FOLDER_LINK = "it is a link to a folder"
    DANGLING_LINK = "it is a link that leads nowhere"
    SPECIAL = "it is a pipe, a socket or a device"
    MARKER = "it is empty, and marks a folder"


@dataclass(frozen=True, slots=True)
class UnlistedEntry:
    """Entry of a folder that is no object of the store, or object that a copy leaves out.

    Attributes:
        key: Path below the folder, or key.
        reason: Reason for which it is not listed, or not copied.
    """

    key: str
    reason: UnlistedReason


def list_unlisted(store: Store, prefix: str = "") -> Iterator[UnlistedEntry]:
    """Yield the entries of a folder that `list_objects` leaves out, or reaches through a link.

    Partial files of `write_file` are not among them: `list_uploads` has these. Buckets have none.

    Args:
        store: Store to list.
        prefix: Text that the keys start with.

    Raises:
        DeniedError: A folder cannot be read.
    """
    if store.location.backend is not Backend.FILE:
        return
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(Path(store.location.bucket, folder)) as entries:
                found = list(entries)
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError as error:
            raise translate_error(error, store, folder) from error
        for entry in found:
            key = f"{folder}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                if f"{key}/".startswith(prefix) or prefix.startswith(f"{key}/"):
                    folders.append(f"{key}/")
            elif key.startswith(prefix) and (reason := _find_reason(entry)) is not None:
                yield UnlistedEntry(key, reason)


def _find_reason(entry: "os.DirEntry[str]") -> UnlistedReason | None:
    """Return the reason for which an entry is not listed; None if it is an object or partial."""
    if entry.is_file():
        is_hidden = _HIDDEN.fullmatch(entry.name) and not PARTIAL_NAME.fullmatch(entry.name)
        return UnlistedReason.NAME if is_hidden else None
    if not entry.is_symlink():
        return UnlistedReason.SPECIAL
    if entry.is_dir():
        return UnlistedReason.FOLDER_LINK
    return UnlistedReason.SPECIAL if Path(entry.path).exists() else UnlistedReason.DANGLING_LINK


def check_file_key(store: Store, key: str) -> None:
    """Check that a folder can have a file under a key. Writes nothing.

    Args:
        store: Folder, which may be missing.
        key: Key whose segments are neither empty nor relative.

    Raises:
        ConfigurationError: It cannot: the name, or what is there already, forbids it.
    """
    path = Path(store.location.bucket, key)
    reason = ""
    if _HIDDEN.fullmatch(path.name):
        reason = f"since {UnlistedReason.NAME}"
    elif any(len(os.fsencode(name)) > MAX_NAME for name in key.split("/")):
        reason = f"since a name has more than {MAX_NAME} bytes"
    elif LinkFinder(store).is_linked(key):
        reason = "since a folder of its path is a link, which may lead anywhere"
    elif os.path.lexists(path) and not path.is_file():
        reason = "since a folder, or a link or a pipe without a file behind it, has its name"
    else:
        folders = (Path(store.location.bucket, one) for one in Path(key).parents)
        if blocker := next((one for one in folders if one.exists() and not one.is_dir()), None):
            reason = f"since {blocker} is a file"
    if reason:
        raise errors.ConfigurationError(
            f"{store.url} cannot have the key {key!r}, {reason}. Leave it out, or copy into a "
            "bucket or another folder."
        )


def is_partial_file(upload: UnfinishedUpload) -> bool:
    """Decide whether an unfinished upload is a partial file of `write_file`."""
    return PARTIAL_NAME.fullmatch(Path(upload.id).name) is not None


def remove_partial_files(store: Store, prefix: str) -> None:
    """Remove the partial files that dead processes have left in a folder; buckets have none."""
    if store.location.backend is not Backend.FILE:
        return
    for upload in list_uploads(store, prefix):
        if is_partial_file(upload):
            with suppress(OSError), Path(upload.id).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                Path(upload.id).unlink(missing_ok=True)
