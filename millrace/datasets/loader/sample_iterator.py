"""Iterator of a loader, which tells the end of an epoch from an error."""

from collections.abc import Generator, Iterator
from itertools import chain
from typing import Any, Self

from millrace.datasets.loader.epoch_progress import EpochProgress
from millrace.errors import ConfigurationError


class SampleIterator(chain[Any]):
    """Samples or batches of one iteration.

    A generator has ended after an error, so a trainer or a ``DataLoader`` that asks once more would
    take that for the end of the epoch. No Python code runs between the generator and its caller.

    Args:
        samples: Generator of the samples.
        failure: Iterator that follows the generator.
    """

    _samples: Generator[Any]
    _failure: "IterationFailure"

    def __new__(cls, samples: Generator[Any], failure: "IterationFailure") -> Self:
        """Return the iterator of both."""
        iterator = super().__new__(cls, samples, failure)
        iterator._samples, iterator._failure = samples, failure
        return iterator

    def close(self) -> None:
        """End the iteration, and free its memory."""
        self._failure.is_closed = True
        self._samples.close()


class IterationFailure(Iterator[Any]):
    """Error at each further sample, if the generator did not reach the end of the epoch.

    Args:
        progress: Progress of the iteration.

    Attributes:
        is_closed: Whether the caller has ended the iteration.
    """

    def __init__(self, progress: EpochProgress) -> None:
        self._progress = progress
        self.is_closed = False

    def __iter__(self) -> Self:
        """Return the iterator."""
        return self

    def __next__(self) -> Any:
        """Raise an error.

        Raises:
            ConfigurationError: The generator ended with an error.
        """
        if self.is_closed or self._progress.is_ended:
            raise StopIteration
        raise ConfigurationError(
            "This iteration of the samples has failed before, and its epoch has not ended. Iterate "
            "over the loader again, or load a state."
        )
