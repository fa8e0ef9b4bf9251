"""CSV files give the rows that Python's reader gives, from any cursor."""

import csv
import encodings.aliases
import gzip
import io
import json
import secrets
import subprocess
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace import PipelineSettings, errors, shard_dataset
from millrace.datasets.sample import BadRow, Sample
from millrace.datasets.sources import (
    Division,
    SourceSettings,
    open_files,
    open_source,
    partition_source,
)
from millrace.keys.datasets import DatasetKeys
from millrace.storage import open_store, put
from tests.stores import make_spec
from tests.support.examples import scale_examples

KEYS = DatasetKeys("d")
COMPRESS = {
    "": lambda body: body,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def read_parts(store, *, holdout=0.0, **source):
    """Divide a source of CSV files; return the rows of each partition."""
    division = Division(1 << 20, 10_000, None, holdout)
    chosen = SourceSettings(kind="csv", **source)
    divided = partition_source(chosen, open_files(store.spec), KEYS, division)
    opened = open_source(divided.record, open_files(store.spec), make_memory())
    return opened, [
        (one, list(opened.iterate_rows(one.source_range, 0))) for one in divided.partitions
    ]


def read_rows(store, **source):
    return [row for _, rows in read_parts(store, **source)[1] for row in rows]


def make_memory():
    return open_store(f"memory://{secrets.token_hex(8)}")


TEXT = st.lists(st.sampled_from([*'a,";\t\n é', "\r\n"]), max_size=8).map("".join)


@settings(deadline=None, max_examples=scale_examples(60))
@given(
    rows=st.lists(st.lists(TEXT, min_size=2, max_size=2), max_size=12),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    ending=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
    delimiter=st.sampled_from([",", ";", "\t", None]),
    encoding=st.sampled_from(["utf-8", "latin-1", "windows-1252"]),
    extension=st.sampled_from(list(COMPRESS)),
    holdout=st.sampled_from([0.0, 0.5]),
)
def test_rows_are_those_that_were_written_from_any_cursor(
    rows, quoting, ending, last, delimiter, encoding, extension, holdout
):
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter or ",", quoting=quoting, lineterminator=ending)
    writer.writerows([["x", "y"], *rows])
    body = text.getvalue().encode(encoding)
    if not last:
        body = body.removesuffix(ending.encode())
    store = make_memory()
    put(store, f"a.csv{extension}", COMPRESS[extension](body))
    source, parts = read_parts(store, delimiter=delimiter, encoding=encoding, holdout=holdout)
    found = [row for _, part in parts for row in part]
    assert [json.loads(row.fields["json"]) for row in found] == [{"x": x, "y": y} for x, y in rows]
    assert len({row.key for row in found}) == len(found)
    for one, part in parts:
        for index, row in enumerate(part):
            after = source.iterate_rows(one.source_range, row.next_cursor)
            assert list(after) == part[index + 1 :]


def test_the_rows_of_a_file_of_many_blocks_are_those_of_pythons_reader():
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["n", "text"])
    for n in range(30_000):
        writer.writerow([n, f'line {n}\nsaid "{n}", then' if n % 3 else "x" * 200])
    store = make_memory()
    put(store, "a.csv", text.getvalue().encode())
    _, parts = read_parts(store, columns={"txt": "text"}, holdout=0.1)
    text.seek(0)
    wanted = [row["text"].encode() for row in csv.DictReader(text)]
    assert [row.fields["txt"] for _, part in parts for row in part] == wanted
    assert len(parts) == 2
    assert len(parts[1][1]) == pytest.approx(3000, rel=0.2)


NOT_UTF8 = (
    "not UTF-8: set `encoding` of a source of the kind `csv`, or convert the file, as "
    "`iconv -f latin1 -t utf-8` does"
)


def test_bad_rows_are_quarantined_with_where_and_why():
    body = (
        b'\xef\xbb\xbfa,b\r\n1,2\r\n\r\n3\r\n4,5,6\r\n"7"x,8\r\n\xff,9\r\n"10\r\n11",12\r\n'
        b'13,1"4\r\n"15,16\r\n17,18'
    )
    store = make_memory()
    put(store, "a.csv", body)
    rows = read_rows(store)
    assert [json.loads(row.fields["json"]) for row in rows if isinstance(row, Sample)] == [
        {"a": "1", "b": "2"}, {"a": "10\r\n11", "b": "12"}, {"a": "13", "b": '1"4'}
    ]  # fmt: skip
    bad = [row for row in rows if isinstance(row, BadRow)]
    assert [(row.where, row.reason, row.data) for row in bad] == [
        ("a.csv, byte 15", "1 values for 2 columns", b"3"),
        ("a.csv, byte 18", "more values for 2 columns", b"4,5,6"),
        ("a.csv, byte 25",
         "a quote is not closed, or is followed by other characters", b'"7"x,8'),
        ("a.csv, byte 33", NOT_UTF8, b"\xff,9"),
        ("a.csv, byte 59",
         "a quote is not closed, or is followed by other characters", b'"15,16\r\n17,18'),
    ]  # fmt: skip


