"""Objects of the rig's store: files in a folder, each with its key, size and ETag."""

import hashlib
import os
import random
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One version of an object.

    Attributes:
        path: Path of the file. Its content does not change: a new version has another file.
        size: Size in bytes.
        etag: ETag as in S3: the MD5 in double quotes.
        modified: Time at which the version was stored.
        sha256: SHA-256 in base64 from the upload, or an empty string.
    """

    path: Path
    size: int
    etag: str
    modified: datetime
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class RigPage:
    """A page of a listing.

    Attributes:
        objects: Keys of the page with their objects.
        prefixes: Common prefixes of the page.
        after: Key or prefix after which the next page begins. Empty on the last page.
    """

    objects: list[tuple[str, StoredObject]]
    prefixes: list[str]
    after: str


class Objects:
    """Objects of the store, for many threads.

    Args:
        folder: Folder of the objects. Its files become objects with their paths as keys.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count()
        self._lock = threading.Lock()
        self._stored: dict[str, StoredObject] = {}
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                with path.open("rb") as file:
                    etag = hashlib.file_digest(file, "md5").hexdigest()
                self._add(path.relative_to(folder).as_posix(), path, etag)

    def get(self, key: str) -> StoredObject | None:
        """Return an object, or None if it does not exist."""
        return self._stored.get(key)

    def generate(self, key: str, size: int, seed: int) -> StoredObject:
        """Create or replace an object of ``size`` random bytes from a seed."""
        generator = random.Random(seed)
        blocks = (generator.randbytes(min(BLOCK, size - at)) for at in range(0, size, BLOCK))
        return self.put(key, blocks)

    def put(self, key: str, blocks: Iterable[bytes], sha256: str = "") -> StoredObject:
        """Create or replace an object."""
        stored = self._write(key, blocks, sha256, absent=False)
        assert stored is not None
        return stored

    def create(self, key: str, blocks: Iterable[bytes], sha256: str = "") -> StoredObject | None:
        """Create an object, or return None if it exists."""
        return self._write(key, blocks, sha256, absent=True)

    def delete(self, key: str) -> None:
        """Delete an object if it exists."""
        with self._lock:
            before = self._stored.pop(key, None)
        if before is not None:
            before.path.unlink()

    def _write(
        self, key: str, blocks: Iterable[bytes], sha256: str, *, absent: bool
    ) -> StoredObject | None:
        """Write blocks into a new file, and add it as an object."""
        with self._lock:
            path = self._folder / f".{next(self._numbers)}"
        md5 = hashlib.md5()
        with path.open("wb") as file:
            for block in blocks:
                file.write(block)
                md5.update(block)
        return self._add(key, path, md5.hexdigest(), sha256, absent=absent)

    def _add(
        self, key: str, path: Path, digest: str, sha256: str = "", *, absent: bool = False
    ) -> StoredObject | None:
        """Add a file as an object. With ``absent``, return None if the key exists."""
        now = datetime.now(UTC).replace(microsecond=0)  # HTTP headers have whole seconds
        stored = StoredObject(path, path.stat().st_size, f'"{digest}"', now, sha256)
        with self._lock:
            before = self._stored.get(key)
            if before is None or not absent:
                self._stored[key] = stored
                absent = False
        if absent:
            path.unlink()
            return None
        if before is not None and before.path.name.startswith("."):
            before.path.unlink()  # readers have the file open
        return stored

    def list_page(self, prefix: str, delimiter: str, after: str, limit: int) -> RigPage:
        """Return a page of a listing.

        Args:
            prefix: Prefix of the keys.
            delimiter: Delimiter of the common prefixes. An empty string stands for none.
            after: Key or common prefix after which the page begins.
            limit: Largest number of keys and common prefixes.
        """
        objects: list[tuple[str, StoredObject]] = []
        prefixes: list[str] = []
        last = ""
        for name, stored in self._iterate_names(prefix, delimiter, after):
            if len(objects) + len(prefixes) == limit:
                return RigPage(objects, prefixes, last)
            last = name
            if stored is None:
                prefixes.append(name)
            else:
                objects.append((name, stored))
        return RigPage(objects, prefixes, "")

    def _iterate_names(
        self, prefix: str, delimiter: str, after: str
    ) -> Iterator[tuple[str, StoredObject | None]]:
        """Yield the keys with their objects, and each common prefix once, with None."""
        with self._lock:
            stored = dict(self._stored)
        keys, last = sorted(stored), ""
        for key in keys[bisect_right(keys, after) :]:
            if not key.startswith(prefix):
                continue
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if not found:
                yield key, stored[key]
                continue
            common = f"{prefix}{head}{delimiter}"
            if common not in (last, after) and not after.startswith(common):
                last = common
                yield common, None


def open_object(stored: StoredObject) -> int:
    """Open the file of an object, and return its descriptor.

    Raises:
        FileNotFoundError: The object was replaced or deleted.
    """
    return os.open(stored.path, os.O_RDONLY)
