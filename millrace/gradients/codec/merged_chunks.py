"""Merged values of a tensor, chunk by chunk. Chunks have different numbers of values."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import numpy.typing as npt

from millrace.gradients.codec.chunks import Chunks


@dataclass(frozen=True, slots=True)
class MergedChunks:
    """Merged values of a group of equal chunks.

    Attributes:
        chunks: Group of equal chunks. Its ``k`` has no meaning here.
        counts: Number of values of each chunk: (count,), uint16.
        indices: Ascending indices of the values of each chunk, chunk by chunk: uint16.
        values: Values in the order of the indices: float32.
    """

    chunks: Chunks
    counts: npt.NDArray[np.uint16]
    indices: npt.NDArray[np.uint16] = field(repr=False)
    values: npt.NDArray[np.float32] = field(repr=False)

    def fill(self, out: npt.NDArray[np.float32]) -> None:
        """Fill a tensor's values in the order of its chunks, with zeros where none was merged."""
        part = out[self.chunks.first : self.chunks.first + self.chunks.values]
        part[:] = 0.0
        starts = np.repeat(np.arange(self.chunks.count) * self.chunks.size, self.counts)
        part[starts + self.indices] = self.values


def make_dense(
    groups: Sequence[MergedChunks],
    shape: tuple[int, ...],
    out: npt.NDArray[np.float32] | None = None,
) -> npt.NDArray[np.float32]:
    """Return the dense values of a merged tensor in the order of its chunks."""
    values = np.empty(prod(shape), np.float32) if out is None else out
    for group in groups:
        group.fill(values)
    return values
