"""Windows and epochs that a training still has to do."""

from dataclasses import dataclass
from datetime import UTC, datetime

import pytest
import torch

from millrace.campaigns import (
    Campaign,
    Training,
    TrainingProgress,
    check_gradients_taken,
    ensure_final_weights_saved,
    has_epoch_ended,
    merge_epoch,
    needs_cooldown,
    read_training_progress,
    summarize_campaign,
)
from millrace.campaigns import progress as progress_module
from millrace.checkpoints.cooldown.epoch_records import read_epoch
from millrace.digest import compute_digest
from millrace.errors import HeldError, NoProgressError, WorkerError
from millrace.gradients import (
    ChainLink,
    Codec,
    MergeSettings,
    OuterOptimizer,
    begin_run,
    select_weights,
)
from millrace.gradients.merging.links import read_link
from millrace.keys.checkpoints import CheckpointKeys
from millrace.records import commit_once, digest_record
from millrace.schemas.chain import TakenGradient
from millrace.schemas.checkpoint import EpochRecord
from millrace.storage import Store, delete, open_store, put
from tasks.campaign_tasks import describe_campaign
from tests.support.campaigns.training import FakeWorkers, MakeTraining


@dataclass(frozen=True)
class Merged:
    windows: int
    newest_window: int


class Aggregator:
    """An aggregator that commits the windows that it is told to, and notes what it is asked.

    Args:
        training: The training, whose run begins with the first window.
        windows: A letter for each window from the first on: `t` if a gradient is taken, or `-`.
        newest: Number of the newest window that an earlier aggregator has merged.
    """

    def __init__(self, training: Training, windows: str, *, newest: int = 0) -> None:
        self.training, self.windows, self.newest = training, windows, 0
        self.asked: list[int] = []
        store = open_store(training.write_store)
        begin_run(store, training.run.chain_keys, select_weights(torch.nn.Linear(3, 2)))
        while self.newest < newest:
            self._commit()

    def __call__(self, last_window: int) -> Merged:
        self.asked.append(last_window)
        before = self.newest
        while self.newest < last_window and self._commit():
            pass
        return Merged(self.newest - before, self.newest)

    def _commit(self) -> bool:
        """Commit the next window, and return whether a gradient is taken."""
        store, chain = open_store(self.training.write_store), self.training.run.chain_keys
        is_taken = self.windows[self.newest] == "t"
        before = read_link(store, chain, self.newest)
        self.newest += 1
        worker = TakenGradient(
            scale=1,
            sum_factor=1,
            share=1,
            norm=1,
            digest=compute_digest(b""),
            size=1,
            tokens=0,
            written=datetime.now(UTC),
        )
        link = ChainLink(
            run=chain.run, window=self.newest, step=self.newest, updates=(), codec=Codec(),
            names=(), shapes=(), outer=OuterOptimizer(), merge=MergeSettings(),
            taken={"worker-0": worker} if is_taken else {}, excluded={}, seconds=0, scores="",
            previous=digest_record(before), state=f"{self.newest}" if is_taken else before.state,
        )  # fmt: skip
        commit_once(store, chain.make_link_key(self.newest), link)
        return is_taken


def test_a_run_begins_with_its_first_link(store: Store, make_training: MakeTraining) -> None:
    training = make_training()
    progress = read_training_progress(training)
    assert progress == TrainingProgress(-1)
    assert not progress.has_begun
    begin_run(store, training.run.chain_keys, select_weights(torch.nn.Linear(3, 2)))
    progress = read_training_progress(training)
    assert progress == TrainingProgress(0)
    assert progress.has_begun


def set_progress(store: Store, training: Training, newest_window: int, ended: set[int]) -> None:
    """Write names of links, and ends of epochs without a checkpoint."""
    for window in range(newest_window + 1):
        put(store, training.run.chain_keys.make_link_key(window), b"")
    keys = CheckpointKeys(training.epoch_job)
    for epoch in ended:
        end = EpochRecord(job=keys.job, epoch=epoch, step=1, root=None, reason="late")
        commit_once(store, keys.make_epoch_key(epoch), end)


