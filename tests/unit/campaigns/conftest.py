"""A store, and a worker's settings."""

from tests.support.campaigns.workers import make, place, store

__all__ = ["make", "place", "store"]
