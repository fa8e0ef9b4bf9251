"""Records of a checkpoint: its metadata, and that it is not to be used."""

from datetime import datetime
from enum import StrEnum
from typing import Any, ClassVar

from millrace.records import Record, RecordPart

# 300,000 boxes of tensors with names of 80 bytes. A model of 671e9 parameters with 45,000 tensors
# and two moments of Adam has 31 MiB; one of 70e9, cut over 64 ranks, 17 MiB.
_MAX_METADATA_SIZE = 64 << 20


class Part(RecordPart):
    """A file of tensors.

    Attributes:
        step: The step in whose folder it lies: an earlier one's, if its bytes are the same.
        sha256: Of the file.
        size: Bytes of the file.
    """

    step: int
    sha256: str
    size: int


class Chunk(RecordPart):
    """A box of a tensor: all of it, or some of its rows.

    Attributes:
        part: The place of its file in the checkpoint's list.
        name: What it is called there.
        start: Where the box begins in the tensor, in each dimension.
        shape: Its own.
    """

    part: int
    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


class TensorRecord(RecordPart):
    """A tensor, and the boxes that it is made of.

    Attributes:
        dtype: As safetensors calls it, such as ``BF16``.
        shape: Its own.
        chunks: Boxes that cover it, each element once.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class Checkpoint(Record):
    """A checkpoint that is complete.

    Attributes:
        job: Whose it is.
        step: Of the training.
        run: Which run of the job saved it.
        position: Where the data goes on: whatever the loader needs.
        notes: Free text of the caller's.
        saved: When, by the saver's clock.
        root: Digest of the content: equal states that are cut alike have equal ones, whoever saved
            them and when.
        parts: Its files.
        tensors: Its tensors, by their names.
        digest: SHA-256 of all other fields, in canonical JSON.
    """

    record_kind: ClassVar[str] = "checkpoint"
    record_bytes: ClassVar[int] = _MAX_METADATA_SIZE
    record_version: ClassVar[int] = 2  # with the digest of all fields

    job: str
    step: int
    run: str
    position: dict[str, Any]
    notes: dict[str, str]
    saved: datetime
    root: str
    parts: tuple[Part, ...]
    tensors: dict[str, TensorRecord]
    digest: str = ""

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(part.size for part in self.parts)


class RankShare(Record):
    """Files of a checkpoint that one of several ranks has saved.

    Attributes:
        job: Whose.
        step: Of the training.
        rank: Which.
        world: Of how many.
        parts: Its files.
        tensors: The tensors that they hold boxes of; each chunk's ``part`` counts in ``parts``.
        run: Of the job; the first rank's counts, and so with the next two.
        position: Where the data goes on.
        notes: Free text of the caller's.
    """

    record_kind: ClassVar[str] = "checkpoint-share"
    record_bytes: ClassVar[int] = _MAX_METADATA_SIZE
    job: str
    step: int
    rank: int
    world: int
    parts: tuple[Part, ...]
    tensors: dict[str, TensorRecord]
    run: str
    position: dict[str, Any]
    notes: dict[str, str]


class EpochRecord(Record):
    """An epoch that has ended, and the checkpoint that it ended with.

    Attributes:
        job: Whose.
        epoch: Its number.
        step: At which it ended.
        root: The digest of the checkpoint of that step; None if it went on without one.
        rest: The digest of what else the members had to have alike.
        member: Who committed this.
        why: If it went on without, why.
    """

    record_kind: ClassVar[str] = "checkpoint-epoch"

    job: str
    epoch: int
    step: int
    root: str | None
    rest: str = ""
    member: str = ""
    why: str = ""


class Roster(Record):
    """Members that take part in the end of an epoch, the same for all.

    Attributes:
        job: Whose.
        epoch: Which.
        members: Their names, sorted.
        seed: From which the order of the checkpointers follows.
    """

    record_kind: ClassVar[str] = "cooldown-roster"

    job: str
    epoch: int
    members: tuple[str, ...]
    seed: int


class Vote(Record):
    """Statement of a member: the content of an epoch's checkpoint.

    Attributes:
        member: Who.
        step: The step that it is at.
        root: The digest of its content.
        rest: The digest of what else must be alike: where the data goes on.
        size: Bytes of it.
    """

    record_kind: ClassVar[str] = "cooldown-vote"

    member: str
    step: int
    root: str
    rest: str
    size: int

    @property
    def agreement_key(self) -> tuple[int, str, str]:
        """Fields that members in agreement have alike."""
        return self.step, self.root, self.rest

    def make_epoch_record(self, job: str, epoch: int, member: str = "") -> EpochRecord:
        """Return the end of an epoch with the checkpoint that this is about."""
        return EpochRecord(
            job=job, epoch=epoch, step=self.step, root=self.root, rest=self.rest, member=member
        )


class LateVote(Record):
    """A member's vote to end an epoch without a checkpoint.

    Attributes:
        member: Name of the member.
        why: Reason in a sentence.
    """

    record_kind: ClassVar[str] = "cooldown-late-vote"

    member: str
    why: str


class CooldownOutcome(StrEnum):
    """Result of the end of an epoch for one member. Only the first is a success of its own."""

    COMMITTED = "committed"  # it was the one that ended the epoch, with a checkpoint
    LOST = "lost"  # it was uploading, and another was first
    NOT_CHOSEN = "not chosen"  # others did it
    CANCELLED = "cancelled"  # its caller called it off
    FAILED = "failed"  # what went wrong is said
    NO_DESTINATION = "no destination"  # nowhere to save to: nothing was done


class CooldownRecord(Record):
    """Record of how an epoch ended for one member.

    Attributes:
        member: Who.
        outcome: What.
        reason: Why, where there is something to say.
        sent: Bytes that it uploaded.
        checked: Bytes of others' uploads that it verified.
        replaced: Files of others that were not what their names say.
        seconds: How long it took.
    """

    record_kind: ClassVar[str] = "cooldown-ended"

    member: str
    outcome: CooldownOutcome
    reason: str
    sent: int
    checked: int
    replaced: int
    seconds: float


class Pin(Record):
    """A checkpoint that is kept, whatever the rules say.

    Attributes:
        job: Whose.
        step: Which.
        why: For whoever wonders later.
    """

    record_kind: ClassVar[str] = "checkpoint-pin"

    job: str
    step: int
    why: str


class Quarantine(Record):
    """A checkpoint that was found damaged, and moved out of the way.

    Attributes:
        checkpoint: What it was; None if its metadata cannot be read.
        damage: What was found, a sentence for each file.
    """

    record_kind: ClassVar[str] = "checkpoint-quarantine"
    record_bytes: ClassVar[int] = _MAX_METADATA_SIZE
    record_version: ClassVar[int] = 2  # as of `Checkpoint`

    checkpoint: Checkpoint | None
    damage: tuple[str, ...]
