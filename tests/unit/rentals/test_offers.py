"""Offers are asked for in the API's units, and ranked by what they cost in all."""

from typing import Any

import pytest
from pydantic import ValidationError

from millrace.rentals import Offer, OfferRequest


def row(**more: Any) -> dict[str, Any]:
    return {"id": 1, "machine_id": 2, "num_gpus": 1, "dph_total": 0.5, "min_bid": 0.2, **more}


def request(**more: Any) -> OfferRequest:
    return OfferRequest(max_hourly=2.0, max_total=10.0, **more)


def test_an_interruptible_one_costs_its_bid_and_its_disk() -> None:
    wanted = request(interruptible=True, disk="73GB")
    offer = Offer.from_row(row(storage_cost=0.1), wanted)
    assert offer.bid == pytest.approx(0.22)
    assert offer.dollars_per_hour == pytest.approx(0.22 + 0.01)
    assert Offer.from_row(row(), request(interruptible=True, bid=0.3)).bid == 0.3
    with pytest.raises(ValueError, match="lowest bid that is accepted"):
        Offer.from_row(row(), request(interruptible=True, bid=0.1))


def test_sizes_and_durations_become_the_units_of_the_api() -> None:
    wanted = request(
        gpu_memory="24GB", disk="80GB", duration="90m", download="500GB", upload="250MB"
    )
    filters = wanted.make_filters()
    assert (filters["gpu_ram"]["gte"], filters["disk_space"]["gte"]) == (24_000, 80)
    offer = Offer.from_row(row(inet_down_cost=0.01, inet_up_cost=0.02), wanted)
    assert offer.expected_cost == pytest.approx(1.5 * 0.5 + 500 * 0.01 + 0.25 * 0.02)


@pytest.mark.parametrize(
    "wrong",
    [{"dph_total": None}, {"dph_total": "nan"}, {"dph_total": -1}, {"machine_id": None},
     {"inet_down_cost": "inf"}],
)  # fmt: skip
def test_an_offer_that_cannot_be_read_is_none(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        Offer.from_row(row(**wrong), request())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"bid": 0.3}, "set interruptible too"),
        ({"bid": 3.0, "interruptible": True}, "more than max_hourly"),
        ({"regions": ("USA",)}, "regions"),
        ({"max_lifetime": "P8D"}, "max_lifetime"),
        ({"disk": "4GB"}, "disk"),
        ({"disk": 80}, "'80' is 80 bytes: write 80GB or 512MiB"),
        ({"gpu_memory": 24.0}, "'24.0' is 24 bytes: write 80GB or 512MiB"),
        ({"download": "12.5"}, "'12.5' is no size: write 80GB or 512MiB"),
        ({"upload": "100"}, "'100' is 100 bytes"),
        ({"duration": 4}, "'4' has no unit: write 4s, 4m, 4h or 4d"),
        ({"gpu_name": "x"}, "gpu_name"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        request(**wrong)
