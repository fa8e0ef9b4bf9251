"""What a person says of how checkpoints are saved, and which are kept."""

from datetime import timedelta

from pydantic import BaseModel, ByteSize, ConfigDict, Field


class SaveSettings(BaseModel):
    """How a checkpoint is saved."""

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


class Retention(BaseModel):
    """Which checkpoints are kept: what any of the rules keeps. All others are removed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    last: int = Field(default=3, ge=1, description="The newest so many that are complete.")
    every: int | None = Field(
        default=None, ge=1, description="And each whose step is a multiple of this."
    )
    grace: timedelta = Field(
        default=timedelta(days=1),
        description="Files that no checkpoint names are removed when they are older than this: "
        "until then somebody may still be saving.",
    )
