"""Decompress gzip files (RFC 1952) from any block of deflate (RFC 1951) on.

Python's zlib does not tell where a block begins, and does not start within a byte. So a block is
found by its header: each bit of some compressed bytes is tried. If what follows decompresses to the
bytes that are known already, a block begins there. To start within a byte, empty blocks are
written before the block, so that the block begins at the right bit.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from millrace.datasets.sources.decoder import MAX_OUTPUT, DamageError, DecoderState
from millrace.schemas.dataset import COMPRESSED_STEP, CompressedRange

_WINDOW = 32 << 10  # bytes before a block that the block may repeat
_MAX_HEADER = 1 << 20  # bytes of the header of a member, which has texts of any length
_MAX_RECORDED_INPUT = 512 << 10  # compressed bytes in which a block is looked for
_MAX_RECORDED_OUTPUT = 8 << 20
_MIN_COMPARED = 32 << 10  # decompressed bytes of a block that must be equal
_MAX_TRIED = 4096  # headers that are tried
_CHUNK = 32 << 10  # bytes in which headers are looked for at a time
_MAX_HEADER_BITS = 3 + 14 + 19 * 3  # of the header of a block, up to the lengths of its codes

_MAGIC = b"\x1f\x8b\x08"
_HEADER_CHECKSUM, _EXTRA, _NAME, _COMMENT, _RESERVED = 0x02, 0x04, 0x08, 0x10, 0xE0


def _join_fields(*fields: tuple[int, int]) -> tuple[int, int]:
    """Return the value and the number of bits of fields, given as value and bits, lowest first."""
    value = bits = 0
    for part, size in fields:
        value, bits = value | part << bits, bits + size
    return value, bits


_FIXED = (2, 10)  # empty block with fixed codes, of 10 bits
# Empty block with dynamic codes, of 91 bits, to move the next one by an odd number of bits.
_DYNAMIC = _join_fields(
    (0, 1), (2, 2), (0, 5), (1, 5), (14, 4),  # not the last, dynamic; 257, 2 and 18 lengths
    *((int(symbol in {1, 18}), 3)  # lengths of the codes 0 (for 1) and 1 (for 18)
      for symbol in (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1)),
    (1, 1), (127, 7), (1, 1), (107, 7),  # 138 and 118 literals without a code
    (0, 1), (0, 1), (0, 1),  # the end of the block and two distances have codes of one bit
    (0, 1),  # the end of the block
)  # fmt: skip


class GzipDecoder:
    """Decompressor of a gzip file of one or more members.

    Args:
        state: State from which the file is read.
        interval: Compressed bytes from one state to store to the next.
    """

    def __init__(self, state: DecoderState, interval: int) -> None:
        self._interval, self._last_found = interval, state.position
        self._output = state.offset
        self._step_output = state.offset - CompressedRange.get_count(state.cursor)
        self._checksum, self._member_bytes = state.checksum, state.member_bytes
        self._inflater: Any = None
        if state.window:
            self._inflater = zlib.decompressobj(-zlib.MAX_WBITS, zdict=state.window)
        self._bit = state.bit
        self._header, self._trailer = bytearray(), bytearray()
        self._is_first_member = state.position == 0
        self._in_trailer = False
        self._recording: _Recording | None = None
        self._found: DecoderState | None = None

    def decode(self, position: int, data: bytes) -> Iterator[bytes]:
        """Yield the decompressed bytes of the next step, in parts of at most 4 MiB.

        Raises:
            DamageError: The file is damaged.
        """
        end, step = position + len(data), data
        if self._bit:
            data, self._bit = _align(self._bit, data), 0
        is_due = position - self._last_found >= self._interval
        if is_due and self._inflater is not None and self._recording is None:
            self._recording = _Recording(position, self._output, self._checksum, self._member_bytes)
        if self._recording is not None:
            self._recording.begin_step(step)
        while data:
            if self._in_trailer:
                data = self._read_trailer(data)
            elif self._inflater is None:
                data = self._read_header(end, data)
            else:
                yield from self._inflate(data)
                data = self._inflater.unused_data
                if self._inflater.eof:
                    self._inflater, self._in_trailer, self._recording = None, True, None
        if self._recording is not None and self._recording.is_full:
            self._found = self._recording.find_state()
            self._recording, self._last_found = None, position
        self._step_output = self._output

    def take_state(self) -> DecoderState | None:
        """Return a state to store, if one was found since the last call; else None."""
        found, self._found = self._found, None
        return found

    def finish(self) -> None:
        """Check the end of the file.

        Raises:
            DamageError: The file ends within a member.
        """
        if self._header or self._in_trailer or self._inflater is not None:
            raise DamageError("it ends too early")

    def _inflate(self, data: bytes) -> Iterator[bytes]:
        """Yield the bytes of a member until the data or the member ends."""
        is_full = False
        while (data or is_full) and not self._inflater.eof:
            try:
                found = self._inflater.decompress(data, MAX_OUTPUT)
            except zlib.error as error:
                raise DamageError(str(error)) from None
            data, is_full = self._inflater.unconsumed_tail, len(found) == MAX_OUTPUT
            self._checksum = zlib.crc32(found, self._checksum)
            self._member_bytes += len(found)
            self._output += len(found)
            if self._recording is not None:
                self._recording.add(found)
            if found:
                yield found

    def _read_trailer(self, data: bytes) -> bytes:
        """Read the end of a member; return the bytes after it."""
        missing = 8 - len(self._trailer)
        self._trailer += data[:missing]
        if len(self._trailer) == 8:
            checksum, size = (int.from_bytes(self._trailer[i : i + 4], "little") for i in (0, 4))
            if checksum != self._checksum or size != self._member_bytes & 0xFFFFFFFF:
                raise DamageError("its content does not have the checksum in it")
            self._trailer.clear()
            self._in_trailer = self._is_first_member = False
            self._checksum = self._member_bytes = 0
        return data[missing:]

    def _read_header(self, end: int, data: bytes) -> bytes:
        """Read the header of a member, or zeros before it; return the bytes after it."""
        if not self._header:
            if not self._is_first_member:
                data = data.lstrip(b"\0")
            position = end - len(data)
            if data and position - self._last_found >= self._interval:
                cursor = CompressedRange.make_cursor(position, self._output - self._step_output)
                self._found = DecoderState(position, 0, cursor, self._output)
                self._last_found = position
        self._header += data
        size = _measure_header(self._header)
        if size is None:
            return b""
        rest = bytes(self._header[size:])
        self._header.clear()
        self._inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        return rest


def _measure_header(header: bytearray) -> int | None:
    """Return the bytes of a member's header; None if it goes on."""
    if not _MAGIC.startswith(header[:3]):
        raise DamageError("it has bytes that are not gzip")
    if len(header) > _MAX_HEADER:
        raise DamageError("the header of a member has no end")
    if len(header) < 10:
        return None
    flags, size = header[3], 10
    if flags & _RESERVED:
        raise DamageError("a member has unknown flags")
    if flags & _EXTRA:
        size += 2 + int.from_bytes(header[size : size + 2], "little")
    for flag in (_NAME, _COMMENT):
        if flags & flag:
            size = header.find(b"\0", size) + 1
            if not size:
                return None
    size += 2 * bool(flags & _HEADER_CHECKSUM)
    return size if len(header) >= max(size, 12) else None


