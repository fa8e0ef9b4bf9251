"""Bring a checkpoint from a machine's disk, or another bucket, into a bucket."""

from prefect import flow
from pydantic import ConfigDict, Field

from blocks import Bucket
from millrace.checkpoints import SavedSource
from millrace.models.checkpoint import Checkpoint
from millrace.storage import Right
from tasks.checkpointing import report_saved, transfer_checkpoint
from tasks.places import Place, check_right, spec_of


class Saved(Place):
    """A checkpoint that was saved before."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: str = Field(description="Whose it is there.")
    step: int | None = Field(default=None, description="Which; left out, the newest.")


@flow(name="save-checkpoint")
def save_checkpoint(source: Saved, bucket: Bucket | str, job: str) -> Checkpoint:
    """Bring a checkpoint into a bucket: every file verified, and its metadata last.

    A run that was stopped sends only what is missing when it is started again.

    Args:
        source: Where it is: a folder of the worker that `Saver` saved to, or another bucket.
        bucket: A Millrace Bucket block with write credentials, or the URL of a folder.
        job: Whose checkpoint it is there: a prefix below the bucket's URL.
    """
    place = spec_of(bucket, Right.WRITE)
    check_right(bucket, Right.WRITE, job)
    check_right(source.place, Right.READ, source.prefix)
    wanted = SavedSource(store=source.store(), job=source.job, step=source.step)
    saved = transfer_checkpoint(wanted, place, job)
    report_saved(place.url, saved)
    return saved.checkpoint
