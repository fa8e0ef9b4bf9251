"""Values of Arrow arrays as bytes, beside those of pyarrow's own `to_pylist`."""

import json
import random
import subprocess
import sys
from datetime import datetime
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest

from millrace.datasets.sample import BadRow, Sample, iterate_rows
from millrace.datasets.sources import arrow_rows
from millrace.datasets.sources.arrow_rows import encode_column, make_rows

TEXTS = [pa.string(), pa.large_string(), pa.string_view()]
BYTES = [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(3)]
INTEGERS = [pa.int8(), pa.uint8(), pa.int32(), pa.int64(), pa.uint64()]


def make_parts(array: Any) -> list[Any]:
    """Return an array, slices of it, and an empty slice."""
    return [
        array,
        array.slice(3),
        array.slice(5, 20),
        array.slice(len(array) - 1),
        array.slice(4, 0),
    ]


def make_values(kind: Any, *, nulls: bool) -> list[Any]:
    rng = random.Random(1)
    if kind in TEXTS:
        values: list[Any] = ["ü€x"[: rng.randrange(4)] * rng.randrange(9) for _ in range(200)]
    elif kind in BYTES:
        values = [rng.randbytes(3 if kind == BYTES[3] else rng.randrange(30)) for _ in range(200)]
    else:
        low = 0 if pa.types.is_unsigned_integer(kind) else -(1 << (kind.bit_width - 1))
        values = [low, low + (1 << kind.bit_width) - 1, *range(100)]
    return [None if nulls and n % 7 == 3 else value for n, value in enumerate(values)]


@pytest.mark.parametrize("nulls", [False, True])
@pytest.mark.parametrize("small_value", [0, 1 << 20])
@pytest.mark.parametrize("kind", [*TEXTS, *BYTES], ids=str)
def test_text_and_bytes_are_those_of_the_array(kind, nulls, small_value, monkeypatch):
    monkeypatch.setattr(arrow_rows, "_SMALL_VALUE", small_value)
    for array in make_parts(pa.array(make_values(kind, nulls=nulls), kind)):
        expected = [one.encode() if isinstance(one, str) else one for one in array.to_pylist()]
        assert encode_column(array) == expected


@pytest.mark.parametrize("nulls", [False, True])
@pytest.mark.parametrize("kind", INTEGERS, ids=str)
def test_integers_are_those_of_json(kind, nulls):
    for array in make_parts(pa.array(make_values(kind, nulls=nulls), kind)):
        assert encode_column(array) == [orjson.dumps(one) for one in array.to_pylist()]


def test_only_the_rows_with_a_null_text_make_no_sample():
    batch = pa.record_batch({"text": ["a", None, "c"], "n": [1, None, 3]})
    columns = {"txt": "text", "cls": "n"}
    rows = make_rows(batch, columns, file_index=2, first=7, cursor=70, where="a.parquet")
    assert list(rows) == [
        Sample("00002-0000000007", {"txt": b"a", "cls": b"1"}, 71),
        BadRow("a.parquet, row 8", "the column 'text' is null", b"", 72),
        Sample("00002-0000000009", {"txt": b"c", "cls": b"3"}, 73),
    ]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_in_utc_are_those_of_arrow(unit):
    rng = random.Random(2)
    values = [None if n % 7 == 3 else rng.randrange(-(2**33), 2**33) for n in range(200)]
    for array in make_parts(pa.array(values, pa.timestamp(unit, "UTC"))):
        texts: list[str | None] = array.cast(pa.string()).to_pylist()
        expected = [text and text.replace(" ", "T") for text in texts]
        assert encode_column(array) == [orjson.dumps(text) for text in expected]


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin", "+02:00"])
def test_a_time_that_has_no_text_is_an_error_in_every_zone(zone):
    array = pa.array([0, 2**62, None, -(2**62)], pa.timestamp("us", zone))
    first, late, null, early = encode_column(array)
    assert (first[:11], null) == (b'"1970-01-01', b"null")
    assert "out of range" in str(late)
    assert "out of range" in str(early)


