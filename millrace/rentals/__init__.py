"""Rent machines of Vast.ai, use them, and always give them back."""

from millrace.rentals.clock import Clock, SystemClock
from millrace.rentals.guard import RentalGuard
from millrace.rentals.ledger import attempts_of, is_rented
from millrace.rentals.offers import Offer, OfferRequest, find_offers
from millrace.rentals.reaper import Reaped, Rented, list_rentals, reap, release
from millrace.rentals.rental import Machine, Rental
from millrace.rentals.settings import (
    Account,
    Patience,
    Program,
    Reach,
    RentSettings,
    StandSettings,
    account,
)
from millrace.rentals.startup import node_key
from millrace.rentals.vast.api import Vast
from millrace.rentals.vast.instances import IDENTITY, Instance

__all__ = [
    "IDENTITY",
    "Account",
    "Clock",
    "Instance",
    "Machine",
    "Offer",
    "OfferRequest",
    "Patience",
    "Program",
    "Reach",
    "Reaped",
    "RentSettings",
    "Rental",
    "RentalGuard",
    "Rented",
    "StandSettings",
    "SystemClock",
    "Vast",
    "account",
    "attempts_of",
    "find_offers",
    "is_rented",
    "list_rentals",
    "node_key",
    "reap",
    "release",
]
