"""Records of rented machines: the intent first, then the contract and the end."""

from datetime import datetime
from enum import StrEnum
from typing import ClassVar

from pydantic import Field

from millrace.records import Record


class Installation(Record):
    """Identity of this installation among all that rent with the same account.

    Attributes:
        id: In the label of every machine of ours.
    """

    record_kind: ClassVar[str] = "rental-installation"

    id: str


class Intent(Record):
    """Intent to rent a machine. Committed before the machine is rented.

    Attributes:
        rental: What it is for.
        slot: Which of the rental's machines it is to be, from 0.
        label: By which it is found again should the answer be lost.
        offer: The ask that is taken; its number may come to mean another.
        machine: The host that is behind it.
        account: Account that pays for it, as of `Vast.identity`.
        dph: Dollars an hour that it costs, disk included.
        up_cost: Dollars for each GB that it sends.
        down_cost: Dollars for each GB that it receives.
        up: Mbit/s that it can send, by its offer; 0 if that is not known.
        down: Mbit/s that it can receive, likewise.
        begun: When, by the owner's clock.
        until: When it has to be back.
    """

    record_kind: ClassVar[str] = "rental-intent"

    rental: str
    slot: int = Field(ge=0)
    label: str
    offer: int
    machine: int
    account: str
    dph: float = Field(ge=0, allow_inf_nan=False)
    up_cost: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    down_cost: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    up: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    down: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    begun: datetime
    until: datetime


class Contract(Record):
    """A machine that was rented.

    Attributes:
        instance: Its number.
    """

    record_kind: ClassVar[str] = "rental-contract"

    instance: int


class DetachRecord(Record):
    """Record that a machine stays until its time is over, though nobody holds its rental.

    Attributes:
        at: Since when.
    """

    record_kind: ClassVar[str] = "rental-left"

    at: datetime


class ReturnReason(StrEnum):
    """Reason why a machine is given back."""

    DONE = "done"  # its program ended well
    FAILED = "failed"  # its program ended otherwise
    RELEASED = "released"  # nobody wants it any more
    NEVER = "never came"  # the offer was gone, or the create was refused
    DEAD = "dead"  # it did not come up, or fell over
    OUTBID = "outbid"  # somebody pays more
    DEARER = "dearer"  # the host asks for more than was granted
    SPENT = "spent"  # the money or the time is
    REAPED = "reaped"  # it had no living owner


class ReturnRecord(Record):
    """Record that nothing is left of an attempt: a listing of all machines showed none.

    Attributes:
        why: Why it was given back.
        said: The same in words, for a person.
        cost: Dollars, as we have reckoned them: the provider's bill is what counts.
        ended: When.
    """

    record_kind: ClassVar[str] = "rental-returned"

    why: ReturnReason
    said: str = ""
    cost: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    ended: datetime
