"""Plan of a campaign, as a person writes it, and refused plans."""

import re
from pathlib import Path
from typing import Any

import click.testing
import pytest
import yaml
from pydantic import ValidationError

from blocks import Bucket
from blocks.bucket import BucketRole
from flows.campaign import run_campaign
from flows.campaign_command import read_campaign_plan
from flows.campaign_plan import (
    CampaignPlan,
    RentedWorkerSettings,
    find_campaign_sharding_rental,
)
from millrace.campaigns import (
    Training,
    TrainingOptions,
    check_committed_training,
    commit_training,
)
from millrace.cli.campaign import confirm_machines
from millrace.errors import ConfigurationError, ConflictError
from millrace.schemas.rental import MoneyLimits
from millrace.storage import StoreSpec
from millrace.testing.process import REPOSITORY
from tests.support.flows.campaigns import make_local_workers, make_plan_settings


def test_the_campaign_of_the_guide_is_one() -> None:
    text = (REPOSITORY / "docs/guides/campaigns.md").read_text()
    found = re.search(r"```yaml\n(# campaign.yaml.*?)```", text, re.DOTALL)
    assert found
    data = yaml.safe_load(found[1])
    hub = data["publish"].pop("hub")
    assert hub["credentials"]["$ref"]["block_document_slug"].startswith("hugging-face-")
    data["publish"]["bucket"] = "file:///x"
    plan = CampaignPlan.model_validate(data)
    assert plan.training is not None
    assert isinstance(plan.training.machines, RentedWorkerSettings)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": None}, "name the dataset"),
        ({"training": None}, "`publish` requires `training`"),
        ({"publish": {"job": "x"}}, "takes either `bucket` or `hub`"),
        ({"name": "_rentals"}, "rental's name"),
        ({"nmae": "x"}, "Extra inputs"),
        ({"cleaning_rules": [{"kinds": ["datasets"]}]}, "rule 1 of `cleaning_rules` is for"),
        ({"cleaning_rules": [{"kinds": ["other"], "match": "logs/*"}]}, "give it the `name`"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], said: str) -> None:
    plan = make_plan_settings("small", "file:///x", Path("/"), make_local_workers()) | change
    with pytest.raises((ValidationError, ConfigurationError), match=said):
        CampaignPlan.model_validate(plan)


def test_a_file_is_a_plan_and_a_wrong_one_says_where(tmp_path: Path) -> None:
    path = tmp_path / "campaign.yaml"
    path.write_text(
        yaml.safe_dump(make_plan_settings("small", "file:///x", Path("/"), make_local_workers()))
    )
    assert read_campaign_plan(path).name == "small"
    path.write_text("name: small\nbucket: 3\n")
    with pytest.raises(ConfigurationError, match=r"campaign\.yaml: bucket"):
        read_campaign_plan(path)


def make_pinned_training(store: Path, **change: Any) -> Training:
    place = StoreSpec(url=store.as_uri())
    settings = {
        "command": ("true",), "initial_weights": {"job": "first"}, "workers": 2,
        "windows_per_epoch": 4, "run": {"steps": 30},
    }  # fmt: skip
    dataset = change.pop("dataset", "text")
    return Training(
        "small", dataset, TrainingOptions.model_validate(settings | change), place, place
    )


def pin(store: Path, **change: Any) -> None:
    """Pin the settings of a training, as a campaign that begins it does."""
    for check in (check_committed_training, commit_training):
        check(make_pinned_training(store, **change))


def test_a_plan_that_has_changed_is_refused_with_its_fields_and_values(tmp_path: Path) -> None:
    pin(tmp_path)
    with pytest.raises(ConflictError) as refused:
        pin(tmp_path, workers=3, windows_per_epoch=2, run={"steps": 20})
    said = str(refused.value)
    assert "training.workers was 2, and is 3 now" in said
    assert "training.windows_per_epoch was 4, and is 2 now" in said
    assert "training.run.steps was 30, and is 20 now" in said
    with pytest.raises(ConflictError, match=r"data\.dataset was text, and is words now"):
        pin(tmp_path, dataset="words")
    with pytest.raises(ConflictError, match=r"training\.run\.outer\.lr was 1\.0, and is 0\.5 now"):
        pin(tmp_path, run={"steps": 30, "outer": {"lr": 0.5}})


def test_what_may_change_during_a_run_is_no_other_plan(tmp_path: Path) -> None:
    """The advice of docs/guides/campaigns.md where no gradient is taken."""
    pin(tmp_path)
    gather = {"quorum": 0, "grace_period": "1m"}
    pin(tmp_path, run={"steps": 30, "window_length": "1h", "gather": gather})


