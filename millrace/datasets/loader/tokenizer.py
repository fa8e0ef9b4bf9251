"""Encode texts to tokens in NumPy arrays, by tiktoken where the vocabulary allows it."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from millrace import errors
from millrace.datasets.transforms.recorded import read_tokenizer
from millrace.digest import compute_digest
from millrace.extras import import_extra_module

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from millrace.datasets.loader.byte_pairs import BytePairEncoding

Tokens = npt.NDArray[np.unsignedinteger[Any]]
Offsets = npt.NDArray[np.int64]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class TokenPage:
    """Tokens of some documents, one after the other.

    Attributes:
        tokens: Tokens, ``uint16`` or ``uint32``.
        ends: Offset after the last token of each document. An end token is within its document.
    """

    tokens: Tokens
    ends: Offsets

    @property
    def starts(self) -> Offsets:
        """Offset of the first token of each document."""
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])[: len(self.ends)]

    @property
    def size(self) -> int:
        """Memory of the arrays in bytes."""
        return self.tokens.nbytes + self.ends.nbytes


class PageTokenizer:
    """Tokenizer of whole documents. No document is truncated.

    A byte-level BPE is converted to an encoding of tiktoken, which makes equal tokens several times
    faster. Other tokenizers, and texts with the name of an added token such as ``<|endoftext|>``,
    are encoded by the library `tokenizers`.

    Args:
        tokenizer: Path or URL of a ``tokenizer.json``, or its bytes.
        end_token: Token that ends each document, as its text or its id; None adds none.
        digest: Digest that the file must have; None accepts any file.
        add_special_tokens: Whether the tokens that the tokenizer itself adds around a text are
            added, such as a token that begins a document.

    Attributes:
        digest: Digest of the file.
        end_id: Id of the token that ends each document; None if there is none.
        dtype: Type of the tokens: ``uint16`` if the vocabulary allows it, otherwise ``uint32``.
        reason: Reason why tiktoken is not used; empty if it is used.

    Raises:
        ConfigurationError: The file is no tokenizer or has another digest, or the tokenizer has no
            such end token.
        NotFoundError: There is no such file.
    """

    def __init__(
        self,
        tokenizer: str | bytes,
        *,
        end_token: str | int | None = None,
        digest: str | None = None,
        add_special_tokens: bool = False,
    ) -> None:
        self._body = (
            tokenizer if isinstance(tokenizer, bytes) else read_tokenizer(tokenizer, digest=digest)
        )
        self.digest = compute_digest(self._body)
        if digest not in {None, self.digest}:
            raise errors.ConfigurationError(
                f"The tokenizer has the digest {self.digest}, and not {digest}. Take the version "
                "with that digest."
            )
        self._add_special_tokens = add_special_tokens
        self._open(end_token)
        before, after = self._find_special_tokens() if add_special_tokens else ((), ())
        # A document that ends with the end token already gets no second one.
        if self.end_id is not None and after[-1:] != (self.end_id,):
            after = (*after, self.end_id)
        self._around = before, after
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        # The vocabulary may lack ids that are added around a text.
        largest = max([*ids, *before, *after], default=0)
        self.dtype = np.dtype(np.uint16 if largest < 1 << 16 else np.uint32)

    def _find_special_tokens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens that the tokenizer adds before and after a text."""
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a").ids
        for start in range(len(full) - len(bare) + 1):
            end = start + len(bare)
            if full[start:end] == bare:
                return tuple(full[:start]), tuple(full[end:])
        raise errors.ConfigurationError(
            "The tokenizer adds its special tokens within a text. Set `add_special_tokens` to "
            "false."
        )

    def _open(self, end_token: str | int | None) -> None:
        self._library = import_extra_module("millrace.datasets.transforms.tokenize", "tokenizers")
        self._tokenizer: Tokenizer = self._library.load_tokenizer(self._body)
        self._max_text: int = self._library.MAX_TEXT_BYTES
        if isinstance(end_token, int):
            if not 0 <= end_token < 1 << 32:
                raise errors.ConfigurationError(
                    f"The end token {end_token} is no id of 32 bits. Correct `end_token`."
                )
            self.end_id: int | None = end_token
        else:
            self.end_id = self._library.find_token(self._tokenizer, end_token)
        self._encoding, self.reason = _convert(self._body)
        self._prefix = _find_prefix(self._encoding.added) if self._encoding else ""

    @property
    def identity(self) -> tuple[str, int | None, bool]:
        """Digest of the file, and settings: the tokens of a text are a function of them."""
        return self.digest, self.end_id, self._add_special_tokens

    @property
    def overhead(self) -> int:
        """Number of tokens that are added to each document."""
        return sum(map(len, self._around))

    def __reduce__(self) -> "tuple[Any, ...]":
        """Pickle a tokenizer as its file, for processes that are spawned."""
        return _reopen_tokenizer, (type(self), self._body, self.end_id, self._add_special_tokens)

    def encode(self, texts: Sequence[str | None]) -> TokenPage:
        """Return the tokens of documents. None is a document without tokens and without an end.

        Raises:
            ValueError: The library `tokenizers` refuses a text, or the text is longer than the
                library can encode, 16 MiB. The message has the number of the document.
        """
        found: list[Tokens | None] = [self._encode_quickly(text) for text in texts]
        left = [number for number, tokens in enumerate(found) if tokens is None]
        if left:
            whole = [texts[number] or "" for number in left]
            for number, text in zip(left, whole, strict=True):
                if len(text) * 4 > self._max_text and len(text.encode()) > self._max_text:
                    raise ValueError(
                        f"document {number} has more than {self._max_text >> 20} MiB, which take "
                        "too much memory to tokenize"
                    )
            encoded: Iterator[list[int] | str] = self._library.encode_texts(
                self._tokenizer, whole, add_special_tokens=False
            )
            for number, ids in zip(left, encoded, strict=True):
                if isinstance(ids, str):
                    raise ValueError(f"document {number}: {ids}")  # noqa: TRY004 - a refusal
                found[number] = np.array(ids, self.dtype)
        return self._join(texts, [tokens for tokens in found if tokens is not None])

    def _encode_quickly(self, text: str | None) -> npt.NDArray[np.uint32] | None:
        """Return the tokens of a text; None if tiktoken does not encode the text."""
        if not text:
            return np.zeros(0, np.uint32)
        encoding = self._encoding
        if encoding is None:
            return None
        if self._has_added_token(text):
            return None
        try:
            if encoding.is_composed and not text.isascii():
                normalizer: Any = self._tokenizer.normalizer
                text = str(normalizer.normalize_str(text))
                if self._has_added_token(text):
                    return None
            return encoding.encode(text)
        except BaseException as error:  # such as of a long run of spaces, or a panic of Rust
            if self._library.is_fatal(error):
                raise
            return None

    def _has_added_token(self, text: str) -> bool:
        added = self._encoding.added if self._encoding else ()
        return bool(added) and self._prefix in text and any(one in text for one in added)

    def _join(self, texts: Sequence[str | None], found: Sequence[npt.NDArray[Any]]) -> TokenPage:
        before, after = self._around
        sizes = [
            len(tokens) + self.overhead if text is not None else 0
            for text, tokens in zip(texts, found, strict=True)
        ]
        ends = np.cumsum(np.array(sizes, np.int64), dtype=np.int64)
        joined: Tokens = np.empty(int(ends[-1]) if len(ends) else 0, self.dtype)
        for tokens, end, size in zip(found, ends.tolist(), sizes, strict=True):
            if size:
                start = end - size + len(before)
                joined[end - size : start] = before
                joined[start : start + len(tokens)] = tokens
                joined[start + len(tokens) : end] = after
        for array in (joined, ends):  # several loaders may share them
            array.setflags(write=False)
        return TokenPage(joined, ends)

    @classmethod
    def open(cls, tokenizer: "str | bytes | Self", end_token: str | int | None) -> "Self":
        """Return a tokenizer, made from its file unless it is one already.

        Raises:
            ConfigurationError: A tokenizer is given beside an end token of its own.
        """
        if not isinstance(tokenizer, PageTokenizer):
            return cls(tokenizer, end_token=end_token)
        if end_token is not None:
            raise errors.ConfigurationError("Give `end_token` to the PageTokenizer only.")
        return tokenizer


