"""A run that waits for the machines of a campaign."""

from pydantic import SecretStr

from flows.rent_machines import (
    await_machines,
    describe_campaign_release,
    find_requested_rental,
)
from millrace.rentals import OfferRequest, Program, RentalSettings, RentalSupervisor, VastAccount
from millrace.storage import StoreSpec
from tasks.renting import RentalReference


def test_a_rental_is_no_parameter_that_prefect_stores() -> None:
    settings = RentalSettings(
        name="fleet",
        store=StoreSpec(url="file:///x"),
        account=VastAccount(api_key=SecretStr("the key")),
        request=OfferRequest(max_hourly=1.0, max_total=1.0),
        program=Program(repo_url="https://example.org/x", command=("true",)),
    )
    rental = RentalSupervisor(settings)
    assert await_machines.validate_parameters({"rental": rental}) == {"rental": rental}
    stored = await_machines.serialize_parameters({"rental": rental})
    assert stored == {"rental": "<RentalSupervisor>"}


def test_a_campaign_names_the_command_that_releases_its_machines() -> None:
    said = describe_campaign_release("small")
    assert "`millrace machine release small`" in said
    assert "release-machines" not in said


def test_a_run_that_relied_on_the_default_has_rented_nothing() -> None:
    parameters = {"name": "fleet", "bucket": "ledger", "vast": "account"}
    assert find_requested_rental(parameters) is None
    assert find_requested_rental({**parameters, "dry_run": True}) is None
    rental = find_requested_rental({**parameters, "dry_run": False})
    assert rental == RentalReference(name="fleet", bucket="ledger", vast="account")
