"""Batches of rows that the library `datasets` reads."""

import mmap
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa

from millrace.datasets.sources.hub_dataset import HubDataset
from millrace.hub import HubSpec

MIB = 1 << 20


def make_dataset(rows):
    return HubDataset(HubSpec(repo="a/b"), "arrow", "train", ("a.arrow",), 0, rows)


def test_chunks_that_arrow_cannot_join_are_batches_of_their_own():
    size = 1100 * MIB
    data = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # no page is used
    offsets = np.array([0, size], np.int32)
    values = pa.Array.from_buffers(
        pa.binary(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
    chunk = pa.StructArray.from_arrays([values], ["data"])
    table = pa.table({"part": pa.chunked_array([chunk, chunk])})
    rows = SimpleNamespace(features=None, n_shards=1, iter=lambda batch_size: iter([table]))
    rows.shard = lambda **_: rows
    rows.with_format = lambda _: rows
    batches = list(make_dataset(rows).iterate_batches(0, 0, {"bin": "part.data"}))
    assert [batch.nbytes >> 20 for batch in batches] == [1100, 1100]


def test_large_rows_of_bytes_are_read_one_at_a_time():
    read = []

    def generate():
        for number in range(300):
            read.append(number)
            yield {"data": bytes([number % 256]) * (MIB if number < 10 else 8)}

    rows = datasets.IterableDataset.from_generator(
        generate, features=datasets.Features({"data": datasets.Value("binary")})
    )
    batches = make_dataset(rows).iterate_batches(0, 3, {"bin": "data"})
    for number in range(3, 10):
        assert next(batches)["data"].to_pylist() == [bytes([number]) * MIB]
        assert len(read) <= number + 2
    sizes = [batch.num_rows for batch in batches]
    assert sizes == [100, 100, 90]
