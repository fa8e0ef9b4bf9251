"""Records of a checkpoint, of the end of an epoch, and of quarantined checkpoints."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import FailFast, WrapValidator

from millrace.digest import OwnDigest
from millrace.records import JsonInt, JsonObject, Record, RecordPart, validate_batches

# 300,000 boxes of tensors with names of 80 bytes. A model of 671e9 parameters with 45,000 tensors
# and two moments of Adam has 31 MiB; one of 70e9, cut over 64 ranks, 17 MiB.
_MAX_METADATA_SIZE = 64 << 20


class Part(RecordPart):
    """File of tensors.

    Attributes:
        step: Step whose folder has the file. If an earlier step has a file of equal bytes, it is
            that step.
        digest: Digest of the file.
        size: Size of the file in bytes.
    """

    step: JsonInt
    digest: OwnDigest
    size: JsonInt


class Chunk(RecordPart):
    """Box of a tensor: the whole tensor, or a part of it in each dimension.

    Attributes:
        part: Index of the box's file in ``Checkpoint.parts``.
        name: Name of the box in the file.
        offset: Offset of the box's first byte in the file.
        start: Offset of the box in the tensor, in each dimension.
        shape: Shape of the box.
    """

    part: JsonInt
    name: str
    offset: JsonInt
    start: Annotated[tuple[JsonInt, ...], FailFast()]
    shape: Annotated[tuple[JsonInt, ...], FailFast()]


class TensorRecord(RecordPart):
    """Tensor, and the boxes that it consists of.

    Attributes:
        dtype: Name of the type in safetensors, such as ``BF16``.
        shape: Shape of the tensor.
        chunks: Boxes that cover the tensor, each element once.
    """

    dtype: str
    shape: Annotated[tuple[JsonInt, ...], FailFast()]
    chunks: Annotated[tuple[Chunk, ...], FailFast()]


class Checkpoint(Record):
    """Metadata of a complete checkpoint.

    Attributes:
        job: Name of the job.
        step: Step of the training.
        run: Run of the job that saved the checkpoint.
        position: Position in the data at which training continues, for the loader.
        notes: Free text of the caller.
        saved: Time of the save, by the saver's clock.
        root: Digest of the content. Equal states in equal files have equal digests.
        parts: Files of the checkpoint.
        tensors: Tensors by their names.
        digest: Digest of all other fields, in canonical JSON.
    """

    record_kind: ClassVar[str] = "checkpoint"
    record_bytes: ClassVar[int] = _MAX_METADATA_SIZE
    record_version: ClassVar[int] = 3  # with BLAKE3 digests

    job: str
    step: JsonInt
    run: str
    position: JsonObject
    notes: Annotated[dict[str, str], WrapValidator(validate_batches)]
    saved: datetime
    root: str
    parts: Annotated[tuple[Part, ...], FailFast()]
    tensors: Annotated[dict[str, TensorRecord], WrapValidator(validate_batches)]
    digest: str = ""

    @property
    def size(self) -> int:
        """Size of all files in bytes."""
        return sum(part.size for part in self.parts)


class RankShare(Record):
    """Files of a checkpoint that one of several ranks has saved.

    Attributes:
        job: Name of the job.
        step: Step of the training.
        rank: Number of the rank.
        world: Number of ranks.
        parts: Files of the rank.
        tensors: Tensors with boxes in these files; ``Chunk.part`` is an index of ``parts``.
        run: Run of the job. Readers use this field and the next two of rank 0 only.
        position: Position in the data at which training continues.
        notes: Free text of the caller.
    """

    record_kind: ClassVar[str] = "checkpoint-share"
    record_version: ClassVar[int] = 2  # with BLAKE3 digests
    record_bytes: ClassVar[int] = _MAX_METADATA_SIZE
    job: str
    step: JsonInt
    rank: JsonInt
    world: JsonInt
    parts: Annotated[tuple[Part, ...], FailFast()]
    tensors: Annotated[dict[str, TensorRecord], WrapValidator(validate_batches)]
    run: str
    position: JsonObject
    notes: Annotated[dict[str, str], WrapValidator(validate_batches)]


class EpochRecord(Record):
    """End of an epoch, and its checkpoint.

    Attributes:
        job: Name of the job.
        epoch: Number of the epoch.
        step: Step at which the epoch ended.
        root: Digest of the checkpoint's content; None if the epoch ended without a checkpoint.
        rest: Digest of the position and the run, which are the same on all members.
        member: Member that committed this record.
        reason: Reason why there is no checkpoint; empty if there is one.
        destination: URL of the destination with the checkpoint; empty for the record's own store.
    """

    record_kind: ClassVar[str] = "checkpoint-epoch"
    record_version: ClassVar[int] = 3  # with the destination

    job: str
    epoch: JsonInt
    step: JsonInt
    root: str | None
    rest: str = ""
    member: str = ""
    reason: str = ""
    destination: str = ""


class Roster(Record):
    """Members that take part in the end of an epoch, the same for all.

    Attributes:
        job: Name of the job.
        epoch: Number of the epoch.
        members: Names of the members, sorted.
        seed: Seed of the order of the checkpointers.
    """

    record_kind: ClassVar[str] = "cooldown-roster"

    job: str
    epoch: JsonInt
    members: tuple[str, ...]
    seed: JsonInt


class Vote(Record):
    """Statement of a member: the content of an epoch's checkpoint.

    Attributes:
        member: Name of the member.
        step: Step of the member.
        root: Digest of the member's content.
        rest: Digest of the position and the run, which must be the same on all members.
        size: Size of the content in bytes.
    """

    record_kind: ClassVar[str] = "cooldown-vote"
    record_version: ClassVar[int] = 2  # with BLAKE3 digests

    member: str
    step: JsonInt
    root: str
    rest: str
    size: JsonInt

    @property
    def agreement_key(self) -> tuple[int, str, str]:
        """Fields that are equal for members in agreement."""
        return self.step, self.root, self.rest

    def make_epoch_record(
        self, job: str, epoch: int, member: str = "", destination: str = ""
    ) -> EpochRecord:
        """Return the record of an epoch that ends with this content."""
        return EpochRecord(
            job=job,
            epoch=epoch,
            step=self.step,
            root=self.root,
            rest=self.rest,
            member=member,
            destination=destination,
        )


class LateVote(Record):
    """A member's vote to end an epoch without a checkpoint.

    Attributes:
        member: Name of the member.
        reason: Reason in a sentence.
    """

    record_kind: ClassVar[str] = "cooldown-late-vote"

    member: str
    reason: str


class CooldownOutcome(StrEnum):
    """Result of the end of an epoch for one member."""

    COMMITTED = "committed"  # the member committed the checkpoint and ended the epoch
    LOST = "lost"  # the member uploaded, and another member committed first
    NOT_CHOSEN = "not chosen"  # other members uploaded
    CANCELLED = "cancelled"  # the caller stopped the member's part
    FAILED = "failed"  # the member's part failed, for the reason in the record
    NO_DESTINATION = "no destination"  # the member has no destination


class CooldownRecord(Record):
    """Result of an epoch's end for one member.

    Attributes:
        member: Name of the member.
        outcome: Kind of the result.
        reason: Reason in a sentence; empty if there is none.
        sent: Number of bytes that the member uploaded.
        checked: Number of bytes of other members' uploads that the member verified.
        replaced: Number of other members' files that had another digest than their names.
        seconds: Duration.
    """

    record_kind: ClassVar[str] = "cooldown-ended"

    member: str
    outcome: CooldownOutcome
    reason: str
    sent: JsonInt
    checked: JsonInt
    replaced: JsonInt
    seconds: float


class Pin(Record):
    """Protection of a checkpoint from removal by any rule.

    Attributes:
        job: Name of the job.
        step: Step of the checkpoint.
        reason: Reason of the protection, for later readers.
    """

    record_kind: ClassVar[str] = "checkpoint-pin"

    job: str
    step: JsonInt
    reason: str


class Quarantine(Record):
    """Damaged checkpoint that was moved away.

    Attributes:
        checkpoint: Metadata of the checkpoint; None if it cannot be read.
        damage: A sentence for each damaged file.
    """

    record_kind: ClassVar[str] = "checkpoint-quarantine"
    record_bytes: ClassVar[int] = _MAX_METADATA_SIZE
    record_version: ClassVar[int] = 2  # as of `Checkpoint`

    checkpoint: Checkpoint | None
    damage: tuple[str, ...]
