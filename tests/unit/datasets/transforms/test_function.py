"""Functions get plain values, and everything but samples is quarantined with a sentence."""

import asyncio
import io
import json
import signal
import subprocess
import sys
import tarfile
import threading
from array import array
from collections.abc import Mapping

import numpy as np
import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace import errors
from millrace.datasets.field_names import BadFieldError
from millrace.datasets.formats.webdataset import TarEncoder
from millrace.datasets.sample import BadRow, LargeFile, Sample
from millrace.datasets.transforms.fields import (
    NO_TYPES,
    decode_fields,
    encode_fields,
    make_part_key,
)
from millrace.datasets.transforms.function import (
    FunctionTransform,
    load_from_bytes,
    load_installed,
)
from tests.support.examples import scale_examples


def transform(function, fields=None, *, key="00000-0000000000007", seed=0, types=NO_TYPES):
    """Return the rows that a function makes of one sample."""
    sample = Sample(key, {"txt": b"the fox"} if fields is None else fields, 9)
    (rows,) = FunctionTransform(function, "clean", seed, types).apply([sample])
    return rows


def test_a_function_gets_a_dict_of_values_by_the_types_of_webdataset():
    fields = {
        "txt": "é".encode(),
        "json": b'{"a":123456789012345678901234567890}',
        "cls": b"7",
        "jpg": b"\xff\xd8",
        "v1.TXT": b"capital",
    }
    seen = []
    transform(seen.append, fields)
    assert seen == [
        {
            "__key__": "00000-0000000000007",
            "txt": "é",
            "json": {"a": 123456789012345678901234567890},
            "cls": 7,
            "jpg": b"\xff\xd8",
            "v1.TXT": "capital",
        }
    ]


@pytest.mark.parametrize(
    ("name", "data", "declared", "value"),
    [
        ("id", b"7", None, 7),
        ("id", b"-7", None, -7),
        ("id", b" 7\r\n", None, 7),
        ("id", b"007", None, "007"),
        ("id", b"-0", None, 0),
        ("id", b"1_000", None, "1_000"),
        ("id", b"+5", None, "+5"),
        ("id", b"", None, ""),
        ("cls", b"A-5", None, "A-5"),
        ("id", b"7", "str", "7"),
        ("id", b"A-5", "str", "A-5"),
        ("id", b"\xff", "bytes", b"\xff"),
        ("id", b"007", "int", 7),
        ("id", b"1.50", "float", "1.50"),
        ("txt", b"\xff", "bytes", b"\xff"),
        ("json", b"{'a'", "str", "{'a'"),
        ("caption", "\u00e9".encode(), "str", "\u00e9"),
        ("label", b"cat", "int", b"cat"),
        ("label", b"{}", "json", b"{}"),
    ],
)
def test_a_value_that_a_function_does_not_change_keeps_its_bytes(name, data, declared, value):
    seen = []

    def keep(sample):
        seen.append(sample[name])
        return sample

    (row,) = transform(keep, {name: data}, types={name: declared} if declared else NO_TYPES)
    assert row.fields == {name: data}
    assert seen == [value]


def test_an_integer_that_a_function_changes_is_written_plainly():
    def add(sample):
        return {"id": sample["id"] + 1, "cls": sample["id"]}

    (row,) = transform(add, {"id": b"007\n", "cls": b"007"}, types={"id": "int", "cls": "str"})
    assert row.fields == {"id": b"8", "cls": b"7"}


@pytest.mark.parametrize(("data", "value"), [(b"true", 1), (b"1.0", 1), (b"false", 0)])
def test_an_integer_that_equals_a_value_of_another_type_is_written(data, value):
    (row,) = transform(lambda sample: {"json": int(sample["json"])}, {"json": data})
    assert row.fields == {"json": b"%d" % value}


IDS = [5, 0, 65_535]


