"""Interface of a format, which encodes samples as the bytes of a shard."""

from typing import Protocol

from millrace.schemas.sample import Sample


class BadSampleError(Exception):
    """The format cannot hold this sample; the message is the reason for the quarantine."""


class ShardEncoder(Protocol):
    """One shard being encoded into a buffer of its own.

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
        """Finish the shard: return a view of the buffer, valid until the next `reset`."""
        ...

    def reset(self) -> None:
        """Begin the next shard in the same buffer; memory for a large sample is freed."""
        ...
