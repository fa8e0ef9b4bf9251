"""Checks of a campaign before anything is created or rented."""

from contextlib import suppress
from pathlib import Path

from millrace import cluster, gradients
from millrace.campaigns.campaign import Training
from millrace.campaigns.committed_training import check_committed_training, has_begun_with_dataset
from millrace.campaigns.progress import read_training_progress
from millrace.campaigns.settings import LocalWorkerOptions
from millrace.campaigns.worker import check_local_command, check_repository_command
from millrace.checkpoints import HubSpec, open_content, open_destination
from millrace.checkpoints.destinations import Destination
from millrace.checkpoints.find import find_checkpoint
from millrace.dataset_ledger import read_manifest
from millrace.errors import ConflictError, NotFoundError
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.datasets import DatasetKeys
from millrace.schemas.checkpoint import Checkpoint
from millrace.storage import Store, StoreSpec, open_store
from millrace.storage.overlap import locate_prefix


def check_training(training: Training) -> None:
    """Refuse a training that cannot run, before anything is created or rented for it.

    The weights that the run begins with are checked only if it has not begun. The command and the
    Ray cluster of a training that has ended are not checked.

    Raises:
        ConflictError: A setting that cannot change differs from the committed one.
        NotFoundError, CorruptError: The checkpoint does not exist, or is damaged.
        ConfigurationError: The checkpoint has no tensors of these names, the command cannot run,
            or there is no such Ray cluster.
    """
    check_committed_training(training)
    progress = read_training_progress(training)
    if progress.has_ended:
        return
    if not progress.has_begun:
        _check_weights(training)
    _check_command(training)
    if training.options.aggregation.ray is not None:
        cluster.check_reachable(training.options.aggregation.ray)


def check_publication(training: Training, location: StoreSpec | HubSpec, job: str) -> None:
    """Refuse to publish where the job has another checkpoint of the step of the final weights.

    The weights of a training that has ended are published next, so nothing is checked.

    Args:
        training: Training.
        location: Location of the final weights.
        job: Job of their checkpoint at the destination.

    Raises:
        ConflictError: The destination has such a checkpoint, or gets one from the last epoch.
        CorruptError: The Hub has one whose metadata is damaged.
    """
    progress = read_training_progress(training)
    if progress.has_ended:
        return
    store = open_store(training.write_store)
    if progress.has_begun:
        first_step = gradients.read_link(store, training.run.chain_keys, 0).step
    else:
        first_step = _check_weights(training).step
    step = first_step + training.last_window * training.run.steps
    destination = open_destination(location)
    if _is_epoch_job(destination, job, store, training):
        raise ConflictError(
            f"The epochs of {training.campaign} end with checkpoints of {job} in "
            f"{destination.url}, the last one at step {step}, as the final weights: name another "
            "`job` in `publish`."
        )
    there = _find_published(destination, job, step)
    if there is None:
        return
    own = find_checkpoint(store, training.weights_job, step)
    if own is not None and open_content(store, own).root == there.root:
        return
    raise ConflictError(
        f"{destination.url}/{CheckpointKeys(job).make_metadata_key(step)} is another checkpoint of "
        f"step {step}, at which {training.campaign} publishes its final weights: name another "
        "`job` in `publish`, or delete this checkpoint."
    )


def _is_epoch_job(destination: Destination, job: str, store: Store, training: Training) -> bool:
    """Decide whether a job at a destination is that of the checkpoints of the epochs."""
    there = destination.store
    return there is not None and locate_prefix(there, job) == locate_prefix(
        store, training.epoch_job
    )


def _find_published(destination: Destination, job: str, step: int) -> Checkpoint | None:
    """Return the checkpoint of a step; None if a copy of the step commits its own."""
    if destination.store is not None:
        return find_checkpoint(destination.store, job, step)
    with suppress(NotFoundError):
        return destination.read_checkpoint(job, step)
    return None


def is_dataset_settled(training: Training) -> bool:
    """Decide whether the dataset is neither made nor checked any more, nor its source read.

    The training was begun with the complete dataset, whose digest is committed, or has ended.
    """
    return has_begun_with_dataset(training) or read_training_progress(training).has_ended


def check_dataset_complete(spec: StoreSpec, dataset: str) -> None:
    """Refuse a dataset that is missing or not complete.

    Raises:
        NotFoundError: The dataset has no manifest.
        ConfigurationError: The manifest is that of a dataset with another name.
    """
    try:
        read_manifest(open_store(spec, make_folder=False), DatasetKeys(dataset))
    except NotFoundError:
        raise NotFoundError(
            f"{dataset} is not complete at {spec.url}: give the campaign its source, or shard it."
        ) from None


def _check_weights(training: Training) -> Checkpoint:
    weights = training.options.initial_weights
    store = open_store(training.initial_weights_store or training.read_store, make_folder=False)
    return gradients.check_weights(store, weights.job, step=weights.step, tensors=weights.tensors)


def _check_command(training: Training) -> None:
    """Refuse a command that cannot run here, or on a machine that clones its repository."""
    machines = training.options.machines
    if isinstance(machines, LocalWorkerOptions):
        check_local_command(training.options.command, Path(machines.folder))
    else:
        check_repository_command(training.options.command, machines)
