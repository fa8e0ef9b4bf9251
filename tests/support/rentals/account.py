"""An account at the stand-in, and what is rented with it."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from millrace.progress import Event
from millrace.rentals import (
    LedgerSettings,
    OfferRequest,
    Program,
    RentalSettings,
    RentalTimeouts,
    VastAccount,
    VastClient,
)
from millrace.storage import StoreSpec
from millrace.testing.vast import StandInClock, VastServer

REPO = "https://example.org/somebody/program"


class Account_:  # noqa: N801 - `Account` is the engine's
    """An account at the stand-in.

    Attributes:
        server: Stand-in with the account.
        key: API key of the account.
        folder: Folder of the store.
        told: Reported events.
    """

    def __init__(self, server: VastServer, key: str, folder: Path) -> None:
        self.server, self.key, self.folder = server, key, folder
        self.told: list[Event] = []

    @property
    def vast(self) -> VastClient:
        return VastClient(SecretStr(self.key), self.server.url, clock=StandInClock(self.server))

    def note_event(self, event: Event) -> None:
        self.told.append(event)

    def count_events(self, event_class: type[Event]) -> int:
        return sum(isinstance(event, event_class) for event in self.told)

    def make_ledger_settings(self) -> LedgerSettings:
        return LedgerSettings(store=self.store, account=self.account)

    @property
    def store(self) -> StoreSpec:
        return StoreSpec(url=self.folder.as_uri())

    @property
    def account(self) -> VastAccount:
        return VastAccount(api_key=SecretStr(self.key), server_url=self.server.url)

    def make_settings(self, name: str = "fleet", **more: Any) -> RentalSettings:
        timeouts = {"poll_interval": timedelta(seconds=10)} | {
            field: more.pop(field) for field in RentalTimeouts.model_fields if field in more
        }
        request = {"max_hourly": 2.0, "max_total": 50.0} | more.pop("request", {})
        return RentalSettings(
            name=name,
            store=self.store,
            account=self.account,
            request=OfferRequest(**request),
            program=Program(repo_url=REPO, command=("true",)),
            timeouts=RentalTimeouts.model_validate(timeouts),
            **more,
        )


Reset = Callable[..., Account_]


@pytest.fixture
def world(vast: VastServer, tmp_path: Path) -> Reset:
    """Begin a world, with what `millrace.testing.vast.World` says of it."""

    def reset(**more: Any) -> Account_:
        folder = tmp_path / "store"
        folder.mkdir(exist_ok=True)
        return Account_(vast, vast.reset(**more), folder)

    return reset
