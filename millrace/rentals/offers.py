"""Offers of machines: requirements, expected costs, and order."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from millrace.formatting import clean_text
from millrace.rentals.vast.api import VastClient
from millrace.schemas.rental import MoneyLimits
from millrace.settings import Duration, Size, parse_size

MAX_LIFETIME = timedelta(days=7)
"""Longest lifetime of a machine, and of its credentials."""
_GB = 1_000_000_000
_LEAST_SIZE = 1_000_000  # of a disk, a memory or an expected transfer
_HOURS_PER_MONTH = 730.0
_MAX_OFFERS = 100

CountryCode = Annotated[str, StringConstraints(pattern=r"^[A-Za-z]{2}$", to_upper=True)]


class OfferRequest(BaseModel):
    """Requirements of a rented machine, and its highest price."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    offer_id: int | None = Field(
        title="Offer ID",
        default=None,
        ge=1,
        description="Number of the only offer to rent, as `millrace plan` and `millrace machine "
        "offers` show it. The offer must fit the other requirements. If the machine is lost, none "
        "takes its place.",
    )
    gpu: str = Field(
        default="",
        description="Name of the GPU at Vast.ai, such as `RTX 4090` or `RTX_4090`; empty for any.",
    )
    gpus: int = Field(
        title="GPUs per machine",
        default=1,
        ge=1,
        le=64,
        description="Number of GPUs in each machine.",
    )
    gpu_memory: Size = Field(
        title="GPU memory",
        default=ByteSize(0),
        description="Least memory of each GPU, such as `24GB`.",
    )
    disk: Size = Field(
        default=ByteSize(40 * _GB),
        ge=8 * _GB,
        description="Size of the disk, such as `80GB`. It cannot be changed later.",
    )
    down: float = Field(
        title="Download speed in Mbit/s",
        default=100.0,
        ge=0,
        description="Least download speed, in Mbit/s.",
    )
    up: float = Field(
        title="Upload speed in Mbit/s",
        default=100.0,
        ge=0,
        description="Least upload speed, in Mbit/s.",
    )
    reliability: float = Field(
        default=0.95, ge=0, le=1, description="Least reliability of the host, from 0 to 1."
    )
    regions: tuple[CountryCode, ...] = Field(
        default=(),
        description="Countries of the hosts, by two letters, such as `US` or `DE`; empty for any.",
    )
    verified: bool = Field(
        title="Verified machines only",
        default=True,
        description="Rent only machines that Vast.ai has verified.",
    )
    ports: int = Field(
        title="Open ports",
        default=0,
        ge=0,
        description="Least number of ports that are open to other machines.",
    )
    interruptible: bool = Field(
        default=False,
        description="Rent a cheaper machine, which goes to another user who bids more.",
    )
    bid: float | None = Field(
        title="Bid in dollars an hour",
        default=None,
        gt=0,
        description="Bid for an interruptible machine, in dollars an hour; by default a tenth "
        "more than the lowest bid.",
    )
    max_hourly: float = Field(
        title="Highest price in dollars an hour",
        gt=0,
        le=128,
        description="Highest price of one machine with its disk, in dollars an hour.",
    )
    max_traffic: float = Field(
        title="Highest traffic price in dollars a GB",
        default=0.1,
        ge=0,
        le=10,
        description="Highest price of a download or an upload, in dollars a GB.",
    )
    max_total: float = Field(
        title="Highest total cost in dollars",
        gt=0,
        allow_inf_nan=False,
        description="Highest cost of all machines together, in dollars. All machines are released "
        "when they have cost as much.",
    )
    max_lifetime: Duration = Field(
        title="Longest lifetime",
        default=timedelta(hours=24),
        gt=timedelta(minutes=1),
        le=MAX_LIFETIME,
        description="Longest lifetime of a machine. It is then released, whatever its program "
        "does.",
    )
    duration: Duration = Field(
        title="Expected duration",
        default=timedelta(hours=1),
        gt=timedelta(0),
        description="Expected duration of use, to compare the costs of offers.",
    )
    download: Size = Field(
        title="Expected download",
        default=ByteSize(0),
        description="Expected download, such as `50GB`, to compare the costs of offers.",
    )
    upload: Size = Field(
        title="Expected upload",
        default=ByteSize(0),
        description="Expected upload, such as `50GB`, to compare the costs of offers.",
    )

    @field_validator("gpu_memory", "disk", "download", "upload", mode="before")
    @classmethod
    def _refuse_few_bytes(cls, value: Any) -> int:
        """Refuse a number of GB without its unit, which would stand for bytes."""
        size = parse_size(value)
        if 0 < size < _LEAST_SIZE:
            raise ValueError(f"{str(value)!r} is {size} bytes: write 80GB or 512MiB")
        return size

    @model_validator(mode="after")
    def _check_bid(self) -> Self:
        if self.bid is not None and not self.interruptible:
            raise ValueError("a bid needs an interruptible machine: set interruptible too")
        if self.bid is not None and self.bid > self.max_hourly:
            raise ValueError("the bid is more than max_hourly")
        return self

    @property
    def offer_type(self) -> str:
        """Type of the offers, as Vast.ai names it."""
        return "bid" if self.interruptible else "on-demand"

    def make_limits(self, machines: int) -> MoneyLimits:
        """Return the limits of what a number of machines may cost."""
        return MoneyLimits(max_hourly=self.max_hourly, max_total=self.max_total, machines=machines)

    @property
    def disk_gb(self) -> float:
        """Size of the disk in GB, the API's own unit."""
        return self.disk / _GB

    def compute_traffic_cost(
        self, download_dollars_per_gb: float, upload_dollars_per_gb: float
    ) -> float:
        """Compute the dollars of the expected download and upload."""
        cost = self.download * download_dollars_per_gb + self.upload * upload_dollars_per_gb
        return cost / _GB

    def make_filters(self) -> dict[str, dict[str, Any]]:
        """Return the requirements in the API's own units: MB of memory, seconds of duration."""
        filters: dict[str, dict[str, Any]] = {
            "rentable": {"eq": True},
            "rented": {"eq": False},
            "external": {"eq": False},
            "num_gpus": {"eq": self.gpus},
            "gpu_ram": {"gte": self.gpu_memory / 1_000_000},
            "disk_space": {"gte": self.disk_gb},
            "inet_down": {"gte": self.down},
            "inet_up": {"gte": self.up},
            "reliability": {"gte": self.reliability},
            "duration": {"gte": self.max_lifetime.total_seconds()},
            "direct_port_count": {"gte": self.ports},
        }
        if self.offer_id is not None:
            filters["id"] = {"eq": self.offer_id}
        if self.verified:
            filters["verified"] = {"eq": True}
        if self.gpu:
            filters["gpu_name"] = {"eq": self.gpu.replace("_", " ")}
        if self.regions:
            filters["geolocation"] = {"in": list(self.regions)}
        if not self.interruptible:
            filters["dph_total"] = {"lte": self.max_hourly}
        return filters


