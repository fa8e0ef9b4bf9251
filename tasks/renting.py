"""Tasks that rent, list and release machines."""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, timedelta
from typing import Any, NamedTuple

from prefect import Flow, State, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRun
from prefect.flows import FlowStateHook
from prefect.logging.loggers import flow_run_logger

from blocks import Bucket, VastCredentials
from millrace import rentals
from millrace.errors import (
    ConfigurationError,
    HeldError,
    NotFoundError,
    format_error,
)
from millrace.rentals import (
    IDENTITY_PORT,
    LedgerSettings,
    MachineStatus,
    Offer,
    OwnerMonitor,
    ReapResult,
    Rental,
    RentalSettings,
    RentalSupervisor,
    VastAccount,
    derive_node_key,
    find_offers,
    has_open_attempts,
    list_attempts,
    list_rentals,
    open_account,
    reap,
)
from millrace.storage import Right, open_store
from millrace.swarm import Host, Hosts
from tasks.formatting import format_count, make_artifact_key
from tasks.locations import find_block, find_location, make_store_spec, may_skip, skip_run
from tasks.progress import RentalProgress
from tasks.reports import (
    Markdown,
    format_code,
    format_markdown,
    format_table,
    join_blocks,
    publish_report,
)
from tasks.retries import retried_task

_SHOWN = 20  # number of offers in a report


class RentalReference(NamedTuple):
    """Rental of a run.

    Attributes:
        name: Name of the rental.
        bucket: Bucket of its ledger.
        vast: Credentials of the account that pays.
    """

    name: str
    bucket: Bucket | str
    vast: VastCredentials | str


def make_account(credentials: VastCredentials) -> VastAccount:
    """Return the account of a block."""
    return VastAccount(api_key=credentials.api_key, server_url=credentials.server_url)


def require_credentials(vast: VastCredentials | str) -> VastCredentials:
    """Return the credentials of the account that pays.

    Raises:
        ConfigurationError: There is no block of this name.
    """
    found = vast if isinstance(vast, VastCredentials) else find_block(VastCredentials, vast)
    if found is None:
        raise ConfigurationError(
            f"There is no Vast.ai Credentials block {vast}: create it with `millrace setup`."
        )
    return found


def find_ledger(bucket: Bucket | str, vast: VastCredentials | str) -> LedgerSettings | State[None]:
    """Return the ledger of rentals and the account that pays, if both blocks exist.

    Returns:
        The settings, or the state of a run that does nothing because a block is missing.

    Raises:
        ConfigurationError: Machines are rented, and the block of the account is missing; or a
            person has named a block that does not exist.
    """
    location = find_location(bucket)
    credentials = vast if isinstance(vast, VastCredentials) else find_block(VastCredentials, vast)
    if (
        location is not None
        and credentials is None
        and has_open_attempts(make_store_spec(location, Right.WRITE))
    ):
        raise ConfigurationError(
            f"There is no Vast.ai Credentials block {vast}, but the ledger in {bucket} has rented "
            "machines: create the block with the API key of the account that pays, so that the "
            "machines can be released."
        )
    if location is None or credentials is None:
        missing = [vast] if credentials is None else []
        if not all(map(may_skip, missing)):
            return require_ledger(bucket, vast)
        return skip_run(
            [bucket] if location is None else [],
            "nothing was looked at, and nothing released",
            [f"Vast.ai Credentials block {name}" for name in missing],
        )
    return LedgerSettings(
        store=make_store_spec(location, Right.WRITE), account=make_account(credentials)
    )


def require_ledger(bucket: Bucket | str, vast: VastCredentials | str) -> LedgerSettings:
    """Return the ledger of rentals and the account that pays.

    Raises:
        ConfigurationError: A block is missing.
    """
    store = make_store_spec(bucket, Right.WRITE)
    return LedgerSettings(store=store, account=make_account(require_credentials(vast)))


@retried_task
def search_offers(settings: RentalSettings) -> list[Offer]:
    """Return the offers that would be rented. Rents nothing."""
    found = find_offers(open_account(settings.account), settings.effective_request)
    report_offers(settings.name, settings.machines, found)
    if len(found) < settings.machines:
        raise NotFoundError(
            f"Vast.ai has {format_count(len(found), 'offer')} that fit {settings.name}, which "
            f"needs {settings.machines}: ask for less, or raise max_hourly."
        )
    return found


@task(cache_policy=NO_CACHE)
def start_rental(settings: RentalSettings) -> float:
    """Rent machines, wait until all programs run, and return the cost so far in dollars.

    The machines are then detached.
    """
    key = make_artifact_key("progress", "rental", settings.name)
    with (
        RentalProgress(key, settings.machines) as progress,
        OwnerMonitor(settings.ledger, settings.name),
        Rental(settings, detached=True, wait=True, progress=progress) as rental,
    ):
        rental.wait_until_ready()
        return rental.cost


def make_supervisor(
    settings: RentalSettings,
    is_proven: Callable[[], bool] = lambda: True,
    *,
    quorum: int | None = None,
    ready_timeout: timedelta | None = None,
) -> RentalSupervisor:
    """Return the supervisor of a rental. The progress is shown in the run that calls this function.

    Programs that ended under an earlier owner run again: their work is not done.

    Args:
        settings: Settings of the rental.
        is_proven: Function that decides whether the program is known to work.
        quorum: Number of machines that are enough; by default all.
        ready_timeout: Longest wait for more machines than the quorum.
    """
    key = make_artifact_key("progress", "machines", settings.name)
    progress = RentalProgress(key, settings.machines)
    return RentalSupervisor(
        settings,
        is_proven,
        repeat=True,
        quorum=quorum,
        ready_timeout=ready_timeout,
        progress=progress,
    )


