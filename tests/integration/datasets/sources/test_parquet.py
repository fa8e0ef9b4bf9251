"""Rows of parquet files: every row once, from any row on, with the values that the files have."""

import base64
import datetime
import decimal
import io
import json
import os
import random
import secrets
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow.parquet import encryption

from millrace import errors
from millrace.datasets.sample import BadRow, Sample
from millrace.datasets.sources import (
    Division,
    SourceKind,
    SourceSettings,
    open_files,
    open_source,
    partition_source,
)
from millrace.datasets.sources.reader import SourceFileReader
from millrace.keys.datasets import DatasetKeys
from millrace.schemas.dataset import FileRef
from millrace.storage import open_store, put
from tests.stores import make_spec
from tests.support.examples import scale_examples

KEYS = DatasetKeys("d")


def make_body(table, **options):
    """Return a table as a parquet file."""
    body = io.BytesIO()
    pq.write_table(table, body, **options)
    return body.getvalue()


def open_parquet(store, columns=None, **division):
    """Divide a source; return its partitions' ranges, and the source."""
    chosen = SourceSettings(kind=SourceKind.PARQUET, columns=columns)
    made = {"partition_bytes": 1 << 20, "partition_files": 10, "seed": None, "holdout": 0.0}
    files = open_files(store.spec)
    partitioned = partition_source(chosen, files, KEYS, Division(**(made | division)))
    source = open_source(partitioned.record, files, store)
    return partitioned.partitions, source


def read_all(store, columns=None, **division):
    """Read all partitions of a source."""
    partitions, source = open_parquet(store, columns, **division)
    return [row for one in partitions for row in source.iterate_rows(one.source_range, 0)]


@pytest.fixture
def store():
    return open_store(f"memory://{secrets.token_hex(8)}")


