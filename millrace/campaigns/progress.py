"""Progress of a training by what is committed, and the windows of its epochs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from millrace import gradients
from millrace.campaigns.campaign import Training
from millrace.campaigns.workers import CampaignWorkers
from millrace.checkpoints import read_checkpoint
from millrace.checkpoints.cooldown.epoch_records import read_epoch
from millrace.checkpoints.cooldown.votes import derive_epoch
from millrace.errors import CorruptError, HeldError, NoProgressError, NotFoundError
from millrace.formatting import format_count
from millrace.gradients import ChainLink
from millrace.keys.gradients import ChainKeys
from millrace.schemas.checkpoint import EpochRecord
from millrace.storage import Store, open_store


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Progress of a campaign's training, by what is committed.

    Attributes:
        newest_window: Number of the newest merged window; -1 before the run has begun.
        has_ended: Whether all windows are merged, and the last epoch has ended.
    """

    newest_window: int
    has_ended: bool = False

    @property
    def has_begun(self) -> bool:
        """True if the weights that the run begins with are committed."""
        return self.newest_window >= 0

    def find_open_epochs(self, training: Training) -> range:
        """Return the numbers of the epochs from that of the newest window on."""
        epoch = max(0, self.newest_window - 1) // training.options.windows_per_epoch
        return range(epoch, training.options.epochs)


class MergedWindows(Protocol):
    """Result of an aggregator that has merged windows."""

    @property
    def newest_window(self) -> int:
        """Number of the newest merged window."""
        ...


RunAggregator = Callable[[int], MergedWindows | None]
"""Runs an aggregator up to the window of the given number, or one without a gradient.

None means that another process aggregates the run: the flow then ends as completed, with a message.
"""


def read_training_progress(training: Training) -> TrainingProgress:
    """Return the progress of a training. One listing, and the record of the last epoch."""
    store = open_store(training.write_store)
    newest = gradients.find_newest_window(store, training.run.chain_keys)
    is_merged = newest >= training.last_window
    return TrainingProgress(
        newest, is_merged and has_epoch_ended(training, training.options.epochs - 1)
    )


def needs_cooldown(training: Training, epoch: int) -> bool:
    """Decide whether an epoch still has to end with a checkpoint.

    An epoch without one stays so once a window of the next epoch is merged.
    """
    store = open_store(training.write_store)
    newest = gradients.find_newest_window(store, training.run.chain_keys)
    is_past = newest > training.find_last_window(epoch)
    return not is_past and not has_epoch_ended(training, epoch)


def has_epoch_ended(training: Training, epoch: int) -> bool:
    """Decide whether an epoch has ended, with a checkpoint or without one."""
    store = open_store(training.write_store)
    return read_epoch_end(store, training.epoch_job, epoch) is not None


def read_epoch_end(store: Store, job: str, epoch: int) -> EpochRecord | None:
    """Return the end of an epoch, by its record, or by its votes if the record is damaged."""
    try:
        return read_epoch(store, job, epoch)
    except NotFoundError:
        return None
    except CorruptError:
        return derive_epoch(store, job, epoch)


def check_gradients_taken(training: Training) -> None:
    """Refuse a training that has changed no weights.

    Args:
        training: Training whose windows are all merged.

    Raises:
        NoProgressError: No gradient was taken in any window.
    """
    store, keys = open_store(training.write_store), training.run.chain_keys
    start, last = (gradients.read_link(store, keys, one) for one in (0, training.last_window))
    if last.state == start.state:
        raise NoProgressError(
            f"No gradient was taken in any window of {keys.run}, so its weights are those that it "
            "began with. See what the workers say, and begin a campaign with another name."
        )


def ensure_final_weights_saved(training: Training, aggregate: RunAggregator) -> int:
    """Save the weights after the last window, unless the aggregator that merged it has done so.

    An aggregator that was killed after its last link has saved older weights only.

    Args:
        training: Training whose windows are all merged.
        aggregate: Runs an aggregator.

    Returns:
        Step of these weights, by which the job of the chain has their checkpoint. Its files are
        not verified.

    Raises:
        HeldError: Another process aggregates the run.
    """
    store, keys = open_store(training.write_store), training.run.chain_keys
    last = gradients.read_link(store, keys, training.last_window)
    try:
        read_checkpoint(store, training.weights_job, last.step)
    except (NotFoundError, CorruptError):
        repair_final_weights(training, aggregate)
    return last.step


def repair_final_weights(training: Training, aggregate: RunAggregator) -> None:
    """Save the weights after the last window, from the newest undamaged checkpoint and the chain.

    Raises:
        HeldError: Another process aggregates the run.
    """
    _merge_until(training, training.last_window, aggregate)


def merge_epoch(
    training: Training, epoch: int, workers: CampaignWorkers, aggregate: RunAggregator
) -> None:
    """Merge the windows of an epoch that are not merged yet.

    Args:
        training: Training.
        epoch: Number of the epoch.
        workers: Processes or machines of the workers.
        aggregate: Runs an aggregator.

    Raises:
        HeldError: Another process merges the windows.
        NoProgressError: No gradient was taken in too many windows in a row.
        WorkerError, MachineError: The workers have failed.
    """
    store, end = open_store(training.write_store), training.find_last_window(epoch)
    newest_window = gradients.find_newest_window(store, training.run.chain_keys)
    while newest_window < end:
        workers.raise_failure()
        # The aggregator stops after each window without a gradient, so that the failure of all
        # workers is noticed.
        newest_window = _merge_until(training, end, aggregate).newest_window
        idle_windows = _count_idle_windows(store, training.run.chain_keys, newest_window)
        # A campaign that is started again after such a row has the time of another one.
        is_idle = idle_windows > 0 and idle_windows % training.options.aggregation.idle == 0
        if is_idle and newest_window < training.last_window:
            workers.raise_failure()
            cause = f" All workers have ended. {workers.describe_end()}" if workers.is_over else ""
            raise NoProgressError(
                f"In {format_count(idle_windows, 'window')} in a row no gradient was taken. "
                f"{newest_window} of {training.last_window} windows are merged: see what the "
                f"workers say.{cause}"
            )


def _count_idle_windows(store: Store, keys: ChainKeys, newest_window: int) -> int:
    """Count the windows without a taken gradient at the end of a chain, also of earlier epochs.

    Windows whose links were cleaned do not count.
    """
    window = newest_window
    while window > 0:
        try:
            link = gradients.read_link(store, keys, window)
        except gradients.ChainError:
            break
        if isinstance(link, ChainLink) and link.taken:
            break
        window -= 1
    return newest_window - window


def _merge_until(training: Training, last_window: int, aggregate: RunAggregator) -> MergedWindows:
    done = aggregate(last_window)
    if done is None:
        raise HeldError(f"{training.keys.run} is aggregated by another process, which is alive.")
    return done
