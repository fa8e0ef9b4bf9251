"""Windows and epochs that a training still has to do."""

from dataclasses import dataclass

import pytest
import torch

from millrace.campaigns import TrainingProgress, merge_epoch, read_training_progress
from millrace.errors import HeldError, UnavailableError, WorkerError
from millrace.gradients import AggregationSettings, begin_run, select_weights
from millrace.storage import Store, put
from tests.support.campaigns.training import FakeWorkers, MakeTraining


@dataclass(frozen=True)
class Merged:
    windows: int
    newest_window: int


class Aggregator:
    """An aggregator that answers with what it is told to, and notes what it is asked."""

    def __init__(self, *answers: Merged | None) -> None:
        self.answers = list(answers)
        self.asked: list[AggregationSettings] = []

    def __call__(self, settings: AggregationSettings) -> Merged | None:
        self.asked.append(settings)
        return self.answers.pop(0)


def test_a_run_begins_with_its_first_link(store: Store, make_training: MakeTraining) -> None:
    training = make_training()
    progress = read_training_progress(training)
    assert progress == TrainingProgress(-1, frozenset())
    assert not progress.has_begun
    begin_run(store, training.run.chain, select_weights(torch.nn.Linear(3, 2)))
    progress = read_training_progress(training)
    assert (progress.has_begun, progress.has_merged_windows) == (True, False)


def test_an_epoch_whose_record_is_damaged_and_that_nobody_voted_on_has_not_ended(
    store: Store, make_training: MakeTraining
) -> None:
    put(store, "small/model/epochs/000001.json", b"junk")
    assert read_training_progress(make_training()).ended_epochs == frozenset()


@pytest.mark.parametrize(
    ("newest_window", "ended", "has_ended"),
    [(6, {0, 1}, True), (6, {1}, True), (6, {0}, False), (5, {0, 1}, False), (-1, set(), False)],
)
def test_a_training_has_ended_with_its_last_window_and_its_last_epoch(
    make_training: MakeTraining, newest_window: int, ended: set[int], has_ended: bool
) -> None:
    progress = TrainingProgress(newest_window, frozenset(ended))
    assert progress.has_ended(make_training()) is has_ended


@pytest.mark.parametrize(
    ("newest_window", "ended", "needs"),
    [(0, set(), True), (3, set(), True), (3, {0}, False), (4, set(), False)],
)
def test_an_epoch_without_a_checkpoint_stays_so_when_the_next_has_windows(
    make_training: MakeTraining, newest_window: int, ended: set[int], needs: bool
) -> None:
    progress = TrainingProgress(newest_window, frozenset(ended))
    assert progress.needs_cooldown(make_training(), 0) is needs


def test_the_windows_of_an_epoch_are_merged_from_where_the_chain_is(
    make_training: MakeTraining,
) -> None:
    training, workers = make_training(), FakeWorkers()
    aggregator = Aggregator(Merged(1, 5), Merged(1, 6))
    merge_epoch(training, 1, 4, workers, aggregator)
    assert aggregator.asked == [training.make_aggregation_settings(6)] * 2
    assert aggregator.answers == []


def test_an_epoch_that_is_merged_asks_for_nothing(make_training: MakeTraining) -> None:
    merge_epoch(make_training(), 0, 3, FakeWorkers(), Aggregator())


def test_idle_windows_in_a_row_end_the_training(make_training: MakeTraining) -> None:
    training = make_training(windows_per_epoch=9, aggregation={"idle": 2})
    # The third aggregator merges windows 3 to 5, of which only the last was idle.
    aggregator = Aggregator(Merged(1, 1), Merged(3, 4), Merged(1, 5), Merged(1, 6))
    with pytest.raises(UnavailableError, match=r"In 2 windows in a row .* 5 of 9 windows"):
        merge_epoch(training, 0, 0, FakeWorkers(), aggregator)
    assert len(aggregator.asked) == 3


def test_an_idle_last_window_ends_the_epoch(make_training: MakeTraining) -> None:
    training = make_training(aggregation={"idle": 1})
    merge_epoch(training, 0, 2, FakeWorkers(), Aggregator(Merged(1, 3)))


def test_the_failure_of_the_workers_says_more_than_their_silence(
    make_training: MakeTraining,
) -> None:
    training, workers = make_training(aggregation={"idle": 1}), FakeWorkers()

    def merge(settings: AggregationSettings) -> Merged:
        workers.failure = WorkerError("All workers have failed.")
        return Merged(1, 1)

    with pytest.raises(WorkerError):
        merge_epoch(training, 0, 0, workers, merge)


def test_windows_that_another_process_merges_are_left_to_it(make_training: MakeTraining) -> None:
    with pytest.raises(HeldError, match="small/run is aggregated by another process"):
        merge_epoch(make_training(), 0, 0, FakeWorkers(), Aggregator(None))
