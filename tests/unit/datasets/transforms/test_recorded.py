"""A plan has the digests of functions and tokenizers, and workers run the bytes of the plan."""

import importlib
import secrets
import sys

import pyarrow as pa
import pytest
from pyarrow import parquet

from millrace import errors
from millrace.datasets.sample import Sample
from millrace.datasets.transforms import (
    FilterSettings,
    FunctionSettings,
    JoinSettings,
    RenameSettings,
    TokenizeSettings,
    bundle_files,
    list_transform_changes,
    open_transforms,
    record_transforms,
    store_large_files,
)
from millrace.datasets.transforms.recorded import read_tokenizer
from millrace.digest import compute_digest
from millrace.keys.datasets import DATASET_KEY
from millrace.storage import create, open_store, put
from millrace.testing.byte_level import END
from tests.support.transforms import KEYS, train_tokenizer
from tests.support.web import Site, serve

CODE = "def clean(sample):\n    return {'txt': sample['txt'].upper()}\n"


@pytest.fixture
def files(tmp_path):
    (tmp_path / "clean.py").write_text(CODE)
    (tmp_path / "tokenizer.json").write_bytes(train_tokenizer())
    return tmp_path


@pytest.fixture
def store():
    return open_store(f"memory://{secrets.token_hex(8)}")


def make_all(files, **options):
    return [
        FilterSettings(field="txt", min_size=1),
        RenameSettings(fields={"txt": "text"}),
        RenameSettings(fields={"text": "txt"}),
        FunctionSettings(function=f"{files / 'clean.py'}:clean"),
        TokenizeSettings(
            tokenizer=str(files / "tokenizer.json"), end_token=END, **{"pack": 4, **options}
        ),
    ]


def describe(settings, seed=0):
    return record_transforms(settings, KEYS, seed=seed).record


def store_transforms(settings, store, **options):
    committed = record_transforms(settings, KEYS, **{"seed": 0, "dataset_store": store, **options})
    for key, body in committed.objects.items():
        create(store, key, body)
    return committed


def apply_all(chain, text):
    samples = [Sample("k", {"txt": text}, 1)]
    for transform in chain.transforms:
        samples = [row for rows in transform.apply(samples) for row in rows]
    return samples


def test_a_worker_runs_the_bytes_of_the_plan_when_the_files_are_gone(files, store):
    settings = make_all(files)
    committed = store_transforms(settings, store)
    before = apply_all(open_transforms(committed.record, store), b"the fox")
    (files / "clean.py").unlink()
    (files / "tokenizer.json").unlink()
    chain = open_transforms(committed.record, store)
    assert apply_all(chain, b"the fox") == before
    assert chain.packing == (4, "uint16")
    assert len(committed.objects) == 2
    assert all(DATASET_KEY.fullmatch(key) for key in committed.objects)


def test_a_table_is_part_of_the_dataset(files, store):
    table = files / "m.csv"
    table.write_text("id,ids\nthe fox,x\n")
    settings = JoinSettings(table=str(table), column="id", field="txt", columns={"ids": "ids"})
    committed = store_transforms([settings], store)
    (key,) = committed.objects
    assert key.endswith(".csv")
    assert DATASET_KEY.fullmatch(key)
    table.unlink()
    (row,) = apply_all(open_transforms(committed.record, store), b"the fox")
    assert row.fields == {"txt": b"the fox", "ids": b"x"}
    digest = committed.record["steps"][0]["digest"]
    pinned = settings.model_copy(update={"digest": digest})
    assert record_transforms([pinned], KEYS, seed=0, dataset_store=store) == committed

    table.write_text("id,ids\nthe fox,y\n")
    changes = list_transform_changes(committed.record, describe([settings]))
    assert [text.partition(" ")[0] for text in changes] == ["transforms.0.digest"]
    with pytest.raises(errors.ConfigurationError, match=r"m\.csv has the digest"):
        describe([pinned])
    (bundled,), texts = bundle_files([settings])
    assert texts == {"transforms/0.csv": table.read_text()}
    assert (bundled.table, bundled.digest) == (
        "./transforms/0.csv", compute_digest(table.read_bytes())
    )  # fmt: skip


