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
    """

    def __init__(self, layout: ShardLayout) -> None:
        fields = {name: FieldType(one) for name, one in layout.fields.items()}
        self.formats = tuple(map(open_format, layout.formats))
        self._encoders = [one.make_encoder(fields, layout.shard_bytes) for one in self.formats]
        self.samples = 0

    @property
    def size(self) -> int:
        """Bytes of the largest shard if it were closed now."""
        return max(encoder.size for encoder in self._encoders)

    def add(self, sample: Sample, limit: int) -> bool:
        """Append a sample to each shard, unless one would then be larger than the limit.

        Empty shards take a sample of any size.

        Returns:
            Whether the sample was added.

        Raises:
            BadSampleError: A format cannot hold the sample. No shard has it.
        """
        sizes = [encoder.prepare(sample) for encoder in self._encoders]
        if self.samples and max(sizes) > limit:
            return False
        for encoder in self._encoders:
            encoder.append()
        self.samples += 1
        return True

    def close(self) -> list[memoryview]:
        """Finish the shards, and return their bytes. `reset` makes them invalid."""
        return [encoder.close() for encoder in self._encoders]

    def reset(self) -> None:
        """Begin the next shards, and free the memory of a large sample."""
        self.samples = 0
        for encoder in self._encoders:
            encoder.reset()
