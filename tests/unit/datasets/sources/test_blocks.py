"""Rows that are parsed in blocks are those that are parsed one by one."""

import secrets
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.datasets.sample import Row, RowBatch, Sample
from millrace.datasets.sources import (
    Division,
    SourceSettings,
    csv_values,
    jsonl,
    open_files,
    open_source,
    partition_source,
)
from millrace.datasets.sources.base import BatchSource
from millrace.keys.datasets import DatasetKeys
from millrace.storage import open_store, put
from tests.support.examples import scale_examples

JSON_LINES = [
    b'{"a": "x", "b": 1}',
    b'{"a": "\\u00e9\\ud83d\\ude00", "b": [1.5, {"c": null}]}',
    '{"b": "é", "a": "ü"}'.encode(),
    b'{"a": 3, "b": 12345678901234567890123}',
    b'{"a": null, "b": "", "a": "last"}',
    b'{"a": "no b"}',
    b"[1]",
    b"{",
    b"",
    b"  ",
    b'\xef\xbb\xbf{"a": "x", "b": 1}',
    b'{"a": "\xff", "b": 1}',
    b'{"a": "\\ud800", "b": 1}',
]
CSV_PARTS = [
    *(one.encode() for one in 'a,;"\n\ré'),
    b'""',
    b"\r\n",
    b'"x"',
    b",y\n",
    b"\xff",
    b"\x81",
]


def read_rows(kind: str, body: bytes, **chosen: object) -> tuple[list[Row], int]:
    """Return the rows of a file, and the number of them that came in batches."""
    store = open_store(f"memory://{secrets.token_hex(8)}")
    put(store, f"a.{kind}", body)
    given = SourceSettings.model_validate({"kind": kind, **chosen})
    divided = partition_source(
        given, open_files(store.spec), DatasetKeys("d"), Division(1 << 20, 99, None, 0.0)
    )
    source = open_source(divided.record, open_files(store.spec), store)
    assert isinstance(source, BatchSource)
    rows: list[Row] = []
    batched = 0
    for partition in divided.partitions:
        rows += source.iterate_rows(partition.source_range, 0)
        batches = source.iterate_batches(partition.source_range, 0)
        batched += sum(len(one) for one in batches if isinstance(one, RowBatch))
    return rows, batched


@settings(deadline=None, max_examples=scale_examples(200))
@given(
    lines=st.lists(st.sampled_from(JSON_LINES), min_size=1, max_size=6),
    ending=st.sampled_from([b"\n", b"\r\n"]),
    last=st.booleans(),
    columns=st.sampled_from([None, {"txt": "a"}, {"txt": "a", "json": "b"}]),
)
def test_json_lines(
    lines: list[bytes], ending: bytes, last: bool, columns: dict[str, str] | None
) -> None:
    body = ending.join(lines) + ending * last or b"\n"
    found, _ = read_rows("jsonl", body, columns=columns)
    with patch.object(jsonl, "LARGE_ROW", 0):
        single, batched = read_rows("jsonl", body, columns=columns)
    assert batched == 0
    assert found == single


@settings(deadline=None, max_examples=scale_examples(400))
@given(
    parts=st.lists(st.sampled_from(CSV_PARTS), max_size=14),
    header=st.sampled_from([["u"], ["u", "v"], ["u", "v", "w"]]),
    whole=st.booleans(),
    delimiter=st.sampled_from([",", ";"]),
    encoding=st.sampled_from(["utf-8", "cp1252"]),
    window=st.sampled_from([7, 1 << 18]),
)
def test_csv(
    parts: list[bytes], header: list[str], whole: bool, delimiter: str, encoding: str, window: int
) -> None:
    body = b"first\n" + b"".join(parts)  # a carriage return in the first row is refused
    chosen = {
        "header": header,
        "delimiter": delimiter,
        "encoding": encoding,
        "columns": None if whole else {"txt": header[-1], "bin": header[0]},
    }
    with patch.object(csv_values, "BATCH_BYTES", window):
        found, _ = read_rows("csv", body, **chosen)
    with patch.object(csv_values, "_MAX_COLUMNS", 0):
        single, batched = read_rows("csv", body, **chosen)
    assert batched == 0
    assert found == single


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_rows_without_faults_come_in_batches(kind: str) -> None:
    row = b'{"a": "x\\n", "b": 1}\r\n' if kind == "jsonl" else b'"x\n",1\r\n'
    header = b"" if kind == "jsonl" else b"a,b\r\n"
    rows, batched = read_rows(kind, header + row * 40_000, columns={"txt": "a"})
    assert len(rows) == 40_000
    assert batched > 39_000
    assert {row.fields["txt"] for row in rows if isinstance(row, Sample)} == {b"x\n"}
