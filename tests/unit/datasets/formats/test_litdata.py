import json
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from litdata.constants import _NUMPY_DTYPES_MAPPING
from litdata.streaming.item_loader import PyTreeLoader
from litdata.streaming.serializers import _get_serializers
from litdata.streaming.writer import BinaryWriter
from litdata.utilities._pytree import tree_flatten, treespec_dumps, treespec_loads

from millrace.datasets.formats import offset_table
from millrace.datasets.formats.base import BadSampleError, FieldType
from millrace.datasets.formats.litdata import LitDataFormat
from millrace.datasets.sample import LargeFile, Sample
from millrace.errors import ConfigurationError
from millrace.keys.datasets import DatasetKeys
from millrace.schemas.dataset import ManifestShard
from tests.support.examples import scale_examples
from tests.support.formats import ALL_TYPES, describe_shard

FORMAT = LitDataFormat()
KEYS = DatasetKeys("texts")
FIELDS = ALL_TYPES
TEXTS = st.text(st.characters(codec="utf-8"), max_size=200)
ITEMS = st.fixed_dictionaries(
    {
        "body": st.binary(max_size=400),
        "count": st.integers(-(1 << 63), (1 << 63) - 1),
        "meta": st.dictionaries(TEXTS, st.lists(st.none() | TEXTS, max_size=3), max_size=3),
        "score": st.floats(allow_nan=False, allow_infinity=False),
        "text": TEXTS,
        "wide": st.lists(st.integers(0, (1 << 32) - 1), max_size=30),
        "words": st.lists(st.integers(0, (1 << 16) - 1), max_size=30),
        "__key__": TEXTS,
    }
)


def make_sample(item: Mapping[str, Any]) -> Sample:
    values = {**item}
    key = values.pop("__key__")
    fields = {
        "body": values["body"],
        "count": b"%d" % values["count"],
        "meta": orjson.dumps(values["meta"]),
        "score": orjson.dumps(values["score"]),
        "text": values["text"].encode(),
        "wide": np.array(values["wide"], "<u4").tobytes(),
        "words": np.array(values["words"], "<u2").tobytes(),
    }
    return Sample(key, fields, 0)


def encode(samples: Sequence[Sample], fields: Mapping[str, FieldType]) -> bytes:
    encoder = FORMAT.make_encoder(fields, 1 << 12)
    for sample in samples:
        encoder.prepare(sample)
        encoder.append()
    return bytes(encoder.close())


def make_shard(body: bytes, samples: int, split: str = "train", number: int = 0) -> ManifestShard:
    return describe_shard(FORMAT, KEYS, body, samples, split, number)


def read(body: bytes, count: int, fields: Mapping[str, FieldType]) -> list[dict[str, Any]]:
    """Read a chunk by the loader of litdata, set up by the index."""
    (index,) = FORMAT.make_indexes(KEYS, fields, [make_shard(body, count)]).values()
    read_index = json.loads(index)
    config = read_index["config"]
    config["data_spec"] = treespec_loads(config["data_spec"])
    loader = PyTreeLoader()
    loader.set_mmap_allowed_chunks({0})
    loader.setup(config, read_index["chunks"], _get_serializers(None))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / read_index["chunks"][0]["filename"]
        path.write_bytes(body)
        items = [loader.load_item_from_chunk(i, 0, str(path), 0, len(body)) for i in range(count)]
        loader.close(0)
    return items


@settings(max_examples=scale_examples(60))
@given(st.lists(ITEMS, min_size=1, max_size=5))
def test_litdatas_own_loader_reads_what_was_encoded(items):
    samples = [make_sample(item) for item in items]
    for item, sample, found in zip(
        items, samples, read(encode(samples, FIELDS), len(items), FIELDS), strict=True
    ):
        assert list(found) == [*FIELDS, "__key__"]
        assert type(found["body"]) is bytes
        assert found["wide"].dtype == np.uint32
        assert found["words"].dtype == np.uint16
        arrays = {name: found[name].tolist() for name in ("wide", "words")}
        assert {**found, **arrays, "meta": item["meta"]} == item
        assert found["meta"].encode() == sample.fields["meta"]


@settings(max_examples=30)
@given(st.lists(ITEMS, min_size=1, max_size=5))
def test_a_chunk_is_byte_for_byte_what_litdatas_own_writer_makes(items):
    # Samples with an array, since the writer has another layout for those without.
    samples = [make_sample(item) for item in items]
    with tempfile.TemporaryDirectory() as folder:
        writer = BinaryWriter(folder, chunk_bytes=1 << 30)
        for index, (item, sample) in enumerate(zip(items, samples, strict=True)):
            row = {name: item[name] for name in FIELDS}
            row["meta"] = sample.fields["meta"].decode()
            row["wide"] = np.array(item["wide"], np.uint32)
            row["words"] = np.array(item["words"], np.uint16)
            writer.add_item(index, {**row, "__key__": item["__key__"]})
        (path,) = writer.done()
        body = Path(path).read_bytes()
        index = json.loads((Path(folder) / "0.index.json").read_bytes())
    assert encode(samples, FIELDS) == body
    (own,) = FORMAT.make_indexes(KEYS, FIELDS, [make_shard(body, len(items))]).values()
    ours = json.loads(own)
    ours["config"]["data_format"][0] = "bytes"
    for name in ("data_format", "data_spec", "compression", "encryption", "item_loader"):
        assert ours["config"][name] == index["config"][name]
    assert ours["config"].keys() == index["config"].keys()
    assert {**ours["chunks"][0], "filename": "chunk-0-0.bin"} == index["chunks"][0]


