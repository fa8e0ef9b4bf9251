"""Decompress zstd files (RFC 8878) from any frame on.

A frame is decompressed block by block: a block of 4 bytes may become 128 KiB. The state within a
frame cannot be stored, since the library does not give it.
"""

from collections.abc import Iterator
from typing import Any

import zstandard

from millrace.datasets.sources.decoder import DamageError, DecoderState
from millrace.schemas.dataset import CompressedRange

_MAX_WINDOW = 128 << 20  # bytes that a frame may need; `zstd` without options has the same limit
_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPED_MAGICS = {bytes((low, 0x2A, 0x4D, 0x18)) for low in range(0x50, 0x60)}
_RLE, _RESERVED = 1, 3  # types of blocks
_MAX_BLOCK = 128 << 10


class ZstdDecoder:
    """Decompressor of a zstd file of one or more frames.

    Args:
        state: State from which the file is read.
        interval: Compressed bytes from one state to store to the next.
    """

    def __init__(self, state: DecoderState, interval: int) -> None:
        self._interval, self._last_found = interval, state.position
        self._output = state.offset
        self._step_output = state.offset - CompressedRange.get_count(state.cursor)
        self._held = bytearray()
        self._skipped = 0  # bytes that remain of a frame without content
        self._frame: Any = None
        self._has_checksum = self._in_checksum = self._is_frame_end = False
        self._found: DecoderState | None = None

    def decode(self, position: int, data: bytes) -> Iterator[bytes]:
        """Yield the decompressed bytes of the next step, block by block.

        Raises:
            DamageError: The file is damaged.
        """
        self._held += data
        while (unit := self._take_unit(position + len(data))) is not None:
            if not unit:
                continue
            try:
                found = self._frame.decompress(unit)
            except zstandard.ZstdError as error:
                raise DamageError(str(error)) from None
            if self._is_frame_end:
                if not self._frame.eof:
                    raise DamageError("a frame does not end where its blocks end")
                self._frame, self._is_frame_end = None, False
            self._output += len(found)
            if found:
                yield found
        self._step_output = self._output

    def take_state(self) -> DecoderState | None:
        """Return a state to store, if one was found since the last call; else None."""
        found, self._found = self._found, None
        return found

    def finish(self) -> None:
        """Check the end of the file.

        Raises:
            DamageError: The file ends within a frame.
        """
        if self._held or self._skipped or self._frame is not None:
            raise DamageError("it ends too early")

    def _take_unit(self, end: int) -> bytes | None:
        """Return the next header, block or checksum; None if it is incomplete.

        Without content, a unit is empty.
        """
        held = self._held
        if self._skipped:
            skipped = min(self._skipped, len(held))
            self._skipped -= skipped
            del held[:skipped]
            return None if self._skipped else b""
        if self._frame is None:
            return self._take_header(end) if held else None
        size = 4
        if not self._in_checksum:
            if len(held) < 3:
                return None
            block = int.from_bytes(held[:3], "little")
            is_last, kind, size = block & 1, block >> 1 & 3, block >> 3
            if kind == _RESERVED or size > _MAX_BLOCK:
                raise DamageError("it has a block of no known type")
            size = 3 + (1 if kind == _RLE else size)
            if len(held) < size:
                return None
            self._in_checksum = bool(is_last and self._has_checksum)
            self._is_frame_end = bool(is_last and not self._has_checksum)
        elif len(held) >= size:
            self._in_checksum, self._is_frame_end = False, True
        else:
            return None
        return self._take(size)

    def _take_header(self, end: int) -> bytes | None:
        held, position = self._held, end - len(self._held)
        if position - self._last_found >= self._interval:
            cursor = CompressedRange.make_cursor(position, self._output - self._step_output)
            self._found = DecoderState(position, 0, cursor, self._output)
            self._last_found = position
        if len(held) < 8:
            return None
        magic = bytes(held[:4])
        if magic in _SKIPPED_MAGICS:
            self._skipped = int.from_bytes(held[4:8], "little")
            del held[:8]
            return b""
        if magic != _MAGIC:
            raise DamageError("it has bytes that are not zstd")
        flags = held[4]
        is_single = flags >> 5 & 1
        size = 6 - is_single + (0, 1, 2, 4)[flags & 3] + (is_single, 2, 4, 8)[flags >> 6]
        if len(held) < size:
            return None
        self._has_checksum = bool(flags & 4)
        self._frame = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj()
        return self._take(size)

    def _take(self, size: int) -> bytes:
        unit = bytes(self._held[:size])
        del self._held[:size]
        return unit