@pytest.mark.parametrize(
    ("bucket", "url"),
    [(None, ""), ("file:///x", ""), ("file:///y", "file:///y")],
)
def test_weights_of_another_bucket_have_its_url(bucket: str | None, url: str) -> None:
    plan = make_plan_settings("small", "file:///x", Path("/"), make_local_workers())
    plan["training"]["initial_weights"]["bucket"] = bucket
    training = CampaignPlan.model_validate(plan).make_campaign().training
    assert training is not None
    assert training.initial_weights_url == url


def test_the_mirrors_of_a_block_are_those_of_the_training() -> None:
    bucket = Bucket(role=BucketRole.DATASET, url="file:///x", mirrors=["file:///y", "file:///z"])
    plan = make_plan_settings("small", "file:///x", Path("/"), make_local_workers())
    training = CampaignPlan.model_validate(plan | {"bucket": bucket}).make_campaign().training
    assert training is not None
    assert [one.url for one in training.mirrors] == bucket.mirrors


def test_a_plan_is_held_against_the_pinned_one_before_anything_is_made(tmp_path: Path) -> None:
    store = tmp_path / "none"
    check_committed_training(make_pinned_training(store))
    assert not store.exists()


SHARDING_MACHINES = {
    "repo_url": "https://example.com/code",
    "vast": "payer",
    "request": {"max_hourly": 1, "max_total": 5},
}


def make_plan_with_sharding_machines(**data: Any) -> dict[str, Any]:
    plan = make_plan_settings("small", "file:///x", Path("/"), make_local_workers())
    return plan | {"data": plan["data"] | {"machines": SHARDING_MACHINES} | data}


def test_machines_that_shard_have_a_rental_of_their_own() -> None:
    plan = CampaignPlan.model_validate(make_plan_with_sharding_machines())
    assert plan.rental is None
    assert plan.sharding_rental == ("shard/small-text", "file:///x", "payer")
    assert plan.make_campaign().rentals == {
        "shard/small-text": MoneyLimits(max_hourly=1, max_total=5, machines=1)
    }
    parameters = run_campaign.validate_parameters({"plan": make_plan_with_sharding_machines()})
    assert find_campaign_sharding_rental(parameters) == plan.sharding_rental
    without = make_plan_settings("small", "file:///x", Path("/"), make_local_workers())
    parameters = run_campaign.validate_parameters({"plan": without})
    assert find_campaign_sharding_rental(parameters) is None


def test_machines_that_shard_need_a_source() -> None:
    with pytest.raises(ValidationError, match="name the `source`, or remove `machines`"):
        CampaignPlan.model_validate(make_plan_with_sharding_machines(source=None))


def test_a_plan_whose_rental_would_be_refused_is_refused() -> None:
    plan = make_plan_settings("all/000000", "file:///x", Path("/"), make_local_workers())
    assert CampaignPlan.model_validate(plan).rental is None
    plan["training"]["machines"] = SHARDING_MACHINES | {"kind": "rented"}
    with pytest.raises(ConfigurationError, match="'all/000000' has the part '000000'"):
        CampaignPlan.model_validate(plan)
    with pytest.raises(ConfigurationError, match="'shard/000001' has the part '000001'"):
        CampaignPlan.model_validate(make_plan_with_sharding_machines(dataset="000001"))


@pytest.mark.parametrize(
    ("workers", "sharding", "said"),
    [
        (None, None, ""),
        (None, 2, "Rent 2 machines to shard the dataset, of Vast.ai, for small, for at most $5.00"),
        (3, None, "Rent 3 machines to train, of Vast.ai, for small, for at most $100.00 in all?"),
        (
            3,
            1,
            (
                "Rent 1 machine to shard the dataset and then 3 machines to train, of Vast.ai, for "
                "small, for at most $105.00 in all?"
            ),
        ),
    ],
)
def test_the_question_before_a_campaign_names_all_machines(
    workers: int | None, sharding: int | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan_with_sharding_machines()
    if sharding is None:
        plan["data"]["machines"] = None
    else:
        plan["data"]["machines"] = SHARDING_MACHINES | {"machines": sharding}
    if workers is not None:
        request = {"max_hourly": 1, "max_total": 100}
        plan["training"] |= {"workers": workers}
        plan["training"]["machines"] = SHARDING_MACHINES | {"request": request, "kind": "rented"}
    found = CampaignPlan.model_validate(plan)
    assert found.data is not None
    with click.testing.CliRunner().isolation(input="n\n") as (_, errors, *_):
        answer = confirm_machines(found.name, found.training, found.data.machines, yes=False)
        shown = errors.getvalue().decode()
    assert answer is (not said)
    assert said in " ".join(shown.split())