@settings(deadline=None, max_examples=scale_examples(60))
@given(
    files=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    group=st.integers(1, 17),
    partition_bytes=st.integers(1, 4000),
    holdout=st.sampled_from([0.0, 0.3, 0.9]),
    seed=st.one_of(st.none(), st.integers(0, 3)),
)
def test_every_row_is_in_one_partition_and_comes_back_from_any_cursor(
    files, group, partition_bytes, holdout, seed
):
    store = open_store(f"memory://{secrets.token_hex(8)}")
    texts = []
    for number, rows in enumerate(files):
        here = [f"{number}-{row} " + "w" * (row % 7) for row in range(rows)]
        table = pa.table({"text": pa.array(here, pa.string()), "n": list(range(rows))})
        put(store, f"{number}.parquet", make_body(table, row_group_size=group))
        texts += here
    partitions, source = open_parquet(
        store, {"txt": "text"}, partition_bytes=partition_bytes, holdout=holdout, seed=seed
    )
    found = []
    for one in partitions:
        rows = list(source.iterate_rows(one.source_range, 0))
        for cut in {0, len(rows) // 2, len(rows) - 1} & set(range(len(rows))):
            assert (
                list(source.iterate_rows(one.source_range, rows[cut].next_cursor))
                == rows[cut + 1 :]
            )
        found += rows
    assert sorted(row.fields["txt"].decode() for row in found) == sorted(texts)
    assert len({row.key for row in found}) == len(texts)
    if texts and holdout and len(texts) > 1:
        assert {one.split for one in partitions} >= {"val"}


def test_values_come_as_bytes_text_or_json(store):
    utc = datetime.UTC
    table = pa.table(
        {
            "text": ["caf\u00e9", ""],
            "large": pa.array(["a", "b"], pa.large_string()),
            "word": pa.array(["x", "y"]).dictionary_encode(),
            "image": [{"bytes": b"\x00\xff", "path": "1.jpg"}, {"bytes": b"", "path": None}],
            "n": pa.array([2**64 - 1, 0], pa.uint64()),
            "x": [0.5, float("nan")],
            "list": [[1, 2], []],
            "when": pa.array([1, None], pa.timestamp("ns", "UTC")),
            "day": [datetime.date(2026, 1, 2), None],
            "price": [decimal.Decimal("1.10"), None],
            "nested": [{"at": datetime.datetime(2026, 1, 2, tzinfo=utc), "k": None}, None],
            "flag": [True, False],
        }
    )  # fmt: skip
    put(store, "a.parquet", make_body(table))
    columns = {name: name for name in table.column_names if name != "image"}
    first, second = read_all(store, {**columns, "jpg": "image.bytes", "name": "image.path"})
    assert isinstance(first, Sample)
    assert first.fields == {
        "text": "caf\u00e9".encode(), "large": b"a", "word": b"x", "jpg": b"\x00\xff",
        "name": b"1.jpg", "n": b"18446744073709551615", "x": b"0.5", "list": b"[1,2]",
        "when": b'"1970-01-01T00:00:00.000000001Z"', "day": b'"2026-01-02"', "price": b'"1.10"',
        "nested": b'{"at":"2026-01-02T00:00:00+00:00","k":null}', "flag": b"true",
    }  # fmt: skip
    assert second == BadRow("a.parquet, row 1", "the column 'image.path' is null", b"", 2)


def test_a_row_without_columns_is_one_json_object(store):
    table = pa.table(
        {"a": [1, None], "t": ["x", "y"], "when": pa.array([1, 2], pa.timestamp("ns"))}
    )
    put(store, "a.parquet", make_body(table))
    rows = read_all(store)
    assert [json.loads(row.fields["json"]) for row in rows] == [
        {"a": 1, "t": "x", "when": "1970-01-01T00:00:00.000000001"},
        {"a": None, "t": "y", "when": "1970-01-01T00:00:00.000000002"},
    ]
    assert [row.key for row in rows] == ["00000-0000000000", "00000-0000000001"]


def test_text_that_is_not_unicode_costs_its_row(store):
    text = pa.array([b"good", b"\xff", b"fine"], pa.binary()).view(pa.string())
    put(store, "a.parquet", make_body(pa.table({"t": text})))
    rows = read_all(store)
    assert [type(row) for row in rows] == [Sample, BadRow, Sample]
    assert rows[1].reason.startswith("the row cannot be written: ")


@pytest.mark.parametrize("columns", [None, {"t": "t"}])
def test_a_time_that_has_no_text_costs_its_row(store, columns):
    times = pa.array([1, 2**62, 3], pa.timestamp("us"))
    put(store, "a.parquet", make_body(pa.table({"t": times})))
    rows = read_all(store, columns)
    assert [type(row) for row in rows] == [Sample, BadRow, Sample]
    assert "out of range" in rows[1].reason


def put_int96(store, name, times, **options):
    """Store a parquet file with times of the type INT96: Julian days and nanoseconds, or None."""
    count = len(times)
    known = [(2440588 + row, 10**9 * row) for row in range(count)]  # in their place at first
    body = make_body(
        pa.table(
            {
                "n": list(range(count)),
                "word": pa.array([f"{row % 90}" for row in range(count)]).dictionary_encode(),
                "t": pa.array(
                    [None if time is None else (day - 2440588) * 86400 * 10**9 + nanoseconds
                     for time, (day, nanoseconds) in zip(times, known, strict=True)],
                    pa.timestamp("ns"),
                ),
            }
        ),
        use_deprecated_int96_timestamps=True, use_dictionary=["word"], compression="none",
        write_statistics=False, **options,
    )  # fmt: skip
    changed = bytearray(body)
    for (day, nanoseconds), time in zip(known, times, strict=True):
        if time is not None:
            written = struct.pack("<QI", nanoseconds, day)
            assert body.count(written) == 1
            struct.pack_into("<QI", changed, body.index(written), time[1], time[0])
    put(store, name, bytes(changed))


DAY = 86400 * 10**9  # nanoseconds
ANY_TIME = st.tuples(st.integers(1721426, 5373484), st.integers(0, DAY - 1))  # years 1 to 9999


def format_int96(time):
    """Return a time of the type INT96 by ISO 8601, without Arrow."""
    if time is None:
        return None
    date = datetime.date.fromordinal(time[0] - 1721425)
    seconds, fraction = divmod(time[1], 10**9)
    clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{date.isoformat()}T{clock}.{fraction:09}"


@settings(deadline=None, max_examples=scale_examples(40))
@given(
    times=st.lists(st.one_of(st.none(), ANY_TIME), min_size=1, max_size=30),
    group=st.integers(1, 17),
    whole=st.booleans(),
)
def test_times_of_int96_are_exact_in_every_year(times, group, whole):
    store = open_store(f"memory://{secrets.token_hex(8)}")
    put_int96(store, "a.parquet", times, row_group_size=group)
    partitions, source = open_parquet(store, None if whole else {"json": "t", "cls": "n"})
    (partition,) = partitions
    rows = list(source.iterate_rows(partition.source_range, 0))
    found = [json.loads(row.fields["json"]) for row in rows]
    assert [one["t"] if whole else one for one in found] == [format_int96(one) for one in times]
    for row in rows[:: max(1, len(rows) // 3)]:
        after = list(source.iterate_rows(partition.source_range, row.next_cursor))
        assert after == rows[row.next_cursor :]


def test_the_last_day_of_the_calendar_stays_that_day_in_every_batch(store):
    times = [(5373484, 0) if row % 3 else (2458850, row) for row in range(5000)]
    put_int96(store, "a.parquet", times, row_group_size=4000)
    rows = read_all(store)
    assert [json.loads(row.fields["json"]) for row in rows] == [
        {"n": row, "word": f"{row % 90}", "t": format_int96(time)} for row, time in enumerate(times)
    ]
    assert rows[1].fields["json"] == b'{"n":1,"word":"1","t":"9999-12-31T00:00:00.000000000"}'


@pytest.mark.parametrize("columns", [None, {"json": "t"}])
def test_a_time_of_int96_that_has_no_text_costs_its_row(store, columns):
    put_int96(store, "a.parquet", [(2440588, 1), (2**32 - 1, 0), (1, 0), None])
    rows = read_all(store, columns)
    assert [type(row) for row in rows] == [Sample, BadRow, Sample, Sample]
    assert "out of range" in rows[1].reason
    assert b"-4713-11-25T00:00:00.000000000" in rows[2].fields["json"]


def test_only_files_of_parquet_are_taken_by_default(store):
    put(store, "data/a.parquet", make_body(pa.table({"t": ["x"]})))
    put(store, "data/_metadata.yaml", b"rows: 1")
    assert len(read_all(store, {"txt": "t"})) == 1


def test_bytes_without_columns_are_refused_with_what_to_write(store):
    table = pa.table({"image": [{"bytes": b"1", "path": "p"}]})
    put(store, "a.parquet", make_body(table))
    with pytest.raises(errors.ConfigurationError, match=r'`columns: \{"bin": "image\.bytes"\}`'):
        read_all(store)


@pytest.mark.parametrize("column", ["txt", "image.size", "image.", "text.bytes", ""])
def test_a_column_that_a_file_lacks_is_refused_before_anything_is_made(store, column):
    table = pa.table({"text": ["x"], "image": [{"bytes": b"1"}]})
    put(store, "good.parquet", make_body(table))
    with pytest.raises(errors.ConfigurationError, match="Its columns are text, image"):
        read_all(store, {"txt": column})


def test_a_file_that_is_no_parquet_is_refused_with_its_name(store):
    put(store, "a.parquet", b"PAR1 and nothing more")
    with pytest.raises(errors.ConfigurationError, match=r"/a\.parquet is no parquet file"):
        read_all(store)


def test_a_part_beyond_the_end_of_the_file_is_damage(store):
    put(store, "a.parquet", make_body(pa.table({"t": ["x"]})))
    reader = SourceFileReader(open_files(store.spec), FileRef(path="a.parquet", size=5, etag=""))
    with pytest.raises(OSError, match="a part from 3 to 9 is not within its bytes"):
        reader.fetch([(3, 9)])


def test_a_flipped_bit_of_a_page_is_noticed(tmp_path):
    rng = random.Random(0)
    table = pa.table({"t": [rng.randbytes(200).hex() for _ in range(50)]})
    body = bytearray(make_body(table, write_page_checksum=True, compression="none"))
    store = open_store(tmp_path.as_uri())
    put(store, "a.parquet", bytes(body))
    partitions, source = open_parquet(store, {"txt": "t"})
    written = (tmp_path / "a.parquet").stat()
    body[len(body) // 2] ^= 1
    (tmp_path / "a.parquet").write_bytes(body)
    os.utime(tmp_path / "a.parquet", ns=(written.st_atime_ns, written.st_mtime_ns))
    with pytest.raises(errors.ConfigurationError, match="is damaged"):
        list(source.iterate_rows(partitions[0].source_range, 0))


def test_a_run_that_continues_reads_the_columns_of_the_row_groups_that_are_left(
    request, rgw, bucket
):
    store = open_store(make_spec("rgw", request))
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "text": [rng.bytes(1000).hex() for _ in range(1000)],
            "other": [rng.bytes(8000).hex() for _ in range(1000)],
        }
    )
    put(store, "a.parquet", make_body(table, row_group_size=100, compression="none",
                                      use_dictionary=False, write_statistics=False))  # fmt: skip
    partitions, source = open_parquet(store, {"txt": "text"}, partition_bytes=1 << 30)
    before = len(rgw.list_requests())
    rows = list(source.iterate_rows(partitions[0].source_range, 850))
    assert [row.fields["txt"].decode() for row in rows] == table["text"].to_pylist()[850:]
    gets = [line for line in rgw.list_requests()[before:] if f"GET /{bucket}/" in line]
    answers = [line for line in gets if " 206 " in line]
    sent = sum(int(line.split(" 206 ")[1].split()[0]) for line in answers)
    assert 2 * 100 * 2000 <= sent < 2 * 100 * 2000 + (128 << 10)  # two row groups, and the footer


def test_rows_of_a_large_row_group_are_read_in_parts(store, monkeypatch):
    from millrace.datasets.sources import parquet as module

    monkeypatch.setattr(module, "_MAX_HELD_BYTES", 1000)
    monkeypatch.setattr(module, "_BUFFER_SIZE", 16 << 10)
    table = pa.table({"t": [f"{n} " + "x" * 500 for n in range(300)]})
    pages = {"data_page_size": 8 << 10, "write_batch_size": 8}
    body = make_body(table, compression="none", use_dictionary=False, **pages)
    put(store, "a.parquet", body)
    read_range, sizes = SourceFileReader._read_range, []

    def note_size(self, start, end):
        sizes.append(end - start)
        return read_range(self, start, end)

    monkeypatch.setattr(SourceFileReader, "_read_range", note_size)
    rows = read_all(store, {"txt": "t"})
    assert [row.fields["txt"].decode() for row in rows] == table["t"].to_pylist()
    assert max(sizes) == module._FOOTER_BYTES < 300 * 500 / 2


class PlainKms(encryption.KmsClient):
    """Key service whose keys are wrapped in nothing, for files with encrypted columns."""

    def __init__(self, _):
        super().__init__()

    def wrap_key(self, key, _):
        return base64.b64encode(key)

    def unwrap_key(self, key, _):
        return base64.b64decode(key)


def test_encrypted_columns_are_refused_before_pyarrow_ends_the_process(store):
    wanted = encryption.EncryptionConfiguration(
        footer_key="f", column_keys={"c": ["b"]}, plaintext_footer=True
    )
    factory = encryption.CryptoFactory(PlainKms)
    keys = factory.file_encryption_properties(encryption.KmsConnectionConfig(), wanted)
    table = pa.table({"a": [1], "b": ["x"]})
    put(store, "a.parquet", make_body(table, encryption_properties=keys))
    with pytest.raises(errors.ConfigurationError, match=r"a\.parquet has encrypted columns"):
        read_all(store, {"txt": "a"})


def test_a_row_group_with_fewer_rows_than_its_footer_says_is_damage(store):
    body = io.BytesIO()
    plain = {"use_dictionary": False, "write_statistics": False, "compression": "none"}
    schema = pa.schema([("a", pa.int64())])
    with pq.ParquetWriter(body, schema, store_schema=False, **plain) as writer:
        writer.write_table(pa.table({"a": list(range(90))}))
        writer.write_table(pa.table({"a": list(range(90, 167))}))
    data = body.getvalue()
    size = int.from_bytes(data[-8:-4], "little")
    # The numbers of rows in the footer, as zigzag varints: 90 of the group, 167 of the file.
    footer = (
        data[-8 - size : -8].replace(b"\xb4\x01", b"\xc8\x01").replace(b"\xce\x02", b"\xe2\x02")
    )
    put(store, "a.parquet", data[: -8 - size] + footer + data[-8:])
    partitions, source = open_parquet(store)
    rows = source.iterate_rows(partitions[0].source_range, 0)
    assert len([next(rows) for _ in range(90)]) == 90
    with pytest.raises(errors.ConfigurationError, match="another number of rows than it says"):
        next(rows)


def test_a_value_that_is_repeated_takes_the_memory_of_few_rows(store):
    long = pa.DictionaryArray.from_arrays(pa.array([0] * 512, pa.int32()), pa.array(["x" * 2**20]))
    put(store, "a.parquet", make_body(pa.table({"t": long}), store_schema=False))
    before = pa.default_memory_pool().bytes_allocated()
    partitions, source = open_parquet(store, {"txt": "t"})
    rows = source.iterate_rows(partitions[0].source_range, 0)
    first = next(rows)
    assert len(first.fields["txt"]) == 2**20
    assert pa.default_memory_pool().bytes_allocated() - before < 64 << 20
    assert sum(1 for _ in rows) == 511


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (pa.Table.from_arrays([pa.array([1]), pa.array([3])], ["a", "a"]), "several columns 'a'"),
        (pa.table({"a": pa.array([[1]], pa.list_(pa.timestamp("ns")))}), "in nanoseconds within"),
        (pa.table({"a": pa.array([[1]], pa.list_(pa.duration("s")))}), "durations or times"),
    ],
)
def test_columns_that_would_lose_values_are_refused(store, table, said):
    put(store, "a.parquet", make_body(table))
    with pytest.raises(errors.ConfigurationError, match=said):
        read_all(store)


