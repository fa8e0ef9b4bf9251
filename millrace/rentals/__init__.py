"""Rent machines of Vast.ai, use them, and always release them.

- A *rental* has a number of *slots*. Each slot has at most one machine at a time.
- An *attempt* (`Intent`, `Contract` and release record) is one machine of a slot, or a try to rent
  one. Its label is the machine's name at Vast.ai, and the contract has the number of its instance.
- A *host* has the machine. Vast.ai calls the number of a host `machine_id`, and so do the records.

`millrace.rentals.ownership` lists who watches whom, and what follows.
"""

from millrace.rentals.access_variables import (
    describe_granted,
    make_access_variables,
    make_location_settings,
    make_store_settings,
)
from millrace.rentals.clock import Clock, SystemClock
from millrace.rentals.ledger import has_open_attempts, list_attempts
from millrace.rentals.machine_environment import derive_node_key
from millrace.rentals.machines import Machine, compute_recorded_cost
from millrace.rentals.offers import Offer, OfferRequest, find_offers
from millrace.rentals.outside_release import release_rental
from millrace.rentals.owner_monitor import OwnerMonitor
from millrace.rentals.reaper import MachineStatus, ReapResult, list_rentals, reap
from millrace.rentals.rental import Rental
from millrace.rentals.settings import (
    CodeRepository,
    LedgerSettings,
    MachineSettings,
    Program,
    RentalSettings,
    RentalTimeouts,
    StorageGrant,
    VastAccount,
    check_offer_id,
    open_account,
)
from millrace.rentals.supervisor import RentalSupervisor
from millrace.rentals.vast.api import VastClient
from millrace.rentals.vast.instances import IDENTITY_PORT, Instance

__all__ = [
    "IDENTITY_PORT",
    "Clock",
    "CodeRepository",
    "Instance",
    "LedgerSettings",
    "Machine",
    "MachineSettings",
    "MachineStatus",
    "Offer",
    "OfferRequest",
    "OwnerMonitor",
    "Program",
    "ReapResult",
    "Rental",
    "RentalSettings",
    "RentalSupervisor",
    "RentalTimeouts",
    "StorageGrant",
    "SystemClock",
    "VastAccount",
    "VastClient",
    "check_offer_id",
    "compute_recorded_cost",
    "derive_node_key",
    "describe_granted",
    "find_offers",
    "has_open_attempts",
    "list_attempts",
    "list_rentals",
    "make_access_variables",
    "make_location_settings",
    "make_store_settings",
    "open_account",
    "reap",
    "release_rental",
]
