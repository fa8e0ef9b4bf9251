"""Rent machines, and start a program on each."""

from typing import Any

from prefect import flow

from blocks import VastCredentials
from millrace.rentals import (
    MachineSettings,
    MachineStatus,
    Offer,
    RentalSettings,
    RentalSupervisor,
)
from tasks.formatting import format_count
from tasks.forms import draw_form
from tasks.locations import BucketLocation
from tasks.renting import (
    RentalReference,
    await_rental,
    fetch_machines,
    make_release_hook,
    report_rentals,
    require_ledger,
    search_offers,
    start_rental,
)
from tasks.reports import Markdown, format_bold, format_code, format_markdown
from tasks.retries import tolerate


def find_requested_rental(parameters: dict[str, Any]) -> RentalReference | None:
    """Return the rental of a run with these parameters; None for a dry run."""
    if parameters.get("dry_run", True):  # Prefect leaves defaults out
        return None
    return RentalReference(parameters["name"], parameters["bucket"], parameters["vast"])


@draw_form
@flow(
    name="rent-machines",
    flow_run_name="rent-{name}",
    on_crashed=[make_release_hook(find_requested_rental)],
    on_cancellation=[make_release_hook(find_requested_rental)],
)
def rent_machines(
    name: str,
    bucket: BucketLocation,
    vast: VastCredentials | str,
    settings: MachineSettings,
    dry_run: bool = True,  # noqa: FBT001, FBT002 - Prefect passes it by name
) -> list[MachineStatus] | list[Offer]:
    """Rent machines of Vast.ai, and start a program on each.

    The machines stay until `release-machines` releases them, or until their deadline. A failure or
    a cancellation before all programs run releases all machines. A pause does not: cancel instead.

    Args:
        name: Name of the rental, for `release-machines` and to continue a stopped run.
        bucket: Store of the ledger of rentals: a Millrace Bucket block with write credentials, its
            name, or a URL.
        vast: The Vast.ai Credentials block that pays, or its name.
        settings: Machines to rent.
        dry_run: Only show the offers.
    """
    rental = RentalSettings.make(name, require_ledger(bucket, vast), settings)
    if dry_run:
        return search_offers(rental)
    release = format_markdown(
        "Release them with the flow `release-machines`; else they go at their deadline."
    )
    return _report_machines(rental, start_rental(rental), release)


@flow(name="await-machines", flow_run_name="await-{rental.name}")
def await_machines(rental: RentalSupervisor) -> list[MachineStatus]:
    """Wait until the programs of a rental run that the caller owns.

    Args:
        rental: Handle of the rental.
    """
    return _report_machines(
        rental.settings, await_rental(rental), describe_campaign_release(rental.name)
    )


def describe_campaign_release(rental: str) -> Markdown:
    """Return how the machines of a campaign are released, for a report."""
    return format_markdown(
        "The campaign releases them at the end of the training, and when it fails or is "
        "cancelled. If one stays, run {} with a settings file, whose `store` is the bucket of the "
        "campaign, and whose `account` is the one that pays.",
        format_code(f"millrace machine release {rental}"),
    )


def _report_machines(
    settings: RentalSettings, dollars: float, release: Markdown
) -> list[MachineStatus]:
    """Publish a report of the machines of a rental, and return them.

    A failure is only logged: the machines run, and must not be released for want of a report.

    Args:
        settings: Settings of the rental.
        dollars: Cost so far.
        release: Sentences about the release of the machines.
    """
    mine: list[MachineStatus] = []
    with tolerate(Exception, "There is no report of the machines, which are rented"):
        mine = [one for one in fetch_machines(settings.ledger) if one.rental == settings.name]
        headline = format_markdown(
            "{}: {} run, ${:.2f} so far. {}",
            format_bold(settings.name), format_count(len(mine), "machine"), dollars, release,
        )  # fmt: skip
        report_rentals(headline, mine, key="rent-machines")
    return mine
