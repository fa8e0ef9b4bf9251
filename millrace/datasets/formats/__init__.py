"""Formats of shards."""

from enum import StrEnum

from millrace.datasets.formats.base import (
    BadSampleError,
    Fields,
    FieldType,
    ShardEncoder,
    ShardFormat,
)
from millrace.datasets.formats.webdataset import WebDatasetFormat

__all__ = [
    "BadSampleError",
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


def open_format(name: str) -> ShardFormat:
    """Return a format by its name.

    Raises:
        ValueError: There is no such format.
    """
    match FormatName(name):
        case FormatName.WEBDATASET:
            return WebDatasetFormat()
