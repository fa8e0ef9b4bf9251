"""Summary of a campaign, from its committed records."""

import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace import gradients
from millrace.campaigns import (
    Campaign,
    CampaignSummary,
    Training,
    hold_campaign_lease,
    summarize_campaign,
)
from millrace.errors import HeldError
from millrace.gradients import ChainLink, begin_run, select_weights
from millrace.keys.campaigns import CampaignKeys
from millrace.keys.rentals import MachineKeys, RentalKeys
from millrace.lease import Holder, LeaseTerm
from millrace.records import commit_once
from millrace.rentals.destroy import record_release
from millrace.rentals.life_signs import LifeSigns
from millrace.rentals.messages import MachineHeartbeat
from millrace.rentals.state import RentalState
from millrace.rentals.takeover import list_own_attempts, take_over_machines
from millrace.schemas.chain import TakenGradient
from millrace.schemas.rental import Contract, MoneyLimits, ReleaseReason
from millrace.storage import Store, StoreSpec, list_objects, put
from tests.support.campaigns.training import MakeTraining
from tests.support.campaigns.workers import finalize_dataset
from tests.support.rentals.parts import FakeVast, make_attempt, make_context, make_settings


def summarize(place: StoreSpec, training: Training | None = None) -> CampaignSummary:
    return summarize_campaign(Campaign("small", place, place, "text", training))


def test_a_stage_that_has_done_nothing_counts_nothing(
    place: StoreSpec, store: Store, make_training: MakeTraining
) -> None:
    found = summarize(place, make_training())
    assert found == CampaignSummary("small", store.url, seconds=found.seconds)
    finalize_dataset(store, 3)
    found = summarize(place)
    assert (found.samples, found.shards, found.windows, found.machines) == (4, 4, 0, 0)


def test_a_run_without_a_window_has_trained_nothing(
    place: StoreSpec, store: Store, make_training: MakeTraining
) -> None:
    training = make_training()
    begin_run(store, training.run.chain_keys, select_weights(torch.nn.Linear(3, 2)))
    found = summarize(place, training)
    assert (found.windows, found.gradients, found.sent_bytes, found.dense_bytes) == (0, 0, 0, 0)
    assert (found.losses, found.epoch_steps) == ({}, {})


def test_a_summary_holds_one_window_at_a_time(
    monkeypatch: pytest.MonkeyPatch, place: StoreSpec, store: Store, make_training: MakeTraining
) -> None:
    def iterate_links(*_: Any) -> Iterator[ChainLink]:
        worker = TakenGradient.model_construct(size=10)
        for window in range(1, 2001):
            names = tuple(f"layers.{window}.{number}" for number in range(200))
            yield ChainLink.model_construct(
                window=window, step=window, names=names, shapes=((3, 2),), taken={"w": worker}
            )

    training = make_training()
    begin_run(store, training.run.chain_keys, select_weights(torch.nn.Linear(3, 2)))
    monkeypatch.setattr(gradients, "iterate_kept_links", iterate_links)
    tracemalloc.start()
    found = summarize(place, training)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000
    assert (found.windows, found.uncounted_windows, found.step) == (2000, 0, 2000)
    assert (found.gradients, found.sent_bytes) == (2000, 20_000)
    assert found.dense_bytes == 4 * 6 * 2000


def test_machines_cost_a_campaign_as_much_as_their_owner(tmp_path: Path) -> None:
    """A machine runs and claims much traffic, and another was released with such a claim."""
    settings = make_settings(tmp_path, machines=2)  # a share of 5 dollars
    context = make_context(settings, FakeVast(), [])
    started = context.now()
    for number, price in enumerate([0.0, 1.0]):
        attempt = make_attempt(
            number, instance_id=number, slot=number, dollars_per_hour=price, started_at=started
        )
        commit_once(context.store, context.keys.make_intent_key(number), attempt.intent)
        commit_once(context.store, context.keys.make_contract_key(number), attempt.contract)
    context.clock.sleep(3600)
    record_release(
        context.store, "fleet", attempt, ReleaseReason.REAPED, "over", 99.0, context.now()
    )
    beat = MachineHeartbeat(number=1, received=80 * 10**9)
    heartbeat_key = MachineKeys(context.keys.make_machine_prefix(0)).heartbeat
    put(context.store, heartbeat_key, beat.model_dump_json().encode())

    state, signs = RentalState(2), LifeSigns(context.store, context.keys)
    instances = [context.vast.add(0, dph_total=0.0)]
    take_over_machines(context, state, list_own_attempts(context), instances, signs)
    state.active[0].reports.refresh()
    place = settings.store
    found = summarize_campaign(Campaign("fleet", place, place, rentals={"fleet": settings.limits}))
    assert found.machines == 2
    assert found.dollars == pytest.approx(1.1 * 5 + 2.0 + 1.1 * 5)
    assert state.compute_cost(context.now()) == pytest.approx(found.dollars)


def test_a_campaign_has_a_lease_while_it_is_led(place: StoreSpec, store: Store) -> None:
    with hold_campaign_lease(place, "small"):
        (lease,) = [one.key for one in list_objects(store, "small/lease/") if "json" in one.key]
    assert lease.startswith("small/lease/campaign/")
    with pytest.raises(RuntimeError, match="x"), hold_campaign_lease(place, "small"):
        raise RuntimeError("x")  # and it was free


def test_a_leader_whose_lease_was_taken_over_stops(place: StoreSpec, store: Store) -> None:
    keys = CampaignKeys("small").lease
    with hold_campaign_lease(place, "small") as lease:
        lease.refuse_if_lost()
        term = LeaseTerm(holder=Holder.describe_this_process(), ttl=timedelta(minutes=1))
        commit_once(store, keys.make_term_key(1), term)
        with pytest.raises(HeldError, match="Another process has taken over the campaign small"):
            lease.refuse_if_lost()


def test_sharding_machines_of_an_earlier_campaign_cost_nothing(
    place: StoreSpec, store: Store
) -> None:
    limits = MoneyLimits(max_total=5.0, max_hourly=1.0, machines=1)
    campaign = Campaign("second", place, place, "text", rentals={"text-shards": limits})
    keys = RentalKeys("text-shards")
    before, since = datetime.now(UTC) - timedelta(days=30), datetime.now(UTC)

    def rent(number: int, started_at: datetime) -> None:
        attempt = make_attempt(
            number, rental=keys.name, started_at=started_at, deadline=since + timedelta(days=1)
        )
        commit_once(store, keys.make_intent_key(number), attempt.intent)
        commit_once(store, keys.make_contract_key(number), Contract(instance_id=number + 1))

    rent(0, before)
    assert summarize_campaign(campaign).machines == 0
    with hold_campaign_lease(place, "second"):
        assert summarize_campaign(campaign).machines == 0
        rent(1, since)
        assert summarize_campaign(campaign).machines == 1
