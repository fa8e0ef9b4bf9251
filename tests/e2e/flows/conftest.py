"""Blocks, sources of flow runs, an account that rents, secrets, and a browser."""

from tests.support.flows.browser import page
from tests.support.flows.fixtures import block, folder_source, ray_worker
from tests.support.flows.planted import planted
from tests.support.flows.renting import payer

__all__ = ["block", "folder_source", "page", "payer", "planted", "ray_worker"]
