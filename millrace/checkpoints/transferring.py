"""Bring a checkpoint that was saved before to another store, verified on both sides."""

import threading

from millrace import errors
from millrace.checkpoints.contents import saved_content
from millrace.checkpoints.find import Check
from millrace.checkpoints.race import Race
from millrace.keys import CheckpointKeys
from millrace.models.checkpoint import Checkpoint
from millrace.progress import Event, Progress, silent
from millrace.records import commit_once
from millrace.storage import Store, list_objects


def transfer(
    source: Store,
    checkpoint: Checkpoint,
    store: Store,
    job: str,
    *,
    uploads: int = 4,
    progress: Progress = silent,
) -> Checkpoint:
    """Copy a checkpoint to another store, and commit it there under the same step.

    Every file is verified when it is read. What is there already is verified too, and not sent
    again. Killed at any time, the next call goes on.

    Args:
        source: Where the checkpoint is.
        checkpoint: Which.
        store: Where it is to be.
        job: Whose it is there.
        uploads: Files that are uploaded at once; each takes its size in memory.
        progress: Told of each file: ``checkpoint.part``, and at the end ``checkpoint.saved``.

    Raises:
        CorruptError: A file is not the bytes that were saved: nothing was committed.
        ConflictError: Another checkpoint of this step is there.
        UnavailableError, DeniedError: A store fails, or refuses.
    """
    keys, content = CheckpointKeys(job), saved_content(source, checkpoint)
    news = threading.Event()
    race = Race(
        store,
        job,
        content,
        uploads=uploads,
        check=Check.DIGESTS,
        news=news.set,
        progress=progress,
    )
    race.see(list_objects(store, keys.parts(checkpoint.step)))
    race.begin(0, 1)
    try:
        news.wait()
    finally:
        race.stop()
    if race.error is not None:
        raise race.error
    record = checkpoint.model_copy(update={"job": job, "parts": content.parts})
    commit = commit_once(store, keys.metadata(checkpoint.step), record)
    if commit.record.root != checkpoint.root:
        raise errors.ConflictError(
            f"{store.url_of(keys.metadata(checkpoint.step))} is a checkpoint of the same step with "
            "another content: give this job another name."
        )
    progress(Event("checkpoint.saved", keys.metadata(checkpoint.step), {"bytes": content.size}))
    return commit.record
