"""Rows of a table that are added to samples."""

import io
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from millrace import errors
from millrace.datasets.sample import BadRow, LargeFile, Sample
from millrace.datasets.transforms import JoinSettings
from millrace.datasets.transforms import join as join_module
from millrace.datasets.transforms.join import JoinTransform

CSV = b'file_name,caption\ncats/1.jpg,"a cat, asleep"\ncats/2.JPG,two\ndogs/3,three\n'
JSON_LINES = (
    b'{"id": 7, "caption": "seven", "boxes": [1, 2]}\n{"id": "x", "caption": "", "boxes": null}\n'
)


def join(sample, table=CSV, name="m.csv", types=None, **options):
    settings = JoinSettings(table=name, **options)
    ((row,),) = JoinTransform(settings, table, types or {}).apply([sample])
    return row


def make_sample(key="cats/1", **fields):
    return Sample(key, {"jpg": b"pixels", **fields}, 5, 2)


def test_a_whole_row_becomes_the_field_json():
    sample = make_sample()
    row = join(sample)
    assert row == sample._replace(
        fields={
            "jpg": b"pixels",
            "json": b'{"file_name":"cats/1.jpg","caption":"a cat, asleep"}',
        }
    )


@pytest.mark.parametrize(
    ("key", "caption"),
    [
        ("cats/1", b"a cat, asleep"),
        ("cats/2", b"two"),
        ("dogs/3", b"three"),
        ("./dogs/3", b"three"),
    ],
)
def test_a_row_is_found_by_the_file_or_the_key(key, caption):
    row = join(make_sample(key), columns={"txt": "caption"})
    assert row.fields == {"jpg": b"pixels", "txt": caption}


@pytest.mark.parametrize("name", ["cats/1.jpg", "cats/1"])
def test_names_of_a_table_may_begin_with_the_working_directory(name):
    row = join(make_sample(), f"file_name,cls\n./{name},1\n".encode(), columns={"cls": "cls"})
    assert row.fields["cls"] == b"1"


def test_columns_become_fields_as_in_sources():
    def join_json(number):
        return join(
            make_sample(id=number), JSON_LINES, "t.jsonl", column="id", field="id",
            columns={"txt": "caption", "boxes.json": "boxes"},
        ).fields  # fmt: skip

    assert join_json(b"7") | {"jpg": b""} == {
        "jpg": b"", "id": b"7", "txt": b"seven", "boxes.json": b"[1,2]"
    }  # fmt: skip
    assert join_json(b"x")["boxes.json"] == b"null"


def test_declared_types_decide_the_bytes_of_columns():
    row = join(
        make_sample(id=b"7"), JSON_LINES.partition(b"\n")[0], "t.jsonl", {"ids": "uint16[]"},
        column="id", field="id", columns={"ids": "boxes"},
    )  # fmt: skip
    assert row.fields["ids"] == b"\x01\x00\x02\x00"


def test_a_table_of_tabs_is_read_by_its_extension():
    row = join(make_sample(), b"file_name\tcaption\ncats/1.jpg\ta, b\n", "m.TSV")
    assert row.fields["json"] == b'{"file_name":"cats/1.jpg","caption":"a, b"}'


def make_parquet(**columns):
    body = io.BytesIO()
    pq.write_table(pa.table(columns), body, row_group_size=2)
    return body.getvalue()


def test_a_table_of_parquet_gives_the_fields_of_a_parquet_source():
    table = make_parquet(id=[6, 7, 8], caption=["six", "seven", ""], boxes=[[1], [1, 2], []])
    columns = {"txt": "caption", "boxes.json": "boxes"}
    options = {"name": "m.PARQUET", "column": "id", "field": "id", "columns": columns}
    assert join(make_sample(id=b"7"), table, **options).fields == {
        "jpg": b"pixels", "id": b"7", "txt": b"seven", "boxes.json": b"[1,2]"
    }  # fmt: skip
    table = make_parquet(file_name=["cats/1.jpg", "b.jpg", "c.jpg"], label=[1, 2, 3])
    row = join(make_sample(), table, "m.parquet")
    assert row.fields["json"] == b'{"file_name":"cats/1.jpg","label":1}'
    assert (
        join(make_sample("c"), table, "m.parquet", columns={"cls": "label"}).fields["cls"] == b"3"
    )


@pytest.mark.parametrize(
    "name", ["./m.parquet", "../m.parquet", "/data/m.parquet", "s3://b/m.parquet"]
)
def test_a_table_of_parquet_may_have_any_location(name):
    row = join(make_sample(), make_parquet(file_name=["cats/1.jpg"], label=[1]), name)
    assert row.fields["json"] == b'{"file_name":"cats/1.jpg","label":1}'


@pytest.mark.parametrize("columns", [None, {"txt": "caption"}])
def test_a_table_that_is_larger_than_the_memory_for_it_is_refused(monkeypatch, columns):
    monkeypatch.setattr(join_module, "_MAX_HELD_BYTES", 40)
    table = make_parquet(file_name=["1.jpg", "2.jpg"], caption=["a" * 16, "b" * 16])
    with pytest.raises(errors.ConfigurationError, match="more than 40 bytes in its rows"):
        join(make_sample("1"), table, "m.parquet", columns=columns)


