"""Samples of LitData chunks, as `millrace.datasets.formats.litdata` writes them."""

import struct
from collections.abc import Callable, Mapping
from typing import Any

from millrace.datasets.field_names import KEY
from millrace.datasets.formats import Fields, FieldType
from millrace.datasets.loader.fetch import OpenShard
from millrace.datasets.loader.readers.base import DECODERS, decode_text
from millrace.datasets.loader.readers.offset_table import OffsetTableReader, StoredColumn

_INT, _FLOAT = struct.Struct("<q"), struct.Struct("<d")


def decode_int64(data: memoryview) -> int:
    """Return an integer of 8 bytes."""
    return _INT.unpack(data)[0]


def decode_float64(data: memoryview) -> float:
    """Return a number of 8 bytes."""
    return _FLOAT.unpack(data)[0]


_DECODERS: Mapping[FieldType, Callable[[memoryview], Any]] = {
    **DECODERS,
    FieldType.INT: decode_int64,
    FieldType.FLOAT: decode_float64,
}


class LitDataSampleReader(OffsetTableReader):
    """Reader of the samples of a LitData chunk.

    Args:
        shard: Bytes of the shard.
        fields: Types of the fields.
        samples: Number of samples of the shard.
    """

    def __init__(self, shard: OpenShard, fields: Fields, samples: int) -> None:
        columns = [StoredColumn(name, _DECODERS[kind]) for name, kind in sorted(fields.items())]
        super().__init__(shard, [*columns, StoredColumn(KEY, decode_text)], samples)
