import io
import json
import random
import tarfile

import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.datasets.formats.shard_set import ShardSet
from millrace.datasets.formats.webdataset import TarEncoder, WebDatasetFormat
from millrace.datasets.sources import Sample
from millrace.keys.datasets import DatasetKeys
from millrace.schemas.dataset import ShardLayout
from tests.support.examples import scale_examples
from tests.support.formats import describe_shard

NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], exclude_characters="./\\"),
    min_size=1,
    max_size=60,
)
FIELDS = st.dictionaries(
    st.sampled_from(["txt", "json", "id.cls", "jpg"]), st.binary(max_size=2000), min_size=1
)
SAMPLES = st.lists(
    st.tuples(st.lists(NAMES, min_size=1, max_size=4).map("/".join), FIELDS), min_size=1, max_size=8
)


def by_webdataset(samples: list[tuple[str, dict[str, bytes]]]) -> bytes:
    target = io.BytesIO()
    writer = webdataset.TarWriter(target, encoder=False, mtime=0)
    for key, fields in samples:
        writer.write({"__key__": key, **fields})
    writer.close()
    return target.getvalue()


def by_millrace(samples: list[tuple[str, dict[str, bytes]]], capacity: int = 1024) -> bytes:
    encoder = TarEncoder(capacity)
    for key, fields in samples:
        encoder.prepare(Sample(key, fields, 0))
        encoder.append()
    return bytes(encoder.close())


@settings(deadline=None, max_examples=scale_examples(200))
@given(SAMPLES)
def test_a_shard_is_byte_for_byte_what_webdatasets_own_writer_makes(samples):
    assert by_millrace(samples) == by_webdataset(samples)


def test_a_plain_header_is_what_webdatasets_own_writer_makes():
    samples = [("00000-0000000000000", {"txt": b"text", "id.cls": b"1"})]
    assert by_millrace(samples) == by_webdataset(samples)


def test_a_buffer_that_is_used_again_keeps_nothing_of_the_shard_before():
    encoder = TarEncoder(1 << 16)
    rng = random.Random(0)
    for _ in range(3):
        samples = [(f"k{i}", {"bin": rng.randbytes(rng.randrange(3000))}) for i in range(20)]
        for key, fields in samples:
            encoder.prepare(Sample(key, fields, 0))
            encoder.append()
        assert bytes(encoder.close()) == by_webdataset(samples)
        encoder.reset()


def test_a_shard_never_grows_over_its_limit_unless_one_sample_does():
    limit = 40_960
    shards = ShardSet(
        ShardLayout(formats=("webdataset",), writer={}, shard_bytes=limit, shard_samples=1000)
    )
    while shards.add(Sample(f"k{shards.samples}", {"bin": bytes(700)}, 0), limit):
        assert shards.size <= limit
    assert len(shards.close()[0]) <= limit
    shards.reset()
    assert shards.add(Sample("large", {"bin": bytes(3 * limit)}, 0), limit)
    with tarfile.open(fileobj=io.BytesIO(bytes(shards.close()[0]))) as tar:
        assert [member.size for member in tar] == [3 * limit]


@pytest.mark.parametrize("length", [90, 99, 100, 101, 155, 300])
def test_names_of_any_length_are_read_back(length):
    key = "k" * (length - 4)
    shard = by_millrace([(key, {"txt": b"x"})])
    with tarfile.open(fileobj=io.BytesIO(shard)) as tar:
        assert tar.getnames() == [f"{key}.txt"]


def test_the_places_of_some_samples_are_kept_for_readers_that_begin_in_the_middle():
    encoder = TarEncoder(1 << 20)
    rng = random.Random(0)
    for _ in range(2):
        for number in range(900):
            fields = {"bin": rng.randbytes(rng.randrange(10_000)), "id": b"%d" % number}
            encoder.prepare(Sample(f"{number:06}" + "long" * rng.choice([1, 50]), fields, 0))
            encoder.append()
        with tarfile.open(fileobj=io.BytesIO(bytes(encoder.close()))) as tar:
            names = {member.offset: member.name for member in tar}
        found = encoder.sample_offsets
        assert [offset >> 20 for _, offset in found] == [1, 2, 3, 4, 5, 6]
        assert [names[offset][:6] for _, offset in found] == [f"{row:06}" for row, _ in found]
        assert all(names[offset].endswith(".bin") for _, offset in found)
        encoder.reset()
    assert encoder.sample_offsets == []


@pytest.mark.parametrize("splits", [["train", "train", "val"], ["val"], []])
def test_an_index_has_the_shards_of_one_split(splits):
    form, keys = WebDatasetFormat(), DatasetKeys("a/b")
    shards = [describe_shard(form, keys, b"x", 3, split, n) for n, split in enumerate(splits)]
    prefixes = {f"a/b/shards/webdataset/{split}/": split for split in splits} | {"a/b/": "train"}
    assert {
        key: [(shard["url"], shard["nsamples"]) for shard in json.loads(body)["shardlist"]]
        for key, body in form.make_indexes(keys, {}, shards).items()
    } == {
        f"{prefix}index.json": [
            (shard.key.removeprefix(prefix), 3) for shard in shards if shard.split == split
        ]
        for prefix, split in prefixes.items()
    }
