"""A campaign makes the settings of each of its stages from one plan."""

from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from millrace.campaigns import Campaign
from millrace.campaigns.settings import WorkerTimeouts
from millrace.campaigns.worker import WorkerOptions
from millrace.cleanup import CleanupKind, Rule
from millrace.gradients import AggregationSettings
from millrace.rentals import LedgerSettings, VastAccount
from millrace.storage import StoreSpec
from tests.support.campaigns.training import RENTED, MakeTraining


def test_the_run_ends_with_the_last_window_of_the_last_epoch(make_training: MakeTraining) -> None:
    training = make_training(run={"steps": 7})
    assert (training.run.name, training.run.windows, training.run.steps) == ("small/run", 6, 7)
    assert [training.find_last_window(epoch) for epoch in range(2)] == [3, 6]
    assert training.uids == ["worker-0", "worker-1"]


def test_workers_here_keep_their_data_where_they_are_told_and_wait_for_no_prewarm(
    make_training: MakeTraining,
) -> None:
    training = make_training(machines={"kind": "local", "data_folder": "/data"}, restarts=5)
    shared = training.worker_settings
    assert (shared.campaign, shared.dataset) == ("small", "text")
    assert shared.training is training.options
    written = WorkerOptions.model_validate(shared.model_dump(mode="json")["training"])
    assert (written.workers, written.restarts) == (2, 5)
    assert (shared.data_folder, shared.prewarm_timeout) == (Path("/data"), None)


@pytest.mark.parametrize(("prewarm", "timeout"), [(True, timedelta(hours=1)), (False, None)])
def test_rented_workers_wait_for_the_prewarm_if_there_is_one(
    make_training: MakeTraining, prewarm: bool, timeout: timedelta | None
) -> None:
    shared = make_training(machines=RENTED | {"prewarm": prewarm}).worker_settings
    assert (shared.data_folder, shared.prewarm_timeout) == (Path("data"), timeout)


def test_a_rental_has_the_limits_of_the_plan(make_training: MakeTraining, place: StoreSpec) -> None:
    timeouts = {"startup_timeout": "7m", "max_attempts": 2}
    machines = RENTED | {"role_arn": "arn:x", "timeouts": timeouts}
    account = VastAccount(api_key=SecretStr("key"))
    ledger = LedgerSettings(store=place, account=account)
    rental = make_training(machines=machines).make_rental(ledger)
    limits = WorkerTimeouts(startup_timeout="7m", max_attempts=2, retry_failed=True)
    assert rental.timeouts == limits
    assert (rental.name, rental.machines, rental.role_arn) == ("small", 2, "arn:x")
    assert rental.ledger == ledger
    assert rental.program.repo_url == RENTED["repo_url"]
    assert "text/" in [grant.prefix for grant in rental.storage_grants]


def test_an_aggregator_stops_at_the_first_idle_window(
    make_training: MakeTraining, place: StoreSpec
) -> None:
    asked = {"every": 5, "lease_timeout": "9s"}
    training = make_training(aggregation={"idle": 4, **asked})
    assert training.aggregation_until_idle == AggregationSettings.model_validate(
        {"idle": 1, **asked}
    )
    beginning = training.aggregator_settings
    assert (beginning.store, beginning.last_window) == (place, 6)
    assert beginning.aggregation is training.options.aggregation
    assert beginning.initial_weights is training.options.initial_weights


def test_a_cooldown_has_time_for_all_of_its_extensions(make_training: MakeTraining) -> None:
    training = make_training(cooldown={"time": "10m", "extensions": 3})
    assert training.cooldown_timeout == timedelta(minutes=51)


def test_a_quorum_that_can_never_be_there_is_refused(make_training: MakeTraining) -> None:
    with pytest.raises(ValidationError, match="more gradients than there are workers"):
        make_training(run={"gather": {"quorum": 3}})


def test_merged_gradients_are_cleaned_unless_rules_say_otherwise(place: StoreSpec) -> None:
    (rule,) = Campaign("small", place, place).make_cleaning_rules()
    assert (rule.kinds, rule.name) == ((CleanupKind.GRADIENTS,), "small/run")
    assert Campaign("small", place, place, cleaning_rules=[]).make_cleaning_rules() == []


def test_rules_of_a_campaign_are_for_its_own_objects_unless_they_name_others(
    place: StoreSpec,
) -> None:
    day = timedelta(days=1)
    junk = Rule(kinds=(CleanupKind.JUNK,), older_than=day, match="*.tmp")
    named = Rule(kinds=(CleanupKind.DATASET_ORPHANS,), older_than=day, name="words")
    placed = Rule(kinds=(CleanupKind.OTHER,), older_than=day, prefix="logs/")
    campaign = Campaign("small", place, place, cleaning_rules=[junk, named, placed])
    assert campaign.make_cleaning_rules() == [
        junk.model_copy(update={"prefix": "small/run/"}),
        junk.model_copy(update={"prefix": "small/model/"}),
        named,
        placed,
    ]
