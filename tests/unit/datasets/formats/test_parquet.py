import hashlib
import io
import json
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, islice
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from millrace import errors
from millrace.datasets.formats import parquet as parquet_format
from millrace.datasets.formats.base import BadSampleError, Fields, FieldType, ShardFormat
from millrace.datasets.formats.parquet import PagesFormat, ParquetEncoder, ParquetFormat
from millrace.datasets.sample import LargeFile, RowBatch, Sample, batch_rows
from millrace.keys.datasets import DatasetKeys
from millrace.schemas.dataset import ManifestShard
from tests.support.examples import scale_examples
from tests.support.formats import describe_shard
from tests.support.parquet_pages import list_pages, read_footer, read_texts

TEXT: Fields = {"txt": FieldType.STR}
ALL: Fields = {
    "bin": FieldType.BYTES,
    "cls": FieldType.INT,
    "id.json": FieldType.JSON,
    "long": FieldType.UINT32_ARRAY,
    "score": FieldType.FLOAT,
    "short": FieldType.UINT16_ARRAY,
    "txt": FieldType.STR,
}
VALUES: Mapping[FieldType, st.SearchStrategy[Any]] = {
    FieldType.BYTES: st.binary(max_size=300),
    FieldType.STR: st.text(max_size=100),
    FieldType.JSON: st.dictionaries(st.text(max_size=5), st.integers(), max_size=3).map(json.dumps),
    FieldType.INT: st.integers(-(1 << 63), (1 << 63) - 1),
    FieldType.FLOAT: st.floats(allow_nan=False),
    FieldType.UINT16_ARRAY: st.lists(st.integers(0, (1 << 16) - 1), max_size=40),
    FieldType.UINT32_ARRAY: st.lists(st.integers(0, (1 << 32) - 1), max_size=40),
}
ROWS = st.lists(
    st.fixed_dictionaries({}, optional={name: VALUES[kind] for name, kind in ALL.items()}),
    min_size=1,
    max_size=20,
)


def to_bytes(kind: FieldType, value: Any) -> bytes:
    match kind:
        case FieldType.BYTES:
            return value
        case FieldType.UINT16_ARRAY:
            return np.array(value, "<u2").tobytes()
        case FieldType.UINT32_ARRAY:
            return np.array(value, "<u4").tobytes()
        case _:
            return str(value).encode()


def encode(
    samples: Iterable[Sample], fields: Fields = TEXT, *, shard_format: ShardFormat | None = None
) -> bytes:
    encoder = (shard_format or ParquetFormat()).make_encoder(fields, 1024)
    for sample in samples:
        encoder.prepare(sample)
        encoder.append()
    return bytes(encoder.close())


def read(shard: bytes) -> list[dict[str, Any]]:
    file = parquet.ParquetFile(io.BytesIO(shard), page_checksum_verification=True)
    return file.read().to_pylist()