@dataclass(slots=True)
class _Recording:
    """Compressed and decompressed bytes of some steps within a member.

    Attributes:
        position: Offset of the first compressed byte.
        offset: Number of decompressed bytes before.
        checksum: CRC-32 of the member's decompressed bytes before.
        member_bytes: Number of the member's decompressed bytes before.
    """

    position: int
    offset: int
    checksum: int
    member_bytes: int
    _input: bytearray = field(default_factory=bytearray)
    _output: bytearray = field(default_factory=bytearray)
    _step_outputs: list[int] = field(default_factory=list[int])

    def begin_step(self, data: bytes) -> None:
        """Add the compressed bytes of a step."""
        self._step_outputs.append(len(self._output))
        self._input += data

    def add(self, output: bytes) -> None:
        """Add decompressed bytes of the step."""
        self._output += output

    @property
    def is_full(self) -> bool:
        """Whether no more steps should be added."""
        return len(self._input) >= _MAX_RECORDED_INPUT or len(self._output) >= _MAX_RECORDED_OUTPUT

    def find_state(self) -> DecoderState | None:
        """Return the state at the first block that is found; None if none is found."""
        output = bytes(self._output)
        found = _find_block(bytes(self._input), output)
        if found is None:
            return None
        bit, size = found
        step = bit // 8 // COMPRESSED_STEP
        position = self.position + bit // 8
        return DecoderState(
            position=position,
            bit=bit % 8,
            cursor=CompressedRange.make_cursor(position, size - self._step_outputs[step]),
            offset=self.offset + size,
            window=output[size - _WINDOW : size],
            checksum=zlib.crc32(output[:size], self.checksum),
            member_bytes=self.member_bytes + size,
        )


