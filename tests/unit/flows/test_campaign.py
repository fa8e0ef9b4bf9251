"""Order of a campaign's steps."""

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flows import campaign, campaign_epochs, campaign_plan
from flows.campaign_plan import PublishSettings
from millrace import campaigns
from millrace.campaigns import (
    CampaignLease,
    PublishedWeights,
    Training,
    TrainingOptions,
    TrainingProgress,
)
from millrace.errors import CorruptError, DeniedError, HeldError, UnavailableError
from millrace.keys.campaigns import CampaignKeys
from millrace.lease import Holder, LeaseTerm
from millrace.records import commit_once
from millrace.storage import StoreSpec, open_store
from tasks import campaign_tasks, retries
from tests.support.campaigns.training import FakeWorkers


def make_training() -> Training:
    place = StoreSpec(url="file:///unused")
    rules = TrainingOptions.model_validate(
        {
            "command": ("true",), "initial_weights": {"job": "first"}, "workers": 2, "epochs": 2,
            "windows_per_epoch": 3,
        }
    )  # fmt: skip
    return Training("small", "text", rules, place, place)


@pytest.fixture
def lease() -> Iterator[CampaignLease]:
    with campaigns.hold_campaign_lease(StoreSpec(url="memory://test-campaign"), "small") as lease:
        yield lease


@pytest.mark.parametrize(
    ("newest", "epochs"),
    [(1, ["epoch 0", "epoch 1"]), (3, ["epoch 0", "epoch 1"]), (4, ["epoch 1"])],
)
def test_a_campaign_that_is_started_again_waits_for_workers_before_it_merges(
    monkeypatch: pytest.MonkeyPatch, lease: CampaignLease, newest: int, epochs: list[str]
) -> None:
    """Otherwise it would merge windows without a gradient while the workers start."""
    steps: list[str] = []
    monkeypatch.setattr(campaign_tasks, "commit_training", lambda *_: None)
    progress = TrainingProgress(newest)
    monkeypatch.setattr(campaign_tasks, "read_training_progress", lambda _: progress)
    monkeypatch.setattr(campaign_tasks, "run_local_workers", lambda _: nullcontext(FakeWorkers()))
    monkeypatch.setattr(campaign_tasks, "await_workers", lambda *_: steps.append("await workers"))
    monkeypatch.setattr(campaign, "run_epoch", lambda *some: steps.append(f"epoch {some[2]}"))
    plan = cast("Any", SimpleNamespace(rental=None))
    campaign.train(plan, make_training(), lease)
    assert steps == ["await workers", *epochs]


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[Exception | None]:
    """Return what further runs of `cooldown` raise; None for one that ends the epoch."""
    tries: list[Exception | None] = []

    def run_cooldown(*_: Any, **__: Any) -> None:
        found = tries.pop(0)
        if found is not None:
            raise found

    monkeypatch.setattr(campaign_epochs, "run_cooldown", run_cooldown)
    monkeypatch.setattr(retries, "get_run_logger", lambda: logging.getLogger("test"))
    return tries


def end_epoch() -> None:
    campaign_epochs.end_epoch(
        cast("Any", SimpleNamespace(bucket="file:///unused")), make_training(), 0
    )


def test_an_epoch_that_an_outage_left_open_is_ended_before_its_workers_go_on(
    monkeypatch: pytest.MonkeyPatch, tries: list[Exception | None]
) -> None:
    tries += [UnavailableError("the store did not answer"), None]
    monkeypatch.setattr(campaign_tasks, "has_epoch_ended", lambda *_: not tries)
    end_epoch()
    assert not tries


def test_an_epoch_that_ended_without_a_checkpoint_ends_once(
    monkeypatch: pytest.MonkeyPatch, tries: list[Exception | None]
) -> None:
    tries += [UnavailableError("went on without a checkpoint"), None]
    monkeypatch.setattr(campaign_tasks, "has_epoch_ended", lambda *_: True)
    end_epoch()
    assert len(tries) == 1


def test_no_window_opens_after_an_epoch_that_has_not_ended(
    monkeypatch: pytest.MonkeyPatch, tries: list[Exception | None]
) -> None:
    tries += [UnavailableError("the store did not answer")] * 2
    monkeypatch.setattr(campaign_tasks, "has_epoch_ended", lambda *_: False)
    with pytest.raises(UnavailableError, match="Epoch 0 of small/model has not ended"):
        end_epoch()


def test_damaged_final_weights_are_made_again_and_published(
    monkeypatch: pytest.MonkeyPatch, lease: CampaignLease, tmp_path: Path
) -> None:
    steps: list[str] = []

    def save(*_: Any) -> None:
        steps.append("save")
        if len(steps) == 1:
            raise CorruptError("a file is not the bytes that were saved")

    monkeypatch.setattr(campaigns, "ensure_final_weights_saved", lambda *_: 3)
    monkeypatch.setattr(campaigns, "repair_final_weights", lambda *_: steps.append("repair"))
    monkeypatch.setattr(campaign, "save_checkpoint", save)
    monkeypatch.setattr(campaign, "get_run_logger", lambda: logging.getLogger("test"))
    bucket = str(tmp_path)
    publish = PublishSettings(job="final", bucket=bucket)
    plan = cast("Any", SimpleNamespace(bucket=bucket))
    published = campaign.publish_weights(plan, make_training(), publish, lease)
    assert steps == ["save", "repair", "save"]
    assert published == PublishedWeights(tmp_path.as_uri(), "final", 3)


