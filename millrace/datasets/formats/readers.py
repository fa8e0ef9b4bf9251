"""Readers of other projects that open the shards of each format.

The table in docs/guides/datasets.md is generated from these facts, and
tests/integration/datasets/formats/test_reader_table.py reads shards with each of these readers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from millrace.datasets.formats import FormatName


@dataclass(frozen=True, slots=True)
class Reader:
    """Reader of a format.

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
    readers: tuple[Reader, ...]


_LITDATA = Reader("litdata.StreamingDataset(FOLDER)", "litdata")
_PARQUET = (
    Reader('datasets.load_dataset("parquet", data_files="FOLDER/*.parquet")', "datasets"),
    Reader("pyarrow.parquet.ParquetFile(SHARD)", "pyarrow"),
)

READERS: Mapping[FormatName, FormatReaders] = {
    FormatName.WEBDATASET: FormatReaders(
        "tar",
        (
            Reader("webdataset.WebDataset([SHARD, ...])", "webdataset"),
            Reader('datasets.load_dataset("webdataset", data_files="FOLDER/*.tar")', "datasets"),
        ),
    ),
    FormatName.LITDATA: FormatReaders("LitData chunks", (_LITDATA,)),
    FormatName.MDS: FormatReaders(
        "MDS", (Reader("streaming.StreamingDataset(local=FOLDER)", "mosaicml-streaming"),)
    ),
    FormatName.PARQUET: FormatReaders(
        "parquet, pages of 100 rows with an index and checksums", _PARQUET
    ),
    FormatName.PAGES: FormatReaders(
        "parquet with a column `text`, and an index of the rows",
        (*_PARQUET, Reader("loaders of Templar's pages", "s3fs")),
    ),
    FormatName.TOKENS: FormatReaders(
        "`.npy` of tokens, with the ends and ids of the samples",
        (Reader('numpy.load(SHARD, mmap_mode="r")', "numpy"),),
    ),
}
"""Readers of each format."""
