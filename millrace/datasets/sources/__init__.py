"""A sample on its way in: sources, and how each is cut into splits."""

import random
from array import array
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from millrace import errors
from millrace.datasets.sources.base import Source
from millrace.datasets.sources.files import is_local, list_files
from millrace.datasets.sources.folder import LISTING_BYTES, RESERVED, Folder, Groups, encode_listing
from millrace.datasets.sources.jsonl import JsonLines, cut_file, divide
from millrace.datasets.sources.table import FileTable, path_text, unpack, unreadable
from millrace.digest import sha256
from millrace.keys import DatasetKeys, make_split_name
from millrace.schemas.dataset import ByteRange, FileGroup, SourceRange, SourceRecord, Split
from millrace.schemas.sample import BadRow, Row, Sample
from millrace.storage import Store

__all__ = [
    "BadRow",
    "Cut",
    "Row",
    "Sample",
    "Source",
    "SourceKind",
    "SourceSettings",
    "cut",
    "open_source",
]

LARGEST_FILE = 1 << 30
T = TypeVar("T")


class SourceKind(StrEnum):
    """Kind of a source."""

    JSONL = "jsonl"
    FILES = "files"


class SourceSettings(BaseModel):
    """Settings that choose the samples of a source."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: SourceKind = Field(
        default=SourceKind.JSONL,
        description="`jsonl`: a sample a line. `files`: a sample a file, or a group of files that "
        "share their name up to the first dot.",
    )
    include: list[str] = Field(
        default=["*"], description="Patterns of the files to take, such as `*.jsonl`."
    )
    exclude: list[str] = Field(default=[], description="Patterns of the files to leave.")
    columns: dict[str, str] | None = Field(
        default=None,
        description="Column of each field, as `{txt: text}` (`jsonl` only). Left out, "
        "each row is kept whole as `json`.",
    )

    @field_validator("columns")
    @classmethod
    def _readable(cls, columns: dict[str, str] | None) -> dict[str, str] | None:
        for name in columns or {}:
            if not name or "/" in name or RESERVED.search(name) or not name.isprintable():
                raise ValueError(
                    f"webdataset could not read the field {name!r} back: write an extension such "
                    "as txt, without '/' and not like __this__"
                )
        if len({name.lower() for name in columns or {}}) < len(columns or {}):
            raise ValueError("two fields differ in upper and lower case only: readers see one")
        return columns


@dataclass(frozen=True, slots=True)
class Cut:
    """A source cut into splits.

    Attributes:
        record: The source at its revision.
        splits: In the order of their names.
        listings: Objects that must be in the store before the plan is: key → body. A body is made
            when it is asked for.
        largest: Bytes of the largest sample; None where only reading the files shows it.
    """

    record: SourceRecord
    splits: tuple[Split, ...]
    listings: Mapping[str, bytes]
    largest: int | None = None


class _Listings(Mapping[str, bytes]):
    """The listings of the splits of a source of many files."""

    def __init__(self, groups: Groups, batches: Mapping[str, Sequence[int]]) -> None:
        self._groups, self._batches = groups, batches

    def __getitem__(self, key: str) -> bytes:
        return encode_listing(self._groups[place] for place in self._batches[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def cut(
    settings: SourceSettings,
    store: Store,
    keys: DatasetKeys,
    *,
    split_bytes: int,
    split_files: int,
    seed: int | None,
    holdout: float,
) -> Cut:
    """Cut a source into splits: a pure function of its files and these arguments.

    Args:
        settings: Which samples.
        store: Where they are.
        keys: The dataset's names.
        split_bytes: About how many bytes of the source make a split.
        split_files: At most about how many files make a split, of a source of many files.
        seed: Of the shuffle: of the splits for JSON lines, of all samples for files. None keeps
            the source's order.
        holdout: The share of the bytes that becomes the partition ``val``.

    Raises:
        NotFoundError: The source has no files.
        ConfigurationError: A file cannot be cut.
    """
    files = list_files(store, include=settings.include, exclude=settings.exclude)
    record = SourceRecord(
        kind=settings.kind.value,
        url=store.url,
        settings={"columns": settings.columns} if settings.kind is SourceKind.JSONL else {},
        files=len(files),
        size=files.size,
        sha256=files.sha256(),
        markers=files.markers,
    )
    local = is_local(store)
    splits: list[Split] = []
    match settings.kind:
        case SourceKind.JSONL:
            ranges = _ranges(files, split_bytes, local=local)
            for partition, pieces in _cut_lines(ranges, seed, holdout).items():
                splits += [_split(partition, i, piece) for i, piece in enumerate(pieces)]
            return Cut(record, tuple(splits), {})
        case SourceKind.FILES:
            groups = Groups(files, local=local)
            listed: dict[str, Sequence[int]] = {}
            for partition, order in _cut_groups(groups, seed, holdout).items():
                for i, batch in enumerate(_batches(groups, order, split_bytes, split_files)):
                    listing = encode_listing(groups[place] for place in batch)
                    if len(listing) > LISTING_BYTES:
                        raise errors.ConfigurationError(
                            f"The names of {len(batch)} samples of {partition} take "
                            f"{len(listing):,} bytes, and a split may have {LISTING_BYTES:,}: "
                            "choose a smaller `split_files`."
                        )
                    digest = sha256(listing)
                    key = keys.listing(make_split_name(partition, i), digest)
                    size = sum(groups.sizes[place] for place in batch)
                    piece = FileGroup(listing=key, sha256=digest, samples=len(batch), size=size)
                    listed[key] = batch
                    splits.append(_split(partition, i, piece))
            largest = max(groups.sizes, default=0)
            return Cut(record, tuple(splits), _Listings(groups, listed), largest)


def open_source(
    record: SourceRecord, store: Store, dataset: Store, *, any_version: bool = False
) -> Source:
    """Return the source that a plan names.

    Args:
        record: From the plan.
        store: Where the source's files are.
        dataset: Where the plan is.
        any_version: Read the files as they are now, also if they were written again since the
            plan was made. Only for bytes that are then compared with a digest.
    """
    match SourceKind(record.kind):
        case SourceKind.JSONL:
            return JsonLines(store, record.settings.get("columns"), any_version=any_version)
        case SourceKind.FILES:
            return Folder(store, dataset, any_version=any_version)


def _split(partition: str, number: int, piece: SourceRange) -> Split:
    return Split(name=make_split_name(partition, number), partition=partition, piece=piece)


def _ranges(files: FileTable, split_bytes: int, *, local: bool) -> list[ByteRange]:
    ranges: list[ByteRange] = []
    for number, row in enumerate(files.rows):
        reason = unreadable(path_text(row.partition(b"\0")[0]), local=local)
        ranges += cut_file(unpack(row), number, split_bytes, reason=reason)
    return ranges


def _cut_lines(
    ranges: list[ByteRange], seed: int | None, holdout: float
) -> dict[str, list[ByteRange]]:
    _shuffle(ranges, seed)
    wanted = round(sum(piece.size for piece in ranges) * holdout)
    held: list[ByteRange] = []
    while wanted > 0:
        piece = ranges.pop()
        if piece.size > wanted and not piece.reason:
            first, piece = divide(piece, piece.size - wanted)
            ranges.append(first)
        held.append(piece)
        wanted -= piece.size
    return {"train": ranges, "val": held}


def _cut_groups(groups: Groups, seed: int | None, holdout: float) -> dict[str, "array[int]"]:
    for place, size in enumerate(groups.sizes):
        if size > LARGEST_FILE:
            raise errors.ConfigurationError(
                f"{groups[place].files[0].path}: a sample of {size} bytes is larger than a shard "
                f"can be ({LARGEST_FILE} bytes). Leave it out with exclude, or cut it up."
            )
    order = array("I", range(len(groups)))
    _shuffle(order, seed)
    wanted = round(sum(groups.sizes) * holdout)
    held = array("I")
    while wanted > 0:
        held.append(order.pop())
        wanted -= groups.sizes[held[-1]]
    return {"train": order, "val": held}


def _batches(groups: Groups, order: "array[int]", size: int, files: int) -> Iterator["array[int]"]:
    """Cut samples, in their order, into batches of about so many bytes, or so many files."""
    begin = room = places = 0
    for at, place in enumerate(order):
        if room <= 0 or places <= 0:
            if at:
                yield order[begin:at]
            begin, room, places = at, size, files
        room -= groups.sizes[place]
        places -= groups.files_of(place)
    if order:
        yield order[begin:]


def _shuffle(items: MutableSequence[T], seed: int | None) -> None:
    if seed is not None:
        random.Random(seed).shuffle(items)
