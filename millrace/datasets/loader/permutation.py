"""Permute the numbers below a size by a seed, each number alone.

The order of an epoch is a function and not a list, so it takes no memory, whatever the size. It is
the same on every machine and with every version of Python and numpy.
"""

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

UnsignedNumbers = npt.NDArray[np.uint64]

_ROUNDS = 6
_PERSON = b"millrace order"


class Permutation:
    """A permutation of the numbers below a size.

    It is a Feistel network over the next larger power of four. A result that is not below the size
    is permuted again until it is, which also keeps the results distinct.

    Args:
        size: Number of numbers, at least 1 and below 2**62.
        seed: Any integer.
        epoch: Number of the order, so that epochs differ.
    """

    def __init__(self, size: int, seed: int, epoch: int = 0) -> None:
        if not 1 <= size < 1 << 62:
            raise ValueError("a permutation has between 1 and 2**62 - 1 numbers")
        self.size = size
        self._half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        text = f"{seed} {epoch} {size}".encode()
        digest = blake2b(text, digest_size=8 * _ROUNDS, person=_PERSON).digest()
        self._keys = np.frombuffer(digest, "<u8").astype(np.uint64)

    def permute(self, numbers: npt.ArrayLike) -> UnsignedNumbers:
        """Return the number at each position.

        Args:
            numbers: Positions, each below the size.

        Raises:
            IndexError: A position is not below the size.
        """
        found = np.atleast_1d(np.asarray(numbers, np.uint64))
        if found.size and int(found.max()) >= self.size:
            raise IndexError(f"a position is not below {self.size}")
        found = self._encrypt(found)
        while (outside := np.flatnonzero(found >= self.size)).size:
            found[outside] = self._encrypt(found[outside])
        return found

    def _encrypt(self, numbers: UnsignedNumbers) -> UnsignedNumbers:
        left, right = numbers >> self._half, numbers & self._mask
        for key in self._keys:
            left, right = right, left ^ (mix_numbers(right + key) & self._mask)
        return (left << self._half) | right


def mix_numbers(numbers: UnsignedNumbers) -> UnsignedNumbers:
    """Return a hash of each number: the last step of the generator SplitMix64.

    Different numbers have different hashes.
    """
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
