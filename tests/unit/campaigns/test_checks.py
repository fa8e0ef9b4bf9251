"""Checks before anything is created or rented."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from millrace.campaigns import (
    Training,
    check_committed_training,
    check_dataset_complete,
    check_publication,
    check_training,
    commit_training,
    is_dataset_settled,
)
from millrace.checkpoints import Saver
from millrace.errors import ConfigurationError, ConflictError, NotFoundError
from millrace.gradients import begin_run, select_weights
from millrace.keys.checkpoints import CheckpointKeys
from millrace.records import commit_once
from millrace.schemas.checkpoint import EpochRecord
from millrace.storage import Store, StoreSpec, delete, list_objects, open_store, put, read
from tests.support.campaigns.training import MakeTraining
from tests.support.campaigns.workers import finalize_dataset


def test_a_dataset_is_complete_with_its_manifest(place: StoreSpec, store: Store) -> None:
    with pytest.raises(NotFoundError, match="text is not complete at"):
        check_dataset_complete(place, "text")
    finalize_dataset(store, 1)
    check_dataset_complete(place, "text")
    put(store, "words/manifest.json", read(store, "text/manifest.json", max_size=1 << 20))
    with pytest.raises(ConfigurationError, match="words is a copy of the dataset 'text'"):
        check_dataset_complete(place, "words")


def test_the_weights_are_checked_until_the_run_has_begun(
    store: Store, make_training: MakeTraining
) -> None:
    training = make_training()
    with pytest.raises(NotFoundError, match=r"first has no .*checkpoint"):
        check_training(training)
    begin_run(store, training.run.chain_keys, select_weights(torch.nn.Linear(3, 2)))
    check_training(training)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"workers": 3}, r"training\.workers was 2, and is 3 now"),
        ({"epochs": 3}, r"the number of all windows \(.*\) was 6, and is 9 now"),
        ({"run": {"steps": 7}}, r"training\.run\.steps was \d+, and is 7 now"),
        (
            {"initial_weights": {"job": "second"}},
            r"training\.initial_weights\.job was first, and is second now",
        ),
        (
            {"initial_weights": {"job": "first", "step": 3}},
            r"training\.initial_weights\.step was nothing, and is 3 now",
        ),
    ],
)
def test_a_plan_that_has_changed_is_refused_first(
    make_training: MakeTraining, change: dict[str, object], said: str
) -> None:
    training = make_training()
    commit_training(training)
    with pytest.raises(ConflictError, match=said):
        check_training(make_training(**change))


def test_weights_of_another_bucket_are_another_plan(make_training: MakeTraining) -> None:
    training = make_training()
    commit_training(training)
    with pytest.raises(
        ConflictError, match=r"initial_weights\.bucket was nothing, and is s3://other now"
    ):
        commit_training(replace(training, initial_weights_store=StoreSpec(url="s3://other")))


def test_the_dataset_of_a_begun_training_is_not_replaced_under_its_name(
    place: StoreSpec, store: Store, make_training: MakeTraining
) -> None:
    training = make_training()
    finalize_dataset(store, 2)
    commit_training(training)
    commit_training(training)
    assert not delete(store, [stat.key for stat in list_objects(store, "text/")])
    check_committed_training(training)  # the dataset may be made again
    finalize_dataset(store, 3)
    for check in (check_committed_training, commit_training):
        with pytest.raises(ConflictError, match=r"the manifest of data\.dataset was \S+, and is"):
            check(training)


def test_a_dataset_is_made_no_more_once_a_training_has_begun_with_it(
    store: Store, make_training: MakeTraining
) -> None:
    training = make_training()
    assert not is_dataset_settled(training)
    commit_training(training)
    finalize_dataset(store, 2)
    assert not is_dataset_settled(training)  # another training may have begun without it
    assert not delete(store, [training.keys.committed_training])
    commit_training(training)
    assert is_dataset_settled(training)
    assert not delete(store, [stat.key for stat in list_objects(store, "text/")])
    assert not is_dataset_settled(training)
    end(store, training)
    assert is_dataset_settled(training)


def end(store: Store, training: Training) -> None:
    """Commit the last window and the end of the last epoch."""
    put(store, training.run.chain_keys.make_link_key(6), b"")
    end = EpochRecord(job=training.epoch_job, epoch=1, step=1, root=None, reason="late")
    commit_once(store, CheckpointKeys(training.epoch_job).make_epoch_key(1), end)


def save(place: StoreSpec, job: str, step: int, fill: float = 0.0) -> None:
    with Saver(open_store(place), job) as saver:
        saver.save({"weight": torch.full((2, 3), fill)}, step=step)


def test_a_destination_with_another_checkpoint_of_the_last_step_is_refused(
    place: StoreSpec, store: Store, make_training: MakeTraining, tmp_path: Path
) -> None:
    training, there = make_training(), StoreSpec(url=(tmp_path / "there").as_uri())
    last = 5 + 6 * training.run.steps

    save(place, "first", 5)
    save(there, "final", last - 1)
    check_publication(training, there, "final")
    save(there, "final", last)
    with pytest.raises(
        ConflictError, match=f"is another checkpoint of step {last}, .* another `job`"
    ):
        check_publication(training, there, "final")
    check_publication(training, there, "another")
    begin_run(store, training.run.chain_keys, select_weights(torch.nn.Linear(3, 2)), step=5)
    with pytest.raises(ConflictError, match="small publishes its final weights"):
        check_publication(training, there, "final")
    save(place, training.weights_job, last)  # those that were published
    check_publication(training, there, "final")


def test_the_job_of_the_epochs_gets_another_checkpoint_of_the_last_step(
    place: StoreSpec, make_training: MakeTraining
) -> None:
    training, inner = make_training(), StoreSpec(url=f"{place.url}/small")
    save(place, "first", 5)

    for spec, job in ((place, training.epoch_job), (inner, "model")):
        with pytest.raises(ConflictError, match=r"end with checkpoints of .*model in .* `job`"):
            check_publication(training, spec, job)
    check_publication(training, inner, "final")


def test_a_campaign_whose_training_has_ended_goes_on_to_its_publication(
    place: StoreSpec, store: Store, make_training: MakeTraining
) -> None:
    training = make_training()
    save(place, "final", 6 * training.run.steps)
    begin_run(store, training.run.chain_keys, select_weights(torch.nn.Linear(3, 2)))
    with pytest.raises(ConflictError):
        check_publication(training, place, "final")
    end(store, training)
    check_publication(training, place, "final")


def test_the_options_of_a_window_may_change(store: Store, make_training: MakeTraining) -> None:
    training = make_training()
    commit_training(training)
    begin_run(store, training.run.chain_keys, select_weights(torch.nn.Linear(3, 2)))
    check_training(make_training(run={"window_length": "PT7M", "gather": {"quorum": 1}}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"command": ("no-such-program",)}, "no program no-such-program"),
        ({"machines": {"kind": "local", "folder": "/no/such/folder"}}, "no folder"),
        ({"aggregation": {"ray": "127.0.0.1:1"}}, "Ray"),
    ],
)
def test_what_cannot_run_is_refused(
    store: Store, make_training: MakeTraining, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    training = make_training(**({"machines": {"kind": "local", "folder": str(tmp_path)}} | change))
    begin_run(store, training.run.chain_keys, select_weights(torch.nn.Linear(3, 2)))
    with pytest.raises(ConfigurationError, match=said):
        check_training(training)
    end(store, training)
    check_training(training)