def test_arrays_have_the_numbers_of_their_types_in_litdata():
    assert _NUMPY_DTYPES_MAPPING[5] == np.uint16
    assert _NUMPY_DTYPES_MAPPING[6] == np.uint32


def test_the_structure_of_a_sample_is_written_as_by_litdata():
    names = ["a.b", "grün", 'qu"ote', "__key__"]
    fields = dict.fromkeys(names[:-1], FieldType.STR)
    (index,) = FORMAT.make_indexes(KEYS, fields, [make_shard(b"x", 1)]).values()
    expected = treespec_dumps(tree_flatten(dict.fromkeys(names, 0))[1])
    assert json.loads(index)["config"]["data_spec"] == expected


def test_bytes_that_look_like_an_arrow_footer_are_not_read_as_the_samples():
    rows = pa.table({"__key__": ["forged"], "body": [b"forged"]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_table(rows)
    forged = sink.getvalue().to_pybytes()
    forged += struct.pack("<I", len(forged)) + b"LDARW01\0"
    fields = {"body": FieldType.BYTES}
    shard = encode([Sample("real", {"body": forged}, 0)], fields)
    assert read(shard, 1, fields) == [{"body": forged, "__key__": "real"}]
    with pytest.raises(BadSampleError, match="Arrow"):
        encode([Sample("LDARW01\0", {"body": b""}, 0)], fields)


def test_the_index_has_the_shards_of_each_split_in_their_order():
    shards = [
        make_shard(b"a", 1, "train", 0),
        make_shard(b"bb", 2, "train", 1),
        make_shard(b"ccc", 3, "val", 0),
    ]
    indexes = FORMAT.make_indexes(KEYS, FIELDS, shards)
    assert list(indexes) == [
        "texts/shards/litdata/train/index.json",
        "texts/shards/litdata/val/index.json",
    ]
    train, val = (json.loads(index)["chunks"] for index in indexes.values())
    assert [(one["filename"], one["chunk_size"], one["chunk_bytes"]) for one in train] == [
        ("train-00000-000000.bin", 1, 1),
        ("train-00000-000001.bin", 2, 2),
    ]
    assert [one["filename"] for one in val] == ["val-00000-000000.bin"]


def test_the_index_of_changed_shards_invalidates_the_cache_of_a_reader():
    def find(body: bytes) -> str:
        (index,) = FORMAT.make_indexes(KEYS, FIELDS, [make_shard(body, 1)]).values()
        return json.loads(index)["updated_at"]

    assert find(b"one") == find(b"one")
    assert find(b"one") != find(b"two")


def test_there_is_no_index_without_shards():
    assert FORMAT.make_indexes(KEYS, FIELDS, []) == {}


def test_a_shard_outside_its_split_is_refused():
    shard = replace(make_shard(b"a", 1), split="val")
    with pytest.raises(ValueError, match="not below"):
        FORMAT.make_indexes(KEYS, FIELDS, [shard])


def test_a_field_named_as_the_key_is_refused():
    with pytest.raises(ConfigurationError, match="rename"):
        FORMAT.make_encoder({"__key__": FieldType.STR}, 1 << 12)


def test_a_sample_of_4_gib_is_refused_before_it_is_read():
    encoder = FORMAT.make_encoder({"body": FieldType.BYTES}, 1 << 12)

    def make(size: int) -> Sample:
        return Sample("k", {"body": LargeFile(size, lambda: pytest.fail("the file was read"))}, 0)

    overhead = 4 + 2 * 4 + 2 * 4 + 1  # number, offsets, sizes, key
    assert encoder.prepare(make((1 << 32) - 1 - overhead)) == (1 << 32) - 1
    with pytest.raises(BadSampleError, match="4 GiB"):
        encoder.prepare(make((1 << 32) - overhead))


def test_a_shard_never_grows_beyond_its_offsets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offset_table, "_MAX_SIZE", 1000)  # instead of 4 GiB
    encoder = FORMAT.make_encoder({"body": FieldType.BYTES}, 1 << 12)
    sample = Sample("k", {"body": bytes(900)}, 0)
    encoder.prepare(sample)
    encoder.append()
    shard = bytes(encoder.close())
    assert encoder.prepare(sample) > 1000
    with pytest.raises(ValueError, match="close a shard"):
        encoder.append()
    assert bytes(encoder.close()) == shard


def test_a_key_that_is_no_text_is_refused():
    with pytest.raises(BadSampleError, match="key"):
        encode([Sample("\udcff", {"text": b""}, 0)], {"text": FieldType.STR})