def test_columns_are_those_of_each_file_by_name():
    store = make_memory()
    put(store, "a.csv", b"id,text\n1,one\n")
    put(store, "b.tsv", b"text\tid\ntwo, too\t2\n")
    put(store, "c.tsv.gz", gzip.compress(b"text\tid\nthree\t3\n"))
    rows = read_rows(store, columns={"txt": "text", "id": "id"})
    assert [row.fields for row in rows] == [
        {"txt": b"one", "id": b"1"}, {"txt": b"two, too", "id": b"2"},
        {"txt": b"three", "id": b"3"},
    ]  # fmt: skip


@pytest.mark.parametrize("extension", list(COMPRESS))
@pytest.mark.parametrize("body", [b"", b"\n", b"\r\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"])
@pytest.mark.parametrize("columns", [{"txt": "text"}, None])
def test_a_file_without_rows_has_no_samples(extension, body, columns):
    store = make_memory()
    put(store, "a.csv", b"text\none\n")
    put(store, f"b.csv{extension}", COMPRESS[extension](body))
    put(store, "c.csv", b"text\ntwo\n")
    rows = read_rows(store, columns=columns)
    values = [b"one", b"two"] if columns else [b'{"text":"one"}', b'{"text":"two"}']
    assert [value for row in rows for value in row.fields.values()] == values


def test_files_without_a_header_have_the_columns_of_the_settings():
    store = make_memory()
    put(store, "a.csv", b"1,one\n2,two\n")
    rows = read_rows(store, header=["id", "text"], columns={"txt": "text"})
    assert [row.fields["txt"] for row in rows] == [b"one", b"two"]


def test_a_carriage_return_in_quotes_ends_no_row():
    store = make_memory()
    put(store, "a.csv", b'"the\rid",text\r\n1,one\r\n"2\r",two\r')
    rows = read_rows(store, columns={"id": "the\rid", "txt": "text"})
    assert [row.fields for row in rows] == [
        {"id": b"1", "txt": b"one"}, {"id": b"2\r", "txt": b"two"}
    ]  # fmt: skip


@pytest.mark.parametrize("names", [["text"], ["id", "text"]])
def test_a_file_whose_lines_end_in_carriage_returns_is_refused_without_a_header(names):
    store = make_memory()
    put(store, "a.csv", b"1,one\r2,two\r")
    with pytest.raises(errors.ConfigurationError, match="its first row has a carriage return"):
        read_rows(store, header=names, columns={"txt": "text"})


