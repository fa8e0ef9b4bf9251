"""Contract of the readers of shards: the same values from every format, and no damaged bytes."""

import json
import pickle
import random
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import errors
from millrace.datasets.formats import Fields, FieldType, FormatName
from millrace.datasets.loader.dataset_files import DatasetFiles
from millrace.datasets.loader.disk_cache import DiskCache
from millrace.datasets.loader.fetch import ShardFetcher
from millrace.datasets.loader.readers import SampleReader, open_reader
from millrace.datasets.loader.shard_table import ShardTable, make_shard_table
from millrace.datasets.sample import Sample
from millrace.digest import BLOCK_SIZE, compute_digest
from millrace.schemas.dataset import Manifest, encode_sample_offsets
from millrace.storage import Store, delete_one, open_store, put, read
from tests.support.formats import ALL_TYPES
from tests.support.shard_datasets import write_dataset

pytestmark = pytest.mark.contract

COUNT = 60
Loaded = dict[str, Any]
FULL = (FormatName.WEBDATASET, FormatName.LITDATA, FormatName.MDS, FormatName.PARQUET)
PAGES = {"body": FieldType.BYTES, "txt": FieldType.STR}
TOKENS = {"tokens": FieldType.UINT32_ARRAY}

LETTERS = {code: "aé漢\N{ROCKET}\n"[code % 5] for code in range(256)}
"""Letters of one to four bytes, for the letters of Latin-1."""


def make_sample(number: int, size: int) -> tuple[Sample, Loaded]:
    """Return a sample as a source gives it, and as a trainer gets it."""
    rng = random.Random(number)
    loaded: Loaded = {
        "__key__": f"00000-{number:010d}",
        "body": rng.randbytes(rng.randrange(size)),
        "count": rng.randrange(-(1 << 63), 1 << 63),
        "meta": {"number": number, "grün": [None, "x", 1.5]},
        "score": rng.random(),
        "text": rng.randbytes(rng.randrange(size)).decode("latin-1").translate(LETTERS),
        "wide": np.frombuffer(rng.randbytes(4 * rng.randrange(300)), np.uint32),
        "words": np.frombuffer(rng.randbytes(2 * rng.randrange(300)), np.uint16),
    }
    fields = {
        "body": loaded["body"],
        "count": b"%d" % loaded["count"],
        "meta": json.dumps(loaded["meta"]).encode(),
        "score": repr(loaded["score"]).encode(),
        "text": loaded["text"].encode(),
        "wide": loaded["wide"].tobytes(),
        "words": loaded["words"].tobytes(),
    }
    return Sample(loaded["__key__"], fields, number + 1), loaded


@dataclass
class Case:
    """A dataset of one shard, and the values of its samples."""

    store: Store
    manifest: Manifest
    expected: list[Loaded]
    cache: Path | None = None
    decode: bool = True

    @property
    def table(self) -> ShardTable:
        return make_shard_table(self.manifest, "train", decode=self.decode)

    def open(self) -> SampleReader:
        cache = DiskCache(self.cache, 1 << 40) if self.cache else None
        files = DatasetFiles(self.store.spec, cache=cache)
        fetcher = ShardFetcher(files, self.table, part_bytes=1 << 20)
        return open_reader(self.table, self.table.shards[0], fetcher.open(0))

    def read(self, start: int = 0, end: int = COUNT) -> list[Loaded]:
        reader = self.open()
        try:
            return list(reader.load(start, end)())
        finally:
            reader.close()

    @property
    def key(self) -> str:
        return self.table.shards[0].key


