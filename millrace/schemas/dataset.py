"""Records of a dataset: its plan, the ledger of its shards, its manifest."""

import base64
import struct
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic.dataclasses import dataclass

from millrace.digest import (
    BLOCK_DIGEST_SIZE,
    OwnDigest,
    check_blocks,
    compute_digest,
    dump_canonical_json,
    get_hex,
)
from millrace.errors import ConfigurationError, CorruptError
from millrace.keys.datasets import DatasetKeys
from millrace.keys.names import is_plain
from millrace.records import PART_CONFIG, JsonObject, Record, RecordPart

TAR_BLOCK = 512  # bytes; each member of a tar file begins at a multiple

_MAX_INDEX_SIZE = 384 << 20  # a million partitions or shards, of 150 to 350 bytes each


def _check_key(key: str) -> str:
    """Refuse a key that is not a path below the dataset's folder.

    Raises:
        ValueError: The key is not a plain path.
    """
    if not is_plain(key):
        raise ValueError(f"{key!r} is not the key of an object of a dataset")
    return key


ObjectKey = Annotated[str, AfterValidator(_check_key)]
"""A key in a record. Readers also use the key as a path."""


@dataclass(frozen=True, slots=True, kw_only=True, config=PART_CONFIG)
class FileRef:
    """One file of a source, as it was when the plan was made.

    Attributes:
        path: Path below the source's URL.
        size: Bytes of the file.
        etag: ETag of the store; for a local file, its size and modification time. Empty: any
            version of the file is read. No plan has an empty ETag.
    """

    path: str
    size: int
    etag: str


@dataclass(frozen=True, slots=True, kw_only=True, config=PART_CONFIG)
class _FileBytes:
    """A source range of one file that is divided by its bytes.

    Attributes:
        file: The file.
        file_index: Index of the file in the source's listing. The samples' keys contain it.
        start: Offset of the first byte.
        end: Offset after the last byte.
    """

    file: FileRef
    file_index: int
    start: int
    end: int

    @property
    def size(self) -> int:
        """Bytes of the range."""
        return self.end - self.start

    @staticmethod
    def locate(cursor: int) -> int:
        """Return the offset in the file at which a cursor is: the cursor itself."""
        return cursor

    def compute_fraction_before(self, cursor: int) -> float:
        """Return the fraction of the range before a cursor, from 0 to 1."""
        return min(1.0, max(0.0, (self.locate(cursor) - self.start) / self.size))

    def divide(self, size: int) -> tuple[Self, Self]:
        """Divide the range in two, the first of `size` bytes."""
        middle = self.start + size
        return replace(self, end=middle), replace(self, start=middle)


@dataclass(frozen=True, slots=True, kw_only=True, config=PART_CONFIG)
class ByteRange(_FileBytes):
    """A source range of one file: the rows that begin within a range of bytes.

    Attributes:
        reason: Reason why the file cannot be read by its name; empty if the file can be read.
    """

    kind: Literal["bytes"] = "bytes"
    reason: str = ""

    @property
    def start_cursor(self) -> int:
        """Cursor of the first byte: its offset."""
        return self.start

    @property
    def end_cursor(self) -> int:
        """Cursor after the last byte."""
        return self.end


COMPRESSED_STEP = 16 << 10
"""Bytes of a compressed file after which its decompressed bytes are counted anew, in a cursor."""
_ROW_BITS = 40  # bits of a cursor that count the rows of a shard of the Hub
_STEP_BITS = 32  # bits of a cursor that count the decompressed bytes of a step


