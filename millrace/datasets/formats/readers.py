"""Readers of other projects that open the shards of each format.

The table in docs/guides/datasets.md is generated from these facts, and
tests/integration/datasets/formats/test_reader_table.py reads shards with each of these readers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from millrace.datasets.formats import FormatName


@dataclass(frozen=True, slots=True)
class ShardReader:
    """ShardReader of a format.

    Attributes:
        call: Call that opens the shards of a split. FOLDER is the folder of the split, and SHARD
            the path of a shard.
        package: Package of PyPI with the reader; empty if any program can have one.
    """

    call: str
    package: str


@dataclass(frozen=True, slots=True)
class FormatReaders:
    """Readers of a format.

    Attributes:
        shards: Description of the shards.
        readers: Readers that open the shards.
    """

    shards: str
    readers: tuple[ShardReader, ...]


_LITDATA = ShardReader("litdata.StreamingDataset(FOLDER)", "litdata")
_PARQUET = (
    ShardReader('datasets.load_dataset("parquet", data_files="FOLDER/*.parquet")', "datasets"),
    ShardReader("pyarrow.parquet.ParquetFile(SHARD)", "pyarrow"),
)

READERS: Mapping[FormatName, FormatReaders] = {
    FormatName.WEBDATASET: FormatReaders(
        "tar",
        (
            ShardReader("webdataset.WebDataset([SHARD, ...])", "webdataset"),
            ShardReader(
                'datasets.load_dataset("webdataset", data_files="FOLDER/*.tar")', "datasets"
            ),
        ),
    ),
    FormatName.LITDATA: FormatReaders("LitData chunks", (_LITDATA,)),
    FormatName.MDS: FormatReaders(
        "MDS", (ShardReader("streaming.StreamingDataset(local=FOLDER)", "mosaicml-streaming"),)
    ),
    FormatName.PARQUET: FormatReaders(
        "parquet, pages of 100 rows with an index and checksums", _PARQUET
    ),
    FormatName.PAGES: FormatReaders(
        "parquet with a column `text`, and an index of the rows",
        (*_PARQUET, ShardReader("loaders of Templar's pages", "s3fs")),
    ),
    FormatName.TOKENS: FormatReaders(
        "`.npy` of tokens, with the ends and ids of the samples",
        (ShardReader('numpy.load(SHARD, mmap_mode="r")', "numpy"),),
    ),
}
"""Readers of each format."""
