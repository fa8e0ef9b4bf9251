"""The places that all workers of a window send: drawn from its name, so that nobody need send them.

Windows take turns. In each cycle of them every place of a chunk is sent once: an order of all
places is drawn for the cycle, and each window takes the next ``k`` of it. So nothing is left out
for ever, and with error feedback nothing is lost, only late.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Mask:
    """The places of one window.

    Attributes:
        run: Which run's.
        window: Its number.
    """

    run: str
    window: int

    def select_indices(self, size: int, k: int) -> Places:
        """Return the ``k`` places of every chunk of a size, ascending.

        The same on every machine.
        """
        windows = -(-size // k)
        cycle, turn = divmod(self.window, windows)
        first = min(turn * k, size - k)
        return np.sort(_shuffle(self.run, cycle, size)[first : first + k])


@lru_cache(maxsize=64)
def _shuffle(run: str, cycle: int, size: int) -> Places:
    seed = hashlib.sha256(f"{run}\0{cycle}\0{size}".encode()).digest()
    # The bits of a generator never change from one version of numpy to the next; what its methods
    # make of them may.
    drawn = np.random.Philox(key=int.from_bytes(seed[:16], "little")).random_raw(size)
    return np.argsort(drawn, kind="stable").astype(np.uint16)
