"""Blocks, and sources of flow runs."""

from tests.support.flows.fixtures import block, folder_source

__all__ = ["block", "folder_source"]
