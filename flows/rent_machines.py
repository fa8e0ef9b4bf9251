"""Rent machines, and start a program on each."""

from typing import Any

from prefect import flow

from blocks import VastCredentials
from millrace.rentals import (
    MachineStatus,
    Offer,
    OfferRequest,
    Program,
    RentalSettings,
    RentalSupervisor,
    RentalTimeouts,
    StorageGrant,
)
from millrace.storage import Right
from tasks.formatting import format_count
from tasks.locations import BucketLocation, make_store_spec
from tasks.renting import (
    RentalReference,
    await_rental,
    fetch_machines,
    make_account,
    make_release_hook,
    report_rentals,
    require_credentials,
    search_offers,
    start_rental,
)
from tasks.reports import format_bold, format_markdown


def find_rental(parameters: dict[str, Any]) -> RentalReference | None:
    """Return the rental of a run with these parameters; None for a dry run."""
    if parameters["dry_run"]:
        return None
    return parameters["name"], parameters["bucket"], parameters["vast"]


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
    storage_grants: list[StorageGrant] = [],  # noqa: B006 - Prefect draws it
    role_arn: str | None = None,
    timeouts: RentalTimeouts = RentalTimeouts(),  # noqa: B008 - frozen
    dry_run: bool = True,  # noqa: FBT001, FBT002 - Prefect passes it by name
) -> list[MachineStatus] | list[Offer]:
    """Rent machines of Vast.ai, and start a program on each.

    The machines stay until `release-machines` releases them, or until their deadline. A failure or
    a cancellation before all programs run releases all machines.

    Args:
        name: Name of the rental, for `release-machines` and to continue a stopped run.
        bucket: A Millrace Bucket block with write credentials, its name, or a URL. It holds the
            ledger of rentals. The machines can access the parts in `storage_grants`.
        vast: The Vast.ai Credentials block that pays, or its name.
        request: Requirements of each machine, and its highest price.
        program: Program that runs on each machine.
        machines: Number of machines.
        storage_grants: Parts of the bucket that the machines may use.
        role_arn: ARN of the role whose credentials machines get (S3 only).
        timeouts: Longest waits for machines, and the interval of the checks.
        dry_run: Only show the offers.
    """
    settings = RentalSettings(
        name=name,
        store=make_store_spec(bucket, Right.WRITE),
        account=make_account(require_credentials(vast)),
        request=request,
        program=program,
        machines=machines,
        storage_grants=tuple(storage_grants),
        role_arn=role_arn,
        **timeouts.model_dump(),
    )
    if dry_run:
        return search_offers(settings)
    return _report_machines(settings, start_rental(settings))


@flow(name="rent-machines", flow_run_name="rent-{rental.name}")
def await_machines(rental: RentalSupervisor) -> list[MachineStatus]:
    """Wait until the programs of a rental run that the caller owns.

    Args:
        rental: Handle of the rental.
    """
    return _report_machines(rental.settings, await_rental(rental))


def _report_machines(settings: RentalSettings, dollars: float) -> list[MachineStatus]:
    """Publish a report of the machines of a rental, and return them."""
    mine = [one for one in fetch_machines(settings.ledger) if one.rental == settings.name]
    headline = format_markdown(
        "{}: {} run, ${:.2f} so far. Release them with `release-machines`; else they go at "
        "their deadline.",
        format_bold(settings.name), format_count(len(mine), "machine"), dollars,
    )  # fmt: skip
    report_rentals(headline, mine, key="rent-machines")
    return mine
