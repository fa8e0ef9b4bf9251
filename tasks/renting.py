"""Machines rented, shown, given back."""

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
    one_line,
)
from millrace.progress import Event
from millrace.rentals import (
    IDENTITY,
    Account,
    Offer,
    Reaped,
    Rental,
    RentalGuard,
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
from millrace.schemas.rental import ReturnReason
from millrace.storage import Right, StoreSpec, open_store
from millrace.swarm import Host, Hosts
from tasks.places import block_of, known, named_bucket, skipped, spec_of
from tasks.progress import RentalProgress
from tasks.reports import Markdown, code, document, publish, table, write
from tasks.retries import PAUSES, passing
from tasks.words import artifact_key, format_count

RentedBy = tuple[str, Bucket | str, VastCredentials | str]
"""A rental's name, the bucket where it is written down, and who pays."""

_SHOWN = 20  # offers in a report
_OTHERS = 600.0  # seconds that somebody else may have what is to be attended
_LOOK = 10.0
_FAILURES = 2  # programs that fail before any has worked: then the next would fail, too
_ATTENDED: contextvars.ContextVar["Attended | None"] = contextvars.ContextVar(
    "attended", default=None
)


def account_of(credentials: VastCredentials) -> Account:
    """Return the account of a block."""
    return Account(api_key=credentials.api_key, server_url=credentials.server_url)


def payer_of(vast: VastCredentials | str) -> VastCredentials:
    """Return the block that pays.

    Raises:
        ConfigurationError: There is none of this name.
    """
    found = vast if isinstance(vast, VastCredentials) else block_of(VastCredentials, vast)
    if found is None:
        raise ConfigurationError(
            f"There is no Vast.ai Credentials block {vast}: make it with `millrace setup`."
        )
    return found


def stand_of(bucket: Bucket | str, vast: VastCredentials | str) -> StandSettings | State[None]:
    """Return where rentals are written down and who pays, as far as both blocks exist.

    Returns:
        The settings, or the state of a run that does nothing for want of a block.

    Raises:
        ConfigurationError: Something is rented, and the block of who pays is not there.
    """
    place = known(bucket)
    payer = vast if isinstance(vast, VastCredentials) else block_of(VastCredentials, vast)
    missing = [named_bucket(bucket)] if place is None else []
    missing += [f"Vast.ai Credentials block {vast}"] if payer is None else []
    if place is not None and payer is None and is_rented(spec_of(place, Right.WRITE)):
        raise ConfigurationError(
            f"There is no Vast.ai Credentials block {vast}, and by {bucket} machines are rented: "
            "nobody can give them back. Make the block, with the API key that has rented them."
        )
    if place is None or payer is None:
        return skipped(missing, "nothing was looked at, and nothing given back")
    return StandSettings(store=spec_of(place, Right.WRITE), account=account_of(payer))


def needed_stand(bucket: Bucket | str, vast: VastCredentials | str) -> StandSettings:
    """As `stand_of`, where both blocks have to be there.

    Raises:
        ConfigurationError: One is not.
    """
    store = spec_of(bucket, Right.WRITE)
    return StandSettings(store=store, account=account_of(payer_of(vast)))


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def look_for_offers(settings: RentSettings) -> list[Offer]:
    """Return the offers that would be rented. Rents nothing."""
    found = find_offers(account(settings.account), settings.wanted)
    report_offers(settings.name, settings.count, found)
    if len(found) < settings.count:
        raise NotFoundError(
            f"Vast.ai has {format_count(len(found), 'offer')} that fit {settings.name}, which "
            f"needs {settings.count}: ask for less, or grant more dollars an hour."
        )
    return found


def guard_of(settings: RentSettings) -> RentalGuard:
    """Return what gives a rental back should this process be killed, by its worker or otherwise."""
    return RentalGuard(StandSettings(store=settings.store, account=settings.account), settings.name)


@task(cache_policy=NO_CACHE)
def rent_machines(settings: RentSettings) -> float:
    """Rent machines, and wait until all of their programs run; dollars so far.

    They are left then, unless the caller attends them.
    """
    attended = _ATTENDED.get()
    if attended is not None and attended.rental == settings.name:
        return attended.until_ready()
    key = artifact_key("progress", "rental", settings.name)
    with (
        RentalProgress(key, settings.count) as progress,
        guard_of(settings),
        Rental(settings, detached=True, wait=True, progress=progress) as rental,
    ):
        rental.until_ready()
        return rental.cost


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def is_out(place: StoreSpec, rental: str) -> bool:
    """Tell whether a machine of a rental has not come back, as far as is written down."""
    return any(one.returned is None for one in attempts_of(open_store(place), rental))


class Attended:
    """Owns the machines of a rental: rents them, replaces what is lost, counts, and gives back.

    Use it as a context, with `rent_machines` in it: leaving it gives all back, and returns when a
    listing shows none. One owner from the first machine to the last: nobody but it leaves any.

    Args:
        settings: What is rented; machines of an owner that was killed are gone on with.
        proven: Whether a program of them is known to work. While none is, the second one that
            fails ends the rental: its command is wrong, on whatever machine.
    """

    _living: ClassVar[set["Attended"]] = set()

    def __init__(self, settings: RentSettings, proven: Callable[[], bool] = lambda: True) -> None:
        self._settings, self._proven = settings, proven
        self._failed: list[str] = []
        key = artifact_key("progress", "attended", settings.name)
        self._progress = RentalProgress(key, settings.count)
        self._log = get_run_logger()
        self._given_up, self._ready = threading.Event(), threading.Event()
        self._over = threading.Event()
        self._rental: Rental | None = None
        self._error: BaseException | None = None
        self._token: contextvars.Token[Attended | None] | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            name="attended", target=context.run, args=(self._attend,), daemon=True
        )

    @classmethod
    def any_has_machines(cls) -> bool:
        """Tell whether this process owns a rental that is not given back yet."""
        return bool(cls._living)

    @property
    def rental(self) -> str:
        """The rental's name."""
        return self._settings.name

    def __enter__(self) -> Self:
        """Begin to own, and to rent."""
        self._token = _ATTENDED.set(self)
        self._living.add(self)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._token is not None:
            _ATTENDED.reset(self._token)
        self._given_up.set()
        interrupt: BaseException | None = None
        while not self._over.is_set():
            try:
                self._over.wait()  # not `join`, which an interrupt makes take a thread for ended
            except BaseException as error:  # noqa: BLE001 - a second Ctrl-C, or SIGTERM
                interrupt = error
                self._log.warning("Machines are being given back: wait, or they are billed on.")
        if interrupt is not None and kind is None:
            raise interrupt

    def until_ready(self) -> float:
        """Wait until all programs run, or have ended; dollars so far.

        Raises:
            HeldError: Somebody else has the rental.
            BudgetError, MachineError, NotFoundError: As of `Rental.until_ready`.
        """
        self._ready.wait()
        self.refuse()
        return self._rental.cost if self._rental else 0.0

    @property
    def over(self) -> bool:
        """True if all programs have ended, or the rental has."""
        return not self._thread.is_alive()

    def last_words(self) -> str:
        """Return what is known of how the programs ended."""
        return "\n".join(self._failed[-1:]) or "The programs ended with 0."

    def refuse(self) -> None:
        """Raise what has ended it, if something has."""
        if self._error is not None:
            raise self._error

    def finish(self, patience: timedelta) -> None:
        """Wait until all programs have ended, and their machines are given back.

        What ended it otherwise is said, and no more: they have done what they were rented for.

        Args:
            patience: Then those that are left are given back all the same.
        """
        self._over.wait(patience.total_seconds())

    def _owned(self, stack: ExitStack) -> Rental:
        """Own the rental: who still has it may be giving back what a run before this one rented."""
        deadline = monotonic() + _OTHERS
        while True:
            rental = Rental(self._settings, wait=True, progress=self._hear)
            try:
                return stack.enter_context(rental)
            except HeldError as error:
                if monotonic() > deadline or self._given_up.wait(_LOOK):
                    raise
                self._log.info("%s is waited for: %s", self.rental, one_line(error))

    def _hear(self, event: Event) -> None:
        """Listen to the rental: end it when programs fail of which none has ever worked."""
        self._progress(event)
        if event.name != "rental.returned" or event.figures["why"] != ReturnReason.FAILED:
            return
        self._failed.append(str(event.figures["said"]))
        if len(self._failed) < _FAILURES or self._error is not None:
            return
        try:
            proven = self._proven()
        except MillraceError:
            return  # not known: the next failure tells
        if not proven:
            self._error = MachineError(
                f"On {len(self._failed)} machines the program failed, and on none has it joined "
                f"the run. {self._failed[-1]}"
            )
            self._given_up.set()

    def _attend(self) -> None:
        try:
            with self._progress, guard_of(self._settings), ExitStack() as stack:
                self._rental = rental = self._owned(stack)
                rental.until_ready(self._given_up)
                self._ready.set()
                rental.until_done(self._given_up)
        except BaseException as error:  # noqa: BLE001 - raised where it is asked for
            self._error = self._error or error
            self._log.warning("%s: %s", self.rental, one_line(error))
        finally:
            self._living.discard(self)
            self._ready.set()
            self._over.set()


