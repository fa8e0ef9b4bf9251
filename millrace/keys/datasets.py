"""Keys of a dataset's objects."""

import re
from dataclasses import dataclass
from hashlib import blake2b

from millrace.digest import get_hex
from millrace.errors import ConfigurationError
from millrace.keys.leases import is_lease_object
from millrace.keys.names import NAME_PATTERN, RESERVED_FOLDERS, check_name

_PAGE_INDEX = r"_pages/(?P<column>[A-Za-z0-9_]{1,64})-(?P<number>[0-9]{6,18})\.json"
_PAGE_LAYOUTS = r"_pages/[A-Za-z0-9_]{1,64}-[0-9a-f]{16}\.bin"
_INDEX = (
    r"shards/[a-z]+/(?:[a-z]+/)?(?:_?[a-z_]+\.(?:json|npy|yaml)"
    rf"|{_PAGE_INDEX.replace('?P<column>', '?:').replace('?P<number>', '?:')}|{_PAGE_LAYOUTS})"
)
DATASET_KEY = re.compile(
    rf"(?P<scope>{NAME_PATTERN}?)/"
    r"(?:(?:plan|plan-removed|manifest|index|card)\.json|README\.md|block_digests\.bin"
    r"|partitions/(?:[^/]+\.jsonl?|[0-9]{5,18}/[0-9]{19}\.json)"
    r"|commits/[a-z]+-[0-9]{5,18}/(?:[0-9]{6,18}|end)\.json"
    r"|transforms/[0-9a-f]{64}\.(?:py|jsonl?|csv|tsv|parquet)"
    r"|quarantine/[a-z]+-[0-9]{5,18}-[0-9]{6,18}(?:-[0-9a-f]{16})?\.jsonl"
    r"|shards/[a-z]+/[a-z]+/[a-z]+-[0-9]{5,18}-[0-9]{6,18}(?:-[0-9a-f]{16})?\.[a-z]+"
    rf"|{_INDEX})"
)
"""Key of an object of any dataset, by which `classify_key` recognises it.

The shortest scope counts, since the folder of an index is no dataset.
"""
_SEEK_POINT = re.compile(r"[0-9]{5,18}/[0-9]{19}\.json")
_MEMBER_INDEX = re.compile(r"[0-9]{5,18}-members\.jsonl")
_FILE_DIGESTS = re.compile(r"digests-[0-9a-f]{32}\.json")
_COMMIT_NAME = re.compile(r"(?P<partition>[a-z]+-[0-9]{5,18})-(?P<number>[0-9]{6,18})")
_COMMIT = re.compile(r"(?P<partition>[a-z]+-[0-9]{5,18})/(?P<number>[0-9]{6,18})\.json")
_END = re.compile(r"(?P<partition>[a-z]+-[0-9]{5,18})/end\.json")
_EARLIER_RECORD = re.compile(r"[a-z]+-[0-9]{5,18}-(?:[0-9]{6,18}|end)\.json")
_STORED_SHARD = re.compile(rf"{_COMMIT_NAME.pattern}(?:-[0-9a-f]{{16}})?")


def make_partition_name(split: str, number: int) -> str:
    """Return the name of a partition, such as ``train-00007``."""
    return f"{split}-{number:05d}"


def _make_suffix(digest: str) -> str:
    """Return the part of a key that differs with the bytes; empty without a digest."""
    return f"-{get_hex(digest)[:16]}" if digest else ""


def make_page_index_key(column: str, number: int) -> str:
    """Return the key of an index of pages, below the URL of its files.

    Args:
        column: Column of the pages.
        number: Number of the index. A later index replaces an earlier one.
    """
    return f"_pages/{_name_column(column)}-{number:06d}.json"


def make_page_layouts_key(column: str, digest: str) -> str:
    """Return the key of the places of all pages, below the URL of their files.

    Args:
        column: Column of the pages.
        digest: Digest of the object. The key has its first 16 digits.
    """
    return f"_pages/{_name_column(column)}-{get_hex(digest)[:16]}.bin"


def parse_page_index(column: str, key: str) -> int | None:
    """Return the number of an index of the pages of a column; None for other keys."""
    match = re.fullmatch(_PAGE_INDEX, key)
    number = int(match["number"]) if match else 0
    return number if match and key == make_page_index_key(column, number) else None


def is_page_index(key: str) -> bool:
    """Decide whether a key is that of an index of pages, or of the places of pages."""
    return bool(re.fullmatch(_PAGE_INDEX, key) or re.fullmatch(_PAGE_LAYOUTS, key))


def _name_column(column: str) -> str:
    """Return the name of a column in a key: a digest if the column has other characters."""
    if re.fullmatch("[A-Za-z0-9_]{1,64}", column):
        return column
    return f"column_{blake2b(column.encode(), digest_size=8).hexdigest()}"


