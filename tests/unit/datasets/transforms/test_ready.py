"""Filters, new names and tokens of samples."""

import json

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from millrace import errors
from millrace.datasets.sample import BadRow, LargeFile, Sample
from millrace.datasets.transforms import (
    FilterSettings,
    FunctionSettings,
    JoinSettings,
    RenameSettings,
    TokenizeSettings,
    TransformList,
)
from millrace.datasets.transforms.base import RowGroup, apply_transform
from millrace.datasets.transforms.filter import FilterTransform
from millrace.datasets.transforms.rename import RenameTransform
from millrace.datasets.transforms.tokenize import TokenizeTransform
from millrace.testing.byte_level import END
from tests.support.transforms import train_tokenizer

LIST = TypeAdapter(TransformList)


def make_samples(*texts):
    return [Sample(f"k{n}", {"txt": text.encode()}, n) for n, text in enumerate(texts)]


def test_a_list_of_settings_is_read_by_kind():
    found = LIST.validate_python(
        [
            {"kind": "filter", "field": "txt", "min_size": "1KiB"},
            {"kind": "rename", "fields": {"txt": "text"}},
            {"kind": "function", "function": "package.module:clean"},
            {"table": "m.csv", "field": "id"},
            {"kind": "tokenize", "tokenizer": "t.json", "field": "text", "truncate": 5},
        ]
    )
    assert [type(one) for one in found] == [
        FilterSettings,
        RenameSettings,
        FunctionSettings,
        JoinSettings,
        TokenizeSettings,
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([{"kind": "filter", "field": "txt"}], "set min_size, max_size, include or exclude"),
        ([{"kind": "filter", "field": "txt", "include": "(a)\\1"}], "without look-around"),
        ([{"kind": "filter", "field": "txt", "exclude": "a{1000}{1000}"}], "is no regular"),
        ([{"kind": "filter", "field": "a/b", "min_size": 1}], "write an extension"),
        ([{"kind": "filter", "field": "a", "min_size": 3, "max_size": 2}], "keep no sample"),
        ([{"kind": "rename", "fields": {}}], "at least 1 item"),
        ([{"kind": "rename", "fields": {"a": "c", "b": "c"}}], "a name of its own"),
        ([{"kind": "rename", "fields": {"a": "c", "b": "C"}}], "upper and lower case"),
        ([{"kind": "function", "function": "clean"}], "write module:function"),
        ([{"kind": "tokenize", "tokenizer": "t", "pack": 8}], "set end_token"),
        (
            [{"kind": "tokenize", "tokenizer": "t", "pack": 8, "truncate": 2, "end_token": "e"}],
            "set one of them",
        ),
        (
            [
                {"kind": "tokenize", "tokenizer": "t", "pack": 8, "end_token": "e"},
                {"kind": "rename", "fields": {"a": "b"}},
            ],
            "make pack the last step",
        ),
        (
            [{"kind": "other"}],
            "a transform has a .kind.: filter, rename, join, function or tokenize",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_with_a_sentence(settings, message):
    with pytest.raises(ValidationError, match=message):
        LIST.validate_python(settings)


def test_a_function_is_in_a_file_or_a_module():
    assert FunctionSettings(function="./clean.py:fix").file == "./clean.py"
    assert FunctionSettings(function="clean.py:fix").file == "clean.py"
    assert FunctionSettings(function="package.module:fix").file is None
    assert FunctionSettings(function="package.module:fix").module == "package.module"


@pytest.mark.parametrize(
    ("conditions", "kept"),
    [
        ({"min_size": 4}, ["four", "é...", "fives"]),
        ({"max_size": 4}, ["", "four"]),
        ({"min_size": 5, "max_size": 5}, ["é...", "fives"]),
        ({"include": "^f"}, ["four", "fives"]),
        ({"exclude": "i|é"}, ["", "four"]),
        ({"include": r"\.", "exclude": "x"}, ["é..."]),
        ({"min_size": 1, "include": "s$"}, ["fives"]),
    ],
)
def test_a_filter_keeps_the_samples_that_meet_all_conditions(conditions, kept):
    samples = make_samples("", "four", "é...", "fives")
    rows = FilterTransform(FilterSettings(field="txt", **conditions)).apply(samples)
    assert len(rows) == 4
    assert [row.fields["txt"].decode() for each in rows for row in each] == kept
    assert [row for each in rows for row in each] == [
        s for s in samples if s.fields["txt"].decode() in kept
    ]


def test_a_filter_of_sizes_reads_no_large_file():
    large = LargeFile(1 << 30, lambda: pytest.fail("read"))
    sample = Sample("k", {"bin": large}, 1)
    assert FilterTransform(FilterSettings(field="bin", min_size=9)).apply([sample]) == [[sample]]


def test_large_files_are_read_one_at_a_time():
    read = []

    def make_group(number):
        large = LargeFile(1 << 20, lambda: read.append(number) or iter([b"x" * (1 << 20)]))
        return RowGroup(number, number + 1, [Sample("k", {"txt": large}, number + 1)])

    filtering = FilterTransform(FilterSettings(field="txt", include="^x"))
    for number, group in enumerate(apply_transform(filtering, map(make_group, range(300)))):
        assert group.cursor == number
        assert read == [*range(number + 1)]


def test_a_sample_without_the_field_is_quarantined():
    (rows,) = FilterTransform(FilterSettings(field="text", min_size=1)).apply(make_samples("a"))
    assert rows == [BadRow("k0", "no field 'text' to filter by", b"a", 0)]
    (rows,) = RenameTransform(RenameSettings(fields={"text": "b"})).apply(make_samples("a"))
    assert rows == [BadRow("k0", "no field 'text' to rename", b"a", 0)]


def test_names_are_exchanged_and_never_joined():
    sample = Sample("k", {"a": b"1", "b": b"2", "c": b"3"}, 1)

    def rename(**fields):
        ((row,),) = RenameTransform(RenameSettings(fields=fields)).apply([sample])
        return row

    assert rename(a="b", b="a").fields == {"b": b"1", "a": b"2", "c": b"3"}
    assert rename(a="d").fields == {"d": b"1", "b": b"2", "c": b"3"}
    assert rename(a="b").reason == "a renamed field has the name of another field"
    assert "upper and lower case" in rename(a="B").reason


def tokenize(samples, body=None, **options):
    settings = TokenizeSettings(tokenizer="t", **options)
    transform = TokenizeTransform(settings, body or train_tokenizer())
    return transform, [row for rows in transform.apply(samples) for row in rows]


TEXTS = ["the quick fox", "", "é 水車 🦊", "a\x00b\r\n", f"{END} inside", "mill " * 50]


@pytest.mark.parametrize("truncate", [None, 1, 7, 1000])
@pytest.mark.parametrize("end_token", [None, END])
def test_tokens_are_those_of_the_library(truncate, end_token):
    library = Tokenizer.from_str(train_tokenizer().decode())
    end = [] if end_token is None else [library.token_to_id(END)]
    expected = [[*library.encode(text).ids, *end][:truncate] for text in TEXTS]
    _, rows = tokenize(make_samples(*TEXTS), truncate=truncate, end_token=end_token)
    assert [np.frombuffer(row.fields["tokens"], "<u2").tolist() for row in rows] == expected
    assert [row.key for row in rows] == [f"k{n}" for n in range(len(TEXTS))]


def test_the_text_is_replaced_and_other_fields_stay():
    sample = Sample("k", {"text": b"the fox", "json": b"{}"}, 1)
    _, (row,) = tokenize([sample], field="text")
    assert sorted(row.fields) == ["json", "tokens"]
    _, (row,) = tokenize([sample], field="text", pack=4, end_token=END)
    assert sorted(row.fields) == ["tokens"]


def test_the_size_of_the_vocabulary_decides_the_type_of_a_token():
    body = json.loads(train_tokenizer())
    transform, _ = tokenize([])
    assert transform.dtype == "uint16"
    body["added_tokens"].append({**body["added_tokens"][0], "id": 65_535, "content": "<last>"})
    vocabulary = body["model"]["vocab"]
    vocabulary["<last>"] = 65_535
    transform, _ = tokenize([], json.dumps(body).encode())
    assert transform.dtype == "uint16"
    vocabulary["<last>"] = body["added_tokens"][-1]["id"] = 65_536
    transform, (row,) = tokenize(make_samples("a <last>"), json.dumps(body).encode())
    assert transform.dtype == "uint32"
    tokens = np.frombuffer(row.fields["tokens"], "<u4")
    assert tokens[-1] == 65_536


def test_truncation_and_padding_of_the_file_lose_and_add_nothing():
    library = Tokenizer.from_str(train_tokenizer().decode())
    expected = library.encode("the lazy dog " * 9).ids
    library.enable_truncation(3)
    library.enable_padding(length=1000)
    _, (row,) = tokenize(make_samples("the lazy dog " * 9), library.to_str().encode())
    assert np.frombuffer(row.fields["tokens"], "<u2").tolist() == expected


def test_special_tokens_of_the_tokenizer_are_added_on_request_only():
    library = Tokenizer.from_str(train_tokenizer().decode())
    end = library.token_to_id(END)
    library.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, end)]
    )
    body = library.to_str().encode()
    _, (plain,) = tokenize(make_samples("fox"), body)
    _, (added,) = tokenize(make_samples("fox"), body, add_special_tokens=True)
    prefix = np.array([end], "<u2").tobytes()
    assert added.fields["tokens"] == prefix + plain.fields["tokens"]


