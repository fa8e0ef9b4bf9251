"""Rent machines, supervise them, and give them back, also after crashes.

The order of the steps makes renting safe. An intent with a unique label is committed before a
create request is sent, and a create request is sent once. After a lost answer, every poll searches
the listing for the label. A machine that appears is adopted, or given back if its slot is taken.
A machine counts as given back once a listing of all machines lacks its label. From the records of a
killed owner, the next owner or the reaper continues.
"""

import contextlib
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from types import TracebackType

from millrace import errors
from millrace.keys.rentals import MachineKeys, RentalKeys
from millrace.lease import Lease
from millrace.progress import Event, Progress, ignore_event
from millrace.records import commit_once
from millrace.rentals.destroy import LISTING_LAG, destroy_machines, record_return
from millrace.rentals.labels import Label
from millrace.rentals.ledger import (
    Attempt,
    ensure_installation,
    list_attempts,
    refuse_foreign_machines,
)
from millrace.rentals.offers import MAX_LIFETIME, Offer, find_offers
from millrace.rentals.ownership import OwnerHeartbeat, acquire_ownership
from millrace.rentals.reports import MachineReports, extract_error
from millrace.rentals.settings import RentalSettings, open_account
from millrace.rentals.startup import make_environment, read_onstart_script, upload_files
from millrace.rentals.vast.api import CreatedInstance, VastClient
from millrace.rentals.vast.instances import Instance
from millrace.schemas.rental import Contract, DetachRecord, Intent, ReturnReason
from millrace.storage import Store, delete, open_store

_EXCLUDING_REASONS = {
    ReturnReason.DEAD,
    ReturnReason.OUTBID,
    ReturnReason.DEARER,
}  # reasons after which a host is not rented again
_SUPERSEDED_MESSAGE = "Another process has gone on with {}, and has its machines: this one ends."
_MAX_UNANSWERED_CREATES = 3  # consecutive creates without a machine, before pauses begin
_MAX_CREATE_PAUSE = 960.0  # seconds; the pause starts at 60 seconds, and doubles each time
_LISTING_TIMEOUT = (
    180.0  # seconds in which the listing may lack a machine whose create was answered
)
_RETRY_INTERVAL = 60.0  # seconds until the next try to replace a lost machine
_OFFERS_MAX_AGE = 60.0  # seconds in which the offers of a search are used
_MAX_EQUAL_SETUP_ERRORS = 2  # equal installation errors, after which no machine is rented
_PRICE_TOLERANCE = 1.1  # a price above this multiple of the offered price is reported
_TRAFFIC_ALLOWANCE = 10e9  # bytes that a machine of any age may claim to have transferred
_RETURN_RESERVE = timedelta(minutes=2)  # time to give all machines back, whose cost is reserved


@dataclass(slots=True)
class Machine:
    """Rented machine.

    Attributes:
        attempt: Attempt that rented the machine.
        reports: Reports of the machine.
        rented_at: Time by `Clock.monotonic` when the machine was rented, or taken over.
        last_report_at: Time of the last report.
        instance: Machine in the last listing; None before the first.
        is_ready: Whether the program runs.
        reported_price: Raised price that was last reported, in dollars an hour.
    """

    attempt: Attempt
    reports: MachineReports
    rented_at: float
    last_report_at: float
    instance: Instance | None = None
    is_ready: bool = False
    reported_price: float = 0.0

    @property
    def slot(self) -> int:
        """Number of the machine within its rental."""
        return self.attempt.intent.slot

    @property
    def is_unconfirmed(self) -> bool:
        """True if its create request got no answer, and no listing has shown the machine."""
        return self.attempt.contract is None

    @property
    def hourly_price(self) -> float:
        """Price in dollars an hour: that of the intent, or the current price if that is higher."""
        return max(self.attempt.intent.dph, self.instance.hourly_price if self.instance else 0.0)

    def compute_cost(self, now: datetime) -> float:
        """Compute the dollars that the machine has cost."""
        heartbeat = self.reports.heartbeat
        received, sent = (heartbeat.received, heartbeat.sent) if heartbeat else (0, 0)
        return self.attempt.compute_cost(
            now, hourly_price=self.hourly_price, received_bytes=received, sent_bytes=sent
        )