def test_another_machine_takes_files_that_are_no_small_texts_from_the_dataset(files, store):
    table = pa.table({"id": ["the fox"], "caption": ["red"]})
    parquet.write_table(table, files / "m.parquet")
    (files / "m.csv").write_text("id,note\nthe fox," + "x" * (1 << 20) + "\n")
    settings = [
        JoinSettings(table=str(files / name), column="id", field="txt", columns={column: column})
        for name, column in (("m.parquet", "caption"), ("m.csv", "note"))
    ]
    bundled, texts = bundle_files([*settings, *make_all(files)[3:]])
    assert texts.keys() == {"transforms/2.py", "transforms/3.json"}
    with pytest.raises(errors.NotFoundError):
        record_transforms(bundled[:2], KEYS, seed=0, dataset_store=store)
    store_large_files(store, KEYS, settings)
    store_large_files(store, KEYS, settings)
    recorded = record_transforms(bundled[:2], KEYS, seed=0, dataset_store=store)
    assert recorded.record == describe(settings)
    (row,) = apply_all(open_transforms(recorded.record, store), b"the fox")
    assert (row.fields["caption"], len(row.fields["note"])) == (b"red", 1 << 20)


def test_another_machine_takes_a_missing_file_from_the_dataset_by_its_digest(files):
    *_, function, tokenize = make_all(files)
    pinned = tokenize.model_copy(
        update={"digest": compute_digest((files / "tokenizer.json").read_bytes())}
    )
    bundled, texts = bundle_files([pinned])
    assert texts
    (files / "tokenizer.json").unlink()
    assert bundle_files([pinned]) == (bundled, {})
    with pytest.raises(errors.NotFoundError, match="set `digest` to take the file"):
        bundle_files([tokenize])
    pinned = function.model_copy(update={"digest": compute_digest(CODE.encode())})
    (files / "clean.py").unlink()
    with pytest.raises(errors.NotFoundError):
        bundle_files([pinned])


def test_a_function_gets_each_field_by_the_type_that_it_has_after_later_renames(files, store):
    (files / "clean.py").write_text(
        "def clean(sample):\n    return {**sample, 'x': repr(sample)}\n"
    )
    function = FunctionSettings(function=f"{files / 'clean.py'}:clean")
    steps = [function, RenameSettings(fields={"id": "sku", "count": "id"})]
    committed = store_transforms(steps, store)
    chain = open_transforms(committed.record, store, {"sku": "str", "id": "int"})
    rows = [Sample("k", {"id": b"7", "count": b"007", "cls": b"7"}, 1)]
    for transform in chain.transforms:
        rows = [row for rows in transform.apply(rows) for row in rows]
    assert rows[0].fields == {
        "sku": b"7",
        "id": b"007",
        "cls": b"7",
        "x": b"{'__key__': 'k', 'id': '7', 'count': 7, 'cls': 7}",
    }