def test_texts_that_cannot_be_tokenized_are_quarantined_beside_good_ones():
    samples = [
        Sample("a", {"jpg": b"1"}, 1),
        Sample("b", {"txt": b"\xff"}, 2),
        Sample("c", {"txt": b"fox"}, 3),
        Sample("d", {"txt": b"fox", "tokens": b""}, 4),
        Sample("e", {"txt": LargeFile(17 << 20, lambda: pytest.fail("read"))}, 5),
    ]
    _, rows = tokenize(samples)
    assert [row.reason if isinstance(row, BadRow) else row.key for row in rows] == [
        "no field 'txt' to tokenize",
        "the field 'txt' is not text in UTF-8",
        "c",
        "the field 'tokens' is there already: rename it before",
        "a text of more than 16 MiB takes too much memory to tokenize: divide it before",
    ]


def make_words(*, unknown=None, added=None):
    """Return a tokenizer of the words a and b, with a token that it adds to each text."""
    library = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token=unknown))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if added is not None:
        library.post_processor = processors.TemplateProcessing(
            single="[BOS] $A", special_tokens=[("[BOS]", added)]
        )
    return library.to_str().encode()


def test_a_text_that_the_tokenizer_refuses_is_quarantined_beside_good_ones():
    _, rows = tokenize(make_samples("a b", "a c", "", "b"), make_words())
    assert [len(row.fields["tokens"]) for row in rows if isinstance(row, Sample)] == [4, 0, 2]
    assert rows[1].reason.startswith("the tokenizer refused the text: Exception: WordLevel error")


