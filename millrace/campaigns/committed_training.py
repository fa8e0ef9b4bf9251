"""Pin the settings of a training that cannot change under the campaign's name."""

from contextlib import suppress
from typing import Any, ClassVar

from millrace.campaigns.worker import SharedWorkerSettings
from millrace.errors import ConflictError, NotFoundError
from millrace.gradients import RunSettings, WindowOptions
from millrace.keys.campaigns import CampaignKeys
from millrace.records import Record, commit_once, fetch, find_changes
from millrace.storage import StoreSpec, open_store

_FIELD_NAMES = {
    "workers": "training.workers",
    "windows_per_epoch": "training.windows_per_epoch",
    "run.windows": "the number of all windows (training.epochs x training.windows_per_epoch)",
    "dataset": "data.dataset",
}  # names of committed fields in the plan of a campaign; the others begin with `training.run`


class CommittedTraining(Record):
    """Record of the settings of a campaign's training that cannot change under its name."""

    record_kind: ClassVar[str] = "campaign-training"
    record_version: ClassVar[int] = 2  # with `window_length`

    workers: int
    windows_per_epoch: int
    run: RunSettings
    dataset: str | None


def check_committed_training(spec: StoreSpec, settings: SharedWorkerSettings) -> None:
    """Refuse settings that differ from the committed ones, before anything is created or rented.

    Raises:
        ConflictError: A setting that cannot change differs; the message names the values.
    """
    with suppress(NotFoundError):  # nothing is committed yet
        store = open_store(spec, make_folder=False)
        _refuse_changes(
            settings,
            fetch(store, CampaignKeys(settings.campaign).committed_training, CommittedTraining),
        )


def commit_training(spec: StoreSpec, settings: SharedWorkerSettings) -> None:
    """Commit the settings that cannot change, or refuse settings that differ from them.

    Raises:
        ConflictError: A setting that cannot change differs; the message names the values.
    """
    key = CampaignKeys(settings.campaign).committed_training
    committed = commit_once(open_store(spec), key, _make_committed_training(settings)).record
    _refuse_changes(settings, committed)


def _make_committed_training(settings: SharedWorkerSettings) -> CommittedTraining:
    return CommittedTraining(
        **{name: getattr(settings, name) for name in CommittedTraining.model_fields}
    )


def _refuse_changes(settings: SharedWorkerSettings, committed: CommittedTraining) -> None:
    found = find_changes(committed, _make_committed_training(settings))
    free = tuple(f"run.{name}" for name in WindowOptions.model_fields)
    changes = [
        f"{_describe_field(path)} was {_format_value(old)}, and is {_format_value(new)} now"
        for path, (old, new) in found.items()
        if path not in free and not path.startswith(tuple(f"{name}." for name in free))
    ]
    if changes:
        raise ConflictError(
            f"{settings.campaign} was begun with another plan: {'; '.join(changes)}. Go on as it "
            "was, or give this one another name, and begin it with the weights of that."
        )


def _describe_field(path: str) -> str:
    """Return the name of a committed field in the plan of a campaign."""
    return _FIELD_NAMES.get(path) or f"training.run.{path.removeprefix('run.')}"


def _format_value(value: Any) -> str:
    return "nothing" if value is None else str(value)
