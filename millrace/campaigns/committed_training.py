"""Pin the settings of a training that cannot change under the campaign's name."""

from contextlib import suppress
from typing import Any, ClassVar

from millrace.campaigns.campaign import Training
from millrace.errors import ConflictError, NotFoundError
from millrace.gradients import InitialWeights, RunSettings, WindowOptions
from millrace.keys.datasets import DatasetKeys
from millrace.records import (
    Record,
    commit_once,
    digest_record,
    fetch,
    find_changes,
)
from millrace.schemas.dataset import Manifest
from millrace.storage import open_store

_FIELD_NAMES = {
    "workers": "training.workers",
    "windows_per_epoch": "training.windows_per_epoch",
    "run.windows": "the number of all windows (training.epochs x training.windows_per_epoch)",
    "dataset": "data.dataset",
    "dataset_digest": "the manifest of data.dataset",
    "initial_weights_url": "training.initial_weights.bucket",
}  # names of committed fields in the plan of a campaign; the others begin with `training.`


class CommittedTraining(Record):
    """Record of the settings of a campaign's training that cannot change under its name."""

    record_kind: ClassVar[str] = "campaign-training"
    record_version: ClassVar[int] = 5  # with `initial_weights_url`

    workers: int
    windows_per_epoch: int
    run: RunSettings
    dataset: str
    dataset_digest: str | None  # of the manifest
    initial_weights: InitialWeights
    initial_weights_url: str  # empty for the campaign's store


def check_committed_training(training: Training) -> None:
    """Refuse settings that differ from the committed ones, before anything is created or rented.

    Raises:
        ConflictError: A setting that cannot change differs; the message names the values.
    """
    with suppress(NotFoundError):  # nothing is committed yet
        store = open_store(training.write_store, make_folder=False)
        committed = fetch(store, training.keys.committed_training, CommittedTraining)
        _refuse_changes(_make_committed_training(training), committed, training.campaign)


def commit_training(training: Training) -> None:
    """Commit the settings that cannot change, or refuse settings that differ from them.

    Raises:
        ConflictError: A setting that cannot change differs; the message names the values.
    """
    found, key = _make_committed_training(training), training.keys.committed_training
    committed = commit_once(open_store(training.write_store), key, found).record
    _refuse_changes(found, committed, training.campaign)


def has_begun_with_dataset(training: Training) -> bool:
    """Decide whether the settings are committed with the digest of the dataset, as it is now."""
    store = open_store(training.write_store, make_folder=False)
    try:
        committed = fetch(store, training.keys.committed_training, CommittedTraining)
    except NotFoundError:
        return False
    digest = committed.dataset_digest
    return digest is not None and digest == _digest_dataset(training)


def _make_committed_training(training: Training) -> CommittedTraining:
    return CommittedTraining(
        workers=training.options.workers,
        windows_per_epoch=training.options.windows_per_epoch,
        run=training.run,
        dataset=training.dataset,
        dataset_digest=_digest_dataset(training),
        initial_weights=training.options.initial_weights,
        initial_weights_url=training.initial_weights_url,
    )


def _digest_dataset(training: Training) -> str | None:
    """Return the digest of the dataset's manifest; None before the dataset is complete."""
    try:
        store = open_store(training.read_store, make_folder=False)
        return digest_record(fetch(store, DatasetKeys(training.dataset).manifest, Manifest))
    except NotFoundError:
        return None


def _refuse_changes(found: CommittedTraining, committed: CommittedTraining, campaign: str) -> None:
    differences = find_changes(committed, found)
    if None in (committed.dataset_digest, found.dataset_digest):
        differences.pop("dataset_digest", None)  # the dataset is not made yet
    free = tuple(f"run.{name}" for name in WindowOptions.model_fields)
    changes = [
        f"{_describe_field(path)} was {_format_value(old)}, and is {_format_value(new)} now"
        for path, (old, new) in differences.items()
        if path not in free and not path.startswith(tuple(f"{name}." for name in free))
    ]
    if changes:
        raise ConflictError(
            f"{campaign} was begun with another plan: {'; '.join(changes)}. Go on as it "
            "was, or give this one another name, and begin it with the weights of that."
        )


def _describe_field(path: str) -> str:
    """Return the name of a committed field in the plan of a campaign."""
    return _FIELD_NAMES.get(path) or f"training.{path}"


def _format_value(value: Any) -> str:
    return "nothing" if value in (None, "") else str(value)
