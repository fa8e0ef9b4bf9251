"""Load the batches of a worker's windows, which anyone can load again.

The batches are a function of the dataset, the run, the number of the worker and the window. So a
worker that is started again goes on with the right samples without a state, and a validator loads
what a worker has trained on.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from millrace import errors
from millrace.datasets.loader import ShardLoader
from millrace.datasets.loader.disk_cache import DiskCache
from millrace.datasets.loader.mirrored_files import FileLocations
from millrace.datasets.loader.readers.base import LoadedSample
from millrace.digest import compute_digest, make_hasher

Batch = list[LoadedSample]

_STREAMS = 16  # of all workers together, at least one of each


class WindowBatches:
    """Batches of a window, in an iteration that can be made once.

    Args:
        batches: The batches.
    """

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._hasher = make_hasher()

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the batches."""
        for batch in self._batches:
            for sample in batch:
                for name in sorted(sample):
                    self._hasher.update(_encode_value(name, sample[name]))
            yield batch

    @property
    def digest(self) -> str:
        """Digest of the samples that were received, for `Participant.submit`."""
        return self._hasher.compute()


class WindowLoader:
    """Loads the batches of the windows of one worker.

    In an epoch of the dataset, each worker has samples of its own, and whole batches. Epochs of the
    dataset follow each other, and windows go on where the last one ended.

    Args:
        source: Store of the dataset, or several.
        dataset: Name of the dataset.
        run: Name of the run, from which the order of the samples follows.
        number: Number of the worker.
        workers: Number of workers.
        batch_size: Samples of a batch.
        steps: Batches of a window.
        split: Split of the dataset.
        decode: Whether fields are decoded, as in `ShardLoader`. A validator decodes them, too, if
            the worker does.
        cache: Cache of whole shards on the disk of the node, or its folder.
        warmed: Folders with files of the dataset below their keys.

    Raises:
        ConfigurationError: The split has fewer samples than a batch for each worker.

    Example:
        loader = WindowLoader(
            "s3://bucket", "my-dataset", run="run", number=2, workers=8, batch_size=32, steps=50
        )
        batches = loader.load(window=7)
        for batch in batches:
            ...
        assert batches.digest == link.taken["worker-2"].samples
    """

    def __init__(
        self,
        source: FileLocations,
        dataset: str,
        *,
        run: str,
        number: int,
        workers: int,
        batch_size: int,
        steps: int,
        split: str = "train",
        decode: bool = True,
        cache: DiskCache | Path | None = None,
        warmed: Sequence[Path] = (),
    ) -> None:
        self._loader = ShardLoader(
            source,
            dataset,
            split=split,
            decode=decode,
            seed=int(compute_digest(run.encode())[-8:], 16),
            rank=number,
            world_size=workers,
            batch_size=batch_size,
            streams=workers * max(1, _STREAMS // workers),
            cache=cache,
            warmed=warmed,
        )
        self._batch_size, self._steps = batch_size, steps
        self._epoch_batches = self._loader.rank_samples // batch_size
        if not self._epoch_batches:
            raise errors.ConfigurationError(
                f"The split {split!r} of {dataset} has {self._loader.samples} samples, fewer than "
                f"a batch of {batch_size} for each of {workers} workers. Use smaller batches."
            )

    def load(self, window: int) -> WindowBatches:
        """Return the batches of a window. They are read while the result is iterated over.

        Args:
            window: Number of the window of the run, from 1 on.
        """
        return WindowBatches(self._iterate(window))

    def _iterate(self, window: int) -> Iterator[Batch]:
        first, left = (window - 1) * self._steps, self._steps
        while left:
            epoch, batch = divmod(first, self._epoch_batches)
            count = min(left, self._epoch_batches - batch)
            self._loader.seek(epoch, batch * self._batch_size)
            yield from islice(self._loader, count)
            first, left = first + count, left - count


def _encode_value(name: str, value: object) -> bytes:
    """Return bytes that only equal values have."""
    if isinstance(value, np.ndarray):
        array = cast("npt.NDArray[Any]", value)
        head, body = f"{array.dtype.str} {array.shape}", array.tobytes()
    elif isinstance(value, bytes):
        head, body = "bytes", value
    elif isinstance(value, str):
        head, body = "str", value.encode()
    else:
        head, body = "json", json.dumps(value, sort_keys=True).encode()
    return f"{len(name.encode())} {name} {head} {len(body)} ".encode() + body
