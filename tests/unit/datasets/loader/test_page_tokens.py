"""Tokens of pages in their order, and sequences of one length that lose no token."""

import os
import pickle
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from millrace import errors
from millrace.datasets.loader import (
    Packer,
    Page,
    PageLoader,
    PageTokenizer,
    TokenLoader,
    TokenPage,
)
from millrace.digest import compute_digest
from millrace.testing.byte_level import END
from tests.support.byte_pairs import encode_json, make_tokenizer, read_sources

BODY = encode_json(make_tokenizer())
TOKENIZER = Tokenizer.from_buffer(BODY)
END_ID = TOKENIZER.token_to_id(END)


def make_page(documents: list[list[int]]) -> TokenPage:
    joined = [token for document in documents for token in document]
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    return TokenPage(np.array(joined, np.uint16), ends)


DOCUMENTS = st.lists(st.lists(st.integers(0, 9), max_size=7), max_size=6)


@given(pages=st.lists(DOCUMENTS, max_size=6), length=st.integers(1, 9), cut=st.integers(0, 6))
def test_packing_loses_no_token_and_no_end(
    pages: list[list[list[int]]], length: int, cut: int
) -> None:
    """Also where another packer goes on with the rest."""
    packer = Packer(length, np.uint16)
    tokens, ends, total = list[int](), list[int](), 0
    for number, documents in enumerate(pages):
        if number == cut:
            packer = Packer(length, np.uint16, packer.rest)
        packed = packer.add(make_page(documents))
        assert packed.tokens.shape[1] == length
        ends += (packed.ends + total).tolist()
        total += packed.tokens.size
        tokens += packed.tokens.ravel().tolist()
        assert len(packer.rest.tokens) < length
    whole = make_page([document for documents in pages for document in documents])
    assert tokens + packer.rest.tokens.tolist() == whole.tokens.tolist()
    assert ends + (packer.rest.ends + total).tolist() == whole.ends.tolist()


def test_a_rest_that_does_not_fit_is_refused() -> None:
    rest = make_page([[1, 2, 3]])
    with pytest.raises(errors.ConfigurationError, match="A rest of 3 tokens"):
        Packer(3, np.uint16, rest)
    with pytest.raises(errors.ConfigurationError, match="at least one token"):
        Packer(0, np.uint16)
    with pytest.raises(ValueError, match="uint16 and not uint32"):
        Packer(4, np.uint32).add(rest)


@pytest.fixture
def texts() -> list[str | None]:
    lines = [line for source in read_sources()[:20] for line in source.split("\n\n")]
    assert len(lines) > 1240
    return [*lines[:1240], "", None, f"ends {END} within", "last"]


@pytest.fixture
def folder(tmp_path: Path, texts: list[str | None]) -> Path:
    for number, start in enumerate(range(0, len(texts), 400)):
        rows = texts[start : start + 400]
        cast("Any", pq).write_table(
            pa.table({"text": rows, "id": range(len(rows))}),
            tmp_path / f"{number}.parquet",
            row_group_size=250, max_rows_per_page=100, write_batch_size=100,
            write_page_index=True, write_page_checksum=True, use_dictionary=False,
        )  # fmt: skip
    return tmp_path


def expect(texts: list[str | None], end: int | None = None) -> list[list[int]]:
    ids = [TOKENIZER.encode(text or "", add_special_tokens=False).ids for text in texts]
    return [
        [*one, *([end] if end is not None and text is not None else [])]
        for one, text in zip(ids, texts, strict=True)
    ]


def split(page: TokenPage) -> list[list[int]]:
    return [
        page.tokens[start:end].tolist() for start, end in zip(page.starts, page.ends, strict=True)
    ]


@pytest.mark.parametrize("end", [None, END, END_ID, 65_535, 70_000])
def test_each_page_has_the_tokens_of_its_documents(
    folder: Path, texts: list[str | None], end: str | int | None
) -> None:
    loader = TokenLoader(PageLoader(str(folder)), BODY, end_token=end)
    pages = loader.pages.draw(3, 0, len(loader.pages))
    found = list(loader.read(pages))
    assert loader.dtype == (np.uint32 if end == 70_000 else np.uint16)
    assert {page.tokens.dtype for page in found} == {loader.dtype}
    id_ = END_ID if end == END else end
    for page, tokens in zip(pages, found, strict=True):
        rows = texts[page.file * 400 :][page.start : page.end]
        assert split(tokens) == expect(rows, cast("int | None", id_))


def test_packed_sequences_are_all_tokens_in_order(folder: Path, texts: list[str | None]) -> None:
    loader = TokenLoader(PageLoader(str(folder)), BODY, end_token=END)
    pages = [loader.pages.table[number] for number in range(len(loader.pages))]
    packer = Packer(512, loader.dtype)
    packed = list(loader.read_packed(pages, packer))
    joined = np.concatenate([one.tokens.ravel() for one in packed] + [packer.rest.tokens])
    assert joined.tolist() == [token for one in expect(texts, END_ID) for token in one]


@pytest.mark.parametrize("tokenizer", [BODY, encode_json(make_tokenizer(dropout=0.0))])
def test_a_document_is_never_truncated(tokenizer: bytes) -> None:
    """Also if the file of the tokenizer says so."""
    cut = Tokenizer.from_buffer(tokenizer)
    cut.enable_truncation(5)
    cut.enable_padding(length=9)
    text = read_sources()[0]
    page = PageTokenizer(cut.to_str().encode()).encode([text, END])
    assert split(page) == expect([text, END])


