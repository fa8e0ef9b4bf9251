"""Contract of every format with an encoder in two steps. A format is added to `CASES`."""

import random
from dataclasses import dataclass
from itertools import accumulate

import pytest

from millrace.datasets.formats.base import (
    BadSampleError,
    BatchEncoder,
    Fields,
    FieldType,
    ShardEncoder,
    ShardFormat,
)
from millrace.datasets.formats.litdata import LitDataFormat
from millrace.datasets.formats.mds import MDSFormat
from millrace.datasets.formats.parquet import PagesFormat, ParquetFormat
from millrace.datasets.sample import LargeFile, RowBatch, Sample, batch_rows
from tests.support.formats import ALL_TYPES

pytestmark = pytest.mark.contract

CAPACITY = 1 << 14


@dataclass(frozen=True)
class Case:
    """A format, and fields that it takes. One of the fields is ``body``, of bytes."""

    format: ShardFormat
    fields: Fields

    def open(self) -> ShardEncoder:
        return self.format.make_encoder(self.fields, CAPACITY)

    def make_sample(self, number: int, size: int = 100) -> Sample:
        rng = random.Random(number)
        values = {
            FieldType.BYTES: rng.randbytes(size),
            FieldType.STR: "grün ".encode() * rng.randrange(20),
            FieldType.JSON: b'{"a": [1, null, "x"]}',
            FieldType.INT: b"%d" % rng.randrange(-(1 << 63), 1 << 63),
            FieldType.FLOAT: b"%r" % rng.random() if rng.random() < 0.5 else b"2",
            FieldType.UINT16_ARRAY: rng.randbytes(2 * rng.randrange(1, 400)),
            FieldType.UINT32_ARRAY: rng.randbytes(4 * rng.randrange(1, 400)),
        }
        fields = {name: values[kind] for name, kind in self.fields.items()}
        return Sample(f"{number:05d}-{number:010d}", fields, number)


CASES = [
    Case(one, ALL_TYPES) for one in (LitDataFormat(), MDSFormat(), PagesFormat(), ParquetFormat())
]


