"""Digests of files that arrive.

The BLAKE3 of a file follows from the digests of its blocks, which are hashed on arrival. Files with
another digest, such as a SHA-256, are hashed once more, in their order. This module owns the
computations of these digests, and the number of hashed bytes of each file.
"""

import os
from collections.abc import Callable

from millrace.digest import (
    BLOCK_SIZE,
    Hasher,
    combine_blocks,
    compute_file_digest,
    make_hasher,
)
from millrace.errors import CorruptError, StoppedError
from millrace.swarm.assembly.arrivals import Arrivals, FileState
from millrace.swarm.catalogue import can_combine


class FileHashes:
    """Hashes of files, from their first byte.

    Args:
        arrivals: Files that arrive.
        piece_size: Bytes of a piece at most.
    """

    def __init__(self, arrivals: Arrivals, piece_size: int) -> None:
        self._arrivals, self._piece_size = arrivals, piece_size
        self._hashers: dict[int, Hasher] = {}
        self._hashed = [0] * len(arrivals.states)  # bytes
        self._buffer = memoryview(bytearray(BLOCK_SIZE))

    def update(self, number: int, size: int) -> None:
        """Hash the next `size` bytes of a file, which have arrived.

        Raises:
            CorruptError: Another program has cut the file.
        """
        hasher = self._hashers.get(number)
        if hasher is None:
            hasher = make_hasher(self._arrivals.states[number].file.algorithm)
            self._hashers[number] = hasher
        descriptor = self._arrivals.open_current(number)
        try:
            while size:
                block = self._buffer[: min(size, BLOCK_SIZE)]
                got = os.preadv(descriptor, [block], self._hashed[number])
                if not got:
                    raise CorruptError(
                        f"{self._arrivals.states[number].path} was cut by another program during "
                        "the run: let no program change the root, and run again."
                    )
                hasher.update(self._buffer[:got])
                self._hashed[number] += got
                size -= got
        finally:
            os.close(descriptor)

    def get_position(self, number: int) -> int:
        """Return the number of hashed bytes of a file."""
        return self._hashed[number]

    def compute_digest(self, number: int) -> str | None:
        """Return the digest of a complete file, of the kind of `File.digest`.

        Returns:
            None while the thread of `hash_arriving` still hashes the file.
        """
        state = self._arrivals.states[number]
        if self.is_combined(number):
            return combine_blocks(b"".join(state.list_segment_blocks()))
        if len(state.segment_blocks) == 1 or not state.fresh:
            return compute_file_digest(state.path, state.file.algorithm)
        if self._hashed[number] < state.file.size:
            return None
        return self._hashers[number].compute()

    def is_combined(self, number: int) -> bool:
        """Tell whether the digest of a file follows from the block digests of its segments."""
        return can_combine(self._arrivals.states[number].file, self._piece_size)


def hash_arriving(arrivals: Arrivals, hashes: FileHashes, on_hashed: Callable[[int], None]) -> None:
    """Hash files of several pieces while they arrive, one after another, until the run ends.

    Args:
        arrivals: Files that arrive.
        hashes: Hashes of these files.
        on_hashed: Called with each file that is complete and hashed.
    """
    known = [
        number
        for number, state in enumerate(arrivals.states)
        if state.wanted
        and not state.final
        and len(state.segment_blocks) > 1
        and not hashes.is_combined(number)
    ]
    for number in known:
        state = arrivals.states[number]
        if not _hash_one(arrivals, hashes, number, state):
            return
        if state.missing == 0 and not state.final:
            on_hashed(number)


def _hash_one(arrivals: Arrivals, hashes: FileHashes, number: int, state: FileState) -> bool:
    """Hash a file while it arrives; return False if the run ended before."""
    while hashes.get_position(number) < state.file.size and state.fresh:
        try:
            ready = arrivals.wait_for_byte(number, hashes.get_position(number))
        except StoppedError:
            return False
        if state.final:
            break
        hashes.update(number, ready)
    return True
