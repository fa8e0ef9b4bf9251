"""Blocks, sources of flow runs, and a browser."""

from tests.support.flows.fixtures import block, folder_source, page

__all__ = ["block", "folder_source", "page"]