@pytest.fixture(params=CASES, ids=lambda case: case.format.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(params=CASES[:2], ids=lambda case: case.format.name)
def table_case(request: pytest.FixtureRequest) -> Case:
    """A format that neither compresses nor has null values."""
    return request.param


def encode(encoder: ShardEncoder, samples: list[Sample]) -> bytes:
    for sample in samples:
        encoder.prepare(sample)
        encoder.append()
    return bytes(encoder.close())


def test_the_size_is_that_of_the_closed_shard_or_more(case: Case) -> None:
    for count in range(20):
        encoder = case.open()
        prepared = 0
        for number in range(count):
            prepared = encoder.prepare(case.make_sample(number))
            encoder.append()
            assert prepared >= encoder.size
        assert encoder.size >= len(encoder.close())


def test_to_prepare_a_sample_does_not_change_the_shard(case: Case) -> None:
    encoder = case.open()
    shard = encode(encoder, [case.make_sample(0)])
    size = encoder.size
    encoder.prepare(case.make_sample(1))
    assert (encoder.samples, encoder.size, bytes(encoder.close())) == (1, size, shard)


def test_the_sample_that_was_prepared_last_is_appended(case: Case) -> None:
    encoder = case.open()
    encoder.prepare(case.make_sample(1))
    encoder.prepare(case.make_sample(2))
    encoder.append()
    assert encoder.samples == 1
    assert bytes(encoder.close()) == encode(case.open(), [case.make_sample(2)])


def test_a_refused_sample_is_not_in_the_shard(case: Case) -> None:
    encoder = case.open()
    encoder.prepare(case.make_sample(0))
    encoder.append()
    with pytest.raises(BadSampleError):
        encoder.prepare(Sample("bad", {"other": b""}, 0))
    good = [case.make_sample(0), case.make_sample(1)]
    assert encode(encoder, good[1:]) == encode(case.open(), good)


def test_a_reset_keeps_nothing_of_the_shard_before(case: Case) -> None:
    encoder = case.open()
    encode(encoder, [case.make_sample(number, size=700) for number in range(50)])
    encoder.prepare(case.make_sample(50))
    encoder.reset()
    assert encoder.samples == 0
    assert encoder.size == case.open().size
    assert encode(encoder, [case.make_sample(60)]) == encode(case.open(), [case.make_sample(60)])


def test_the_same_samples_give_the_same_bytes(case: Case) -> None:
    samples = [case.make_sample(number) for number in range(30)]
    assert encode(case.open(), samples) == encode(case.open(), samples)


def test_the_order_of_the_fields_does_not_change_the_bytes(case: Case) -> None:
    sample = case.make_sample(0)
    turned = Case(case.format, dict(reversed(case.fields.items())))
    other = sample._replace(fields=dict(reversed(sample.fields.items())))
    assert encode(turned.open(), [other]) == encode(case.open(), [sample])


def test_a_shard_that_is_closed_twice_has_the_same_bytes(case: Case) -> None:
    encoder = case.open()
    shard = encode(encoder, [case.make_sample(number) for number in range(3)])
    assert bytes(encoder.close()) == shard


def test_a_shard_can_be_closed_before_it_is_full(table_case: Case) -> None:
    samples = [table_case.make_sample(number) for number in range(4)]
    encoder = table_case.open()
    encode(encoder, samples[:2])
    assert encode(encoder, samples[2:]) == encode(table_case.open(), samples)


def test_samples_larger_than_the_buffer_are_encoded(case: Case) -> None:
    samples = [case.make_sample(n, size=n * CAPACITY) for n in (0, 3, 1)]
    encoder = case.open()
    encode(encoder, [case.make_sample(7)])
    encoder.reset()
    assert encode(encoder, samples) == encode(
        case.format.make_encoder(case.fields, 1 << 20), samples
    )


def test_a_shard_of_many_small_samples_is_encoded(case: Case) -> None:
    samples = [case.make_sample(number, size=0) for number in range(300)]
    roomy = case.format.make_encoder(case.fields, 1 << 20)
    assert encode(case.open(), samples) == encode(roomy, samples)


def test_a_field_in_a_large_file_is_encoded_as_one_in_memory(case: Case) -> None:
    sample = case.make_sample(0, size=3 * CAPACITY)
    in_files = {name: make_file(bytes(data)) for name, data in sample.fields.items()}
    assert encode(case.open(), [sample._replace(fields=in_files)]) == encode(case.open(), [sample])


def test_a_file_of_another_size_leaves_the_shard_as_it_was(case: Case) -> None:
    encoder = case.open()
    sample = case.make_sample(1)
    for given in (b"short", b"long" * 100):
        file = LargeFile(100, lambda given=given: iter([given]))
        with pytest.raises(ValueError, match="A file of 100 bytes gave"):
            encode(encoder, [sample._replace(fields={**sample.fields, "body": file})])
    assert encode(encoder, [sample]) == encode(case.open(), [sample])


def make_file(data: bytes) -> LargeFile:
    return LargeFile(len(data), lambda: (data[at : at + 1000] for at in range(0, len(data), 1000)))


def test_an_unknown_field_is_refused(case: Case) -> None:
    sample = case.make_sample(0)
    with pytest.raises(BadSampleError, match="other"):
        case.open().prepare(sample._replace(fields={**sample.fields, "other": b""}))


def test_a_missing_field_is_refused(table_case: Case) -> None:
    sample = table_case.make_sample(0)
    with pytest.raises(BadSampleError, match="body"):
        table_case.open().prepare(sample._replace(fields={"text": sample.fields["text"]}))


BAD = [
    (FieldType.STR, b"\xff", "UTF-8"),
    (FieldType.INT, b"1.5", "integer"),
    (FieldType.INT, b"1.0", "integer"),
    (FieldType.INT, b"true", "integer"),
    (FieldType.INT, b"null", "integer"),
    (FieldType.INT, b"9223372036854775808", "64 bits"),
    (FieldType.INT, b"-9223372036854775809", "64 bits"),
    (FieldType.INT, b"1_0", "integer"),
    (FieldType.INT, b"", "integer"),
    (FieldType.FLOAT, b"null", "number"),
    (FieldType.FLOAT, b"false", "number"),
    (FieldType.UINT16_ARRAY, b"odd", "multiple of 2"),
    (FieldType.UINT32_ARRAY, b"sixsix", "multiple of 4"),
    (FieldType.JSON, b"\xff", "UTF-8"),
]


@pytest.mark.parametrize(("kind", "data", "reason"), BAD)
def test_a_value_that_is_none_of_its_type_is_refused(
    case: Case, kind: FieldType, data: bytes, reason: str
) -> None:
    name = next(name for name, one in case.fields.items() if one is kind)
    sample = case.make_sample(0)
    with pytest.raises(BadSampleError, match=reason) as refusal:
        case.open().prepare(sample._replace(fields={**sample.fields, name: data}))
    assert name in str(refusal.value)


def test_a_batch_gives_the_bytes_of_single_samples(case: Case) -> None:
    samples = [case.make_sample(number, size=40 * number) for number in range(60)]
    single, batched = case.open(), case.open()
    assert isinstance(batched, BatchEncoder)
    sizes: list[int] = []
    for sample in samples:
        sizes.append(single.prepare(sample))
        single.append()
    [batch] = batch_rows(iter(samples))
    assert isinstance(batch, RowBatch)
    assert batched.prepare_batch(batch.slice(0, 20)) == [*accumulate(sizes[:20], max)]
    batched.append_batch(7)
    assert batched.prepare_batch(batch.slice(7, 60)) == [*accumulate(sizes[7:], max)]
    batched.append_batch(53)
    assert (batched.samples, batched.size) == (60, single.size)
    assert bytes(batched.close()) == bytes(single.close())


def check_batch_refused(case: Case, bad: Sample) -> None:
    good = [case.make_sample(number) for number in range(3)]
    encoder = case.open()
    encoder.prepare(good[0])
    encoder.append()
    with pytest.raises(BadSampleError):
        encoder.prepare(bad)
    assert isinstance(encoder, BatchEncoder)
    for batch in batch_rows(iter([bad, bad])):
        assert isinstance(batch, RowBatch)
        with pytest.raises(BadSampleError):
            encoder.prepare_batch(batch)
    assert encode(encoder, good[1:]) == encode(case.open(), good)


@pytest.mark.parametrize("fault", ["unknown", "type", "key"])
def test_a_batch_with_a_bad_sample_is_refused_and_changes_nothing(case: Case, fault: str) -> None:
    good = case.make_sample(1)
    texts = {name: b"\xff" for name, kind in case.fields.items() if kind is FieldType.STR}
    bad = {
        "unknown": good._replace(fields={**good.fields, "other": b""}),
        "type": good._replace(fields={**good.fields, **texts}),
        "key": good._replace(key="\ud800"),
    }[fault]
    check_batch_refused(case, bad)


def test_a_batch_with_a_missing_field_is_refused_and_changes_nothing(table_case: Case) -> None:
    good = table_case.make_sample(1)
    first = min(good.fields)
    bad = good._replace(fields={n: value for n, value in good.fields.items() if n != first})
    check_batch_refused(table_case, bad)
