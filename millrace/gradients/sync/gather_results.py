"""Results of the reads of a window: valid gradients, and reasons why workers are excluded."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import PurePosixPath

from millrace import errors
from millrace.gradients.codec.gradient_object import CheckedGradient
from millrace.gradients.progress_events import GradientAccepted, GradientRefused
from millrace.gradients.sync.gradient_reader import ReadResult
from millrace.progress import Progress
from millrace.schemas.chain import ExcludedWorker
from millrace.schemas.gradient import ExclusionReason
from millrace.storage import Stat

_TRANSIENT = {ExclusionReason.CHANGED, ExclusionReason.UNAVAILABLE}
_NOT_READ = {
    ExclusionReason.EARLY,
    ExclusionReason.LATE,
    ExclusionReason.TOO_LARGE,
    ExclusionReason.UNAVAILABLE,
}
_MOST_READS = 3  # of one worker's gradient in a window


@dataclass(frozen=True, slots=True)
class GatherOutcome:
    """Gradients of a window.

    Attributes:
        taken: Gradients to merge, by the workers' names.
        excluded: Excluded workers with the reasons, without reserves that were not needed.
        spare: Workers whose gradients were not needed. Some were not read completely.
        size: Size of the gradients to merge, in bytes.
        seconds: Duration of the gathering.
        written: Times of the uploads of the gradients to merge, by the stores' clock.
    """

    taken: Mapping[str, CheckedGradient] = field(repr=False)
    excluded: Mapping[str, ExcludedWorker]
    spare: tuple[str, ...]
    size: int
    seconds: float
    written: Mapping[str, datetime] = field(repr=False)

    def exclude_all(self) -> "GatherOutcome":
        """Return the same window without a quorum: all of its valid gradients are excluded."""
        alone = ExcludedWorker(
            reason=ExclusionReason.QUORUM, sentence="It is valid, but too few others arrived."
        )
        excluded = {**self.excluded, **dict.fromkeys(self.taken, alone)}
        return GatherOutcome({}, excluded, (), 0, self.seconds, {})


class QuorumError(errors.UnavailableError):
    """Fewer gradients than the quorum arrived in time.

    Attributes:
        gathered: Result without any gradient to merge, and with a reason for each worker.
    """

    def __init__(self, sentence: str, gathered: GatherOutcome) -> None:
        super().__init__(sentence)
        self.gathered = gathered


class GatherResults:
    """Results of the workers of a window.

    A refused gradient may be overwritten until the end of the window. At most three objects of a
    worker are read.

    Args:
        order: Names of all workers and reserves, in the order in which they are preferred.
        progress: Receives `GradientAccepted` or `GradientRefused` for each result.
    """

    def __init__(self, order: Sequence[str], progress: Progress) -> None:
        self._order, self._progress = tuple(order), progress
        self._results: dict[str, ReadResult] = {}
        self._read_counts = Counter[str]()  # number of read objects of each worker
        self._seen: dict[str, Stat] = {}  # last object of each worker
        self._unlisted: dict[str, ExcludedWorker] = {}  # reasons of the last listing, if it failed
        self._transient: dict[str, ExcludedWorker] = {}  # reasons that another read may remove

    def has_all(self, uids: Iterable[str]) -> bool:
        """Decide whether each of some workers has a result."""
        return all(uid in self._results for uid in uids)

    def has(self, uid: str) -> bool:
        """Decide whether a worker has a result."""
        return uid in self._results

    def get_valid(self, uid: str) -> tuple[CheckedGradient, datetime]:
        """Return the valid gradient of a worker, and the time of its upload."""
        result = self._results[uid]
        assert result.gradient is not None
        assert result.written is not None
        return result.gradient, result.written

    def note_listing(self, asked: Iterable[str], failed: Mapping[str, ExcludedWorker]) -> None:
        """Note why the requested workers could not be listed, until a listing succeeds."""
        for uid in asked:
            self._unlisted.pop(uid, None)
        self._unlisted.update(failed)

    def should_read(self, uid: str, stat: Stat) -> bool:
        """Note a listed gradient of a worker, and decide whether it is read.

        A worker that overwrites its gradient too often is excluded.
        """
        if self._seen.get(uid) == stat:
            return False
        self._transient.pop(uid, None)
        self._seen[uid] = stat
        if self._read_counts[uid] < _MOST_READS:
            return True
        before = self._results.get(uid)
        if before is None or not _is_overwritten(before):
            name = PurePosixPath(stat.key).name
            sentence = (
                f"{name} was overwritten after it was read {_MOST_READS} times in this window."
            )
            self._results[uid] = ReadResult(
                None, ExcludedWorker(reason=ExclusionReason.OVERWRITTEN, sentence=sentence)
            )
            self._report_refused(uid, ExclusionReason.OVERWRITTEN)
        return False

    def note(self, uid: str, result: ReadResult, *, is_last: bool) -> None:
        """Note the result of a read.

        Args:
            uid: Name of the worker.
            result: Result of the read.
            is_last: Whether there is no time for another attempt. Otherwise, after an error that
                may pass, the object is read again.
        """
        exclusion = result.exclusion
        if exclusion is None or exclusion.reason not in _NOT_READ:
            self._read_counts[uid] += 1
        if exclusion is not None and exclusion.reason in _TRANSIENT and not is_last:
            self._transient[uid] = exclusion
            del self._seen[uid]
            return
        self._results[uid] = result
        if result.gradient is not None:
            self._progress(GradientAccepted(uid=uid, size=result.size, norm=result.gradient.norm))
        elif exclusion is not None:
            self._report_refused(uid, exclusion.reason)

    def select_valid(self) -> list[str]:
        """Return the workers with valid gradients, in their order.

        Of equal contents only the earliest counts. Gradients without any change are no copies.
        """
        valid = {
            uid: result.gradient
            for uid in self._order
            if (result := self._results.get(uid)) and result.gradient
        }
        first: dict[str, str] = {}
        for uid in sorted(valid, key=lambda uid: (str(self._results[uid].written), uid)):
            first.setdefault(valid[uid].header.body, uid)
        return [
            uid
            for uid, gradient in valid.items()
            if first[gradient.header.body] == uid or not gradient.norm
        ]

    def explain_exclusion(self, uid: str, *, is_pending: bool) -> ExcludedWorker:
        """Return the reason why a worker is excluded.

        Args:
            uid: Name of the worker.
            is_pending: Whether a listing or a read of the worker has not ended.
        """
        result = self._results.get(uid)
        if result is not None:
            return result.exclusion or ExcludedWorker(
                reason=ExclusionReason.DUPLICATE,
                sentence="Another worker had sent the same gradient before.",
            )
        if uid in self._unlisted:
            return self._unlisted[uid]
        if uid in self._transient:
            return self._transient[uid]
        if is_pending:
            return ExcludedWorker(
                reason=ExclusionReason.UNAVAILABLE,
                sentence="Its bucket had not answered by the deadline.",
            )
        return ExcludedWorker(
            reason=ExclusionReason.MISSING,
            sentence="No gradient of it arrived before the deadline.",
        )

    def _report_refused(self, uid: str, reason: ExclusionReason) -> None:
        self._progress(GradientRefused(uid=uid, reason=reason))


def _is_overwritten(result: ReadResult) -> bool:
    return result.exclusion is not None and result.exclusion.reason is ExclusionReason.OVERWRITTEN
