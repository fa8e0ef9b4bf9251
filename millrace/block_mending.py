"""Mend a damaged file: copy its intact blocks, and fetch only the others."""

import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import IO

from millrace.digest import (
    BLOCK_SIZE,
    Bytes,
    count_blocks,
    group_blocks,
    hash_blocks,
    list_block_digests,
)
from millrace.threads import DaemonThreadPool

_MAX_BLOCKS = 8  # of a request, which are in memory
_CONCURRENCY = 4  # requests

log = logging.getLogger(__name__)


def mend_file(
    damaged: Path, file: int, size: int, blocks: bytes, fetch: Callable[[range], Bytes]
) -> None:
    """Write the intact blocks of a damaged file into an open file, and fetch the others.

    The damaged file is not changed, since it may be in use. Memory: at most 32 MiB. After an error,
    requests under way are not waited for.

    Args:
        damaged: Path of the damaged file.
        file: Descriptor of the open file, which gets the size and the bytes of the intact file.
        size: Size of the intact file in bytes.
        blocks: Joined digests of its blocks.
        fetch: Function that returns adjacent blocks by their numbers, verified. Several threads
            call it.

    Raises:
        OSError: A file cannot be read or written.
    """
    with os.fdopen(file, "r+b", closefd=False) as mended:
        mended.truncate(size)  # not to 0: its bytes may be reserved on the disk
        differing = _copy_intact_blocks(damaged, mended, size, blocks)
        ranges = deque(group_blocks(differing, _MAX_BLOCKS))
        log.warning(
            "%s is damaged: %d of its %d blocks are fetched again",
            damaged, len(differing), count_blocks(size),
        )  # fmt: skip
        fetched: deque[tuple[range, Future[Bytes]]] = deque()
        pool = DaemonThreadPool(_CONCURRENCY, "mend")
        try:
            while ranges or fetched:
                while ranges and len(fetched) < _CONCURRENCY:
                    wanted = ranges.popleft()
                    fetched.append((wanted, pool.submit(fetch, wanted)))
                wanted, content = fetched.popleft()
                mended.seek(wanted.start * BLOCK_SIZE)
                mended.write(content.result())
        finally:
            pool.shutdown()


def _copy_intact_blocks(damaged: Path, mended: IO[bytes], size: int, blocks: bytes) -> list[int]:
    """Copy the intact blocks of a damaged file; return the numbers of the other blocks."""
    differing: list[int] = []
    with damaged.open("rb") as old:
        for number, digest in enumerate(list_block_digests(blocks)):
            data = old.read(min(BLOCK_SIZE, size - number * BLOCK_SIZE))
            if hash_blocks(data) == digest:
                mended.seek(number * BLOCK_SIZE)
                mended.write(data)
            else:
                differing.append(number)
    return differing