def make_seek_point_key(folder: str, cursor: int) -> str:
    """Return the key of a seek point, from the folder of its file. Keys are in order of cursors."""
    return f"{folder}/{cursor:019d}.json"


def parse_seek_point(folder: str, key: str) -> int | None:
    """Return the cursor in the key of a seek point of a file; None for other keys."""
    match = re.fullmatch(r"/([0-9]{19})\.json", key.removeprefix(folder))
    return int(match[1]) if match and key.startswith(folder) else None


@dataclass(frozen=True, slots=True)
class CommitName:
    """Name of a commit and of its shards, such as ``train-00007-000012``.

    Attributes:
        partition: Name of the partition.
        number: Number of the commit within its partition.
    """

    partition: str
    number: int

    def __str__(self) -> str:
        return f"{self.partition}-{self.number:06d}"

    @classmethod
    def parse(cls, stem: str) -> "CommitName | None":
        """Parse a name such as ``train-00007-000012``; return None for any other text."""
        match = _COMMIT_NAME.fullmatch(stem)
        return cls(match["partition"], int(match["number"])) if match else None


@dataclass(frozen=True, slots=True)
class DatasetKeys:
    """Keys of one dataset.

    Attributes:
        dataset: Name of the dataset: a prefix below the store's URL.
    """

    dataset: str

    def __post_init__(self) -> None:
        name = check_name(self.dataset, what="The dataset's name")
        taken = sorted(RESERVED_FOLDERS.intersection(name.split("/")))
        if name != self.dataset or taken:
            why = (
                f"has the folder {taken[0]!r} in it, which is reserved"
                if taken
                else "begins or ends with '/'"
            )
            raise ConfigurationError(
                f"The dataset's name {self.dataset!r} {why}: choose another name."
            )

    @property
    def plan(self) -> str:
        """Key of the plan."""
        return f"{self.dataset}/plan.json"

    @property
    def plan_removed(self) -> str:
        """Key of the marker that a plan was removed. Uncommitted shards of the plan may remain."""
        return f"{self.dataset}/plan-removed.json"

    @property
    def manifest(self) -> str:
        """Key of the manifest, which completes the dataset."""
        return f"{self.dataset}/manifest.json"

    @property
    def index(self) -> str:
        """Key of the index of the split ``train``, in the format of webdataset."""
        return f"{self.dataset}/index.json"

    @property
    def card(self) -> str:
        """Key of the record of the dataset card."""
        return f"{self.dataset}/card.json"

    @property
    def readme(self) -> str:
        """Key of the dataset card, in the format of the Hugging Face Hub."""
        return f"{self.dataset}/README.md"

    @property
    def block_digests(self) -> str:
        """Key of the digests of all blocks of all shards, in the order of the manifest."""
        return f"{self.dataset}/block_digests.bin"

    @property
    def partition_notes(self) -> str:
        """Prefix of the sample lists, seek points, indexes of tar files, and digests of files."""
        return f"{self.dataset}/partitions/"

    @property
    def transforms(self) -> str:
        """Prefix of the code, the tokenizers and the tables of transforms."""
        return f"{self.dataset}/transforms/"

    @property
    def shards(self) -> str:
        """Prefix of the shards."""
        return f"{self.dataset}/shards/"

    @property
    def commits(self) -> str:
        """Prefix of the commits."""
        return f"{self.dataset}/commits/"

    @property
    def quarantined(self) -> str:
        """Prefix of the rows that could not become samples."""
        return f"{self.dataset}/quarantine/"

    def make_sample_list_key(self, partition: str, digest: str) -> str:
        """Return the key of a partition's sample list.

        Args:
            partition: Name of the partition.
            digest: Digest of the list. The key has its first 16 digits.
        """
        return f"{self.partition_notes}{partition}-{get_hex(digest)[:16]}.jsonl"

    def make_transform_key(self, digest: str, extension: str) -> str:
        """Return the key of the code, the tokenizer or the table of a transform.

        Args:
            digest: Digest of the bytes. The key has all of its digits.
            extension: ``py``, ``json``, ``jsonl``, ``csv``, ``tsv`` or ``parquet``.
        """
        return f"{self.transforms}{get_hex(digest)}.{extension}"

    def make_seek_points_folder(self, file_index: int) -> str:
        """Return the folder of the seek points of a compressed file.

        Args:
            file_index: Index of the file in the source's listing.
        """
        return f"{self.partition_notes}{file_index:05d}"

    def make_member_index_key(self, file_index: int) -> str:
        """Return the key of the index of a tar file's members.

        Args:
            file_index: Index of the file in the source's listing.
        """
        return f"{self.partition_notes}{file_index:05d}-members.jsonl"

    def make_file_digests_key(self, name: str) -> str:
        """Return the key of the digests of a source file.

        Args:
            name: 32 hexadecimal digits that name the file, its location and its version.
        """
        return f"{self.partition_notes}digests-{name}.json"

    def is_seek_point_or_index(self, key: str) -> bool:
        """Decide whether a key is that of a seek point, or of the index of a tar file."""
        name = key.removeprefix(self.partition_notes)
        found = _SEEK_POINT.fullmatch(name) or _MEMBER_INDEX.fullmatch(name)
        return name != key and found is not None

    def is_file_digests(self, key: str) -> bool:
        """Decide whether a key is that of the digests of a source file."""
        name = key.removeprefix(self.partition_notes)
        return name != key and _FILE_DIGESTS.fullmatch(name) is not None

    def make_shards_prefix(self, shard_format: str, split: str) -> str:
        """Return the prefix of the shards of one format and split, such as ``shards/mds/train/``.

        Readers of some formats open such a prefix as a folder, with an index in it.
        """
        return f"{self.shards}{shard_format}/{split}/"

    def make_shard_key(
        self, shard_format: str, split: str, name: CommitName, extension: str, digest: str = ""
    ) -> str:
        """Return the key of a shard.

        Args:
            shard_format: Format of the shard.
            split: Split of the samples.
            name: Name of the commit.
            extension: Extension of the format.
            digest: Digest of the shard, if another run may make other bytes of the same rows. The
                key has its first 16 digits.
        """
        prefix = self.make_shards_prefix(shard_format, split)
        return f"{prefix}{name}{_make_suffix(digest)}.{extension}"

    def make_commit_key(self, name: CommitName) -> str:
        """Return the key of a commit."""
        return f"{self.make_commits_prefix(name.partition)}{name.number:06d}.json"

    def make_commits_prefix(self, partition: str) -> str:
        """Return the prefix of a partition's commits and of its end record.

        It is a folder. A local folder is always listed as a whole, and may be that of 100,000
        partitions.
        """
        return f"{self.commits}{partition}/"

    def make_end_key(self, partition: str) -> str:
        """Return the key of a partition's end record."""
        return f"{self.make_commits_prefix(partition)}end.json"

    def make_quarantine_key(self, name: CommitName, digest: str = "") -> str:
        """Return the key of the quarantined rows of a commit.

        Args:
            name: Name of the commit.
            digest: Digest of the object, if another run may quarantine other rows.
        """
        return f"{self.quarantined}{name}{_make_suffix(digest)}.jsonl"

    def parse_commit(self, key: str) -> "CommitName | None":
        """Return the name of the commit that has this key; None for other keys."""
        match = _COMMIT.fullmatch(key.removeprefix(self.commits))
        if match is None or not key.startswith(self.commits):
            return None
        return CommitName(match["partition"], int(match["number"]))

    def is_shard_or_quarantine(self, key: str) -> bool:
        """Decide whether a key is that of a shard, or of the quarantined rows of a commit."""
        stem = key.rpartition("/")[2].rpartition(".")[0]
        is_below = key.startswith((self.shards, self.quarantined))
        return is_below and _STORED_SHARD.fullmatch(stem) is not None

    def is_named_by_digest(self, key: str) -> bool:
        """Decide whether a key is that of a shard or of quarantined rows with digits of a digest.

        Several runs may store such objects for the same rows. A record names one of them.
        """
        stem = key.rpartition("/")[2].rpartition(".")[0]
        return self.is_shard_or_quarantine(key) and _COMMIT_NAME.fullmatch(stem) is None

    def is_index(self, key: str) -> bool:
        """Decide whether a key is that of an index, which readers of a format find beside shards.

        No record names an index. It is made from the manifest.
        """
        inside = key.removeprefix(f"{self.dataset}/")
        return inside != key and re.fullmatch(_INDEX, inside) is not None

    def is_own(self, key: str) -> bool:
        """Decide whether a key is that of an object or of a lease of this dataset.

        Other datasets, checkpoints of a job with the same name, and files of a user may also lie
        below its name. Files of a user may lie in its folders, too.
        """
        match = DATASET_KEY.fullmatch(key)
        is_object = match is not None and match["scope"] == self.dataset
        return is_object or is_lease_object(self.dataset, key)

    def parse_end(self, key: str) -> str | None:
        """Return the partition whose end record has this key; None for other keys."""
        match = _END.fullmatch(key.removeprefix(self.commits))
        return match["partition"] if match and key.startswith(self.commits) else None

    def is_earlier_record(self, key: str) -> bool:
        """Decide whether a key is that of a commit or an end of an earlier version of Millrace.

        That version had no folder for the records of each partition.
        """
        name = key.removeprefix(self.commits)
        return key.startswith(self.commits) and _EARLIER_RECORD.fullmatch(name) is not None
