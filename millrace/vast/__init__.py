"""Rent machines of Vast.ai, use them, and always give them back."""

from millrace.vast.api import Vast
from millrace.vast.clock import Clock, SystemClock
from millrace.vast.guard import RentalGuard
from millrace.vast.hiring import node_key
from millrace.vast.instances import IDENTITY, Instance
from millrace.vast.ledger import attempts_of, is_rented
from millrace.vast.offers import Offer, OfferRequest, find_offers
from millrace.vast.reaper import Reaped, Rented, list_rentals, reap, release
from millrace.vast.rental import Machine, Rental
from millrace.vast.settings import (
    Account,
    Patience,
    Program,
    Reach,
    RentSettings,
    StandSettings,
    account,
)

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
