"""Transform that renames fields."""

from collections.abc import Sequence

from millrace.datasets.field_names import BadFieldError, check_distinct
from millrace.datasets.sample import Row, Sample
from millrace.datasets.transforms.base import make_bad_row
from millrace.datasets.transforms.settings import RenameSettings


class RenameTransform:
    """Transform that renames fields. The bytes stay the same.

    Args:
        settings: New names of the fields.
    """

    batch_rows = 1

    def __init__(self, settings: RenameSettings) -> None:
        self._fields = settings.fields

    def apply(self, samples: Sequence[Sample]) -> list[list[Row]]:
        """Return each sample with its new names."""
        return [[self._rename(sample)] for sample in samples]

    def _rename(self, sample: Sample) -> Row:
        missing = [name for name in self._fields if name not in sample.fields]
        if missing:
            return make_bad_row(sample, f"no field {missing[0]!r} to rename")
        names = [self._fields.get(name, name) for name in sample.fields]
        fields = dict(zip(names, sample.fields.values(), strict=True))
        if len(fields) < len(names):
            return make_bad_row(sample, "a renamed field has the name of another field")
        try:
            check_distinct(fields)
        except BadFieldError as error:
            return make_bad_row(sample, str(error))
        return sample._replace(fields=fields)
