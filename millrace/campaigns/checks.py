"""Checks of a campaign before anything is created or rented."""

from collections.abc import Callable
from pathlib import Path

from millrace import cluster, gradients
from millrace.campaigns.campaign import Training
from millrace.campaigns.committed_training import check_committed_training
from millrace.campaigns.progress import read_training_progress
from millrace.campaigns.settings import LocalWorkerOptions
from millrace.campaigns.worker import check_local_command, check_repository_command
from millrace.dataset_ledger import fetch_manifest
from millrace.errors import NotFoundError
from millrace.gradients import InitialWeights
from millrace.keys.datasets import DatasetKeys
from millrace.storage import StoreSpec, open_store


def check_training(training: Training, find_weights: Callable[[], InitialWeights]) -> None:
    """Refuse a training that cannot run, before anything is created or rented for it.

    Args:
        training: Training.
        find_weights: Returns the checkpoint that the run begins with. Called only if the run has
            not begun.

    Raises:
        ConflictError: A setting that cannot change differs from the committed one.
        NotFoundError, CorruptError: The checkpoint does not exist, or is damaged.
        ConfigurationError: The checkpoint has no tensors of these names, the command cannot run,
            or there is no such Ray cluster.
    """
    check_committed_training(training)
    if not read_training_progress(training).has_begun:
        _check_weights(find_weights())
    _check_command(training)
    if training.options.aggregation.ray is not None:
        cluster.check_reachable(training.options.aggregation.ray)


def check_dataset_complete(spec: StoreSpec, dataset: str) -> None:
    """Refuse a dataset that is missing or not complete.

    Raises:
        NotFoundError: The dataset has no manifest.
        ConfigurationError: The manifest is that of a dataset with another name.
    """
    try:
        fetch_manifest(open_store(spec, make_folder=False), DatasetKeys(dataset))
    except NotFoundError:
        raise NotFoundError(
            f"{dataset} is not complete at {spec.url}: give the campaign its source, or shard it."
        ) from None


def _check_weights(weights: InitialWeights) -> None:
    store = open_store(weights.store, make_folder=False)
    gradients.check_weights(store, weights.job, step=weights.step, tensors=weights.tensors)


def _check_command(training: Training) -> None:
    """Refuse a command that cannot run here, or on a machine that clones its repository."""
    machines = training.options.machines
    if isinstance(machines, LocalWorkerOptions):
        check_local_command(training.options.command, Path(machines.folder))
    else:
        check_repository_command(training.options.command, machines)
