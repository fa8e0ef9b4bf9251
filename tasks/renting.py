"""Machines rented, shown, given back."""

import contextvars
import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import Self

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from blocks import Bucket, VastCredentials
from millrace.errors import ConfigurationError, MillraceError, NotFoundError, one_line
from millrace.storage import Right, StoreSpec, open_store
from millrace.swarm import Host, Hosts
from millrace.vast import (
    IDENTITY,
    Account,
    Offer,
    Reaped,
    Rental,
    Rented,
    RentSettings,
    StandSettings,
    account,
    attempts_of,
    find_offers,
    is_rented,
    list_rentals,
    node_key,
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


def payer_of(vast: VastCredentials | str) -> VastCredentials:
    """The block that pays.

    Raises:
        ConfigurationError: There is none of this name.
    """
    found = vast if isinstance(vast, VastCredentials) else block_of(VastCredentials, vast)
    if found is None:
        raise ConfigurationError(
            f"There is no Vast.ai Credentials block {vast}: make it with `millrace setup`."
        )
    return found


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
    found = find_offers(account(settings.account), settings.wanted)
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
def is_out(place: StoreSpec, rental: str) -> bool:
    """Whether a machine of a rental has not come back, as far as is written down."""
    return any(one.returned is None for one in attempts_of(open_store(place), rental))


def give_back_now(stand: StandSettings, rental: str) -> None:
    """Give back all machines of a rental, while something else is raised."""
    try:
        release(stand, rental)
    except NotFoundError:
        pass  # nothing was rented
    except MillraceError as error:
        get_run_logger().error("%s: %s The reaper goes on.", rental, one_line(error))


class Attended(threading.Thread):
    """Owns the machines of a rental: replaces what is lost, and gives back what has ended.

    Use it as a context: leaving it gives all back, and returns when a listing shows none.

    Args:
        settings: What is rented; machines that `rent_machines` has left are gone on with.
    """

    def __init__(self, settings: RentSettings) -> None:
        context = contextvars.copy_context()
        super().__init__(name="attended", target=context.run, args=(self._attend,))
        self._settings = settings
        self._progress = RentalProgress(
            artifact_key("progress", "attended", settings.name), settings.count
        )
        self._given_up = threading.Event()
        self._owned = threading.Event()
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        """Own them from now on.

        Raises:
            HeldError: Somebody else does.
        """
        self.start()
        self._owned.wait()
        self.refuse()
        return self

    def __exit__(self, *_: object) -> None:
        self._given_up.set()
        self.join()

    def refuse(self) -> None:
        """Raise what has ended it, if something has.

        Raises:
            BudgetError: The money, or the time, is spent.
            MachineError: Too many machines were lost, or a program failed.
        """
        if self.error is not None:
            raise self.error

    def finish(self, patience: timedelta) -> None:
        """Wait until all programs have ended, and their machines are given back.

        Args:
            patience: Then those that are left are given back all the same.
        """
        self.join(patience.total_seconds())
        self.refuse()

    def _attend(self) -> None:
        try:
            with self._progress, Rental(self._settings, progress=self._progress) as rental:
                self._owned.set()
                rental.until_done(self._given_up)
        except BaseException as error:  # noqa: BLE001 - raised where it is asked for
            self.error = error
        finally:
            self._owned.set()


def nodes_of(rental: str, bucket: Bucket | str, vast: VastCredentials | str) -> Hosts:
    """The machines of a rental that others can bring files to.

    Raises:
        ConfigurationError: A block is missing.
        NotFoundError: No machine of it has an address.
    """
    stand = stand_of(bucket, vast)
    if stand is None:
        raise ConfigurationError("A block is missing: the log says which.")
    machines = [one for one in list_machines(stand) if one.rental == rental]
    found = {
        f"{rental}/{one.attempt.intent.slot}": one.instance.reached_at(IDENTITY)
        for one in machines
        if one.attempt is not None
    }
    hosts = [Host(url=f"http://{where}", name=name) for name, where in found.items() if where]
    if not hosts:
        raise NotFoundError(
            f"None of {count(len(machines), 'machine')} of {rental} can be reached: rent them with "
            f"`ports: [{IDENTITY}]`."
        )
    return Hosts(hosts=tuple(hosts), key=node_key(stand.account, rental))


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