ZONES = ["Europe/Berlin", "Africa/Monrovia", "Asia/Kathmandu", "-03:30", "Etc/UTC"]


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_in_a_zone_are_the_instants_of_the_array(zone, unit):
    rng = random.Random(3)
    per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    second = [None if n % 7 == 3 else rng.randrange(-(2**33), 2**33) for n in range(200)]
    values = [one and one * per_second + rng.randrange(per_second) for one in second]
    for array in make_parts(pa.array(values, pa.timestamp(unit, zone))):
        arrow: list[str | None] = array.cast(pa.string()).to_pylist()
        instants = array.cast(pa.int64()).to_pylist()
        for value, text, instant in zip(encode_column(array), arrow, instants, strict=True):
            if text is None:
                assert value == b"null"
                continue
            found = orjson.loads(value)
            assert datetime.fromisoformat(found).timestamp() // 1 == instant // per_second
            assert found == text.replace(" ", "T") or found.endswith("Z")


def test_times_before_standard_time_are_written_in_utc_and_others_in_their_zone():
    values = [-2840140800, None, 0]  # 1880, when Berlin was 53 minutes and 28 seconds from UTC
    array: Any = pa.array(values, pa.timestamp("s", "Europe/Berlin"))
    assert encode_column(array) == [
        b'"1880-01-01T00:00:00Z"', b"null", b'"1970-01-01T01:00:00+0100"'
    ]  # fmt: skip
    nested = pa.array([[value] for value in values], pa.list_(array.type))
    assert encode_column(nested) == [
        b'["1880-01-01T00:00:00+00:00"]', b"[null]", b'["1970-01-01T01:00:00+01:00"]'
    ]  # fmt: skip
    rows = make_rows(
        pa.record_batch({"t": array, "l": nested}), None, file_index=0, first=0, cursor=0, where="a"
    )
    assert [orjson.loads(value) for batch in rows for value in batch.columns["json"]] == [
        {"t": "1880-01-01T00:00:00Z", "l": ["1880-01-01T00:00:00+00:00"]},
        {"t": None, "l": [None]},
        {"t": "1970-01-01T01:00:00+0100", "l": ["1970-01-01T01:00:00+01:00"]},
    ]


@pytest.mark.parametrize(("unit", "digits"), [("s", 0), ("ms", 3), ("us", 6), ("ns", 9)])
def test_a_duration_has_one_text_in_every_unit(unit, digits):
    values = [90 * 10**digits, -90 * 10**digits, 0, None, 86_400 * 10**digits]
    array: Any = pa.array(values, pa.duration(unit))
    texts = ["PT90S", "-PT90S", "PT0S", None, "PT86400S"]
    assert [orjson.loads(value) for value in encode_column(array)] == texts
    (batch,) = make_rows(
        pa.record_batch({"d": array}), None, file_index=0, first=0, cursor=0, where="a"
    )
    assert [orjson.loads(value) for value in batch.columns["json"]] == [{"d": t} for t in texts]


def test_durations_keep_all_digits():
    array: Any = pa.array([1, -1, 10, 2**63 - 1, -(2**63)], pa.duration("ns"))
    assert encode_column(array) == [
        b'"PT0.000000001S"', b'"-PT0.000000001S"', b'"PT0.00000001S"',
        b'"PT9223372036.854775807S"', b'"-PT9223372036.854775808S"',
    ]  # fmt: skip
    largest: Any = pa.array([2**63 - 1], pa.duration("s"))
    assert encode_column(largest) == [b'"PT9223372036854775807S"']


def test_nested_times_are_those_of_python():
    struct = {
        "at": pa.timestamp("us", "Europe/Berlin"), "day": pa.date32(), "clock": pa.time64("us"),
        "naive": pa.timestamp("us"),
    }  # fmt: skip
    rng = random.Random(4)
    values = [
        {
            "at": rng.randrange(0, 2**50), "day": rng.randrange(-(2**19), 2**20),
            "clock": rng.choice([0, 10**6, rng.randrange(86400 * 10**6)]),
            "naive": rng.choice([0, rng.randrange(-(2**55), 2**57)]),
        }
        for _ in range(300)
    ]  # fmt: skip
    array: Any = pa.array([None, *values], pa.struct(list(struct.items())))
    expected = [
        one and {name: value.isoformat() for name, value in one.items()}
        for one in array.to_pylist()
    ]
    assert [orjson.loads(value) for value in encode_column(array)] == expected


