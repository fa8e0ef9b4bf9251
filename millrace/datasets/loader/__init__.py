"""Read datasets for training: samples of shards, or pages of rows, from a bucket."""

from millrace.datasets.loader.draw import Page, PageTable, draw_templar_pages
from millrace.datasets.loader.page_tokens import PackedTokens, Packer, TokenLoader
from millrace.datasets.loader.pages import PageCounts, PageLoader
from millrace.datasets.loader.permutation import Permutation
from millrace.datasets.loader.shard_loader import ShardLoader
from millrace.datasets.loader.stream_counts import Remainder
from millrace.datasets.loader.tokenizer import PageTokenizer, TokenPage

__all__ = [
    "PackedTokens",
    "Packer",
    "Page",
    "PageCounts",
    "PageLoader",
    "PageTable",
    "PageTokenizer",
    "Permutation",
    "Remainder",
    "ShardLoader",
    "TokenLoader",
    "TokenPage",
    "draw_templar_pages",
]