def test_the_description_does_not_depend_on_the_folder_of_the_files(files, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    for name in ("clean.py", "tokenizer.json"):
        (other / name).write_bytes((files / name).read_bytes())
    here = describe(make_all(files))
    there = describe(make_all(other))
    assert here == there
    assert list_transform_changes(here, there) == []
    assert describe([]) == {}


def test_each_change_of_a_transform_is_named(files):
    before = describe(make_all(files))

    def list_changes(settings, seed=0):
        after = describe(settings, seed=seed)
        return [text.partition(" ")[0] for text in list_transform_changes(before, after)]

    assert list_changes(make_all(files), seed=1) == ["transforms.seed"]
    assert list_changes(make_all(files, pack=5)) == ["transforms.4.pack"]
    assert list_changes(make_all(files)[:-1]) == ["transforms"]
    assert list_changes([]) == ["transforms"]
    (files / "clean.py").write_text(f"{CODE}\n")
    assert list_changes(make_all(files)) == ["transforms.3.digest"]
    (files / "clean.py").write_text(CODE)
    (files / "tokenizer.json").write_bytes(train_tokenizer(300))
    assert list_changes(make_all(files)) == ["transforms.4.digest"]


def test_an_object_that_was_replaced_is_not_run(files, store):
    committed = store_transforms([FunctionSettings(function=f"{files / 'clean.py'}:clean")], store)
    (key,) = committed.objects
    put(store, key, b"raise SystemExit('code of another')\n")
    with pytest.raises(errors.CorruptError, match="does not have the digest of the plan"):
        open_transforms(committed.record, store)


def test_a_machine_without_a_file_takes_the_file_of_the_digest_in_the_settings(files, store):
    committed = store_transforms(make_all(files), store)
    digests = [step.get("digest") for step in committed.record["steps"]]
    (files / "clean.py").unlink()
    (files / "tokenizer.json").unlink()
    with pytest.raises(errors.NotFoundError, match="set `digest` to take the file"):
        record_transforms(make_all(files), KEYS, seed=0, dataset_store=store)
    settings = [
        step.model_copy(update={"digest": digest}) if digest else step
        for step, digest in zip(make_all(files), digests, strict=True)
    ]
    again = record_transforms(settings, KEYS, seed=0, dataset_store=store)
    assert again == committed


def test_an_object_of_another_digest_is_never_taken_for_a_missing_file(files, store):
    committed = store_transforms([FunctionSettings(function=f"{files / 'clean.py'}:clean")], store)
    (key,) = committed.objects
    put(store, key, b"raise SystemExit('code of another')\n")
    digest = committed.record["steps"][0]["digest"]
    (files / "clean.py").unlink()
    settings = [FunctionSettings(function=f"{files / 'clean.py'}:clean", digest=digest)]
    with pytest.raises(errors.NotFoundError):
        record_transforms(settings, KEYS, seed=0, dataset_store=store)


def test_a_file_of_another_digest_than_in_the_settings_is_refused(files):
    digest = compute_digest(b"other")
    for settings in (
        FunctionSettings(function=f"{files / 'clean.py'}:clean", digest=digest),
        FunctionSettings(function="json:loads", digest=digest),
        TokenizeSettings(tokenizer=str(files / "tokenizer.json"), digest=digest),
    ):
        with pytest.raises(errors.ConfigurationError, match=f"and not {digest}"):
            describe([settings])


def test_an_installed_module_that_changed_is_refused(files, store, monkeypatch):
    monkeypatch.syspath_prepend(str(files))
    name = f"module_{secrets.token_hex(4)}"
    module = files / f"{name}.py"
    module.write_text(CODE)
    importlib.invalidate_caches()
    committed = store_transforms([FunctionSettings(function=f"{name}:clean")], store)
    assert committed.objects == {}
    assert apply_all(open_transforms(committed.record, store), b"a")[0].fields == {"txt": b"A"}
    module.write_text(CODE.replace("upper", "lower"))
    del sys.modules[name]
    importlib.invalidate_caches()
    with pytest.raises(errors.ConfigurationError, match=f"The module {name} has the digest"):
        open_transforms(committed.record, store)


def test_another_version_of_the_library_or_of_millrace_is_refused(files, store):
    record = store_transforms(make_all(files), store).record
    steps = record["steps"]
    older = {**record, "steps": [*steps[:-1], {**steps[-1], "library": "0.1"}]}
    with pytest.raises(errors.ConfigurationError, match=r"pip install tokenizers==0\.1"):
        open_transforms(older, store)
    with pytest.raises(errors.ConfigurationError, match="transforms of version '0'"):
        open_transforms({**record, "version": "0"}, store)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def other(sample): pass", "has no function clean"),
        ("clean = 3", "has no function clean"),
        ("import clean_helpers", r"clean\.py cannot be run: ModuleNotFoundError.*install them"),
        ("def clean(:", r"clean\.py cannot be run: .*SyntaxError"),
        ("def clean(): pass", r"write `def clean\(sample\):`"),
    ],
)
def test_code_that_cannot_work_is_refused_when_the_dataset_is_planned(files, code, message):
    (files / "clean.py").write_text(code)
    settings = [FunctionSettings(function=f"{files / 'clean.py'}:clean")]
    with pytest.raises(errors.ConfigurationError, match=message):
        describe(settings)


