"""Shards of several formats that are encoded side by side."""

from bisect import bisect_right
from collections.abc import Sequence

from millrace.datasets.formats import BatchEncoder, FieldType, open_format
from millrace.datasets.sample import RowBatch, Sample
from millrace.schemas.dataset import ShardLayout


class ShardSet:
    """One shard of each format of a layout. All have the same samples.

    Args:
        layout: Layout of the shards.

    Attributes:
        samples: Number of samples in each shard.
        size: Bytes of the largest shard if it were closed now.
        takes_batches: Whether `add_batch` can be called, since each format has it.
    """

    def __init__(self, layout: ShardLayout) -> None:
        fields = {name: FieldType(one) for name, one in layout.fields.items()}
        self.formats = tuple(map(open_format, layout.formats))
        self._encoders = [one.make_encoder(fields, layout.shard_bytes) for one in self.formats]
        # Of every sample, these are called once. So they are looked up only here.
        self._prepare = [encoder.prepare for encoder in self._encoders]
        self._append = [encoder.append for encoder in self._encoders]
        self._batch_encoders = [one for one in self._encoders if isinstance(one, BatchEncoder)]
        self.takes_batches = len(self._batch_encoders) == len(self._encoders)
        self._empty_size = max(encoder.size for encoder in self._encoders)
        self.samples, self.size = 0, self._empty_size

    def add(self, sample: Sample, limit: int) -> bool:
        """Append a sample to each shard, unless one would then be larger than the limit.

        Empty shards take a sample of any size.

        Returns:
            Whether the sample was added.

        Raises:
            BadSampleError: A format cannot hold the sample. No shard has it.
        """
        largest = 0
        for prepare in self._prepare:
            size = prepare(sample)
            largest = max(largest, size)
        if largest > limit and self.samples:
            return False
        for append in self._append:
            append()
        self.samples += 1
        self.size = largest
        return True

    def check(self, sample: Sample) -> None:
        """Check that each format can hold a sample. Nothing is appended.

        Raises:
            BadSampleError: A format cannot hold the sample.
        """
        for prepare in self._prepare:
            prepare(sample)

    def add_batch(self, batch: RowBatch, limit: int, max_samples: int) -> int:
        """Append the first samples of several, as `add` would, until a shard is full.

        Args:
            batch: The samples.
            limit: Largest size of a shard. Empty shards take a first sample of any size.
            max_samples: Largest number of samples in a shard.

        Returns:
            Number of samples that were added.

        Raises:
            BadSampleError: A format cannot hold one of the samples. No sample was added.
        """
        if len(batch) > max_samples - self.samples:
            batch = batch.slice(0, max_samples - self.samples)
        sizes = [one.prepare_batch(batch) for one in self._batch_encoders]
        count = min(bisect_right(one, limit) for one in sizes)
        if not self.samples:
            count = max(1, count)
        if count:
            for encoder in self._batch_encoders:
                encoder.append_batch(count)
            self.samples += count
            self.size = max(encoder.size for encoder in self._encoders)
        return count

    @property
    def sample_offsets(self) -> list[Sequence[tuple[int, int]]]:
        """Number and offset of some samples in the shard of each format."""
        return [encoder.sample_offsets for encoder in self._encoders]

    def close(self) -> list[memoryview]:
        """Finish the shards, and return their bytes. `reset` makes them invalid."""
        return [encoder.close() for encoder in self._encoders]

    def reset(self) -> None:
        """Begin the next shards, and free the memory of a large sample."""
        self.samples, self.size = 0, self._empty_size
        for encoder in self._encoders:
            encoder.reset()
