"""Convert a byte-level BPE of a ``tokenizer.json`` into an encoding of tiktoken, with equal tokens.

tiktoken encodes the same vocabulary several times faster than ``tokenizers``. Both libraries merge
the pair of lowest rank first, and the leftmost of equal ones. They differ in the rank: that of
``tokenizers`` belongs to a pair, and that of tiktoken to the joined bytes. The results are equal if
each merged token, encoded alone by its merges, is one token. Proof: before the first difference,
both have the same tokens. There tiktoken would join two tokens that `tokenizers` does not join.
No earlier merge has crossed the ends of their joined bytes. So these bytes were merged as if they
stood alone, and alone they become one token by exactly this pair. Tokens without this property are
never made by ``tokenizers``, so the encoding leaves them out.

Text is cut into words before by a regular expression, which each library runs with an engine of its
own. Only known expressions are converted, and both engines are compared on texts at each load.
"""

import random
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import orjson
import tiktoken
from tokenizers import Tokenizer

# `ByteLevel` of tokenizers has it built in.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"{_UPPER}*{_LOWER}+{_SHORT}|{_UPPER}+{_LOWER}*{_SHORT}|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KNOWN_PATTERNS = {
    "gpt2": _GPT2,
    "cl100k": _CL100K,  # also of Llama 3
    "qwen2": _CL100K.replace("{1,3}", ""),
    "o200k": _O200K,  # also of Llama 4
}
"""Expressions that cut texts into words, by the name of their first vocabulary."""

_CHECKED_TEXTS = 2000  # texts of random tokens that are compared at each load
_LAST_ASSIGNED = 0x32400  # end of the characters with categories of their own, but for few


class UnsupportedTokenizerError(ValueError):
    """A tokenizer cannot be converted. The message is the reason."""


@dataclass(frozen=True, slots=True)
class BytePairEncoding:
    """Encoding of tiktoken that makes the tokens of a ``tokenizer.json``.

    Attributes:
        encoding: Encoding of texts without added tokens. Its tokens are ranks.
        ids: Id of each rank; None if ranks are ids.
        added: Texts of the added tokens. A text with one of them must be encoded by `tokenizers`.
        is_composed: Whether a text must be in Unicode's normal form C.
    """

    encoding: tiktoken.Encoding
    ids: npt.NDArray[np.uint32] | None
    added: tuple[str, ...]
    is_composed: bool

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        """Return the tokens of a text without added tokens."""
        ranks = self.encoding.encode_to_numpy(text, disallowed_special=())
        return ranks if self.ids is None else self.ids[ranks]


def convert_tokenizer(body: bytes, tokenizer: Tokenizer) -> BytePairEncoding:
    """Convert a byte-level BPE.

    Args:
        body: Bytes of a ``tokenizer.json``.
        tokenizer: The tokenizer that `tokenizers` has made of it.

    Raises:
        UnsupportedTokenizerError: The tokenizer is of another kind, has a rule that tiktoken lacks,
            or tiktoken has made other tokens of a text. The message says which.
    """
    parsed = orjson.loads(body)
    model = parsed["model"]
    _check_model(model)
    added = _read_added_tokens(parsed)
    is_composed = _read_normalizer(parsed)
    pattern = _read_pattern(parsed.get("pre_tokenizer"))
    check_pattern(pattern)
    tokens = _order_tokens(model, added)
    encoding = tiktoken.Encoding(
        "millrace",
        pat_str=pattern,
        mergeable_ranks={_decode(token): rank for rank, token in enumerate(tokens)},
        special_tokens={},
    )
    vocabulary: Mapping[str, int] = model["vocab"]
    ids = np.array([vocabulary[token] for token in tokens], np.uint32)
    is_equal = bool((ids == np.arange(len(ids))).all())
    converted = BytePairEncoding(encoding, None if is_equal else ids, added, is_composed)
    _compare(converted, tokenizer, list(_make_texts(tokens, converted)))
    return converted


def _check_model(model: Mapping[str, Any]) -> None:
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise UnsupportedTokenizerError(f"its model is {model.get('type')} and no BPE")
    for rule in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(rule):
            raise UnsupportedTokenizerError(f"its model has the rule {rule}")
    if missing := [byte for byte, letter in enumerate(_LETTERS) if letter not in model["vocab"]]:
        raise UnsupportedTokenizerError(f"its vocabulary has no token of the byte {missing[0]}")


def _read_added_tokens(parsed: Mapping[str, Any]) -> tuple[str, ...]:
    added: list[dict[str, Any]] = parsed.get("added_tokens") or []
    for token in added:
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            raise UnsupportedTokenizerError(f"its token {token['content']!r} takes spaces or words")
    return tuple(token["content"] for token in added)


def _read_normalizer(parsed: Mapping[str, Any]) -> bool:
    """Return whether texts are brought into the normal form C."""
    normalizer = parsed.get("normalizer")
    if normalizer is None:
        return False
    if normalizer.get("type") != "NFC":
        raise UnsupportedTokenizerError(f"it changes texts by {normalizer.get('type')}")
    return True


