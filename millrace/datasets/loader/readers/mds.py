"""Samples of MDS shards, as `millrace.datasets.formats.mds` writes them."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.datasets.field_names import KEY
from millrace.datasets.formats import Fields, FieldType
from millrace.datasets.loader.fetch import OpenShard
from millrace.datasets.loader.readers.base import DECODERS, decode_uint16, decode_uint32
from millrace.datasets.loader.readers.litdata import decode_float64, decode_int64
from millrace.datasets.loader.readers.offset_table import OffsetTableReader, StoredColumn

_FIXED_SIZE = 8  # bytes of an integer and of a float


def _skip_shape(data: memoryview) -> memoryview:
    """Return an array's bytes after its shape: one axis, with a length of 1, 2, 4 or 8 bytes.

    Raises:
        ValueError: The array has another number of axes.
    """
    if not data or data[0] >> 2 != 1:
        raise ValueError("an array has not one axis")
    return data[1 + (1 << (data[0] & 3)) :]


def _decode_uint16_array(data: memoryview) -> npt.NDArray[np.uint16]:
    return decode_uint16(_skip_shape(data))


def _decode_uint32_array(data: memoryview) -> npt.NDArray[np.uint32]:
    return decode_uint32(_skip_shape(data))


_DECODERS: Mapping[FieldType, Callable[[memoryview], Any]] = {
    **DECODERS,
    FieldType.INT: decode_int64,
    FieldType.FLOAT: decode_float64,
    FieldType.UINT16_ARRAY: _decode_uint16_array,
    FieldType.UINT32_ARRAY: _decode_uint32_array,
}


class MDSSampleReader(OffsetTableReader):
    """Reader of the samples of an MDS shard.

    Args:
        shard: Bytes of the shard.
        fields: Types of the fields.
        samples: Number of samples of the shard.
    """

    def __init__(self, shard: OpenShard, fields: Fields, samples: int) -> None:
        columns = [
            StoredColumn(
                name,
                _DECODERS[kind],
                _FIXED_SIZE if kind in {FieldType.INT, FieldType.FLOAT} else None,
            )
            for name, kind in sorted({**fields, KEY: FieldType.STR}.items())
        ]
        super().__init__(shard, columns, samples)
