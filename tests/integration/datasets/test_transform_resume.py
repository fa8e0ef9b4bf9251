"""Rows are the same from whichever position reading begins."""

import json
import signal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from millrace import errors
from millrace.datasets.sample import BadRow, Sample
from millrace.datasets.transforms import (
    FilterSettings,
    FunctionSettings,
    TokenizeSettings,
)
from millrace.datasets.transforms.json_check import JsonCheck
from millrace.testing.byte_level import END
from tests.support.examples import scale_examples
from tests.support.transforms import open_rows, read_rows, train_tokenizer

CODE = """
def split(sample):
    text = sample["txt"]
    if text.startswith("raise"):
        raise ValueError("a text that raises")
    if text.startswith("none"):
        return None
    if text.startswith("one"):
        return sample
    words = [{"txt": word} for word in text.split()]
    return [word if word["txt"] != "bad" else {"txt": 5j} for word in words]

def shout(sample):
    if sample["txt"] == "fox":
        raise RuntimeError("no fox")
    return [{"txt": sample["txt"]}, {"txt": sample["txt"].upper()}]
"""
TEXTS = st.lists(
    st.sampled_from(["the", "fox", "bad", "lazy dog", "mill", "é", "one", "none", "raise"]),
    max_size=12,
).map(" ".join)
LINES = st.lists(
    st.one_of(
        TEXTS.map(lambda text: json.dumps({"t": text})),
        st.sampled_from(["not json", "", "{}", json.dumps({"t": "the " * 60})]),
    ),
    max_size=14,
)


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    path = tmp_path_factory.mktemp("code") / "split.py"
    path.write_text(CODE)
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(train_tokenizer())
    return path


def make_chain(names, code, tokenizer, pack):
    known = {
        "split": FunctionSettings(function=f"{code}:split"),
        "shout": FunctionSettings(function=f"{code}:shout"),
        "filter": FilterSettings(field="txt", max_size=40, exclude="^dog$"),
        "tokenize": TokenizeSettings(tokenizer=str(tokenizer)),
        "pack": TokenizeSettings(tokenizer=str(tokenizer), end_token=END, pack=pack),
    }
    return [known[name] for name in names]


CHAINS = [
    ("filter",),
    ("split",),
    ("split", "shout"),
    ("split", "filter", "tokenize"),
    ("pack",),
    ("split", "pack"),
    ("split", "shout", "filter", "pack"),
]


@settings(max_examples=scale_examples(40))
@given(
    lines=LINES,
    names=st.sampled_from(CHAINS),
    pack=st.integers(2, 40),
    partition_bytes=st.sampled_from([60, 1 << 20]),
)
def test_reading_from_the_position_of_any_row_gives_exactly_the_rest(
    code, tokenizer, lines, names, pack, partition_bytes
):
    transforms = make_chain(names, code, tokenizer, pack)
    source, ranges = open_rows(
        lines, transforms, columns={"txt": "t"}, partition_bytes=partition_bytes
    )
    keys = []
    for each in ranges:
        rows = list(source.iterate_rows(each, 0))
        for number, row in enumerate(rows, start=1):
            assert list(source.iterate_rows(each, row.next_cursor, row.next_skip)) == rows[number:]
        positions = [(row.next_cursor, row.next_skip) for row in rows]
        assert positions == sorted(set(positions)), "a position names one place"
        keys += [row.key for row in rows if isinstance(row, Sample)]
    assert len(set(keys)) == len(keys)
    assert not any("." in key for key in keys)


@settings(max_examples=scale_examples(40))
@given(lines=LINES, names=st.sampled_from(CHAINS), pack=st.integers(2, 40))
def test_each_row_is_counted_once_from_whichever_position_reading_begins(
    code, tokenizer, lines, names, pack
):
    chain = make_chain(names, code, tokenizer, pack)
    source, (whole,) = open_rows(
        [*lines, "{}"], chain, columns={"txt": "t"}, partition_bytes=1 << 20
    )
    plain = make_chain([name for name in names if name != "pack"], code, tokenizer, pack)
    dropped = sum(
        bool(read_rows([line], [], columns={"txt": "t"}))
        and not read_rows([line], plain, columns={"txt": "t"})
        for line in lines
    )
    rows = list(source.iterate_rows(whole, 0))
    expected = (len(read_rows([*lines, "{}"], [], columns={"txt": "t"})), dropped)
    assert source.take_rows() == expected
    assert source.take_rows() == (0, 0)
    counted = (0, 0)
    for row in rows:
        assert list(source.iterate_rows(whole, 0)) == rows
        before = source.take_rows(row.next_cursor)
        after = source.take_rows()
        assert (before.rows + after.rows, before.dropped + after.dropped) == expected
        assert before >= counted
        counted = before
        list(source.iterate_rows(whole, row.next_cursor, row.next_skip))
        assert source.take_rows() == after


@settings(max_examples=30)
@given(lines=LINES, pack=st.integers(2, 40), is_split=st.booleans())
def test_packing_loses_and_adds_no_token(code, tokenizer, lines, pack, is_split):
    before = ("split",) if is_split else ()
    source, ranges = open_rows(
        lines, make_chain((*before, "pack"), code, tokenizer, pack), columns={"txt": "t"}
    )
    plain = read_rows(lines, make_chain(before, code, tokenizer, pack), columns={"txt": "t"})
    library = Tokenizer.from_file(str(tokenizer))
    for each in ranges:
        rows = list(source.iterate_rows(each, 0))
        packed = [
            np.frombuffer(row.fields["tokens"], "<u2") for row in rows if isinstance(row, Sample)
        ]
        expected = []
        for row in plain:
            if isinstance(row, Sample):
                text = row.fields["txt"].decode()
                expected += [*library.encode(text).ids, library.token_to_id(END)]
        assert [token for tokens in packed for token in tokens] == expected
        assert {len(tokens) for tokens in packed[:-1]} <= {pack}
        assert all(0 < len(tokens) <= pack for tokens in packed)
        bad = [row.reason for row in rows if isinstance(row, BadRow)]
        assert bad == [row.reason for row in plain if isinstance(row, BadRow)]


