import itertools
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.datasets.formats.base import BadSampleError, FieldType
from millrace.datasets.formats.mds import MDSFormat
from millrace.datasets.sample import LargeFile, Sample
from millrace.errors import ConfigurationError
from millrace.keys.datasets import DatasetKeys
from tests.support.examples import scale_examples
from tests.support.formats import describe_shard

FORMAT = MDSFormat()
KEYS = DatasetKeys("texts")
FIELDS = {
    "Upper": FieldType.STR,
    "body": FieldType.BYTES,
    "count": FieldType.INT,
    "meta": FieldType.JSON,
    "score": FieldType.FLOAT,
    "wide": FieldType.UINT32_ARRAY,
    "words": FieldType.UINT16_ARRAY,
}
TEXTS = st.text(st.characters(codec="utf-8"), max_size=200)
ITEMS = st.fixed_dictionaries(
    {
        "Upper": TEXTS,
        "body": st.binary(max_size=400),
        "count": st.integers(-(1 << 63), (1 << 63) - 1),
        "meta": st.dictionaries(TEXTS, st.lists(st.none() | TEXTS, max_size=3), max_size=3),
        "score": st.floats(allow_nan=False, allow_infinity=False),
        "wide": st.lists(st.integers(0, (1 << 32) - 1), max_size=300),
        "words": st.lists(st.integers(0, (1 << 16) - 1), max_size=300),
        "__key__": TEXTS,
    }
)


def make_sample(item: Mapping[str, Any]) -> Sample:
    fields = {
        "Upper": item["Upper"].encode(),
        "body": item["body"],
        "count": b"%d" % item["count"],
        "meta": orjson.dumps(item["meta"]),
        "score": orjson.dumps(item["score"]),
        "wide": np.array(item["wide"], "<u4").tobytes(),
        "words": np.array(item["words"], "<u2").tobytes(),
    }
    return Sample(item["__key__"], fields, 0)


def encode(samples: Sequence[Sample], fields: Mapping[str, FieldType]) -> bytes:
    encoder = FORMAT.make_encoder(fields, 1 << 12)
    for sample in samples:
        encoder.prepare(sample)
        encoder.append()
    return bytes(encoder.close())


def read(shard: bytes) -> list[dict[str, Any]]:
    """Read a shard as the documents of MDS describe it, by the header in the shard."""
    (count,) = struct.unpack_from("<I", shard)
    offsets = struct.unpack_from(f"<{count + 1}I", shard, 4)
    config = json.loads(shard[4 * (count + 2) : offsets[0]])
    assert offsets[-1] == len(shard)
    items: list[dict[str, Any]] = []
    for begin, end in itertools.pairwise(offsets):
        columns = list(
            zip(
                config["column_names"],
                config["column_encodings"],
                config["column_sizes"],
                strict=True,
            )
        )
        at = begin + 4 * sum(size is None for _, _, size in columns)
        sizes = iter(np.frombuffer(shard[begin:at], "<u4").tolist())
        item: dict[str, Any] = {}
        for name, encoding, fixed in columns:
            size = fixed or next(sizes)
            item[name] = decode(encoding, shard[at : at + size])
            at += size
        assert at == end
        items.append(item)
    return items


def decode(encoding: str, data: bytes) -> Any:
    match encoding.partition(":"):
        case "bytes", _, _:
            return data
        case "str", _, _:
            return data.decode()
        case "json", _, _:
            return json.loads(data)
        case "int", _, _:
            return struct.unpack("<q", data)[0]
        case "float64", _, _:
            return struct.unpack("<d", data)[0]
        case "ndarray", _, dtype:
            assert data[0] >> 2 == 1  # axes
            width = 1 << (data[0] & 3)
            array = np.frombuffer(data[1 + width :], dtype)
            assert len(array) == int.from_bytes(data[1 : 1 + width], "little")
            return array.tolist()
    raise AssertionError(encoding)


