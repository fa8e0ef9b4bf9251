"""Digests of bytes, and canonical JSON.

A digest is the name of an algorithm and hexadecimal digits: ``blake3:4bf0…``. Millrace computes
BLAKE3. It verifies SHA-256 and MD5 where others define them.

A BLAKE3 digest of more than 1 MiB is the root of the digests of blocks of 1 MiB:

    root = BLAKE3(digest of block 0 ‖ digest of block 1 ‖ …, derive_key_context=_ROOT_CONTEXT)

So blocks can be hashed in any order and by several threads, a range of whole blocks can be verified
alone, and the digest of a file follows from those of its parts without another read. The context
separates roots from digests of bytes. Up to 1 MiB, the digest is the BLAKE3 of the bytes.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Protocol

import orjson
from blake3 import blake3
from pydantic import AfterValidator

from millrace.errors import CorruptError

Bytes = bytes | bytearray | memoryview

BLOCK_SIZE = 1 << 20
"""Bytes of a block that has its own digest."""
BLOCK_DIGEST_SIZE = 32
"""Bytes of the digest of a block."""
_MAX_NAMED_RANGES = 8  # in a text that names blocks
_ROOT_CONTEXT = "millrace 2026-11-25 digests of blocks of 1 MiB"


class Algorithm(StrEnum):
    """Algorithm of a digest."""

    BLAKE3 = "blake3"
    SHA256 = "sha256"
    MD5 = "md5"


class DigestError(ValueError):
    """A text is not a digest, or a digest of another algorithm. The message says what to do."""


_HEX_DIGITS = {Algorithm.BLAKE3: 64, Algorithm.SHA256: 64, Algorithm.MD5: 32}


def check_digest(digest: str) -> str:
    """Return a digest that was checked for its form.

    Raises:
        DigestError: The text is not a digest. The message says what to do.
    """
    name, colon, digits = digest.partition(":")
    if not colon and re.fullmatch("[0-9a-f]{64}", digest):
        raise DigestError(
            f"{digest} has no algorithm: it is a SHA-256 of an earlier version of Millrace, which "
            "this version does not read. Make the object again, or write `sha256:` before it."
        )
    if name not in set(Algorithm):
        raise DigestError(
            f"{digest!r} is not a digest: write an algorithm ({', '.join(Algorithm)}), a colon, "
            "and hexadecimal digits."
        )
    count = _HEX_DIGITS[Algorithm(name)]
    if len(digits) != count or not re.fullmatch("[0-9a-f]*", digits):
        raise DigestError(f"{digest!r} is not a {name} digest: write {count} digits, 0-9 and a-f.")
    return digest


Digest = Annotated[str, AfterValidator(check_digest)]
"""Digest of bytes, such as ``blake3:4bf0…``, checked for its form in records and settings."""


def check_own_digest(digest: str) -> str:
    """Return a digest that Millrace made, checked for its form and its algorithm.

    Raises:
        DigestError: The digest is not a BLAKE3. The message says what to do.
    """
    algorithm = get_algorithm(check_digest(digest))
    if algorithm is not Algorithm.BLAKE3:
        raise DigestError(
            f"{digest} is a digest of {algorithm}, where Millrace writes one of BLAKE3: another "
            "version or another program wrote it. Save the checkpoint again, or shard the dataset "
            "again."
        )
    return digest


OwnDigest = Annotated[str, AfterValidator(check_own_digest)]
"""BLAKE3 digest that Millrace made. Records refuse other algorithms."""


def compute_digest(data: Bytes) -> str:
    """Return the BLAKE3 digest of bytes."""
    return combine_blocks(hash_blocks(data))


def hash_blocks(data: Bytes) -> bytes:
    """Return the joined BLAKE3 digests of the blocks of bytes. Empty bytes are one empty block."""
    view = _view_bytes(data)
    return b"".join(
        blake3(view[at : at + BLOCK_SIZE]).digest() for at in range(0, len(view) or 1, BLOCK_SIZE)
    )


def _view_bytes(data: Bytes) -> memoryview:
    """Return a view of the bytes of a buffer, such as an array's, whatever its items are."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def combine_blocks(blocks: bytes) -> str:
    """Return the digest of bytes from the joined digests of their blocks."""
    if len(blocks) == BLOCK_DIGEST_SIZE:
        return f"{Algorithm.BLAKE3}:{blocks.hex()}"
    return f"{Algorithm.BLAKE3}:{blake3(blocks, derive_key_context=_ROOT_CONTEXT).hexdigest()}"