def make_case(
    name: FormatName, *, size: int = 300, has_blocks: bool = True, count: int = COUNT
) -> Case:
    made = [make_sample(number, size) for number in range(count)]
    samples, expected = [one for one, _ in made], [one for _, one in made]
    fields: Fields = ALL_TYPES
    if name is FormatName.PAGES:
        fields = PAGES
        samples = [
            Sample(one.key, {"body": one.fields["body"], "txt": one.fields["text"]}, 0)
            for one in samples
        ]
        expected = [
            {"__key__": one["__key__"], "body": one["body"], "txt": one["text"]} for one in expected
        ]
    if name is FormatName.TOKENS:
        fields = TOKENS
        samples = [Sample(one.key, {"tokens": one.fields["wide"]}, 0) for one in samples]
        expected = [{"tokens": one["wide"]} for one in expected]
    store = open_store(f"memory://{secrets.token_hex(8)}")
    manifest = write_dataset(store, "d", [name], fields, [samples], has_blocks=has_blocks)
    return Case(store, manifest, expected)


def assert_same(found: Sequence[Loaded], expected: Sequence[Loaded]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert type(value) is type(other[name]), name
            if isinstance(value, np.ndarray):
                assert value.dtype == other[name].dtype
                assert value.tolist() == other[name].tolist()
                assert value.flags.writeable
            else:
                assert value == other[name], name


@pytest.fixture(params=list(FormatName), ids=str)
def name(request: pytest.FixtureRequest) -> FormatName:
    return request.param


def test_every_type_has_its_value(name: FormatName) -> None:
    case = make_case(name)
    assert_same(case.read(), case.expected)


@pytest.mark.parametrize("name", FULL, ids=str)
def test_numbers_of_json_are_exact(name: FormatName) -> None:
    # Python's `json` cannot read as many levels as the last one has.
    texts = [
        '{"n":123456789012345678901234567890}',
        '{"n":-9223372036854775809,"m":18446744073709551615}',
        "123456789012345678901234567890",
        '{"a":[{"b":[0.1234567890123456789,18446744073709551616]}],"c":1.5}',
        '[0.1234567890123456789,"1234567890123456789012",1e30]',
        "[" * 1000 + "18446744073709551616" + "]" * 1000,
    ]
    if name in {FormatName.LITDATA, FormatName.MDS}:
        texts.pop()  # they take no more than 512 levels
    samples = [Sample(f"k{n}", {"meta": text.encode()}, n) for n, text in enumerate(texts)]
    store = open_store(f"memory://{secrets.token_hex(8)}")
    manifest = write_dataset(store, "d", [name], {"meta": FieldType.JSON}, [samples])
    found = [one["meta"] for one in Case(store, manifest, []).read(0, len(texts))]
    assert list(map(repr, found[:5])) == [repr(json.loads(text)) for text in texts[:5]]
    for deep in found[5:]:
        value = deep
        while isinstance(value, list):
            (value,) = value
        assert value == 2**64


def test_samples_are_read_in_steps_of_any_length(name: FormatName) -> None:
    case = make_case(name)
    for step in (1, 7, 59):
        reader = case.open()
        found: list[Loaded] = []
        for start in range(0, COUNT, step):
            found += reader.load(start, min(start + step, COUNT))()
        assert_same(found, case.expected)


def test_a_reader_begins_anywhere_and_may_go_back(name: FormatName) -> None:
    case = make_case(name)
    reader = case.open()
    for start, end in ((40, 50), (50, 60), (3, 9), (3, 9), (0, 1), (59, 60), (20, 20)):
        assert_same(list(reader.load(start, end)()), case.expected[start:end])


def test_decoding_may_wait_until_later_samples_were_fetched(name: FormatName) -> None:
    case = make_case(name)
    reader = case.open()
    loads = [reader.load(start, start + 10) for start in range(0, COUNT, 10)]
    found = [one for load in loads for one in load()]
    assert_same(found, case.expected)


def test_samples_of_several_parts_and_blocks_are_read(name: FormatName) -> None:
    case = make_case(name, size=400_000, count=20)
    if name is not FormatName.TOKENS:
        assert case.table.shards[0].size > 3 << 20
    reader = case.open()
    found = [one for start in range(5, 20, 3) for one in reader.load(start, start + 3)()]
    assert_same(found, case.expected[5:20])


def test_a_shard_of_many_rows_is_read(name: FormatName) -> None:
    case = make_case(name, size=5, count=2500)
    reader = case.open()
    for start in (0, 990, 1900, 2200):
        found = list(reader.load(start, start + 300)())
        assert_same(found, case.expected[start : start + 300])


def test_shards_without_digests_of_blocks_are_read(name: FormatName) -> None:
    case = make_case(name, size=200_000, count=20, has_blocks=False)
    assert_same(case.read(3, 20), case.expected[3:])


@pytest.mark.parametrize("has_blocks", [True, False])
def test_a_flipped_bit_is_refused_by_name(name: FormatName, has_blocks: bool) -> None:
    case = make_case(name, size=200_000, count=20, has_blocks=has_blocks)
    body = bytearray(read(case.store, case.key))
    body[len(body) // 2] ^= 1
    put(case.store, case.key, bytes(body))
    with pytest.raises(errors.CorruptError, match="does not have the digest of the manifest") as e:
        case.read(0, 20)
    assert case.key in str(e.value)
    if has_blocks and len(body) > 1 << 20:
        assert f"MiB {len(body) // 2 >> 20}" in str(e.value)


def test_a_shard_of_another_size_is_refused_by_name(name: FormatName) -> None:
    case = make_case(name)
    put(case.store, case.key, read(case.store, case.key)[:-1])
    with pytest.raises(errors.ChangedError, match=f"{case.key} was replaced"):
        case.read()


def test_a_deleted_shard_is_named(name: FormatName) -> None:
    case = make_case(name)
    delete_one(case.store, case.key)
    with pytest.raises(errors.NotFoundError, match=f"{case.key} was deleted"):
        case.read()


def test_another_number_of_samples_than_in_the_manifest_is_refused(name: FormatName) -> None:
    case = make_case(name)
    (shard,) = case.manifest.shards
    changed = replace(shard, samples=COUNT + 1)
    case.manifest = case.manifest.model_copy(update={"shards": (changed,)})
    with pytest.raises(errors.CorruptError, match=f"{case.key} cannot be read"):
        case.read(0, COUNT + 1)


def test_bytes_that_are_no_shard_are_refused_by_name(name: FormatName) -> None:
    case = make_case(name)
    noise = random.Random(1).randbytes(50_000)
    manifest = write_noise(case, noise)
    case.manifest = manifest
    with pytest.raises(errors.CorruptError, match=f"{case.key} cannot be read"):
        case.read()


def write_noise(case: Case, noise: bytes) -> Manifest:
    """Replace a shard by other bytes, and give the manifest their digest."""
    put(case.store, case.key, noise)
    (shard,) = case.manifest.shards
    changed = replace(shard, size=len(noise), digest=compute_digest(noise))
    return case.manifest.model_copy(update={"shards": (changed,)})


@pytest.mark.parametrize("name", [FormatName.WEBDATASET, FormatName.PARQUET], ids=str)
def test_a_field_that_a_sample_does_not_have_is_left_out(name: FormatName) -> None:
    fields = {"cls": FieldType.INT, "tokens": FieldType.UINT16_ARRAY, "txt": FieldType.STR}
    samples = [
        Sample("a", {"cls": b"1", "txt": b"x"}, 1),
        Sample("b", {"tokens": b"\1\0\2\0", "txt": b"y"}, 2),
        Sample("c", {"cls": b"3"}, 3),
    ]
    store = open_store(f"memory://{secrets.token_hex(8)}")
    manifest = write_dataset(store, "d", [name], fields, [samples])
    assert_same(
        Case(store, manifest, []).read(0, 3),
        [
            {"__key__": "a", "cls": 1, "txt": "x"},
            {"__key__": "b", "tokens": np.array([1, 2], np.uint16), "txt": "y"},
            {"__key__": "c", "cls": 3},
        ],
    )


@pytest.mark.parametrize("name", [FormatName.WEBDATASET, FormatName.PARQUET], ids=str)
def test_a_json_null_is_a_value_whatever_other_samples_lack(name: FormatName) -> None:
    fields = {"meta": FieldType.JSON, "txt": FieldType.STR}
    samples = [
        Sample("a", {"meta": b"null", "txt": b"x"}, 1),
        Sample("b", {"meta": b"1"}, 2),
        Sample("c", {"txt": b"y"}, 3),
        Sample("d", {"meta": b"null"}, 4),
    ]
    store = open_store(f"memory://{secrets.token_hex(8)}")
    manifest = write_dataset(store, "d", [name], fields, [samples])
    expected: list[Loaded] = [
        {"__key__": "a", "meta": None, "txt": "x"},
        {"__key__": "b", "meta": 1},
        {"__key__": "c", "txt": "y"},
        {"__key__": "d", "meta": None},
    ]
    for start, end in ((0, 4), (0, 1), (1, 3), (3, 4)):
        assert_same(Case(store, manifest, []).read(start, end), expected[start:end])


def test_tar_shards_without_types_have_those_of_their_extensions() -> None:
    body = {"cls": b"7", "jpg": b"\xff\xd8", "json": b'{"a": 1}', "txt": "ü".encode()}
    keys = ["folder.d/a", "x" * 150, "größe", "y" * 95]
    samples = [Sample(key, body, 0) for key in keys]
    store = open_store(f"memory://{secrets.token_hex(8)}")
    manifest = write_dataset(store, "d", [FormatName.WEBDATASET], {}, [samples])
    expected = {"cls": 7, "jpg": b"\xff\xd8", "json": {"a": 1}, "txt": "ü"}
    assert Case(store, manifest, []).read(0, 4) == [{"__key__": key, **expected} for key in keys]


def test_json_that_python_writes_is_read_from_tars_as_webdataset_reads_it() -> None:
    texts = ['{"a":[NaN,Infinity,-Infinity]}', r'{"b":"\ud800"}', "{", "[" * 100_000]
    samples = [Sample(f"k{n}", {"json": text.encode()}, n) for n, text in enumerate(texts)]
    store = open_store(f"memory://{secrets.token_hex(8)}")
    manifest = write_dataset(store, "d", [FormatName.WEBDATASET], {}, [samples])
    case = Case(store, manifest, [])
    assert [repr(one["json"]) for one in case.read(0, 2)] == [
        "{'a': [nan, inf, -inf]}",
        "{'b': '\\ud800'}",
    ]
    for number in (2, 3):
        with pytest.raises(errors.ConfigurationError, match=f"'json' of 'k{number}' has a bad val"):
            case.read(number, number + 1)


def test_a_value_of_another_type_is_refused_by_name() -> None:
    samples = [Sample("a", {"cls": b"1"}, 1), Sample("b", {"cls": b"one"}, 2)]
    store = open_store(f"memory://{secrets.token_hex(8)}")
    manifest = write_dataset(store, "d", [FormatName.WEBDATASET], {}, [samples])
    case = Case(store, manifest, [])
    assert case.read(0, 1) == [{"__key__": "a", "cls": 1}]
    with pytest.raises(errors.ConfigurationError, match="the field 'cls' of 'b' has a bad value"):
        case.read(0, 2)
    case.decode = False
    assert [sample["cls"] for sample in case.read(0, 2)] == [b"1", b"one"]
    types = {"cls": FieldType.INT}
    typed = write_dataset(store, "typed", [FormatName.WEBDATASET], types, [samples])
    with pytest.raises(errors.CorruptError, match="the field 'cls' of 'b' has a bad value"):
        Case(store, typed, []).read(0, 2)


@pytest.fixture
def cached(tmp_path: Path) -> Iterator[Case]:
    case = make_case(FormatName.MDS, size=200_000, count=20)
    case.cache = tmp_path / "cache"
    return case


def test_a_cached_shard_is_read_without_the_store(cached: Case) -> None:
    assert_same(cached.read(0, 20), cached.expected)
    (file,) = (cached.cache or Path()).glob("files/*")
    assert file.name.replace("-", ":") == cached.table.shards[0].digest
    delete_one(cached.store, cached.key)
    assert_same(cached.read(5, 20), cached.expected[5:])


def test_a_damaged_file_of_the_cache_is_mended(cached: Case) -> None:
    cached.read(0, 20)
    (file,) = (cached.cache or Path()).glob("files/*")
    for damage in (b"", file.read_bytes()[:-1], bytes(file.stat().st_size)):
        file.write_bytes(damage)
        assert_same(cached.read(0, 20), cached.expected)


def test_intact_blocks_of_a_damaged_file_of_the_cache_are_not_fetched(cached: Case) -> None:
    cached.read(0, 20)
    (file,) = (cached.cache or Path()).glob("files/*")
    body = read(cached.store, cached.key)
    last = len(body) // BLOCK_SIZE * BLOCK_SIZE
    put(cached.store, cached.key, bytes(last) + body[last:])  # only the last block is intact
    file.write_bytes(body[: last + 5])
    assert_same(cached.read(0, 20), cached.expected)


def test_nothing_of_a_damaged_shard_stays_in_the_cache(cached: Case) -> None:
    body = read(cached.store, cached.key)
    put(cached.store, cached.key, bytes(len(body)))
    with pytest.raises(errors.CorruptError, match="digest of the manifest"):
        cached.read(0, 20)
    assert [
        *(cached.cache or Path()).glob("files/*"),
        *(cached.cache or Path()).glob("parts/*"),
    ] == []
    put(cached.store, cached.key, body)
    assert_same(cached.read(0, 20), cached.expected)


@pytest.mark.parametrize("has_offsets", [False, True], ids=["walked", "manifest"])
def test_a_reader_in_the_middle_of_a_tar_begins_near_its_first_sample(has_offsets: bool) -> None:
    case = make_case(FormatName.WEBDATASET, size=20_000, count=400)
    if not has_offsets:
        (shard,) = case.manifest.shards
        without = replace(shard, sample_offsets="")
        case.manifest = case.manifest.model_copy(update={"shards": (without,)})
    table = case.table
    fetcher = ShardFetcher(DatasetFiles(case.store.spec), table, part_bytes=1 << 20)
    starts: list[int] = []

    def read(start: int, end: int) -> list[Loaded]:
        opened = fetcher.open(0)
        original = opened.read_on
        starts.clear()

        def note(first: int) -> memoryview:
            starts.append(first)
            return original(first)

        opened.read_on = note  # pyright: ignore[reportAttributeAccessIssue]
        return list(open_reader(table, table.shards[0], opened).load(start, end)())

    assert_same(read(300, 310), case.expected[300:310])
    assert (min(starts) == 0) is not has_offsets
    for start in (300, 390, 250, 399):
        assert_same(read(start, start + 1), case.expected[start : start + 1])
        assert min(starts) > table.shards[0].size // 2
    assert_same(read(5, 200), case.expected[5:200])
    again = pickle.loads(pickle.dumps(table))
    assert again.offsets.find(again.shards[0].key, 300) == (0, 0)


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ("AAA", "damaged"),
        ("AAAA", "damaged"),
        (encode_sample_offsets([(20, 512), (10, 1024)]), "not in order"),
        (encode_sample_offsets([(20, 1024), (21, 1024)]), "not in order"),
        (encode_sample_offsets([(COUNT, 1024)]), "not in order"),
        (encode_sample_offsets([(20, 1 << 30)]), "not in order"),
    ],
)
def test_offsets_that_no_shard_can_have_are_refused(offsets: str, said: str) -> None:
    case = make_case(FormatName.WEBDATASET)
    (shard,) = case.manifest.shards
    wrong = replace(shard, sample_offsets=offsets)
    case.manifest = case.manifest.model_copy(update={"shards": (wrong,)})
    with pytest.raises(errors.CorruptError, match=said):
        case.read()
