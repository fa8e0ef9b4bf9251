"""Shards of several formats that are encoded side by side."""

from millrace.datasets.formats import FieldType, open_format
from millrace.datasets.sample import Sample
from millrace.schemas.dataset import ShardLayout


class ShardSet:
    """One shard of each format of a layout. All have the same samples.

    Args:
        layout: Layout of the shards.

    Attributes:
        samples: Number of samples in each shard.
        size: Bytes of the largest shard if it were closed now.
    """

    def __init__(self, layout: ShardLayout) -> None:
        fields = {name: FieldType(one) for name, one in layout.fields.items()}
        self.formats = tuple(map(open_format, layout.formats))
        self._encoders = [one.make_encoder(fields, layout.shard_bytes) for one in self.formats]
        # Of every sample, these are called once. So they are looked up only here.
        self._prepare = [encoder.prepare for encoder in self._encoders]
        self._append = [encoder.append for encoder in self._encoders]
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

    def close(self) -> list[memoryview]:
        """Finish the shards, and return their bytes. `reset` makes them invalid."""
        return [encoder.close() for encoder in self._encoders]

    def reset(self) -> None:
        """Begin the next shards, and free the memory of a large sample."""
        self.samples, self.size = 0, self._empty_size
        for encoder in self._encoders:
            encoder.reset()