def test_a_tokenizer_with_dropout_makes_the_same_tokens_each_time() -> None:
    text = read_sources()[0]
    tokenizer = PageTokenizer(encode_json(make_tokenizer(dropout=0.3)))
    assert split(tokenizer.encode([text] * 3)) == expect([text] * 3)


def test_special_tokens_around_a_text_are_added_on_request() -> None:
    special = Tokenizer.from_buffer(BODY)
    special.post_processor = processors.TemplateProcessing(
        single=f"{END} $A {END}", special_tokens=[(END, END_ID)]
    )
    body = special.to_str().encode()
    texts = ["one", "", f"two {END}", None]
    bare = expect(texts)
    assert split(PageTokenizer(body).encode(texts)) == bare
    around = [[END_ID, *one, END_ID] for one in bare[:3]]
    for end in (None, END):
        found = PageTokenizer(body, end_token=end, add_special_tokens=True)
        assert split(found.encode(texts)) == [*around, []]
    other = PageTokenizer(body, end_token=5, add_special_tokens=True)
    assert split(other.encode(texts)) == [*([*one, 5] for one in around), []]


def test_a_tokenizer_is_pickled_with_its_settings() -> None:
    tokenizer = PageTokenizer(BODY, end_token=END, add_special_tokens=True)
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.identity == tokenizer.identity
    assert split(again.encode(["x"])) == split(tokenizer.encode(["x"]))


@pytest.mark.parametrize(
    ("column", "kind", "text"),
    [
        ("id", errors.ConfigurationError, r"1\.parquet, rows 100 to 199 has no text but int64"),
        ("long", errors.CorruptError, r"1\.parquet, rows 0 to 2 .*document 1 has more than 16 MiB"),
        ("bytes", errors.CorruptError, r"1\.parquet, rows 0 to 2 cannot be tokenized .*utf-8"),
        ("bad", errors.CorruptError, r"1\.parquet, rows 0 to 2 cannot be tokenized .*utf-8"),
    ],
)
def test_an_error_in_one_page_names_it(
    folder: Path, column: str, kind: type[Exception], text: str
) -> None:
    if column != "id":
        values: Any = ["a", END + "x" * (17 << 20), "b"]
        if column != "long":
            values = pa.array([b"a", b"\xff\xfe", None], pa.binary())
        if column == "bad":
            values = pa.StringArray.from_buffers(3, *values.buffers()[1:], values.buffers()[0])
        pq.write_table(pa.table({column: values}), folder / "1.parquet")
    pages = PageLoader(str(folder), column, include=["1.parquet"])
    loader = TokenLoader(pages, BODY)
    wrong = Page(0, 100, 200) if column == "id" else Page(0, 0, 3)
    with pytest.raises(kind, match=text):
        list(loader.read([wrong]))


def make_words(*, added: int | None = None) -> bytes:
    """Return a tokenizer of the words a and b, with a token that it adds to each text."""
    library = Tokenizer(models.WordLevel({"a": 0, "b": 1}))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if added is not None:
        library.post_processor = processors.TemplateProcessing(
            single="[BOS] $A", special_tokens=[("[BOS]", added)]
        )
    return library.to_str().encode()


def test_a_text_that_the_tokenizer_refuses_is_named(folder: Path) -> None:
    pq.write_table(pa.table({"text": ["a b", "b", "a c"]}), folder / "1.parquet")
    loader = TokenLoader(PageLoader(str(folder), "text", include=["1.parquet"]), make_words())
    assert split(next(loader.read([Page(0, 0, 2)]))) == [[0, 1], [1]]
    refusal = r"1\.parquet, rows 0 to 2 .*document 2: the tokenizer refused .*WordLevel error"
    with pytest.raises(errors.CorruptError, match=refusal):
        list(loader.read([Page(0, 0, 3)]))
    with pytest.raises(ValueError, match="document 1: the tokenizer refused the text"):
        PageTokenizer(BODY).encode(["a", "\udc80"])


@pytest.mark.parametrize("added", [65_535, 65_536])
def test_an_id_that_the_vocabulary_does_not_have_decides_the_type_too(added: int) -> None:
    tokenizer = PageTokenizer(make_words(added=added), add_special_tokens=True)
    assert tokenizer.dtype == (np.uint16 if added < 1 << 16 else np.uint32)
    assert split(tokenizer.encode(["a b"])) == [[added, 0, 1]]


def test_a_damaged_page_is_named_with_its_rows(folder: Path) -> None:
    loader = TokenLoader(PageLoader(str(folder), cache_bytes=1), BODY)
    path = folder / "2.parquet"
    body = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    for place in range(column.data_page_offset, column.data_page_offset + 200):
        body[place] ^= 0xFF
    stat = path.stat()
    path.write_bytes(body)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    good, wrong = Page(0, 0, 100), Page(2, 0, 100)
    found = loader.read([good, wrong, good])
    assert len(next(found).ends) == 100
    with pytest.raises(errors.CorruptError, match=r"2\.parquet.*rows 0 to 99"):
        next(found)


def test_a_tokenizer_with_another_digest_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(BODY)
    digest = compute_digest(BODY)
    assert PageTokenizer(str(path), digest=digest).digest == digest
    other = compute_digest(b"other")
    for tokenizer in (str(path), BODY):
        with pytest.raises(errors.ConfigurationError, match="digest"):
            PageTokenizer(tokenizer, digest=other)
    with pytest.raises(errors.ConfigurationError, match="no token '<eos>'"):
        PageTokenizer(BODY, end_token="<eos>")
    with pytest.raises(errors.ConfigurationError, match="no id of 32 bits"):
        PageTokenizer(BODY, end_token=1 << 32)
