"""Transform that keeps the samples with a field of some size or text."""

from collections.abc import Sequence

import pyarrow

from millrace.datasets.formats.base import read_field
from millrace.datasets.sample import Row, Sample
from millrace.datasets.transforms.base import make_bad_row
from millrace.datasets.transforms.patterns import match_pattern
from millrace.datasets.transforms.settings import FilterSettings


class FilterTransform:
    """Transform that drops the samples that do not meet conditions.

    Args:
        settings: Conditions.
    """

    batch_rows = 256

    def __init__(self, settings: FilterSettings) -> None:
        self._settings = settings

    def apply(self, samples: Sequence[Sample]) -> list[list[Row]]:
        """Return each sample that meets all conditions. A sample without the field is bad."""
        field = self._settings.field
        kept: list[list[Row]] = [[] for _ in samples]
        sized: list[int] = []
        for index, sample in enumerate(samples):
            if field not in sample.fields:
                kept[index] = [make_bad_row(sample, f"no field {field!r} to filter by")]
            elif self._has_size(len(sample.fields[field])):
                sized.append(index)
        if self._settings.include is not None or self._settings.exclude is not None:
            sized = self._select_texts(samples, sized)
        for index in sized:
            kept[index] = [samples[index]]
        return kept

    def _has_size(self, size: int) -> bool:
        smallest, largest = self._settings.min_size, self._settings.max_size
        return (smallest is None or size >= smallest) and (largest is None or size <= largest)

    def _select_texts(self, samples: Sequence[Sample], indices: list[int]) -> list[int]:
        field, include, exclude = (
            self._settings.field, self._settings.include, self._settings.exclude,
        )  # fmt: skip
        texts = pyarrow.array(
            [read_field(samples[i].fields[field]).decode(errors="replace") for i in indices],
            pyarrow.large_string(),
        )
        for pattern, wanted in ((include, True), (exclude, False)):
            if pattern is not None:
                found = match_pattern(texts, pattern)
                texts = texts.filter(
                    pyarrow.array([match is wanted for match in found], pyarrow.bool_())
                )
                indices = [i for i, match in zip(indices, found, strict=True) if match is wanted]
        return indices
