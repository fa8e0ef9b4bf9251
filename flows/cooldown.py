"""End an epoch of a job with a checkpoint that its members upload together."""

from datetime import timedelta
from typing import Any

from prefect import flow
from prefect.runtime import flow_run
from pydantic import BaseModel, ConfigDict, Field

from millrace.checkpoints import CooldownSettings, EpochStatus, MemberSettings, SavedSource
from millrace.errors import ConfigurationError, UnavailableError
from millrace.keys.checkpoints import CheckpointKeys
from millrace.settings import Duration
from millrace.storage import Right
from tasks.cooldown import report_epoch, run_cooldown_on_ray, watch_epoch
from tasks.forms import draw_form
from tasks.locations import (
    BucketLocation,
    HubRepository,
    NodeUrl,
    check_right,
    make_store_spec,
)


class NodeCheckpoints(BaseModel):
    """Nodes of a Ray cluster, each with the checkpoint on its own disk."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: NodeUrl = Field(
        description="Folder of the checkpoint on every node, such as "
        "`file:///$SCRATCH/checkpoints`; `$NAME` is filled in from the node's own environment."
    )
    job: str = Field(description="Job of the checkpoint.")
    step: int | None = Field(
        default=None, description="Step of the checkpoint; by default the newest."
    )
    address: str | None = Field(
        default=None,
        description="Address of the Ray cluster; by default the current one or `RAY_ADDRESS`.",
    )


def make_run_name() -> str:
    """Return ``cooldown-JOB-EPOCH``, for the list of runs."""
    parameters: dict[str, Any] = flow_run.parameters or {}
    return f"cooldown-{parameters.get('job', 'job')}-{parameters.get('epoch', '')}"


@draw_form
@flow(name="cooldown", flow_run_name=make_run_name)
def run_cooldown(
    bucket: BucketLocation,
    job: str,
    epoch: int,
    nodes: NodeCheckpoints | None = None,
    hub: HubRepository | None = None,
    cooldown: CooldownSettings | None = None,
    timeout: Duration = timedelta(minutes=30),
    members: list[str] | None = None,
) -> EpochStatus:
    """End an epoch: the members upload its checkpoint together, and one of them commits it.

    Without `nodes`, members elsewhere end the epoch from their training loop or by
    `millrace checkpoint cooldown`. This run watches, finishes the commit of dead
    members, and reports. With `nodes`, the nodes of a Ray cluster are the members. With
    `members`, this run owns the job and commits what those members have uploaded.

    Args:
        bucket: A Millrace Bucket block with write credentials, its name, or a URL.
        job: Job of the checkpoints: a prefix below the bucket's URL.
        epoch: Number of the epoch that ends.
        nodes: Nodes of a Ray cluster that have the checkpoint on their disks.
        hub: A repository of the Hugging Face Hub that gets the checkpoint of `nodes`, in place of
            the bucket. The roster and the votes stay in the bucket.
        cooldown: Choice of the checkpointers, and the action after a timeout. For `nodes` only:
            members elsewhere have their own settings.
        timeout: Longest time that this run waits.
        members: Names of members that write below their own prefixes only, such as a campaign's
            workers. This run writes the roster, verifies their files, and ends the epoch.
    """
    CheckpointKeys(job)
    if epoch < 0:
        raise ConfigurationError(f"Epochs are counted from 0: {epoch} is no epoch.")
    if hub is not None and nodes is None:
        raise ConfigurationError(
            "`hub` is for the nodes of a Ray cluster: name `nodes`, too. Members elsewhere have a "
            "`destination` in their own settings."
        )
    spec = make_store_spec(bucket, Right.WRITE)
    check_right(bucket, Right.WRITE, job)
    if nodes is None:
        ended = watch_epoch(spec, job, epoch, timeout, members or ())
    else:
        source = SavedSource(url=nodes.url, job=nodes.job, step=nodes.step)
        member = MemberSettings(
            store=spec,
            job=job,
            epoch=epoch,
            source=source,
            destination=hub and hub.make_spec(),
            cooldown=cooldown or CooldownSettings(),
        )
        ended = run_cooldown_on_ray(member, nodes.address, timeout)
    report_epoch(spec.url, job, epoch, ended)
    status = ended.status
    if status.epoch is None:
        raise UnavailableError(
            f"Epoch {epoch} of {job} has not ended after {status.seconds:.0f} s: "
            f"{len(status.ended)} of {len(status.members)} members have ended, "
            f"{len(status.living)} live. The report names them; start the dead ones again, and run "
            "this once more."
        )
    if status.epoch.root is None:
        raise UnavailableError(
            f"Epoch {epoch} of {job} went on without a checkpoint ({status.epoch.reason}): the "
            "report has the result of each member."
        )
    return status
