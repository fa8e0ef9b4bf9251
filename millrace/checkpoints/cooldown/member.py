"""Member that ends an epoch with a checkpoint that training has saved on its disk."""

from datetime import timedelta

from pydantic import BaseModel, ConfigDict, Field

from millrace import errors
from millrace.checkpoints.contents import open_content
from millrace.checkpoints.cooldown.cooldown import cool_down
from millrace.checkpoints.cooldown.membership import ExpectedUpload, Membership
from millrace.checkpoints.cooldown.result import EpochResult
from millrace.checkpoints.destinations import HubSpec, open_destination
from millrace.checkpoints.find import read_checkpoint, read_newest
from millrace.checkpoints.settings import CooldownSettings
from millrace.lease import MAX_TTL, MIN_TTL
from millrace.progress import Progress, ignore_event
from millrace.schemas.checkpoint import Checkpoint
from millrace.settings import Duration
from millrace.storage import Store, StoreSettings, StoreSpec, open_store


class SavedSource(StoreSettings):
    """A saved checkpoint, and the store that holds it, such as a folder of this machine."""

    job: str = Field(description="Job that the checkpoint belongs to.")
    step: int | None = Field(
        default=None, description="Step of the checkpoint; by default the newest."
    )

    def open(self) -> tuple[Store, Checkpoint]:
        """Open the store, and read the checkpoint's metadata. The files are not read.

        Raises:
            NotFoundError: There is no such checkpoint.
            CorruptError: The metadata cannot be read.
        """
        store = open_store(self.store, make_folder=False)
        if self.step is not None:
            return store, read_checkpoint(store, self.job, self.step)
        found = read_newest(store, self.job)
        if found is None:
            raise errors.NotFoundError(f"{store.make_url(self.job)} has no checkpoint.")
        return store, found


class MemberSettings(BaseModel):
    """Settings of a member that ends an epoch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: StoreSpec = Field(
        description="Bucket that all members share. The checkpoint is saved there."
    )
    destination: str | StoreSpec | HubSpec | None = Field(
        default=None,
        description="Another destination of the checkpoint: `hf://owner/name`, the URL of a store, "
        "or the settings of a repository or a store. The members still meet in the bucket.",
    )
    job: str = Field(description="Job of the checkpoints; a prefix below the store's URL.")
    epoch: int = Field(ge=0, description="Number of the epoch that ends.")
    source: SavedSource = Field(description="Checkpoint of this member, the same on all members.")
    members: int = Field(default=1, ge=1, description="Number of members to wait for.")
    join_timeout: Duration = Field(
        default=timedelta(minutes=5), description="Longest wait for the other members."
    )
    lease_timeout: Duration = Field(
        default=timedelta(seconds=30),
        ge=MIN_TTL,
        le=MAX_TTL,
        description="Time without a heartbeat after which a member is taken for dead.",
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=1 << 64,
        description="Seed of 64 bits of the order of the checkpointers; by default a random one.",
    )
    cooldown: CooldownSettings = Field(
        default=CooldownSettings(), description="Settings of the end of the epoch."
    )


def end_epoch(
    settings: MemberSettings, member: str, *, progress: Progress = ignore_event
) -> EpochResult:
    """End an epoch as one of its members, with a saved checkpoint.

    Every file is verified when it is read.

    Args:
        settings: Settings, the same on all members.
        member: Name of this member, unique among the members.
        progress: Receives the events of `cool_down`.

    Raises:
        NotFoundError: There is no such checkpoint.
        ConflictError: Another live member has this name.
        UnavailableError: Other members are missing, or the store does not answer.
    """
    source, checkpoint = settings.source.open()
    content = open_content(source, checkpoint)
    expected = ExpectedUpload(content.size, settings.members, settings.cooldown.time)
    destination = open_destination(settings.destination) if settings.destination else None
    with Membership(
        open_store(settings.store),
        settings.job,
        member,
        settings.lease_timeout,
        expected=expected,
        destination=destination,
    ) as one:
        one.wait_for_members(settings.members, settings.epoch, settings.join_timeout)
        result = cool_down(
            one,
            content,
            epoch=settings.epoch,
            run=checkpoint.run,
            position=checkpoint.position,
            notes=checkpoint.notes,
            seed=settings.seed,
            settings=settings.cooldown,
            progress=progress,
        )
        background_result = result.background_result
        return result if background_result is None else background_result.result()
