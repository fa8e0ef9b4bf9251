"""One settings object describes what to rent, and where its ledger is."""

from datetime import timedelta
from pathlib import Path

from pydantic import SecretStr

from millrace.rentals import LedgerSettings, MachineSettings, RentalSettings
from millrace.storage import Credentials, StoreSpec
from tests.support.rentals.parts import make_settings


def test_a_rental_is_made_of_a_name_a_ledger_and_what_to_rent(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, machines=3, poll_interval=timedelta(seconds=2))
    rent = MachineSettings.model_validate(
        {name: getattr(settings, name) for name in MachineSettings.model_fields}
    )
    assert RentalSettings.make("fleet", settings.ledger, rent) == settings


def test_a_ledger_comes_back_from_json_with_its_secrets(tmp_path: Path) -> None:
    credentials = Credentials(access_key_id="a", secret_access_key=SecretStr("hidden"))
    store = StoreSpec(url="s3://bucket", credentials=credentials)
    ledger = LedgerSettings(store=store, account=make_settings(tmp_path).account)
    assert "hidden" not in ledger.model_dump_json()
    assert LedgerSettings.model_validate(ledger.reveal_secrets()) == ledger
