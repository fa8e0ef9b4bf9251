"""Readers of shards for trainers, one for each format.

All readers give the same values for the same samples, by the types of the fields in the manifest:

- ``bytes`` and ``str`` are `bytes` and `str`; ``int`` and ``float`` are `int` and `float`;
- ``json`` is the parsed value;
- ``uint16[]`` and ``uint32[]`` are arrays of numpy of one dimension, which may be written to.

``__key__`` is the key of the sample. A field that a sample does not have is left out. Token shards
have neither keys nor other fields than the tokens.
"""

from millrace.datasets.formats import FormatName
from millrace.datasets.loader.fetch import OpenShard
from millrace.datasets.loader.readers.base import DecodeRows, SampleReader
from millrace.datasets.loader.shard_table import ListedShard, ShardTable
from millrace.schemas.dataset import decode_sample_offsets

__all__ = ["DecodeRows", "SampleReader", "open_reader"]


def open_reader(table: ShardTable, listed: ListedShard, shard: OpenShard) -> SampleReader:
    """Return the reader of an open shard. Libraries of a format are imported only now.

    Args:
        table: Table of the shard.
        listed: Shard in the table.
        shard: Bytes of the shard.

    Raises:
        CorruptError: The shard is not one of its format, or has another number of samples.
    """
    match table.format:
        case FormatName.WEBDATASET:
            from millrace.datasets.loader.readers.webdataset import TarSampleReader

            if listed.sample_offsets:
                known = decode_sample_offsets(listed.sample_offsets, listed.samples, listed.size)
                table.offsets.add_shard(shard.name, known)
            return TarSampleReader(
                shard, table.fields, listed.samples, decode=table.decode, offsets=table.offsets
            )
        case FormatName.LITDATA:
            from millrace.datasets.loader.readers.litdata import LitDataSampleReader as Reader
        case FormatName.MDS:
            from millrace.datasets.loader.readers.mds import MDSSampleReader as Reader
        case FormatName.PARQUET | FormatName.PAGES:
            from millrace.datasets.loader.readers.parquet import ParquetSampleReader as Reader
        case FormatName.TOKENS:
            from millrace.datasets.loader.readers.tokens import TokensSampleReader as Reader
    return Reader(shard, table.fields, listed.samples)
