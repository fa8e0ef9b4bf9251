"""Check the fields that are JSON, where a source or a function gives their bytes."""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

import orjson

from millrace.datasets.formats.base import is_json, read_field
from millrace.datasets.sample import BadRow, LargeFile, Row, RowBatch
from millrace.datasets.sources.jsonl import LARGE_LINE, exceeds_memory, explain_refusal
from millrace.datasets.transforms.base import RowGroup, make_bad_row

_MAX_PARSED = 32 << 20  # bytes of a large file that is parsed although no format needs all of it


class JsonCheck:
    """Check of the fields that are JSON. A sample whose field is no JSON becomes a bad row.

    Readers of shards without types decode JSON by Python's own parser, which also takes NaN. Then
    the check takes what that parser does.

    Args:
        types: Types of the fields, by their names. Fields of formats without types have none.
    """

    def __init__(self, types: Mapping[str, str]) -> None:
        self._types = types

    def check_rows(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Yield rows, with a bad row for each sample with a field that is no JSON."""
        for row in rows:
            held = [self._check_row(row)]
            del row  # a large row is not held while the next is read
            yield held.pop()

    def check_groups(self, groups: Iterable[RowGroup]) -> Iterator[RowGroup]:
        """Yield row groups, with a bad row for each sample with a field that is no JSON."""
        for group in groups:
            group.rows[:] = map(self._check_row, group.rows)
            held = [group]
            del group  # a large row is not held while the next is read
            yield held.pop()

    def check_batches(self, batches: Iterator[RowBatch | Row]) -> Iterator[RowBatch | Row]:
        """Yield the batches whose fields are JSON as they are, and the rows of others."""
        for one in batches:
            if isinstance(one, RowBatch):
                if self._is_valid(one):
                    yield one
                else:
                    yield from map(self._check_row, one.iterate_samples())
            else:
                held = [self._check_row(one)]
                del one  # a large row is not held while the next is read
                yield held.pop()

    def _is_valid(self, batch: RowBatch) -> bool:
        """Decide whether the samples of a batch have valid JSON, without Python code for each."""
        for name, values in batch.columns.items():
            if is_json(name, self._types):
                if max(map(len, values), default=0) >= LARGE_LINE:
                    return False
                try:
                    deque(map(self._choose_parser(name), values), maxlen=0)
                except (ValueError, RecursionError):
                    return False
        return True

    def _check_row(self, row: Row) -> Row:
        if isinstance(row, BadRow):
            return row
        for name, data in row.fields.items():
            if not is_json(name, self._types):
                continue
            if isinstance(data, LargeFile):
                if data.size > _MAX_PARSED and name not in self._types:
                    continue
                # The file is not read again by the encoder.
                row = row._replace(fields={**row.fields, name: read_field(data)})
            if reason := self._find_fault(name, read_field(row.fields[name])):
                return make_bad_row(row, f"the field {name!r} {reason}")
        return row

    def _find_fault(self, name: str, data: bytes) -> str:
        if exceeds_memory(data):
            return "has more objects and arrays than memory holds"
        try:
            self._choose_parser(name)(data)
        except orjson.JSONDecodeError as error:
            refusal = explain_refusal(data, error)
            return f"is {refusal}" if refusal else f"is no JSON: {error}"
        except (ValueError, RecursionError) as error:
            return f"is no JSON: {error}"
        return ""

    def _choose_parser(self, name: str) -> Callable[[bytes], object]:
        return orjson.loads if name in self._types else _parse_as_python


def _parse_as_python(data: bytes) -> object:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data)
