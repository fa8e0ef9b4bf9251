"""Tasks that rent, list and release machines."""

import contextvars
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from time import monotonic
from typing import Any, ClassVar, Self

from prefect import Flow, State, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRun
from prefect.flows import FlowStateHook
from prefect.logging.loggers import flow_run_logger

from blocks import Bucket, VastCredentials
from millrace.errors import (
    ConfigurationError,
    HeldError,
    MachineError,
    MillraceError,
    NotFoundError,
    format_error,
)
from millrace.progress import Event
from millrace.rentals import (
    IDENTITY_PORT,
    LedgerSettings,
    MachineStatus,
    Offer,
    OwnerMonitor,
    ReapResult,
    Rental,
    RentalSettings,
    VastAccount,
    derive_node_key,
    find_offers,
    has_open_attempts,
    list_attempts,
    list_rentals,
    open_account,
    reap,
    release,
)
from millrace.schemas.rental import ReleaseReason
from millrace.storage import Right, StoreSpec, open_store
from millrace.swarm import Host, Hosts
from tasks.formatting import format_count, make_artifact_key
from tasks.locations import describe_bucket, find_block, find_location, make_store_spec, skip_run
from tasks.progress import RentalProgress
from tasks.reports import (
    Markdown,
    format_code,
    format_markdown,
    format_table,
    join_blocks,
    publish_report,
)
from tasks.retries import RETRY_DELAYS, should_retry

RentalReference = tuple[str, Bucket | str, VastCredentials | str]
"""Name of a rental, the bucket of its ledger, and the credentials of the account that pays."""

