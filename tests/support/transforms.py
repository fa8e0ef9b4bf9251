"""A tokenizer, a source in memory, and its rows through transforms."""

import json
import secrets
from functools import lru_cache

from millrace.datasets.sources import (
    Division,
    SourceSettings,
    open_files,
    open_source,
    partition_source,
)
from millrace.datasets.transforms import TransformedSource, open_transforms, record_transforms
from millrace.keys.datasets import DatasetKeys
from millrace.storage import create, open_store, put
from millrace.testing.byte_level import train_byte_level

KEYS = DatasetKeys("d")


@lru_cache
def train_tokenizer(vocabulary: int = 400) -> bytes:
    """Return the tokenizer.json of a byte-level BPE that was trained on a few words."""
    texts = ["the quick brown fox jumps over the lazy dog", "a mill race turns the mill wheel"]
    return train_byte_level(texts, vocabulary).encode()


def open_rows(lines, transforms, *, columns=None, partition_bytes=1 << 20, seed=0, json_check=None):
    """Write lines as a file of JSON lines, and open them through transforms.

    Returns:
        The source with its transforms, and the ranges of its partitions in the source's order.
    """
    store = open_store(f"memory://{secrets.token_hex(8)}")
    dataset = open_store(f"memory://{secrets.token_hex(8)}")
    put(store, "0.jsonl", "".join(f"{line}\n" for line in lines).encode())
    settings = SourceSettings(columns=columns)
    division = Division(partition_bytes, 10_000, None, 0.0)
    partitioned = partition_source(settings, open_files(store.spec), KEYS, division)
    committed = record_transforms(transforms, KEYS, seed=seed)
    for key, body in committed.objects.items():
        create(dataset, key, body)
    record = json.loads(json.dumps(committed.record))  # as a plan has it
    source = open_source(partitioned.record, open_files(store.spec), dataset)
    chain = open_transforms(record, dataset)
    ranges = [partition.source_range for partition in partitioned.partitions]
    return TransformedSource(source, chain, json_check), ranges


def read_rows(lines, transforms, **options):
    """Return the rows of lines through transforms."""
    source, ranges = open_rows(lines, transforms, **options)
    return [row for each in ranges for row in source.iterate_rows(each, 0)]
