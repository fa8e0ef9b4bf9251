import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace import errors
from millrace.datasets.formats.base import BadSampleError, Fields, FieldType
from millrace.datasets.formats.tokens import HEADER_SIZE, TokensEncoder, TokensFormat
from millrace.datasets.sample import LargeFile, Sample
from millrace.keys.datasets import DatasetKeys
from tests.support.formats import describe_shard

SHORT: Fields = {"tokens": FieldType.UINT16_ARRAY}
LONG: Fields = {"tokens": FieldType.UINT32_ARRAY}
Array = npt.NDArray[Any]


def encode(documents: Sequence[Array], fields: Fields, capacity: int = 256) -> bytes:
    encoder = TokensFormat().make_encoder(fields, capacity)
    for n, document in enumerate(documents):
        announced = encoder.prepare(Sample(f"k{n}", {"tokens": document.tobytes()}, n + 1))
        encoder.append()
        assert encoder.size == announced
    shard = bytes(encoder.close())
    assert len(shard) == encoder.size
    assert encoder.samples == len(documents)
    return shard


def read(shard: bytes) -> tuple[Array, Array, Array]:
    file = io.BytesIO(shard)
    tokens, ends, ids = (np.load(file, allow_pickle=False) for _ in range(3))
    assert not file.read()
    return tokens, ends, ids


def by_numpy(documents: Sequence[Array], dtype: str) -> bytes:
    file = io.BytesIO()
    np.save(file, np.concatenate([np.empty(0, dtype), *documents]))
    np.save(file, np.cumsum([len(one) for one in documents], dtype="<u8"))
    ids = [hashlib.blake2b(one.tobytes(), digest_size=8).digest() for one in documents]
    np.save(file, np.frombuffer(b"".join(ids), "<u8"))
    return file.getvalue()


@pytest.mark.parametrize(("fields", "dtype"), [(SHORT, "<u2"), (LONG, "<u4")])
@given(data=st.data())
def test_a_shard_is_byte_for_byte_what_numpy_saves(fields, dtype, data):
    largest = np.iinfo(dtype).max
    lists = data.draw(st.lists(st.lists(st.integers(0, largest), max_size=80), min_size=1))
    documents = [np.array(one, dtype) for one in lists]
    shard = encode(documents, fields)
    assert shard == by_numpy(documents, dtype)
    tokens, ends, _ = read(shard)
    assert [list(one) for one in np.split(tokens, ends[:-1].astype(np.int64))] == lists


def test_numpy_and_a_plain_memory_map_read_the_tokens(tmp_path: Path):
    documents = [np.arange(n, dtype="<u2") for n in (3, 0, 1000)]
    path = tmp_path / "train-00000-000000.npy"
    path.write_bytes(encode(documents, SHORT))
    expected = np.concatenate(documents)
    mapped = np.load(path, mmap_mode="r")
    assert isinstance(mapped, np.memmap)
    assert np.array_equal(mapped, expected)
    count = len(expected)
    plain = np.memmap(path, dtype=np.uint16, mode="r", offset=HEADER_SIZE, shape=(count,))
    assert np.array_equal(plain, expected)


@pytest.mark.parametrize("samples", [0, 1, 7, 12_345])
def test_the_ends_and_ids_are_the_last_bytes_of_the_shard(samples):
    documents = [np.full(n % 3, n, "<u4") for n in range(samples)]
    shard = encode(documents, LONG)
    tail = io.BytesIO(shard[-2 * (HEADER_SIZE + 8 * samples) :])
    ends, ids = np.load(tail), np.load(tail)
    assert list(ends) == list(np.cumsum([len(one) for one in documents], dtype=int))
    assert len(ids) == samples


def test_equal_tokens_have_equal_ids_and_others_have_others():
    documents = [np.arange(n % 5, n % 5 + 10, dtype="<u4") for n in range(20)]
    _, _, ids = read(encode(documents, LONG))
    assert list(ids) == [*ids[:5]] * 4
    assert len(set(ids)) == 5


def test_a_buffer_that_is_used_again_keeps_nothing_of_the_shard_before():
    encoder = TokensFormat().make_encoder(SHORT, 1 << 16)
    for length in (900, 40, 0, 500):
        documents = [np.arange(n, n + length, dtype="<u2") for n in range(10)]
        for document in documents:
            encoder.prepare(Sample("another", {"tokens": b"\xff" * 64}, 0))
            encoder.prepare(Sample("k", {"tokens": document.tobytes()}, 0))
            encoder.append()
        encoder.prepare(Sample("one more", {"tokens": b"\xff" * 64}, 0))
        assert bytes(encoder.close()) == by_numpy(documents, "<u2")
        assert bytes(encoder.close()) == by_numpy(documents, "<u2")
        encoder.reset()


