"""Bring a checkpoint from a machine's disk, or a bucket, into a bucket or the Hugging Face Hub."""

from prefect import flow
from pydantic import BaseModel, ConfigDict, Field

from blocks import HuggingFaceCredentials
from millrace.checkpoints import HubSpec, SavedSource
from millrace.errors import ConfigurationError
from millrace.schemas.checkpoint import Checkpoint
from millrace.storage import Right
from tasks.checkpointing import check_destination, report_saved, transfer_checkpoint
from tasks.places import BucketLocation, InputLocation, check_right, spec_of


class Saved(InputLocation):
    """A checkpoint that was saved before."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: str = Field(description="Job of the checkpoint.")
    step: int | None = Field(
        default=None, description="Step of the checkpoint; left out, the newest."
    )


class HubRepository(BaseModel):
    """A repository of the Hugging Face Hub."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repo: str = Field(description="As `owner/name`. It must exist.")
    credentials: HuggingFaceCredentials = Field(
        description="A block with a token that may write the repository."
    )
    revision: str = Field(default="main", description="The branch.")

    def spec(self) -> HubSpec:
        """Return the repository, with the account's token."""
        return HubSpec(
            repo=self.repo,
            revision=self.revision,
            token=self.credentials.token,
            endpoint=self.credentials.endpoint,
        )


@flow(name="save-checkpoint", flow_run_name="save-{job}")
def save_checkpoint(
    source: Saved, job: str, bucket: BucketLocation | None = None, hub: HubRepository | None = None
) -> Checkpoint:
    """Bring a checkpoint into a bucket, or the Hub: every file verified, and committed once.

    A run that was stopped sends only what is missing when it is started again.

    Args:
        source: Location of the checkpoint: a folder of the worker that `Saver` saved to, or another
            bucket.
        job: Job of the checkpoint there: a prefix below the bucket's URL, or in the repository.
        bucket: A Millrace Bucket block with write credentials, its name, or a URL.
        hub: Or a repository of the Hugging Face Hub.
    """
    if hub is not None and bucket is None:
        place = hub.spec()
        check_destination(place, job)
    elif bucket is not None and hub is None:
        place = spec_of(bucket, Right.WRITE)
        check_right(bucket, Right.WRITE, job)
    else:
        raise ConfigurationError("Name either a bucket or a hub repository to bring it to.")
    check_right(source.place, Right.READ, source.prefix)
    wanted = SavedSource(**dict(source.store()), job=source.job, step=source.step)
    saved = transfer_checkpoint(wanted, place, job)
    report_saved(saved)
    return saved.checkpoint
