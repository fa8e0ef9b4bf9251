"""Summary of a campaign, from its committed records."""

import pytest
import torch

from millrace.campaigns import (
    Campaign,
    CampaignSummary,
    Training,
    hold_campaign_lease,
    summarize_campaign,
)
from millrace.gradients import begin_run, select_weights
from millrace.storage import Store, StoreSpec, list_objects
from tests.support.campaigns.training import MakeTraining
from tests.support.campaigns.workers import finalize_dataset


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


def test_a_campaign_has_a_lease_while_it_is_led(place: StoreSpec, store: Store) -> None:
    with hold_campaign_lease(place, "small"):
        (lease,) = [one.key for one in list_objects(store, "small/lease/") if "json" in one.key]
    assert lease.startswith("small/lease/campaign/")
    with pytest.raises(RuntimeError, match="x"), hold_campaign_lease(place, "small"):
        raise RuntimeError("x")  # and it was free
