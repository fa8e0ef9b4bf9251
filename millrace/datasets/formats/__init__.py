"""Formats of shards."""

from enum import StrEnum

from millrace.datasets.formats.base import (
    BadSampleError,
    BatchEncoder,
    Fields,
    FieldType,
    ShardEncoder,
    ShardFormat,
)

__all__ = [
    "BadSampleError",
    "BatchEncoder",
    "FieldType",
    "Fields",
    "FormatName",
    "ShardEncoder",
    "ShardFormat",
    "open_format",
]


class FormatName(StrEnum):
    """Format of shards."""

    WEBDATASET = "webdataset"
    LITDATA = "litdata"
    MDS = "mds"
    PARQUET = "parquet"
    PAGES = "pages"
    TOKENS = "tokens"


def open_format(name: str) -> ShardFormat:
    """Return a format by its name. What it needs is imported only now.

    Raises:
        ValueError: There is no such format.
    """
    match FormatName(name):
        case FormatName.WEBDATASET:
            from millrace.datasets.formats.webdataset import WebDatasetFormat as Format
        case FormatName.LITDATA:
            from millrace.datasets.formats.litdata import LitDataFormat as Format
        case FormatName.MDS:
            from millrace.datasets.formats.mds import MDSFormat as Format
        case FormatName.PARQUET:
            from millrace.datasets.formats.parquet import ParquetFormat as Format
        case FormatName.PAGES:
            from millrace.datasets.formats.parquet import PagesFormat as Format
        case FormatName.TOKENS:
            from millrace.datasets.formats.tokens import TokensFormat as Format
    return Format()
