"""An account at the stand-in."""

from tests.support.rentals.account import world

__all__ = ["world"]