@task(cache_policy=NO_CACHE)
def await_rental(rental: RentalSupervisor) -> float:
    """Wait until all programs of a supervised rental run; return the cost so far in dollars."""
    rental.wait_until_ready()
    return rental.cost


def find_node_hosts(rental: str, bucket: Bucket | str, vast: VastCredentials | str) -> Hosts:
    """Return the machines of a rental as hosts of a swarm.

    Raises:
        ConfigurationError: A block is missing.
        NotFoundError: No machine of the rental has an address.
    """
    ledger = require_ledger(bucket, vast)
    machines = [one for one in fetch_machines(ledger) if one.rental == rental]
    hosts: dict[int, Host] = {}  # by slot: a lost machine may still be listed beside the next one
    for one in sorted(machines, key=lambda one: one.attempt.number if one.attempt else -1):
        address = one.instance.find_address(IDENTITY_PORT)
        if one.attempt is not None and not one.is_mislabeled and address:
            hosts[one.attempt.intent.slot] = Host(
                url=f"http://{address}",
                name=f"{rental}/{one.attempt.intent.slot}",
                key=derive_node_key(ledger.account, rental, one.attempt.number),
            )
    if not hosts:
        raise NotFoundError(
            f"None of {format_count(len(machines), 'machine')} of {rental} has an address: rent "
            f"the machines with `ports: [{IDENTITY_PORT}]`."
        )
    return Hosts(hosts=tuple(hosts[slot] for slot in sorted(hosts)))


@retried_task
def fetch_machines(ledger: LedgerSettings) -> list[MachineStatus]:
    """Return the machines that this installation has rented."""
    return list_rentals(ledger)


@retried_task
def release_rental(ledger: LedgerSettings, rental: str) -> int:
    """Release all machines of a rental."""
    return rentals.release_rental(ledger, rental, wait=True)


def make_release_hook(
    find_rental: Callable[[dict[str, Any]], RentalReference | None],
) -> FlowStateHook[..., Any]:
    """Return a hook for `on_crashed` and `on_cancellation` that releases a flow's machines.

    A flow releases its machines itself on every exit. If the process of a deployment's run was
    killed, the Prefect worker runs the hook. Detached machines stay. Machines that another owner
    has taken over stay, too.

    Args:
        find_rental: Function that returns the rental of a run from the flow's parameters, or None
            if the run rents nothing.
    """

    def release_on_end(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
        if flow_run.deployment_id is None:  # another flow may own the machines
            return
        rental = find_rental(flow.validate_parameters(flow_run.parameters))
        if rental is None:
            return
        name = rental.name
        log = flow_run_logger(flow_run, flow)
        ledger = require_ledger(rental.bucket, rental.vast)
        if not list_attempts(open_store(ledger.store), name):
            return
        try:
            released = rentals.release_rental(ledger, name, wait=True, include_detached=False)
        except HeldError as error:
            log.info(
                "No machine of %s was released, because another owner has the rental: %s",
                name,
                format_error(error),
            )
            return
        if released:  # otherwise, the flow has released all machines itself
            log.info("%s of %s released.", format_count(released, "machine"), name)

    return release_on_end


@retried_task
def run_reaper(ledger: LedgerSettings, *, dry_run: bool) -> ReapResult:
    """Release machines without a living owner."""
    return reap(ledger, dry_run=dry_run)


@task(cache_policy=NO_CACHE)
def report_rentals(
    headline: str, machines: Iterable[MachineStatus], *, key: str = "rentals"
) -> None:
    """Publish a report of rented machines."""
    times = ("Since (UTC)", "Until (UTC)")
    columns = ("Rental", ">Instance", "Status", *times, ">$/h", ">Cost", "Owner")
    rows = [_make_row(one) for one in machines]
    text = join_blocks(
        format_markdown("{}", headline), format_table(columns, rows) if rows else Markdown()
    )
    publish_report(text, key=key, description="Rented machines")


def _make_row(one: MachineStatus) -> Sequence[object]:
    since = until = "?"
    if one.attempt is not None:
        times = one.attempt.intent.started_at, one.attempt.deadline
        since, until = (f"{time.astimezone(UTC):%d %b %H:%M}" for time in times)
    owner = one.release_reason or one.owner or ("detached" if one.rental else "unknown label")
    return (
        format_code(one.rental or one.instance.label),
        one.instance.id,
        one.instance.status,
        since,
        until,
        f"{one.instance.dollars_per_hour:.3f}",
        f"${one.cost:.2f}",
        owner,
    )


def report_offers(name: str, wanted: int, found: Sequence[Offer]) -> None:
    """Publish a report of the offers that would be rented.

    Args:
        name: Name of the rental.
        wanted: Number of machines that the rental needs.
        found: Matching offers, the cheapest first.
    """
    rows = [
        (
            one.id, f"{one.gpus} x {one.gpu}, {one.gpu_memory:.0f} GB", one.location,
            f"{one.reliability:.3f}", f"{one.dollars_per_hour:.3f}", f"${one.expected_cost:.2f}",
        )
        for one in found[:_SHOWN]
    ]  # fmt: skip
    columns = (">Offer", "GPU", "Location", ">Reliability", ">$/h", ">Expected cost")
    text = join_blocks(
        format_markdown(
            "**Nothing was rented.** {} of Vast.ai fit {}, which needs {}.",
            format_count(len(found), "offer"), format_code(name), format_count(wanted, "machine"),
        ),
        format_table(columns, rows) if rows else Markdown(),
    )  # fmt: skip
    publish_report(text, key="offers", description="Offers that would be rented")
