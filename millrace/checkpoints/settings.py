"""Settings for how checkpoints are saved, which are kept, and how an epoch ends."""

from datetime import timedelta
from enum import StrEnum

from pydantic import BaseModel, ByteSize, ConfigDict, Field

from millrace.checkpoints.cooldown.checkpointers import SelectionRule
from millrace.checkpoints.find import VerifyDepth
from millrace.settings import Duration


class SaveSettings(BaseModel):
    """Settings of a save."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    part_bytes: ByteSize = Field(
        default=ByteSize(64 << 20),
        ge=1024,
        le=1 << 30,
        description="A file of tensors is closed before it would be larger, such as 64MiB. What is "
        "read in part is read by whole files, for only those can be verified.",
    )
    uploads: int = Field(default=4, ge=1, le=64, description="Files that are uploaded at once.")
    refer: bool = Field(
        default=False,
        description="Refer to files of the job's newest checkpoint whose bytes are the same, "
        "instead of uploading them again. Retention keeps what is referred to.",
    )
    ranks_within: Duration = Field(
        default=timedelta(minutes=10),
        gt=timedelta(0),
        description="If several ranks save one checkpoint together: how long one that is ready "
        "waits for the others.",
    )


class RetentionSettings(BaseModel):
    """Rules for which checkpoints are kept: those that any rule keeps. All others are removed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    last: int = Field(default=3, ge=1, description="The newest so many that are complete.")
    every: int | None = Field(
        default=None, ge=1, description="And each whose step is a multiple of this."
    )
    grace: Duration = Field(
        default=timedelta(days=1),
        description="Files that no checkpoint names are removed when they are older than this: "
        "until then somebody may still be saving.",
    )


class OnTimeout(StrEnum):
    """Action when an epoch's checkpoint is not there in time."""

    EXTEND = "extend"  # wait once more
    ELECT = "elect"  # wait once more, with as many checkpointers more
    BACKGROUND = "background"  # train on, and go on uploading
    ADVANCE = "advance"  # train on without


class CooldownSettings(BaseModel):
    """Settings of the end of an epoch: who saves, and for how long the others wait."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    time: Duration = Field(
        default=timedelta(minutes=2),
        gt=timedelta(0),
        description="Longest time for the checkpoint, from when the first member was there.",
    )
    choice: SelectionRule = Field(
        default=SelectionRule.SPREAD,
        description="Rule by which checkpointers are chosen: `spread` has at least two and "
        "replaces who is gone at once; "
        "`psyche` is Psyche's selection.",
    )
    on_timeout: OnTimeout = Field(
        default=OnTimeout.EXTEND,
        description="Action when the checkpoint is not there in time: `extend` the wait, `elect` "
        "more checkpointers, "
        "go on in the `background`, or `advance` without.",
    )
    extensions: int = Field(
        default=2,
        ge=0,
        description="Number of times that it is extended, or more are elected, before the epoch "
        "goes on "
        "without a checkpoint.",
    )
    without: int = Field(
        default=2,
        ge=0,
        description="Number of epochs in a row that may go on without a checkpoint. After so many "
        "the members are told not to train on.",
    )
    check: VerifyDepth = Field(
        default=VerifyDepth.DIGESTS,
        description="Check of files that another member uploaded, before the commit: by "
        "their `digests`, asked of the store where it keeps them and read back elsewhere; or by "
        "their `sizes`.",
    )
    save: SaveSettings = Field(
        default=SaveSettings(), description="Settings of the files and their upload."
    )
