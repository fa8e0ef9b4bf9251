"""Order of the samples of an epoch: a function of the dataset and few integers, and not a list.

1. The shards are permuted, and their samples stand one after another in this order.
2. The samples are cut into equally long streams. One stream may have one sample more than another.
3. A stream is cut into windows, and the samples of each window are shuffled. The first windows are
   shorter, so that an epoch begins after a sixteenth of a window was read.
4. The streams are read in turn: sample ``i`` of stream ``s`` has the position ``i * streams + s``.

So neighbours in the order come from as many shards as there are streams, and a sample moves by up
to ``window * streams`` positions. Each stream reads its shards from their beginning to their end,
and holds one window. The order does not depend on the processes that read: each takes whole
streams.

Memory: 24 bytes for each shard, and none for a sample.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from millrace.datasets.loader.permutation import Permutation, mix_numbers
from millrace.errors import ConfigurationError

Numbers = npt.NDArray[np.int64]

_PERSON = b"millrace windows"
_STEP = np.uint64(0x9E3779B97F4A7C15)  # of SplitMix64
_RAMP = 4  # doublings from 1/16 of a window on: the first have 1/16, 1/16, 1/8, 1/4 and 1/2 of it


class SampleRange(NamedTuple):
    """Consecutive samples of one shard.

    Attributes:
        shard: Number of the shard in the order of the manifest.
        start: First sample in the shard.
        end: Sample after the last one.
    """

    shard: int
    start: int
    end: int


class EpochOrder:
    """Order of the samples of one epoch.

    Args:
        samples: Number of samples of each shard.
        seed: Seed of the order.
        epoch: Number of the epoch.
        streams: Number of streams.
        shuffle_window: Samples of a stream that are shuffled among themselves.
        shuffle: Whether shards and windows are shuffled. If not, each stream has its samples in the
            order of the dataset.

    Attributes:
        total: Number of samples of the epoch.
        lengths: Number of samples of each stream.

    Raises:
        ConfigurationError: There are no samples, or a number is not positive.
    """

    def __init__(
        self,
        samples: Sequence[int] | Numbers,
        *,
        seed: int,
        epoch: int,
        streams: int,
        shuffle_window: int,
        shuffle: bool,
    ) -> None:
        counts = np.asarray(samples, np.int64)
        self.total = int(counts.sum())
        if not self.total:
            raise ConfigurationError("The split has no samples, so there is nothing to load.")
        if streams < 1 or shuffle_window < 1:
            raise ConfigurationError("`streams` and `shuffle_window` are at least 1. Correct them.")
        self._shards = np.arange(len(counts))
        if shuffle:
            permuted = Permutation(len(counts), seed, epoch).permute(self._shards)
            self._shards = permuted.astype(np.int64)
        self._ends = np.cumsum(counts[self._shards])
        self._starts = self._ends - counts[self._shards]
        self._window, self._shuffle = shuffle_window, shuffle
        self._ramp = _RAMP if shuffle_window >> _RAMP else 0
        self._short, self._longer = divmod(self.total, streams)
        numbers = np.arange(streams)
        self.lengths: Numbers = self._short + (numbers < self._longer)
        digest = blake2b(f"{seed} {epoch}".encode(), digest_size=8, person=_PERSON).digest()
        self._key = np.frombuffer(digest, "<u8").astype(np.uint64)[0]

    def count_windows(self, stream: int) -> int:
        """Return the number of windows of a stream."""
        length = int(self.lengths[stream])
        return self.find_window(length - 1)[0] + 1 if length else 0

    def find_window(self, row: int) -> tuple[int, int]:
        """Return the window of a row of a stream, and the number of the row within the window."""
        window = row // self._window + self._ramp
        while row < self._find_start(window):
            window -= 1
        return window, row - self._find_start(window)

    def list_ranges(self, stream: int, window: int) -> list[SampleRange]:
        """Return the samples of a window, before they are shuffled.

        Args:
            stream: Number of the stream.
            window: Number of the window within the stream.
        """
        first = self._find_first(stream)
        at = first + self._find_start(window)
        end = min(first + int(self.lengths[stream]), first + self._find_start(window + 1))
        ranges: list[SampleRange] = []
        number = int(np.searchsorted(self._ends, at, "right"))
        while at < end:
            start, stop = int(self._starts[number]), int(self._ends[number])
            if at < stop:
                until = min(end, stop)
                ranges.append(SampleRange(int(self._shards[number]), at - start, until - start))
                at = until
            number += 1
        return ranges

    def find_next_shard(self, stream: int, window: int) -> int | None:
        """Return the shard that the stream reads after those of a window; None at its end."""
        first = self._find_first(stream)
        last = first + int(self.lengths[stream])
        end = min(last, first + self._find_start(window + 1))
        number = int(np.searchsorted(self._ends, end - 1, "right"))
        following = int(np.searchsorted(self._ends, int(self._ends[number]), "right"))
        if following == len(self._ends) or int(self._ends[number]) >= last:
            return None
        return int(self._shards[following])

    def permute_window(self, stream: int, window: int) -> list[int]:
        """Return the order of the samples of a window, as indexes into its ranges."""
        start = self._find_start(window)
        count = min(self._find_start(window + 1), int(self.lengths[stream])) - start
        if not self._shuffle:
            return list(range(count))
        positions = np.arange(count, dtype=np.uint64) + np.uint64(self._find_first(stream) + start)
        # Each position has its own hash, so that no two samples are equal in the sort.
        return np.argsort(mix_numbers(positions * _STEP + self._key)).tolist()

    def _find_start(self, window: int) -> int:
        """Return the first row of a window within its stream."""
        if window > self._ramp:
            return (window - self._ramp) * self._window
        return self._window >> (self._ramp + 1 - window) if window else 0

    def _find_first(self, stream: int) -> int:
        """Return the position of a stream's first sample among all samples of the shards."""
        return stream * self._short + min(stream, self._longer)
