"""Interface of a format. A format encodes samples as the bytes of a shard."""

from typing import Protocol

from millrace.datasets.sample import Sample


class BadSampleError(Exception):
    """The format cannot hold a sample. The message is the reason for the quarantine."""


class ShardEncoder(Protocol):
    """Encoder of one shard at a time, into a buffer of its own.

    Attributes:
        samples: Number of samples in the shard.
        size: Bytes of the shard if it were closed now.
    """

    samples: int

    @property
    def size(self) -> int:
        """Bytes of the shard so far."""
        ...

    def add(self, sample: Sample, limit: int) -> bool:
        """Append a sample, unless the shard would then be larger than the limit.

        An empty shard takes a sample of any size.

        Returns:
            Whether the sample was added.

        Raises:
            BadSampleError: The format cannot hold the sample.
        """
        ...

    def close(self) -> memoryview:
        """Finish the shard, and return a view of the buffer. `reset` makes the view invalid."""
        ...

    def reset(self) -> None:
        """Begin the next shard in the same buffer, and free the memory of a large sample."""
        ...
