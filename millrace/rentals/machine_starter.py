"""Renting of machines: offers, intents, create requests and contracts."""

import logging
from collections.abc import Iterator, Set
from dataclasses import replace

from millrace import errors
from millrace.keys.rentals import MAX_ATTEMPTS
from millrace.records import commit_once
from millrace.rentals.budget import Budget
from millrace.rentals.clock import Clock
from millrace.rentals.context import RentalContext
from millrace.rentals.grants import publish_tokens
from millrace.rentals.labels import Label
from millrace.rentals.ledger import Attempt, ensure_installation
from millrace.rentals.machine_environment import make_environment, read_onstart_script, upload_files
from millrace.rentals.machines import Machine, ReleaseDecision
from millrace.rentals.offers import Offer, find_offers
from millrace.rentals.ownership import Ownership
from millrace.rentals.progress_events import MachineRented, OfferTaken
from millrace.rentals.releasing import MachineReleaser
from millrace.rentals.replacement import RETRY_INTERVAL, ReplacementPolicy
from millrace.rentals.state import RentalState
from millrace.rentals.vast.api import CreatedInstance
from millrace.schemas.rental import Contract, Intent, ReleaseReason

logger = logging.getLogger(__name__)

_OFFERS_MAX_AGE = 60.0  # seconds in which the offers of a search are used
_MAX_UNANSWERED_CREATES = 3  # consecutive creates without a machine, before pauses begin
_MAX_CREATE_PAUSE = 960.0  # seconds; the pause starts at 60 seconds, and doubles each time
_MAX_DOUBLINGS = 10  # limit of the exponent, far above the longest pause