def nodes_of(rental: str, bucket: Bucket | str, vast: VastCredentials | str) -> Hosts:
    """Return the machines of a rental that others can bring files to.

    Raises:
        ConfigurationError: A block is missing.
        NotFoundError: No machine of it has an address.
    """
    stand = needed_stand(bucket, vast)
    machines = [one for one in list_machines(stand) if one.rental == rental]
    hosts = [
        Host(
            url=f"http://{where}",
            name=f"{rental}/{one.attempt.intent.slot}",
            key=node_key(stand.account, rental, one.attempt.number),
        )
        for one in machines
        if one.attempt is not None and (where := one.instance.reached_at(IDENTITY))
    ]
    if not hosts:
        raise NotFoundError(
            f"None of {format_count(len(machines), 'machine')} of {rental} can be reached: rent "
            f"them with `ports: [{IDENTITY}]`."
        )
    return Hosts(hosts=tuple(hosts))


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def list_machines(stand: StandSettings) -> list[Rented]:
    """List what is rented by this installation."""
    return list_rentals(stand)


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def release_machines(stand: StandSettings, rental: str) -> int:
    """Give back all machines of a rental."""
    return release(stand, rental, wait=True)


def giving_back(rented: Callable[[dict[str, Any]], RentedBy | None]) -> FlowStateHook[..., Any]:
    """Return a hook for `on_crashed` and `on_cancellation`: it gives back what a flow has rented.

    A flow does that by itself in every way out of it. This is for a deployment's whose process was
    killed: its worker does it. What was left to work stays; what somebody has gone on with is his.

    Args:
        rented: What is rented, by the flow's parameters; None if nothing is.
    """

    def give_back(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
        if flow_run.deployment_id is None:  # no worker has run it; perhaps another flow, that owns
            return
        found = rented(flow.validate_parameters(flow_run.parameters))
        if found is None:
            return
        name, bucket, vast = found
        log = flow_run_logger(flow_run, flow)
        stand = needed_stand(bucket, vast)
        if not attempts_of(open_store(stand.store), name):
            return
        try:
            returned = release(stand, name, wait=True, left=False)
        except HeldError as error:
            log.info("Nothing of %s is given back, it is gone on with: %s", name, one_line(error))
            return
        if returned:  # else it had given all back by itself
            log.info("%s of %s given back.", format_count(returned, "machine"), name)

    return give_back


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def reap_machines(stand: StandSettings, *, dry_run: bool) -> Reaped:
    """Give back what has no living owner."""
    return reap(stand, dry_run=dry_run)


@task(cache_policy=NO_CACHE)
def report_rentals(headline: str, machines: Iterable[Rented], *, key: str = "rentals") -> None:
    """Leave a report that a person wants to read."""
    columns = ("rental", ">instance", "status", "since", "until", ">$/h", ">dollars", "owner")
    rows = [_row(one) for one in machines]
    text = document(write("{}", headline), table(columns, rows) if rows else Markdown())
    publish(text, key=key, description="Rented machines")


def _row(one: Rented) -> Sequence[object]:
    intent = one.attempt.intent if one.attempt else None
    since = f"{intent.begun:%Y-%m-%d %H:%M}" if intent else "?"
    until = f"{intent.until:%Y-%m-%d %H:%M}" if intent else "?"
    who = one.why or one.owner or ("left until then" if one.attempt else "not understood")
    return (
        code(one.rental or one.instance.label),
        one.instance.id,
        one.instance.status,
        since,
        until,
        f"{one.instance.dph:.3f}",
        f"{one.cost:.2f}",
        who,
    )


def report_offers(name: str, wanted: int, found: Sequence[Offer]) -> None:
    """Leave a report of what would be rented.

    Args:
        name: The rental's.
        wanted: Machines that it needs.
        found: Offers that fit, the cheapest first.
    """
    rows = [
        (
            one.id, f"{one.gpus} x {one.gpu}, {one.gpu_memory:.0f} GB", one.place,
            f"{one.reliability:.3f}", f"{one.dph:.3f}", f"{one.total:.2f}",
        )
        for one in found[:_SHOWN]
    ]  # fmt: skip
    columns = (">offer", "GPU", "place", ">reliability", ">$/h", ">dollars in all")
    text = document(
        write(
            "**Nothing was rented.** {} of Vast.ai fit {}, of which it needs {}.",
            format_count(len(found), "offer"), code(name), wanted,
        ),
        table(columns, rows) if rows else Markdown(),
    )  # fmt: skip
    publish(text, key="offers", description="Offers that would be rented")