def _find_prefix(texts: Sequence[str]) -> str:
    """Return the longest common beginning of texts."""
    first, last = min(texts, default=""), max(texts, default="")
    same = (one == other for one, other in zip(first, last, strict=False))
    return first[: sum(takewhile(bool, same))]


def _reopen_tokenizer(
    kind: type[PageTokenizer],
    body: bytes,
    end_id: int | None,
    add_special_tokens: bool,  # noqa: FBT001 - of a pickle
) -> PageTokenizer:
    return kind(body, end_token=end_id, add_special_tokens=add_special_tokens)


@lru_cache(maxsize=4)
def _convert(body: bytes) -> "tuple[BytePairEncoding | None, str]":
    """Return the encoding of tiktoken, or None and the reason why there is none."""
    tokenize: Any = import_extra_module("millrace.datasets.transforms.tokenize", "tokenizers")
    try:
        from millrace.datasets.loader import byte_pairs  # noqa: PLC0415 - tiktoken is optional
    except ModuleNotFoundError as error:
        if error.name != "tiktoken":
            raise
        return None, "tiktoken is not installed"
    try:
        return byte_pairs.convert_tokenizer(body, tokenize.load_tokenizer(body)), ""
    except byte_pairs.UnsupportedTokenizerError as error:
        _log.info("tiktoken does not encode texts for this tokenizer: %s.", error)
        return None, str(error)
