"""Checks before anything is created or rented."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from millrace.campaigns import (
    check_committed_training,
    check_dataset_complete,
    check_training,
    commit_training,
)
from millrace.errors import ConfigurationError, ConflictError, NotFoundError
from millrace.gradients import InitialWeights, begin_run, select_weights
from millrace.storage import Store, StoreSpec, delete, list_objects, put, read
from tests.support.campaigns.training import MakeTraining
from tests.support.campaigns.workers import finalize_dataset


def refuse() -> InitialWeights:
    raise AssertionError("nobody needs the weights that the run begins with")


def test_a_dataset_is_complete_with_its_manifest(place: StoreSpec, store: Store) -> None:
    with pytest.raises(NotFoundError, match="text is not complete at"):
        check_dataset_complete(place, "text")
    finalize_dataset(store, 1)
    check_dataset_complete(place, "text")
    put(store, "words/manifest.json", read(store, "text/manifest.json", max_size=1 << 20))
    with pytest.raises(ConfigurationError, match="words is a copy of the dataset 'text'"):
        check_dataset_complete(place, "words")


def test_the_weights_are_checked_until_the_run_has_begun(
    place: StoreSpec, store: Store, make_training: MakeTraining
) -> None:
    training = make_training()
    with pytest.raises(NotFoundError, match=r"first has no .*checkpoint"):
        check_training(training, lambda: InitialWeights(url=place.url, job="first"))
    begin_run(store, training.run.chain_keys, select_weights(torch.nn.Linear(3, 2)))
    check_training(training, refuse)


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
        check_training(make_training(**change), refuse)


def test_weights_of_another_bucket_are_another_plan(make_training: MakeTraining) -> None:
    training = make_training()
    commit_training(training)
    with pytest.raises(ConflictError, match=r"weights\.bucket was nothing, and is s3://other now"):
        commit_training(replace(training, initial_weights_url="s3://other"))


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


def test_the_options_of_a_window_may_change(store: Store, make_training: MakeTraining) -> None:
    training = make_training()
    commit_training(training)
    begin_run(store, training.run.chain_keys, select_weights(torch.nn.Linear(3, 2)))
    check_training(make_training(run={"window_length": "PT7M", "gather": {"quorum": 1}}), refuse)


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
        check_training(training, refuse)