def _find_block(data: bytes, output: bytes) -> tuple[int, int] | None:
    """Return the first bit of a block of deflate, and the size of the output before it."""
    for tried, bit in enumerate(_iterate_headers(data)):
        if tried == _MAX_TRIED:
            break
        # The window is not known yet, but the size of the output does not depend on it.
        after = _inflate_from(data, bit, bytes(_WINDOW), len(output))
        if after is None or not _WINDOW <= len(output) - len(after) <= len(output) - _MIN_COMPARED:
            continue
        size = len(output) - len(after)
        if _inflate_from(data, bit, output[size - _WINDOW : size], len(output)) == output[size:]:
            return bit, size
    return None


def _inflate_from(data: bytes, bit: int, window: bytes, max_size: int) -> bytes | None:
    """Return what follows from a bit on; None if that is no deflate, ends, or is too large."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS, zdict=window)
    try:
        found = inflater.decompress(_align(bit % 8, data[bit // 8 :]), max_size + 1)
    except zlib.error:
        return None
    return None if inflater.eof or len(found) > max_size else found


def _align(bit: int, data: bytes) -> bytes:
    """Replace the first bits of data by empty blocks, so that they end before a bit."""
    odd = bit % 2
    value, bits = _join_fields(*[_DYNAMIC] * odd, *[_FIXED] * ((bit - 3 * odd) // 2 % 4))
    value |= data[0] >> bit << bits
    return value.to_bytes((bits + 8 - bit) // 8, "little") + data[1:]


def _iterate_headers(data: bytes) -> Iterator[int]:
    """Yield the first bits of what looks like the header of a block with dynamic codes."""
    for start in range(0, len(data), _CHUNK):
        chunk = np.frombuffer(data[start : start + _CHUNK + _MAX_HEADER_BITS // 8 + 1], np.uint8)
        bits = np.unpackbits(chunk, bitorder="little").astype(np.int64)
        size = min(8 * _CHUNK, len(bits) - _MAX_HEADER_BITS)
        if size <= 0:
            return
        # Bits of the header: 0 (not the last), 0 and 1 (dynamic), and numbers of lengths of codes.
        at = np.flatnonzero((bits[:size] | bits[1 : size + 1] | (1 - bits[2 : size + 2])) == 0)
        at = at[(_read_fields(bits, at + 3, 5) <= 29) & (_read_fields(bits, at + 8, 5) <= 29)]
        count, used = _read_fields(bits, at + 13, 4) + 4, np.zeros(len(at), np.int64)
        for index in range(19):
            length = _read_fields(bits, at + 17 + 3 * index, 3)
            used += np.where((index < count) & (length > 0), 128 >> length, 0)
        yield from (8 * start + at[used == 128]).tolist()  # 128: every code has a symbol


def _read_fields(bits: Any, at: Any, size: int) -> Any:
    """Return the values of fields of some bits, which begin at the given indices."""
    return sum(bits[at + i] << i for i in range(size))