def make_texts(count: int, size: int = 200) -> list[Sample]:
    rng = random.Random(count)
    return [
        Sample(f"00000-{n:010d}", {"txt": f"{n} {rng.randbytes(size // 2).hex()}".encode()}, n + 1)
        for n in range(count)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_batches_with_null_values_and_of_any_size_give_the_bytes_of_single_samples(
    seed: int,
) -> None:
    rng = random.Random(seed)
    single, batched = (ParquetFormat().make_encoder(ALL, 1024) for _ in range(2))
    for number in range(8):
        # Pages have up to 1 MiB: after a large sample, they have more rows with each small one.
        sizes = [rng.choice([0, 10, 1000, 100_000]) for _ in range(rng.randrange(1, 300))]
        names = rng.sample(["bin", "id.json", "txt"], rng.randrange(1, 4))
        samples = [
            Sample(f"{number}-{n}", dict.fromkeys(names, b"7" * (size + 1)) | {"cls": b"1"}, n)
            for n, size in enumerate(sizes)
        ]
        left = iter(samples)
        for batch in batch_rows(iter(samples)):
            is_batch = isinstance(batch, RowBatch)
            prepared = batched.prepare_batch(batch) if is_batch else [batched.prepare(batch)]
            expected = list[int]()
            for sample in islice(left, len(prepared)):
                expected.append(single.prepare(sample))
                single.append()
            assert prepared == [*accumulate(expected, max)]
            if is_batch:
                batched.append_batch(len(batch))
            else:
                batched.append()
        assert (batched.samples, batched.size) == (single.samples, single.size)
    assert bytes(batched.close()) == bytes(single.close())


@settings(max_examples=scale_examples(60))
@given(ROWS)
def test_every_value_is_read_back_with_its_type_and_an_absent_field_as_null(rows):
    samples = [
        Sample(f"k{n}", {name: to_bytes(ALL[name], value) for name, value in row.items()}, 0)
        for n, row in enumerate(rows)
    ]
    shard = encode(samples, ALL)
    assert read(shard) == [
        {"__key__": f"k{n}", **dict.fromkeys(ALL), **row} for n, row in enumerate(rows)
    ]
    schema = parquet.read_schema(io.BytesIO(shard))
    assert schema.names == ["__key__", *ALL]
    assert [str(kind) for kind in schema.types] == [
        "string", "binary", "int64", "string", "list<element: uint32>", "double",
        "list<element: uint16>", "string",
    ]  # fmt: skip


@pytest.mark.parametrize("samples", [1, 99, 100, 101, 1000, 1001, 2003])
@pytest.mark.parametrize("fields", [(), ("bin",), ("cls", "score"), ("short", "long"), tuple(ALL)])
@pytest.mark.parametrize("size", [0, 3, 400])
def test_no_shard_is_larger_than_its_size_says(samples, fields, size):
    rng = random.Random(f"{samples} {fields} {size}")
    values = {
        "bin": lambda: rng.randbytes(size),
        "cls": lambda: b"%d" % rng.randrange(-(1 << 63), 1 << 63),
        "id.json": lambda: rng.randbytes(size).hex().encode(),
        "long": lambda: rng.randbytes(size // 4 * 4),
        "score": lambda: repr(rng.random()).encode(),
        "short": lambda: rng.randbytes(size // 2 * 2),
        "txt": lambda: rng.randbytes(size).hex().encode(),
    }
    encoder = ParquetFormat().make_encoder({name: ALL[name] for name in fields}, 1024)
    for n in range(samples):
        key = f"{rng.randrange(1 << 64):020d}"
        announced = encoder.prepare(Sample(key, {name: values[name]() for name in fields}, n + 1))
        encoder.append()
        assert encoder.size == announced
    size = encoder.size
    assert len(encoder.close()) <= size
    assert encoder.size == size


def test_many_columns_and_row_groups_count():
    fields = {f"c{n}": FieldType.INT for n in range(60)}
    encoder = ParquetFormat().make_encoder(fields, 1024)
    for n in range(2001):
        encoder.prepare(Sample("k", {}, n + 1))
        encoder.append()
    size = encoder.size
    assert len(encoder.close()) <= size


def test_fields_in_any_order_make_the_same_bytes():
    sample = Sample("k", {"txt": b"text", "cls": b"1"}, 1)
    fields = {"cls": FieldType.INT, "txt": FieldType.STR}
    assert encode([sample], dict(reversed(fields.items()))) == encode([sample], fields)


def test_a_name_of_any_length_counts():
    name = "n" * 5000
    encoder = ParquetFormat().make_encoder({name: FieldType.UINT16_ARRAY}, 1024)
    size = encoder.prepare(Sample("k", {name: b"\x01\x02"}, 1))
    encoder.append()
    assert 3 * 5000 > len(encoder.close()) <= size


def test_the_same_samples_make_the_same_bytes_in_every_encoder():
    samples = make_texts(1500)
    expected = encode(samples)
    used = ParquetFormat().make_encoder(TEXT, 1 << 20)
    for sample in make_texts(700):
        used.prepare(sample)
        used.append()
    used.close()
    used.reset()
    for sample in samples:
        used.prepare(Sample("another", {"txt": b"sample"}, 0))
        used.prepare(sample)
        used.append()
    used.prepare(Sample("one more", {"txt": b"sample"}, 0))
    assert bytes(used.close()) == expected
    assert bytes(used.close()) == expected


@settings(deadline=None, max_examples=scale_examples(60))
@given(ROWS, st.sampled_from([1, 30, 1000]))
def test_the_bytes_do_not_depend_on_when_values_are_packed(rows, size):
    samples = [
        Sample(f"k{n}", {name: to_bytes(ALL[name], value) for name, value in row.items()}, 0)
        for n, row in enumerate(rows * (1 + 1500 // len(rows)))  # two row groups
    ]
    with patch.object(parquet_format, "_UNPACKED_BYTES", size):
        packed = encode(samples, ALL)
    assert packed == encode(samples, ALL)


MANY = {f"c{n:03}": list(ALL.values())[n % len(ALL)] for n in range(200)}


@pytest.mark.parametrize("fields", [ALL, MANY])
@pytest.mark.parametrize("share", [1.0, 0.1])
def test_the_values_of_a_shard_take_about_its_size_in_memory(fields, share, monkeypatch):
    monkeypatch.setattr(parquet_format, "_UNPACKED_BYTES", 32 << 10)
    rng = random.Random(0)
    values = {
        FieldType.BYTES: rng.randbytes(20),
        FieldType.STR: b"short",
        FieldType.JSON: b"{}",
        FieldType.INT: b"%d" % (1 << 40),
        FieldType.FLOAT: b"0.5",
        FieldType.UINT16_ARRAY: rng.randbytes(6),
        FieldType.UINT32_ARRAY: rng.randbytes(12),
    }
    tracemalloc.start()
    try:
        encoder = ParquetFormat().make_encoder(fields, 1 << 20)
        before = tracemalloc.get_traced_memory()[0]
        while encoder.size < 4 << 20:
            chosen = [name for name in fields if rng.random() < share]
            present = {name: b"%b" % values[fields[name]] for name in chosen}  # a new object
            encoder.prepare(Sample(f"{encoder.samples:020}", present, 0))
            encoder.append()
        held = tracemalloc.get_traced_memory()[0] - before
        encoder.close()
        most = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert held < 1.25 * encoder.size
    assert most < 2 * encoder.size


def test_a_shard_is_refused_after_an_append_that_failed_and_the_next_one_is_not(monkeypatch):
    def fail(*_: object) -> None:
        raise MemoryError

    encoder = ParquetFormat().make_encoder(ALL, 1024)
    with monkeypatch.context() as patched:
        patched.setattr(parquet_format, "_UNPACKED_BYTES", 1)
        encoder.prepare(Sample("a", {"cls": b"1"}, 0))
        encoder.append()
        patched.setattr(parquet_format, "array", fail)
        encoder.prepare(Sample("b", {"cls": b"2"}, 0))
        with pytest.raises(MemoryError):
            encoder.append()
    with pytest.raises(RuntimeError, match="an earlier call failed"):
        encoder.close()
    encoder.reset()
    encoder.prepare(Sample("c", {"cls": b"3"}, 0))
    encoder.append()
    assert [row["__key__"] for row in read(bytes(encoder.close()))] == ["c"]


_IN_A_PROCESS = """
import hashlib
from tests.unit.datasets.formats.test_parquet import encode, make_texts
print(hashlib.sha256(encode(make_texts(1500))).hexdigest())
"""


def test_the_same_samples_make_the_same_bytes_in_every_process():
    other = subprocess.run(
        [sys.executable, "-c", _IN_A_PROCESS], check=True, capture_output=True, text=True
    )
    assert other.stdout.strip() == hashlib.sha256(encode(make_texts(1500))).hexdigest()


@pytest.mark.parametrize(
    ("samples", "groups"),
    [
        (1, [1]),
        (1000, [1000]),
        (1001, [500, 501]),
        (3000, [1000, 1000, 1000]),
        (3002, [750, 750, 750, 752]),
    ],
)
def test_row_groups_are_equal_except_for_the_rest_in_the_last(samples, groups):
    metadata = parquet.read_metadata(io.BytesIO(encode(make_texts(samples, 10))))
    found = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
    assert found == groups
    assert found[0] == samples // len(found)


@pytest.mark.parametrize(("size", "rows"), [(200, 100), (10_000, 100), (40_000, 26), (3 << 20, 1)])
def test_a_page_has_up_to_100_rows_and_about_1_mib_and_is_found_by_the_page_index(size, rows):
    count = min(1100, (8 << 20) // size)
    samples = make_texts(count, size)
    shard = encode(samples)
    fetched = 0

    def read_range(start: int, end: int) -> bytes:
        nonlocal fetched
        fetched += end - start
        return shard[start:end]

    pages = list_pages(read_range, len(shard), "txt")
    assert max(page.rows for page in pages) == rows
    assert sum(page.rows for page in pages) == count
    texts = [text for page in pages for text in read_texts(read_range, page)]
    assert [text.encode() for text in texts] == [sample.fields["txt"] for sample in samples]


def test_a_reader_of_one_page_reads_few_bytes():
    samples = make_texts(10_000, 2600)
    shard = encode(samples)
    fetched = 0

    def read_range(start: int, end: int) -> bytes:
        nonlocal fetched
        fetched += end - start
        return shard[start:end]

    pages = list_pages(read_range, len(shard), "txt")
    index, fetched = fetched, 0
    page = next(page for page in pages if page.first_row <= 7777 < page.first_row + page.rows)
    texts = read_texts(read_range, page)
    assert texts[7777 - page.first_row].encode() == samples[7777].fields["txt"]
    assert fetched < 100 * 2600
    assert index < 20_000  # footer and index of 10 row groups


def test_texts_have_no_statistics_and_numbers_have():
    samples = [Sample(f"k{n}", {"txt": b"text", "cls": b"%d" % n}, 0) for n in range(10)]
    shard = encode(samples, {"cls": FieldType.INT, "txt": FieldType.STR})
    footer = read_footer(lambda start, end: shard[start:end], len(shard))
    assert [12 in chunk[3] for chunk in footer[4][0][1]] == [False, True, False]
    group = parquet.read_metadata(io.BytesIO(shard)).row_group(0)
    assert (group.column(1).statistics.min, group.column(1).statistics.max) == (0, 9)


def test_a_flipped_bit_is_found_by_the_checksum_of_its_page():
    shard = bytearray(encode(make_texts(500)))
    shard[len(shard) // 2] ^= 1
    with pytest.raises(OSError, match=r"(?i)crc|checksum"):
        read(bytes(shard))


@pytest.mark.parametrize(
    ("field", "data", "reason"),
    [
        ("txt", b"\xff", r"the field 'txt' is no UTF-8 text"),
        ("id.json", b'"\xed\xa0\x80"', r"the field 'id.json' is no UTF-8 text"),
        ("cls", b"1.0", r"the field 'cls' is no integer of 64 bits: '1.0'"),
        ("cls", b"", r"the field 'cls' is no integer of 64 bits: ''"),
        ("cls", b"1_0", r"no integer of 64 bits"),
        ("cls", b"true", r"no integer of 64 bits"),
        ("cls", b"9223372036854775808", r"no integer of 64 bits"),
        ("cls", b"1" + b" " * 500 + b"1", r"no integer of 64 bits"),
        ("score", b"1_0.0", r"the field 'score' is no number: '1_0.0'"),
        ("score", b"null", r"no number"),
        ("score", b"1" * 10_000, r"no number: '1{40}\.\.\.'"),
        ("short", b"\x00", r"the field 'short' has 1 bytes, which is no multiple of 2"),
        ("long", b"\x00" * 6, r"the field 'long' has 6 bytes, which is no multiple of 4"),
        ("jpg", b"", r"the field 'jpg' has no type: give it a type, or leave it out"),
    ],
)
def test_a_value_that_does_not_fit_its_type_is_refused_and_leaves_the_shard_as_it_is(
    field, data, reason
):
    encoder = ParquetFormat().make_encoder(ALL, 1024)
    encoder.prepare(Sample("good", {"txt": b"text"}, 1))
    encoder.append()
    size = encoder.size
    with pytest.raises(BadSampleError, match=reason):
        encoder.prepare(Sample("bad", {field: data}, 2))
    assert (encoder.samples, encoder.size) == (1, size)
    assert [row["__key__"] for row in read(bytes(encoder.close()))] == ["good"]


def test_a_key_that_is_no_unicode_is_refused():
    encoder = ParquetFormat().make_encoder(TEXT, 1024)
    with pytest.raises(BadSampleError, match="the key is no UTF-8 text"):
        encoder.prepare(Sample("\udcff", {"txt": b""}, 1))


def test_numbers_with_a_line_end_are_numbers():
    shard = encode([Sample("k", {"cls": b"-12\n", "score": b"0.5\r\n"}, 1)], ALL)
    assert (read(shard)[0]["cls"], read(shard)[0]["score"]) == (-12, 0.5)


def test_a_large_file_is_read_and_one_beyond_parquet_is_refused_unread():
    def blocks() -> Iterator[bytes]:
        yield from (b"ab", b"cd")

    def fail() -> Iterator[bytes]:
        raise AssertionError("read")

    encoder = ParquetFormat().make_encoder(ALL, 1024)
    with pytest.raises(BadSampleError, match="2147483648 bytes, and a parquet value has up to"):
        encoder.prepare(Sample("k", {"bin": LargeFile(1 << 31, fail)}, 1))
    encoder.prepare(Sample("k", {"bin": LargeFile(4, blocks)}, 1))
    encoder.append()
    assert read(bytes(encoder.close()))[0]["bin"] == b"abcd"


def test_a_sample_larger_than_the_buffer_is_a_shard_and_its_memory_is_freed():
    encoder = ParquetEncoder(ALL, {name: name for name in ALL}, 4096)
    data = random.Random(0).randbytes(1 << 20)
    encoder.prepare(Sample("large", {"bin": data}, 1))
    encoder.append()
    assert read(bytes(encoder.close()))[0]["bin"] == data
    assert len(encoder._buffer) > len(data)
    encoder.reset()
    assert len(encoder._buffer) == 4096


def test_a_field_named_as_the_key_is_refused():
    with pytest.raises(errors.ConfigurationError, match="field '__key__': give it another name"):
        ParquetFormat().make_encoder({"__key__": FieldType.STR}, 1024)


def test_the_version_of_pyarrow_is_in_the_plan():
    assert ParquetFormat().writer["pyarrow"] == pa.__version__
    assert PagesFormat().writer["pyarrow"] == pa.__version__


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"txt": FieldType.STR}, {"text": "a"}),
        ({"text": FieldType.STR}, {"text": "a"}),
        ({"text": FieldType.STR, "txt": FieldType.STR}, {"text": "a", "txt": "a"}),
    ],
)
def test_pages_have_the_text_in_the_column_text(fields, text):
    sample = Sample("k", dict.fromkeys(fields, b"a"), 1)
    assert read(encode([sample], fields, shard_format=PagesFormat())) == [{"__key__": "k", **text}]


@pytest.mark.parametrize("fields", [{}, {"json": FieldType.JSON}, {"text": FieldType.BYTES}])
def test_pages_without_a_text_are_refused(fields):
    with pytest.raises(errors.ConfigurationError, match="needs a field `text` or `txt`"):
        PagesFormat().make_encoder(fields, 1024)


def make_shard(split: str, number: int, samples: int) -> ManifestShard:
    return describe_shard(PagesFormat(), DatasetKeys("corpus"), b"x", samples, split, number)


def test_each_split_of_pages_has_its_own_index():
    shards = [make_shard("train", 0, 30), make_shard("train", 1, 12), make_shard("val", 0, 5)]
    indexes = PagesFormat().make_indexes(DatasetKeys("corpus"), TEXT, shards)
    assert sorted(indexes) == [
        "corpus/shards/pages/train/_metadata.yaml",
        "corpus/shards/pages/train/_shard_sizes.json",
        "corpus/shards/pages/val/_metadata.yaml",
        "corpus/shards/pages/val/_shard_sizes.json",
    ]
    train = "corpus/shards/pages/train/"
    assert json.loads(indexes[f"{train}_shard_sizes.json"]) == {
        "train": {
            "split": "train",
            "shards": [
                {"path": f"{train}train-00000-000000.parquet", "num_rows": 30},
                {"path": f"{train}train-00000-000001.parquet", "num_rows": 12},
            ],
            "total_rows": 42,
        }
    }
    assert yaml.safe_load(indexes[f"{train}_metadata.yaml"]) == {
        "configs": [
            {
                "config_name": "train",
                "data_files": [{"split": "train", "path": f"{train}*.parquet"}],
            }
        ]
    }


def test_parquet_needs_no_index():
    shards = [make_shard("train", 0, 30)]
    assert ParquetFormat().make_indexes(DatasetKeys("corpus"), TEXT, shards) == {}
