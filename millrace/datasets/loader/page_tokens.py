"""Read pages as tokens, and pack the tokens into sequences of one length."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace import errors
from millrace.datasets.loader.draw import Page
from millrace.datasets.loader.pages import PageLoader
from millrace.datasets.loader.tokenizer import Offsets, PageTokenizer, TokenPage, Tokens


class TokenLoader:
    """Tokens of the pages of a loader.

    The thread that fetches a page also tokenizes it, so the tokens of one page are made while the
    next pages are fetched. Several threads may use a loader.

    Args:
        pages: Loader of the pages.
        tokenizer: Path or URL of a ``tokenizer.json``, its bytes, or a tokenizer.
        end_token: Token that ends each document, as its text or its id; None adds none.

    Raises:
        ConfigurationError: The file is no tokenizer, or has no such token.
        NotFoundError: There is no such file.

    Example:
        loader = TokenLoader(PageLoader(url), "tokenizer.json", end_token="<|endoftext|>")
        packer = Packer(2048, loader.dtype)
        for page in loader.read(loader.pages.draw(seed=uid, window=12, count=6)):
            train(packer.add(page).tokens)
    """

    def __init__(
        self,
        pages: PageLoader,
        tokenizer: str | bytes | PageTokenizer,
        *,
        end_token: str | int | None = None,
    ) -> None:
        self.pages = pages
        self.tokenizer = PageTokenizer.open(tokenizer, end_token)

    @property
    def dtype(self) -> "np.dtype[Any]":
        """Type of the tokens, ``uint16`` or ``uint32``."""
        return self.tokenizer.dtype

    def read(self, pages: Iterable[Page]) -> Iterator[TokenPage]:
        """Yield the tokens of each page, in the order of the pages.

        Several pages are fetched and tokenized at once, up to 64 MiB of stored bytes or one page.
        Each row is a document, and a null is one without tokens.

        Raises:
            ConfigurationError: The column has no text.
            CorruptError: A text is not UTF-8 or too long, or a file is damaged. The message names
                the file and the rows.
            ChangedError: A file was written again after the loader was opened, or is gone.
        """
        return self.pages.map(
            self._encode, pages, key=self.tokenizer.identity, measure=lambda page: page.size
        )

    def read_packed(self, pages: Iterable[Page], packer: "Packer") -> Iterator["PackedTokens"]:
        """Yield the sequences that each page completes. The rest stays in the packer.

        Raises:
            MillraceError: A page cannot be read, with the errors of `read`.
        """
        for page in self.read(pages):
            packed = packer.add(page)
            if len(packed.tokens):
                yield packed

    def _encode(self, page: Page, values: Any) -> TokenPage:
        where = self.pages.describe(page)
        try:
            texts = [_decode_text(value) for value in values.to_pylist()]
            return self.tokenizer.encode(texts)
        except TypeError as error:
            raise errors.ConfigurationError(
                f"{where} has no text but {values.type}. Name a column of texts."
            ) from error
        except ValueError as error:  # also an error of UTF-8
            raise errors.CorruptError(
                f"{where} cannot be tokenized ({error}). Correct the text, or leave the page out."
            ) from error


@dataclass(frozen=True, slots=True, eq=False)
class PackedTokens:
    """Sequences of one length.

    Attributes:
        tokens: Tokens, of the shape ``(sequences, length)``.
        ends: Offset after the last token of each document that ends here, in all tokens joined. A
            document that ends exactly with the last sequence is among them.
    """

    tokens: Tokens
    ends: Offsets


class Packer:
    """Joins documents, and divides them into sequences of one length. No token is lost or added.

    Args:
        length: Tokens of a sequence.
        dtype: Type of the tokens.
        rest: Rest of an earlier packer, to go on after it.

    Attributes:
        rest: Tokens and ends of documents that are in no sequence yet: fewer than `length` tokens.
    """

    def __init__(
        self, length: int, dtype: "np.dtype[Any] | type[Any]", rest: TokenPage | None = None
    ) -> None:
        if length < 1:
            raise errors.ConfigurationError("A sequence has at least one token. Correct `length`.")
        self._length, self._dtype = length, np.dtype(dtype)
        self.rest = TokenPage(np.zeros(0, self._dtype), np.zeros(0, np.int64))
        if rest is not None:
            if len(rest.tokens) >= length:
                raise errors.ConfigurationError(
                    f"A rest of {len(rest.tokens)} tokens is not that of sequences of {length}. "
                    "Correct `length`, or begin without a rest."
                )
            self.add(rest)

    def add(self, page: TokenPage) -> PackedTokens:
        """Return the sequences that a page completes, and keep the rest.

        Raises:
            ValueError: The tokens have another type.
        """
        if page.tokens.dtype != self._dtype:
            raise ValueError(f"the tokens are {page.tokens.dtype} and not {self._dtype}")
        before = len(self.rest.tokens)
        tokens = np.concatenate([self.rest.tokens, page.tokens])
        ends = np.concatenate([self.rest.ends, page.ends + before])
        used = len(tokens) // self._length * self._length
        taken = int(np.searchsorted(ends, used, "right")) if used else 0
        self.rest = TokenPage(tokens[used:].copy(), ends[taken:] - used)
        return PackedTokens(tokens[:used].reshape(-1, self._length), ends[:taken])


def _decode_text(value: Any) -> str | None:
    """Return a value of a column as text; None for a null.

    Raises:
        TypeError: The value is no text.
        UnicodeDecodeError: The bytes are not UTF-8.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode()
    raise TypeError(f"a value is {type(value).__name__}")
