"""Thrift's compact protocol: pyarrow's footers are encoded again unchanged, and junk is refused."""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.datasets import thrift
from millrace.datasets.thrift import Value


def write_footer() -> bytes:
    table = pa.table(
        {"text": ["a" * n for n in range(400)], "n": range(400), "f": [0.5] * 400,
         "l": [[True], []] * 200, "t": pa.array(range(400), pa.timestamp("us"))}
    )  # fmt: skip
    body = io.BytesIO()
    pq.write_table(table, body, row_group_size=20, write_page_index=True)
    data = body.getvalue()
    return data[-8 - int.from_bytes(data[-8:-4], "little") : -8]


def test_a_footer_is_decoded_and_encoded_unchanged() -> None:
    footer = write_footer()
    fields, end = thrift.decode_struct(footer)
    assert end == len(footer)
    assert fields[3].content == 400
    assert len(fields[4].content) == 20
    assert thrift.encode_struct(fields) == footer


numbers = st.integers(-(1 << 63), (1 << 63) - 1)
scalars = st.one_of(
    st.builds(lambda flag: Value(thrift.TRUE if flag else thrift.FALSE, flag), st.booleans()),
    st.builds(lambda number: Value(thrift.I64, number), numbers),
    st.builds(lambda number: Value(thrift.BYTE, number), st.integers(0, 255)),
    st.builds(lambda data: Value(thrift.BINARY, data), st.binary(max_size=300)),
    st.builds(lambda data: Value(thrift.DOUBLE, data), st.binary(min_size=8, max_size=8)),
    st.builds(lambda held: Value(thrift.LIST, held, thrift.I64), st.lists(numbers, max_size=40)),
    st.builds(lambda held: Value(thrift.LIST, held, thrift.TRUE), st.lists(st.booleans())),
)
structs = st.recursive(
    st.dictionaries(st.integers(1, 300), scalars, max_size=5),
    lambda inner: st.dictionaries(
        st.integers(1, 300), st.builds(lambda one: Value(thrift.STRUCT, one), inner), max_size=3
    ),
    max_leaves=8,
)


@given(fields=structs)
def test_what_is_encoded_is_decoded(fields: thrift.Fields) -> None:
    data = thrift.encode_struct(fields)
    assert thrift.decode_struct(b"xx" + data, 2) == (fields, len(data) + 2)


@given(data=st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    try:
        fields, end = thrift.decode_struct(data)
    except thrift.ThriftError:
        return
    assert end <= len(data)
    assert thrift.decode_struct(thrift.encode_struct(fields))[0] == fields


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "too early"),
        (b"\x18\x05abc", "too early"),
        (b"\x16" + b"\xff" * 10, "64 bits"),
        (b"\x19\xf5\xff\xff\xff\xff\x07", "more values"),
        (b"\x1c" * 100, "nested"),
        (b"\x1b\x00", "type 11"),
        (b"\x15\x02\x05\x02\x04\x00", "twice"),
        (b"\x19\x19\x15\x02\x00", "type 9"),
    ],
)
def test_junk_is_refused_with_its_reason(data: bytes, reason: str) -> None:
    with pytest.raises(thrift.ThriftError, match=reason):
        thrift.decode_struct(data)
