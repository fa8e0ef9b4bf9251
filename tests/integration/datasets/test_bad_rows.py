"""A row that readers could not read makes no sample, and is kept with its reason and its place."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from millrace import PipelineSettings, errors, shard_dataset
from millrace.dataset_ledger import iterate_commits
from millrace.datasets import plan_dataset
from millrace.datasets.loader import ShardLoader
from millrace.datasets.progress_events import ShardUploaded
from millrace.datasets.sources import arrow_rows
from millrace.keys.datasets import DatasetKeys
from millrace.progress import Event
from millrace.storage import list_objects, open_store, read


def make_settings(
    folder: Path, files: dict[str, bytes], source: dict[str, Any], **sharding: Any
) -> PipelineSettings:
    """Write the files of a source, and return the settings of a dataset of them."""
    for name, body in files.items():
        path = folder / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    return PipelineSettings.model_validate(
        {
            "dataset": "d",
            "source": {"url": (folder / "source").as_uri(), **source},
            "store": {"url": (folder / "out").as_uri()},
            "sharding": sharding,
            "execution": {"workers": 0},
        }
    )


def encode_lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def encode_table(table: pa.Table) -> bytes:
    body = io.BytesIO()
    pq.write_table(table, body)
    return body.getvalue()


def read_quarantine(settings: PipelineSettings) -> list[dict[str, str]]:
    """Return the quarantined rows in the order of their places."""
    store = open_store(settings.store)
    keys = [stat.key for stat in list_objects(store, "d/quarantine/")]
    rows = [json.loads(line) for key in keys for line in read(store, key).splitlines()]
    return sorted(rows, key=lambda row: row["where"])


@pytest.mark.parametrize("formats", [["webdataset"], ["parquet", "webdataset"]])
def test_a_null_in_a_field_that_is_no_json_makes_no_sample(tmp_path, formats):
    body = encode_lines({"t": "a", "j": None}, {"t": None, "j": 1}, {"t": "c", "j": {"k": None}})
    columns = {"txt": "t", "json": "j"}
    settings = make_settings(tmp_path, {"a.jsonl": body}, {"columns": columns}, formats=formats)
    assert shard_dataset(settings).samples == 2
    (row,) = read_quarantine(settings)
    assert row == {
        "where": "a.jsonl, byte 22",
        "reason": "the column 't' is null",
        "data": '{"t": null, "j": 1}',
    }


def test_the_type_of_a_field_decides_whether_a_line_may_have_a_null(tmp_path):
    source = {"columns": {"txt": "t", "meta": "m"}}
    settings = make_settings(
        tmp_path,
        {"a.jsonl": encode_lines({"t": "a", "m": None}, {"t": "b", "m": [None]})},
        source,
        formats=["parquet"],
        types={"meta": "json"},
    )
    report = shard_dataset(settings)
    assert (report.samples, report.manifest.quarantined) == (2, 0)


@pytest.mark.parametrize(("field", "samples"), [("txt", 0), ("json", 3)])
def test_a_column_of_nulls_alone_is_written_as_json_only(tmp_path, field, samples):
    table = pa.table({"n": pa.nulls(3), "k": ["a", "b", "c"]})
    source = {"kind": "parquet", "columns": {field: "n", "key.txt": "k"}}
    settings = make_settings(tmp_path, {"a.parquet": encode_table(table)}, source)
    update = {"allow_empty": True, "max_quarantined": 1.0}
    execution = settings.execution.model_copy(update=update)
    report = shard_dataset(settings.model_copy(update={"execution": execution}))
    assert report.samples == samples
    reasons = {row["reason"] for row in read_quarantine(settings)}
    assert reasons == (set() if samples else {"the column 'n' is null"})


@pytest.mark.parametrize("columns", [{"json": "t", "txt": "k"}, None])
def test_a_time_in_an_unknown_zone_costs_its_row_and_not_the_run(tmp_path, columns):
    times = pa.array([[1], None, []], pa.list_(pa.timestamp("ms", tz="Mars/X")))
    table = pa.table({"t": times, "k": ["a", "b", "c"]})
    source = {"kind": "parquet", "columns": columns}
    settings = make_settings(tmp_path, {"a.parquet": encode_table(table)}, source)
    assert shard_dataset(settings).samples == 2
    (row,) = read_quarantine(settings)
    assert row["where"] == "a.parquet, row 0"
    assert re.search("cannot be written: no time zone .*Mars/X", row["reason"])


@pytest.mark.parametrize(
    "kind", [pa.timestamp("ms", "Mars/X"), pa.list_(pa.timestamp("ms", "Mars/X"))]
)
def test_a_machine_without_time_zones_stops_the_run_and_quarantines_nothing(
    tmp_path, monkeypatch, kind
):
    values = [[1], None, []] if pa.types.is_list(kind) else [1, None, None]
    body = encode_table(pa.table({"t": pa.array(values, kind)}))
    settings = make_settings(tmp_path, {"a.parquet": body}, {"kind": "parquet"})
    with monkeypatch.context() as patched:
        # Which zones the machine has is fixed, so the name that it must have is changed.
        patched.setattr(arrow_rows, "_OLD_ZONE", "Mars/Y")
        with pytest.raises(errors.ConfigurationError, match="no whole database of time zones"):
            shard_dataset(settings)
    assert not read_quarantine(settings)
    assert shard_dataset(settings).samples == 2
    (row,) = read_quarantine(settings)
    assert row["where"] == "a.parquet, row 0"


FORMATS = ["webdataset", "litdata", "mds", "parquet"]


@pytest.mark.parametrize("formats", [[name] for name in FORMATS] + [["litdata", "webdataset"]])
def test_a_text_that_is_no_json_in_a_field_of_json_makes_no_sample(tmp_path, formats):
    body = encode_table(pa.table({"t": ["hello", '{"a": 1}', '{"b": 2}', "null"]}))
    source = {"kind": "parquet", "columns": {"json": "t"}}
    settings = make_settings(tmp_path, {"a.parquet": body}, source, formats=formats)
    assert shard_dataset(settings).samples == 3
    (row,) = read_quarantine(settings)
    assert row["reason"].startswith("the field 'json' is no JSON")
    loaded = [sample["json"] for sample in ShardLoader((tmp_path / "out/d").as_uri())]
    assert sorted(map(str, loaded)) == sorted(map(str, [{"a": 1}, {"b": 2}, None]))


@pytest.mark.parametrize("formats", [[name] for name in FORMATS])
@pytest.mark.parametrize("pad", ["", "x" * (2 << 20)], ids=["small", "large"])
def test_a_value_of_a_line_in_a_field_of_json_keeps_its_type(tmp_path, formats, pad):
    values = ["hello", "123", "null", "\u00e9", '{"a": 1}', {"b": 2}, None, 123, True, 1.5]
    body = encode_lines(*({"v": value, "pad": pad} for value in values))
    settings = make_settings(
        tmp_path, {"a.jsonl": body}, {"columns": {"json": "v"}}, formats=formats, seed=None
    )
    assert shard_dataset(settings).samples == len(values)
    loader = ShardLoader((tmp_path / "out/d").as_uri(), shuffle=False)
    assert [repr(sample["json"]) for sample in loader] == [*map(repr, values)]


@pytest.mark.parametrize("pad", ["", "x" * (2 << 20)], ids=["small", "large"])
@pytest.mark.parametrize("transforms", [[], [{"kind": "rename", "fields": {"ids": "tokens"}}]])
def test_a_list_of_integers_in_a_line_is_an_array(tmp_path, transforms, pad):
    rows = [[5], [], [1, 2, 34], [65_536], [-1], [1.5], [10**30], [True], [None], "12", 12, None]
    body = encode_lines(*({"ids": row, "pad": pad} for row in rows))
    settings = make_settings(
        tmp_path,
        {"a.jsonl": body},
        {"columns": {"ids" if transforms else "tokens": "ids"}},
        formats=["tokens", "parquet", "litdata", "mds", "webdataset"],
        types={"tokens": "uint16[]"},
        transforms=transforms,
        seed=None,
    )
    execution = settings.execution.model_copy(update={"max_quarantined": 1.0})
    assert shard_dataset(settings.model_copy(update={"execution": execution})).samples == 3
    for name in settings.sharding.formats:
        loader = ShardLoader((tmp_path / "out/d").as_uri(), format=name, shuffle=False)
        assert [sample["tokens"].tolist() for sample in loader] == rows[:3]
    found = {int(row["where"].split()[-1]): row["reason"] for row in read_quarantine(settings)}
    holds = "uint16[] holds integers from 0 to 65535"
    assert [found[place] for place in sorted(found)] == [
        f"the column 'ids' has 65536 at index 0, and {holds}",
        f"the column 'ids' has -1 at index 0, and {holds}",
        f"the column 'ids' has 1.5 at index 0, and {holds}",
        f"the column 'ids' has 1e+30 at index 0, and {holds}",
        f"the column 'ids' has True at index 0, and {holds}",
        f"the column 'ids' has None at index 0, and {holds}",
        "the column 'ids' is a str, and uint16[] takes a list of integers",
        "the column 'ids' is a int, and uint16[] takes a list of integers",
        "the column 'ids' is null",
    ]


def test_the_text_of_a_csv_column_is_no_array(tmp_path):
    settings = make_settings(
        tmp_path,
        {"a.csv": b'ids\n"[1, 2]"\n'},
        {"kind": "csv", "columns": {"tokens": "ids"}},
        formats=["tokens"],
        types={"tokens": "uint16[]"},
    )
    with pytest.raises(errors.ConfigurationError, match="the CSV column 'ids' has texts"):
        shard_dataset(settings)


@pytest.mark.parametrize("formats", [["webdataset"], ["parquet"]])
def test_a_broken_json_file_costs_itself(tmp_path, formats):
    files = {f"{n}.json": b'{"n": %d}' % n for n in range(20)} | {"bad.json": b'{"n": '}
    types = {} if formats == ["webdataset"] else {"json": "json"}
    settings = make_settings(tmp_path, files, {"kind": "files"}, formats=formats, types=types)
    report = shard_dataset(settings)
    assert (report.samples, report.manifest.quarantined) == (20, 1)
    loaded = [sample["json"]["n"] for sample in ShardLoader((tmp_path / "out/d").as_uri())]
    assert sorted(loaded) == [*range(20)]


def test_what_python_reads_as_json_stays_in_a_shard_without_types(tmp_path):
    files = {"a.json": b'{"score": NaN}', "b.json": b'{"text": "\\ud800"}', "c.json": b"no"}
    settings = make_settings(tmp_path, files, {"kind": "files"})
    assert shard_dataset(settings).samples == 2
    (row,) = read_quarantine(settings)
    assert row["reason"].startswith("the field 'json' is no JSON")


@pytest.mark.parametrize("transform", ["function", "rename"])
def test_json_that_a_transform_gives_is_checked_too(tmp_path, transform):
    (tmp_path / "code.py").write_text("def wrap(s):\n    return {'json': s['txt'].encode()}\n")
    steps = {
        "function": {"function": f"{tmp_path}/code.py:wrap"},
        "rename": {"kind": "rename", "fields": {"txt": "json"}},
    }
    settings = make_settings(
        tmp_path,
        {"a.csv": b"t\n[1]\n[1\n"},
        {"kind": "csv", "columns": {"txt": "t"}},
        formats=["parquet"],
        transforms=[steps[transform]],
        types={"json": "json"},
    )
    report = shard_dataset(settings)
    assert (report.samples, report.manifest.quarantined) == (1, 1)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_that_exits_costs_its_sample_and_not_the_run(tmp_path, workers):
    code = "import sys\ndef f(s):\n    return s if s['txt'] != 'bad' else sys.exit(0)\n"
    (tmp_path / "code.py").write_text(code)
    settings = make_settings(
        tmp_path,
        {"a.jsonl": encode_lines({"t": "a"}, {"t": "bad"}, {"t": "c"})},
        {"columns": {"txt": "t"}},
        transforms=[{"function": f"{tmp_path}/code.py:f"}],
    )
    execution = settings.execution.model_copy(update={"workers": workers})
    report = shard_dataset(settings.model_copy(update={"execution": execution}))
    assert (report.samples, report.manifest.quarantined) == (2, 1)
    (row,) = read_quarantine(settings)
    assert row["reason"] == "f raised SystemExit: 0"


@pytest.mark.parametrize("formats", [["webdataset"], ["litdata"]])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_whose_rows_are_all_dropped_says_so(tmp_path, workers, formats):
    settings = make_settings(
        tmp_path,
        {f"{n}.jsonl": encode_lines({"t": "a"}, {"t": "b"}) for n in range(2)},
        {"columns": {"txt": "t"}},
        formats=formats,
        transforms=[{"kind": "filter", "field": "txt", "min_size": 5}],
    )
    execution = settings.execution.model_copy(update={"workers": workers})
    settings = settings.model_copy(update={"execution": execution})
    reason = r"no samples: the transforms dropped all 4 rows\. Correct the transforms under"
    for _ in range(2):  # also by a later run, which reads no row
        with pytest.raises(errors.QuarantineError, match=reason):
            shard_dataset(settings)


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_that_transforms_drop_are_counted_in_each_commit(tmp_path, workers):
    code = "def f(s):\n    return s if s['txt'] != 'bad' else 1 / 0\n"
    (tmp_path / "code.py").write_text(code)
    texts = ["long one" if n % 7 == 3 else "bad" if n % 50 == 5 else "no" for n in range(1000)]
    settings = make_settings(
        tmp_path,
        {"a.jsonl": encode_lines(*({"t": text} for text in texts)), "b.jsonl": b'{"t": "no"}'},
        {"columns": {"txt": "t"}},
        transforms=[
            {"function": f"{tmp_path}/code.py:f"},
            {"kind": "filter", "field": "txt", "min_size": 5},
        ],
        shard_samples=4,
    )
    update = {"workers": workers, "max_quarantined": 0.03}
    execution = settings.execution.model_copy(update=update)
    settings = settings.model_copy(update={"execution": execution})
    manifest = shard_dataset(settings).manifest
    bad = texts.count("bad")  # 2 % of the rows, and 12 % of those that were not dropped
    assert (manifest.quarantined, manifest.samples["train"]) == (bad, texts.count("long one"))
    assert manifest.dropped == len(texts) + 1 - bad - manifest.samples["train"]
    commits = list(iterate_commits(open_store(settings.store), DatasetKeys("d"), "train-00000"))
    assert len(commits) > 5
    # The rows between two samples are counted with the second.
    assert {one.dropped + one.quarantined for one in commits[1:-1]} == {4 * 6}


def test_a_source_without_rows_says_so_also_with_transforms(tmp_path):
    settings = make_settings(
        tmp_path,
        {"a.jsonl": b"\n"},
        {"columns": {"txt": "t"}},
        transforms=[{"kind": "filter", "field": "txt", "min_size": 5}],
    )
    with pytest.raises(
        errors.QuarantineError, match=r"the source has no rows\. Correct the source"
    ):
        shard_dataset(settings)


@pytest.mark.parametrize("columns", [None, {"txt": "t"}])
def test_a_line_of_json_that_cannot_be_held_is_not_called_invalid(tmp_path, columns):
    lines = [rb'{"t": "\ud800"}', rb'{"t": 1e400}', b'{"t": NaN}', b'{"t": '] * 2
    source = {} if columns is None else {"columns": columns}
    body = b"\n".join([*lines, *[b'{"t": "a"}'] * 8])
    settings = make_settings(tmp_path, {"a.jsonl": body}, source)
    assert shard_dataset(settings).samples == 8
    assert {row["data"]: row["reason"] for row in read_quarantine(settings)} == {
        r'{"t": "\ud800"}': "JSON that cannot be read back: no low surrogate in string",
        '{"t": 1e400}': "JSON that cannot be read back: number is infinity when parsed as double",
        '{"t": NaN}': "not valid JSON",
        '{"t": ': "not valid JSON",
    }


def test_files_of_other_kinds_are_named_in_the_reasons(tmp_path):
    good = b'{"t": 1}\n' * 3
    bodies = {"a.jsonl": b"[\n" + good, "b.jsonl": b'[{"t": 1}]', "c.jsonl": b"PAR1\0\1"}
    settings = make_settings(tmp_path, bodies, {})
    assert shard_dataset(settings).samples == 3
    array = ", but an array: write an object in each line, as `jq -c '.[]'` does"
    assert {row["reason"] for row in read_quarantine(settings)} == {
        f"not valid JSON{array}", f"not a JSON object{array}",
        "not valid JSON, but a parquet file: set `kind: parquet`",
    }  # fmt: skip


def test_bytes_within_lists_are_refused_before_the_run(tmp_path):
    table = pa.table({"a": [[b"x"]], "s": [{"bytes": b"x", "path": "p"}], "b": [b"x"]})
    files = {"a.parquet": encode_table(table)}

    def plan(columns):
        return plan_dataset(make_settings(tmp_path, files, {"kind": "parquet", "columns": columns}))

    with pytest.raises(errors.ConfigurationError, match="the column 'a' holds bytes in a, which"):
        plan({"json": "a"})
    with pytest.raises(errors.ConfigurationError, match=r"column 's' holds bytes in s\.bytes"):
        plan({"json": "s"})
    assert len(plan({"bin": "b", "jpg": "s.bytes", "txt": "s.path"}).partitions) == 1


@pytest.mark.parametrize(
    ("name", "source", "is_table"),
    [
        ("a.parquet", {"kind": "parquet"}, True),
        ("a.parquet", {"kind": "urls"}, True),
        ("a.csv", {"kind": "urls"}, False),
        ("a.csv", {"kind": "csv"}, False),
    ],
)
def test_a_plan_names_the_version_of_the_code_that_reads_tables(tmp_path, name, source, is_table):
    body = encode_table(pa.table({"url": ["x"]})) if name == "a.parquet" else b"url\nx\n"
    plan = plan_dataset(make_settings(tmp_path, {name: body}, source))
    assert ("table" in plan.layout.writer) == is_table


class StoppedByTestError(Exception):
    """Stop of a run before a commit."""


ORDERED = """
def clean(sample):
    return {"txt": "|".join(map(str, sample.values()))}
"""


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("has_function", [False, True])
def test_the_order_of_the_columns_is_that_of_the_run_that_continues(tmp_path, kind, has_function):
    rows = [{"t": "a", "n": "1"}, {"t": None, "n": None}, {"t": "b", "n": "2"}]
    bodies = {
        "jsonl": encode_lines(*rows),
        "csv": b"t,n\na,1\nb,2\n",
        "parquet": encode_table(pa.Table.from_pylist(rows)),
    }
    steps: list[dict[str, Any]] = []
    if has_function:
        (tmp_path / "clean.py").write_text(ORDERED)
        steps = [{"kind": "function", "function": f"{tmp_path}/clean.py:clean"}]
    settings = make_settings(
        tmp_path,
        {f"a.{kind}": bodies[kind]},
        {"kind": kind, "columns": {"txt": "t", "cls": "n"}},
        transforms=steps,
    )

    def stop(event: Event) -> None:
        if isinstance(event, ShardUploaded):
            raise StoppedByTestError

    with pytest.raises(StoppedByTestError):
        shard_dataset(settings, progress=stop)
    report = shard_dataset(settings)
    assert (report.samples, report.manifest.quarantined) == (2, kind != "csv")
