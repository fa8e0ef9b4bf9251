"""Progress events of checkpoints, and of the cooldown that ends an epoch."""

from dataclasses import dataclass
from typing import ClassVar

from millrace.progress import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStored(Event):
    """Event after a file of a checkpoint is in the store.

    Attributes:
        digest: Digest of the file.
        size: Bytes of the file.
        sent: Bytes that were sent for the file: 0 if the store had the file.
    """

    kind: ClassVar[str] = "checkpoint.part"

    digest: str
    size: int
    sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Event):
    """Event after the metadata of a checkpoint is committed, by this process or another one.

    Attributes:
        key: Key of the metadata.
        size: Bytes of the checkpoint; of one rank, the bytes of the rank's files.
        seconds: Duration of the save; None if it was not measured.
    """

    kind: ClassVar[str] = "checkpoint.saved"

    key: str
    size: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportStarted(Event):
    """Event after the files of another tool were selected, before they are read.

    Attributes:
        source: URL of their folder.
        files: Number of the files.
        size: Bytes of the files.
    """

    kind: ClassVar[str] = "checkpoint.import"

    source: str
    files: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDamaged(Event):
    """Event after a checkpoint was found to be damaged, before an older one is tried.

    Attributes:
        job: Name of the job.
        step: Step of the checkpoint.
        damage: Damage in words.
    """

    kind: ClassVar[str] = "checkpoint.damaged"

    job: str
    step: int
    damage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentAgreed(Event):
    """Event after a member knows that most members have voted for its own content.

    Attributes:
        member: Name of the member.
        votes: Number of votes for the content.
        voters: Number of members that vote.
    """

    kind: ClassVar[str] = "cooldown.agreed"

    member: str
    votes: int
    voters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadStarted(Event):
    """Event before a member that is a checkpointer uploads its share of the files.

    Attributes:
        member: Name of the member.
        rank: Rank of the member among the checkpointers, from 0.
        checkpointers: Number of checkpointers.
    """

    kind: ClassVar[str] = "cooldown.racing"

    member: str
    rank: int
    checkpointers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadCompleted(Event):
    """Event after all files of the epoch's checkpoint are in the store, before its commit.

    Attributes:
        member: Name of the member that commits the checkpoint.
        size: Bytes of the checkpoint.
    """

    kind: ClassVar[str] = "cooldown.complete"

    member: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CooldownExtended(Event):
    """Event after the time of a cooldown was over without a checkpoint, and was extended.

    Attributes:
        member: Name of the member.
        extensions: Number of extensions so far.
        max_extensions: Largest number of extensions.
    """

    kind: ClassVar[str] = "cooldown.late"

    member: str
    extensions: int
    max_extensions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEndedWithoutCheckpoint(Event):
    """Event after a member has committed the end of an epoch that has no checkpoint.

    Attributes:
        member: Name of the member.
        epochs: Number of epochs in a row without a checkpoint, this one included.
        max_epochs: Largest number of such epochs.
    """

    kind: ClassVar[str] = "epoch.without"

    member: str
    epochs: int
    max_epochs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CooldownProgressed(Event):
    """Event after each poll of the owner of a job while an epoch ends.

    Attributes:
        job: Name of the job.
        stored: Bytes of the checkpoint's files that are in the store.
        size: Bytes of the checkpoint; 0 while they are unknown.
        members: Number of members with a result.
    """

    kind: ClassVar[str] = "cooldown.progress"

    job: str
    stored: int
    size: int
    members: int