def count_blocks(size: int) -> int:
    """Return the number of blocks of bytes of a size."""
    return max(1, -(-size // BLOCK_SIZE))


def check_blocks(blocks: bytes, digest: str, size: int) -> bytes:
    """Return the joined digests of blocks, checked against their root.

    A list that fits its root can be trusted, wherever it comes from.

    Args:
        blocks: Joined digests of the blocks.
        digest: BLAKE3 digest of the bytes.
        size: Number of bytes.

    Raises:
        CorruptError: The list has the digests of another number of blocks, or another root.
    """
    expected = count_blocks(size)
    if len(blocks) != expected * BLOCK_DIGEST_SIZE:
        raise CorruptError(
            f"The list of block digests has {len(blocks):,} bytes. {size:,} bytes have "
            f"{expected:,} blocks, whose list has {expected * BLOCK_DIGEST_SIZE:,} bytes."
        )
    if (root := combine_blocks(blocks)) != digest:
        raise CorruptError(f"The list of block digests has the root {root}, not {digest}.")
    return blocks


def list_block_digests(blocks: bytes) -> list[bytes]:
    """Return the digest of each block, from their joined digests."""
    step = BLOCK_DIGEST_SIZE
    return [blocks[at : at + step] for at in range(0, len(blocks), step)]


def slice_blocks(blocks: bytes, numbers: range) -> bytes:
    """Return the joined digests of adjacent blocks, from the joined digests of all blocks."""
    step = BLOCK_DIGEST_SIZE
    return blocks[numbers.start * step : numbers.stop * step]


def find_differing_blocks(found: bytes, expected: bytes) -> list[int]:
    """Return the numbers of the expected blocks that differ or are missing, from joined digests."""
    return [
        number
        for number, digest in enumerate(list_block_digests(expected))
        if digest != found[number * BLOCK_DIGEST_SIZE : (number + 1) * BLOCK_DIGEST_SIZE]
    ]


def group_blocks(numbers: Iterable[int], max_blocks: int | None = None) -> list[range]:
    """Return ascending numbers of blocks as ranges of adjacent blocks.

    Args:
        numbers: Numbers of blocks, in ascending order.
        max_blocks: Largest length of a range; None for no limit.
    """
    ranges: list[range] = []
    for number in numbers:
        last = ranges[-1] if ranges else range(0)
        if last and last.stop == number and len(last) != max_blocks:
            ranges[-1] = range(last.start, number + 1)
        else:
            ranges.append(range(number, number + 1))
    return ranges


def describe_blocks(numbers: Iterable[int]) -> str:
    """Return a short text that names blocks by their numbers from 0, such as ``MiB 3-4, 17``.

    MiB 3 is the block that begins 3 MiB after the first byte. The text names at most eight ranges.
    """
    ranges = group_blocks(numbers)
    named = ", ".join(
        str(each.start) if len(each) == 1 else f"{each.start}-{each.stop - 1}"
        for each in ranges[:_MAX_NAMED_RANGES]
    )
    more = sum(map(len, ranges[_MAX_NAMED_RANGES:]))
    return f"MiB {named}" + (f" and {more:,} more" if more else "")


class Hasher(Protocol):
    """Computation of a digest from bytes that arrive in order."""

    def update(self, data: Bytes, /) -> None:
        """Hash the next bytes."""
        ...

    def compute(self) -> str:
        """Return the digest of the bytes so far."""
        ...


class BlockHasher:
    """Computation of a BLAKE3 digest and of the digests of its blocks.

    Attributes:
        size: Number of hashed bytes.
    """

    def __init__(self) -> None:
        self._blocks = bytearray()
        self._last, self._room = blake3(), BLOCK_SIZE
        self.size = 0

    def update(self, data: Bytes, /) -> None:
        """Hash the next bytes."""
        view = _view_bytes(data)
        self.size += len(view)
        while len(view) > self._room:
            self._last.update(view[: self._room])
            view = view[self._room :]
            self._blocks += self._last.digest()
            self._last, self._room = blake3(), BLOCK_SIZE
        self._last.update(view)
        self._room -= len(view)

    @property
    def blocks(self) -> bytes:
        """Joined digests of the blocks so far. The last block may be incomplete."""
        return bytes(self._blocks) + self._last.digest()

    def compute(self) -> str:
        """Return the digest of the bytes so far."""
        return combine_blocks(self.blocks)


class _StandardHasher:
    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self._hash = hashlib.new(algorithm, usedforsecurity=algorithm is not Algorithm.MD5)

    def update(self, data: Bytes, /) -> None:
        self._hash.update(data)

    def compute(self) -> str:
        return f"{self._algorithm}:{self._hash.hexdigest()}"


def make_hasher(algorithm: Algorithm = Algorithm.BLAKE3) -> Hasher:
    """Return a new computation of a digest."""
    return BlockHasher() if algorithm is Algorithm.BLAKE3 else _StandardHasher(algorithm)


def compute_stream_digest(
    blocks: Iterable[Bytes], algorithm: Algorithm = Algorithm.BLAKE3
) -> tuple[str, int]:
    """Return the digest and the size in bytes of a stream, which is read once."""
    hasher, size = make_hasher(algorithm), 0
    for block in blocks:
        hasher.update(block)
        size += len(block)
    return hasher.compute(), size


def compute_file_digest(path: Path, algorithm: Algorithm = Algorithm.BLAKE3) -> str:
    """Return the digest of a file on the disk."""
    with path.open("rb", buffering=0) as file:
        return compute_stream_digest(iter(lambda: file.read(BLOCK_SIZE), b""), algorithm)[0]


def get_algorithm(digest: str) -> Algorithm:
    """Return the algorithm of a digest."""
    return Algorithm(digest.partition(":")[0])


def get_hex(digest: str) -> str:
    """Return the hexadecimal digits of a digest, for names of objects."""
    return digest.partition(":")[2]


def make_local_etag(stat: os.stat_result) -> str:
    """Return a substitute for the ETag of a file: its size and modification time.

    The inode is left out, so that a copy with the same times (rsync -a, cp -p) has the same ETag.
    """
    return f"{stat.st_size:x}-{stat.st_mtime_ns:x}"


def dump_canonical_json(value: Mapping[str, Any]) -> bytes:
    """Return JSON with sorted keys and without spaces, so that equal values have equal bytes."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
