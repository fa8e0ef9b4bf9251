"""End an epoch of a job with a checkpoint that its members upload together."""

from datetime import timedelta
from typing import Any

from prefect import flow
from prefect.runtime import flow_run
from pydantic import BaseModel, ConfigDict, Field

from millrace.checkpoints import CooldownSettings, EpochStatus, MemberSettings, SavedSource
from millrace.errors import ConfigurationError, UnavailableError
from millrace.keys import CheckpointKeys
from millrace.settings import Duration
from millrace.storage import Right
from tasks.cooling import race_on_ray, report_epoch, watch_epoch
from tasks.places import BucketLocation, NodeUrl, check_right, spec_of


class NodeCheckpoints(BaseModel):
    """The nodes of a Ray cluster, each with the checkpoint on its own disk."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: NodeUrl = Field(
        description="The folder on every node that it was saved to, such as "
        "`file:///$SCRATCH/checkpoints`; `$NAME` is filled in from the node's own environment."
    )
    job: str = Field(description="Job of the checkpoint.")
    step: int | None = Field(
        default=None, description="Step of the checkpoint; left out, the newest."
    )
    address: str | None = Field(
        default=None,
        description="Address of the Ray cluster; left out, the one we are in or `RAY_ADDRESS`.",
    )


def run_name() -> str:
    """``cool-down-JOB-EPOCH``, for the list of runs."""
    parameters: dict[str, Any] = flow_run.parameters or {}
    return f"cool-down-{parameters.get('job', 'job')}-{parameters.get('epoch', '')}"


@flow(name="cool-down", flow_run_name=run_name)
def cool_down(
    bucket: BucketLocation,
    job: str,
    epoch: int,
    nodes: NodeCheckpoints | None = None,
    settings: CooldownSettings = CooldownSettings(),  # noqa: B008 - frozen
    patience: Duration = timedelta(minutes=30),
    members: list[str] | None = None,
) -> EpochStatus:
    """End an epoch: the members upload its checkpoint together, and one of them commits it.

    Left without `nodes`, the members are elsewhere and end the epoch by themselves, from their
    training loop or by `millrace cool-down`; this run watches, finishes what dead members have
    begun to commit, and reports. With `nodes`, it has the nodes of a Ray cluster do it. With
    `members`, this run owns the job: it commits what those members have uploaded.

    Args:
        bucket: A Millrace Bucket block with write credentials, its name, or a URL.
        job: Job of the checkpoints: a prefix below the bucket's URL.
        epoch: The epoch that ends.
        nodes: The nodes of a Ray cluster that have the checkpoint on their disks.
        settings: Choice of who saves, and what happens when it takes too long. For `nodes` only:
            members elsewhere have their own.
        patience: Longest time that this run waits.
        members: Names of members that write below their own prefixes only, such as a campaign's
            workers. This run writes who takes part, verifies their files, and ends the epoch.
    """
    CheckpointKeys(job)
    if epoch < 0:
        raise ConfigurationError(f"Epochs are counted from 0: {epoch} is none.")
    place = spec_of(bucket, Right.WRITE)
    check_right(bucket, Right.WRITE, job)
    if nodes is None:
        ended = watch_epoch(place, job, epoch, patience, members or ())
    else:
        source = SavedSource(url=nodes.url, job=nodes.job, step=nodes.step)
        member = MemberSettings(store=place, job=job, epoch=epoch, source=source, cooldown=settings)
        ended = race_on_ray(member, nodes.address, patience)
    report_epoch(place.url, job, epoch, ended)
    seen = ended.seen
    if seen.epoch is None:
        raise UnavailableError(
            f"Epoch {epoch} of {job} has not ended after {seen.seconds:.0f} s: {len(seen.ended)} "
            f"of {len(seen.members)} members are through, {len(seen.living)} live. The report "
            "names them; start the dead ones again, and run this once more."
        )
    if seen.checkpoint is None:
        raise UnavailableError(
            f"Epoch {epoch} of {job} went on without a checkpoint ({seen.epoch.why}): the report "
            "says what each member came to."
        )
    return seen