@pytest.mark.parametrize("extension", list(COMPRESS))
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"id,txt\n1,2\n", r"has no column 'text'\. Its columns are id, txt\. Correct `columns`"),
        (
            b"id;text\n1;2\n",
            r"has one column 'id;text'. Write `delimiter: \";\"`, or `delimiter: \",\"`",
        ),
        (b"id,text,id\n1,2,3\n", r"several columns 'id'\. Rename them"),
        (b'"id\n1,2\n', r"its first row cannot be read \(a quote is not closed"),
        (b"\xff\xfei\0d\0\r\0\n\0", "begins with the mark of UTF-16, and `encoding` is utf-8"),
        (b"id,t\xe9xt\n1,2\n", r"its first row cannot be read \(not UTF-8: set `encoding`"),
        (b"id,text\r1,one\r2,two\r", r"a\.csv.*: its first row has a carriage return.*exclude"),
        (b'"id","text"\r"1","one"\r', "its first row has a carriage return"),
        (b'id,text\r1,"one\r\n"\r2,two\n', "its first row has a carriage return"),
        (b"id,text\r\r\n1,one\r\r\n", "its first row has a carriage return"),
    ],
)
def test_a_file_without_the_columns_is_refused_before_the_run(extension, body, said):
    store = make_memory()
    put(store, f"a.csv{extension}", COMPRESS[extension](body))
    with pytest.raises(errors.ConfigurationError, match=said):
        read_rows(store, columns={"txt": "text"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kind": "jsonl", "delimiter": ","}, "for the kind `csv` only"),
        ({"kind": "parquet", "header": ["a"]}, "for the kind `csv` only"),
        ({"kind": "csv", "delimiter": '"'}, "cannot be a quote"),
        ({"kind": "csv", "delimiter": ",,"}, "at most 1 character"),
        ({"kind": "csv", "encoding": "utf-16"}, "Convert other files to UTF-8, as `iconv"),
        ({"kind": "csv", "encoding": "no\0pe"}, "Convert other files to UTF-8"),
        ({"kind": "jsonl", "encoding": "latin-1"}, "for the kind `csv` only"),
        ({"kind": "csv", "encoding": "latin-1", "delimiter": "Ł"}, "no character of iso8859-1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        SourceSettings(**given)


def test_an_encoding_is_utf8_or_has_a_byte_for_each_character():
    allowed = set()
    for name in {*encodings.aliases.aliases.values(), "latin-1", "utf-8-sig", "no such", "a\0b"}:
        with suppress(ValueError):
            allowed.add(SourceSettings(kind="csv", encoding=name).encoding)
    assert {"utf-8", "iso8859-1", "iso8859-15", "cp1252", "cp866", "koi8-r"} < allowed
    for name in allowed - {"utf-8"}:
        characters = [bytes([code]).decode(name, "replace") for code in range(256)]
        assert characters[:128] == [*map(chr, range(128))]
        for first, second in product(range(256), b'\n",;A~\x81\xa1\xff'):
            pair = bytes([first, second]).decode(name, "replace")
            assert pair == characters[first] + characters[second]


@pytest.mark.parametrize("columns", [{"txt": "größe", "id": "id"}, None])
@pytest.mark.parametrize("rows", [1, 30_000])  # few rows are not parsed in blocks
def test_values_of_another_encoding_become_utf8(columns, rows):
    store = make_memory()
    body = "id§größe\r\n" + 'é§"10 €"\r\n' * rows
    put(store, "a.csv", body.encode("cp1252"))
    found = read_rows(store, columns=columns, delimiter="§", encoding="Windows-1252")
    fields = {"txt": "10 €".encode(), "id": "é".encode()}
    if columns is None:
        fields = {"json": '{"id":"é","größe":"10 €"}'.encode()}
    assert [row.fields for row in found] == [fields] * rows


def test_bytes_that_are_no_characters_make_no_sample():
    store = make_memory()
    put(store, "a.csv", b"id,text\n1,\xe9\n2,\x81\n3,\x80\n")
    rows = read_rows(store, columns={"txt": "text"}, encoding="cp1252")
    assert [row.fields["txt"] for row in rows if isinstance(row, Sample)] == [
        "é".encode(), "€".encode()
    ]  # fmt: skip
    (bad,) = (row for row in rows if isinstance(row, BadRow))
    assert (bad.reason, bad.data) == ("the byte 0x81 is no character of cp1252", b"2,\x81")


@pytest.mark.parametrize("mark", ["UTF-8", "UTF-16"])
@pytest.mark.parametrize("header", [None, ["id", "text"]])
def test_a_file_with_the_mark_of_another_encoding_is_refused(mark, header):
    store = make_memory()
    put(store, "a.csv", "id,text\n1,é\n".encode({"UTF-8": "utf-8-sig", "UTF-16": "utf-16"}[mark]))
    with pytest.raises(errors.ConfigurationError, match=rf"the mark of {mark}, and `encoding` is"):
        read_rows(store, header=header, encoding="latin-1")


def test_a_plan_pins_an_encoding_other_than_utf8():
    store = make_memory()
    put(store, "a.csv", b"id,text\n1,one\n")

    def plan(encoding):
        chosen, division = SourceSettings(kind="csv", encoding=encoding), Division(1 << 20, 1, 0, 0)
        return partition_source(chosen, open_files(store.spec), KEYS, division).record.settings

    settings = {"columns": None, "header": None, "delimiter": None}
    assert plan("utf-8") == plan("UTF8") == settings
    assert plan("latin-1") == plan("ISO-8859-1") == {**settings, "encoding": "iso8859-1"}


HOSTILE = """
import resource, sys
from pathlib import Path
from millrace.storage import put
from tests.integration.datasets.sources.test_csv import make_memory, read_rows

MIB = 1 << 20
body = {
    "values": b'a,b\\n' + b',' * (32 * MIB) + b'\\n1,2\\n',
    "quoted": b'a,b\\n' + b'"",' * (8 * MIB) + b'1\\n1,2\\n',
    "lines": b'a,b\\n"' + b'x\\n' * MIB + b'"",1\\n1,2\\n"\\n1,2\\n',
}[sys.argv[1]]
store = make_memory()
put(store, "a.csv", body)
read_rows(store)
now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + 256 * MIB,) * 2)
print([type(row).__name__ for row in read_rows(store)])
"""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("values", marks=pytest.mark.soak),
        pytest.param("quoted", marks=pytest.mark.soak),
        "lines",
    ],
)
def test_rows_of_millions_of_values_or_lines_take_little_memory(kind):
    ran = subprocess.run(
        [sys.executable, "-c", HOSTILE, kind],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[4],
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "['BadRow', 'Sample']"


@pytest.mark.parametrize("kind", ["local", "rgw"])
def test_a_dataset_of_csv_files_is_made_by_workers(kind, request, tmp_path_factory):
    store = open_store(make_spec(kind, request))
    for number, (extension, compress) in enumerate(COMPRESS.items()):
        rows = "".join(f'{number}-{n},"text ""{n}""\nof it"\n' for n in range(500))
        put(store, f"{number}.csv{extension}", compress(f"id,text\n{rows}".encode()))
    report = shard_dataset(
        PipelineSettings.model_validate(
            {
                "dataset": "d",
                "source": {
                    "kind": "csv", "columns": {"txt": "text"}, **store.spec.reveal_secrets()
                },
                "store": {"url": tmp_path_factory.mktemp("out").as_uri()},
                "execution": {"workers": 1},
            }
        )
    )  # fmt: skip
    assert (report.samples, report.manifest.quarantined) == (1500, 0)
