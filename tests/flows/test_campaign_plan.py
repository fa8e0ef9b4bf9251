"""What a person says to have a campaign run, and what is refused of it."""

import re
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from flows.campaign_plan import Campaign, RentedWorkers
from flows.command import read
from millrace.errors import ConfigurationError
from tests.flows.campaigns import here, plan_of
from tests.servers.process import REPOSITORY


def test_the_campaign_of_the_readme_is_one() -> None:
    text = (REPOSITORY / "README.md").read_text()
    found = re.search(r"```yaml\n(# campaign.yaml.*?)```", text, re.DOTALL)
    assert found
    data = yaml.safe_load(found[1])
    hub = data["hand_over"].pop("hub")
    assert hub["credentials"]["$ref"]["block_document_slug"].startswith("hugging-face-")
    data["hand_over"]["bucket"] = "file:///x"
    plan = Campaign.model_validate(data)
    assert plan.training is not None
    assert isinstance(plan.training.machines, RentedWorkers)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": None}, "name the dataset"),
        ({"training": None}, "weights to hand over"),
        ({"hand_over": {"job": "x"}}, "to a bucket or to a hub"),
        ({"name": "_rentals"}, "rental's name"),
        ({"nmae": "x"}, "Extra inputs"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], said: str) -> None:
    plan = plan_of("small", "file:///x", Path("/"), here()) | change
    with pytest.raises((ValidationError, ConfigurationError), match=said):
        Campaign.model_validate(plan)


def test_a_file_is_a_plan_and_a_wrong_one_says_where(tmp_path: Path) -> None:
    path = tmp_path / "campaign.yaml"
    path.write_text(yaml.safe_dump(plan_of("small", "file:///x", Path("/"), here())))
    assert read(path).name == "small"
    path.write_text("name: small\nbucket: 3\n")
    with pytest.raises(ConfigurationError, match=r"campaign\.yaml: bucket"):
        read(path)
