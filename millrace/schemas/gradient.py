"""Records of the workers of a run: compressed gradients, and their reports."""

import math
from enum import StrEnum
from typing import ClassVar, Literal

from pydantic import Field, FiniteFloat

from millrace.records import Record, RecordPart

CHUNK_SIZE = 4096
"""Values that a chunk has at most: as many as its indices can count in 12 bits."""

BUFFER_NAMES = ("running_mean", "running_var", "num_batches_tracked")
"""Last parts of the names of BatchNorm's buffers."""

_BUFFER_RANGES = {"running_var": (0.0, math.inf), "num_batches_tracked": (0.0, 2.0**53)}


class Transform(StrEnum):
    """Transform of a tensor before the largest values of each chunk are chosen."""

    NONE = "none"
    DCT = "dct"  # of tiles, as DeMo does


class Support(StrEnum):
    """Choice of the values of each chunk that are sent."""

    LARGEST = "largest"  # by magnitude: each worker its own
    SHARED = "shared"  # drawn from the window's name: all workers the same, in turn


class Codec(RecordPart):
    """Settings of the compression of a gradient.

    Buffers are sent whole, as float32 values and not as changes. Of each chunk of 4096 values of
    another tensor, ``k`` values are sent: each as its index, its sign and one of
    ``2 ** (bits - 1)`` magnitudes. Each chunk has its own smallest and largest magnitude.
    """

    transform: Transform = Field(
        default=Transform.NONE,
        description="`dct` sends the coefficients of tiles of at most 64 by 64 (DeMo). `none` "
        "sends the values themselves (SparseLoCo).",
    )
    support: Support = Field(
        title="Choice of values",
        default=Support.LARGEST,
        description="`largest` sends the largest values of each chunk. `shared` sends values at "
        "indices that are drawn for the window, the same for all workers: for "
        "`median` and `trimmed mean`.",
    )
    k: int = Field(
        title="Values per chunk",
        default=64,
        ge=1,
        le=CHUNK_SIZE,
        description="Number of values that are sent, of each chunk of 4096.",
    )
    bits: Literal[2, 4, 8, 16, 32] = Field(
        title="Bits per value",
        default=2,
        description="Bits of each value, its sign included. 16 is a float16, 32 is a float32.",
    )
    buffers: tuple[str, ...] = Field(
        default=BUFFER_NAMES,
        description="Names of the model's buffers, or the last parts of their names; by default "
        "those of BatchNorm. Buffers are sent whole and averaged. Neither the error "
        "feedback nor the outer step changes them.",
    )

    def is_buffer(self, name: str) -> bool:
        """Return whether a tensor is a buffer, by its name."""
        return name in self.buffers or last_part_of(name) in self.buffers

    def for_tensor(self, name: str) -> "Codec":
        """Return how one tensor is compressed: a buffer whole, in float32."""
        if not self.is_buffer(name):
            return self
        whole = {
            "transform": Transform.NONE,
            "support": Support.SHARED,
            "k": CHUNK_SIZE,
            "bits": 32,
        }
        return self.model_copy(update=whole)


def last_part_of(name: str) -> str:
    """Return the last part of a tensor's name: ``running_var`` of ``layer.1.running_var``."""
    return name.rpartition(".")[2]


def range_of(name: str) -> tuple[float, float]:
    """Return the least and the largest value that a buffer may have, by the buffer's name."""
    return _BUFFER_RANGES.get(last_part_of(name), (-math.inf, math.inf))


class GradientHeader(RecordPart):
    """Header of a compressed gradient.

    Attributes:
        version: Of the format.
        run: For which run it is.
        uid: Whose it is.
        window: For which window.
        base: The step of the weights that it changes.
        model: The fingerprint of the model: the digest of its tensors' names and shapes.
        codec: How it was compressed.
        shapes: Of the tensors, in the order of their names.
        tokens: That it was made of: its weight, where the merge asks for one.
        samples: The digest of the samples that it was made of, as the run defines it.
        body: SHA-256 of those of its tensors' bytes, in hexadecimal, in the order of their names.
        digest: SHA-256 of all other fields, in canonical JSON.
    """

    version: Literal[3] = 3
    run: str
    uid: str
    window: int = Field(ge=0)
    base: int = Field(ge=0)
    model: str
    codec: Codec
    shapes: tuple[tuple[int, ...], ...]
    tokens: int = Field(default=0, ge=0, le=1 << 53)
    samples: str = ""
    body: str
    digest: str = ""


class Refusal(StrEnum):
    """Reason why a gradient was refused. It touches nobody else's."""

    MISSING = "missing"  # it did not come in time
    EARLY = "early"  # it was written before its window began: stale, or guessed
    LATE = "late"  # it was written after the deadline
    DUPLICATE = "duplicate"  # the very content that another worker had sent before
    TOO_LARGE = "too large"  # for what it can hold; it was not read
    UNAVAILABLE = "unavailable"  # its bucket does not answer, or refuses
    CHANGED = "changed"  # it was replaced while it was read
    OVERWRITTEN = "overwritten"  # it was replaced again after the last read that a window allows
    FORMAT = "format"  # no safetensors file of ours
    HEADER = "header"  # it does not say what it is, or contradicts itself
    RUN = "run"  # another run's
    UID = "uid"  # another worker's
    WINDOW = "window"  # another window's: stale, or replayed
    BASE = "base"  # of other weights
    MODEL = "model"  # of another model
    CODEC = "codec"  # compressed in another way
    DIGEST = "digest"  # its bytes are not those that its header names
    TENSORS = "tensors"  # some are missing, or unknown
    CODES = "codes"  # its bytes are no compressed tensor
    NORM = "norm"  # larger than anybody honest could send
    PLACES = "places"  # others than most sent, where the rule needs the same of all
    QUORUM = "quorum"  # it is right, and the rule needs more than came


class StartWindow(Record):
    """With what weights a worker has begun a window, and what it says that they are worth.

    Attributes:
        uid: Whose it is.
        window: Which begins; one past the last when the run is over.
        step: That the weights are at.
        measured: By the worker, such as ``loss``: its word, and nobody else's.
    """

    record_kind: ClassVar[str] = "start-window"

    uid: str
    window: int = Field(ge=1)
    step: int = Field(ge=0)
    measured: dict[str, FiniteFloat] = Field(default_factory=dict[str, float], max_length=32)
