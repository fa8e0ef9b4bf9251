"""Blocks, sources of flow runs, an account that rents, and secrets."""

from tests.support.flows.fixtures import block, folder_source, ray_worker
from tests.support.flows.planted import planted
from tests.support.flows.renting import payer

__all__ = ["block", "folder_source", "payer", "planted", "ray_worker"]