class CreatePacer:
    """Pauses between create requests that got no answer.

    Such a request may have rented a machine, which no listing shows yet.

    Args:
        clock: Clock of the rental.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._unanswered = 0
        self.resume_at = 0.0
        """Earliest time of the next create request, by `Clock.monotonic`."""

    def note_answer(self) -> None:
        """End the pauses: a machine was rented."""
        self._unanswered, self.resume_at = 0, 0.0

    def note_unanswered(self) -> None:
        """Count a create request without an answer; pause after the third in succession."""
        self._unanswered += 1
        if (excess := self._unanswered - _MAX_UNANSWERED_CREATES) >= 0:
            pause = min(RETRY_INTERVAL * 2.0 ** min(excess, _MAX_DOUBLINGS), _MAX_CREATE_PAUSE)
            self.resume_at = self._clock.monotonic() + pause

    def refuse_during_pause(self) -> None:
        """Refuse to send a create request during a pause.

        Raises:
            UnavailableError: A pause has not ended.
        """
        if self._clock.monotonic() < self.resume_at:
            raise errors.UnavailableError(
                "Vast.ai does not answer whether a machine was rented: wait, and start again."
            )


class OfferSource:
    """Offers for a rental. A recent search serves several machines.

    Of all requests to the API, searches need the longest interval.

    Args:
        context: Settings and connections of the rental.
    """

    def __init__(self, context: RentalContext) -> None:
        self._context = context
        self._offers: list[Offer] = []
        self._searched_at = 0.0

    def iterate(self, excluded_host_ids: Set[int]) -> Iterator[Offer]:
        """Yield the remaining offers of a recent search, then the offers of a new search.

        Args:
            excluded_host_ids: Numbers of hosts whose offers are left out.

        Raises:
            UnavailableError, DeniedError: As in `VastClient.search_offers`.
        """
        clock = self._context.clock
        if clock.monotonic() - self._searched_at > _OFFERS_MAX_AGE:
            self._offers = []
        yield from self._take_offers(excluded_host_ids)
        request = self._context.settings.effective_request
        self._offers = find_offers(self._context.vast, request, exclude=excluded_host_ids)
        self._searched_at = clock.monotonic()
        yield from self._take_offers(excluded_host_ids)

    def _take_offers(self, excluded_host_ids: Set[int]) -> Iterator[Offer]:
        while self._offers:
            offer = self._offers.pop(0)
            if offer.machine_id not in excluded_host_ids:
                yield offer


class MachineStarter:
    """Rents machines for the slots of a rental.

    Args:
        context: Settings and connections of the rental.
        state: Machines of the rental.
        budget: Limits of the rental.
        policy: Receiver of the slots for which a machine was rented.
        ownership: Ownership of the rental, which is checked before each create request.
        releaser: Releaser of machines that were rented, but cannot be used.
    """

    def __init__(
        self,
        context: RentalContext,
        *,
        state: RentalState,
        budget: Budget,
        policy: ReplacementPolicy,
        ownership: Ownership,
        releaser: MachineReleaser,
    ) -> None:
        self._context = context
        self._state, self._budget, self._policy = state, budget, policy
        self._ownership, self._releaser = ownership, releaser
        self._offers = OfferSource(context)
        self.pacer = CreatePacer(context.clock)
        """Pauses after create requests without an answer."""
        self.installation = ""
        """Identity of the installation, which labels contain; empty before `prepare`."""

    def prepare(self) -> None:
        """Read the identity of the installation. Call this first."""
        self.installation = ensure_installation(self._context.store)

    def rent_machine(self, slot: int) -> None:
        """Rent a machine for a slot.

        Raises:
            BudgetError: The money or the time is spent. All machines were released.
            HeldError: Another owner has taken over the rental.
            MachineError: Too many machines of this slot did not start, or were lost; the rental has
                had `MAX_ATTEMPTS`; or the money suffices only for the machines that it has.
            NotFoundError: No offer fits.
            UnavailableError: The API does not answer, or create requests pause.
        """
        self._policy.refuse_exhausted(slot)
        self.pacer.refuse_during_pause()
        for offer in self._offers.iterate(self._state.unavailable_host_ids):
            self._ownership.refuse_if_superseded()
            self._releaser.enforce_budget(self._budget)
            self._refuse_unaffordable(offer)
            if self._take_offer(slot, offer):
                return
        settings = self._context.settings
        if settings.request.offer_id is not None:
            raise errors.NotFoundError(
                f"Vast.ai does not have the offer {settings.request.offer_id} (any more), or the "
                f"offer does not fit {settings.name}: name another offer, or none."
            )
        raise errors.NotFoundError(
            f"Vast.ai has no offer (any more) that fits {settings.name}: ask for less, or raise "
            "max_hourly."
        )

    def confirm_machine(self, machine: Machine, instance_id: int) -> None:
        """Put a rented machine into its slot, and record its number.

        If the number cannot be recorded, the machine stays unconfirmed, and the next listing
        confirms it by its label.

        Args:
            machine: Machine.
            instance_id: Number of the machine at the provider.
        """
        self._state.active[machine.slot] = machine
        self.pacer.note_answer()
        if not self.commit_contract(machine, instance_id):
            return
        self._policy.note_rented(machine.slot)
        self._context.progress(MachineRented(machine=machine.name, instance=instance_id))

    def commit_contract(self, machine: Machine, instance_id: int) -> bool:
        """Record the number of a rented machine; return whether the ledger has the number.

        A failure is only logged: it must not prevent the release of a machine. A machine without a
        number is found by its label.
        """
        contract = Contract(instance_id=instance_id)
        key = self._context.keys.make_contract_key(machine.attempt.number)
        try:
            commit_once(self._context.store, key, contract)
        except errors.MillraceError as error:
            logger.warning(
                "The number of machine %s, %d, is not recorded yet: %s",
                machine.name,
                instance_id,
                errors.format_error(error),
            )
            return False
        machine.attempt = replace(machine.attempt, contract=contract)
        return True

    def _refuse_unaffordable(self, offer: Offer) -> None:
        """Refuse to rent a machine that the next poll would release, as the money is spent then.

        Raises:
            BudgetError: The rental has no machine.
            MachineError: It has others, which go on.
        """
        message = self._budget.find_shortage(offer, self._state, self._context.now())
        if message and self._state.machines:
            raise errors.MachineError(message)
        if message:
            raise errors.BudgetError(f"{message} Raise max_total, and start again.")

    def _take_offer(self, slot: int, offer: Offer) -> bool:
        """Take an offer; return whether there is a machine, or may be one.

        Raises:
            MachineError: The rental has had `MAX_ATTEMPTS`.
        """
        if self._state.next_attempt >= MAX_ATTEMPTS:
            raise errors.MachineError(
                f"{self._context.settings.name} has had {MAX_ATTEMPTS:,} attempts to rent a "
                "machine, and can have no more: continue under another name."
            )
        self._context.progress(
            OfferTaken(
                machine=f"{self._context.settings.name}/{slot}",
                gpu=offer.gpu,
                location=offer.location,
                dollars_per_hour=offer.dollars_per_hour,
            )
        )
        machine = self._context.make_machine(self._commit_intent(slot, offer))
        self._state.active[slot] = machine  # from here on, every exit releases the machine
        try:
            environment = self._prepare_environment(machine.attempt)
        except errors.MillraceError as error:  # no request was sent
            self._close_never_rented(machine, errors.format_error(error))
            raise
        try:
            created = self._create_instance(machine.attempt, offer, environment)
        except (errors.BudgetError, errors.ConfigurationError, errors.DeniedError) as error:
            self._close_never_rented(machine, errors.format_error(error), may_exist=True)
            raise
        except errors.NotFoundError:
            self._close_never_rented(machine, "the offer was gone")
            return False
        except errors.UnavailableError:
            # The machine may exist. A second create could rent another; each poll searches for it.
            machine.rented_at = machine.last_report_at = self._context.clock.monotonic()
            return True
        if created.refusal:
            self.commit_contract(machine, created.instance_id)
            self._releaser.start_releases(
                [ReleaseDecision(machine, ReleaseReason.OUTBID, created.refusal)]
            )
            return False
        self.confirm_machine(machine, created.instance_id)
        return True

    def _close_never_rented(
        self, machine: Machine, message: str, *, may_exist: bool = False
    ) -> None:
        """Record that an attempt rented no machine, and free its slot.

        Args:
            machine: Machine of the attempt.
            message: Reason, for the record.
            may_exist: Whether a listing must lack the machine first. A listed machine is destroyed.
        """
        decision = ReleaseDecision(machine, ReleaseReason.NEVER_RENTED, message)
        if may_exist:
            self._releaser.release_refused(decision)
        else:
            self._releaser.record(decision, cost=0.0)

    def _commit_intent(self, slot: int, offer: Offer) -> Attempt:
        """Record the intent to rent a machine, before the create request.

        Raises:
            HeldError: Another owner has recorded an intent with the same number.
        """
        keys = self._context.keys
        while True:
            number = self._state.next_attempt
            self._state.costs[number] = 0.0
            intent, key = self._make_intent(number, slot, offer), keys.make_intent_key(number)
            try:
                commit = commit_once(self._context.store, key, intent)
            except errors.CorruptError as error:  # the listing of attempts has left it out
                logger.warning("%s The number %d is not used again.", error, number)
                continue
            if not commit.mine:
                self._ownership.raise_superseded()
            return Attempt(number, intent)

    def _make_intent(self, number: int, slot: int, offer: Offer) -> Intent:
        """Return the intent to rent a machine of an offer."""
        context = self._context
        name, started_at = context.settings.name, context.now()
        deadline = self._budget.compute_deadline(offer, started_at, self._state)
        return Intent(
            rental=name,
            slot=slot,
            label=str(Label(self.installation, name, number, deadline)),
            offer_id=offer.id,
            machine_id=offer.machine_id,
            account=context.vast.identify_account(),
            dollars_per_hour=offer.dollars_per_hour,
            upload_dollars_per_gb=offer.upload_dollars_per_gb,
            download_dollars_per_gb=offer.download_dollars_per_gb,
            upload_mbps=offer.upload_mbps,
            download_mbps=offer.download_mbps,
            started_at=started_at,
            deadline=deadline,
            heartbeat_timeout=context.settings.timeouts.heartbeat_timeout,
        )

    def _prepare_environment(self, attempt: Attempt) -> dict[str, str]:
        """Upload the files of a machine, and return its environment, with the ports that it opens.

        Raises:
            MillraceError: The store does not sign the URLs, or take the files.
        """
        context, settings = self._context, self._context.settings
        variables = make_environment(context.store, settings, attempt, vast_url=context.vast.url)
        upload_files(context.store, settings, attempt)
        publish_tokens(context.store, settings, [attempt])
        return {**variables, **{f"-p {port}:{port}": "1" for port in settings.program.ports}}

    def _create_instance(
        self, attempt: Attempt, offer: Offer, environment: dict[str, str]
    ) -> CreatedInstance:
        """Send the create request of a machine.

        Raises:
            NotFoundError: The offer is gone.
            UnavailableError: There is no answer, and the machine may exist.
        """
        settings = self._context.settings
        return self._context.vast.create_instance(
            offer.id,
            image=settings.program.image,
            disk=settings.request.disk_gb,
            env=environment,
            label=attempt.intent.label,
            onstart_cmd=read_onstart_script(),
            bid_price=offer.bid,
            runtype="ssh_direc",
        )
