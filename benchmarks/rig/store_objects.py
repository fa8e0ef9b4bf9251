"""The objects of the rig's store: files in a folder, each with its key, size and ETag."""

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
class Stored:
    """One object as it is now.

    Attributes:
        path: Where its bytes are. They do not change: who replaces an object writes another file.
        size: Bytes.
        etag: The MD5 of the bytes, in quotes, as S3's.
        modified: When it was stored.
        sha256: In base64, if it was uploaded with it.
    """

    path: Path
    size: int
    etag: str
    modified: datetime
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a listing.

    Attributes:
        objects: The objects on it, by key.
        prefixes: The common prefixes on it.
        after: What the next page begins behind; empty on the last.
    """

    objects: list[tuple[str, Stored]]
    prefixes: list[str]
    after: str


class Objects:
    """Objects of the store; used by many threads.

    Args:
        folder: The files that are in it are objects, their paths the keys. Further ones go there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count()
        self._lock = threading.Lock()
        self._stored: dict[str, Stored] = {}
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                with path.open("rb") as file:
                    etag = hashlib.file_digest(file, "md5").hexdigest()
                self._add(path.relative_to(folder).as_posix(), path, etag)

    def get(self, key: str) -> Stored | None:
        """Return an object; None if there is none."""
        return self._stored.get(key)

    def generate(self, key: str, size: int, seed: int) -> Stored:
        """Make an object of ``size`` random bytes, the same for the same seed."""
        dice = random.Random(seed)
        blocks = (dice.randbytes(min(BLOCK, size - at)) for at in range(0, size, BLOCK))
        return self.put(key, blocks)

    def put(self, key: str, blocks: Iterable[bytes], sha256: str = "") -> Stored:
        """Make or replace an object."""
        stored = self._written(key, blocks, sha256, absent=False)
        assert stored is not None
        return stored

    def create(self, key: str, blocks: Iterable[bytes], sha256: str = "") -> Stored | None:
        """Make an object; None if there is one."""
        return self._written(key, blocks, sha256, absent=True)

    def delete(self, key: str) -> None:
        """Remove an object, if there is one."""
        with self._lock:
            before = self._stored.pop(key, None)
        if before is not None:
            before.path.unlink()

    def _written(
        self, key: str, blocks: Iterable[bytes], sha256: str, *, absent: bool
    ) -> Stored | None:
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
    ) -> Stored | None:
        now = datetime.now(UTC).replace(microsecond=0)  # HTTP and S3's listing agree on seconds
        stored = Stored(path, path.stat().st_size, f'"{digest}"', now, sha256)
        with self._lock:
            before = self._stored.get(key)
            if before is None or not absent:
                self._stored[key] = stored
                absent = False
        if absent:
            path.unlink()
            return None
        if before is not None and before.path.name.startswith("."):
            before.path.unlink()  # who reads it has it open
        return stored

    def page(self, prefix: str, delimiter: str, after: str, most: int) -> Page:
        """Return a page of the objects under a prefix, those behind ``after``, ``most`` at most."""
        objects: list[tuple[str, Stored]] = []
        prefixes: list[str] = []
        last = ""
        for name, stored in self._names(prefix, delimiter, after):
            if len(objects) + len(prefixes) == most:
                return Page(objects, prefixes, last)
            last = name
            if stored is None:
                prefixes.append(name)
            else:
                objects.append((name, stored))
        return Page(objects, prefixes, "")

    def _names(
        self, prefix: str, delimiter: str, after: str
    ) -> Iterator[tuple[str, Stored | None]]:
        """Yield the keys, and in the place of those that share one, each common prefix once."""
        with self._lock:
            stored = dict(self._stored)
        keys, said = sorted(stored), ""
        for key in keys[bisect_right(keys, after) :]:
            if not key.startswith(prefix):
                continue
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if not found:
                yield key, stored[key]
                continue
            common = f"{prefix}{head}{delimiter}"
            if common not in (said, after) and not after.startswith(common):
                said = common
                yield common, None


def opened(stored: Stored) -> int:
    """Return a descriptor of an object's bytes.

    Raises:
        FileNotFoundError: It was replaced just now.
    """
    return os.open(stored.path, os.O_RDONLY)
