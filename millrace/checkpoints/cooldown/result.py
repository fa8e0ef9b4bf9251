"""Result of the end of an epoch, for one member."""

from concurrent.futures import Future
from dataclasses import dataclass, field

from millrace.schemas.checkpoint import CooldownOutcome, EpochRecord


@dataclass(frozen=True, slots=True)
class EpochResult:
    """Result of the end of an epoch, for one member.

    Attributes:
        outcome: Outcome. `CooldownOutcome.COMMITTED` means that this member committed.
        reason: Sentence with the reason; empty if there is none.
        epoch: Record that ended the epoch; None if it has not ended. Then do not train on.
        sent: Bytes that this member uploaded.
        checked: Bytes of other members that this member verified.
        replaced: Number of other members' files that did not match their digests.
        seconds: Duration.
        background_result: Future result of an upload that continues (`OnTimeout.BACKGROUND`).
    """

    outcome: CooldownOutcome
    reason: str
    epoch: EpochRecord | None
    sent: int = 0
    checked: int = 0
    replaced: int = 0
    seconds: float = 0.0
    background_result: "Future[EpochResult] | None" = field(default=None, repr=False)

    @property
    def is_durable(self) -> bool:
        """True if the epoch ended with a checkpoint of any member."""
        return self.epoch is not None and self.epoch.root is not None