def test_a_file_that_is_too_large_is_not_read(files):
    (files / "clean.py").write_text(CODE + "#" * (4 << 20))
    settings = [FunctionSettings(function=f"{files / 'clean.py'}:clean")]
    with pytest.raises(errors.ConfigurationError, match="more than the 4,194,304 that are allowed"):
        describe(settings)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such_module:clean", "Install it on every machine"),
        ("json:no_such_function", "json has no function no_such_function"),
        ("itertools:count", "has no file, so its changes would not be seen"),
    ],
)
def test_an_installed_function_that_cannot_be_recorded_is_refused(function, message):
    with pytest.raises(errors.ConfigurationError, match=message):
        describe([FunctionSettings(function=function)])


@pytest.mark.parametrize("name", ["my tok.json", "50%.json", "a#b?.json", "ä%20b.json"])
def test_a_file_is_read_by_its_url_whatever_its_name(name, tmp_path):
    path = tmp_path / "my dir" / name
    path.parent.mkdir()
    path.write_bytes(train_tokenizer())
    assert read_tokenizer(path.as_uri()) == read_tokenizer(str(path)) == train_tokenizer()


def test_a_tokenizer_is_read_from_a_store_and_from_a_web_server(files):
    expected = describe(make_all(files))
    tokenize = make_all(files)[-1]
    moved = tokenize.model_copy(update={"tokenizer": f"file://{files}/tokenizer.json"})
    assert describe([moved])["steps"] == expected["steps"][-1:]
    with serve(Site(files={"/tokenizer.json": train_tokenizer()})) as site:
        moved = tokenize.model_copy(update={"tokenizer": f"{site.url}/tokenizer.json"})
        committed = record_transforms([moved], KEYS, seed=0, allow_private=True)
        assert committed.record["steps"] == expected["steps"][-1:]
        with pytest.raises(errors.MillraceError, match="private"):
            record_transforms([moved], KEYS, seed=0)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder of code that is on Python's path, with modules whose names are its own."""
    name = f"project_{secrets.token_hex(4)}"
    (tmp_path / f"{name}_helper.py").write_text(f"import {name}.deep\n")
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("from .early import LIMIT\n")
    (tmp_path / name / "early.py").write_text("LIMIT = 1\n")
    (tmp_path / name / "deep.py").write_text("LIMIT = 1\n")
    (tmp_path / name / "unused.py").write_text("")
    (tmp_path / name / "code.py").write_text(f"from . import deep\nimport json\n{CODE}")
    (tmp_path / "code.py").write_text(
        f"{CODE}\ndef later():\n    import {name}_helper, json, numpy\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return name


@pytest.mark.parametrize(
    ("function", "modules"),
    [
        ("./code.py:clean", ["{}", "{}.deep", "{}.early", "{}_helper"]),
        ("{}.code:clean", ["{}", "{}.deep", "{}.early"]),
    ],
)
def test_the_modules_that_a_function_imports_are_pinned(
    project, function, modules, tmp_path, monkeypatch, store
):
    monkeypatch.chdir(tmp_path)
    settings = [FunctionSettings(function=function.format(project))]
    before = store_transforms(settings, store).record
    assert [*before["steps"][0]["modules"]] == [name.format(project) for name in modules]
    open_transforms(before, store)
    (tmp_path / project / "deep.py").write_text("LIMIT = 2\n")
    (change,) = list_transform_changes(before, describe(settings))
    assert change.startswith(f"transforms.0.modules.{project}.deep (blake3:")
    with pytest.raises(errors.ConfigurationError, match=f"{project}.deep, which a function of"):
        open_transforms(before, store)
    (tmp_path / project / "deep.py").unlink()
    with pytest.raises(errors.ConfigurationError, match="has no file here"):
        open_transforms(before, store)


def test_code_that_imports_nothing_of_its_own_is_described_as_before(files):
    (files / "clean.py").write_text(f"import json, numpy, orjson\n{CODE}")
    settings = [FunctionSettings(function=f"{files / 'clean.py'}:clean")]
    assert describe(settings)["steps"][0].keys() == {"kind", "function", "digest", "object"}
    installed = describe([FunctionSettings(function="textwrap:dedent")])
    assert installed["steps"][0].keys() == {"kind", "function", "digest"}