def test_the_memory_of_a_large_sample_is_freed():
    encoder = TokensEncoder(SHORT, 4096)
    document = np.arange(30_000, dtype="<u2")
    encoder.prepare(Sample("k", {"tokens": document.tobytes()}, 0))
    encoder.append()
    assert bytes(encoder.close()) == by_numpy([document], "<u2")
    assert len(encoder._buffer) > 60_000
    encoder.reset()
    assert len(encoder._buffer) == 4096


def test_a_large_file_is_copied_block_by_block():
    document = np.arange(5000, dtype="<u4")
    data = document.tobytes()

    def blocks() -> Iterator[bytes]:
        yield from (data[:3], data[3:4097], data[4097:])

    encoder = TokensFormat().make_encoder(LONG, 256)
    encoder.prepare(Sample("k", {"tokens": LargeFile(len(data), blocks)}, 0))
    encoder.append()
    assert bytes(encoder.close()) == by_numpy([document], "<u4")


def test_a_large_file_that_has_changed_is_not_in_the_shard():
    def fail() -> Iterator[bytes]:
        yield b"\x01\x02"
        raise errors.ChangedError("changed")

    encoder = TokensFormat().make_encoder(SHORT, 256)
    encoder.prepare(Sample("k", {"tokens": LargeFile(8, fail)}, 0))
    with pytest.raises(errors.ChangedError):
        encoder.append()
    assert bytes(encoder.close()) == by_numpy([], "<u2")


@pytest.mark.parametrize(
    ("fields", "sample", "reason"),
    [
        (SHORT, {"tokens": b"abc"}, "has 3 bytes, which is no multiple of 2"),
        (LONG, {"tokens": b"abcdef"}, "has 6 bytes, which is no multiple of 4"),
        (SHORT, {}, "there is no field 'tokens'"),
        (SHORT, {"tokens": b"", "txt": b""}, "the field 'txt' has no type"),
    ],
)
def test_a_sample_that_has_no_whole_tokens_is_refused_and_leaves_the_shard_as_it_is(
    fields, sample, reason
):
    encoder = TokensFormat().make_encoder(fields, 256)
    encoder.prepare(Sample("good", {"tokens": bytes(4)}, 1))
    encoder.append()
    before = bytes(encoder.close())
    with pytest.raises(BadSampleError, match=reason):
        encoder.prepare(Sample("bad", sample, 2))
    assert bytes(encoder.close()) == before


def test_other_fields_are_left_out():
    fields: Fields = {"ids": FieldType.UINT16_ARRAY, "txt": FieldType.STR}
    encoder = TokensFormat().make_encoder(fields, 256)
    document = np.arange(4, dtype="<u2")
    encoder.prepare(Sample("k", {"ids": document.tobytes(), "txt": b"text"}, 1))
    encoder.append()
    assert bytes(encoder.close()) == by_numpy([document], "<u2")


def test_of_several_arrays_the_one_named_tokens_is_taken():
    fields: Fields = {"other": FieldType.UINT16_ARRAY, "tokens": FieldType.UINT32_ARRAY}
    document = np.arange(4, dtype="<u4")
    assert encode([document], fields) == by_numpy([document], "<u4")


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, "no field has this type"),
        ({"tokens": FieldType.STR}, "no field has this type"),
        (
            {"a": FieldType.UINT16_ARRAY, "b": FieldType.UINT16_ARRAY},
            "and a, b have this type",
        ),
    ],
)
def test_fields_without_one_array_of_tokens_are_refused(fields, found):
    with pytest.raises(errors.ConfigurationError, match=found):
        TokensFormat().make_encoder(fields, 256)


def test_the_index_of_each_split_has_the_samples_and_tokens_of_its_shards():
    keys = DatasetKeys("corpus")
    documents = {
        ("train", 0): [np.arange(n, dtype="<u2") for n in (5, 0, 8)],
        ("train", 1): [np.arange(7, dtype="<u2")],
        ("val", 0): [np.arange(2, dtype="<u2")],
    }
    shards = [
        describe_shard(TokensFormat(), keys, encode(some, SHORT), len(some), *place)
        for place, some in documents.items()
    ]
    indexes = TokensFormat().make_indexes(keys, SHORT, shards)
    assert {key: json.loads(body) for key, body in indexes.items()} == {
        "corpus/shards/tokens/train/index.json": {
            "version": 1,
            "dtype": "uint16",
            "samples": 4,
            "tokens": 20,
            "shards": [
                {"name": "train-00000-000000.npy", "samples": 3, "tokens": 13},
                {"name": "train-00000-000001.npy", "samples": 1, "tokens": 7},
            ],
        },
        "corpus/shards/tokens/val/index.json": {
            "version": 1,
            "dtype": "uint16",
            "samples": 1,
            "tokens": 2,
            "shards": [{"name": "val-00000-000000.npy", "samples": 1, "tokens": 2}],
        },
    }
