"""A store, and a worker's settings."""

from tests.support.campaigns.training import make_training
from tests.support.campaigns.workers import make, place, store

__all__ = ["make", "make_training", "place", "store"]