def test_a_long_document_and_many_short_ones_resume_in_their_middle(tokenizer):
    lines = [json.dumps({"t": f"the mill {number}"}) for number in range(700)]  # several batches
    lines.insert(300, json.dumps({"t": "lazy dog " * 130_000}))  # larger than a batch
    chain = [TokenizeSettings(tokenizer=str(tokenizer), end_token=END, pack=90_000)]
    source, (whole,) = open_rows(lines, chain, columns={"txt": "t"}, partition_bytes=1 << 30)
    rows = list(source.iterate_rows(whole, 0))
    inside = [number for number, row in enumerate(rows) if row.next_skip > 100_000]
    assert inside, "a sample ends within the long document"
    for number in {0, inside[0], len(rows) - 2}:
        position = rows[number].next_cursor, rows[number].next_skip
        assert list(source.iterate_rows(whole, *position)) == rows[number + 1 :]


@pytest.mark.parametrize("names", [("split",), ("pack",)])
@pytest.mark.parametrize("skip", [50, 50 << 32])
def test_a_row_that_makes_less_than_before_stops_the_run(code, tokenizer, names, skip):
    source, (whole,) = open_rows(
        ['{"t": "the fox"}'], make_chain(names, code, tokenizer, 3), columns={"txt": "t"}
    )
    with pytest.raises(errors.ChangedError, match="transforms make less of the row"):
        list(source.iterate_rows(whole, 0, skip))


def test_without_transforms_the_rows_of_the_source_are_not_touched():
    assert read_rows(['{"t": "a"}', "x"], []) == [
        Sample("00000-0000000000000", {"json": b'{"t": "a"}'}, 11),
        BadRow("0.jsonl, byte 11", "not valid JSON", b"x", 13),
    ]


def test_a_bad_row_is_yielded_before_the_sample_that_is_open_around_it(tokenizer):
    lines = ['{"t": "the"}', "bad", '{"t": "fox"}']
    chain = [TokenizeSettings(tokenizer=str(tokenizer), end_token=END, pack=100)]
    first, second = read_rows(lines, chain, columns={"txt": "t"})
    assert isinstance(first, BadRow)
    assert (first.next_cursor, first.next_skip) == (0, 1 << 32)
    assert isinstance(second, Sample)


@pytest.mark.parametrize("names", [("split",), ("split", "pack")])
def test_a_bad_part_of_a_row_has_its_share_of_the_row(code, tokenizer, names):
    lines = ['{"t": "the bad fox bad"}', '{"t": "raise"}', "{}", '{"t": "mill"}']
    rows = read_rows(lines, make_chain(names, code, tokenizer, 3), columns={"txt": "t"})
    assert [row.share for row in rows if isinstance(row, BadRow)] == [0.25, 0.25, 1.0, 1.0]


def test_a_part_of_a_row_that_is_no_json_has_a_position_of_its_own(tmp_path):
    path = tmp_path / "code.py"
    path.write_text('def cut(sample):\n    return [{"json": b"{"}, {"json": b"1"}, {"json": b"["}]')
    source, (whole,) = open_rows(
        ['{"t": "the"}', '{"t": "fox"}'],
        [FunctionSettings(function=f"{path}:cut")],
        columns={"txt": "t"},
        json_check=JsonCheck({}),
    )
    rows = list(source.iterate_rows(whole, 0))
    assert [isinstance(row, BadRow) for row in rows] == [True, False, True] * 2
    assert [row.share for row in rows if isinstance(row, BadRow)] == [1 / 3] * 4
    for number, row in enumerate(rows, start=1):
        assert list(source.iterate_rows(whole, row.next_cursor, row.next_skip)) == rows[number:]


def test_each_function_of_a_chain_has_random_numbers_of_its_own(tmp_path):
    path = tmp_path / "code.py"
    path.write_text(
        'def draw(sample, rng):\n    return {"txt": f"{sample[\'txt\']} {rng.random()}"}'
    )
    step = FunctionSettings(function=f"{path}:draw")
    (row,) = read_rows(['{"t": "the"}'], [step, step], columns={"txt": "t"})
    assert isinstance(row, Sample)
    _, first, second = row.fields["txt"].split()
    assert first != second


def test_a_time_limit_within_a_function_costs_its_sample_alone(tmp_path):
    path = tmp_path / "code.py"
    path.write_text("""
import signal

def end(*_):
    raise TimeoutError("too slow")

def clean(sample):
    signal.signal(signal.SIGUSR1, end)
    if sample["txt"] == "slow":
        signal.raise_signal(signal.SIGUSR1)
    return sample
""")
    step = FunctionSettings(function=f"{path}:clean")
    lines = [json.dumps({"t": text}) for text in ("fast", "slow", "fast")]
    before = signal.getsignal(signal.SIGUSR1)
    try:
        for _ in range(2):  # the handler stays, and the next partition finds it
            _, bad, _ = read_rows(lines, [step], columns={"txt": "t"})
            assert isinstance(bad, BadRow)
            assert bad.reason == "clean raised TimeoutError: too slow"
    finally:
        signal.signal(signal.SIGUSR1, before)
