"""The format MDS: a shard is one that ``streaming.StreamingDataset`` (MosaicML) reads.

Each split is a folder with an ``index.json`` (version 2). A sample is read as a dict of its fields
and of ``__key__``. The bytes of a shard are those of streaming's own ``MDSWriter(size_limit=None)``
for the same columns. That writer refuses empty arrays, which its reader can read.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from millrace.datasets.field_names import KEY
from millrace.datasets.formats.base import Fields, FieldType, group_shards, read_field
from millrace.datasets.formats.offset_table import (
    Column,
    OffsetTableEncoder,
    check_names,
)
from millrace.datasets.formats.typed_fields import (
    FieldData,
    FieldEncoder,
    encode_float64,
    encode_int64,
    encode_json,
    encode_text,
    keep_array,
    keep_bytes,
)
from millrace.keys.datasets import DatasetKeys
from millrace.schemas.dataset import ManifestShard


def _encode_array(data: FieldData, item_size: int) -> bytes:
    """Return an array after its shape: the number of axes, the width of a length, the lengths."""
    array = read_field(keep_array(data, item_size))
    length = len(array) // item_size
    width = next(code for code in range(4) if length < 1 << (8 << code))
    return struct.pack("<B" + "BHIQ"[width], 1 << 2 | width, length) + array


_COLUMNS: Mapping[FieldType, tuple[str, FieldEncoder]] = {
    FieldType.BYTES: ("bytes", keep_bytes),
    FieldType.STR: ("str", encode_text),
    FieldType.JSON: ("json", encode_json),
    FieldType.INT: ("int", encode_int64),
    FieldType.FLOAT: ("float64", encode_float64),
    FieldType.UINT16_ARRAY: ("ndarray:uint16", partial(_encode_array, item_size=2)),
    FieldType.UINT32_ARRAY: ("ndarray:uint32", partial(_encode_array, item_size=4)),
}
"""Encoding of MDS for each type, and the function that makes its bytes."""
_FIXED_SIZE = 8  # bytes of an integer and of a float, whose sizes samples do not have
_FIXED = {FieldType.INT, FieldType.FLOAT}


class MDSFormat:
    """MDS. Every sample has the same fields, each of one type.

    Fields of type ``json`` are read as the value, and arrays as one-dimensional arrays of numpy.
    """

    name = "mds"
    extension = "mds"
    writer: Mapping[str, str] = {"mds": "version-2-1"}
    has_types = True

    def make_encoder(self, fields: Fields, capacity: int) -> OffsetTableEncoder:
        """Return an encoder of shards.

        Raises:
            ConfigurationError: A field is named ``__key__``.
        """
        check_names(fields, self.name)
        columns = [
            Column(name, _COLUMNS[kind][1], has_size=kind not in _FIXED)
            for name, kind in _list_columns(fields)
        ]
        header = json.dumps(_make_config(fields), sort_keys=True).encode()
        return OffsetTableEncoder(columns, header=header, capacity=capacity)

    def make_indexes(
        self, keys: DatasetKeys, fields: Fields, shards: Sequence[ManifestShard]
    ) -> dict[str, bytes]:
        """Return an ``index.json`` for each split, without digests.

        Readers can check XXH3, MD5 or SHA digests of whole shards, which Millrace does not make.
        """
        config = _make_config(fields)
        return {
            f"{prefix}index.json": _make_index(config, named)
            for prefix, named in group_shards(keys, self.name, shards)
        }


def _make_index(config: Mapping[str, Any], named: Sequence[tuple[str, ManifestShard]]) -> bytes:
    shards: list[dict[str, Any]] = [
        {
            **config,
            "raw_data": {"basename": name, "bytes": shard.size, "hashes": {}},
            "samples": shard.samples,
            "zip_data": None,
        }
        for name, shard in named
    ]
    return json.dumps({"version": 2, "shards": shards}, sort_keys=True).encode()


def _make_config(fields: Fields) -> dict[str, Any]:
    """Return the part of a shard's header that is also in the index."""
    columns = _list_columns(fields)
    return {
        "column_encodings": [_COLUMNS[kind][0] for _, kind in columns],
        "column_names": [name for name, _ in columns],
        "column_sizes": [_FIXED_SIZE if kind in _FIXED else None for _, kind in columns],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": None,
        "version": 2,
    }


def _list_columns(fields: Fields) -> list[tuple[str, FieldType]]:
    """Return the columns in the order of their names, as `MDSWriter` has them."""
    return sorted({**fields, KEY: FieldType.STR}.items())
