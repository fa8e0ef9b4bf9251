"""Divide the ranges of a source's files into splits and partitions."""

import random
from collections.abc import Iterable, Iterator, MutableSequence
from typing import TypeVar

from millrace.datasets.sample import BadRow
from millrace.datasets.sources.base import Division
from millrace.keys.datasets import make_partition_name
from millrace.schemas.dataset import (
    ByteRange,
    CompressedRange,
    HubShardRange,
    MemberRange,
    Partition,
    RowRange,
    SourceRange,
)

FileRange = ByteRange | CompressedRange | RowRange | MemberRange
DividedRange = FileRange | HubShardRange
T = TypeVar("T")


def partition_ranges(
    source_ranges: Iterable[DividedRange], division: Division
) -> tuple[Partition, ...]:
    """Make each range a partition, after a shuffle, and hold out the last ranges.

    Args:
        source_ranges: Ranges in the order of the source.
        division: Settings of the division.
    """
    ranges = list(source_ranges)
    shuffle(ranges, division.seed)
    wanted = round(sum(source_range.size for source_range in ranges) * division.holdout)
    held_out: list[DividedRange] = []
    while wanted > 0:
        last = ranges.pop()
        if last.size > wanted and not last.reason:
            first, last = last.divide(last.size - wanted)
            if first is not None:
                ranges.append(first)
        held_out.append(last)
        wanted -= last.size
    return tuple(
        make_partition(split, number, source_range)
        for split, split_ranges in (("train", ranges), ("val", held_out))
        for number, source_range in enumerate(split_ranges)
    )


def iterate_unreadable(source_range: FileRange, cursor: int) -> Iterator[BadRow]:
    """Yield the one bad row of a range whose file cannot be read by its name, from a cursor on."""
    if cursor < source_range.end:
        yield BadRow(source_range.file.path, source_range.reason, b"", source_range.end)


def make_partition(split: str, number: int, source_range: SourceRange) -> Partition:
    """Return a partition of a source range."""
    name = make_partition_name(split, number)
    return Partition(name=name, split=split, source_range=source_range)


def shuffle(items: MutableSequence[T], seed: int | None) -> None:
    """Shuffle a sequence in place; None keeps the order."""
    if seed is not None:
        random.Random(seed).shuffle(items)
