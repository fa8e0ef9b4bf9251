"""What a checkpoint commits: its metadata, and that it is not to be used."""

from datetime import datetime
from typing import Any

from millrace.models.dataset import Committed


class Part(Committed):
    """A file of tensors.

    Attributes:
        step: The step in whose folder it lies: an earlier one's, if its bytes are the same.
        sha256: Of the file.
        size: Bytes of the file.
    """

    step: int
    sha256: str
    size: int


class Chunk(Committed):
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


class TensorRecord(Committed):
    """A tensor, and the boxes that it is made of.

    Attributes:
        dtype: As safetensors calls it, such as ``BF16``.
        shape: Its own.
        chunks: Boxes that cover it, each element once.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class Checkpoint(Committed):
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
    """

    job: str
    step: int
    run: str
    position: dict[str, Any]
    notes: dict[str, str]
    saved: datetime
    root: str
    parts: tuple[Part, ...]
    tensors: dict[str, TensorRecord]

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(part.size for part in self.parts)


class Epoch(Committed):
    """An epoch that has ended, and the checkpoint that it ended with.

    Attributes:
        job: Whose.
        epoch: Its number.
        step: Of the checkpoint.
        root: Its digest.
    """

    job: str
    epoch: int
    step: int
    root: str


class Pin(Committed):
    """A checkpoint that is kept, whatever the rules say.

    Attributes:
        job: Whose.
        step: Which.
        why: For whoever wonders later.
    """

    job: str
    step: int
    why: str


class Quarantine(Committed):
    """A checkpoint that was found damaged, and moved out of the way.

    Attributes:
        checkpoint: What it was.
        damage: What was found, a sentence for each file.
    """

    checkpoint: Checkpoint
    damage: tuple[str, ...]
