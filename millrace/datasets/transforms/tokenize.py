"""Transform that replaces a text by its tokens, with the tokenizers of Hugging Face."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from tokenizers import Tokenizer, __version__
from tokenizers.models import BPE

from millrace.datasets.field_names import TOKENS
from millrace.datasets.formats.base import read_field
from millrace.datasets.sample import Row, Sample
from millrace.datasets.transforms.base import make_bad_row
from millrace.datasets.transforms.function import format_last_line, is_interruption
from millrace.datasets.transforms.settings import TokenizeSettings
from millrace.errors import ConfigurationError

LIBRARY_VERSION: str = __version__
"""Version of the library, which decides the tokens beside the file of the tokenizer."""
MAX_TEXT_BYTES = 16 << 20
"""Longest text. The library takes about 120 bytes of memory for each byte of a text."""


class TokenizeTransform:
    """Transform that replaces a text by its tokens.

    Args:
        settings: Field, end of a document, and length.
        tokenizer: Bytes of a ``tokenizer.json``.

    Attributes:
        dtype: Type of a token: ``uint16`` or ``uint32``, by the size of the vocabulary.

    Raises:
        ConfigurationError: The bytes are no tokenizer, or the tokenizer has no such end token.
    """

    batch_rows = 256

    def __init__(self, settings: TokenizeSettings, tokenizer: bytes) -> None:
        self._settings = settings
        self._tokenizer = load_tokenizer(tokenizer)
        self._end = find_token(self._tokenizer, settings.end_token)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        largest = max([*vocabulary.values(), *self._list_added_ids()], default=0)
        self.dtype = "uint16" if largest < 1 << 16 else "uint32"
        self._array_type = np.dtype(self.dtype).newbyteorder("<")

    def apply(self, samples: Sequence[Sample]) -> list[list[Row]]:
        """Return each sample with its tokens instead of its text, from one call of the library."""
        rows: list[Row] = []
        texts: list[str] = []
        for sample in samples:
            try:
                texts.append(self._read_text(sample))
            except ValueError as error:
                rows.append(make_bad_row(sample, str(error)))
            else:
                rows.append(sample)
        found = self._encode(texts)
        return [
            [self._replace_text(row, next(found)) if isinstance(row, Sample) else row]
            for row in rows
        ]

    def _list_added_ids(self) -> list[int]:
        """Return the ids that the tokenizer adds to a text, which its vocabulary may not have."""
        (found,) = self._encode([""])
        return [] if isinstance(found, str) else found

    def _encode(self, texts: Sequence[str]) -> Iterator[list[int] | str]:
        return encode_texts(
            self._tokenizer, texts, add_special_tokens=self._settings.add_special_tokens
        )

    def _read_text(self, sample: Sample) -> str:
        """Return the text of a sample.

        Raises:
            ValueError: The sample has no such text. The message is the reason for the quarantine.
        """
        field = self._settings.field
        if field not in sample.fields:
            raise ValueError(f"no field {field!r} to tokenize")
        if field != TOKENS and TOKENS in sample.fields:
            raise ValueError(f"the field {TOKENS!r} is there already: rename it before")
        data = sample.fields[field]
        if len(data) > MAX_TEXT_BYTES:
            raise ValueError(
                f"a text of more than {MAX_TEXT_BYTES >> 20} MiB takes too much memory to "
                "tokenize: divide it before"
            )
        try:
            return read_field(data).decode()
        except UnicodeDecodeError:
            raise ValueError(f"the field {field!r} is not text in UTF-8") from None

    def _replace_text(self, sample: Sample, ids: list[int] | str) -> Row:
        if isinstance(ids, str):
            return make_bad_row(sample, ids)
        if self._end is not None:
            ids.append(self._end)
        tokens = np.array(ids[: self._settings.truncate], self._array_type).tobytes()
        if self._settings.pack is not None:
            return sample._replace(fields={TOKENS: tokens})
        fields = {n: data for n, data in sample.fields.items() if n != self._settings.field}
        return sample._replace(fields={**fields, TOKENS: tokens})


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool
) -> Iterator[list[int] | str]:
    """Yield the ids of each text, or the reason why the tokenizer refuses the text."""
    try:
        # The method without offsets takes less time and memory.
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    except BaseException as error:  # also a panic of Rust
        if is_fatal(error):
            raise
        yield from (_encode_text(tokenizer, text, add_special_tokens) for text in texts)
    else:
        yield from (one.ids for one in encodings)


def _encode_text(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int] | str:  # noqa: FBT001
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    except BaseException as error:
        if is_fatal(error):
            raise
        return f"the tokenizer refused the text: {format_last_line(error)}"


def is_fatal(error: BaseException) -> bool:
    """Decide whether an exception of a tokenizer is no refusal of its text."""
    return isinstance(error, MemoryError) or is_interruption(error)


@lru_cache(maxsize=4)
def load_tokenizer(body: bytes) -> Tokenizer:
    """Return the tokenizer of a ``tokenizer.json``, without truncation, padding and dropout.

    Raises:
        ConfigurationError: The bytes are no tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_buffer(body)
    except Exception as error:
        raise ConfigurationError(
            f"The tokenizer cannot be read: {error}. Name a tokenizer.json that the library "
            f"tokenizers {LIBRARY_VERSION} reads."
        ) from error
    # A file may have them in it. They would lose text, add tokens, or make other ones each time.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, BPE):
        tokenizer.model.dropout = None
    return tokenizer


def find_token(tokenizer: Tokenizer, token: str | None) -> int | None:
    """Return the id of a token; None without a token.

    Raises:
        ConfigurationError: The tokenizer has no such token. The message suggests another one.
    """
    if token is None:
        return None
    number = tokenizer.token_to_id(token)
    if number is None:
        raise ConfigurationError(
            f"The tokenizer has no token {token!r}: correct `end_token`, for example to "
            f"{_suggest_token(tokenizer)!r}."
        )
    return number


def _suggest_token(tokenizer: Tokenizer) -> str:
    added = tokenizer.get_added_tokens_decoder()
    special = [token.content for _, token in sorted(added.items()) if token.special]
    return next((one for one in special if "end" in one or "eos" in one), (special or ["</s>"])[0])
