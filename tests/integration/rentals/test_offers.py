"""Offers as the stand-in of Vast.ai answers with them."""

import pytest

from millrace.rentals import OfferRequest, find_offers
from tests.support.rentals.account import Reset
from tests.unit.rentals.test_offers import request


def test_what_costs_least_in_all_comes_first(world: Reset) -> None:
    account = world(machines=40)
    short = find_offers(account.vast, request(duration="1h"))
    assert [one.expected_cost for one in short] == sorted(one.dollars_per_hour for one in short)
    heavy = request(duration="1h", download="500GB", upload="100GB")
    offers = find_offers(account.vast, heavy)
    expected = sorted(
        one.dollars_per_hour + 500 * one.download_dollars_per_gb + 100 * one.upload_dollars_per_gb
        for one in offers
    )
    assert [one.expected_cost for one in offers] == pytest.approx(expected)
    assert [one.machine_id for one in offers] != [one.machine_id for one in short]


def test_only_what_was_asked_for_is_found(world: Reset) -> None:
    account = world(machines=60)
    wanted = request(gpu="H100_SXM", regions=("de", "JP"), gpu_memory="20GB")
    offers = find_offers(account.vast, wanted)
    assert offers
    assert {one.gpu for one in offers} == {"H100 SXM"}
    assert {one.location for one in offers} <= {"Bavaria, DE", "Tokyo, JP"}
    excluded = {offers[0].machine_id}
    assert excluded.isdisjoint(
        one.machine_id for one in find_offers(account.vast, wanted, exclude=excluded)
    )
    assert find_offers(account.vast, request(gpu_memory="80GB")) == []
    cheap = OfferRequest(max_hourly=0.3, max_total=1.0)
    offers = find_offers(account.vast, cheap)
    assert offers
    assert all(one.dollars_per_hour <= 0.3 for one in offers)
