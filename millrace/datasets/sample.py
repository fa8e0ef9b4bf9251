"""Samples and bad rows, which a source yields and a format encodes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple, cast

BATCH_BYTES = 256 << 10  # approximate bytes of a batch
LARGE_ROW = 64 << 10  # bytes of a row that is a batch of its own
_BATCH_ROWS = 256


@dataclass(frozen=True, slots=True)
class LargeFile:
    """Large part of a sample, whose blocks are read only while the shard is encoded.

    Attributes:
        size: Bytes of the file.
        blocks: Function that yields the blocks of the file. The function raises `ChangedError` if
            the file has changed.
    """

    size: int
    blocks: Callable[[], Iterator[bytes]]

    def __len__(self) -> int:
        return self.size


class Sample(NamedTuple):
    """One sample of a source.

    Attributes:
        key: Name of the sample, unique in its partition.
        fields: Parts by their extensions (``txt``, ``json``). Formats sort them by extension.
        next_cursor: Cursor after the sample.
        next_skip: Number of samples and bad rows that were yielded before of the source's row at
            `next_cursor`. Packed: its tokens in the low 32 bits, and its bad rows above them.
    """

    key: str
    fields: Mapping[str, bytes | LargeFile]
    next_cursor: int
    next_skip: int = 0


def explain_result(name: str, made: object, number: int | None) -> str:
    """Return the reason why a result of a function of samples makes no sample.

    Args:
        name: Name of the function.
        made: The result, which is not a dict.
        number: Place in the list of results; None if the function returned no list.
    """
    kind = "None" if made is None else f"a {type(made).__name__}"
    where = "" if number is None else f" in place {number} of its results"
    return f"{name} returned {kind}{where}: return a dict, a list of dicts or None"


class BadRow(NamedTuple):
    """A row that makes no sample.

    Attributes:
        where: Location of the row in the source.
        reason: Reason why the row makes no sample.
        data: Bytes of the row, or the first of them.
        next_cursor: Cursor after the row.
        next_skip: Number of samples and bad rows that were yielded before of the source's row at
            `next_cursor`. Packed: its tokens in the low 32 bits, and its bad rows above them.
        share: Share in its row of the source, of which transforms may make several.
    """

    where: str
    reason: str
    data: bytes
    next_cursor: int
    next_skip: int = 0
    share: float = 1.0


Row = Sample | BadRow


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Consecutive samples by their columns. They have the same fields, and no `LargeFile`.

    Attributes:
        keys: Names of the samples.
        columns: Values of each field, by the field's name.
        next_cursors: Cursor after each sample.
        next_skips: Value of `Sample.next_skip` of each sample; empty if all are 0.
    """

    keys: Sequence[str]
    columns: Mapping[str, Sequence[bytes]]
    next_cursors: Sequence[int]
    next_skips: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.keys)

    def get_position(self, index: int) -> tuple[int, int]:
        """Return cursor and `skip` after a sample."""
        return self.next_cursors[index], self.next_skips[index] if self.next_skips else 0

    def slice(self, start: int, end: int) -> "RowBatch":
        """Return the samples between two indices."""
        columns = {name: values[start:end] for name, values in self.columns.items()}
        return RowBatch(
            self.keys[start:end], columns, self.next_cursors[start:end], self.next_skips[start:end]
        )

    def iterate_samples(self) -> Iterator[Sample]:
        """Yield the samples. No Python code runs for a sample that has one field."""
        names = tuple(self.columns)
        fields: Iterable[Mapping[str, bytes]]
        if len(names) == 1:
            [(name, values)] = self.columns.items()
            fields = [{name: value} for value in values]
        else:
            rows = zip(*self.columns.values(), strict=True)
            fields = (dict(zip(names, row, strict=True)) for row in rows)
        skips = self.next_skips or repeat(0)
        return map(_NEW_SAMPLE, zip(self.keys, fields, self.next_cursors, skips, strict=False))


_NEW_SAMPLE: Callable[[Iterable[Any]], Sample] = partial(cast("Any", tuple).__new__, Sample)


def make_keys(file_index: int, numbers: Sequence[int], digits: int) -> list[str]:
    """Return the keys of samples by their numbers or offsets in a file.

    Args:
        file_index: Number of the file.
        numbers: Numbers of the samples.
        digits: Smallest number of digits of a number.
    """
    pattern = f"{file_index:05d}-%0{digits}d\n"
    # One text of all keys takes two thirds of the time of a text for each.
    return (pattern * len(numbers) % (*numbers,)).splitlines()


def iterate_rows(batches: Iterator[RowBatch | Row]) -> Iterator[Row]:
    """Yield the rows of batches, and the rows between them."""
    for one in batches:
        if isinstance(one, RowBatch):
            yield from one.iterate_samples()
        else:
            held = [one]
            del one  # a large row is not held while the next is read
            yield held.pop()


def batch_rows(rows: Iterator[Row]) -> Iterator[RowBatch | Row]:
    """Collect the samples of rows in batches. Bad rows and large samples stay alone.

    The rows before an error are yielded before the error is raised.
    """
    batch: list[Sample] = []
    size = 0
    try:
        for row in rows:
            if (
                isinstance(row, BadRow)
                or (row_size := sum(map(len, row.fields.values()))) >= LARGE_ROW
            ):
                yield from _make_batch(batch)
                batch, size = [], 0
                held: list[Row] = [row]
                del row  # a large row is not held while the next is read
                yield held.pop()
                continue
            batch.append(row)
            size += row_size
            if len(batch) >= _BATCH_ROWS or size >= BATCH_BYTES:
                yield from _make_batch(batch)
                batch, size = [], 0
    except Exception:
        yield from _make_batch(batch)
        raise
    yield from _make_batch(batch)


def _make_batch(samples: Sequence[Sample]) -> Iterator[RowBatch | Row]:
    """Yield samples as a batch if they have the same fields and no `LargeFile`, else singly."""
    all_fields = [sample.fields for sample in samples]
    names = all_fields[0].keys() if all_fields else ()
    columns: dict[str, Any] = {}
    if set(map(len, all_fields)) == {len(names)}:
        with suppress(KeyError):
            columns = {name: [*map(itemgetter(name), all_fields)] for name in names}
    if not columns or any(set(map(type, one)) != {bytes} for one in columns.values()):
        yield from samples
        return
    keys, _, cursors, skips = zip(*samples, strict=True)
    yield RowBatch(keys, columns, cursors, skips)
