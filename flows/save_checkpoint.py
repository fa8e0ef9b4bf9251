"""Copy a checkpoint from a machine's disk, or a bucket, into a bucket or the Hugging Face Hub."""

from prefect import flow
from pydantic import ConfigDict, Field

from millrace.checkpoints import SavedSource
from millrace.errors import ConfigurationError
from millrace.schemas.checkpoint import Checkpoint
from millrace.storage import Right
from tasks.checkpointing import check_checkpoint_destination, copy_checkpoint, report_copy
from tasks.forms import draw_form
from tasks.locations import (
    BucketLocation,
    HubRepository,
    InputLocation,
    check_right,
    make_store_spec,
)


class CheckpointInput(InputLocation):
    """A checkpoint that was saved before."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: str = Field(min_length=1, description="Job of the checkpoint.")
    step: int | None = Field(
        default=None, description="Step of the checkpoint; by default the newest."
    )


@draw_form
@flow(name="save-checkpoint", flow_run_name="save-{job}")
def save_checkpoint(
    source: CheckpointInput,
    job: str,
    bucket: BucketLocation | None = None,
    hub: HubRepository | None = None,
) -> Checkpoint:
    """Copy a checkpoint into a bucket, or the Hub: every file verified, and committed once.

    A run that was stopped sends only missing files when it is started again.

    Args:
        source: Location of the checkpoint: a folder of the worker that `Saver` saved to, or another
            bucket.
        job: Job of the checkpoint there: a prefix below the bucket's URL, or in the repository.
        bucket: A Millrace Bucket block with write credentials, its name, or a URL.
        hub: A repository of the Hugging Face Hub, in place of a bucket.
    """
    if hub is not None and bucket is None:
        target = hub.make_spec()
        check_checkpoint_destination(target, job)
    elif bucket is not None and hub is None:
        target = make_store_spec(bucket, Right.WRITE)
        check_right(bucket, Right.WRITE, job)
    else:
        raise ConfigurationError("Name either a bucket or a hub repository as the destination.")
    check_right(source.location, Right.READ, source.prefix)
    wanted = SavedSource(**dict(source.make_spec()), job=source.job, step=source.step)
    saved = copy_checkpoint(wanted, target, job)
    report_copy(saved, target)
    return saved.checkpoint
