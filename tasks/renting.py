"""Machines rented, shown, given back."""

from collections.abc import Iterable

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from blocks import Bucket, VastCredentials
from millrace.errors import ConfigurationError, NotFoundError
from millrace.storage import Right
from millrace.vast import (
    Account,
    Offer,
    Reaped,
    Rental,
    Rented,
    RentSettings,
    StandSettings,
    account,
    find_offers,
    is_rented,
    list_rentals,
    reap,
    release,
)
from tasks.places import block_of, known, spec_of
from tasks.progress import RentalProgress
from tasks.retries import PAUSES, passing
from tasks.words import artifact_key, count

_SHOWN = 20  # offers in a report


def account_of(credentials: VastCredentials) -> Account:
    """The account of a block."""
    return Account(api_key=credentials.api_key, server_url=credentials.server_url)


def stand_of(bucket: Bucket | str, vast: VastCredentials | str) -> StandSettings | None:
    """Where rentals are written down, and who pays; None while one of the blocks is not there.

    Raises:
        ConfigurationError: Something is rented, and the block of who pays is not there.
    """
    place = known(bucket)
    payer = vast if isinstance(vast, VastCredentials) else block_of(VastCredentials, vast)
    missing = [f"Millrace Bucket block {bucket}"] if place is None else []
    missing += [f"Vast.ai Credentials block {vast}"] if payer is None else []
    if place is not None and payer is None and is_rented(spec_of(place, Right.WRITE)):
        raise ConfigurationError(
            f"There is no Vast.ai Credentials block {vast}, and by {bucket} machines are rented: "
            "nobody can give them back. Make the block, with the API key that has rented them."
        )
    if place is None or payer is None:
        get_run_logger().warning(
            "There is no %s: nothing was looked at, and nothing given back. Make it with "
            "`millrace setup`.",
            " and no ".join(missing),
        )
        return None
    return StandSettings(store=spec_of(place, Right.WRITE), account=account_of(payer))


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def look_for_offers(settings: RentSettings) -> list[Offer]:
    """What would be rented. Rents nothing."""
    found = find_offers(account(settings.account), settings.request)
    fit = f"{count(len(found), 'offer')} of Vast.ai fit `{settings.name}`"
    lines = [f"**Nothing was rented.** {fit}, of which it needs {settings.count}."]
    lines += _offers(found[:_SHOWN])
    create_markdown_artifact(_text(lines), key="offers", description="What would be rented")
    if len(found) < settings.count:
        raise NotFoundError(
            f"Vast.ai has {count(len(found), 'offer')} that fit {settings.name}, which needs "
            f"{settings.count}: ask for less, or grant more dollars an hour."
        )
    return found


@task(cache_policy=NO_CACHE)
def rent_machines(settings: RentSettings) -> float:
    """Rent machines, and leave them when all of their programs run; dollars so far."""
    key = artifact_key("progress", "rental", settings.name)
    with (
        RentalProgress(key, settings.count) as progress,
        Rental(settings, detached=True, progress=progress) as rental,
    ):
        rental.until_ready()
        return rental.cost


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def list_machines(stand: StandSettings) -> list[Rented]:
    """What is rented by this installation."""
    return list_rentals(stand)


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def release_machines(stand: StandSettings, rental: str) -> int:
    """Give back all machines of a rental."""
    return release(stand, rental)


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def reap_machines(stand: StandSettings, *, dry_run: bool) -> Reaped:
    """Give back what has no living owner."""
    return reap(stand, dry_run=dry_run)


@task(cache_policy=NO_CACHE)
def report_rentals(headline: str, machines: Iterable[Rented], *, key: str = "rentals") -> None:
    """Leave a report that a person wants to read."""
    rows = list(machines)
    lines = [headline]
    if rows:
        lines += [
            "",
            "| rental | instance | status | since | until | $/h | dollars | owner |",
            "|---|--:|---|---|---|--:|--:|---|",
            *(_row(one) for one in rows),
        ]
    create_markdown_artifact(_text(lines), key=key, description="Rented machines")


def _row(one: Rented) -> str:
    intent = one.attempt.intent if one.attempt else None
    since = f"{intent.begun:%Y-%m-%d %H:%M}" if intent else "?"
    until = f"{intent.until:%Y-%m-%d %H:%M}" if intent else "?"
    who = one.why or one.owner or ("left until then" if one.attempt else "not understood")
    cells = (
        f"`{one.rental or one.instance.label}`",
        one.instance.id,
        one.instance.status,
        since,
        until,
        f"{one.instance.dph:.3f}",
        f"{one.cost:.2f}",
        who,
    )
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _offers(found: list[Offer]) -> list[str]:
    if not found:
        return []
    lines = [
        "",
        "| offer | GPU | place | reliability | $/h | dollars in all |",
        "|--:|---|---|--:|--:|--:|",
    ]
    for one in found:
        gpu = f"{one.gpus} x {one.gpu}, {one.gpu_memory:.0f} GB"
        lines.append(
            f"| {one.id} | {gpu} | {one.place} | {one.reliability:.3f} | {one.dph:.3f} | "
            f"{one.total:.2f} |"
        )
    return lines


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"