def _read_pattern(rule: Mapping[str, Any] | None) -> str:
    """Return the expression that cuts texts into words."""
    steps: list[Mapping[str, Any]] = [rule] if rule else []
    if rule and rule["type"] == "Sequence":
        steps = rule["pretokenizers"]
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1].get("add_prefix_space", True):
        raise UnsupportedTokenizerError("it does not work on bytes, or adds a space")
    if len(steps) == 1 and steps[0].get("use_regex", True):
        return _GPT2
    if len(steps) != 2 or steps[0]["type"] != "Split" or steps[1].get("use_regex", True):
        raise UnsupportedTokenizerError("it cuts texts by several rules")
    split = steps[0]
    pattern = split["pattern"].get("Regex")
    if split.get("behavior") != "Isolated" or split.get("invert"):
        raise UnsupportedTokenizerError("it cuts texts by another rule than one of words")
    if pattern not in KNOWN_PATTERNS.values():
        raise UnsupportedTokenizerError(f"it cuts texts by the unknown expression {pattern}")
    return cast("str", pattern)


def _order_tokens(model: Mapping[str, Any], added: Sequence[str]) -> list[str]:
    """Return the tokens that can be made, bytes first, and then in the order of their merges."""
    vocabulary: Mapping[str, int] = model["vocab"]
    merged: dict[str, None] = {}
    before = ""
    for pair in model["merges"]:
        left, right = pair.split(" ") if isinstance(pair, str) else pair
        token = left + right
        if token not in vocabulary or left not in vocabulary or right not in vocabulary:
            raise UnsupportedTokenizerError(f"its merge of {left!r} and {right!r} has no token")
        if token in merged and token != before:
            raise UnsupportedTokenizerError(f"its token {token!r} has merges of different ranks")
        merged[token] = None
        before = token
    unmade = _find_unmade(model, list(merged))
    if model.get("ignore_merges"):  # then a word that is a token is not merged
        whole = vocabulary.keys() - merged.keys() - set(_LETTERS) - set(added)
        if more := sorted(whole | unmade):
            raise UnsupportedTokenizerError(f"its token {more[0]!r} is made without merges only")
    return [*_LETTERS, *(token for token in merged if token not in unmade)]


def _find_unmade(model: Mapping[str, Any], tokens: Sequence[str]) -> set[str]:
    """Return the tokens that no text is encoded to: their merges make other tokens of them."""
    bare: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "model": {**model, "ignore_merges": False},
    }
    merging = Tokenizer.from_buffer(orjson.dumps(bare))
    encoded = merging.encode_batch_fast(tokens, add_special_tokens=False)
    vocabulary: Mapping[str, int] = model["vocab"]
    return {
        token
        for token, found in zip(tokens, encoded, strict=True)
        if found.ids != [vocabulary[token]]
    }


def _make_texts(tokens: Sequence[str], converted: BytePairEncoding) -> Iterator[str]:
    """Yield texts of random tokens, which are the same at each load."""
    rng = random.Random(0)
    for _ in range(_CHECKED_TEXTS):
        chosen = rng.choices(tokens, k=rng.randrange(1, 12))
        text = b"".join(map(_decode, chosen)).decode(errors="replace")
        if converted.is_composed:
            text = unicodedata.normalize("NFC", text)
        if not any(token in text for token in converted.added):
            yield text


def _compare(converted: BytePairEncoding, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    expected = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    for text, found in zip(texts, expected, strict=True):
        if converted.encode(text).tolist() != found.ids:
            raise UnsupportedTokenizerError(f"tiktoken makes other tokens of {text!r}")


@lru_cache(maxsize=8)
def check_pattern(pattern: str, *, every: bool = False) -> None:
    """Check that both libraries cut texts into the same words.

    The compared vocabulary has every pair of bytes, so that another word shows as other tokens.

    Args:
        pattern: Expression that cuts texts into words.
        every: Whether all characters are compared, which takes 8 s, and not only the first and the
            last of each run of characters of one category, which takes 0.7 s.

    Raises:
        UnsupportedTokenizerError: The libraries cut a text into different words.
    """
    pairs = [(left, right) for left in _LETTERS for right in _LETTERS]
    tokens = [*_LETTERS, *(left + right for left, right in pairs)]
    model = {
        "type": "BPE",
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": pairs,
    }
    rules = [
        {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        },
        {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
    ]
    if pattern == _GPT2:
        rules = [{**rules[1], "use_regex": True}]
    described: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": rules},
        "model": model,
    }
    tokenizer = Tokenizer.from_buffer(orjson.dumps(described))
    encoding = tiktoken.Encoding(
        "pairs",
        pat_str=pattern,
        mergeable_ranks={_decode(token): rank for rank, token in enumerate(tokens)},
        special_tokens={},
    )
    characters = map(chr, range(_LAST_ASSIGNED)) if every else _iterate_category_ends()
    texts = [
        f"a{one}a1{one}1!{one}! {one} A{one}A"
        for one in characters
        if not "\ud800" <= one <= "\udfff"
    ]
    texts.append("I'm it's WE'LL 12345 \r\n\r\n  x\t\t y   \n z'S ''d /\n")
    _compare(BytePairEncoding(encoding, None, (), is_composed=False), tokenizer, texts)


def _iterate_category_ends() -> Iterator[str]:
    """Yield the first and the last character of each run of characters of one category."""
    for before, after in pairwise(map(chr, range(_LAST_ASSIGNED))):
        if unicodedata.category(before) != unicodedata.category(after):
            yield from (before, after)


def _make_letters() -> list[str]:
    """Return the character that stands for each byte in a byte-level vocabulary.

    Source: GPT-2, ``bytes_to_unicode``.
    """
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]


_LETTERS = _make_letters()
_BYTES = {letter: byte for byte, letter in enumerate(_LETTERS)}


def _decode(token: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary."""
    try:
        return bytes(map(_BYTES.__getitem__, token))
    except KeyError as error:
        raise UnsupportedTokenizerError(f"its token {token!r} is not one of bytes") from error