def test_a_tokenizer_with_dropout_makes_the_same_tokens_each_time():
    parsed = json.loads(train_tokenizer())
    parsed["model"]["dropout"] = 0.3
    samples = make_samples(*["the quick fox " * 50] * 20)
    _, rows = tokenize(samples, json.dumps(parsed).encode())
    _, (first, *_) = tokenize(samples)
    assert {row.fields["tokens"] for row in rows} == {first.fields["tokens"]}


@pytest.mark.parametrize("added", [65_535, 65_536])
def test_an_id_that_the_vocabulary_does_not_have_decides_the_type_too(added):
    samples = make_samples("a b")
    transform, (row,) = tokenize(samples, make_words(added=added), add_special_tokens=True)
    assert transform.dtype == ("uint16" if added < 1 << 16 else "uint32")
    assert np.frombuffer(row.fields["tokens"], transform.dtype).tolist() == [added, 0, 1]
    transform, _ = tokenize(samples, make_words(added=added))
    assert transform.dtype == "uint16"


@pytest.mark.parametrize("body", [b"", b"{}", b"\xff", b"[1]"])
def test_bytes_that_are_no_tokenizer_are_refused(body):
    with pytest.raises(errors.ConfigurationError, match=r"Name a tokenizer\.json"):
        TokenizeTransform(TokenizeSettings(tokenizer="t"), body)


def test_an_end_token_that_is_not_in_the_vocabulary_is_refused():
    with pytest.raises(errors.ConfigurationError, match=r"to '<\|endoftext\|>'"):
        tokenize([], end_token="</s>")
