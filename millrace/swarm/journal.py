"""Journal of the incomplete files on a node: the ranges that were written, for the next run.

``partial.jsonl`` has a JSON list in each line:

- ``["file", OBJECT, PATH]``: the bytes of this object are in this partial file, below the root;
- ``["range", OBJECT, START, SIZE, DIGESTS]``: this range of the object was written to the file;
- ``["dropped", OBJECT, START, SIZE]``: the bytes of this range were wrong;
- ``["folder", PATH]``: an archive is unpacked into this folder. The next run removes the folder.

OBJECT identifies the content of an object of the store (`compute_object_id`). So the next run can
use the ranges, whatever else its requests are, and wherever the destination of the object is.
"""

import contextlib
import json
import os
import re
import shutil
import sys
import time
from bisect import bisect_right
from collections.abc import Collection, Iterable
from io import FileIO
from pathlib import Path
from typing import Any

from millrace.digest import BLOCK_SIZE, BlockHasher, compute_digest, get_hex
from millrace.swarm.catalogue import File, is_unfinished

_DIGESTS = re.compile("([0-9a-f]{64})+")  # of the blocks of a range, in hexadecimal
_KEPT_FOR = 7 * 24 * 3600.0  # seconds to keep a partial file of another request, from its last byte
_DISK_BLOCK = 512  # bytes of a unit of `st_blocks`

Range = tuple[int, int]
"""First byte and number of bytes."""


def compute_object_id(file: File) -> str:
    """Return the id of an object's content: a digest of its URL, ETag and size."""
    content = json.dumps([file.origin, file.etag, file.size])
    return get_hex(compute_digest(content.encode()))[:16]


class Journal:
    """Partial files of earlier runs, and of this run.

    Args:
        root: Folder that all destinations are below; resolved.
        path: Path of the journal.

    Attributes:
        partials: Path of the partial file of each object, below the root.
        ranges: Block digests of each written range, by object, in hexadecimal.
    """

    def __init__(self, root: Path, path: Path) -> None:
        self._root, self._path = root, path
        self._descriptor: int | None = None
        self._stale: set[str] = set()
        self.partials: dict[str, str] = {}
        self.ranges: dict[str, dict[Range, str]] = {}

    def read(self) -> None:
        """Read the journal of earlier runs. Skip lines that a kill has cut."""
        with contextlib.suppress(FileNotFoundError):
            for line in self._path.read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    self._apply_row(json.loads(line))

    def _apply_row(self, row: object) -> None:
        match row:
            case ["file", str(name), str(path)] if _is_ours(path):
                if (before := self.partials.get(name)) is not None and before != path:
                    self._stale.add(before)
                self.partials[name] = path
            case ["range", str(name), int(start), int(size), str(digest)] if _DIGESTS.fullmatch(
                digest
            ):
                self.ranges.setdefault(name, {})[start, size] = digest
            case ["dropped", str(name), int(start), int(size)]:
                self.ranges.get(name, {}).pop((start, size), None)
            case ["folder", str(path)] if _is_ours(path):
                self._stale.add(path)
            case _:
                pass

    def select_other_partials(
        self, objects: Collection[str], stems: Collection[str], room: int
    ) -> dict[str, str]:
        """Select the partial files of other requests that are kept, for a repetition of these.

        The newest files are kept for a week, up to half of the disk space that the run leaves free.

        Args:
            objects: Objects of this run, whose partial files are not of other requests.
            stems: `cut_partial_stem` of each destination of this run. Partial files of earlier
                contents there are not kept.
            room: Free bytes of the disk that this run does not need.

        Returns:
            Path of the partial file of each object.
        """
        found: list[tuple[float, int, str, str]] = []
        for name, path in self.partials.items():
            left = self._root / path
            if name in objects or cut_partial_stem(path) in stems or not self._is_below_root(left):
                continue
            if left.is_file() and not left.is_symlink():
                stat = left.stat()
                found.append((stat.st_mtime, stat.st_blocks * _DISK_BLOCK, name, path))
        most = (room + sum(size for _, size, _, _ in found)) // 2
        kept: dict[str, str] = {}
        for written, size, name, path in sorted(found, reverse=True):
            most -= size
            if most < 0 or time.time() - written > _KEPT_FOR:
                break
            kept[name] = path
        return kept

    def begin(self, files: dict[str, str], ranges: Iterable[tuple[str, Range, str]]) -> None:
        """Begin a new journal with the given files, and remove all other partial files.

        Args:
            files: Path of the partial file of each object that is incomplete or kept.
            ranges: Object, range and block digests of the ranges in these files.
        """
        rows: list[list[Any]] = [["file", *item] for item in files.items()]
        rows += [["range", name, *span, digest] for name, span, digest in ranges]
        for path in (self._stale | set(self.partials.values())) - set(files.values()):
            self._remove(path)
        new = self._path.with_suffix(".new")
        new.write_text("".join(map(_format_row, rows)))
        new.rename(self._path)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)

    def note_file(self, name: str, path: str) -> None:
        """Note that a partial file is created."""
        self._append(["file", name, path])

    def note_folder(self, path: str) -> None:
        """Note a folder that an archive is unpacked into."""
        self._append(["folder", path])

    def note_ranges(self, ranges: Iterable[tuple[str, Range, str]]) -> None:
        """Note written ranges."""
        self._append(*(["range", name, *span, digest] for name, span, digest in ranges))

    def forget_range(self, name: str, span: Range) -> None:
        """Note that the bytes of a range were wrong, so that the next run does not use them."""
        self._append(["dropped", name, *span])

    def close(self, *, keep: bool) -> None:
        """Close the journal. Remove it if no partial file is left (`keep` is false)."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            if not keep:
                self._path.unlink(missing_ok=True)

    def _append(self, *rows: list[Any]) -> None:
        if self._descriptor is not None:
            os.write(self._descriptor, "".join(map(_format_row, rows)).encode())

    def _remove(self, path: str) -> None:
        left = self._root / path
        if not self._is_below_root(left):
            return  # through a link that another program has created since
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                left.unlink()

    def _is_below_root(self, path: Path) -> bool:
        return path.parent.resolve().is_relative_to(self._root)


def cut_partial_stem(path: str) -> str:
    """Return the part of a partial file's path that depends only on its destination."""
    return path.rsplit(".", 2)[0]


