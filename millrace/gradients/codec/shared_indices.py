"""Indices that all workers of a window send, derived from the window's number.

The indices themselves are not sent. Windows form cycles. For each cycle, a random order of all
indices of a chunk is drawn, and each window takes the next ``k``. So every index is sent once per
cycle, and with error feedback every value is sent at some time.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Mask:
    """Mask of a window, from which the indices of each chunk follow.

    Attributes:
        run: Name of the run.
        window: Number of the window.
    """

    run: str
    window: int

    def select_indices(self, size: int, k: int) -> Indices:
        """Return the ``k`` indices of every chunk of a size, in ascending order.

        The result is the same on every machine.
        """
        windows = -(-size // k)
        cycle, turn = divmod(self.window, windows)
        first = min(turn * k, size - k)
        return np.sort(_shuffle(self.run, cycle, size)[first : first + k])


@lru_cache(maxsize=64)
def _shuffle(run: str, cycle: int, size: int) -> Indices:
    seed = hashlib.sha256(f"{run}\0{cycle}\0{size}".encode()).digest()
    # Across versions of numpy, the bits of a generator are stable, but not the results of its
    # methods.
    drawn = np.random.Philox(key=int.from_bytes(seed[:16], "little")).random_raw(size)
    return np.argsort(drawn, kind="stable").astype(np.uint16)