def test_times_of_int96_within_lists_are_refused(store):
    table = pa.table({"a": pa.array([[1]], pa.list_(pa.timestamp("us")))})
    put(store, "a.parquet", make_body(table, use_deprecated_int96_timestamps=True))
    with pytest.raises(errors.ConfigurationError, match="times in nanoseconds within lists"):
        read_all(store)


@pytest.mark.parametrize("is_int96", [False, True])
@pytest.mark.parametrize("kind", [pa.timestamp("ns"), pa.duration("s"), pa.list_(pa.time64("ns"))])
def test_only_parts_with_times_that_would_lose_digits_are_refused(store, kind, is_int96):
    meta = pa.StructArray.from_arrays(
        [pa.array(["x"]), pa.array([None], kind)], ["title", "created"]
    )
    body = make_body(pa.table({"meta": meta}), use_deprecated_int96_timestamps=is_int96)
    put(store, "a.parquet", body)
    (row,) = read_all(store, {"txt": "meta.title"})
    assert row.fields == {"txt": b"x"}
    for columns in (None, {"json": "meta"}, {"txt": "meta.title", "json": "meta.created"}):
        with pytest.raises(errors.ConfigurationError, match="durations or times in nanoseconds"):
            read_all(store, columns)


def test_json_of_an_extension_type_is_not_encoded_again(store):
    kind = pa.json_(pa.string())
    table = pa.table({"a": pa.ExtensionArray.from_storage(kind, pa.array(['{"x":1}']))})
    put(store, "a.parquet", make_body(table))
    (row,) = read_all(store, {"json": "a"})
    assert row.fields == {"json": b'{"x":1}'}


def test_an_unknown_time_zone_costs_its_rows(store):
    put(
        store, "a.parquet", make_body(pa.table({"t": pa.array([1], pa.timestamp("us", "No/Zone"))}))
    )
    (row,) = read_all(store)
    assert isinstance(row, BadRow)
    assert "No/Zone" in row.reason


def test_no_columns_at_all_keep_each_row_whole(store):
    put(store, "a.parquet", make_body(pa.table({"a": [1]})))
    (row,) = read_all(store, {})
    assert row.fields == {"json": b'{"a":1}'}