def test_an_epoch_whose_record_is_damaged_and_that_nobody_voted_on_has_not_ended(
    store: Store, make_training: MakeTraining
) -> None:
    put(store, "small/model/epochs/000001.json", b"junk")
    assert not has_epoch_ended(make_training(), 1)


@pytest.mark.parametrize(
    ("newest_window", "ended", "has_ended"),
    [(6, {0, 1}, True), (6, {1}, True), (6, {0}, False), (5, {0, 1}, False), (-1, set(), False)],
)
def test_a_training_has_ended_with_its_last_window_and_its_last_epoch(
    store: Store,
    make_training: MakeTraining,
    newest_window: int,
    ended: set[int],
    has_ended: bool,
) -> None:
    training = make_training()
    set_progress(store, training, newest_window, ended)
    assert read_training_progress(training).has_ended is has_ended


@pytest.mark.parametrize(
    ("newest_window", "ended", "needs"),
    [(0, set(), True), (3, set(), True), (3, {0}, False), (4, set(), False)],
)
def test_an_epoch_without_a_checkpoint_stays_so_when_the_next_has_windows(
    store: Store, make_training: MakeTraining, newest_window: int, ended: set[int], needs: bool
) -> None:
    training = make_training()
    set_progress(store, training, newest_window, ended)
    assert needs_cooldown(training, 0) is needs


@pytest.mark.parametrize(
    ("newest_window", "first"), [(-1, 0), (0, 0), (1, 0), (3, 0), (4, 1), (6, 1), (7, 2), (9, 2)]
)
def test_a_training_goes_on_in_the_epoch_of_its_newest_window(
    make_training: MakeTraining, newest_window: int, first: int
) -> None:
    progress = TrainingProgress(newest_window)
    assert progress.find_open_epochs(make_training(epochs=3)) == range(first, 3)