@pytest.mark.parametrize(
    "value",
    [
        IDS,
        tuple(IDS),
        np.array(IDS),
        np.array(IDS, ">u4"),
        [*np.array(IDS, "uint16")],
        array("l", IDS),
        memoryview(array("l", IDS)),
        np.array(IDS, "<u2").tobytes(),
        bytearray(np.array(IDS, "<u2").tobytes()),
    ],
)
def test_integers_in_an_array_are_its_items(value):
    assert encode_fields({"ids": value}, {"ids": "uint16[]"}) == {
        "ids": b"\x05\x00\x00\x00\xff\xff"
    }
    wide = encode_fields({"ids": [*IDS, 65_536]}, {"ids": "uint32[]"})["ids"]
    assert np.frombuffer(wide, "<u4").tolist() == [*IDS, 65_536]
    assert encode_fields({"ids": []}, {"ids": "uint16[]"}) == {"ids": b""}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([1, 65_536], "has 65536 at index 1, and uint16[] holds integers from 0 to 65535"),
        ([-1], "has -1 at index 0"),
        ([1, 2.0], "has 2.0 at index 1"),
        ([True], "has True at index 0"),
        ([1, None], "has None at index 1"),
        (["7"], "has '7' at index 0"),
        (np.array([0.5]), "has 0.5 at index 0"),
        (np.array([[1]]), "has [1] at index 0"),
        (np.array([True]), "has True at index 0"),
        ("12", "is a str, and uint16[] takes a list of integers"),
        (12, "is a int, and"),
        ({"a": 1}, "is a dict, and"),
    ],
)
def test_a_value_that_an_array_cannot_hold_is_quarantined(value, reason):
    (row,) = transform(lambda _: {"ids": value}, types={"ids": "uint16[]"})
    assert isinstance(row, BadRow)
    assert row.reason.startswith(f"clean: the field 'ids' {reason}")


@pytest.mark.parametrize(
    ("name", "data", "declared", "reason"),
    [
        ("id", b"A-5", "int", "the field 'id' is no valid integer"),
        ("id", b"1_000", "int", "the field 'id' is no valid integer"),
        ("id", b"\xff", None, "the field 'id' is no valid integer"),
        ("caption", b"\xff", "str", "the field 'caption' is no valid text in UTF-8"),
    ],
)
def test_a_field_that_is_not_of_its_type_is_quarantined(name, data, declared, reason):
    types = {name: declared} if declared else NO_TYPES
    (row,) = transform(lambda sample: sample, {name: data}, types=types)
    assert isinstance(row, BadRow)
    assert row.reason == reason


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, width=32),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
).filter(
    lambda value: json.loads(json.dumps(value)) == value and "nfinity" not in json.dumps(value)
)
TEXT = st.text(st.characters(codec="utf-8"))


@settings(max_examples=scale_examples(40))
@given(text=TEXT, value=JSON, label=st.integers(), data=st.binary())
def test_values_come_back_as_webdataset_reads_them(text, value, label, data):
    values = {"txt": text, "json": value, "cls": label, "bin": data}
    sample = Sample("k", encode_fields(values), 1)
    encoder = TarEncoder()
    encoder.prepare(sample)
    encoder.append()
    file = io.BytesIO(encoder.close())
    with tarfile.open(fileobj=file) as members:
        stored = {m.name.partition(".")[2]: members.extractfile(m).read() for m in members}
    found = {
        name: webdataset.autodecode.basichandlers(f".{name}", stored[name])
        for name in ("txt", "json", "cls")
    }
    assert found == {"txt": text, "json": value, "cls": label}
    assert stored["bin"] == data
    assert decode_fields(sample) == {"__key__": "k", **values}


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        ("text", b"text"),
        (b"bytes", b"bytes"),
        (bytearray(b"more"), b"more"),
        (7, b"7"),
        (10**30, b"1" + b"0" * 30),
        (0.5, b"0.5"),
        ({"a": ["é"]}, '{"a":["é"]}'.encode()),
        ([1, 2], b"[1,2]"),
    ],
)
def test_a_value_is_encoded_by_its_type(value, encoded):
    assert encode_fields({"field": value, "__key__": "k"}) == {"field": encoded}


