"""Read datasets for training: pages of rows, from a bucket, by few requests."""

from millrace.datasets.loader.draw import Page, PageTable, draw_templar_pages
from millrace.datasets.loader.pages import PageCounts, PageLoader
from millrace.datasets.loader.permutation import Permutation
from millrace.datasets.loader.tokenizer import PageTokenizer, TokenPage
from millrace.datasets.loader.tokens import PackedTokens, Packer, TokenLoader

__all__ = [
    "PackedTokens",
    "Packer",
    "Page",
    "PageCounts",
    "PageLoader",
    "PageTable",
    "PageTokenizer",
    "Permutation",
    "TokenLoader",
    "TokenPage",
    "draw_templar_pages",
]
