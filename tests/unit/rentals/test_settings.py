"""One settings object describes what to rent, and where its ledger is."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, SecretStr

from millrace.campaigns import TrainingOptions
from millrace.errors import ConfigurationError
from millrace.keys.rentals import RentalKeys
from millrace.rentals import (
    LedgerSettings,
    MachineSettings,
    OfferRequest,
    RentalSettings,
    check_offer_id,
)
from millrace.rented_sharding import VastFileSettings
from millrace.settings import load_settings, validate_settings
from millrace.storage import Credentials, StoreSpec
from tests.support.rentals.parts import make_settings

OFFER = {"offer_id": 7, "max_hourly": 1, "max_total": 5}
RENTED = {"kind": "rented", "repo_url": "https://example.com/code", "request": OFFER}


def test_a_rental_is_made_of_a_name_a_ledger_and_what_to_rent(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, machines=3, poll_interval=timedelta(seconds=2))
    rent = MachineSettings.model_validate(
        {name: getattr(settings, name) for name in MachineSettings.model_fields}
    )
    assert RentalSettings.make("fleet", settings.ledger, rent) == settings


def test_the_files_of_a_program_arrive_as_they_are_written(tmp_path: Path) -> None:
    text = "store: {url: ${MILLRACE_STORE}, key: ${AWS_SECRET_ACCESS_KEY}, price: $${NAME}}\n"
    data = make_settings(tmp_path).ledger.reveal_secrets() | {
        "name": "fleet",
        "request": OFFER,
        "program": {
            "repo_url": "https://example.com/code",
            "command": ["millrace", "run", "settings.yaml"],
            "files": {"settings.yaml": text},
            "environment": {"TOKEN": "${TOKEN}"},
        },
    }
    path = tmp_path / "rent.yaml"
    path.write_text(yaml.safe_dump(data))
    environ = {"AWS_SECRET_ACCESS_KEY": "the owner's", "TOKEN": "for the machine"}
    program = load_settings(path, RentalSettings, environ).program
    assert program.files == {"settings.yaml": text}
    assert program.environment == {"TOKEN": "for the machine"}


def test_a_ledger_comes_back_from_json_with_its_secrets(tmp_path: Path) -> None:
    credentials = Credentials(access_key_id="a", secret_access_key=SecretStr("hidden"))
    store = StoreSpec(url="s3://bucket", credentials=credentials)
    ledger = LedgerSettings(store=store, account=make_settings(tmp_path).account)
    assert "hidden" not in ledger.model_dump_json()
    assert LedgerSettings.model_validate(ledger.reveal_secrets()) == ledger


@pytest.mark.parametrize(
    "name",
    [
        "fleet/000000",
        "fleet/099999",
        "fleet/000007/more",
        "fleet/owner.txt",
        "fleet/owner.txt/more",
        "installation.json",
        "installation.json/more",
    ],
)
def test_a_rental_with_a_name_of_another_rentals_object_is_refused(
    tmp_path: Path, name: str
) -> None:
    data = {**dict(make_settings(tmp_path)), "name": name}
    with pytest.raises(ConfigurationError, match=r"name: .* of other rentals: choose another"):
        validate_settings(RentalSettings, data, source="rent.yaml")
    assert RentalKeys(name).name == name  # an existing one can be released


@pytest.mark.parametrize(
    "name", ["000000", "owner.txt", "fleet/202611", "fleet/0000", "fleet/x000000", "a/000000x"]
)
def test_a_rental_whose_name_no_object_of_another_has_is_accepted(
    tmp_path: Path, name: str
) -> None:
    data = {**dict(make_settings(tmp_path)), "name": name}
    assert validate_settings(RentalSettings, data, source="rent.yaml").name == name


@pytest.mark.parametrize("name", ["", "/fleet", "a b", "fleet/attempts", "fleet/lease"])
def test_a_rental_with_an_invalid_name_is_refused_in_its_settings(
    tmp_path: Path, name: str
) -> None:
    data = {**dict(make_settings(tmp_path)), "name": name}
    with pytest.raises(ConfigurationError, match=r"^rent.yaml: name: The rental's name .*[^.]\.$"):
        validate_settings(RentalSettings, data, source="rent.yaml")


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        (
            VastFileSettings,
            {"vast": {"request": OFFER, "machines": 2}},
            (
                "vast.machines: an offer is one machine: set machines to 1, or remove offer_id "
                "from request"
            ),
        ),
        (
            MachineSettings,
            {"request": OFFER, "machines": 2},
            "machines: an offer is one machine: set machines to 1, or remove offer_id from request",
        ),
        (
            TrainingOptions,
            {"workers": 2, "machines": RENTED},
            (
                "machines: an offer is one machine: set workers to 1, or remove offer_id from "
                "machines.request"
            ),
        ),
    ],
)
def test_several_machines_of_one_offer_are_refused_at_their_field(
    model: type[BaseModel], data: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        validate_settings(model, data, source="job.yaml")
    faults = str(refused.value).removeprefix("job.yaml: ").removesuffix(".").split("; ")
    assert said in faults


def test_an_offer_of_one_machine_is_taken() -> None:
    request = OfferRequest.model_validate(OFFER)
    for count in (1, 2):
        check_offer_id(request.model_copy(update={"offer_id": None}), count)
    check_offer_id(request, 1)
