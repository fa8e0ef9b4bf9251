"""Rent machines, use them, and give them back: whatever happens in between.

The order of the steps makes it safe. An intent with a label of its own is committed before a create
is sent, and a create is sent once. After a lost answer every look searches the listing for the
label: a machine that appears is adopted, or given back if its slot has another by then. A machine
counts as given back once a listing of all machines lacks its label. An owner that is killed leaves
records with which the next owner, or the reaper, goes on.
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
from millrace.keys import MachineKeys, RentalKeys
from millrace.lease import Lease
from millrace.progress import Event, Progress, silent
from millrace.records import commit_once
from millrace.rentals.destroy import SETTLING, give_back, write_off
from millrace.rentals.labels import Label
from millrace.rentals.ledger import Attempt, attempts_of, installation_of, refuse_others
from millrace.rentals.offers import LONGEST, Offer, find_offers
from millrace.rentals.ownership import Owner, own
from millrace.rentals.reports import Report, cause_of
from millrace.rentals.settings import RentSettings, account
from millrace.rentals.startup import environment, onstart, send_files
from millrace.rentals.vast.api import Created, Vast
from millrace.rentals.vast.instances import Instance
from millrace.schemas.rental import Contract, DetachRecord, Intent, ReturnReason
from millrace.storage import Store, delete, open_store

_BAD = {
    ReturnReason.DEAD,
    ReturnReason.OUTBID,
    ReturnReason.DEARER,
}  # after which a host is not taken again
_FOLLOWED = "Another process has gone on with {}, and has its machines: this one ends."
_UNANSWERED = 3  # creates in a row of which nothing came, before the rental pauses between two
_LONGEST_PAUSE = 960.0  # seconds between two, from 60 doubled for each
_UNSEEN = 180.0  # seconds that one whose create was answered may be missing in the list
_AGAIN = 60.0  # seconds until one that was lost, and could not be replaced, is looked for again
_FRESH = 60.0  # seconds in which what a search has found is relied on
_ALIKE = 2  # machines on which the installation fails alike, after which no more are rented
_RAISED = 1.1  # times the offered price that a machine may cost before that is reported
_UNDOUBTED = 10e9  # bytes that a machine may claim to have moved, however young it is
_RESERVE = timedelta(minutes=2)  # of what all machines cost: what giving back them takes


@dataclass(slots=True)
class Machine:
    """A machine that is rented now.

    Attributes:
        attempt: Which of the rental's.
        instance: As it was last seen; None before that.
        report: What it says of itself.
        since: When it was rented, or gone on with, by `Clock.elapsed`.
        heard: When it last gave a sign of life.
        ready: Whether it runs, and its program does.
        told: Dollars an hour that were last reported to be more than was offered.
    """

    attempt: Attempt
    report: Report
    since: float
    heard: float
    instance: Instance | None = None
    ready: bool = False
    told: float = 0.0

    @property
    def slot(self) -> int:
        """Number of the machine within its rental."""
        return self.attempt.intent.slot

    @property
    def awaited(self) -> bool:
        """True if its create was not answered, and no listing has shown it."""
        return self.attempt.contract is None

    @property
    def dph(self) -> float:
        """Dollars an hour: what was meant, or more if the host has asked for more since."""
        return max(self.attempt.intent.dph, self.instance.dph if self.instance else 0.0)

    def cost(self, now: datetime) -> float:
        """Dollars that it has come to."""
        beat = self.report.beat
        received, sent = (beat.received, beat.sent) if beat else (0, 0)
        return self.attempt.cost(now, dph=self.dph, received=received, sent=sent)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Reason to give a machine back.

    Attributes:
        why: The kind of it.
        said: The same in words.
        fault: Why the program could not be installed, if it could not.
    """

    why: ReturnReason
    said: str
    fault: str = ""


