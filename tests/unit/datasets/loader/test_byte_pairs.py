"""Tokens of tiktoken are those of the library `tokenizers`, or the conversion is refused."""

import json
import random
from functools import lru_cache
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from millrace.datasets.loader.byte_pairs import (
    KNOWN_PATTERNS,
    BytePairEncoding,
    UnsupportedTokenizerError,
    check_pattern,
    convert_tokenizer,
)
from millrace.datasets.loader.tokenizer import PageTokenizer
from millrace.testing.byte_level import END
from tests.support.byte_pairs import encode_json, make_tokenizer, read_sources


def open_both(parsed: dict[str, Any]) -> tuple[PageTokenizer, Tokenizer]:
    body = encode_json(parsed)
    converted = PageTokenizer(body)
    assert converted.reason == ""
    return converted, Tokenizer.from_buffer(body)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def shuffle_ids(parsed: dict[str, Any]) -> dict[str, Any]:
    """Give the tokens other ids, so that ranks are not ids."""
    vocabulary = parsed["model"]["vocab"]
    numbers = list(range(len(vocabulary)))
    random.Random(1).shuffle(numbers)
    changed = {token: numbers[number] for token, number in vocabulary.items()}
    added = [{**one, "id": changed[one["content"]]} for one in parsed["added_tokens"]]
    return parsed | {"model": parsed["model"] | {"vocab": changed}, "added_tokens": added}


VARIANTS: dict[str, dict[str, Any]] = {
    "as trained": make_tokenizer(),
    "other ids": shuffle_ids(make_tokenizer()),
    "composed": make_tokenizer(KNOWN_PATTERNS["qwen2"]) | {"normalizer": {"type": "NFC"}},
    "whole words first": make_tokenizer(KNOWN_PATTERNS["cl100k"], ignore_merges=True),
    "newer expression": make_tokenizer(KNOWN_PATTERNS["o200k"]),
}


@lru_cache
def open_variant(variant: str) -> tuple[PageTokenizer, Tokenizer]:
    return open_both(VARIANTS[variant])


