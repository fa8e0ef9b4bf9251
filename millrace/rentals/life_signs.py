"""Last signs of life of a rental.

They limit the cost of machines that no listing shows, and tell which detached machines have failed.
"""

from datetime import datetime, timedelta

from millrace import errors
from millrace.keys.rentals import MachineKeys, RentalKeys
from millrace.lease import Holder, StoreClock
from millrace.rentals.ledger import Attempt
from millrace.rentals.reports import extract_error, read_setup
from millrace.rentals.vast.instances import Instance
from millrace.storage import Store, exists, head

_MIN_SILENCE = timedelta(hours=1)  # after which a detached machine that does not run is lost
_MINUTE = timedelta(minutes=1)


class LifeSigns:
    """Last heartbeats of a rental's machines and of their owner.

    Create an instance before another owner overwrites the heartbeat of the last one.

    Args:
        store: Store of the ledger, and of the machines' reports.
        keys: Keys of the rental.
        clock: Clock of the store, which dates the heartbeats; by default it is read.
    """

    def __init__(self, store: Store, keys: RentalKeys, clock: StoreClock | None = None) -> None:
        self._store, self._keys = store, keys
        self._clock = clock or StoreClock.read(store, keys.scope, Holder.describe_this_process())
        self._owner_age = self._measure_age(keys.owner)

    def estimate_end(self, attempt: Attempt, now: datetime) -> datetime:
        """Return when a machine that no listing shows has ended at the latest.

        Its watchdog has destroyed it at its deadline, or `heartbeat_timeout` after the last
        heartbeat of its owner. A machine that has sent heartbeats since ended as long after the
        last one. A detached machine can outlive its owner, and its program. An attempt without a
        contract and without a heartbeat has rented no machine.

        Args:
            attempt: Attempt that rented the machine.
            now: Current time.

        Raises:
            UnavailableError: The store does not answer.
        """
        machine = MachineKeys(self._keys.make_machine_prefix(attempt.number))
        age = self._measure_age(machine.heartbeat)
        if attempt.contract is None and age is None:
            return attempt.intent.started_at
        if attempt.is_detached:
            age = None if exists(self._store, machine.program_exit) else age
        elif self._owner_age is not None:
            age = self._owner_age if age is None else min(age, self._owner_age)
        if age is None:
            return min(now, attempt.deadline)
        return min(now, attempt.deadline, now - age + attempt.intent.heartbeat_timeout)

    def find_failure(self, attempt: Attempt, instance: Instance, now: datetime) -> str:
        """Return the reason why a detached machine cannot work any more; empty if it may work.

        A wrong release loses work, and no owner rents another machine. So two signs are needed.
        The machine has sent no heartbeat for an hour, and for `heartbeat_timeout`: a host that is
        offline may come back, and a machine that does not reach the store may work. Besides, the
        provider reports that the machine does not run, or the machine has reported after its last
        heartbeat that its program does not start.

        Args:
            attempt: Attempt that rented the machine.
            instance: Description of the machine in the listing.
            now: Current time.

        Raises:
            UnavailableError: The store does not answer.
        """
        machine = MachineKeys(self._keys.make_machine_prefix(attempt.number))
        age = self._measure_age(machine.heartbeat)
        silence = now - attempt.intent.started_at if age is None else age
        if silence <= max(attempt.intent.heartbeat_timeout, _MIN_SILENCE):
            return ""
        suffix = f", and has sent no heartbeat for {timedelta(minutes=silence // _MINUTE)}"
        if instance.failure:
            return f"{instance.failure}{suffix}"
        setup, setup_age = read_setup(self._store, machine), self._measure_age(machine.setup)
        if setup is None or setup.state != "failed" or setup_age is None:
            return ""
        if age is not None and setup_age >= age:
            return ""  # the program has run since
        return f"the machine could not install the program{suffix}: {extract_error(setup.detail)}"

    def _measure_age(self, key: str) -> timedelta | None:
        """Return the time since an object was written; None if there is no object."""
        try:
            return self._clock.now() - head(self._store, key).last_modified
        except errors.NotFoundError:
            return None