@dataclass(frozen=True, slots=True)
class _ReturnDecision:
    """Reason to give a machine back.

    Attributes:
        reason: Kind of the reason.
        detail: Reason in words.
        setup_error: Error of the installation, if that failed.
    """

    reason: ReturnReason
    detail: str
    setup_error: str = ""


class Rental:
    """Machines that are rented for one purpose. A context manager.

    Entering acquires the rental, and takes over the machines of a lost owner. Leaving gives all
    machines back.

    Args:
        settings: Settings of the rental.
        detached: Whether leaving detaches the machines. Each then stays until its deadline, or
            until `release`.
        wait: Whether to wait, if there seems to be an owner, until that renews its lease or the
            lease expires.
        vast: Client of the account; by default that of the settings.
        progress: Receives ``rental.offer``, ``rental.rented``, ``rental.ready``,
            ``rental.returned``, ``rental.missing`` with ``why``, ``rental.raised`` with the prices
            ``offered`` and ``dph``, and ``machine.printed``, each with the machine as its subject.
            Also receives ``rental.cost`` with the ``dollars`` so far.
    """

    def __init__(
        self,
        settings: RentalSettings,
        *,
        detached: bool = False,
        wait: bool = False,
        vast: VastClient | None = None,
        progress: Progress = ignore_event,
    ) -> None:
        self.settings = settings
        self._detached, self._wait, self._progress = detached, wait, progress
        self._keys = RentalKeys(settings.name)
        self._store: Store = open_store(settings.store)
        self._vast = vast or open_account(settings.account)
        self._clock = self._vast.clock
        self._machines: dict[int, Machine] = {}
        self._done: dict[int, Machine] = {}
        self._excluded_machine_ids: set[int] = set()
        self._attempts_by_slot: dict[int, int] = {}
        self._costs_by_attempt: dict[int, float] = {}
        self._proven_slots: set[int] = set()
        self._unconfirmed: dict[int, Machine] = {}  # machines whose create requests got no answer
        self._returned: dict[int, Machine] = {}  # machines with a return record
        self._unanswered_creates = 0  # consecutive creates
        self._creates_resume_at = 0.0  # time of the next create, by `Clock.monotonic`
        self._setup_errors: list[str] = []  # errors of failed installations
        self._loss_details: dict[
            int, str
        ] = {}  # reason why the last machine of a slot was given back
        self._retry_at: dict[int, float] = {}
        self._cached_offers: list[Offer] = []
        self._searched_at = 0.0
        self._installation = ""
        self._lease: Lease | None = None
        self._owner_heartbeat: OwnerHeartbeat | None = None
        self._is_superseded = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Rental":
        """Acquire the rental, and take over its machines.

        Raises:
            ConfigurationError: Another account pays for machines of this rental.
            HeldError: The rental has another owner.
        """
        with contextlib.ExitStack() as stack:
            self._lease = acquire_ownership(self._store, self._keys, stack, wait=self._wait)
            self._owner_heartbeat = OwnerHeartbeat(
                self._store, self._keys, self.settings.heartbeat_timeout
            )
            stack.enter_context(self._owner_heartbeat)
            self._installation = ensure_installation(self._store)
            self._take_over()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        with self._stack:
            if self._is_superseded:
                return  # the new owner has the machines
            if not self._detached or kind is not None:
                self.release()
            elif self._owner_heartbeat is not None:
                self._owner_heartbeat.detach()
                for machine in self.machines:
                    detached_key = self._keys.detached(machine.attempt.number)
                    commit_once(self._store, detached_key, DetachRecord(at=self._clock.now()))
                self._return_machines(self._find_unclaimed())

    @property
    def machines(self) -> tuple[Machine, ...]:
        """Machines that are rented now, in the order of their slots."""
        return tuple(self._machines[slot] for slot in sorted(self._machines))

    @property
    def cost(self) -> float:
        """Dollars that all machines have cost, including those that were given back."""
        now = self._clock.now()
        return sum(self._costs_by_attempt.values()) + sum(
            one.compute_cost(now) for one in self._machines.values()
        )

    def wait_until_ready(self, stop: threading.Event | None = None) -> tuple[Machine, ...]:
        """Rent the missing machines, and wait until every program runs or has ended.

        Args:
            stop: Event that ends the wait, as in `wait_until_done`.

        Raises:
            BudgetError: The money or the time is spent. All machines were given back.
            MachineError: Too many machines did not start, or a program failed.
            NotFoundError: No offer fits.
        """
        self._poll_until(lambda: all(one.is_ready for one in self._machines.values()), stop)
        return self.machines

    def wait_until_done(self, stop: threading.Event | None = None) -> None:
        """Rent the missing machines, and wait until every program has ended with exit code 0.

        Args:
            stop: Event that ends the wait at the next poll, when another thread sets it.

        Raises:
            BudgetError, MachineError, NotFoundError: As in `wait_until_ready`.
        """
        self._poll_until(lambda: not self._machines, stop)

    def release(self) -> None:
        """Give all machines back, and wait until a listing shows none.

        Raises:
            UnavailableError: Some machines may still exist. The reaper gives them back.
        """
        decision = _ReturnDecision(ReturnReason.RELEASED, "the rental is over")
        self._return_machines(
            [*((one, decision) for one in self.machines), *self._find_unclaimed()]
        )

    def _find_unclaimed(self) -> list[tuple[Machine, _ReturnDecision]]:
        """Return the machines without a slot that are to be given back, after one more listing."""
        if not self._unconfirmed:
            return []
        listed = self._find_late_machines(self._list_instances() or [], adopt=False)
        never_listed = _ReturnDecision(
            ReturnReason.NEVER, "its create was not answered, and no listing has shown it"
        )
        return [*listed, *((one, never_listed) for one in self._unconfirmed.values())]

    def _poll_until(
        self, is_complete: Callable[[], bool], stop: threading.Event | None = None
    ) -> None:
        stop = stop or threading.Event()
        while not stop.is_set():
            self._poll_machines()
            missing = [
                slot for slot in range(self.settings.machines)
                if slot not in self._machines and slot not in self._done
            ]  # fmt: skip
            for slot in missing:
                if not stop.is_set():
                    self._fill_slot(slot)
            missing = [slot for slot in missing if slot not in self._machines]
            if not missing and is_complete():
                return
            self._clock.sleep(self.settings.poll_interval.total_seconds())

    def _fill_slot(self, slot: int) -> None:
        """Rent a machine for a slot. A failure is only reported while other machines run."""
        if self._machines and self._clock.monotonic() < self._retry_at.get(slot, 0.0):
            return
        if self._machines and self._setup_errors and not self._proven_slots:
            return  # first, the other machines show whether the program can be installed
        try:
            self._rent_machine(slot)
        except (errors.UnavailableError, errors.NotFoundError, errors.MachineError) as error:
            is_transient = isinstance(error, errors.UnavailableError)
            if not self._machines or not (is_transient or slot in self._proven_slots):
                raise
            now = self._clock.monotonic()
            self._retry_at[slot] = (
                max(now, self._creates_resume_at) if is_transient else now + _RETRY_INTERVAL
            )
            figures = {"why": errors.format_error(error)}
            self._progress(Event("rental.missing", f"{self.settings.name}/{slot}", figures))

    def _poll_machines(self) -> None:
        """Check all machines; give back those that failed, ended or have no slot."""
        with contextlib.suppress(errors.UnavailableError):  # an unreadable lease is not a lost one
            self._refuse_if_superseded()
        self._enforce_budget()
        instances = self._list_instances()
        to_return = self._find_late_machines(instances or [], adopt=True)
        for machine in self.machines:
            decision = self._assess_machine(machine, instances)
            if decision is not None and decision.reason is ReturnReason.NEVER:
                self._free_slot(machine)
            elif decision is not None:
                to_return.append((machine, decision))
        self._return_machines(to_return)
        dollars = {"dollars": round(self.cost, 6)}
        self._progress(Event("rental.cost", self.settings.name, dollars))
        for machine, decision in to_return:
            if decision.reason is ReturnReason.RELEASED:
                continue  # another machine has its slot
            if decision.reason is ReturnReason.FAILED and not self.settings.retry_failed:
                raise errors.MachineError(decision.detail)
            if decision.reason is ReturnReason.DONE:
                self._done[machine.slot] = machine
                continue
            if decision.setup_error:
                self._setup_errors.append(decision.setup_error)
            self._excluded_machine_ids.add(machine.attempt.intent.machine)
            self._loss_details[machine.slot] = decision.detail
            if machine.is_ready and decision.reason is not ReturnReason.FAILED:
                self._attempts_by_slot.pop(machine.slot, None)  # a used machine does not count
        self._refuse_uninstallable()

    def _refuse_uninstallable(self) -> None:
        """Stop renting if the installation fails equally on two machines, and never succeeded.

        Raises:
            MachineError: The installation cannot succeed.
        """
        counts = Counter(re.sub(r"[0-9a-f]{7,}|\d+", "", fault) for fault in self._setup_errors)
        if self._proven_slots or not counts or max(counts.values()) < _MAX_EQUAL_SETUP_ERRORS:
            return
        raise errors.MachineError(
            f"The program of {self.settings.name} cannot be installed: it failed alike on "
            f"{_MAX_EQUAL_SETUP_ERRORS} machines: {self._setup_errors[-1].rstrip('.')}. Change "
            "repo_url, repo_ref, extras or image, and start again."
        )

    def _list_instances(self) -> list[Instance] | None:
        """List the machines of the account; None if the listing cannot be read."""
        try:
            return self._vast.list_instances()
        except (errors.DeniedError, errors.UnavailableError):
            return None  # unknown, not empty

    def _find_late_machines(
        self, instances: list[Instance], *, adopt: bool
    ) -> list[tuple[Machine, _ReturnDecision]]:
        """Find the machines in a listing that have no slot.

        Args:
            instances: Listing of the account.
            adopt: Whether a machine without a return record gets its slot, if that is free.

        Returns:
            Machines to give back.
        """
        replaced = _ReturnDecision(
            ReturnReason.RELEASED, "it was listed after another was rented in its place"
        )
        relisted = _ReturnDecision(ReturnReason.RELEASED, "it was given back before, and is listed")
        found: list[tuple[Machine, _ReturnDecision]] = []
        for machine in self._pop_listed(self._unconfirmed, instances):
            slot = machine.slot
            is_taken = (
                slot in self._machines or slot in self._done or slot >= self.settings.machines
            )
            if is_taken or not adopt:
                found.append((machine, replaced))
            else:
                machine.rented_at = machine.last_report_at = self._clock.monotonic()
                self._adopt_machine(machine)
        return [*found, *((one, relisted) for one in self._pop_listed(self._returned, instances))]

    def _pop_listed(self, machines: dict[int, Machine], instances: list[Instance]) -> list[Machine]:
        """Remove the machines that a listing shows from a dictionary, and return them."""
        by_attempt = {
            number: one.attempt.find_instance(instances) for number, one in machines.items()
        }
        found: list[Machine] = []
        for number, instance in by_attempt.items():
            if instance is not None:
                machine = machines.pop(number)
                machine.attempt = replace(machine.attempt, return_record=None)  # it is billed
                self._commit_contract(machine, instance.id)
                found.append(machine)
        return found

    def _free_slot(self, machine: Machine) -> None:
        """Free the slot of a machine that no listing shows. Each poll still searches for it."""
        del self._machines[machine.slot]
        self._unconfirmed[machine.attempt.number] = machine
        self._unanswered_creates += 1
        if (excess := self._unanswered_creates - _MAX_UNANSWERED_CREATES) >= 0:
            pause = min(_RETRY_INTERVAL * 2.0 ** min(excess, 10), _MAX_CREATE_PAUSE)
            self._creates_resume_at = self._clock.monotonic() + pause

    def _assess_machine(
        self, machine: Machine, instances: list[Instance] | None
    ) -> _ReturnDecision | None:
        """Return the decision to give a machine back; None if it can stay."""
        now = self._clock.monotonic()
        instance = machine.attempt.find_instance(instances or [])
        if machine.is_unconfirmed and instances is not None:
            if instance is not None:
                self._commit_contract(machine, instance.id)
                self._adopt_machine(machine)
            elif now - machine.rented_at > LISTING_LAG:
                return _ReturnDecision(ReturnReason.NEVER, "its create was not answered")
        self._read_reports(machine, now)
        if detail := self._check_traffic(machine):
            return _ReturnDecision(ReturnReason.DEARER, detail)
        if machine.reports.program_exit is not None:
            return self._assess_exit(machine, machine.reports.program_exit.code)
        if instances is not None:
            machine.instance = instance
            if machine.instance is None and now - machine.rented_at > _LISTING_TIMEOUT:
                return _ReturnDecision(ReturnReason.DEAD, "the provider has it no more")
        return self._check_instance(machine) or (
            self._check_silence(machine, now)
            if machine.is_ready
            else self._check_startup(machine, now)
        )

    def _read_reports(self, machine: Machine, now: float) -> None:
        try:
            if machine.reports.refresh():
                machine.last_report_at = now
        except errors.ConfigurationError:
            return  # the machine wrote a name into its folder that cannot be listed
        except errors.MillraceError:
            machine.last_report_at = now  # a failed read does not count as silence
            return
        for line in machine.reports.new_lines:
            self._progress(Event("machine.printed", _format_name(machine), {"text": line}))

    def _check_instance(self, machine: Machine) -> _ReturnDecision | None:
        """Decide by the description of the provider."""
        instance = machine.instance
        if instance is None:
            return None
        if instance.is_outbid:
            return _ReturnDecision(ReturnReason.OUTBID, "somebody pays more for it")
        if detail := self._check_price(machine, instance.hourly_price):
            return _ReturnDecision(ReturnReason.DEARER, detail)
        if instance.failure and not (machine.is_ready and instance.status == "unknown"):
            return _ReturnDecision(ReturnReason.DEAD, instance.failure)
        return None

    def _check_price(self, machine: Machine, hourly_price: float) -> str:
        """Return the reason if a machine costs too much, else an empty text. Report a raised price.

        A host can raise its price between search and create, and later.
        """
        intent, request = machine.attempt.intent, self.settings.request
        detail = f"it costs ${hourly_price:.3f} an hour, and was offered for ${intent.dph:.3f}"
        if hourly_price > request.max_hourly:
            return detail
        if hourly_price > max(intent.dph, machine.reported_price) * _PRICE_TOLERANCE:
            machine.reported_price = hourly_price
            figures = {"offered": intent.dph, "dph": hourly_price}
            self._progress(Event("rental.raised", _format_name(machine), figures))
        share = request.max_total / self.settings.machines
        lifetime_hours = (intent.until - intent.begun) / timedelta(hours=1)
        if (
            self._detached
            and hourly_price > intent.dph * _PRICE_TOLERANCE
            and hourly_price * lifetime_hours > share
        ):
            return f"{detail}: left until its time is over, it would cost more than was granted"
        return ""

    def _check_traffic(self, machine: Machine) -> str:
        """Return the reason if a machine's traffic is implausible or expensive, else nothing."""
        heartbeat, attempt = machine.reports.heartbeat, machine.attempt
        if heartbeat is None:
            return ""
        now = self._clock.now()
        down, up = attempt.compute_max_traffic(now)
        if (
            heartbeat.received > down + _TRAFFIC_ALLOWANCE
            or heartbeat.sent > up + _TRAFFIC_ALLOWANCE
        ):
            return (
                f"it says that it has received {heartbeat.received / 1e9:.0f} GB and sent "
                f"{heartbeat.sent / 1e9:.0f} GB, more than its line can move"
            )
        rent_cost = attempt.compute_cost(now, hourly_price=machine.hourly_price)
        share = self.settings.request.max_total / self.settings.machines
        if (
            self.settings.machines > 1
            and (traffic := machine.compute_cost(now) - rent_cost) > share
        ):
            return f"its traffic has cost ${traffic:.2f}, more than its share of what was granted"
        return ""

    def _check_silence(self, machine: Machine, now: float) -> _ReturnDecision | None:
        if now - machine.last_report_at <= self.settings.heartbeat_timeout.total_seconds():
            return None
        return _ReturnDecision(ReturnReason.DEAD, "nothing is heard of it any more")

    def _check_startup(self, machine: Machine, now: float) -> _ReturnDecision | None:
        reports, instance = machine.reports, machine.instance
        if reports.setup is not None and reports.setup.state == "failed":
            setup_error = extract_error(reports.setup.detail)
            return _ReturnDecision(
                ReturnReason.DEAD, f"it could not install the program: {setup_error}", setup_error
            )
        if reports.heartbeat is not None and instance is not None and instance.is_running:
            machine.is_ready = True
            self._proven_slots.add(machine.slot)
            self._progress(Event("rental.ready", _format_name(machine), {"instance": instance.id}))
        elif now - machine.rented_at > self.settings.startup_timeout.total_seconds():
            state = (
                reports.setup.state if reports.setup else instance.status if instance else "unknown"
            )
            return _ReturnDecision(
                ReturnReason.DEAD, f"it did not come up in time, and was still {state}"
            )
        return None

    def _assess_exit(self, machine: Machine, code: int) -> _ReturnDecision:
        if code == 0:
            return _ReturnDecision(ReturnReason.DONE, "its program ended")
        tail = "\n".join(machine.reports.tail[-10:])
        return _ReturnDecision(
            ReturnReason.FAILED,
            f"The program on machine {_format_name(machine)} ended with {code}; its last words:\n"
            f"{tail}",
        )

    def _enforce_budget(self) -> None:
        """Give all machines back when the money or the time is nearly spent.

        Raises:
            BudgetError: The money or the time is spent.
        """
        now, request = self._clock.now(), self.settings.request
        hourly = sum(one.hourly_price for one in self._machines.values())
        committed_cost = (
            (self.settings.poll_interval + _RETURN_RESERVE) / timedelta(hours=1) * hourly
        )
        detail = ""
        if self.cost + committed_cost >= request.max_total:
            detail = f"${self.cost:.2f} of ${request.max_total:.2f} are spent"
        elif expired := [one for one in self.machines if now >= one.attempt.intent.until]:
            detail = f"the time of machine {_format_name(expired[0])} is over"
        if detail:
            self._return_machines(
                (one, _ReturnDecision(ReturnReason.SPENT, detail)) for one in self.machines
            )
            raise errors.BudgetError(
                f"{detail}: the machines of {self.settings.name} were given back. What they have "
                "put into the store is there; grant more, and start again."
            )

    def _rent_machine(self, slot: int) -> None:
        """Rent a machine for a slot.

        Raises:
            NotFoundError: No offer fits.
            MachineError: Too many machines for this slot did not start, or were lost.
        """
        if self._attempts_by_slot.get(slot, 0) >= self.settings.max_attempts:
            raise errors.MachineError(
                f"{self.settings.max_attempts} machines for slot {slot} of {self.settings.name} "
                f"did not come up, or were lost: {self._loss_details.get(slot, '').rstrip('.')}. "
                "See the reports of each, and ask for others."
            )
        if self._clock.monotonic() < self._creates_resume_at:
            raise errors.UnavailableError(
                "Vast.ai does not answer whether a machine was rented: wait, and start again."
            )
        for offer in self._iterate_offers():
            self._refuse_if_superseded()
            self._enforce_budget()
            if self._take_offer(slot, offer):
                return
        raise errors.NotFoundError(
            f"Vast.ai has no offer (any more) that fits {self.settings.name}: ask for less, or "
            "grant more dollars an hour."
        )

    def _iterate_offers(self) -> Iterator[Offer]:
        """Yield the offers that are left of a recent search, then those of a new search.

        Searches need the longest interval of all requests.
        """
        if self._clock.monotonic() - self._searched_at > _OFFERS_MAX_AGE:
            self._cached_offers = []
        for search in (False, True):
            used_machine_ids = {one.attempt.intent.machine for one in self._machines.values()}
            if search:
                found = find_offers(
                    self._vast,
                    self.settings.effective_request,
                    exclude=self._excluded_machine_ids | used_machine_ids,
                )
                self._cached_offers, self._searched_at = found, self._clock.monotonic()
            while self._cached_offers:
                offer = self._cached_offers.pop(0)
                if offer.machine_id not in self._excluded_machine_ids | used_machine_ids:
                    yield offer

    def _take_offer(self, slot: int, offer: Offer) -> bool:
        """Take an offer; return whether there is a machine, or may be one."""
        figures = {"gpu": offer.gpu, "dph": offer.hourly_price, "place": offer.location}
        self._progress(Event("rental.offer", f"{self.settings.name}/{slot}", figures))
        attempt = self._commit_intent(slot, offer)
        now = self._clock.monotonic()
        keys = MachineKeys(self._keys.machine(attempt.number))
        machine = Machine(
            attempt, MachineReports(self._store, keys), rented_at=now, last_report_at=now
        )
        self._machines[slot] = machine  # from here on, every exit gives it back
        try:
            created = self._create_instance(attempt, offer)
        except (errors.BudgetError, errors.ConfigurationError, errors.DeniedError) as error:
            self._return_machines(
                [(machine, _ReturnDecision(ReturnReason.NEVER, errors.format_error(error)))],
                ignore_listing_lag=True,
            )
            raise
        except errors.NotFoundError:
            self._record_return(machine, ReturnReason.NEVER, "the offer was gone", cost=0.0)
            return False
        except errors.UnavailableError:
            # The machine may exist. A second create could rent another; each poll searches for it.
            machine.rented_at = machine.last_report_at = self._clock.monotonic()
            return True
        self._commit_contract(machine, created.instance_id)
        if created.refusal:
            self._return_machines(
                [(machine, _ReturnDecision(ReturnReason.OUTBID, created.refusal))]
            )
            return False
        self._adopt_machine(machine)
        return True

    def _commit_contract(self, machine: Machine, instance_id: int) -> None:
        """Record the number of a rented machine."""
        contract = Contract(instance=instance_id)
        machine.attempt = replace(machine.attempt, contract=contract)
        commit_once(self._store, self._keys.contract(machine.attempt.number), contract)

    def _adopt_machine(self, machine: Machine) -> None:
        """Put a rented machine into its slot."""
        self._machines[machine.slot] = machine
        self._unanswered_creates, self._creates_resume_at = 0, 0.0
        self._attempts_by_slot[machine.slot] = self._attempts_by_slot.get(machine.slot, 0) + 1
        figures = {"instance": machine.attempt.instance_id or 0}
        self._progress(Event("rental.rented", _format_name(machine), figures))

    def _commit_intent(self, slot: int, offer: Offer) -> Attempt:
        """Record the intent to rent a machine, before the create request."""
        begun = self._clock.now()
        request = self.settings.request
        deadline = begun + request.max_lifetime
        if self._detached:  # without an owner, it ends before its share of the money is spent
            share = request.max_total / self.settings.machines
            traffic = request.download * offer.download_price + request.upload * offer.upload_price
            hours = max(0.0, share - traffic) / max(offer.hourly_price, 1e-6)
            deadline = min(deadline, begun + min(MAX_LIFETIME, timedelta(hours=min(hours, 1000.0))))
        number = max(self._costs_by_attempt, default=-1) + 1
        label = Label(self._installation, self.settings.name, number, deadline)
        intent = Intent(
            rental=self.settings.name,
            slot=slot,
            label=str(label),
            offer=offer.id,
            machine=offer.machine_id,
            account=self._vast.identify_account(),
            dph=offer.hourly_price,
            up_cost=offer.upload_price,
            down_cost=offer.download_price,
            up=offer.upload_speed,
            down=offer.download_speed,
            begun=begun,
            until=deadline,
        )
        if not commit_once(self._store, self._keys.intent(number), intent).mine:
            self._is_superseded = True
            raise errors.HeldError(_SUPERSEDED_MESSAGE.format(self.settings.name))
        self._costs_by_attempt[number] = 0.0
        return Attempt(number, intent)

    def _refuse_if_superseded(self) -> None:
        """Refuse to continue after another owner has taken the rental over.

        This happens if this process was suspended, or could not renew its lease.

        Raises:
            HeldError: Another owner has the rental and its machines.
            UnavailableError: The lease cannot be read.
        """
        if self._lease is not None and self._lease.is_superseded():
            self._is_superseded = True
            raise errors.HeldError(_SUPERSEDED_MESSAGE.format(self.settings.name))

    def _create_instance(self, attempt: Attempt, offer: Offer) -> CreatedInstance:
        """Send the create request of a machine.

        Raises:
            NotFoundError: The offer is gone.
            UnavailableError: There is no answer, and the machine may exist.
        """
        request, program, intent = self.settings.request, self.settings.program, attempt.intent
        variables = make_environment(
            self._store,
            self.settings,
            attempt.number,
            intent.slot,
            intent.until.timestamp(),
            lifetime=intent.until - intent.begun,
            vast_url=self._vast.url,
        )
        upload_files(self._store, self.settings, attempt.number, intent.slot)
        ports = {f"-p {port}:{port}": "1" for port in program.ports}
        return self._vast.create_instance(
            offer.id,
            image=program.image,
            disk=request.disk,
            env={**variables, **ports},
            label=intent.label,
            onstart_cmd=read_onstart_script(),
            bid_price=offer.bid,
            runtype="ssh_direc",
        )

    def _take_over(self) -> None:
        """Continue with the machines of an owner before this one."""
        now, wall_time = self._clock.monotonic(), self._clock.now()
        to_return = list[tuple[Machine, _ReturnDecision]]()
        attempts = list_attempts(self._store, self.settings.name)
        own_account = self._vast.identify_account()
        foreign = [
            one
            for one in attempts
            if one.return_record is None and one.intent.account != own_account
        ]
        refuse_foreign_machines(self.settings.name, len(foreign))
        for attempt in attempts:
            keys = MachineKeys(self._keys.machine(attempt.number))
            machine = Machine(
                attempt, MachineReports(self._store, keys), rented_at=now, last_report_at=now
            )
            slot = attempt.intent.slot
            self._costs_by_attempt[attempt.number] = (
                attempt.return_record.cost if attempt.return_record else 0.0
            )
            if attempt.return_record is not None:
                self._returned[attempt.number] = machine
                if attempt.return_record.why is ReturnReason.DONE:
                    self._done[slot] = machine
                elif attempt.return_record.why in _EXCLUDING_REASONS:
                    self._excluded_machine_ids.add(attempt.intent.machine)
                continue
            delete(
                self._store, [self._keys.detached(attempt.number)]
            )  # the machine has an owner again
            if machine.is_unconfirmed:  # the owner was killed before the answer arrived
                machine.rented_at -= max(0.0, (wall_time - attempt.intent.begun).total_seconds())
            if slot not in self._machines and slot < self.settings.machines:
                self._machines[slot] = machine
            elif machine.is_unconfirmed:
                self._unconfirmed[attempt.number] = machine
            else:
                to_return.append(
                    (machine, _ReturnDecision(ReturnReason.RELEASED, "its owner was lost"))
                )
        self._return_machines(to_return)

    def _return_machines(
        self,
        machines: Iterable[tuple[Machine, _ReturnDecision]],
        *,
        ignore_listing_lag: bool = False,
    ) -> None:
        """Give machines back, and record their return.

        Args:
            machines: Machines, each with the decision to give it back.
            ignore_listing_lag: Whether one listing without a machine is enough, even right after
                its create request.
        """
        by_label = {one.attempt.intent.label: (one, decision) for one, decision in machines}
        now = self._clock.monotonic()
        past_lag = [
            label for label, (one, _) in by_label.items() if now - one.rented_at > LISTING_LAG
        ]

        def handle_destroyed(label: str) -> None:
            machine, decision = by_label[label]
            was_never_rented = decision.reason is ReturnReason.NEVER
            cost = 0.0 if was_never_rented else machine.compute_cost(self._clock.now())
            self._record_return(machine, decision.reason, decision.detail, cost=cost)

        numbers = {label: one.attempt.instance_id for label, (one, _) in by_label.items()}
        destroy_machines(
            self._vast,
            numbers,
            handle_destroyed,
            past_listing_lag=by_label if ignore_listing_lag else past_lag,
        )

    def _record_return(
        self, machine: Machine, reason: ReturnReason, detail: str, *, cost: float
    ) -> None:
        """Record the return of a machine, and report it."""
        attempt = machine.attempt
        record_return(
            self._store, self.settings.name, attempt, reason, detail, cost, self._clock.now()
        )
        self._costs_by_attempt[attempt.number] = cost
        self._unconfirmed.pop(attempt.number, None)
        self._returned[attempt.number] = machine
        if self._machines.get(machine.slot) is machine:
            del self._machines[machine.slot]
        figures = {"why": reason, "said": detail, "dollars": cost}
        self._progress(Event("rental.returned", _format_name(machine), figures))


def _format_name(machine: Machine) -> str:
    return f"{machine.attempt.intent.rental}/{machine.slot}"
