"""Records of a dataset: its plan, the ledger of its shards, its manifest."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from millrace.errors import ConfigurationError
from millrace.keys import DatasetKeys, is_plain
from millrace.records import Record, RecordPart

_MAX_INDEX_SIZE = 256 << 20  # a million splits or shards, of 150 to 250 bytes each


def _check_key(key: str) -> str:
    """Refuse a key that leads out of the folder that objects are written below.

    Raises:
        ValueError: The key is no plain path.
    """
    if not is_plain(key):
        raise ValueError(f"{key!r} is not the key of an object of a dataset")
    return key


ObjectKey = Annotated[str, AfterValidator(_check_key)]
"""A key that a record names, which readers use as a path, too."""


class FileRef(RecordPart):
    """One file of a source, as it was when the plan was made.

    Attributes:
        path: Below the source's URL.
        size: Bytes.
        etag: The store's ETag; of a local file its size and time of change. Empty: any version
            of the file is read. No plan has that.
    """

    path: str
    size: int
    etag: str


class ByteRange(RecordPart):
    """A split that is the rows which begin within a range of one file.

    Attributes:
        file: Which file.
        number: The file's place in the source's listing, for the samples' keys.
        start: Where the range begins, in bytes.
        end: One past its last byte.
        reason: Why the file cannot be read by its name; empty if it can.
    """

    kind: Literal["bytes"] = "bytes"
    file: FileRef
    number: int
    start: int
    end: int
    reason: str = ""

    @property
    def size(self) -> int:
        """Bytes of the source that this split covers."""
        return self.end - self.start

    def fraction_before(self, cursor: int) -> float:
        """Return the fraction that lies before a cursor, from 0 to 1."""
        return min(1.0, max(0.0, (cursor - self.start) / self.size))


class FileGroup(RecordPart):
    """A split that is a list of samples, each of one or more files.

    Attributes:
        listing: The key of the list.
        sha256: Of the list.
        samples: How many samples it has.
        size: Bytes of all their files.
    """

    kind: Literal["files"] = "files"
    listing: str
    sha256: str
    samples: int
    size: int

    def fraction_before(self, cursor: int) -> float:
        """Return the fraction that lies before a cursor, from 0 to 1."""
        return cursor / self.samples


SourceRange = Annotated[ByteRange | FileGroup, Field(discriminator="kind")]


class Split(RecordPart):
    """A part of a dataset that one worker cuts into shards, independent of every other.

    Attributes:
        name: ``train-00007``.
        partition: ``train``, or ``val`` for what is held out.
        piece: Which samples.
    """

    name: str
    partition: str
    piece: SourceRange


class SourceRecord(RecordPart):
    """A source at a revision.

    Attributes:
        kind: Which of `millrace.datasets.sources`.
        url: Where it is.
        settings: What else its samples depend on.
        files: How many files.
        size: Bytes of all of them.
        sha256: Of the listing: paths, sizes, ETags.
        markers: Empty objects that only show a folder, and were left out.
    """

    kind: str
    url: str
    settings: dict[str, Any]
    files: int
    size: int
    sha256: str
    markers: int = 0


class ShardLayout(RecordPart):
    """Settings that decide the bytes of the shards, besides the samples.

    Attributes:
        format: Which of `millrace.datasets.formats`.
        writer: The writer's version, and the versions of what encodes.
        shard_bytes: A shard is closed before it would be larger.
        shard_samples: A shard is closed when it has as many samples.
    """

    format: str
    writer: dict[str, str]
    shard_bytes: int
    shard_samples: int


class DatasetPlan(Record):
    """Cut of a dataset: a pure function of the source at its revision and these settings.

    Attributes:
        dataset: Its name.
        source: What is read.
        layout: What is written.
        seed: Of the shuffle; None keeps the source's order.
        holdout: The share of the bytes that is held out for validation.
        split_bytes: About how many bytes of the source make a split.
        splits: All of them, in the order of their names.
        split_files: At most about how many files make a split, for sources of many files.
    """

    record_kind: ClassVar[str] = "dataset-plan"
    record_bytes: ClassVar[int] = _MAX_INDEX_SIZE
    dataset: str
    source: SourceRecord
    layout: ShardLayout
    seed: int | None
    holdout: float
    split_bytes: int
    splits: tuple[Split, ...]
    split_files: int | None = None


class ShardCommit(Record):
    """One entry of the ledger.

    Attributes:
        split: The split's name.
        n: Which shard of it.
        key: The shard's key; None if every row since the last commit was quarantined.
        size: Bytes of the shard.
        sha256: Of the shard.
        samples: How many samples it holds.
        start: The cursor of its first row: where the source is read from to make it again.
        next: The cursor after its last row: where to go on.
        quarantine: The key of its bad rows, if it has any.
        quarantined: How many.
        plan: SHA-256 of the plan it was made by; empty in records from before it was noted.
    """

    record_kind: ClassVar[str] = "shard-commit"

    split: str
    n: int
    key: ObjectKey | None
    size: int
    sha256: str
    samples: int
    start: int
    next: int
    quarantine: ObjectKey | None = None
    quarantined: int = 0
    plan: str = ""


class SplitEnd(Record):
    """A split has no more rows: what it became.

    Attributes:
        split: Its name.
        commits: How many commits it has.
        samples: In all its shards.
        size: Bytes of all its shards.
        quarantined: Rows put aside.
        plan: SHA-256 of the plan it was made by; empty in records from before it was noted.
    """

    record_kind: ClassVar[str] = "split-end"

    split: str
    commits: int
    samples: int
    size: int
    quarantined: int
    plan: str = ""


class ManifestShard(RecordPart):
    """A shard as a reader of the dataset needs it."""

    key: ObjectKey
    partition: str
    samples: int
    size: int
    sha256: str


class Manifest(Record):
    """A dataset that is complete.

    Attributes:
        dataset: Its name.
        plan: SHA-256 of the plan it was made by.
        format: Of its shards.
        shards: All of them, in the order of their keys.
        samples: In all shards, by partition.
        size: Bytes of all shards.
        quarantined: Rows put aside.
    """

    record_kind: ClassVar[str] = "dataset-manifest"
    record_bytes: ClassVar[int] = _MAX_INDEX_SIZE
    dataset: str
    plan: str
    format: str
    shards: tuple[ManifestShard, ...]
    samples: dict[str, int]
    size: int
    quarantined: int

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
