"""Read datasets for training: pages of rows, from a bucket, by few requests."""

from millrace.datasets.loader.draw import Page, PageTable, draw_templar_pages
from millrace.datasets.loader.pages import PageCounts, PageLoader
from millrace.datasets.loader.permutation import Permutation

__all__ = [
    "Page",
    "PageCounts",
    "PageLoader",
    "PageTable",
    "Permutation",
    "draw_templar_pages",
]
