"""Offers: what is asked for, what it would cost in all, and which is taken first."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from millrace.rentals.vast.api import Vast
from millrace.settings import Duration

LONGEST = timedelta(days=7)
"""How long a machine is rented at most: what it may hold of ours ends by then."""
_HOURS_A_MONTH = 730.0
_OFFERS = 100

Region = Annotated[str, StringConstraints(pattern=r"^[A-Za-z]{2}$", to_upper=True)]


class OfferRequest(BaseModel):
    """Requirements of a rented machine, and its highest price."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpu: str = Field(
        default="", description="As Vast.ai calls it, `RTX 4090` or `RTX_4090`; empty for any."
    )
    gpus: int = Field(default=1, ge=1, le=64, description="Number of GPUs in each machine.")
    gpu_memory: float = Field(default=0.0, ge=0, description="GB of each GPU, at least.")
    disk: float = Field(default=40.0, ge=8, description="GB; it cannot be changed later.")
    down: float = Field(default=100.0, ge=0, description="Mbit/s that it receives, at least.")
    up: float = Field(default=100.0, ge=0, description="Mbit/s that it sends, at least.")
    reliability: float = Field(default=0.95, ge=0, le=1, description="At least, of 1.")
    regions: tuple[Region, ...] = Field(
        default=(), description="Only in these countries, by two letters: `US`, `DE`."
    )
    verified: bool = Field(default=True, description="Only machines that Vast.ai has verified.")
    ports: int = Field(default=0, ge=0, description="Ports that others can reach, at least.")
    interruptible: bool = Field(
        default=False, description="A cheaper machine, that goes to whoever pays more."
    )
    bid: float | None = Field(
        default=None,
        gt=0,
        description="Dollars an hour that are bid for an interruptible one; left out: a tenth "
        "more than is asked.",
    )
    max_hourly: float = Field(
        gt=0, le=128, description="Dollars an hour that one machine may cost, its disk included."
    )
    max_traffic: float = Field(
        default=0.1, ge=0, le=10, description="Dollars a GB that it may cost to receive, or send."
    )
    max_total: float = Field(
        gt=0, description="Dollars that all machines may cost together: then they are given back."
    )
    max_lifetime: Duration = Field(
        default=timedelta(hours=24),
        gt=timedelta(minutes=1),
        le=LONGEST,
        description="Then a machine is given back, whatever it does.",
    )
    hours: float = Field(
        default=1.0, gt=0, description="Hours that it is likely to be needed: to compare offers."
    )
    download: float = Field(default=0.0, ge=0, description="GB that it will receive, likewise.")
    upload: float = Field(default=0.0, ge=0, description="GB that it will send, likewise.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.bid is not None and not self.interruptible:
            raise ValueError("a bid is for an interruptible machine: set interruptible too")
        if self.bid is not None and self.bid > self.max_hourly:
            raise ValueError("the bid is more than max_hourly")
        return self

    @property
    def kind(self) -> str:
        """As Vast.ai calls it."""
        return "bid" if self.interruptible else "on-demand"

    def filters(self) -> dict[str, dict[str, Any]]:
        """Return the requirements in the API's own units: MB of memory, seconds of duration."""
        found: dict[str, dict[str, Any]] = {
            "rentable": {"eq": True},
            "rented": {"eq": False},
            "external": {"eq": False},
            "num_gpus": {"eq": self.gpus},
            "gpu_ram": {"gte": self.gpu_memory * 1000},
            "disk_space": {"gte": self.disk},
            "inet_down": {"gte": self.down},
            "inet_up": {"gte": self.up},
            "reliability": {"gte": self.reliability},
            "duration": {"gte": self.max_lifetime.total_seconds()},
            "direct_port_count": {"gte": self.ports},
        }
        if self.verified:
            found["verified"] = {"eq": True}
        if self.gpu:
            found["gpu_name"] = {"eq": self.gpu.replace("_", " ")}
        if self.regions:
            found["geolocation"] = {"in": list(self.regions)}
        if not self.interruptible:
            found["dph_total"] = {"lte": self.max_hourly}
        return found


@dataclass(frozen=True, slots=True)
class Offer:
    """A machine that can be rented.

    Attributes:
        id: The ask's number, which may change.
        machine: The host behind it, which stays.
        gpu: What it is called.
        gpus: How many.
        gpu_memory: GB of each.
        place: Where it stands.
        reliability: Of 1.
        down: Mbit/s.
        up: Mbit/s.
        dph: Dollars an hour, the disk included: of an interruptible one with our bid.
        bid: Dollars an hour that are bid; None for one on demand.
        down_cost: Dollars a GB.
        up_cost: Dollars a GB.
        total: Dollars that it is likely to cost in all.
    """

    id: int
    machine: int
    gpu: str
    gpus: int
    gpu_memory: float
    place: str
    reliability: float
    down: float
    up: float
    dph: float
    bid: float | None
    down_cost: float
    up_cost: float
    total: float

    @classmethod
    def of(cls, row: Mapping[str, Any], request: OfferRequest) -> "Offer":
        """Read an offer, and reckon what it would cost.

        Raises:
            TypeError, ValueError, KeyError: It is none.
        """
        dph, bid = float(row["dph_total"]), None
        if request.interruptible:
            asked = float(row["min_bid"])
            bid = request.bid if request.bid is not None else math.ceil(asked * 1100) / 1000
            if bid < asked:
                raise ValueError("more is asked than is bid")
            dph = bid + float(row.get("storage_cost") or 0.0) * request.disk / _HOURS_A_MONTH
        down_cost = float(row.get("inet_down_cost") or 0.0)
        up_cost = float(row.get("inet_up_cost") or 0.0)
        numbers = (dph, down_cost, up_cost)
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise ValueError("a price is no number")
        return cls(
            id=int(row["id"]),
            machine=int(row["machine_id"]),
            gpu=str(row.get("gpu_name") or "?"),
            gpus=int(row["num_gpus"]),
            gpu_memory=float(row.get("gpu_ram") or 0.0) / 1000,
            place=str(row.get("geolocation") or "?"),
            reliability=float(row.get("reliability") or 0.0),
            down=float(row.get("inet_down") or 0.0),
            up=float(row.get("inet_up") or 0.0),
            dph=dph,
            bid=bid,
            down_cost=down_cost,
            up_cost=up_cost,
            total=request.hours * dph + request.download * down_cost + request.upload * up_cost,
        )


def find_offers(vast: Vast, request: OfferRequest, *, without: Iterable[int] = ()) -> list[Offer]:
    """Offers that fit, that which costs least in all first.

    Args:
        vast: Whom to ask.
        request: What is wanted.
        without: Hosts that are not wanted (again).

    Raises:
        UnavailableError, DeniedError: As of `Vast.search`.
    """
    bad = set(without)
    rows = vast.search(request.filters(), kind=request.kind, disk=request.disk, limit=_OFFERS)
    offers: dict[int, Offer] = {}
    for row in rows:
        try:
            offer = Offer.of(row, request)
        except (KeyError, TypeError, ValueError):
            continue  # one that cannot be read is not taken
        dear = max(offer.down_cost, offer.up_cost) > request.max_traffic
        if offer.machine not in bad and offer.dph <= request.max_hourly and not dear:
            offers[offer.id] = offer
    return sorted(offers.values(), key=lambda offer: (offer.total, -offer.reliability, offer.id))
