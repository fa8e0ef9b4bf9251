"""What a person says of how checkpoints are saved."""

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