def verify_ranges(path: Path, noted: dict[Range, str], wanted: Iterable[Range]) -> dict[int, bytes]:
    """Hash the noted ranges of a partial file, and find the wanted ranges with correct bytes.

    Args:
        path: Partial file.
        noted: Block digests of the ranges that were written to the file.
        wanted: Ranges that this run needs. The earlier run may have had another piece size.

    Returns:
        Block digests of each wanted range that correct noted ranges cover, by its position in
        `wanted`.
    """
    found: dict[int, bytes] = {}
    good: dict[Range, bool] = {}
    with path.open("rb", buffering=0) as opened:

        def is_good(span: Range) -> bool:
            if span not in good:
                good[span] = _hash_range(opened, span).hex() == noted[span]
            return good[span]

        spans = sorted(noted)
        for index, (start, size) in enumerate(wanted):
            if (start, size) in noted:
                if is_good((start, size)):
                    found[index] = bytes.fromhex(noted[start, size])
                continue
            at = start
            first = max(0, bisect_right(spans, (start, sys.maxsize)) - 1)
            for span in spans[first:]:
                if span[0] > at or at >= start + size or not is_good(span):
                    break
                at = max(at, sum(span))
            if at >= start + size:
                found[index] = _hash_range(opened, (start, size))
    return found


def _hash_range(opened: FileIO, span: Range) -> bytes:
    start, left = span
    hasher = BlockHasher()
    opened.seek(start)
    while left and (block := opened.read(min(left, BLOCK_SIZE))):
        hasher.update(block)
        left -= len(block)
    return hasher.blocks


def _is_ours(path: str) -> bool:
    """Tell whether a path is below the root, and has the form of a partial file's name."""
    components = path.split("/")
    return {"", ".", ".."}.isdisjoint(components) and is_unfinished(components[-1])


def _format_row(row: list[Any]) -> str:
    return f"{json.dumps(row)}\n"
