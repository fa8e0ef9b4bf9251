"""Replacement of lost machines: when to rent another machine for a slot, and when to give up."""

import re
from collections import Counter

from millrace import errors
from millrace.rentals.machines import ReleaseDecision
from millrace.rentals.settings import RentalSettings
from millrace.schemas.rental import ReleaseReason

RETRY_INTERVAL = 60.0
"""Seconds until the next try to replace a lost machine."""
_MAX_EQUAL_SETUP_ERRORS = 2  # equal installation errors, after which no machine is rented
_VARIABLE_PARTS = re.compile(r"[0-9a-f]{7,}|\d+")  # digests, object names and counts of an error


class ReplacementPolicy:
    """Failures of the machines of each slot, and what follows from them.

    Args:
        settings: Settings of the rental.
        quorum: Number of slots that are enough; by default all. Once the program has run on so
            many, no failure of another slot ends the rental while it has machines.
    """

    def __init__(self, settings: RentalSettings, quorum: int | None = None) -> None:
        self._settings = settings
        self._quorum = settings.machines if quorum is None else quorum
        self._attempts: dict[int, int] = {}
        self._proven_slots: set[int] = set()
        self._loss_messages: dict[int, str] = {}
        self._retry_times: dict[int, float] = {}
        self._setup_errors: list[str] = []

    def note_rented(self, slot: int) -> None:
        """Count a machine that was rented for a slot."""
        self._attempts[slot] = self._attempts.get(slot, 0) + 1

    def note_ready(self, slot: int) -> None:
        """Remember that the program has run on a machine of a slot."""
        self._proven_slots.add(slot)

    def note_loss(self, decision: ReleaseDecision) -> None:
        """Remember why a machine was lost.

        A machine whose program has run does not count as an attempt, unless the program failed.
        """
        machine = decision.machine
        if decision.setup_error:
            self._setup_errors.append(decision.setup_error)
        self._loss_messages[machine.slot] = decision.message
        if machine.is_ready and decision.reason is not ReleaseReason.FAILED:
            self._attempts.pop(machine.slot, None)

    def can_try(self, slot: int, now: float, *, has_machines: bool) -> bool:
        """Tell whether to try to rent a machine for a slot now.

        After a failed installation, the other machines first show whether the program can be
        installed at all.

        Args:
            slot: Number of the slot.
            now: Current time by `Clock.monotonic`.
            has_machines: Whether the rental has other machines. Without any, each try is made.
        """
        if not has_machines:
            return True
        is_unproven = bool(self._setup_errors) and not self._proven_slots
        return now >= self._retry_times.get(slot, 0.0) and not is_unproven

    def postpone_or_raise(
        self,
        slot: int,
        error: errors.MillraceError,
        now: float,
        *,
        resume_at: float,
        has_machines: bool,
    ) -> None:
        """Postpone the next try for a slot after a failed try.

        Args:
            slot: Number of the slot.
            error: Error of the failed try.
            now: Current time by `Clock.monotonic`.
            resume_at: Earliest time of the next create request.
            has_machines: Whether the rental has other machines.

        Raises:
            MillraceError: The error, if the rental has no other machines. Also if the error is
                permanent, and the program never ran on a machine of the slot, nor on enough others.
        """
        is_transient = isinstance(error, errors.UnavailableError)
        is_proven = slot in self._proven_slots or len(self._proven_slots) >= self._quorum
        if not has_machines or not (is_transient or is_proven):
            raise error
        self._retry_times[slot] = max(now, resume_at) if is_transient else now + RETRY_INTERVAL

    def refuse_exhausted(self, slot: int) -> None:
        """Refuse to rent another machine for a slot that has had too many.

        Raises:
            MachineError: `max_attempts` machines of the slot did not start, or were lost.
        """
        limit = self._settings.timeouts.max_attempts
        if self._attempts.get(slot, 0) >= limit:
            reason = self._loss_messages.get(slot, "").rstrip(".")
            raise errors.MachineError(
                f"{limit} machines for slot {slot} of {self._settings.name} did not start, or were "
                f"lost. Reason of the last loss: {reason}. Read the reports of the machines in "
                "`_machines/`, and change `request` or `program`."
            )

    def refuse_uninstallable(self) -> None:
        """Refuse to rent if the installation failed equally on two machines, and never succeeded.

        Raises:
            MachineError: The installation cannot succeed.
        """
        counts = Counter(_VARIABLE_PARTS.sub("", one) for one in self._setup_errors)
        if self._proven_slots or not counts or max(counts.values()) < _MAX_EQUAL_SETUP_ERRORS:
            return
        raise errors.MachineError(
            f"The program of {self._settings.name} cannot be installed: the installation failed "
            f"equally on {_MAX_EQUAL_SETUP_ERRORS} machines: "
            f"{self._setup_errors[-1].rstrip('.')}. Change repo_url, repo_ref, extras or image, "
            "and start again."
        )
