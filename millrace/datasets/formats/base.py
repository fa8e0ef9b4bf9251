"""Interface of a format. A format encodes samples as the bytes of a shard."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Protocol, runtime_checkable

from millrace.datasets.sample import LargeFile, RowBatch, Sample
from millrace.keys.datasets import DatasetKeys
from millrace.schemas.dataset import ManifestShard


class BadSampleError(Exception):
    """The format cannot hold a sample. The message is the reason for the quarantine."""


class FieldType(StrEnum):
    """Type of a field, in the formats whose fields have types.

    Sources give every field as bytes: text in UTF-8, numbers and other values as JSON, arrays of
    tokens as little-endian integers.
    """

    BYTES = "bytes"
    STR = "str"
    JSON = "json"
    INT = "int"
    FLOAT = "float"
    UINT16_ARRAY = "uint16[]"
    UINT32_ARRAY = "uint32[]"


_TYPES: Mapping[str, FieldType] = {
    **dict.fromkeys(("text", "transcript", "txt"), FieldType.STR),
    **dict.fromkeys(("jsn", "json"), FieldType.JSON),
    **dict.fromkeys(("class", "cls", "cls2", "count", "id", "index", "inx"), FieldType.INT),
}


def guess_type(name: str) -> FieldType:
    """Return the type of a field by its extension, as webdataset decodes it: most are bytes."""
    return _TYPES.get(name.rpartition(".")[2].lower(), FieldType.BYTES)


def is_json(name: str, types: Mapping[str, str]) -> bool:
    """Decide whether a field is JSON.

    Args:
        name: Name of the field.
        types: Types of fields, by their names. Others have the types of their extensions.
    """
    return types.get(name, guess_type(name)) == FieldType.JSON


Fields = Mapping[str, FieldType]
"""Types of the fields of every sample, by their names, in the order of the names."""


class ShardEncoder(Protocol):
    """Encoder of one shard at a time, into a buffer of its own.

    A sample is added in two steps, so that several formats take the same samples.

    Attributes:
        samples: Number of samples in the shard.
    """

    samples: int

    @property
    def sample_offsets(self) -> Sequence[tuple[int, int]]:
        """Number and offset of some samples, for readers that begin in the middle of a shard.

        Empty if a shard has its own table.
        """
        ...

    @property
    def size(self) -> int:
        """Bytes of the shard if it were closed now.

        A format that compresses counts the bytes before compression.
        """
        ...

    def prepare(self, sample: Sample) -> int:
        """Prepare a sample, and return the size that the shard would have with the sample.

        The shard is not changed. A later call replaces the sample.

        Raises:
            BadSampleError: The format cannot hold the sample.
        """
        ...

    def append(self) -> None:
        """Append the sample that was prepared last."""
        ...

    def close(self) -> memoryview:
        """Finish the shard, and return a view of its bytes. `reset` makes the view invalid.

        Further calls return the same bytes.
        """
        ...

    def reset(self) -> None:
        """Begin the next shard in the same buffer, and free the memory of a large sample."""
        ...


@runtime_checkable
class BatchEncoder(ShardEncoder, Protocol):
    """Encoder that also takes many samples at once, at a fraction of the cost."""

    def prepare_batch(self, batch: RowBatch) -> Sequence[int]:
        """Prepare samples, and return the largest size of the shard up to each of them.

        The shard is not changed. A later call of this method or of `prepare` replaces the samples.

        Raises:
            BadSampleError: The format cannot hold one of the samples. `prepare` finds which one.
        """
        ...

    def append_batch(self, count: int) -> None:
        """Append the first samples of those that were prepared last."""
        ...


class ShardFormat(Protocol):
    """Format of shards.

    Attributes:
        name: Name of the format, as settings and manifests have it.
        extension: Extension of a shard's name.
        writer: Versions of the code that decides the bytes. A change of the bytes changes them.
        has_types: Whether all samples have the same fields, each of one type.
    """

    name: str
    extension: str
    writer: Mapping[str, str]
    has_types: bool

    def make_encoder(self, fields: Fields, capacity: int) -> ShardEncoder:
        """Return an encoder.

        Args:
            fields: Types of the fields; empty for a format without types.
            capacity: Initial bytes of the buffer.
        """
        ...

    def make_indexes(
        self, keys: DatasetKeys, fields: Fields, shards: Sequence[ManifestShard]
    ) -> Mapping[str, bytes]:
        """Return the objects that readers of the format need beside the shards, by their keys.

        Args:
            keys: Names of the dataset.
            fields: Types of the fields; empty for a format without types.
            shards: Shards of this format, in the order of their keys.
        """
        ...


def group_shards(
    keys: DatasetKeys, shard_format: str, shards: Iterable[ManifestShard]
) -> Iterator[tuple[str, list[tuple[str, ManifestShard]]]]:
    """Yield the prefix of each split, with the names of the shards below it, and the shards.

    Raises:
        ValueError: A shard is not below the prefix of its split.
    """
    splits: dict[str, list[ManifestShard]] = {}
    for shard in shards:
        splits.setdefault(shard.split, []).append(shard)
    for split, own in splits.items():
        prefix = keys.make_shards_prefix(shard_format, split)
        for shard in own:
            if not shard.key.startswith(prefix):
                raise ValueError(f"The shard {shard.key} is not below {prefix}.")
        yield prefix, [(shard.key.removeprefix(prefix), shard) for shard in own]


def read_field(data: bytes | LargeFile) -> bytes:
    """Return the bytes of a field, all in memory.

    Raises:
        ChangedError: The file has changed since it was listed.
        ValueError: The file has another size.
    """
    if not isinstance(data, LargeFile):
        return data
    body = b"".join(data.blocks())
    if len(body) != data.size:
        raise ValueError(f"A file of {data.size} bytes gave {len(body)}.")
    return body


def copy_file(file: LargeFile, into: memoryview) -> None:
    """Copy the blocks of a large file into memory of its size.

    Raises:
        ChangedError: The file has changed since it was listed.
        ValueError: The file has another size.
    """
    at = 0
    for block in file.blocks():
        if at + len(block) > len(into):
            raise ValueError(f"A file of {len(into)} bytes gave more.")
        into[at : at + len(block)] = block
        at += len(block)
    if at != len(into):
        raise ValueError(f"A file of {len(into)} bytes gave {at}.")
