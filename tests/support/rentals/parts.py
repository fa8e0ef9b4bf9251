"""Machines, settings and stand-ins for tests of the parts of a rental."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

from pydantic import SecretStr

from millrace import errors
from millrace.keys.rentals import MachineKeys, RentalKeys
from millrace.progress import Event
from millrace.rentals import (
    Instance,
    Machine,
    Offer,
    OfferRequest,
    Program,
    RentalSettings,
    RentalTimeouts,
    VastAccount,
    VastClient,
)
from millrace.rentals.context import RentalContext
from millrace.rentals.ledger import Attempt
from millrace.rentals.machine_environment import make_environment, upload_files
from millrace.rentals.messages import GuestConfig, GuestFiles, make_program_environment
from millrace.rentals.reports import MachineReports
from millrace.rentals.vast.api import CreatedInstance
from millrace.schemas.rental import Contract, Intent
from millrace.storage import StoreSpec, open_store, read

START = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


class ManualClock:
    """Clock whose time passes only in `sleep`."""

    def __init__(self) -> None:
        self.elapsed = 1000.0

    def now(self) -> datetime:
        return START + timedelta(seconds=self.elapsed - 1000.0)

    def monotonic(self) -> float:
        return self.elapsed

    def sleep(self, seconds: float) -> None:
        self.elapsed += seconds


@dataclass
class FakeVast:
    """Account in memory.

    Attributes:
        instances: Machines of the account, by number.
        offers: Rows of offers, as the API returns them.
        creates: Labels of all create requests.
        searches: Number of searches.
        create_error: Error of the next create requests; a machine is created nevertheless if
            `creates_despite_error` is set.
        creates_despite_error: Whether a failed create request leaves a machine.
        refusal: Refusal of the next created machines.
    """

    clock: ManualClock = field(default_factory=ManualClock)
    instances: dict[int, Instance] = field(default_factory=dict[int, Instance])
    offers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    creates: list[str] = field(default_factory=list[str])
    searches: int = 0
    create_error: errors.MillraceError | None = None
    creates_despite_error: bool = False
    refusal: str = ""
    url: str = "https://vast.example"

    def identify_account(self) -> str:
        return "user-1"

    def list_instances(self, *, is_brief: bool = False) -> list[Instance]:
        return list(self.instances.values())

    def destroy_instance(self, instance_id: int) -> None:
        self.instances.pop(instance_id, None)

    def search_offers(self, *_: Any, **__: Any) -> list[dict[str, Any]]:
        self.searches += 1
        return self.offers

    def create_instance(self, offer: int, **body: Any) -> CreatedInstance:
        self.creates.append(body["label"])
        if self.create_error is None or self.creates_despite_error:
            self.add(len(self.creates), body["label"])
        if self.create_error is not None:
            raise self.create_error
        return CreatedInstance(len(self.creates), self.refusal)

    def add(self, number: int, label: str = "", **fields: Any) -> Instance:
        """Add a machine to the account."""
        row = {"id": number, "label": label, "actual_status": "running", "dph_total": 0.5, **fields}
        self.instances[number] = Instance.from_row(row)
        return self.instances[number]


def make_settings(folder: Path, **more: Any) -> RentalSettings:
    """Return settings of the rental `fleet`; fields of its request and timeouts are found."""
    request = {"max_hourly": 2.0, "max_total": 10.0} | {
        name: more.pop(name) for name in OfferRequest.model_fields if name in more
    }
    timeouts = {name: more.pop(name) for name in RentalTimeouts.model_fields if name in more}
    return RentalSettings(
        name="fleet",
        store=StoreSpec(url=folder.as_uri()),
        account=VastAccount(api_key=SecretStr("key")),
        request=OfferRequest.model_validate(request),
        program=Program(repo_url="https://example.org/x", command=("true",)),
        timeouts=RentalTimeouts.model_validate(timeouts),
        **more,
    )


def make_context(
    settings: RentalSettings, vast: FakeVast, events: list[Event], *, is_detached: bool = False
) -> RentalContext:
    """Return the context of a rental with an account in memory."""

    def progress(event: Event) -> None:
        events.append(event)

    return RentalContext(
        settings,
        open_store(settings.store),
        cast("VastClient", vast),
        progress,
        is_detached=is_detached,
    )


def make_attempt(number: int = 0, *, instance_id: int | None = None, **more: Any) -> Attempt:
    """Return an attempt of `fleet`, with a contract if it has a number at the provider."""
    fields = {
        "rental": "fleet",
        "slot": 0,
        "label": f"label-{number}",
        "offer_id": 1,
        "machine_id": 100 + number,
        "account": "user-1",
        "dollars_per_hour": 0.5,
        "upload_dollars_per_gb": 0.1,
        "download_dollars_per_gb": 0.1,
        "upload_mbps": 100.0,
        "download_mbps": 100.0,
        "started_at": START,
        "deadline": START + 10 * HOUR,
    }
    contract = None if instance_id is None else Contract(instance_id=instance_id)
    return Attempt(number, Intent.model_validate(fields | more), contract)


def make_machine(folder: Path, attempt: Attempt | None = None, **more: Any) -> Machine:
    """Return a machine that was rented when the manual clock started."""
    attempt = attempt or make_attempt(instance_id=1, **more)
    keys = MachineKeys(RentalKeys("fleet").make_machine_prefix(attempt.number))
    reports = MachineReports(open_store(StoreSpec(url=folder.as_uri())), keys)
    return Machine(attempt, reports, rented_at=1000.0, last_report_at=1000.0)


def make_offer_row(number: int, dollars_per_hour: float = 0.5) -> dict[str, Any]:
    """Return an offer as the API returns it. Its host has the number of the offer."""
    return {
        "id": number, "machine_id": number, "num_gpus": 1, "dph_total": dollars_per_hour,
        "inet_down": 100.0, "inet_up": 100.0,
    }  # fmt: skip


def make_offer(request: OfferRequest, number: int = 1, dollars_per_hour: float = 0.5) -> Offer:
    """Return an offer."""
    return Offer.from_row(make_offer_row(number, dollars_per_hour), request)


def receive_program(settings: RentalSettings, folder: Path, attempt: Attempt) -> dict[str, str]:
    """Write the files of a program as its machine does; return the program's environment."""
    store = open_store(settings.store)
    sent = make_environment(store, settings, attempt, vast_url="https://x")
    upload_files(store, settings, attempt)
    keys = MachineKeys(RentalKeys(settings.name).make_machine_prefix(attempt.number))
    for name, text in GuestFiles.model_validate_json(read(store, keys.files)).texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return make_program_environment({}, GuestConfig.from_environment(sent))
