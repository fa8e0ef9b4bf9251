"""Settings for how checkpoints are saved, which are kept, and how an epoch ends."""

from datetime import timedelta
from enum import StrEnum

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator

from millrace.checkpoints.cooldown.checkpointers import SelectionRule
from millrace.checkpoints.find import VerifyDepth
from millrace.settings import Duration, Size


class SaveSettings(BaseModel):
    """Settings of a save."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    part_bytes: Size = Field(
        title="File size",
        default=ByteSize(64 << 20),
        ge=1024,
        le=1 << 30,
        description="Largest size of a file of tensors, such as `64MiB`. A partial load reads "
        "only the blocks of 1 MiB that it needs, or whole files without digests of their blocks.",
    )
    uploads: int = Field(
        default=4, ge=1, le=64, description="Number of files that are uploaded at once."
    )
    refer: bool = Field(
        title="Refer to equal files",
        default=False,
        description="Refer to files of the job's newest checkpoint that have the same bytes, "
        "instead of uploading them again. Retention keeps files that are referred to. For a save "
        "only: the members that end an epoch upload all files.",
    )
    ranks_within: Duration = Field(
        title="Wait for ranks",
        default=timedelta(minutes=10),
        gt=timedelta(0),
        description="Longest wait of a rank for the others, if several ranks save one checkpoint "
        "together.",
    )


class RetentionSettings(BaseModel):
    """Rules for which checkpoints are kept: those that any rule keeps. All others are removed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    last: int = Field(default=3, ge=1, description="Number of newest complete checkpoints to keep.")
    every: int | None = Field(
        default=None, ge=1, description="Also keep checkpoints whose step is a multiple of this."
    )
    grace: Duration = Field(
        default=timedelta(days=1),
        description="Age after which files that no checkpoint names are removed. Younger files "
        "may belong to a save that is under way.",
    )


class OnTimeout(StrEnum):
    """Action when the checkpoint of an epoch is late."""

    EXTEND = "extend"  # wait once more
    ELECT = "elect"  # wait once more, with additional checkpointers
    BACKGROUND = "background"  # train on during the upload
    ADVANCE = "advance"  # train on without a checkpoint


class CooldownSettings(BaseModel):
    """Settings of the end of an epoch: its checkpointers, and the waits of the others."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    time: Duration = Field(
        title="Time limit",
        default=timedelta(minutes=2),
        gt=timedelta(0),
        description="Longest time for the checkpoint, from the arrival of the first member.",
    )
    choice: SelectionRule = Field(
        title="Choice of checkpointers",
        default=SelectionRule.SPREAD,
        description="Rule by which checkpointers are chosen: `spread` chooses at least two and "
        "replaces a lost one at once; `psyche` is the selection of Psyche.",
    )
    on_timeout: OnTimeout = Field(
        default=OnTimeout.EXTEND,
        description="Action when the checkpoint is not complete in time: `extend` waits once "
        "more, `elect` waits once more with additional checkpointers, `background` "
        "trains on during the upload, which fails after the time limit and its extensions, at "
        "least 5 minutes, without progress, `advance` trains on without a checkpoint. Members of a "
        "campaign cannot upload after the end of an epoch: for them, `background` is `advance`.",
    )
    extensions: int = Field(
        default=2,
        ge=0,
        description="Number of times that `extend` or `elect` acts before the epoch goes on "
        "without a checkpoint.",
    )
    without: int = Field(
        title="Epochs without a checkpoint",
        default=2,
        ge=0,
        description="Number of epochs in a row that may go on without a checkpoint. After that, "
        "the members are told to stop training.",
    )
    check: VerifyDepth = Field(
        title="Check before the commit",
        default=VerifyDepth.DIGESTS,
        description="Check of files that another member uploaded, before the commit. `digests` "
        "reads the files back. `sizes` compares sizes only.",
    )
    save: SaveSettings = Field(
        title="Files and upload",
        default=SaveSettings(),
        description="Settings of the files and their upload.",
    )

    @field_validator("save")
    @classmethod
    def _check_save(cls, save: SaveSettings) -> SaveSettings:
        if save.refer:
            raise ValueError(
                "the members that end an epoch upload all files and refer to none: leave out refer"
            )
        return save
