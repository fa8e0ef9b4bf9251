"""Decompress gzip files (RFC 1952) from any block of deflate (RFC 1951) on.

Python's zlib does not tell where a block begins, and does not start within a byte. So a block is
looked for by its header, at each bit of some compressed bytes. To check what looks like a header, a
copy of the decompressor is given the bits before, and then a last block of random bytes, which it
reads only if no other block is open at that bit. So a seek point is never wrong, whatever the file
is. To start within a byte, empty blocks are written before the block, so that the block begins at
the right bit.
"""

import secrets
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from millrace.datasets.sources.decoder import MAX_OUTPUT, DamageError, DecoderState
from millrace.schemas.dataset import CompressedRange

_WINDOW = 32 << 10  # bytes before a block that the block may repeat
_MAX_HEADER = 1 << 20  # bytes of the header of a member, which has texts of any length
_MAX_SEARCHED = 512 << 10  # compressed bytes in which a block is looked for
_MAX_TRIED = 4096  # headers that are tried in these bytes
_RANDOM_BYTES = 32  # of the block that shows where another ends
_MAX_BYTE_OUTPUT = 4 << 10  # a byte and a code before it give at most 5 repeats, of 258 bytes
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
_LAST_STORED = (1, 3)  # header of the last block, which is stored
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
        self._search: _BlockSearch | None = None
        self._found: DecoderState | None = None

    def decode(self, position: int, data: bytes) -> Iterator[bytes]:
        """Yield the decompressed bytes of the next step, in parts of at most 4 MiB.

        Raises:
            DamageError: The file is damaged.
        """
        end, step = position + len(data), data
        if self._bit:
            data, self._bit = _align(self._bit, data), 0
        inflater: Any = None
        if self._inflater is not None:
            if self._search is None and position - self._last_found >= self._interval:
                self._search = _BlockSearch(self._output, self._checksum, self._member_bytes)
            inflater = self._inflater.copy() if self._search is not None else None
        while data:
            if self._in_trailer:
                data = self._read_trailer(data)
            elif self._inflater is None:
                data = self._read_header(end, data)
            else:
                yield from self._inflate(data)
                data = self._inflater.unused_data
                if self._inflater.eof:
                    self._inflater, self._in_trailer, self._search = None, True, None
        if self._search is not None:
            self._found = self._search.search_step(inflater, position, step)
            if self._found is not None or self._search.is_over:
                self._search, self._last_found = None, position
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


