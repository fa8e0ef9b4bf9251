"""Types of the fields follow the source and its transforms, and those of tokens their ids."""

import pytest

from millrace import errors
from millrace.datasets.formats import open_format
from millrace.datasets.formats.base import FieldType
from millrace.datasets.formats.fields import decide_fields
from millrace.datasets.sources import SourceSettings

FUNCTION = {"kind": "function"}
TOKENIZE = {"kind": "tokenize", "field": "txt", "dtype": "uint32"}
PACK = {**TOKENIZE, "pack": 8}
RENAME = {"kind": "rename", "fields": {"tokens": "ids"}}


def decide(*steps, formats=("parquet",), types=None, kind="jsonl"):
    columns = None if kind == "webdataset" else {"txt": "text", "cls": "label"}
    source = SourceSettings.model_validate({"kind": kind, "columns": columns})
    given = {name: FieldType(one) for name, one in (types or {}).items()}
    return decide_fields([open_format(name) for name in formats], source, steps, given)


@pytest.mark.parametrize("kind", ["jsonl", "webdataset"])
@pytest.mark.parametrize("steps", [[PACK], [FUNCTION, PACK]])
def test_packed_samples_have_tokens_alone_whatever_was_before(kind, steps):
    assert decide(*steps, kind=kind) == {"tokens": "uint32[]"}


def test_tokens_after_a_function_need_no_type():
    assert decide(FUNCTION, TOKENIZE) == {"tokens": "uint32[]"}
    found = decide(FUNCTION, TOKENIZE, RENAME, types={"meta": "json"})
    assert found == {"ids": "uint32[]", "meta": "json"}


def test_tokens_have_a_type_in_webdataset_alone():
    assert decide(TOKENIZE, formats=["webdataset"]) == {"tokens": "uint32[]"}
    assert decide(TOKENIZE, RENAME, formats=["webdataset"]) == {"ids": "uint32[]"}
    assert decide(TOKENIZE, FUNCTION, formats=["webdataset"]) == {}


@pytest.mark.parametrize("kind", ["uint16[]", "str", "json"])
@pytest.mark.parametrize(
    ("steps", "name"),
    [([TOKENIZE], "tokens"), ([FUNCTION, PACK], "tokens"), ([PACK, RENAME], "ids")],
)
def test_a_type_that_is_not_that_of_the_ids_is_refused_with_the_right_one(steps, name, kind):
    with pytest.raises(errors.ConfigurationError, match=rf'Write {{{name}: "uint32\[\]"}}'):
        decide(*steps, types={name: kind})


@pytest.mark.parametrize("kind", ["uint32[]", "bytes"])
def test_tokens_may_be_declared_as_they_are_or_as_bytes(kind):
    assert decide(PACK, types={"tokens": kind}) == {"tokens": kind}


def test_a_function_may_make_tokens_of_another_type():
    found = decide(TOKENIZE, FUNCTION, types={"tokens": "uint16[]"})
    assert found == {"tokens": "uint16[]"}


def test_the_columns_of_a_table_become_fields():
    join = {"kind": "join", "column": "id"}
    assert decide(join) == {"cls": "int", "json": "json", "txt": "str"}
    renamed = {"kind": "rename", "fields": {"id": "uid"}}
    found = decide({**join, "field": "txt", "columns": {"id": "label"}}, renamed)
    assert found == {"cls": "int", "txt": "str", "uid": "int"}
    with pytest.raises(errors.ConfigurationError, match="needs the field 'id'"):
        decide({**join, "field": "id"})
    with pytest.raises(errors.ConfigurationError, match="adds the field 'txt', which"):
        decide({**join, "columns": {"txt": "caption"}})


def test_a_source_without_names_needs_types():
    join = {"kind": "join", "column": "id", "columns": {"txt": "caption"}}
    for steps, kind in (([FUNCTION], "jsonl"), ([join], "webdataset"), ([FUNCTION, join], "jsonl")):
        with pytest.raises(errors.ConfigurationError, match="Write them into `types`"):
            decide(*steps, kind=kind)
    assert decide(join, kind="webdataset", types={"jpg": "bytes"}) == {"jpg": "bytes", "txt": "str"}
    assert decide(join, TOKENIZE, kind="webdataset") == {"tokens": "uint32[]"}
    with pytest.raises(errors.ConfigurationError, match="needs the field 'text'"):
        decide({**TOKENIZE, "field": "text"})