def test_a_campaign_whose_cleaning_fails_reports_where_its_weights_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise DeniedError("nothing may be deleted")

    def report(*found: Any) -> None:
        reports.append(campaign_tasks.describe_campaign(*found))

    reports: list[str] = []
    published = PublishedWeights("s3://bucket", "final", 3)
    monkeypatch.setattr(campaign, "check_right", lambda *_: None)
    monkeypatch.setattr(campaign, "run_stages", lambda *_: published)
    monkeypatch.setattr(campaign, "clean_bucket", refuse)
    monkeypatch.setattr(campaign_tasks, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(campaign_tasks, "summarize_campaign", campaigns.summarize_campaign)
    monkeypatch.setattr(campaign_tasks, "report_campaign", report)
    place = StoreSpec(url="memory://test-cleaning")
    begun = campaigns.Campaign("small", place, place)
    plan = SimpleNamespace(name="small", bucket=place.url, make_campaign=lambda: begun)
    plan.resolve_bucket = lambda: plan
    with pytest.raises(DeniedError, match="nothing may be deleted"):
        campaign.run_campaign.fn(cast("Any", plan))
    (report_text,) = reports
    assert "is not over" in report_text
    assert "step 3 of `final` in `s3://bucket`" in report_text


def test_the_error_of_a_campaign_is_logged_before_its_report_is_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = StoreSpec(url="file:///unused")
    logged: list[str] = []
    monkeypatch.setattr(campaign_tasks, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(
        campaign_tasks,
        "summarize_campaign",
        lambda *_, **__: logged.append(caplog.text) or "summary",
    )
    monkeypatch.setattr(campaign_tasks, "report_campaign", lambda *_: None)
    with (
        pytest.raises(UnavailableError),
        campaign_tasks.report_failure(campaigns.Campaign("small", place, place)),
    ):
        raise UnavailableError("the store did not answer")
    assert "the store did not answer" in logged[0]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_stage_that_another_process_does_is_reported_unless_that_leads_the_campaign(
    monkeypatch: pytest.MonkeyPatch, *, is_lost: bool
) -> None:
    place = StoreSpec(url=f"memory://test-held-stage-{is_lost}")

    def refuse(*_: Any) -> None:
        if is_lost:  # another leader has committed the next term
            holder = Holder(id="other", host="elsewhere", machine="", pid=1, started="1")
            term = LeaseTerm(holder=holder, ttl=timedelta(minutes=3))
            commit_once(open_store(place), CampaignKeys("small").lease.make_term_key(1), term)
        raise HeldError("small/run is aggregated by process 7, which is alive")

    reports: list[str] = []
    monkeypatch.setattr(campaign, "check_right", lambda *_: None)
    monkeypatch.setattr(campaign, "run_stages", refuse)
    monkeypatch.setattr(campaign_tasks, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(campaign_tasks, "summarize_campaign", campaigns.summarize_campaign)
    monkeypatch.setattr(
        campaign_tasks,
        "report_campaign",
        lambda *found: reports.append(campaign_tasks.describe_campaign(*found)),
    )
    begun = campaigns.Campaign("small", place, place)
    plan = SimpleNamespace(name="small", bucket=place.url, make_campaign=lambda: begun)
    plan.resolve_bucket = lambda: plan
    with pytest.raises(HeldError, match="by process 7"):
        campaign.run_campaign.fn(cast("Any", plan))
    assert ["aggregated by process 7" in text for text in reports] == ([] if is_lost else [True])


def test_the_destination_of_the_weights_is_checked_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, lease: CampaignLease
) -> None:
    def refuse(*some: Any) -> None:
        raise DeniedError(f"{some[2]} cannot be written")

    place = StoreSpec(url="file:///unused")
    monkeypatch.setattr(campaign_plan, "check_right", refuse)
    plan = SimpleNamespace(data=None, publish=PublishSettings(job="final", bucket="file:///unused"))
    begun = campaigns.Campaign("small", place, place, training=make_training())
    with pytest.raises(DeniedError, match="final cannot be written"):
        campaign.run_stages(cast("Any", plan), begun, lease)


def test_the_flow_of_a_campaign_is_read_on_one_page() -> None:
    assert len(Path(campaign.__file__).read_text().splitlines()) < 120


@pytest.mark.parametrize("is_settled", [False, True])
def test_a_dataset_is_made_unless_the_training_needs_its_source_no_more(
    monkeypatch: pytest.MonkeyPatch, lease: CampaignLease, *, is_settled: bool
) -> None:
    steps: list[str] = []
    monkeypatch.setattr(campaign_tasks, "check_training", lambda *_: None)
    monkeypatch.setattr(campaign_tasks, "is_dataset_settled", lambda _: is_settled)
    monkeypatch.setattr(campaign_tasks, "check_gradients_taken", lambda _: None)
    monkeypatch.setattr(campaign, "shard_dataset", lambda *_, **__: steps.append("shard"))
    monkeypatch.setattr(campaign, "train", lambda *_: steps.append("train"))
    place = StoreSpec(url="file:///unused")
    data = SimpleNamespace(
        dataset="text", source="source", sharding=None, execution=None, machines=None
    )
    plan = SimpleNamespace(data=data, publish=None, bucket=place.url)
    begun = campaigns.Campaign("small", place, place, training=make_training())
    campaign.run_stages(cast("Any", plan), begun, lease)
    assert steps == (["train"] if is_settled else ["shard", "train"])
