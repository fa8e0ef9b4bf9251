"""The format LitData: a shard is a chunk that ``litdata.StreamingDataset`` reads.

A chunk has the layout of litdata's ``PyTreeLoader``, without compression. Each split is a folder
with an ``index.json``. A sample is read as a dict of its fields and of ``__key__``. The bytes of a
chunk are those of litdata's own ``BinaryWriter`` for the same samples, where that writer does not
choose its other layout (Arrow).
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from millrace.datasets.field_names import KEY
from millrace.datasets.formats.base import BadSampleError, Fields, FieldType, group_shards
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
    encode_text,
    keep_array,
    keep_bytes,
)
from millrace.digest import compute_digest, dump_canonical_json, get_hex
from millrace.keys.datasets import DatasetKeys
from millrace.schemas.dataset import ManifestShard

_COLUMNS: Mapping[FieldType, tuple[str, FieldEncoder]] = {
    # The serializer "bytes" of litdata 0.2.76 gives a view of its own memory, which neither a
    # process of a DataLoader nor its default collate function can send on.
    FieldType.BYTES: ("file", keep_bytes),
    FieldType.STR: ("str", encode_text),
    FieldType.JSON: ("str", encode_text),
    FieldType.INT: ("int", encode_int64),
    FieldType.FLOAT: ("float", encode_float64),
    # The numbers are those of litdata's _NUMPY_DTYPES_MAPPING.
    FieldType.UINT16_ARRAY: ("no_header_numpy:5", partial(keep_array, item_size=2)),
    FieldType.UINT32_ARRAY: ("no_header_numpy:6", partial(keep_array, item_size=4)),
}
"""Serializer of litdata for each type, and the function that makes its bytes."""

_ARROW_FOOTER_END = b"LDARW01\0"


class LitDataFormat:
    """LitData. Every sample has the same fields, each of one type.

    Fields of type ``json`` are read as text, and arrays as one-dimensional arrays of numpy.
    """

    name = "litdata"
    extension = "bin"
    writer: Mapping[str, str] = {"litdata": "pytree-1"}
    has_types = True

    def make_encoder(self, fields: Fields, capacity: int) -> OffsetTableEncoder:
        """Return an encoder of chunks.

        Raises:
            ConfigurationError: A field is named ``__key__``.
        """
        check_names(fields, self.name)
        columns = [Column(name, _COLUMNS[kind][1]) for name, kind in sorted(fields.items())]
        # The key is last. So no field can end a chunk with the mark of an Arrow footer, which
        # readers would take for the samples.
        key = Column(KEY, _encode_key)
        return OffsetTableEncoder([*columns, key], header=b"", capacity=capacity)

    def make_indexes(
        self, keys: DatasetKeys, fields: Fields, shards: Sequence[ManifestShard]
    ) -> dict[str, bytes]:
        """Return an ``index.json`` for each split.

        Readers keep chunks in a cache by the URL and by ``updated_at``. So ``updated_at`` is a
        digest of the shards.
        """
        return {
            f"{prefix}index.json": _make_index(fields, named)
            for prefix, named in group_shards(keys, self.name, shards)
        }


def _make_index(fields: Fields, named: Sequence[tuple[str, ManifestShard]]) -> bytes:
    config = {
        "chunk_bytes": max(shard.size for _, shard in named),
        "chunk_size": None,
        "compression": None,
        "compression_batch_size": None,
        "compression_level": None,
        "data_format": [*(_COLUMNS[kind][0] for _, kind in sorted(fields.items())), "str"],
        "data_spec": _make_data_spec([*sorted(fields), KEY]),
        "encryption": None,
        "ipc_compression": None,
        "item_loader": "PyTreeLoader",
        "types": None,
    }
    chunks = [
        {
            "chunk_bytes": shard.size,
            "chunk_size": shard.samples,
            "dim": None,
            "filename": name,
        }
        for name, shard in named
    ]
    digests = [shard.digest for _, shard in named]
    content = dump_canonical_json({"chunks": chunks, "config": config, "digests": digests})
    updated_at = get_hex(compute_digest(content))[:16]
    return dump_canonical_json({"chunks": chunks, "config": config, "updated_at": updated_at})


def _make_data_spec(names: Sequence[str]) -> str:
    """Return the structure of a sample, a dict, as PyTorch's ``treespec_dumps`` does."""
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    root: dict[str, Any] = {
        "type": "builtins.dict",
        "context": json.dumps(names),
        "children_spec": [leaf] * len(names),
    }
    return json.dumps([1, root])


def _encode_key(data: FieldData) -> bytes:
    key = encode_text(data)
    if key.endswith(_ARROW_FOOTER_END):
        raise BadSampleError("ends with the mark of an Arrow footer")
    return key
