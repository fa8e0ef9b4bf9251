"""Rent machines, and start a program on each."""

from typing import Any

from prefect import flow
from pydantic import BaseModel, ConfigDict, Field

from blocks import VastCredentials
from millrace.rentals import (
    LedgerSettings,
    MachineStatus,
    Offer,
    OfferRequest,
    Program,
    RentalSettings,
    RentalTimeouts,
    StorageGrant,
)
from millrace.storage import Right
from tasks.formatting import format_count
from tasks.forms import draw_form
from tasks.locations import BucketLocation, make_store_spec
from tasks.renting import (
    RentalReference,
    fetch_machines,
    make_account,
    make_release_hook,
    report_rentals,
    require_credentials,
    search_offers,
    start_rental,
)
from tasks.reports import format_bold, format_markdown


class RentalOptions(BaseModel):
    """Access of the machines to the bucket, and time limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    storage_grants: tuple[StorageGrant, ...] = Field(
        default=(), description="Parts of the bucket that the machines may use."
    )
    role_arn: str | None = Field(
        default=None,
        description="ARN of the role whose credentials the machines get. S3 needs one, R2 does "
        "not.",
    )
    timeouts: RentalTimeouts = Field(
        default=RentalTimeouts(),
        description="Longest waits for machines, and the interval of the checks.",
    )


def find_rental(parameters: dict[str, Any]) -> RentalReference | None:
    """Return the rental of a run with these parameters; None for a dry run."""
    if parameters["dry_run"]:
        return None
    return parameters["name"], parameters["bucket"], parameters["vast"]


@draw_form
@flow(
    name="rent-machines",
    flow_run_name="rent-{name}",
    on_crashed=[make_release_hook(find_rental)],
    on_cancellation=[make_release_hook(find_rental)],
)
def rent_machines(
    name: str,
    bucket: BucketLocation,
    vast: VastCredentials | str,
    request: OfferRequest,
    program: Program,
    machines: int = 1,
    options: RentalOptions | None = None,
    dry_run: bool = True,  # noqa: FBT001, FBT002 - Prefect passes it by name
) -> list[MachineStatus] | list[Offer]:
    """Rent machines of Vast.ai, and start a program on each.

    The machines stay until `release-machines` releases them, or until their deadline. A failure or
    a cancellation before all programs run releases all machines.

    Args:
        name: Name of the rental, for `release-machines` and to continue a stopped run.
        bucket: Store of the ledger of rentals: a Millrace Bucket block with write credentials, its
            name, or a URL.
        vast: The Vast.ai Credentials block that pays, or its name.
        request: Requirements of each machine, and its highest price.
        program: Program that runs on each machine.
        machines: Number of machines.
        options: Parts of the bucket that the machines may use, and time limits. By default the
            machines use no part.
        dry_run: Only show the offers.
    """
    options = options or RentalOptions()
    settings = RentalSettings(
        name=name,
        store=make_store_spec(bucket, Right.WRITE),
        account=make_account(require_credentials(vast)),
        request=request,
        program=program,
        machines=machines,
        storage_grants=options.storage_grants,
        role_arn=options.role_arn,
        **options.timeouts.model_dump(),
    )
    if dry_run:
        return search_offers(settings)
    dollars = start_rental(settings)
    ledger = LedgerSettings(store=settings.store, account=settings.account)
    mine = [one for one in fetch_machines(ledger) if one.rental == name]
    headline = format_markdown(
        "{}: {} run, ${:.2f} so far. Release them with `release-machines`; else they go at "
        "their deadline.",
        format_bold(name), format_count(len(mine), "machine"), dollars,
    )  # fmt: skip
    report_rentals(headline, mine, key="rent-machines")
    return mine
