"""Samples from the files of a folder or prefix, which are divided by lists of samples."""

from array import array
from collections.abc import Iterator, Mapping, Sequence

from millrace import errors
from millrace.datasets.sample import BadRow, LargeFile, Row, Sample
from millrace.datasets.sources.base import Division, PartitionedSource
from millrace.datasets.sources.files import SourceFiles, drop_etag, read_ahead
from millrace.datasets.sources.ranges import make_partition, shuffle
from millrace.datasets.sources.sample_table import (
    SampleFiles,
    SampleTable,
    decode_sample_list,
    encode_sample_list,
)
from millrace.datasets.sources.table import FileTable
from millrace.digest import compute_digest
from millrace.keys.datasets import DatasetKeys, make_partition_name
from millrace.schemas.dataset import FileRef, Partition, SampleList, SourceRange, SourceRecord
from millrace.storage import Store, read

MAX_SAMPLE_LIST_BYTES = 64 << 20
"""Largest sample list of a partition, in bytes. A list of 10,000 files has 1 to 15 MiB."""
MAX_SAMPLE_BYTES = 1 << 30
"""Largest sample, in bytes: as large as a shard can be."""
LARGE_SAMPLE_BYTES = 32 * 1024 * 1024
"""Bytes above which the files of a sample are read block by block during the encoding. The files
of smaller samples are read ahead: whole, and several at once."""


def partition_folder(
    record: SourceRecord, files: FileTable, keys: DatasetKeys, division: Division, *, local: bool
) -> PartitionedSource:
    """Divide the samples of a folder or prefix into partitions.

    Args:
        record: The source.
        files: Files of the source. The table is packed again, in place.
        keys: Names of the dataset.
        division: Settings of the division.
        local: Whether the files are in a folder of this machine.

    Raises:
        ConfigurationError: A sample or a partition's list of samples is too large.
    """
    samples = SampleTable(files, local=local)
    partitions: list[Partition] = []
    indices_by_key: dict[str, Sequence[int]] = {}
    for split, order in _assign_samples(samples, division).items():
        divided = _divide_samples(
            samples, order, division.partition_bytes, division.partition_files
        )
        for number, indices in enumerate(divided):
            sample_list = encode_sample_list(samples[index] for index in indices)
            if len(sample_list) > MAX_SAMPLE_LIST_BYTES:
                raise errors.ConfigurationError(
                    f"The names of {len(indices)} samples of {split} take {len(sample_list):,} "
                    f"bytes. The limit for a partition is {MAX_SAMPLE_LIST_BYTES:,}. Choose a "
                    "smaller `partition_files`."
                )
            digest = compute_digest(sample_list)
            key = keys.make_sample_list_key(make_partition_name(split, number), digest)
            size = sum(samples.sizes[index] for index in indices)
            source_range = SampleList(listing=key, digest=digest, samples=len(indices), size=size)
            indices_by_key[key] = indices
            partitions.append(make_partition(split, number, source_range))
    lists = _LazySampleLists(samples, indices_by_key)
    return PartitionedSource(record, tuple(partitions), lists, max(samples.sizes, default=0))


class _LazySampleLists(Mapping[str, bytes]):
    """Sample lists of the partitions of a source of many files, each made on access.

    Args:
        samples: Samples of the source.
        indices: Indices of each list's samples, by the key of the list.
    """

    def __init__(self, samples: SampleTable, indices: Mapping[str, Sequence[int]]) -> None:
        self._samples, self._indices = samples, indices

    def __getitem__(self, key: str) -> bytes:
        return encode_sample_list(self._samples[index] for index in self._indices[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)


class FolderSource:
    """The samples of a folder or prefix.

    Args:
        files: Files of the source.
        dataset_store: Store of the partitions' sample lists.
        any_version: Whether a file is also read if it was written again after the plan was made.
    """

    def __init__(
        self, files: SourceFiles, dataset_store: Store, *, any_version: bool = False
    ) -> None:
        self._any_version = any_version
        self._files = files
        self._dataset_store = dataset_store

    def iterate_rows(self, source_range: SourceRange, cursor: int) -> Iterator[Row]:
        """Yield the samples of a source range from number `cursor` on.

        The files of a sample of more than 32 MiB are `LargeFile`: the encoder reads their blocks.
        """
        if not isinstance(source_range, SampleList):
            raise errors.ConfigurationError(
                f"A folder is divided by files, not {source_range.kind}."
            )
        body = read(self._dataset_store, source_range.listing, max_size=MAX_SAMPLE_LIST_BYTES)
        if compute_digest(body) != source_range.digest:
            raise errors.CorruptError(
                f"{self._dataset_store.make_url(source_range.listing)} does not have the digest "
                "of the plan: another program has written under this dataset's name. Shard the "
                "source under another name."
            )
        samples = decode_sample_list(body)[cursor:]
        if self._any_version:
            samples = [s._replace(files=tuple(map(drop_etag, s.files))) for s in samples]
        small_files = (
            file
            for sample in samples
            if not sample.reason
            for file in sample.files
            if not _is_large(sample, file)
        )
        contents = read_ahead(self._files, small_files)
        for next_cursor, sample in enumerate(samples, start=cursor + 1):
            if sample.reason:
                names = ", ".join(file.path for file in sample.files)
                yield BadRow(names, sample.reason, b"", next_cursor)
            else:
                data = [
                    self._make_large_file(file) if _is_large(sample, file) else next(contents)
                    for file in sample.files
                ]
                fields = dict(zip(sample.extensions, data, strict=True))
                yield Sample(sample.key, fields, next_cursor)

    def _make_large_file(self, file: FileRef) -> LargeFile:
        return LargeFile(file.size, lambda: self._files.iterate_blocks(file, 0, file.size))


def _is_large(sample: SampleFiles, file: FileRef) -> bool:
    """Return whether a file is read block by block. An empty file has no block to check."""
    return file.size > 0 and sample.size > LARGE_SAMPLE_BYTES


def _assign_samples(samples: SampleTable, division: Division) -> dict[str, "array[int]"]:
    for index, size in enumerate(samples.sizes):
        if size > MAX_SAMPLE_BYTES:
            raise errors.ConfigurationError(
                f"{samples[index].files[0].path}: a sample of {size} bytes is larger than a shard "
                f"can be ({MAX_SAMPLE_BYTES} bytes). Leave it out with exclude, or divide it."
            )
    order = array("I", range(len(samples)))
    shuffle(order, division.seed)
    wanted = round(sum(samples.sizes) * division.holdout)
    held_out = array("I")
    while wanted > 0:
        held_out.append(order.pop())
        wanted -= samples.sizes[held_out[-1]]
    return {"train": order, "val": held_out}


def _divide_samples(
    samples: SampleTable, order: "array[int]", size: int, files: int
) -> Iterator["array[int]"]:
    """Yield the samples of each partition, in order: about `size` bytes or `files` files."""
    begin = bytes_left = files_left = 0
    for position, index in enumerate(order):
        if bytes_left <= 0 or files_left <= 0:
            if position:
                yield order[begin:position]
            begin, bytes_left, files_left = position, size, files
        bytes_left -= samples.sizes[index]
        files_left -= samples.count_files(index)
    if order:
        yield order[begin:]