_SHOWN = 20  # number of offers in a report
_TAKEOVER_TIMEOUT = 600.0  # seconds in which another owner must have left the rental
_POLL_INTERVAL = 10.0
_MAX_FAILURES = 2  # failures after which a program that never worked is not run again
_SUPERVISOR: contextvars.ContextVar["RentalSupervisor | None"] = contextvars.ContextVar(
    "rental_supervisor", default=None
)


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
        ConfigurationError: Machines are rented, and the block of the account is missing.
    """
    location = find_location(bucket)
    credentials = vast if isinstance(vast, VastCredentials) else find_block(VastCredentials, vast)
    missing = [describe_bucket(bucket)] if location is None else []
    missing += [f"Vast.ai Credentials block {vast}"] if credentials is None else []
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
        return skip_run(missing, "nothing was looked at, and nothing released")
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


@task(
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=should_retry,
)
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


def make_owner_monitor(settings: RentalSettings) -> OwnerMonitor:
    """Return a monitor that releases a rental if this process is killed."""
    return OwnerMonitor(settings.ledger, settings.name)


@task(cache_policy=NO_CACHE)
def start_rental(settings: RentalSettings) -> float:
    """Rent machines, wait until all programs run, and return the cost so far in dollars.

    The machines are then detached. If the caller has a `RentalSupervisor` of the rental, the
    supervisor rents and keeps the machines instead.
    """
    supervisor = _SUPERVISOR.get()
    if supervisor is not None and supervisor.rental_name == settings.name:
        return supervisor.wait_until_ready()
    key = make_artifact_key("progress", "rental", settings.name)
    with (
        RentalProgress(key, settings.machines) as progress,
        make_owner_monitor(settings),
        Rental(settings, detached=True, wait=True, progress=progress) as rental,
    ):
        rental.wait_until_ready()
        return rental.cost


@task(
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=should_retry,
)
def has_unreleased_machines(spec: StoreSpec, rental: str) -> bool:
    """Decide by the ledger whether a machine of a rental is not released."""
    return any(one.release_record is None for one in list_attempts(open_store(spec), rental))


class RentalSupervisor:
    """Owner of a rental, in a thread. It rents, replaces and releases machines.

    Use the supervisor as a context manager around the flow `rent-machines`. The exit releases all
    machines, and returns when a listing shows none.

    Args:
        settings: Settings of the rental. Machines of an owner that was killed are taken over.
        is_proven: Function that tells whether the program has worked on a machine. While it has
            not, the second failure of the program ends the rental.
    """

    _unreleased: ClassVar[set["RentalSupervisor"]] = set()

    def __init__(
        self, settings: RentalSettings, is_proven: Callable[[], bool] = lambda: True
    ) -> None:
        self._settings, self._is_proven = settings, is_proven
        self._failures: list[str] = []
        key = make_artifact_key("progress", "machines", settings.name)
        self._progress = RentalProgress(key, settings.machines)
        self._log = get_run_logger()
        self._stop_requested, self._ready = threading.Event(), threading.Event()
        self._ended = threading.Event()
        self._rental: Rental | None = None
        self._error: BaseException | None = None
        self._token: contextvars.Token[RentalSupervisor | None] | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            name="rental-supervisor", target=context.run, args=(self._run,), daemon=True
        )

    @classmethod
    def has_any_machines(cls) -> bool:
        """Decide whether this process owns a rental whose machines are not released yet."""
        return bool(cls._unreleased)

    @property
    def rental_name(self) -> str:
        """Name of the rental."""
        return self._settings.name

    def __enter__(self) -> Self:
        """Acquire the rental, and rent machines, in the thread."""
        self._token = _SUPERVISOR.set(self)
        self._unreleased.add(self)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._token is not None:
            _SUPERVISOR.reset(self._token)
        self._stop_requested.set()
        interrupt: BaseException | None = None
        while not self._ended.is_set():
            try:
                self._ended.wait()  # after an interrupt, `join` may return while the thread runs
            except BaseException as error:  # noqa: BLE001 - a second Ctrl-C, or SIGTERM
                interrupt = error
                self._log.warning(
                    "Machines are being released: wait. Machines that are not released are billed."
                )
        if interrupt is not None and kind is None:
            raise interrupt

    def wait_until_ready(self) -> float:
        """Wait until all programs run or have ended, and return the cost so far in dollars.

        Raises:
            HeldError: Another owner holds the rental.
            BudgetError, MachineError, NotFoundError: As in `Rental.wait_until_ready`.
        """
        self._ready.wait()
        self.raise_failure()
        return self._rental.cost if self._rental else 0.0

    @property
    def is_over(self) -> bool:
        """True if all programs have ended, or the rental has failed."""
        return not self._thread.is_alive()

    def describe_end(self) -> str:
        """Return the message of the last failed program, or that no program has failed."""
        return "\n".join(self._failures[-1:]) or "The programs ended with exit code 0."

    def raise_failure(self) -> None:
        """Raise the error that has ended the rental, if any."""
        if self._error is not None:
            raise self._error

    def wait_until_done(self, timeout: timedelta) -> None:
        """Wait until all programs have ended, and their machines are released.

        An error of the rental is only logged, because the machines have done their work.

        Args:
            timeout: Longest wait. The exit of the supervisor releases the remaining machines.
        """
        self._ended.wait(timeout.total_seconds())

    def _acquire_rental(self, stack: ExitStack) -> Rental:
        """Acquire the rental; an earlier owner may still be releasing its machines."""
        deadline = monotonic() + _TAKEOVER_TIMEOUT
        while True:
            rental = Rental(self._settings, wait=True, progress=self._handle_event)
            try:
                return stack.enter_context(rental)
            except HeldError as error:
                if monotonic() > deadline or self._stop_requested.wait(_POLL_INTERVAL):
                    raise
                self._log.info("Waiting for the rental: %s", format_error(error))

    def _handle_event(self, event: Event) -> None:
        """Report an event; end the rental if the program failed twice, and never worked."""
        self._progress(event)
        if event.name != "rental.released" or event.figures["reason"] != ReleaseReason.FAILED:
            return
        self._failures.append(str(event.figures["message"]))
        if len(self._failures) < _MAX_FAILURES or self._error is not None:
            return
        try:
            proven = self._is_proven()
        except MillraceError:
            return  # unknown: the next failure decides
        if not proven:
            self._error = MachineError(
                f"The program failed on {len(self._failures)} machines, and has joined the run on "
                f"none. {self._failures[-1]}"
            )
            self._stop_requested.set()

    def _run(self) -> None:
        try:
            with self._progress, make_owner_monitor(self._settings), ExitStack() as stack:
                self._rental = rental = self._acquire_rental(stack)
                rental.wait_until_ready(self._stop_requested)
                self._ready.set()
                rental.wait_until_done(self._stop_requested)
        except BaseException as error:  # noqa: BLE001 - raised by `raise_failure`
            self._error = self._error or error
            self._log.warning("%s: %s", self.rental_name, format_error(error))
        finally:
            self._unreleased.discard(self)
            self._ready.set()
            self._ended.set()


def find_node_hosts(rental: str, bucket: Bucket | str, vast: VastCredentials | str) -> Hosts:
    """Return the machines of a rental as hosts of a swarm.

    Raises:
        ConfigurationError: A block is missing.
        NotFoundError: No machine of the rental has an address.
    """
    ledger = require_ledger(bucket, vast)
    machines = [one for one in fetch_machines(ledger) if one.rental == rental]
    hosts = [
        Host(
            url=f"http://{address}",
            name=f"{rental}/{one.attempt.intent.slot}",
            key=derive_node_key(ledger.account, rental, one.attempt.number),
        )
        for one in machines
        if one.attempt is not None and (address := one.instance.find_address(IDENTITY_PORT))
    ]
    if not hosts:
        raise NotFoundError(
            f"None of {format_count(len(machines), 'machine')} of {rental} has an address: rent "
            f"the machines with `ports: [{IDENTITY_PORT}]`."
        )
    return Hosts(hosts=tuple(hosts))


@task(
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=should_retry,
)
def fetch_machines(ledger: LedgerSettings) -> list[MachineStatus]:
    """Return the machines that this installation has rented."""
    return list_rentals(ledger)


@task(
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=should_retry,
)
def release_rental(ledger: LedgerSettings, rental: str) -> int:
    """Release all machines of a rental."""
    return release(ledger, rental, wait=True)


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
        found = find_rental(flow.validate_parameters(flow_run.parameters))
        if found is None:
            return
        name, bucket, vast = found
        log = flow_run_logger(flow_run, flow)
        ledger = require_ledger(bucket, vast)
        if not list_attempts(open_store(ledger.store), name):
            return
        try:
            released = release(ledger, name, wait=True, include_detached=False)
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


@task(
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=should_retry,
)
def run_reaper(ledger: LedgerSettings, *, dry_run: bool) -> ReapResult:
    """Release machines without a living owner."""
    return reap(ledger, dry_run=dry_run)


@task(cache_policy=NO_CACHE)
def report_rentals(
    headline: str, machines: Iterable[MachineStatus], *, key: str = "rentals"
) -> None:
    """Publish a report of rented machines."""
    columns = ("rental", ">instance", "status", "since", "until", ">$/h", ">dollars", "owner")
    rows = [_make_row(one) for one in machines]
    text = join_blocks(
        format_markdown("{}", headline), format_table(columns, rows) if rows else Markdown()
    )
    publish_report(text, key=key, description="Rented machines")


def _make_row(one: MachineStatus) -> Sequence[object]:
    intent = one.attempt.intent if one.attempt else None
    since = f"{intent.started_at:%Y-%m-%d %H:%M}" if intent else "?"
    until = f"{intent.deadline:%Y-%m-%d %H:%M}" if intent else "?"
    owner = one.release_reason or one.owner or ("detached" if one.attempt else "unreadable label")
    return (
        format_code(one.rental or one.instance.label),
        one.instance.id,
        one.instance.status,
        since,
        until,
        f"{one.instance.dollars_per_hour:.3f}",
        f"{one.cost:.2f}",
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
            f"{one.reliability:.3f}", f"{one.dollars_per_hour:.3f}", f"{one.expected_cost:.2f}",
        )
        for one in found[:_SHOWN]
    ]  # fmt: skip
    columns = (">offer", "GPU", "location", ">reliability", ">$/h", ">dollars in all")
    text = join_blocks(
        format_markdown(
            "**Nothing was rented.** {} of Vast.ai fit {}, which needs {}.",
            format_count(len(found), "offer"), format_code(name), format_count(wanted, "machine"),
        ),
        format_table(columns, rows) if rows else Markdown(),
    )  # fmt: skip
    publish_report(text, key="offers", description="Offers that would be rented")
