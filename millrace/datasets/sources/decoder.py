"""Interface of the decompressors of a file, which begin at any of its seek points."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

MAX_OUTPUT = 4 << 20  # bytes that are decompressed at a time


class DamageError(Exception):
    """Bytes of a compressed or tar file that cannot be read, or do not have their checksum."""


@dataclass(frozen=True, slots=True)
class DecoderState:
    """State of a decompressor between two bytes, as in `millrace.schemas.dataset.SeekPoint`.

    Attributes:
        position: Offset of the next byte in the compressed file.
        bit: First bit of this byte, from 0 to 7.
        cursor: Cursor of the first decompressed byte that follows.
        offset: Number of decompressed bytes before, in the whole file.
        window: Last decompressed bytes before; empty at the beginning of a member or a frame.
        checksum: CRC-32 of the member's decompressed bytes before.
        member_bytes: Number of the member's decompressed bytes before.
    """

    position: int = 0
    bit: int = 0
    cursor: int = 0
    offset: int = 0
    window: bytes = b""
    checksum: int = 0
    member_bytes: int = 0


class FileDecompressor(Protocol):
    """Decompressor of one file, which the caller reads in steps."""

    def decode(self, position: int, data: bytes) -> Iterator[bytes]:
        """Yield the decompressed bytes of the next step, in parts of at most 4 MiB.

        The bytes depend on the step and on all steps before, and not on the caller.

        Args:
            position: Offset of the step in the compressed file.
            data: Compressed bytes of the step.

        Raises:
            DamageError: The file is damaged.
        """
        ...

    def take_state(self) -> DecoderState | None:
        """Return a state to store, if one was found since the last call; else None."""
        ...

    def finish(self) -> None:
        """Check the end of the file.

        Raises:
            DamageError: The file ends too early.
        """
        ...