def test_text_in_a_json_field_is_json():
    assert encode_fields({"json": "text"}) == {"json": b'"text"'}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, "without fields"),
        ({"__key__": "k"}, "without fields"),
        ({"a/b": b""}, "could not read the field 'a/b' back"),
        ({"__url__": b""}, "could not read the field '__url__' back"),
        ({"": b""}, "could not read the field '' back"),
        ({3: b""}, "the name of a field is not text but int"),
        ({"a": b"", "A": b""}, "upper and lower case"),
        ({"a": None}, "the field 'a' is a NoneType: return bytes, str"),
        ({"a": {1, 2}}, "the field 'a' is a set"),
        ({"a": float("nan")}, "the field 'a' cannot be encoded"),
        ({"a": "\ud800"}, "the field 'a' cannot be encoded"),
        ({"a": {"b": {1}}}, "the field 'a' cannot be encoded"),
    ],
)
def test_what_cannot_be_written_is_named(values, reason):
    with pytest.raises(BadFieldError, match=reason):
        encode_fields(values)


def test_a_function_keeps_drops_or_multiplies_a_sample():
    assert transform(lambda sample: sample) == [
        Sample("00000-0000000000007", {"txt": b"the fox"}, 9)
    ]
    assert transform(lambda _: None) == []
    assert transform(lambda _: []) == []
    words = transform(lambda sample: ({"txt": word} for word in sample["txt"].split()))
    assert words == [
        Sample("00000-0000000000007--0000", {"txt": b"the"}, 9),
        Sample("00000-0000000000007--0001", {"txt": b"fox"}, 9),
    ]


def test_a_generator_may_yield_one_dict_again_and_again():
    def split(sample):
        sample["json"] = words = []
        for word in sample["txt"].split():
            words.append(word)
            sample["txt"] = word
            yield sample

    assert [row.fields for row in transform(split)] == [
        {"txt": b"the", "json": b'["the"]'},
        {"txt": b"fox", "json": b'["the","fox"]'},
    ]


@given(
    parts=st.lists(
        st.tuples(
            st.text("a-01~", min_size=1, max_size=9) | st.from_regex(r"\Aa(--0001){0,2}-{0,3}\Z"),
            st.none() | st.integers(0, 10_001),
        ),
        unique=True,
        max_size=12,
    )
)
def test_different_parts_have_different_keys(parts):
    assert len({make_part_key(key, number) for key, number in parts}) == len(parts)


class Unreadable(Mapping[str, str]):
    """Mapping of a library whose values cannot be read."""

    def __getitem__(self, name):
        raise KeyError(name)

    def __iter__(self):
        return iter(["txt"])

    def __len__(self):
        return 1


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (7, "clean returned a int: return a dict, a list of dicts or None"),
        ("text", "clean returned a str: return a dict, a list of dicts or None"),
        ({}, "clean: a sample without fields cannot be written"),
        ({"__key__": "other", "txt": ""}, "clean changed __key__, which is made by Millrace"),
        ([{"txt": ""}, None], "clean returned None in place 1 of its results"),
        ({"__key__": np.array([1, 2]), "txt": ""}, "clean changed __key__, which is made by Mil"),
        (Unreadable(), "clean raised KeyError: 'txt'"),
        ([Unreadable()], "clean raised KeyError: 'txt'"),
    ],
)
def test_a_result_that_is_no_sample_is_quarantined_with_a_sentence(result, reason):
    *_, row = transform(lambda _: result)
    assert isinstance(row, BadRow)
    assert row.reason.startswith(reason)
    assert (row.where, row.data) == ("00000-0000000000007", b"the fox")


def test_a_function_that_raises_is_quarantined_with_the_last_line_of_its_traceback():
    class Named:
        pass

    def clean(sample):
        raise ValueError(f"no\n  good: {Named()!r} {'x' * 1000}")

    (row,) = transform(clean)
    assert row.reason.startswith("clean raised ValueError: no good: <")
    assert "at 0x...>" in row.reason, "an address differs between two runs"
    assert len(row.reason) < 330

    def stop(sample):
        yield {"txt": "one"}
        raise LookupError("after the first")

    (row,) = transform(stop)
    assert row.reason == "clean raised LookupError: after the first"


def test_memory_that_runs_out_is_no_fault_of_the_sample():
    def clean(sample):
        raise MemoryError

    with pytest.raises(errors.WorkerError, match="clean ran out of memory at the sample 00000-000"):
        transform(clean)


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), asyncio.CancelledError()])
def test_a_function_that_ends_its_process_is_quarantined(error):
    def clean(sample):
        raise error

    (row,) = transform(clean)
    assert row.reason.startswith(f"clean raised {type(error).__qualname__}") or (
        row.reason == "clean raised asyncio.exceptions.CancelledError"
    )