class Rental:
    """Machines that are rented for one purpose.

    Use it as a context: entering takes the rental over, with the machines that an owner before has
    left; leaving gives all of them back.

    Args:
        settings: What is rented.
        detached: Leaving leaves the machines, each until its time is over or `release`.
        wait: Whether an owner that was perhaps killed is waited for, until it is heard of.
        vast: The account; that of the settings by default.
        progress: Told ``rental.offer``, ``rental.rented``, ``rental.ready``, ``rental.returned``,
            ``rental.missing`` with ``why``, ``rental.raised`` with the prices ``offered`` and
            ``dph`` where the second is higher, and ``machine.printed``, each with the machine as
            its subject, and ``rental.cost`` with ``dollars`` so far.
    """

    def __init__(
        self,
        settings: RentSettings,
        *,
        detached: bool = False,
        wait: bool = False,
        vast: Vast | None = None,
        progress: Progress = silent,
    ) -> None:
        self.settings = settings
        self._detached, self._wait, self._progress = detached, wait, progress
        self._keys = RentalKeys(settings.name)
        self._store: Store = open_store(settings.store)
        self._vast = vast or account(settings.account)
        self._clock = self._vast.clock
        self._machines: dict[int, Machine] = {}
        self._done: dict[int, Machine] = {}
        self._bad: set[int] = set()
        self._tries: dict[int, int] = {}
        self._past: dict[int, float] = {}
        self._had: set[int] = set()
        self._unseen: dict[int, Machine] = {}  # their creates were not answered
        self._closed: dict[int, Machine] = {}  # written off, by this owner or one before
        self._unanswered = 0  # creates in a row
        self._paused_until = 0.0  # no create before, by `Clock.elapsed`
        self._faults: list[str] = []  # why programs could not be installed
        self._lost_by: dict[int, str] = {}  # why the last machine of a slot was given back
        self._again: dict[int, float] = {}
        self._found: list[Offer] = []
        self._searched = 0.0
        self._installation = ""
        self._lease: Lease | None = None
        self._owner: Owner | None = None
        self._followed = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Rental":
        """Take the rental over.

        Raises:
            ConfigurationError: Another account pays for machines of it that are not given back.
            HeldError: Somebody else has it.
        """
        with contextlib.ExitStack() as stack:
            self._lease = own(self._store, self._keys, stack, wait=self._wait)
            self._owner = Owner(self._store, self._keys, self.settings.silence)
            stack.enter_context(self._owner)
            self._installation = installation_of(self._store)
            self._take_over()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        with self._stack:
            if self._followed:
                return  # another has the machines
            if not self._detached or kind is not None:
                self.give_back()
            elif self._owner is not None:
                self._owner.leave()
                for machine in self.machines:
                    left = self._keys.detached(machine.attempt.number)
                    commit_once(self._store, left, DetachRecord(at=self._clock.now()))
                self._return(self._unclaimed())

    @property
    def machines(self) -> tuple[Machine, ...]:
        """Machines that are rented now, by slots."""
        return tuple(self._machines[slot] for slot in sorted(self._machines))

    @property
    def cost(self) -> float:
        """Dollars that all machines have come to, those that are given back among them."""
        now = self._clock.now()
        return sum(self._past.values()) + sum(one.cost(now) for one in self._machines.values())

    def until_ready(self, stop: threading.Event | None = None) -> tuple[Machine, ...]:
        """Rent what is missing, and wait until all programs run, or have ended.

        Args:
            stop: As of `until_done`.

        Raises:
            BudgetError: The money or the time is spent: all were given back.
            MachineError: No machine came up, or a program failed.
            NotFoundError: There is no offer that fits.
        """
        self._attend(lambda: all(one.ready for one in self._machines.values()), stop)
        return self.machines

    def until_done(self, stop: threading.Event | None = None) -> None:
        """Rent what is missing, and wait until all programs have ended well.

        Args:
            stop: Set, by another thread, it ends the waiting at the next look.

        Raises:
            BudgetError, MachineError, NotFoundError: As of `until_ready`.
        """
        self._attend(lambda: not self._machines, stop)

    def give_back(self) -> None:
        """Give all machines back, and see that they are gone.

        Raises:
            UnavailableError: That could not be seen: the reaper goes on with it.
        """
        over = _Verdict(ReturnReason.RELEASED, "the rental is over")
        self._return([*((one, over) for one in self.machines), *self._unclaimed()])

    def _unclaimed(self) -> list[tuple[Machine, _Verdict]]:
        """Look once more for machines that no slot has; what to give back, and to write off."""
        if not self._unseen:
            return []
        late = self._appeared(self._rows() or [], adopt=False)
        never = _Verdict(
            ReturnReason.NEVER, "its create was not answered, and no listing has shown it"
        )
        return [*late, *((one, never) for one in self._unseen.values())]

    def _attend(self, enough: Callable[[], bool], stop: threading.Event | None = None) -> None:
        stop = stop or threading.Event()
        while not stop.is_set():
            self._look()
            missing = [
                slot for slot in range(self.settings.count)
                if slot not in self._machines and slot not in self._done
            ]  # fmt: skip
            for slot in missing:
                if not stop.is_set():
                    self._fill(slot)
            missing = [slot for slot in missing if slot not in self._machines]
            if not missing and enough():
                return
            self._clock.sleep(self.settings.poll.total_seconds())

    def _fill(self, slot: int) -> None:
        """Rent a machine for a slot. While others run, one that was lost may stay missing."""
        if self._machines and self._clock.elapsed() < self._again.get(slot, 0.0):
            return
        if self._machines and self._faults and not self._had:
            return  # the others will show whether the program can be installed
        try:
            self._rent(slot)
        except (errors.UnavailableError, errors.NotFoundError, errors.MachineError) as error:
            passing = isinstance(error, errors.UnavailableError)
            if not self._machines or not (passing or slot in self._had):
                raise
            now = self._clock.elapsed()
            self._again[slot] = max(now, self._paused_until) if passing else now + _AGAIN
            figures = {"why": errors.one_line(error)}
            self._progress(Event("rental.missing", f"{self.settings.name}/{slot}", figures))

    def _look(self) -> None:
        """See how all machines are; give back what will not be used any more."""
        with contextlib.suppress(errors.UnavailableError):  # nobody says that it is not
            self._refuse_if_followed()
        self._refuse_spending()
        rows = self._rows()
        ended = self._appeared(rows or [], adopt=True)
        for machine in self.machines:
            verdict = self._judged(machine, rows)
            if verdict is not None and verdict.why is ReturnReason.NEVER:
                self._set_aside(machine)
            elif verdict is not None:
                ended.append((machine, verdict))
        self._return(ended)
        dollars = {"dollars": round(self.cost, 6)}
        self._progress(Event("rental.cost", self.settings.name, dollars))
        for machine, verdict in ended:
            if verdict.why is ReturnReason.RELEASED:
                continue  # another has its slot
            if verdict.why is ReturnReason.FAILED and not self.settings.retry_failed:
                raise errors.MachineError(verdict.said)
            if verdict.why is ReturnReason.DONE:
                self._done[machine.slot] = machine
                continue
            if verdict.fault:
                self._faults.append(verdict.fault)
            self._bad.add(machine.attempt.intent.machine)
            self._lost_by[machine.slot] = verdict.said
            if machine.ready and verdict.why is not ReturnReason.FAILED:
                self._tries.pop(machine.slot, None)  # it was used: that it is lost counts for none

        self._refuse_uninstallable()

    def _refuse_uninstallable(self) -> None:
        """End where the installation fails alike on two machines, and has never succeeded.

        Raises:
            MachineError: It does.
        """
        alike = Counter(re.sub(r"[0-9a-f]{7,}|\d+", "", fault) for fault in self._faults)
        if self._had or not alike or max(alike.values()) < _ALIKE:
            return
        raise errors.MachineError(
            f"The program of {self.settings.name} cannot be installed: it failed alike on {_ALIKE} "
            f"machines: {self._faults[-1].rstrip('.')}. Change repo_url, repo_ref, extras or "
            "image, and start again."
        )

    def _rows(self) -> list[Instance] | None:
        """List the account's machines; None where they are not known."""
        try:
            return self._vast.instances()
        except (errors.DeniedError, errors.UnavailableError):
            return None  # unknown: not that there is none

    def _appeared(self, rows: list[Instance], *, adopt: bool) -> list[tuple[Machine, _Verdict]]:
        """Find the machines in a listing that no slot has.

        Args:
            rows: The listing.
            adopt: Whether a machine that was never written off gets its slot, if that is free.

        Returns:
            The machines to give back.
        """
        late = _Verdict(
            ReturnReason.RELEASED, "it was listed after another was rented in its place"
        )
        back = _Verdict(ReturnReason.RELEASED, "it was given back before, and is listed")
        found: list[tuple[Machine, _Verdict]] = []
        for machine in self._listed(self._unseen, rows):
            slot = machine.slot
            taken = slot in self._machines or slot in self._done or slot >= self.settings.count
            if taken or not adopt:
                found.append((machine, late))
            else:
                machine.since = machine.heard = self._clock.elapsed()
                self._adopt(machine)
        return [*found, *((one, back) for one in self._listed(self._closed, rows))]

    def _listed(self, machines: dict[int, Machine], rows: list[Instance]) -> list[Machine]:
        """Take those of some machines out that a listing shows."""
        there = {number: one.attempt.find(rows) for number, one in machines.items()}
        found: list[Machine] = []
        for number, row in there.items():
            if row is not None:
                machine = machines.pop(number)
                machine.attempt = replace(machine.attempt, returned=None)  # it is billed
                self._contract(machine, row.id)
                found.append(machine)
        return found

    def _set_aside(self, machine: Machine) -> None:
        """Free the slot of a machine that no listing shows; each look goes on to search for it."""
        del self._machines[machine.slot]
        self._unseen[machine.attempt.number] = machine
        self._unanswered += 1
        if (over := self._unanswered - _UNANSWERED) >= 0:
            pause = min(_AGAIN * 2.0 ** min(over, 10), _LONGEST_PAUSE)
            self._paused_until = self._clock.elapsed() + pause

    def _judged(self, machine: Machine, rows: list[Instance] | None) -> _Verdict | None:
        """Return the reason why a machine cannot be kept any longer; None if it can."""
        now = self._clock.elapsed()
        row = machine.attempt.find(rows or [])
        if machine.awaited and rows is not None:
            if row is not None:
                self._contract(machine, row.id)
                self._adopt(machine)
            elif now - machine.since > SETTLING:
                return _Verdict(ReturnReason.NEVER, "its create was not answered")
        self._listen(machine, now)
        if said := self._implausible(machine):
            return _Verdict(ReturnReason.DEARER, said)
        if machine.report.ended is not None:
            return self._ended(machine, machine.report.ended.code)
        if rows is not None:
            machine.instance = row
            if machine.instance is None and now - machine.since > _UNSEEN:
                return _Verdict(ReturnReason.DEAD, "the provider has it no more")
        return self._lost(machine) or (
            self._silent(machine, now) if machine.ready else self._coming_up(machine, now)
        )

    def _listen(self, machine: Machine, now: float) -> None:
        try:
            if machine.report.look():
                machine.heard = now
        except errors.ConfigurationError:
            return  # a name in its own folder that cannot be listed: the machine has made it
        except errors.MillraceError:
            machine.heard = now  # that nothing could be read is not that nothing was said
            return
        for line in machine.report.news:
            self._progress(Event("machine.printed", _name(machine), {"text": line}))

    def _lost(self, machine: Machine) -> _Verdict | None:
        """By what the provider says of it."""
        row = machine.instance
        if row is None:
            return None
        if row.outbid:
            return _Verdict(ReturnReason.OUTBID, "somebody pays more for it")
        if said := self._too_dear(machine, row.dph):
            return _Verdict(ReturnReason.DEARER, said)
        if row.dead and not (machine.ready and row.status == "unknown"):
            return _Verdict(ReturnReason.DEAD, row.dead)
        return None

    def _too_dear(self, machine: Machine, dph: float) -> str:
        """Return the reason if a machine costs more than was granted, else nothing.

        Report a raised price.

        A host can raise its price between search and create, and later.
        """
        intent, request = machine.attempt.intent, self.settings.request
        said = f"it costs ${dph:.3f} an hour, and was offered for ${intent.dph:.3f}"
        if dph > request.max_hourly:
            return said
        if dph > max(intent.dph, machine.told) * _RAISED:
            machine.told = dph
            figures = {"offered": intent.dph, "dph": dph}
            self._progress(Event("rental.raised", _name(machine), figures))
        share = request.max_total / self.settings.count
        lasts = (intent.until - intent.begun) / timedelta(hours=1)
        if self._detached and dph > intent.dph * _RAISED and dph * lasts > share:
            return f"{said}: left until its time is over, it would cost more than was granted"
        return ""

    def _implausible(self, machine: Machine) -> str:
        """Say why a machine's count of its own traffic is not believed, or too dear; or nothing."""
        beat, attempt = machine.report.beat, machine.attempt
        if beat is None:
            return ""
        now = self._clock.now()
        down, up = attempt.movable(now)
        if beat.received > down + _UNDOUBTED or beat.sent > up + _UNDOUBTED:
            return (
                f"it says that it has received {beat.received / 1e9:.0f} GB and sent "
                f"{beat.sent / 1e9:.0f} GB, more than its line can move"
            )
        without = attempt.cost(now, dph=machine.dph)
        share = self.settings.request.max_total / self.settings.count
        if self.settings.count > 1 and (traffic := machine.cost(now) - without) > share:
            return f"its traffic has cost ${traffic:.2f}, more than its share of what was granted"
        return ""

    def _silent(self, machine: Machine, now: float) -> _Verdict | None:
        if now - machine.heard <= self.settings.silence.total_seconds():
            return None
        return _Verdict(ReturnReason.DEAD, "nothing is heard of it any more")

    def _coming_up(self, machine: Machine, now: float) -> _Verdict | None:
        report, row = machine.report, machine.instance
        if report.setup is not None and report.setup.state == "failed":
            fault = cause_of(report.setup.said)
            return _Verdict(ReturnReason.DEAD, f"it could not install the program: {fault}", fault)
        if report.beat is not None and row is not None and row.running:
            machine.ready = True
            self._had.add(machine.slot)
            self._progress(Event("rental.ready", _name(machine), {"instance": row.id}))
        elif now - machine.since > self.settings.loading.total_seconds():
            state = report.setup.state if report.setup else row.status if row else "unknown"
            return _Verdict(ReturnReason.DEAD, f"it did not come up in time, and was still {state}")
        return None

    def _ended(self, machine: Machine, code: int) -> _Verdict:
        if code == 0:
            return _Verdict(ReturnReason.DONE, "its program ended")
        tail = "\n".join(machine.report.tail[-10:])
        return _Verdict(
            ReturnReason.FAILED,
            f"The program on machine {_name(machine)} ended with {code}; its last words:\n{tail}",
        )

    def _refuse_spending(self) -> None:
        """Give everything back when the money or the time is nearly spent.

        Raises:
            BudgetError: It is.
        """
        now, request = self._clock.now(), self.settings.request
        hourly = sum(one.dph for one in self._machines.values())
        ahead = (self.settings.poll + _RESERVE) / timedelta(hours=1) * hourly
        said = ""
        if self.cost + ahead >= request.max_total:
            said = f"${self.cost:.2f} of ${request.max_total:.2f} are spent"
        elif late := [one for one in self.machines if now >= one.attempt.intent.until]:
            said = f"the time of machine {_name(late[0])} is over"
        if said:
            self._return((one, _Verdict(ReturnReason.SPENT, said)) for one in self.machines)
            raise errors.BudgetError(
                f"{said}: the machines of {self.settings.name} were given back. What they have put "
                "into the store is there; grant more, and start again."
            )

    def _rent(self, slot: int) -> None:
        """Rent a machine for a slot.

        Raises:
            NotFoundError: No offer fits.
            MachineError: Too many did not come up.
        """
        if self._tries.get(slot, 0) >= self.settings.tries:
            raise errors.MachineError(
                f"{self.settings.tries} machines for slot {slot} of {self.settings.name} did not "
                f"come up, or were lost: {self._lost_by.get(slot, '').rstrip('.')}. See the "
                "reports of each, and ask for others."
            )
        if self._clock.elapsed() < self._paused_until:
            raise errors.UnavailableError(
                "Vast.ai does not answer whether a machine was rented: wait, and start again."
            )
        for offer in self._offers():
            self._refuse_if_followed()
            self._refuse_spending()
            if self._take(slot, offer):
                return
        raise errors.NotFoundError(
            f"Vast.ai has no offer (any more) that fits {self.settings.name}: ask for less, or "
            "grant more dollars an hour."
        )

    def _offers(self) -> Iterator[Offer]:
        """Offers that fit: what is left of the last search, while that is young, then a new one's.

        A search is the dearest of all calls, by the time that has to pass between two.
        """
        if self._clock.elapsed() - self._searched > _FRESH:
            self._found = []
        for again in (False, True):
            taken = {one.attempt.intent.machine for one in self._machines.values()}
            if again:
                found = find_offers(self._vast, self.settings.wanted, without=self._bad | taken)
                self._found, self._searched = found, self._clock.elapsed()
            while self._found:
                offer = self._found.pop(0)
                if offer.machine not in self._bad | taken:
                    yield offer

    def _take(self, slot: int, offer: Offer) -> bool:
        """Take an offer; whether there is a machine now, or there may be one."""
        figures = {"gpu": offer.gpu, "dph": offer.dph, "place": offer.place}
        self._progress(Event("rental.offer", f"{self.settings.name}/{slot}", figures))
        attempt = self._intend(slot, offer)
        now = self._clock.elapsed()
        keys = MachineKeys(self._keys.machine(attempt.number))
        machine = Machine(attempt, Report(self._store, keys), since=now, heard=now)
        self._machines[slot] = machine  # whatever comes of it is given back
        try:
            created = self._create(attempt, offer)
        except (errors.BudgetError, errors.ConfigurationError, errors.DeniedError) as error:
            self._return(
                [(machine, _Verdict(ReturnReason.NEVER, errors.one_line(error)))], settled=True
            )
            raise
        except errors.NotFoundError:
            self._written_off(machine, ReturnReason.NEVER, "the offer was gone", cost=0.0)
            return False
        except errors.UnavailableError:
            # It may have been done. Sent again, it could be done twice: each look searches for it.
            machine.since = machine.heard = self._clock.elapsed()
            return True
        self._contract(machine, created.instance)
        if created.refused:
            self._return([(machine, _Verdict(ReturnReason.OUTBID, created.refused))])
            return False
        self._adopt(machine)
        return True

    def _contract(self, machine: Machine, instance: int) -> None:
        """Write down the number of a machine that there is."""
        contract = Contract(instance=instance)
        machine.attempt = replace(machine.attempt, contract=contract)
        commit_once(self._store, self._keys.contract(machine.attempt.number), contract)

    def _adopt(self, machine: Machine) -> None:
        """Have a machine that there is in its slot."""
        self._machines[machine.slot] = machine
        self._unanswered, self._paused_until = 0, 0.0
        self._tries[machine.slot] = self._tries.get(machine.slot, 0) + 1
        figures = {"instance": machine.attempt.instance or 0}
        self._progress(Event("rental.rented", _name(machine), figures))

    def _intend(self, slot: int, offer: Offer) -> Attempt:
        """Write down what is about to be rented."""
        begun = self._clock.now()
        request = self.settings.request
        until = begun + request.max_lifetime
        if self._detached:  # nobody will count: it ends before its share of the money is spent
            share = request.max_total / self.settings.count
            traffic = request.download * offer.down_cost + request.upload * offer.up_cost
            hours = max(0.0, share - traffic) / max(offer.dph, 1e-6)
            until = min(until, begun + min(LONGEST, timedelta(hours=min(hours, 1000.0))))
        number = max(self._past, default=-1) + 1
        label = Label(self._installation, self.settings.name, number, until)
        intent = Intent(
            rental=self.settings.name,
            slot=slot,
            label=str(label),
            offer=offer.id,
            machine=offer.machine,
            account=self._vast.identity(),
            dph=offer.dph,
            up_cost=offer.up_cost,
            down_cost=offer.down_cost,
            up=offer.up,
            down=offer.down,
            begun=begun,
            until=until,
        )
        if not commit_once(self._store, self._keys.intent(number), intent).mine:
            self._followed = True
            raise errors.HeldError(_FOLLOWED.format(self.settings.name))
        self._past[number] = 0.0
        return Attempt(number, intent)

    def _refuse_if_followed(self) -> None:
        """End when another has the rental: it was suspended, or could not be heard of.

        Raises:
            HeldError: Another has it, and its machines.
            UnavailableError: That cannot be seen.
        """
        if self._lease is not None and self._lease.is_superseded():
            self._followed = True
            raise errors.HeldError(_FOLLOWED.format(self.settings.name))

    def _create(self, attempt: Attempt, offer: Offer) -> Created:
        """Have the machine created.

        Raises:
            NotFoundError: The offer is gone.
            UnavailableError: Whether there is a machine now is not known.
        """
        request, program, intent = self.settings.request, self.settings.program, attempt.intent
        variables = environment(
            self._store,
            self.settings,
            attempt.number,
            intent.slot,
            intent.until.timestamp(),
            lifetime=intent.until - intent.begun,
            url=self._vast.url,
        )
        send_files(self._store, self.settings, attempt.number, intent.slot)
        ports = {f"-p {port}:{port}": "1" for port in program.ports}
        return self._vast.create(
            offer.id,
            image=program.image,
            disk=request.disk,
            env={**variables, **ports},
            label=intent.label,
            onstart_cmd=onstart(),
            bid_price=offer.bid,
            runtype="ssh_direc",
        )

    def _take_over(self) -> None:
        """Go on with what an owner before has left."""
        now, time = self._clock.elapsed(), self._clock.now()
        left = list[tuple[Machine, _Verdict]]()
        attempts = attempts_of(self._store, self.settings.name)
        mine = self._vast.identity()
        others = [one for one in attempts if one.returned is None and one.intent.account != mine]
        refuse_others(self.settings.name, len(others))
        for attempt in attempts:
            keys = MachineKeys(self._keys.machine(attempt.number))
            machine = Machine(attempt, Report(self._store, keys), since=now, heard=now)
            slot = attempt.intent.slot
            self._past[attempt.number] = attempt.returned.cost if attempt.returned else 0.0
            if attempt.returned is not None:
                self._closed[attempt.number] = machine
                if attempt.returned.why is ReturnReason.DONE:
                    self._done[slot] = machine
                elif attempt.returned.why in _BAD:
                    self._bad.add(attempt.intent.machine)
                continue
            delete(self._store, [self._keys.detached(attempt.number)])  # it has an owner again
            if machine.awaited:  # an owner was killed before it knew of a machine
                machine.since -= max(0.0, (time - attempt.intent.begun).total_seconds())
            if slot not in self._machines and slot < self.settings.count:
                self._machines[slot] = machine
            elif machine.awaited:
                self._unseen[attempt.number] = machine
            else:
                left.append((machine, _Verdict(ReturnReason.RELEASED, "its owner was lost")))
        self._return(left)

    def _return(
        self, machines: Iterable[tuple[Machine, _Verdict]], *, settled: bool = False
    ) -> None:
        """Give machines back, and write it down.

        Args:
            machines: Each with why it is given back.
            settled: Whether one listing without a machine is enough, also right after its create.
        """
        going = {one.attempt.intent.label: (one, verdict) for one, verdict in machines}
        now = self._clock.elapsed()
        old = [label for label, (one, _) in going.items() if now - one.since > SETTLING]

        def gone(label: str) -> None:
            machine, verdict = going[label]
            never = verdict.why is ReturnReason.NEVER
            cost = 0.0 if never else machine.cost(self._clock.now())
            self._written_off(machine, verdict.why, verdict.said, cost=cost)

        numbers = {label: one.attempt.instance for label, (one, _) in going.items()}
        give_back(self._vast, numbers, gone, settled=going if settled else old)

    def _written_off(self, machine: Machine, why: ReturnReason, said: str, *, cost: float) -> None:
        """Write down that nothing is left of a machine."""
        attempt = machine.attempt
        write_off(self._store, self.settings.name, attempt, why, said, cost, self._clock.now())
        self._past[attempt.number] = cost
        self._unseen.pop(attempt.number, None)
        self._closed[attempt.number] = machine
        if self._machines.get(machine.slot) is machine:
            del self._machines[machine.slot]
        figures = {"why": why, "said": said, "dollars": cost}
        self._progress(Event("rental.returned", _name(machine), figures))


def _name(machine: Machine) -> str:
    return f"{machine.attempt.intent.rental}/{machine.slot}"