def test_a_restart_reads_the_ends_of_its_own_epochs_only(
    store: Store, make_training: MakeTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rented machines wait while a leader that was started again looks where the training is."""
    training = make_training(epochs=100)
    set_progress(store, training, 3 * 99, set(range(98)))
    asked: list[int] = []

    def count(store: Store, job: str, epoch: int) -> EpochRecord:
        asked.append(epoch)
        return read_epoch(store, job, epoch)

    monkeypatch.setattr(progress_module, "read_epoch", count)
    for epoch in read_training_progress(training).find_open_epochs(training):
        needs_cooldown(training, epoch)
    assert asked == [98, 99]


def test_the_windows_of_an_epoch_are_merged_from_where_the_chain_is(
    make_training: MakeTraining,
) -> None:
    training, workers = make_training(), FakeWorkers()
    aggregator = Aggregator(training, "tttt-t", newest=4)
    merge_epoch(training, 1, workers, aggregator)
    assert aggregator.asked == [6] * 2
    assert aggregator.newest == 6


def test_an_epoch_that_is_merged_asks_for_nothing(make_training: MakeTraining) -> None:
    training = make_training()
    aggregator = Aggregator(training, "ttt", newest=3)
    merge_epoch(training, 0, FakeWorkers(), aggregator)
    assert aggregator.asked == []


def test_idle_windows_in_a_row_end_the_training(make_training: MakeTraining) -> None:
    training = make_training(windows_per_epoch=9, aggregation={"idle": 2})
    # The second aggregator merges windows 2 to 4, of which only the last is idle.
    aggregator = Aggregator(training, "-tt--t")
    with pytest.raises(NoProgressError, match=r"In 2 windows in a row .* 5 of 18 windows"):
        merge_epoch(training, 0, FakeWorkers(), aggregator)
    assert len(aggregator.asked) == 3


@pytest.mark.parametrize("windows_per_epoch", [1, 2, 3, 4])
def test_idle_windows_in_a_row_are_noticed_however_short_the_epochs_are(
    make_training: MakeTraining, windows_per_epoch: int
) -> None:
    training = make_training(windows_per_epoch=windows_per_epoch, epochs=9)
    aggregator = Aggregator(training, "-" * 40)
    last_epoch = 2 // windows_per_epoch
    for epoch in range(last_epoch):
        merge_epoch(training, epoch, FakeWorkers(), aggregator)
    with pytest.raises(NoProgressError, match=r"In 3 windows in a row"):
        merge_epoch(training, last_epoch, FakeWorkers(), aggregator)
    assert aggregator.newest == 3


@pytest.mark.parametrize(("begun", "ended"), [(2, 3), (3, 6)])
def test_idle_windows_before_a_restart_count(
    make_training: MakeTraining, begun: int, ended: int
) -> None:
    """The row goes on after a kill. After its end, all of its windows are tried again."""
    training = make_training(windows_per_epoch=9)
    aggregator = Aggregator(training, "-" * 9, newest=begun)
    with pytest.raises(NoProgressError, match=f"In {ended} windows in a row"):
        merge_epoch(training, 0, FakeWorkers(), aggregator)
    assert aggregator.newest == ended


def test_an_idle_last_window_ends_the_last_epoch(make_training: MakeTraining) -> None:
    training = make_training(aggregation={"idle": 1})
    aggregator = Aggregator(training, "ttttt-", newest=5)
    merge_epoch(training, 1, FakeWorkers(), aggregator)
    assert aggregator.newest == 6


def test_the_failure_of_the_workers_says_more_than_their_silence(
    make_training: MakeTraining,
) -> None:
    training, workers = make_training(aggregation={"idle": 1}), FakeWorkers()
    aggregator = Aggregator(training, "-")

    def merge(last_window: int) -> Merged:
        workers.failure = WorkerError("All workers have failed.")
        return aggregator(last_window)

    with pytest.raises(WorkerError):
        merge_epoch(training, 0, workers, merge)


def test_workers_that_ended_too_early_are_named(make_training: MakeTraining) -> None:
    training = make_training(aggregation={"idle": 1})
    with pytest.raises(NoProgressError, match=r"All workers have ended\. worker-0 ended with 0"):
        merge_epoch(training, 0, FakeWorkers(is_over=True), Aggregator(training, "-"))


def test_windows_that_another_process_merges_are_left_to_it(make_training: MakeTraining) -> None:
    with pytest.raises(HeldError, match="small/run is aggregated by another process"):
        merge_epoch(make_training(), 0, FakeWorkers(), lambda _: None)


def test_a_training_that_merged_nothing_is_refused(make_training: MakeTraining) -> None:
    training = make_training(epochs=1)
    Aggregator(training, "---", newest=3)
    with pytest.raises(NoProgressError, match="No gradient was taken in any window of small/run"):
        check_gradients_taken(training)


def test_weights_of_a_run_with_idle_windows_are_published(make_training: MakeTraining) -> None:
    training = make_training(epochs=1)
    aggregator = Aggregator(training, "t--", newest=3)
    check_gradients_taken(training)
    assert ensure_final_weights_saved(training, aggregator) == 3
    assert aggregator.asked == [3]


def test_windows_whose_links_were_cleaned_are_trained_and_not_counted(
    store: Store, make_training: MakeTraining
) -> None:
    training = make_training(epochs=1, windows_per_epoch=5, aggregation={"idle": 2})
    chain = training.run.chain_keys
    aggregator = Aggregator(training, "tt--t", newest=4)
    assert not delete(store, [chain.make_link_key(window) for window in (1, 2, 3)])
    merge_epoch(training, 0, FakeWorkers(), aggregator)
    assert ensure_final_weights_saved(training, aggregator) == 5
    place = training.write_store
    found = summarize_campaign(Campaign("small", place, place, training=training))
    assert (found.windows, found.uncounted_windows, found.gradients, found.step) == (1, 3, 1, 5)
    rows = describe_campaign(found)
    assert "1, up to step 5, without the first 3 windows, whose records were cleaned" in rows
