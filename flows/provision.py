"""Rent machines, and leave them with a program that runs."""

from typing import Any

from prefect import flow

from blocks import VastCredentials
from millrace.rentals import (
    Offer,
    OfferRequest,
    Patience,
    Program,
    Reach,
    Rented,
    RentSettings,
    StandSettings,
)
from millrace.storage import Right
from tasks.places import BucketLocation, spec_of
from tasks.renting import (
    RentedBy,
    account_of,
    giving_back,
    list_machines,
    look_for_offers,
    payer_of,
    rent_machines,
    report_rentals,
)
from tasks.reports import bold, write
from tasks.words import format_count


def rented(parameters: dict[str, Any]) -> RentedBy | None:
    """Return the rental that such a run uses."""
    if parameters["dry_run"]:
        return None
    return parameters["name"], parameters["bucket"], parameters["vast"]


@flow(
    name="provision",
    flow_run_name="provision-{name}",
    on_crashed=[giving_back(rented)],
    on_cancellation=[giving_back(rented)],
)
def provision(
    name: str,
    bucket: BucketLocation,
    vast: VastCredentials | str,
    request: OfferRequest,
    program: Program,
    machines: int = 1,
    reach: list[Reach] = [],  # noqa: B006 - Prefect draws it
    role_arn: str | None = None,
    patience: Patience = Patience(),  # noqa: B008 - frozen
    dry_run: bool = True,  # noqa: FBT001, FBT002 - Prefect passes it by name
) -> list[Rented] | list[Offer]:
    """Rent machines of Vast.ai, and start a program on each.

    They stay until `release` gives them back, or their time is over. Whatever fails or is
    cancelled before all run gives all back.

    Args:
        name: The rental's: what `release` is told, and what goes on where it was stopped.
        bucket: A Millrace Bucket block with write credentials, its name, or a URL: where
            rentals are written down, and what the machines reach.
        vast: The Vast.ai Credentials block that pays, or its name.
        request: Requirements of each machine, and its highest price.
        program: Program that runs on each machine.
        machines: Number of machines.
        reach: The parts of the bucket that the machines may use.
        role_arn: ARN of the role whose credentials machines get (S3 only).
        patience: Longest waits for machines, and how often they are looked at.
        dry_run: Only show the offers.
    """
    settings = RentSettings(
        name=name,
        store=spec_of(bucket, Right.WRITE),
        account=account_of(payer_of(vast)),
        request=request,
        program=program,
        count=machines,
        reach=tuple(reach),
        role_arn=role_arn,
        **patience.model_dump(),
    )
    if dry_run:
        return look_for_offers(settings)
    dollars = rent_machines(settings)
    stand = StandSettings(store=settings.store, account=settings.account)
    mine = [one for one in list_machines(stand) if one.rental == name]
    headline = write(
        "{}: {} run, ${:.2f} so far. Give them back with `release`; else they go when their time "
        "is over.",
        bold(name), format_count(len(mine), "machine"), dollars,
    )  # fmt: skip
    report_rentals(headline, mine, key="provision")
    return mine