class StopSignalError(BaseException):
    """A handler of a signal ends the run."""


def test_a_signal_within_a_function_ends_the_run(monkeypatch):
    def stop(*_):
        raise StopSignalError

    def clean(sample):
        signal.raise_signal(signal.SIGUSR1)
        return sample

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(StopSignalError):
            transform(clean)
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(KeyboardInterrupt):
        transform(lambda _: signal.raise_signal(signal.SIGINT))


def test_code_that_exits_when_it_is_loaded_is_refused_with_a_sentence(tmp_path, monkeypatch):
    with pytest.raises(errors.ConfigurationError, match=r"code\.py cannot be run: SystemExit: 3"):
        load_from_bytes(b"import sys; sys.exit(3)", "clean", "code.py")
    (tmp_path / "exiting_module.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(errors.ConfigurationError, match="cannot be imported: SystemExit"):
        load_installed("exiting_module", "clean")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"txt": b"\xff"}, "the field 'txt' is no valid text in UTF-8"),
        ({"json": b"{"}, "the field 'json' is no valid JSON"),
        ({"json": b"[" * 100_000}, "the field 'json' is no valid JSON"),
        ({"cls": b"\xff"}, "the field 'cls' is no valid integer"),
    ],
)
def test_a_field_of_another_type_is_quarantined_before_the_function_is_called(fields, reason):
    (row,) = transform(lambda _: pytest.fail("called"), fields)
    assert row.reason == reason


def test_a_large_file_is_read_for_a_function():
    large = LargeFile(6, lambda: iter([b"abc", b"def"]))
    (row,) = transform(lambda sample: {"bin": sample["bin"] + b"!"}, {"bin": large})
    assert row.fields == {"bin": b"abcdef!"}


def test_a_second_argument_gets_a_generator_of_the_seed_and_the_key():
    def clean(sample, rng):
        return {"txt": str(rng.random())}

    def draw(**options):
        return transform(clean, **options)[0].fields["txt"]

    assert draw() == draw()
    assert len({draw(), draw(seed=1), draw(key="other")}) == 3
    assert draw(seed=None) == draw(seed=0)
    assert transform(lambda sample, limit=3: {"txt": str(limit)})[0].fields == {"txt": b"3"}


def test_the_generator_is_the_same_in_every_process():
    program = """
import random
from millrace.datasets.sample import Sample
from millrace.datasets.transforms.function import FunctionTransform
clean = lambda sample, rng: {"txt": str(rng.random())}
print(FunctionTransform(clean, "clean", 3).apply([Sample("k", {"txt": b""}, 1)]))
"""
    drawn = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": ":".join(sys.path)},
            check=True,
            capture_output=True,
        ).stdout
        for seed in (1, 2)
    }
    assert len(drawn) == 1


@pytest.mark.parametrize(
    "function",
    [lambda: None, lambda a, b, c: None, lambda a, *, b: None],
    ids=["none", "three", "keyword"],
)
def test_a_function_of_other_arguments_is_refused(function):
    with pytest.raises(errors.ConfigurationError, match="write `def clean"):
        FunctionTransform(function, "clean", 0)


def test_what_code_prints_goes_to_stderr(capsys):
    code = b"print('loaded')\ndef clean(sample):\n    print('called')\n    yield sample\n"
    transform(load_from_bytes(code, "clean", "code.py"))
    print("after")
    assert capsys.readouterr() == ("after\n", "loaded\ncalled\n")


def test_stdout_is_back_after_two_threads_that_end_in_another_order(capsys):
    second_begun, first_ended = threading.Event(), threading.Event()

    def wait_for_second(sample):
        second_begun.wait()

    def outlive_first(sample):
        second_begun.set()
        first_ended.wait()
        print("second")

    first = threading.Thread(target=transform, args=(wait_for_second,))
    second = threading.Thread(target=transform, args=(outlive_first,))
    first.start()
    second.start()
    first.join()
    first_ended.set()
    second.join()
    print("after")
    assert capsys.readouterr() == ("after\n", "second\n")