class _BlockSearch:
    """Search for a block of deflate in consecutive steps within a member.

    Args:
        offset: Number of decompressed bytes before, in the whole file.
        checksum: CRC-32 of the member's decompressed bytes before.
        member_bytes: Number of the member's decompressed bytes before.
    """

    def __init__(self, offset: int, checksum: int, member_bytes: int) -> None:
        self._offset, self._checksum, self._member_bytes = offset, checksum, member_bytes
        self._window = b""
        self._searched = self._tried = 0

    @property
    def is_over(self) -> bool:
        """True if no more steps should be searched."""
        return self._searched >= _MAX_SEARCHED or self._tried >= _MAX_TRIED

    def search_step(self, inflater: Any, position: int, data: bytes) -> DecoderState | None:
        """Return the state at the first block that is found in a step; None if none is found.

        The step is decompressed once more.

        Args:
            inflater: Decompressor of the member before the step.
            position: Offset of the step in the compressed file.
            data: Compressed bytes of the step, which does not end the member.
        """
        self._searched += len(data)
        begin, at = self._offset, 0
        for bit in _find_headers(data):
            if self.is_over:
                break
            self._tried += 1
            self._inflate(inflater, data[at : bit // 8])
            at = bit // 8
            rest = _inflate_to(inflater, data[at], bit % 8)
            if rest is None or len(window := (self._window + rest)[-_WINDOW:]) < _WINDOW:
                continue
            return DecoderState(
                position=position + at,
                bit=bit % 8,
                cursor=CompressedRange.make_cursor(position, self._offset + len(rest) - begin),
                offset=self._offset + len(rest),
                window=window,
                checksum=zlib.crc32(rest, self._checksum),
                member_bytes=self._member_bytes + len(rest),
            )
        self._inflate(inflater, data[at:])
        return None

    def _inflate(self, inflater: Any, data: bytes) -> None:
        is_full = False
        while data or is_full:
            found = inflater.decompress(data, MAX_OUTPUT)
            data, is_full = inflater.unconsumed_tail, len(found) == MAX_OUTPUT
            self._offset += len(found)
            self._checksum = zlib.crc32(found, self._checksum)
            self._member_bytes += len(found)
            self._window = (self._window + found[-_WINDOW:])[-_WINDOW:]


def _inflate_to(inflater: Any, byte: int, bit: int) -> bytes | None:
    """Return what follows up to a bit of the next byte; None if no block begins at the bit.

    The bits before are followed by a last block, which is stored, with random bytes; and then, for
    a second time, by an empty block and such a block. Only if no block is open, both end, and give
    the random bytes and the same bytes before them. An open stored block would give the headers,
    which differ. The codes of another block would have to be equal to the random bytes.
    """
    found = [
        _inflate_proof(inflater, _join_fields((byte & (1 << bit) - 1, bit), *fields))
        for fields in ((_LAST_STORED,), (_FIXED, _LAST_STORED))
    ]
    return found[0] if found[0] == found[1] else None


def _inflate_proof(inflater: Any, begin: tuple[int, int]) -> bytes | None:
    """Return what is before the random bytes of a stored block, whose header ends some bits."""
    proof = secrets.token_bytes(_RANDOM_BYTES)
    sizes = (_RANDOM_BYTES | (0xFFFF - _RANDOM_BYTES) << 16).to_bytes(4, "little")
    block = begin[0].to_bytes((begin[1] + 7) // 8, "little") + sizes + proof
    inflater = inflater.copy()
    try:
        found = inflater.decompress(block, _MAX_BYTE_OUTPUT + _RANDOM_BYTES)
    except zlib.error:
        return None
    is_proven = inflater.eof and not inflater.unused_data and found.endswith(proof)
    return found[:-_RANDOM_BYTES] if is_proven else None


def _align(bit: int, data: bytes) -> bytes:
    """Replace the first bits of data by empty blocks, so that they end before a bit."""
    odd = bit % 2
    value, bits = _join_fields(*[_DYNAMIC] * odd, *[_FIXED] * ((bit - 3 * odd) // 2 % 4))
    value |= data[0] >> bit << bits
    return value.to_bytes((bits + 8 - bit) // 8, "little") + data[1:]


def _find_headers(data: bytes) -> list[int]:
    """Return the first bits of what looks like the header of a block with dynamic codes."""
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").astype(np.int64)
    size = len(bits) - _MAX_HEADER_BITS
    if size <= 0:
        return []
    # Bits of the header: 0 (not the last), 0 and 1 (dynamic), and numbers of lengths of codes.
    at = np.flatnonzero((bits[:size] | bits[1 : size + 1] | (1 - bits[2 : size + 2])) == 0)
    at = at[(_read_fields(bits, at + 3, 5) <= 29) & (_read_fields(bits, at + 8, 5) <= 29)]
    count, used = _read_fields(bits, at + 13, 4) + 4, np.zeros(len(at), np.int64)
    for index in range(19):
        length = _read_fields(bits, at + 17 + 3 * index, 3)
        used += np.where((index < count) & (length > 0), 128 >> length, 0)
    return at[used == 128].tolist()  # 128: every code has a symbol


def _read_fields(bits: Any, at: Any, size: int) -> Any:
    """Return the values of fields of some bits, which begin at the given indices."""
    return sum(bits[at + i] << i for i in range(size))
