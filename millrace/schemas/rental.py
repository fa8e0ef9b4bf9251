"""Records of rented machines: the intent to rent, the contract, its prices, and the release."""

import math
from datetime import datetime, timedelta
from enum import StrEnum
from typing import ClassVar

from pydantic import Field

from millrace.records import Record, RecordPart
from millrace.settings import Duration

_TRAFFIC_TOLERANCE = 1.1
"""Multiple of a machine's share that its traffic counts as at most: it is released at its share."""


class MoneyLimits(RecordPart):
    """Limits of what the machines of a rental may cost.

    Attributes:
        max_hourly: Highest price of one machine, in dollars an hour.
        max_total: Highest cost of all machines together, in dollars.
        machines: Number of machines.
    """

    max_hourly: float = Field(gt=0, allow_inf_nan=False)
    max_total: float = Field(gt=0, allow_inf_nan=False)
    machines: int = Field(ge=1)

    @property
    def share(self) -> float:
        """Dollars that one machine may cost if all machines cost the same."""
        return self.max_total / self.machines

    @property
    def max_traffic_cost(self) -> float:
        """Dollars that the traffic of a machine counts as at most, whatever it reports.

        The traffic of one of several machines counts little more than its share of the money,
        since the machine's own host reports it.
        """
        return math.inf if self.machines == 1 else _TRAFFIC_TOLERANCE * self.share


class Installation(Record):
    """Identity of this installation among all that rent with the same account.

    Attributes:
        id: Identity, which the label of each machine contains.
        location: Location of the store, by which a copy of the record in another store is refused.
            Empty in records of earlier versions.
    """

    record_kind: ClassVar[str] = "rental-installation"

    id: str
    location: str = ""


class Intent(Record):
    """Intent to rent a machine. It is committed before the create request is sent.

    Attributes:
        rental: Name of the rental.
        slot: Number of the machine within the rental, from 0 on.
        label: Label of the machine. It identifies the machine if the answer is lost.
        offer_id: Number of the offer, which may later belong to another machine.
        machine_id: Number of the host that has the machine, under the name that Vast.ai gives it.
        account: Identity of the account that pays, as from `VastClient.identify_account`.
        dollars_per_hour: Price of the machine with its disk.
        upload_dollars_per_gb: Price of the bytes that the machine sends.
        download_dollars_per_gb: Price of the bytes that the machine receives.
        upload_mbps: Offered upload speed in Mbit/s; 0 if it is unknown.
        download_mbps: Offered download speed in Mbit/s; 0 if it is unknown.
        started_at: Time of the intent, by the owner's clock.
        deadline: Time by which the machine has to be released.
        heartbeat_timeout: Time without a heartbeat of its owner after which the machine destroys
            itself.
    """

    record_kind: ClassVar[str] = "rental-intent"

    rental: str
    slot: int = Field(ge=0)
    label: str
    offer_id: int
    machine_id: int
    account: str
    dollars_per_hour: float = Field(ge=0, allow_inf_nan=False)
    upload_dollars_per_gb: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    download_dollars_per_gb: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    upload_mbps: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    download_mbps: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    started_at: datetime
    deadline: datetime
    heartbeat_timeout: Duration = timedelta(minutes=5)


class Contract(Record):
    """Contract of a rented machine.

    Attributes:
        instance_id: Number of the machine at the provider.
    """

    record_kind: ClassVar[str] = "rental-contract"

    instance_id: int


class PriceRaiseRecord(Record):
    """Record of a price above that of the intent, and above the prices of earlier records.

    It is committed before a decision by this price, which may end with the machine's release.

    Attributes:
        dollars_per_hour: Price of the machine in a listing.
    """

    record_kind: ClassVar[str] = "rental-raised"

    dollars_per_hour: float = Field(ge=0, allow_inf_nan=False)


class DetachRecord(Record):
    """Record that a machine runs until its deadline without an owner.

    Attributes:
        since: Time at which the owner detached the machine.
        deadline: Time by which the machine has to be released, as the money of the rental is spent
            then; None for the deadline of the intent.
        limits: Limits of the cost of the rental's machines; None in records of earlier versions.
    """

    record_kind: ClassVar[str] = "rental-detached"

    since: datetime
    deadline: datetime | None = None
    limits: MoneyLimits | None = None


class ReleaseReason(StrEnum):
    """Reason why a machine is released."""

    DONE = "done"  # the program ended with exit code 0
    FAILED = "failed"  # the program ended with another exit code
    UNNEEDED = "unneeded"  # the rental ended, or another machine has the slot
    NEVER_RENTED = "never rented"  # the offer was gone, or the create request failed
    DEAD = "dead"  # the machine did not start, or stopped
    OUTBID = "outbid"  # another client pays more
    TOO_EXPENSIVE = "too expensive"  # the machine costs more than the settings allow
    OVER_BUDGET = "over budget"  # the money or the time of the rental is spent
    REAPED = "reaped"  # the reaper found no living owner


class ReleaseRecord(Record):
    """Record that the machine of an attempt is gone: a listing of all machines lacks it.

    Attributes:
        reason: Reason of the release.
        message: Reason in words.
        cost: Estimated cost of the machine in dollars. The provider's bill is authoritative.
        released_at: Time of the release.
    """

    record_kind: ClassVar[str] = "rental-released"

    reason: ReleaseReason
    message: str = ""
    cost: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    released_at: datetime