@dataclass(frozen=True, slots=True, kw_only=True, config=PART_CONFIG)
class CompressedRange(_FileBytes):
    """A source range of one compressed file: the rows that begin within a range of its bytes.

    The file is read in steps of 16 KiB. A cursor is the number of a step, and a number of the bytes
    that become known by it: ``step << 32 | bytes``. So a cursor tells its position in the file, for
    a fraction, and rows have the same order as cursors.

    Attributes:
        seek_points: Folder of the file's seek points in the store of the dataset.
    """

    kind: Literal["compressed"] = "compressed"
    seek_points: ObjectKey
    reason: ClassVar[str] = ""  # a file whose name cannot be read is a `ByteRange`

    @property
    def start_cursor(self) -> int:
        """First cursor of the steps that begin in the range."""
        return -(-self.start // COMPRESSED_STEP) << _STEP_BITS

    @property
    def end_cursor(self) -> int:
        """First cursor of the steps that begin after the range."""
        return -(-self.end // COMPRESSED_STEP) << _STEP_BITS

    @staticmethod
    def make_cursor(position: int, count: int) -> int:
        """Return the cursor of a decompressed byte.

        Args:
            position: Offset in the compressed file, within the step.
            count: Decompressed bytes of the step before the byte.
        """
        return position // COMPRESSED_STEP << _STEP_BITS | count

    @staticmethod
    def locate(cursor: int) -> int:
        """Return the offset in the compressed file at which the step of a cursor begins."""
        return (cursor >> _STEP_BITS) * COMPRESSED_STEP

    @staticmethod
    def get_count(cursor: int) -> int:
        """Return the decompressed bytes of the step of a cursor before its byte."""
        return cursor & (1 << _STEP_BITS) - 1


@dataclass(frozen=True, slots=True, kw_only=True, config=PART_CONFIG)
class RowRange:
    """A source range of one file that is divided by the numbers of its rows, such as parquet.

    Attributes:
        file: The file.
        file_index: Index of the file in the source's listing. The samples' keys contain it.
        start: Number of the first row.
        end: Number after the last row.
        size: Approximate bytes of the rows in the file.
        reason: Reason why the file cannot be read by its name; empty if the file can be read.
    """

    kind: Literal["rows"] = "rows"
    file: FileRef
    file_index: int
    start: int
    end: int
    size: int
    reason: str = ""

    def compute_fraction_before(self, cursor: int) -> float:
        """Return the fraction of the range before a cursor, from 0 to 1."""
        return min(1.0, max(0.0, (cursor - self.start) / (self.end - self.start)))

    def divide(self, size: int) -> "tuple[RowRange | None, RowRange]":
        """Divide the range in two, the first of about `size` bytes. None: a row is not divided."""
        rows = self.end - self.start
        if rows == 1:
            return None, self
        middle = self.start + min(rows - 1, max(1, round(rows * size / self.size)))
        return (
            replace(self, end=middle, size=size),
            replace(self, start=middle, size=self.size - size),
        )


@dataclass(frozen=True, slots=True, kw_only=True, config=PART_CONFIG)
class MemberRange(_FileBytes):
    """A source range of one tar file: the samples whose first members begin within its bytes.

    Attributes:
        index: Key of the index of the file's members.
    """

    kind: Literal["members"] = "members"
    index: ObjectKey
    reason: ClassVar[str] = ""  # a file whose name cannot be read is a `ByteRange`


@dataclass(frozen=True, slots=True, kw_only=True, config=PART_CONFIG)
class HubShardRange:
    """A source range of a dataset of the Hub: consecutive shards of its iterable dataset.

    A cursor is the number of a shard within the range, and the number of a row within that shard:
    ``shard << 40 | row``.

    Attributes:
        start: Number of the first shard.
        end: Number after the last shard.
        size: Approximate bytes of the shards.
        rows: Approximate number of rows; 0 if the dataset does not tell.
    """

    kind: Literal["hub-shards"] = "hub-shards"
    start: int
    end: int
    size: int
    rows: int = 0
    reason: ClassVar[str] = ""  # the dataset is read as a whole

    @staticmethod
    def make_cursor(shard: int, row: int) -> int:
        """Return the cursor of a row.

        Args:
            shard: Number of the shard within the range.
            row: Number of the row within the shard.
        """
        return shard << _ROW_BITS | row

    @staticmethod
    def locate(cursor: int) -> tuple[int, int]:
        """Return the number of the shard within the range, and of the row within the shard."""
        return cursor >> _ROW_BITS, cursor & (1 << _ROW_BITS) - 1

    def compute_fraction_before(self, cursor: int) -> float:
        """Return the fraction of the range before a cursor, from 0 to 1."""
        shard, row = self.locate(cursor)
        shards = self.end - self.start
        within = min(1.0, row * shards / self.rows) if self.rows else 0.0
        return min(1.0, (shard + within) / shards)

    def divide(self, size: int) -> "tuple[HubShardRange | None, HubShardRange]":
        """Divide the range in two, the first of about `size` bytes. None: a shard is not divided.

        Args:
            size: Bytes of the first range.
        """
        shards = self.end - self.start
        if shards == 1:
            return None, self
        count = min(shards - 1, max(1, round(shards * size / self.size)))
        first_size = max(1, self.size * count // shards)
        first_rows = self.rows * count // shards
        return (
            replace(self, end=self.start + count, size=first_size, rows=first_rows),
            replace(
                self,
                start=self.start + count,
                size=max(1, self.size - first_size),
                rows=self.rows - first_rows,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True, config=PART_CONFIG)
class SampleList:
    """A source range of many files: samples of one or more files, which a stored list names.

    Attributes:
        listing: Key of the sample list.
        digest: Digest of the sample list.
        samples: Number of samples.
        size: Bytes of all files.
    """

    kind: Literal["files"] = "files"
    listing: str
    digest: OwnDigest
    samples: int
    size: int

    def compute_fraction_before(self, cursor: int) -> float:
        """Return the fraction of the range before a cursor, from 0 to 1."""
        return cursor / self.samples


SourceRange = Annotated[
    ByteRange | CompressedRange | RowRange | MemberRange | HubShardRange | SampleList,
    Field(discriminator="kind"),
]


class SeekPoint(Record):
    """Position in a compressed file from which the file can be decompressed.

    At the beginning of a gzip member or a zstd frame, `window` is empty and `bit` is 0. Else the
    position is the beginning of a deflate block, and the state of the decompressor is given.

    Attributes:
        file: The compressed file.
        position: Offset of the byte in the compressed file.
        bit: First bit of the block in this byte, from 0 to 7.
        cursor: Cursor of the first byte that follows, see `CompressedRange`.
        offset: Number of decompressed bytes before, in the whole file.
        window: Last 32 KiB of these bytes, in base64.
        checksum: CRC-32 of the member's decompressed bytes before the position.
        member_bytes: Number of the member's decompressed bytes before the position.
        digest: Digest of all the other values.
    """

    record_kind: ClassVar[str] = "seek-point"
    record_version: ClassVar[int] = 2  # its digest is that of all values

    file: FileRef
    position: int
    bit: int
    cursor: int
    offset: int
    window: str
    checksum: int
    member_bytes: int
    digest: OwnDigest

    @classmethod
    def make(cls, file: FileRef, window: bytes, **values: int) -> Self:
        """Return the seek point of some values, with their digest."""
        encoded = base64.b64encode(window).decode()
        point = cls.model_construct(None, file=file, window=encoded, **values)
        return cls(digest=point.compute_own_digest(), **dict(point))

    def decode_window(self) -> bytes:
        """Return the bytes of the window.

        Raises:
            CorruptError: A value of the seek point is damaged.
        """
        if self.compute_own_digest() != self.digest:
            raise CorruptError("A seek point does not have its digest.")
        return base64.b64decode(self.window)

    def compute_own_digest(self) -> str:
        """Return the digest of all other values."""
        values = self.model_dump(mode="json", exclude={"digest"})
        return compute_digest(dump_canonical_json(values))


@dataclass(frozen=True, slots=True, kw_only=True, config=PART_CONFIG)
class Partition:
    """The unit of work of a sharding run. One worker at a time makes the partition's shards.

    Attributes:
        name: Name of the partition, such as ``train-00007``.
        split: ``train``, or ``val`` for the samples that are held out.
        source_range: Range of the source that the partition reads.
    """

    name: str
    split: str
    source_range: SourceRange


class SourceRecord(RecordPart):
    """A source at a revision.

    Attributes:
        kind: Kind of the source, one of `millrace.datasets.sources.SourceKind`.
        url: URL of the source.
        settings: Other settings that the samples depend on.
        files: Number of files.
        size: Bytes of all files.
        digest: Digest of the source's listing: paths, sizes, ETags.
        markers: Number of empty objects that only show a folder. They are left out.
    """

    kind: str
    url: str
    settings: JsonObject
    files: int
    size: int
    digest: OwnDigest
    markers: int = 0

    @property
    def is_reproducible(self) -> bool:
        """True if every read of the source gives the same samples, or an error."""
        return self.kind != "urls"


class ShardLayout(RecordPart):
    """Settings that decide the bytes of the shards, besides the samples.

    Attributes:
        formats: Formats of the shards, of `millrace.datasets.formats`. Each has all samples.
        fields: Types of the fields, for formats whose fields have types. Without such formats,
            the types of the tokens that `tokenize` makes.
        writer: Versions of the writers and of the encoders.
        shard_bytes: Maximum bytes of a shard.
        shard_samples: Maximum number of samples in a shard.
    """

    formats: tuple[str, ...]
    fields: dict[str, str] = Field(default_factory=dict[str, str])
    writer: dict[str, str]
    shard_bytes: int
    shard_samples: int


class DatasetPlan(Record):
    """Plan of a dataset. It depends only on the source at its revision and on the settings.

    Attributes:
        dataset: Name of the dataset.
        source: Source at its revision.
        layout: Layout of the shards.
        seed: Seed of the shuffle; None keeps the source's order.
        holdout: Share of the bytes that is held out for validation.
        partition_bytes: Approximate bytes of the source in a partition.
        partitions: All partitions, in the order of their names.
        partition_files: Approximate maximum of files in a partition, for sources of many files.
    """

    record_kind: ClassVar[str] = "dataset-plan"
    record_version: ClassVar[int] = 3  # with formats
    record_bytes: ClassVar[int] = _MAX_INDEX_SIZE
    record_items: ClassVar[str] = "partitions"
    dataset: str
    source: SourceRecord
    layout: ShardLayout
    seed: int | None
    holdout: float
    partition_bytes: int
    partitions: tuple[Partition, ...]
    partition_files: int | None = None


def encode_sample_offsets(offsets: Sequence[tuple[int, int]]) -> str:
    """Return samples of a tar shard and the offsets of their headers, in base64.

    A tar file has no table of its samples. A reader that begins in the middle of a shard reads from
    such a sample on.

    Args:
        offsets: Number and offset of each sample, in ascending order.
    """
    numbers = (number for row, offset in offsets for number in (row, offset // TAR_BLOCK))
    return base64.b64encode(struct.pack(f"<{2 * len(offsets)}I", *numbers)).decode()


def decode_sample_offsets(text: str, samples: int, size: int) -> list[tuple[int, int]]:
    """Return the value that `encode_sample_offsets` got.

    Args:
        text: Its result.
        samples: Number of samples of the shard.
        size: Bytes of the shard.

    Raises:
        CorruptError: The text cannot be that of such a shard.
    """
    try:
        pairs = list(struct.iter_unpack("<II", base64.b64decode(text, validate=True)))
    except (ValueError, struct.error) as error:
        raise CorruptError(f"The offsets of samples in a record are damaged ({error}).") from error
    offsets = [(row, sector * TAR_BLOCK) for row, sector in pairs]
    for (row, offset), (next_row, next_offset) in pairwise([(0, 0), *offsets, (samples, size)]):
        if not (row < next_row and offset < next_offset):
            raise CorruptError("The offsets of samples in a record are not in order.")
    return offsets


@dataclass(frozen=True, slots=True, kw_only=True, config=PART_CONFIG)
class CommittedShard:
    """A shard in the ledger.

    Attributes:
        format: Format of the shard.
        key: Key of the shard.
        size: Bytes of the shard.
        digest: Digest of the shard.
        blocks: Joined digests of the shard's blocks, in base64. Empty if the shard is one block,
            whose digest is that of the shard.
        sample_offsets: Value of `encode_sample_offsets`; empty if the format has its own table.
    """

    format: str
    key: ObjectKey
    size: int
    digest: OwnDigest
    blocks: str = ""
    sample_offsets: str = ""

    @staticmethod
    def encode_blocks(blocks: bytes) -> str:
        """Return the value of `blocks` for the joined digests of a shard's blocks."""
        return base64.b64encode(blocks).decode() if len(blocks) > BLOCK_DIGEST_SIZE else ""

    def decode_blocks(self) -> bytes:
        """Return the joined digests of the shard's blocks, checked against the shard's digest.

        Raises:
            CorruptError: The digests of the blocks do not fit the shard.
        """
        try:
            blocks = base64.b64decode(self.blocks, validate=True)
        except ValueError as error:
            raise CorruptError(
                f"The block digests in the commit of {self.key} are not base64."
            ) from error
        return check_blocks(blocks or bytes.fromhex(get_hex(self.digest)), self.digest, self.size)


class ShardCommit(Record):
    """One entry of the ledger: shards, the rows that they were made of, and bad rows.

    Attributes:
        partition: Name of the partition.
        number: Number of the commit within the partition.
        shards: One shard of each format, all of the same samples. Empty if every row since the
            last commit was quarantined.
        samples: Number of samples in each shard.
        start_cursor: Cursor of the first row. To make the shards again, reading starts here.
        next_cursor: Cursor after the last row. A later run continues here.
        start_skip: Part of the row at `start_cursor` in earlier shards: its samples and bad rows.
            Packed: its tokens in the low 32 bits, and its bad rows above them.
        next_skip: Part of the row at `next_cursor` in these shards and in earlier ones, likewise.
        quarantine_key: Key of the quarantined rows; None if there are none.
        quarantined: Number of quarantined rows.
        dropped: Number of rows between these cursors that became no sample by the transforms.
        rows: Number of rows of the source between these cursors; None without transforms.
        bad_rows: Quarantined rows of the source, which may be a fraction; None without transforms.
            A row that became several samples counts by the share of these that is quarantined.
        plan_digest: Digest of the plan.
    """

    record_kind: ClassVar[str] = "shard-commit"
    record_version: ClassVar[int] = 3  # with one shard of each format

    partition: str
    number: int
    shards: tuple[CommittedShard, ...]
    samples: int
    start_cursor: int
    next_cursor: int
    start_skip: int = 0
    next_skip: int = 0
    quarantine_key: ObjectKey | None = None
    quarantined: int = 0
    dropped: int = 0
    rows: int | None = None
    bad_rows: float | None = None
    plan_digest: OwnDigest

    @property
    def start_position(self) -> tuple[int, int]:
        """Cursor and `skip` of the first row."""
        return self.start_cursor, self.start_skip

    @property
    def next_position(self) -> tuple[int, int]:
        """Cursor and `skip` after the last row."""
        return self.next_cursor, self.next_skip

    @property
    def size(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size for shard in self.shards)


class PartitionEnd(Record):
    """End of a partition, whose rows are all committed.

    Attributes:
        partition: Name of the partition.
        commits: Number of commits.
        samples: Number of samples in all shards.
        size: Bytes of all shards.
        quarantined: Number of quarantined rows.
        dropped: Number of rows that became no sample by the transforms, also after the last commit.
        rows: Number of rows of the source; None without transforms.
        bad_rows: Quarantined rows of the source, as in the commits.
        plan_digest: Digest of the plan.
    """

    record_kind: ClassVar[str] = "partition-end"
    record_version: ClassVar[int] = 2  # with BLAKE3 digests

    partition: str
    commits: int
    samples: int
    size: int
    quarantined: int
    dropped: int = 0
    rows: int | None = None
    bad_rows: float | None = None
    plan_digest: OwnDigest


def count_source_rows(entry: ShardCommit | PartitionEnd) -> tuple[int, float]:
    """Return the number of rows of the source, and of those that are quarantined.

    Without transforms, each row is a sample or is quarantined.
    """
    rows = entry.samples + entry.quarantined + entry.dropped if entry.rows is None else entry.rows
    return rows, entry.quarantined if entry.bad_rows is None else entry.bad_rows


@dataclass(frozen=True, slots=True, kw_only=True, config=PART_CONFIG)
class ManifestShard:
    """A shard in the manifest, for readers of the dataset.

    Attributes:
        format: Format of the shard.
        key: Key of the shard.
        split: Split of the samples, ``train`` or ``val``.
        samples: Number of samples.
        size: Bytes of the shard.
        digest: Digest of the shard.
        sample_offsets: Value of `encode_sample_offsets`; empty if the format has its own table.
    """

    format: str
    key: ObjectKey
    split: str
    samples: int
    size: int
    digest: OwnDigest
    sample_offsets: str = ""


class Manifest(Record):
    """Manifest of a complete dataset.

    Attributes:
        dataset: Name of the dataset.
        plan_digest: Digest of the plan.
        formats: Formats of the shards. Each has all samples.
        fields: Types of the fields, for formats whose fields have types. Without such formats,
            the types of the tokens that `tokenize` makes.
        shards: Shards of all formats, in the order of their commits.
        samples: Number of samples by split.
        size: Bytes of all shards.
        quarantined: Number of quarantined rows.
        dropped: Number of rows of the source that became no sample by the transforms.
    """

    record_kind: ClassVar[str] = "dataset-manifest"
    record_version: ClassVar[int] = 3  # with formats
    record_bytes: ClassVar[int] = _MAX_INDEX_SIZE
    record_items: ClassVar[str] = "shards"
    dataset: str
    plan_digest: OwnDigest
    formats: tuple[str, ...]
    fields: dict[str, str] = Field(default_factory=dict[str, str])
    shards: tuple[ManifestShard, ...]
    samples: dict[str, int]
    size: int
    quarantined: int
    dropped: int = 0

    @model_validator(mode="after")
    def _check_shard_keys(self) -> Self:
        try:
            below = DatasetKeys(self.dataset).shards
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
        for shard in self.shards:
            if not shard.key.startswith(below):
                raise ValueError(f"{shard.key!r} is not the key of a shard of {self.dataset}")
        return self


class DatasetCard(Record):
    """Record of the dataset card, ``README.md``. The card is made from it and the manifest.

    Unlike other records it is written again if the settings of the card have changed.

    Attributes:
        source: Source of the samples at its revision, as in the plan.
        license: Identifier of the license; None if none is given.
    """

    record_kind: ClassVar[str] = "dataset-card"
    record_bytes: ClassVar[int] = _MAX_INDEX_SIZE
    source: SourceRecord
    license: str | None = None
