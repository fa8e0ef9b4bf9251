"""Records of the ends of epochs: read, find, commit and count them.

A record that cannot be read, or that does not match its key or its checkpoint, counts as missing.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from millrace import errors
from millrace.checkpoints.destinations.base import Destination
from millrace.checkpoints.find import compute_rest, read_checkpoint, verify
from millrace.keys.checkpoints import CheckpointKeys
from millrace.records import commit_once, fetch
from millrace.schemas.checkpoint import Checkpoint, EpochRecord
from millrace.storage import Store

ReadCheckpoint = Callable[[str, int], Checkpoint]
"""Function that returns the checkpoint of a job's step."""


def read_epoch(store: Store, job: str, epoch: int) -> EpochRecord:
    """Return the record of an epoch's end, without a check of its checkpoint.

    Raises:
        NotFoundError: There is no record.
        CorruptError: The record is damaged, or belongs to another epoch.
    """
    key = CheckpointKeys(job).make_epoch_key(epoch)
    found = fetch(store, key, EpochRecord)
    if (found.job, found.epoch) != (job, epoch):
        raise errors.CorruptError(
            f"{store.make_url(key)} is not the end of epoch {epoch} of {job}."
        )
    return found


def find_epoch_end(
    store: Store, job: str, epoch: int, destination: Destination | None = None
) -> EpochRecord | None:
    """Return the valid record of an epoch's end, or None.

    A record is not valid if it cannot be read, or names a checkpoint that does not exist.

    Args:
        store: Store of the job.
        job: Name of the job.
        epoch: Number of the epoch.
        destination: Destination of the checkpoints, if that is not the store. A record that names
            another destination is believed.
    """
    try:
        found = read_epoch(store, job, epoch)
    except (errors.NotFoundError, errors.CorruptError):
        return None
    if found.root is None:
        return found
    if found.destination:
        if destination is None or destination.url != found.destination:
            return found
        read_metadata: ReadCheckpoint = destination.read_checkpoint
    else:
        read_metadata = partial(read_checkpoint, store)
    there = _find_content(read_metadata, job, found.step, found.root)
    return found if there is not None else None


def has_checkpoint(store: Store, job: str, step: int, root: str) -> bool:
    """Decide whether a checkpoint with this content is committed at a step. No file is read.

    Args:
        store: Store of the job.
        job: Name of the job.
        step: Step of the checkpoint.
        root: Digest of the content.
    """
    return _find_content(partial(read_checkpoint, store), job, step, root) is not None


class CommittedCheckpoint:
    """Committed checkpoint of an epoch, whose files are verified once.

    Args:
        store: Store of the job.
        job: Name of the job.
    """

    def __init__(self, store: Store, job: str) -> None:
        self._store, self._job = store, job
        self._verified: Checkpoint | None = None
        self._is_intact = False

    def is_intact(self, step: int, root: str, rest: str | None = None) -> bool:
        """Decide whether a checkpoint is committed with this content, and has all its bytes.

        The first call for a checkpoint reads all its files.

        Args:
            step: Step of the checkpoint.
            root: Digest of the content.
            rest: Digest of the position and the run; by default they are not compared.
        """
        read_metadata = partial(read_checkpoint, self._store)
        found = _find_content(read_metadata, self._job, step, root, rest)
        if found is None:
            return False
        if found != self._verified:
            self._verified, self._is_intact = found, not verify(self._store, found)
        return self._is_intact

    def note_restored(self, checkpoint: Checkpoint) -> None:
        """Note that all files of a checkpoint are verified."""
        self._verified, self._is_intact = checkpoint, True


def _find_content(
    read_metadata: ReadCheckpoint, job: str, step: int, root: str, rest: str | None = None
) -> Checkpoint | None:
    try:
        found = read_metadata(job, step)
    except (errors.NotFoundError, errors.CorruptError):
        return None
    return found if found.root == root and rest in {None, compute_rest(found)} else None


def commit_epoch(store: Store, record: EpochRecord) -> EpochRecord:
    """Commit the end of an epoch, and return the valid record of its end.

    If an invalid record exists, the new record counts without a commit, since every reader can
    derive it from the checkpoint and the votes.
    """
    try:
        commit = commit_once(store, CheckpointKeys(record.job).make_epoch_key(record.epoch), record)
    except errors.CorruptError:
        return record
    return record if commit.mine else find_epoch_end(store, record.job, record.epoch) or record


def count_epochs_without_checkpoint(store: Store, job: str, epoch: int) -> int:
    """Count the epochs in a row before this one that ended without a checkpoint.

    Raises:
        UnavailableError: The store does not answer.
    """
    count = 0
    for before in range(epoch - 1, -1, -1):
        try:
            record = read_epoch(store, job, before)
        except errors.NotFoundError:
            break  # the job began after this epoch
        except errors.CorruptError:
            continue  # unknown: neither counts nor ends the row
        if record.root is not None:
            break
        with suppress(errors.NotFoundError, errors.CorruptError):
            read_checkpoint(store, job, record.step)
            break  # its checkpoint was committed later, in the background
        count += 1
    return count