@settings(max_examples=scale_examples(60))
@given(st.lists(ITEMS, min_size=1, max_size=5))
def test_a_shard_is_read_by_the_description_in_it(items):
    found = read(encode([make_sample(item) for item in items], FIELDS))
    assert found == items
    assert list(found[0]) == ["Upper", "__key__", "body", "count", "meta", "score", "wide", "words"]


@pytest.mark.parametrize("length", [0, 1, 255, 256, 65_535, 65_536])
def test_arrays_of_any_length_have_the_smallest_width_of_a_length(length):
    words = np.arange(length).astype("<u2")
    fields = {"words": FieldType.UINT16_ARRAY}
    shard = encode([Sample("k", {"words": words.tobytes()}, 0)], fields)
    assert read(shard) == [{"__key__": "k", "words": words.tolist()}]
    overhead = len(shard) - len(encode([Sample("k", {"words": b""}, 0)], fields)) - words.nbytes
    assert overhead == {0: 0, 1: 0, 255: 0, 256: 1, 65_535: 1, 65_536: 3}[length]


def test_the_index_has_the_shards_of_each_split_in_their_order():
    shards = [describe_shard(FORMAT, KEYS, b"a", 1), describe_shard(FORMAT, KEYS, b"bb", 2, "val")]
    indexes = FORMAT.make_indexes(KEYS, {"text": FieldType.STR, "n": FieldType.INT}, shards)
    assert {key: json.loads(index) for key, index in indexes.items()} == {
        f"texts/shards/mds/{split}/index.json": {
            "version": 2,
            "shards": [
                {
                    "column_encodings": ["str", "int", "str"],
                    "column_names": ["__key__", "n", "text"],
                    "column_sizes": [None, 8, None],
                    "compression": None,
                    "format": "mds",
                    "hashes": [],
                    "raw_data": {
                        "basename": f"{split}-00000-000000.mds",
                        "bytes": size,
                        "hashes": {},
                    },
                    "samples": size,
                    "size_limit": None,
                    "version": 2,
                    "zip_data": None,
                }
            ],
        }
        for split, size in (("train", 1), ("val", 2))
    }
    assert FORMAT.make_indexes(KEYS, FIELDS, []) == {}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{", "JSON"),
        (b"", "JSON"),
        (b"[NaN]", "JSON"),
        (b"[" * 513 + b"]" * 513, "more than 512 levels"),
        (b'{"a":' * 513 + b"1" + b"}" * 513, "more than 512 levels"),
    ],
)
def test_json_that_a_reader_could_not_parse_is_refused(data, reason):
    with pytest.raises(BadSampleError, match=f"the field 'meta' is .*{reason}"):
        encode([Sample("k", {"meta": data}, 0)], {"meta": FieldType.JSON})


def test_json_of_many_values_and_of_512_levels_is_kept():
    deep = b"[" * 512 + b"]" * 512  # also with more brackets than levels
    deep = b"[{}," + deep[1:]
    wide = b"[" + b",".join([b"[{}]"] * 600) + b"]"
    for data in (deep, wide):
        shard = encode([Sample("k", {"meta": data}, 0)], {"meta": FieldType.JSON})
        assert read(shard) == [{"__key__": "k", "meta": json.loads(data)}]


def test_a_field_named_as_the_key_is_refused():
    with pytest.raises(ConfigurationError, match="rename"):
        FORMAT.make_encoder({"__key__": FieldType.STR}, 1 << 12)


def test_a_sample_of_4_gib_is_refused_before_it_is_read():
    encoder = FORMAT.make_encoder({"body": FieldType.BYTES}, 1 << 12)
    empty = encoder.prepare(Sample("k", {"body": b""}, 0))

    def make(size: int) -> Sample:
        return Sample("k", {"body": LargeFile(size, lambda: pytest.fail("the file was read"))}, 0)

    assert encoder.prepare(make((1 << 32) - 1 - empty)) == (1 << 32) - 1
    with pytest.raises(BadSampleError, match="4 GiB"):
        encoder.prepare(make((1 << 32) - empty))