@dataclass(frozen=True, slots=True)
class Offer:
    """Offer of a machine.

    Attributes:
        id: Number of the offer, which may change.
        machine_id: Number of the host that has the machine, under the name that Vast.ai gives it.
        gpu: Name of the GPU.
        gpus: Number of GPUs.
        gpu_memory: Memory of each GPU, in GB.
        location: Location of the host.
        reliability: Reliability of the host, from 0 to 1.
        download_mbps: Download speed in Mbit/s.
        upload_mbps: Upload speed in Mbit/s.
        dollars_per_hour: Price with the disk. An interruptible machine costs its bid and the disk.
        bid: Bid in dollars an hour; None for a machine on demand.
        download_dollars_per_gb: Price of a download.
        upload_dollars_per_gb: Price of an upload.
        expected_cost: Expected total cost, in dollars.
    """

    id: int
    machine_id: int
    gpu: str
    gpus: int
    gpu_memory: float
    location: str
    reliability: float
    download_mbps: float
    upload_mbps: float
    dollars_per_hour: float
    bid: float | None
    download_dollars_per_gb: float
    upload_dollars_per_gb: float
    expected_cost: float

    @classmethod
    def from_row(cls, row: Mapping[str, Any], request: OfferRequest) -> "Offer":
        """Read an offer, and compute its expected cost.

        Raises:
            TypeError, ValueError, KeyError: The row is invalid.
        """
        dollars_per_hour, bid = float(row["dph_total"]), None
        if request.interruptible:
            min_bid = float(row["min_bid"])
            bid = request.bid if request.bid is not None else math.ceil(min_bid * 1100) / 1000
            if bid < min_bid:
                raise ValueError("the bid is below the lowest bid that is accepted")
            dollars_per_hour = (
                bid + float(row.get("storage_cost") or 0.0) * request.disk_gb / _HOURS_PER_MONTH
            )
        download_dollars_per_gb = float(row.get("inet_down_cost") or 0.0)
        upload_dollars_per_gb = float(row.get("inet_up_cost") or 0.0)
        numbers = (dollars_per_hour, download_dollars_per_gb, upload_dollars_per_gb)
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise ValueError("a price is not a finite number of dollars")
        return cls(
            id=int(row["id"]),
            machine_id=int(row["machine_id"]),
            gpu=clean_text(str(row.get("gpu_name") or "?")),
            gpus=int(row["num_gpus"]),
            gpu_memory=float(row.get("gpu_ram") or 0.0) / 1000,
            location=clean_text(str(row.get("geolocation") or "?")),
            reliability=float(row.get("reliability") or 0.0),
            download_mbps=float(row.get("inet_down") or 0.0),
            upload_mbps=float(row.get("inet_up") or 0.0),
            dollars_per_hour=dollars_per_hour,
            bid=bid,
            download_dollars_per_gb=download_dollars_per_gb,
            upload_dollars_per_gb=upload_dollars_per_gb,
            expected_cost=request.duration / timedelta(hours=1) * dollars_per_hour
            + request.compute_traffic_cost(download_dollars_per_gb, upload_dollars_per_gb),
        )


def find_offers(
    vast: VastClient, request: OfferRequest, *, exclude: Iterable[int] = ()
) -> list[Offer]:
    """Return the offers that fit, by expected cost.

    Args:
        vast: Client of the account.
        request: Requirements.
        exclude: Numbers of hosts whose offers are left out.

    Raises:
        UnavailableError, DeniedError: As in `VastClient.search_offers`.
    """
    excluded = set(exclude)
    rows = vast.search_offers(
        request.make_filters(),
        offer_type=request.offer_type,
        disk=request.disk_gb,
        limit=_MAX_OFFERS,
    )
    offers: dict[int, Offer] = {}
    for row in rows:
        try:
            offer = Offer.from_row(row, request)
        except (KeyError, TypeError, ValueError):
            continue  # an unreadable offer is left out
        has_expensive_traffic = (
            max(offer.download_dollars_per_gb, offer.upload_dollars_per_gb) > request.max_traffic
        )
        if (
            request.offer_id in {None, offer.id}
            and offer.machine_id not in excluded
            and offer.dollars_per_hour <= request.max_hourly
            and not has_expensive_traffic
        ):
            offers[offer.id] = offer
    return sorted(
        offers.values(), key=lambda offer: (offer.expected_cost, -offer.reliability, offer.id)
    )
