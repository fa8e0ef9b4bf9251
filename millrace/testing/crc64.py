"""CRC-64/NVME, independent of the library that `millrace.storage` uses.

The CRC is linear: table lookups of the bytes of a state give the state after ``n`` more zero bytes.
NumPy therefore hashes many stretches of the data at once, and joins their states in pairs. This
takes 3 CPU seconds per GB. The processor must be little-endian.

Source: "NVM Express NVM Command Set Specification", 64b CRC; check value of ``123456789``:
``AE8B14860A799888``.
"""

import base64

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = 0x9A6C9329AC4BC9B5  # reflected
_ONES = (1 << 64) - 1
_STRETCH = 128  # bytes that are hashed word by word
_BLOCK = 1 << 18  # bytes that NumPy hashes at once
_FEW = 256  # largest number of bytes for which a loop in Python is faster
_Table = NDArray[np.uint64]


class Crc64:
    """Incremental computation of a CRC-64/NVME."""

    def __init__(self) -> None:
        """Start with no bytes."""
        self._state = _ONES
        self._held = bytearray()

    def update(self, data: bytes) -> None:
        """Add the next bytes. Hash each complete block, and buffer the rest."""
        self._held += data
        while len(self._held) >= _BLOCK:
            self._state = _hash(self._state, self._held[:_BLOCK])
            del self._held[:_BLOCK]

    def compute(self) -> int:
        """Return the CRC of all bytes so far."""
        return _hash(self._state, self._held) ^ _ONES

    def encode(self) -> str:
        """Return the CRC as a header value: base64, big-endian."""
        return base64.b64encode(self.compute().to_bytes(8, "big")).decode()


def _make_byte_table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [(state >> 1) ^ (_POLYNOMIAL if state & 1 else 0) for state in table]
    return table


_BYTES = _make_byte_table()


def _hash(state: int, data: bytes | bytearray) -> int:
    return (_hash_bytes if len(data) <= _FEW else _hash_stretches)(state, data)


def _hash_bytes(state: int, data: bytes | bytearray) -> int:
    for byte in data:
        state = (state >> 8) ^ _BYTES[(state ^ byte) & 0xFF]
    return state


def _hash_stretches(state: int, data: bytes | bytearray) -> int:
    """Hash at least 8 bytes. Leading zeros, the padding, do not change a state of zero."""
    stretches = 1 << (-(-len(data) // _STRETCH) - 1).bit_length()
    padded = np.zeros(stretches * _STRETCH, np.uint8)
    padded[-len(data) :] = np.frombuffer(data, np.uint8)
    padded[-len(data) :][:8] ^= np.frombuffer(state.to_bytes(8, "little"), np.uint8)
    words = padded.view(np.uint64).reshape(stretches, -1).T
    states = np.zeros(stretches, np.uint64)
    for column in np.ascontiguousarray(words):
        states = _advance(states ^ column)
    for shift in _SHIFTS[_STRETCH_SHIFT:]:
        if len(states) == 1:
            break
        states = _apply(shift, states[0::2]) ^ states[1::2]
    return int(states[0])


def _advance(states: _Table) -> _Table:
    """Return the states after 8 zero bytes. Most of the time is spent here."""
    pairs = np.ascontiguousarray(states.view(np.uint16).reshape(-1, 4).T).astype(np.intp)
    advanced = _PAIRS[0].take(pairs[0], mode="clip")
    for table, column in zip(_PAIRS[1:], pairs[1:], strict=True):
        advanced ^= table.take(column, mode="clip")
    return advanced


def _apply(shift: _Table, states: _Table) -> _Table:
    """Return the states after the number of zero bytes of a shift."""
    octets = np.ascontiguousarray(states).view(np.uint8).reshape(-1, 8)
    shifted = shift[0][octets[:, 0]]
    for table, column in zip(shift[1:], octets.T[1:], strict=True):
        shifted ^= table[column]
    return shifted


def _make_shifts() -> list[_Table]:
    """Return the shifts by 8, 16, 32 … zero bytes, tables of shape ``(8 bytes, 256 values)``."""
    first = np.empty((8, 256), np.uint64)
    for byte in range(8):
        first[byte] = [_hash_bytes(value << 8 * byte, bytes(8)) for value in range(256)]
    shifts = [first]
    while 8 << (len(shifts) - 1) < _BLOCK:
        last = shifts[-1]
        shifts.append(np.stack([_apply(last, table) for table in last]))
    return shifts


_SHIFTS = _make_shifts()
_STRETCH_SHIFT = (_STRETCH // 8).bit_length() - 1
_PAIRS = [
    (high[:, None] ^ low).reshape(-1) for low, high in zip(*[iter(_SHIFTS[0])] * 2, strict=True)
]  # shift by 8 zero bytes: four tables, one for each pair of bytes of a state