@pytest.mark.parametrize(
    ("variant", "files"),
    [
        *((name, 8) for name in VARIANTS),
        *(pytest.param(name, 60, marks=pytest.mark.soak) for name in VARIANTS),
    ],
)
def test_sources_of_python_have_the_tokens_of_the_other_library(variant: str, files: int) -> None:
    converted, tokenizer = open_variant(variant)
    texts = read_sources()[:files]
    expected = [one.ids for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    page = converted.encode(texts)
    found = [
        page.tokens[start:end].tolist() for start, end in zip(page.starts, page.ends, strict=True)
    ]
    assert found == expected


PIECES = (
    END, "<|", " ", "\n\n ", "\r\n", "it's", "WE'LL", "12345", "def f(x):\n    ", "e\u0301",
    "\u1100\u1161", "\u212b", "\u0130", "\u017f",
)  # fmt: skip
TEXTS = st.lists(st.one_of(st.text(max_size=30), st.sampled_from(PIECES)), max_size=12).map("".join)


@pytest.mark.parametrize("variant", VARIANTS)
@given(text=TEXTS)
def test_any_text_has_the_tokens_of_the_other_library(variant: str, text: str) -> None:
    converted, tokenizer = open_variant(variant)
    assert converted.encode([text]).tokens.tolist() == encode(tokenizer, text)


@settings(max_examples=25)  # each compares 2,000 texts
@given(
    merges=st.lists(
        st.tuples(st.text("abc", min_size=1, max_size=3), st.text("abc", min_size=1, max_size=3)),
        max_size=12,
    ),
    text=st.text("abc ", max_size=40),
)
def test_any_vocabulary_is_converted_or_refused(merges: list[tuple[str, str]], text: str) -> None:
    """Also one in which a token is never made, since merges of lower ranks come before."""
    parsed = make_tokenizer()
    letters = [one for one in parsed["model"]["vocab"] if len(one) == 1]
    tokens = dict.fromkeys(letters)
    kept: list[tuple[str, str]] = []
    for left, right in merges:
        if left in tokens and right in tokens and (left, right) not in kept:
            kept.append((left, right))
            tokens[left + right] = None
    vocabulary = {token: number for number, token in enumerate(tokens)}
    parsed |= {"added_tokens": [], "model": parsed["model"] | {"vocab": vocabulary, "merges": kept}}
    body = encode_json(parsed)
    tokenizer = Tokenizer.from_buffer(body)
    try:
        converted = convert_tokenizer(body, tokenizer)
    except UnsupportedTokenizerError as error:
        if "different ranks" in str(error):
            return
        raise
    assert converted.encode(text).tolist() == encode(tokenizer, text)


def test_a_token_that_is_never_made_is_left_out() -> None:
    """Without this, tiktoken would join the two tokens of `abc`, which `tokenizers` does not."""
    parsed = make_tokenizer()
    letters = [one for one in parsed["model"]["vocab"] if len(one) == 1]
    tokens = [*letters, "ab", "bc", "abc"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [("a", "b"), ("b", "c"), ("a", "bc")]
    parsed |= {
        "added_tokens": [],
        "model": parsed["model"] | {"vocab": vocabulary, "merges": merges},
    }
    body = encode_json(parsed)
    tokenizer = Tokenizer.from_buffer(body)
    expected = [vocabulary["ab"], vocabulary["c"]]
    assert encode(tokenizer, "abc") == expected
    assert convert_tokenizer(body, tokenizer).encode("abc").tolist() == expected
    parsed["model"]["ignore_merges"] = True
    assert PageTokenizer(encode_json(parsed)).reason == (
        "its token 'abc' is made without merges only"
    )


def change(**fields: Any) -> dict[str, Any]:
    return make_tokenizer() | fields


def change_level(**fields: Any) -> dict[str, Any]:
    parsed = make_tokenizer()
    return parsed | {"pre_tokenizer": parsed["pre_tokenizer"] | fields}


def change_end(**fields: Any) -> dict[str, Any]:
    parsed = make_tokenizer()
    return parsed | {"added_tokens": [parsed["added_tokens"][0] | fields]}


@pytest.mark.parametrize(
    ("parsed", "reason"),
    [
        (make_tokenizer(dropout=0.1), "has the rule dropout"),
        (change(normalizer={"type": "Lowercase"}), "changes texts by Lowercase"),
        (change(pre_tokenizer={"type": "Whitespace"}), "does not work on bytes"),
        (change(pre_tokenizer=None), "does not work on bytes"),
        (change_level(add_prefix_space=True), "or adds a space"),
        (change_level(use_regex=False), "several rules"),
        (make_tokenizer(r"\w+|\W+"), r"unknown expression \\w"),
        (change_end(lstrip=True), "takes spaces"),
        (change_end(single_word=True), "takes spaces or words"),
    ],
)
def test_other_tokenizers_are_encoded_by_their_own_library(
    parsed: dict[str, Any], reason: str
) -> None:
    body = encode_json(parsed)
    tokenizer = Tokenizer.from_buffer(body)
    with pytest.raises(UnsupportedTokenizerError, match=reason):
        convert_tokenizer(body, tokenizer)
    texts = ["It's a  mill race\n", f"{END} x"]
    page = PageTokenizer(body).encode(texts)
    if parsed["model"].get("dropout"):
        return
    assert page.tokens.tolist() == [id_ for text in texts for id_ in encode(tokenizer, text)]


def test_an_encoding_with_other_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    body = encode_json(make_tokenizer())

    class Wrong(tiktoken.Encoding):
        def encode_to_numpy(self, text: str, **options: Any) -> Any:
            return super().encode_to_numpy(text.replace("x", "y"), **options)

    monkeypatch.setattr("tiktoken.Encoding", Wrong)
    check_pattern.cache_clear()
    with pytest.raises(UnsupportedTokenizerError, match="tiktoken makes other tokens of"):
        convert_tokenizer(body, Tokenizer.from_buffer(body))


@pytest.mark.parametrize("pattern", [r"\p{L}+", r"\w+|\s+", r"[a-z]+|[^a-z]"])
def test_an_expression_that_is_read_differently_is_refused(pattern: str) -> None:
    """The first two leave characters out, which tiktoken drops. The last is read as it is."""
    if pattern.endswith("]"):
        check_pattern(pattern)
        return
    with pytest.raises(UnsupportedTokenizerError, match="other tokens"):
        check_pattern(pattern)


def test_a_run_of_spaces_that_is_too_long_for_tiktoken_is_encoded_nevertheless() -> None:
    converted, tokenizer = open_variant("as trained")
    text = "a" + " " * 1_000_000 + "b"
    encoding = converted._encoding
    assert isinstance(encoding, BytePairEncoding)
    with pytest.raises(ValueError, match="regex"):
        encoding.encode(text)
    assert converted.encode([text]).tokens.tolist() == encode(tokenizer, text)


def test_a_text_over_which_tiktoken_panics_is_encoded_by_the_other_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A panic of Rust is no `Exception`. Ctrl-C is none of the text."""
    converted, tokenizer = open_variant("as trained")
    text = "It's a mill race"
    raised: list[BaseException] = [type("PanicException", (BaseException,), {})("unwrap on None")]

    def panic(*_: object) -> None:
        raise raised[0]

    monkeypatch.setattr(BytePairEncoding, "encode", panic)
    assert converted.encode([text]).tokens.tolist() == encode(tokenizer, text)
    raised[0] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        converted.encode([text])


def test_merges_may_be_written_as_texts() -> None:
    """Files of older versions have such merges."""
    parsed = json.loads(json.dumps(VARIANTS["as trained"]))
    parsed["model"]["merges"] = [" ".join(pair) for pair in parsed["model"]["merges"]]
    converted, tokenizer = open_both(parsed)
    assert converted.encode(["mill race"]).tokens.tolist() == encode(tokenizer, "mill race")