def test_short_rows_take_few_bytes_of_memory():
    count = 20_000
    table = b"file_name,cls\n" + b"".join(b"%d.jpg,%d\n" % (n, n) for n in range(count))
    settings = JoinSettings(table="m.csv", columns={"cls": "cls"})
    tracemalloc.start()
    transform = JoinTransform(settings, table)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    ((row,),) = transform.apply([make_sample("19999")])
    assert isinstance(row, Sample)
    assert row.fields["cls"] == b"19999"
    assert held < 100 * count


def test_a_sample_without_a_row_is_quarantined_dropped_or_kept():
    sample = make_sample("cats/9")
    assert join(sample) == BadRow("cats/9", "the table has no row for 'cats/9'", b"pixels", 5)
    assert join(sample, missing="keep") == sample
    settings = JoinSettings(table="m.csv", missing="drop")
    assert JoinTransform(settings, CSV).apply([sample, make_sample()])[0] == []


@pytest.mark.parametrize(
    ("sample", "options", "reason"),
    [
        (make_sample(json=b"{}"), {}, "the field 'json' is there already"),
        (make_sample(JSON=b"{}"), {}, "upper and lower case"),
        (make_sample(), {"field": "id"}, "no field 'id' that names a row"),
        (make_sample(id=b"\xff"), {"field": "id"}, "not text in UTF-8"),
        (make_sample(id=b"x" * 5000), {"field": "id"}, "too long to name a row"),
    ],
)
def test_a_sample_that_cannot_be_joined_says_why(sample, options, reason):
    assert reason in join(sample, **options).reason


def test_a_large_file_is_not_read():
    large = LargeFile(1 << 30, lambda: pytest.fail("read"))
    assert join(make_sample(mp4=large)).fields["mp4"] is large
    assert "too long" in join(make_sample(id=large), field="id").reason


def test_a_sample_with_two_rows_is_quarantined():
    table = b"file_name,a\ncats/1.jpg,1\ncats/1.txt,2\n"
    assert join(make_sample(txt=b""), table).reason == "the table has several rows for 'cats/1'"
    assert isinstance(join(make_sample(), table), Sample)


@pytest.mark.parametrize(
    ("table", "name", "options", "message"),
    [
        (b"", "m.csv", {}, "m.csv has no rows"),
        (b"file_name,a\n", "m.csv", {}, "m.csv has no rows"),
        (b"name,a\nx,1\n", "m.csv", {}, "has no column 'file_name'. Its columns are name, a"),
        (b"file_name;a\nx;1\n", "m.csv", {}, 'Write `delimiter: ";"`'),
        (CSV + b"cats/1.JPG,again\n", "m.csv", {}, "several rows with the name 'cats/1.jpg'"),
        (b"file_name,a\nx,1,2\n", "m.csv", {}, "a row of the table cannot be read"),
        (b'{"id": 1}\n', "m.jsonl", {}, "a row of the table cannot be read"),
        (b"[{}]\n", "m.jsonl", {}, "a row of the table cannot be read"),
        (CSV, "m.csv", {"columns": {"txt": "text"}}, "has no column 'text'"),
        (CSV, "m.parquet", {}, "m.parquet is no parquet file, or is damaged"),
        (b"", "m.parquet", {}, "m.parquet is no parquet file, or is damaged"),
        (make_parquet(id=[1]), "m.parquet", {}, "no column 'file_name'"),
        (make_parquet(file_name=["1", None]), "m.parquet", {}, "'file_name' is null"),
        (make_parquet(file_name=[]), "m.parquet", {}, "m.parquet has no rows"),
    ],
)
def test_a_table_that_cannot_be_joined_is_refused_with_a_sentence(table, name, options, message):
    with pytest.raises(errors.ConfigurationError, match=message):
        join(make_sample(), table, name, **options)


@pytest.mark.parametrize(
    ("table", "name"),
    [
        (b"name,a\nx,1\n", "m.csv"),
        (b"file_name;a\nx;1\n", "m.csv"),
        (b"file_name,a\n\xff.jpg,1\n", "m.csv"),
        (make_parquet(id=[1]), "m.parquet"),
    ],
)
def test_an_error_that_names_settings_of_a_source_has_those_of_the_transform(table, name):
    with pytest.raises(errors.ConfigurationError, match="`column` for the names of the samples"):
        join(make_sample(), table, name)


def test_a_field_compares_whole_values():
    table = b"id,a\nx.JPG,1\n./x.jpg,2\n"
    row = join(make_sample(id=b"x.JPG"), table, column="id", field="id", columns={"a": "a"})
    assert row.fields["a"] == b"1"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"table": "m.xlsx"}, "name a file .csv, .tsv, .jsonl or .parquet"),
        ({"table": "https://a:1/m.csv?X=s"}, "the URL https://a has a query: name a URL without"),
        ({"table": "m.csv", "columns": {}}, "at least 1 item"),
        ({"table": "m.csv", "columns": {"a": "x", "A": "y"}}, "upper and lower case"),
        ({"table": "m.csv", "missing": "ignore"}, "'quarantine', 'drop' or 'keep'"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        JoinSettings(**settings)