WITHOUT_ZONES = """
import json, resource, sys
import pyarrow as pa
from millrace import errors
from millrace.datasets.sources.arrow_rows import encode_column

nested = [pa.array([[0]], pa.list_(pa.timestamp("s", zone))) for zone in sys.argv[1:]]
plain = [pa.array([0, None], pa.timestamp("s", zone)) for zone in sys.argv[1:]]
sys.modules["pytz"] = None  # it has its own database
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))  # no file can be opened, so no database
found = []
for array in [*plain, *nested]:
    try:
        found.append([value.decode() for value in encode_column(array)])
    except errors.ConfigurationError as error:
        found.append(str(error))
print(json.dumps(found))
"""


def test_a_machine_without_time_zones_writes_utc_and_refuses_zones():
    zones = ["UTC", "+02:00", "Europe/Berlin", "Mars/X"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ZONES, *zones], check=True, capture_output=True, text=True
    )
    utc, offset, *refused = json.loads(done.stdout)
    assert utc == ['"1970-01-01T00:00:00Z"', "null"]
    assert offset == ['"1970-01-01T02:00:00+0200"', "null"]
    assert refused.pop(3) == ['["1970-01-01T02:00:00+02:00"]']  # offsets need no database
    assert len(refused) == 5
    for said in refused:
        assert "This machine has no whole database of time zones" in said
        assert "`apt-get install tzdata`" in said


LISTS = [
    pa.list_(pa.uint16()),
    pa.list_(pa.int64()),
    pa.large_list(pa.int32()),
    pa.list_(pa.uint8(), 2),
    pa.list_view(pa.int32()),
]


@pytest.mark.parametrize("kind", LISTS, ids=str)
@pytest.mark.parametrize("nulls", [False, True])
def test_lists_of_integers_are_the_items_of_an_array(kind, nulls):
    values = [None if nulls and n % 7 == 3 else [n, 255] for n in range(60)]
    for array in make_parts(pa.array(values, kind)):
        for name, dtype in (("uint16[]", "<u2"), ("uint32[]", "<u4")):
            expected = [
                one if one is None else np.array(one, dtype).tobytes() for one in array.to_pylist()
            ]
            assert encode_column(array, field_type=name) == expected


def test_lists_that_are_no_array_are_bad_rows_beside_good_ones():
    rows = [[1], [], [70_000], [3, None], [-1], None]
    batch = pa.record_batch({"ids": pa.array(rows, pa.list_(pa.int32()))})
    made = [
        row.fields["tokens"] if isinstance(row, Sample) else row.reason
        for row in make_all(batch, {"tokens": "ids"}, {"tokens": "uint16[]"})
    ]
    assert made == [
        b"\x01\x00",
        b"",
        "the column 'ids' has 70000 at index 0, and uint16[] holds integers from 0 to 65535",
        "the column 'ids' has None at index 1, and uint16[] holds integers from 0 to 65535",
        "the column 'ids' has -1 at index 0, and uint16[] holds integers from 0 to 65535",
        "the column 'ids' is null",
    ]


@pytest.mark.parametrize(
    ("kind", "value", "made"),
    [
        (pa.binary(), b"\x01\x00", b"\x01\x00"),
        (pa.string(), "12", "the column 'ids' is a str, and uint16[] takes a list of integers"),
        (pa.int64(), 12, "the column 'ids' is a int, and uint16[] takes a list of integers"),
        (pa.list_(pa.float64()), [1.0], "the column 'ids' has 1.0 at index 0, and"),
        (pa.list_(pa.list_(pa.int8())), [[1]], "the column 'ids' has [1] at index 0, and"),
    ],
)
def test_only_lists_of_integers_and_bytes_are_arrays(kind, value, made):
    batch = pa.record_batch({"ids": pa.array([value], kind)})
    (row,) = make_all(batch, {"tokens": "ids"}, {"tokens": "uint16[]"})
    if isinstance(row, Sample):
        assert row.fields["tokens"] == made
    else:
        assert row.reason.startswith(made)


def make_all(batch, columns, types):
    made = make_rows(batch, columns, file_index=0, first=0, cursor=0, where="a", types=types)
    return [*iterate_rows(made)]
