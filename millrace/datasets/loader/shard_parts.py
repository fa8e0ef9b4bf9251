"""Parts of a shard, of which those that follow are fetched before they are read."""

from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from millrace.digest import BLOCK_SIZE, count_blocks
from millrace.errors import CorruptError
from millrace.threads import DaemonThreadPool


class PartGrowth:
    """Growth of the parts of a stream, from one block on, so that its first samples come soon.

    Each length comes twice. The first parts are also fetched only when they are read: others that
    are fetched at the same time would take a share of the network.
    """

    def __init__(self) -> None:
        self._parts = self._reads = 0

    def count_blocks(self, limit: int) -> int:
        """Return the number of blocks of the next part, up to a limit."""
        self._parts += 1
        return min(limit, 1 << min(self._parts - 1, 32) // 2)

    def count_ahead(self, limit: int) -> int:
        """Return the number of parts to fetch ahead at the next read, up to a limit."""
        self._reads += 1
        return min(limit, self._reads - 1)


class _Part(NamedTuple):
    """Adjacent blocks of a shard, fetched by one request.

    Attributes:
        first: Number of the first block.
        end: Number after the last block.
        views: Verified bytes, as consecutive views.
    """

    first: int
    end: int
    views: Future[list[memoryview]]


class ShardParts:
    """A shard that is read by parts.

    Args:
        name: URL of the shard.
        size: Bytes of the shard.
        fetch: Function that returns the blocks between two numbers.
        pool: Threads of the requests.
        part_blocks: Largest number of blocks of a part.
        parts_ahead: Largest number of parts that are fetched before they are read.
        growth: Growth up to these numbers; None for parts of one length.
    """

    def __init__(
        self,
        name: str,
        size: int,
        fetch: Callable[[int, int], list[memoryview]],
        pool: DaemonThreadPool,
        *,
        part_blocks: int,
        parts_ahead: int,
        growth: PartGrowth | None = None,
    ) -> None:
        self.name, self.size = name, size
        self._fetch, self._pool = fetch, pool
        self._part_blocks, self._parts_ahead, self._growth = part_blocks, parts_ahead, growth
        self._parts: list[_Part] = []  # in the order of their blocks

    def read(self, start: int, end: int) -> memoryview:
        """Return a copy of the bytes between two offsets. Those that follow are fetched, too."""
        return join_views(self.read_views(start, end))

    def read_views(self, start: int, end: int) -> list[memoryview]:
        """Return the same bytes as consecutive views.

        Raises:
            CorruptError: The shard ends before the last of them.
        """
        if start >= end:
            return []
        parts = self._request(start // BLOCK_SIZE, -(-end // BLOCK_SIZE))
        found = [view for part in parts for view in part.views.result()]
        first = parts[0].first * BLOCK_SIZE
        return _cut_views(found, start - first, end - first)

    def read_on(self, start: int) -> memoryview:
        """Return a view of the bytes from an offset on, to the end of those that lie together."""
        block = start // BLOCK_SIZE
        (part,) = self._request(block, block + 1)
        first, end = part.first * BLOCK_SIZE, part.end * BLOCK_SIZE
        return _cut_views(part.views.result(), start - first, end - first)[0]

    def read_once(self, start: int, end: int) -> memoryview:
        """Return the bytes between two offsets. No others are fetched or kept."""
        if start >= end:
            return memoryview(bytearray())
        first = start // BLOCK_SIZE
        fetched = self._pool.submit_urgent(self._fetch, first, -(-end // BLOCK_SIZE)).result()
        return join_views(_cut_views(fetched, start - first * BLOCK_SIZE, end - first * BLOCK_SIZE))

    def release(self, offset: int) -> None:
        """Free the memory of the parts before an offset."""
        self._parts = [part for part in self._parts if part.end * BLOCK_SIZE > offset]

    def close(self) -> None:
        """Cancel the requests that have not begun, and free the memory."""
        for part in self._parts:
            part.views.cancel()
        self._parts = []

    def _request(self, block: int, end: int) -> list[_Part]:
        """Request the parts of some blocks before all others, and then those that follow.

        Raises:
            CorruptError: The shard has fewer blocks.
        """
        if end > count_blocks(self.size):
            raise CorruptError(f"{self.name} ends before the end of its samples.")
        found: list[_Part] = []
        while block < end:
            found.append(self._find_part(block, is_urgent=True))
            block = found[-1].end
        most = self._parts_ahead
        for _ in range(self._growth.count_ahead(most) if self._growth else most):
            if block >= count_blocks(self.size):
                break
            block = self._find_part(block, is_urgent=False).end
        return found

    def _find_part(self, block: int, *, is_urgent: bool) -> _Part:
        """Return the part with a block. It is requested if there is none."""
        index = bisect_right(self._parts, block, key=lambda part: part.first)
        part = self._parts[index - 1] if index else None
        if part is None or part.end <= block:
            is_last = index == len(self._parts)
            limit = count_blocks(self.size) if is_last else self._parts[index].first
            count = self._part_blocks
            if self._growth is not None:
                count = self._growth.count_blocks(count)
            part = self._submit(block, min(block + count, limit), is_urgent=is_urgent)
            self._parts.insert(index, part)
        elif is_urgent and part.views.cancel():  # it was requested ahead, and has not begun
            part = self._submit(part.first, part.end, is_urgent=True)
            self._parts[index - 1] = part
        return part

    def _submit(self, first: int, end: int, *, is_urgent: bool) -> _Part:
        submit = self._pool.submit_urgent if is_urgent else self._pool.submit
        return _Part(first, end, submit(self._fetch, first, end))


def _cut_views(views: list[memoryview], start: int, end: int) -> list[memoryview]:
    """Return the parts of consecutive views between two offsets, without empty ones."""
    found: list[memoryview] = []
    for view in views:
        if start < len(view) and end > 0:
            found.append(view[max(0, start) : end])
        start, end = start - len(view), end - len(view)
    return found


def join_views(views: list[memoryview]) -> memoryview:
    """Return a copy of consecutive views in one piece."""
    joined = allocate_view(sum(map(len, views)))
    at = 0
    for view in views:
        joined[at : at + len(view)] = view
        at += len(view)
    return joined


def allocate_view(size: int) -> memoryview:
    """Return memory that is not written first, unlike that of a `bytearray`."""
    return np.empty(size, np.uint8).data
