"""Records of the workers of a run: compressed gradients, and their reports."""

import math
from enum import StrEnum
from typing import ClassVar, Literal

from pydantic import Field, FiniteFloat

from millrace.records import JsonInt, Record, RecordPart

CHUNK_SIZE = 4096
"""Largest number of values in a chunk: an index has 12 bits."""

BUFFER_NAMES = ("running_mean", "running_var", "num_batches_tracked")
"""Last parts of the names of BatchNorm's buffers."""

_BUFFER_RANGES = {"running_var": (0.0, math.inf), "num_batches_tracked": (0.0, 2.0**53)}


class Transform(StrEnum):
    """Transform of a tensor before values of each chunk are selected."""

    NONE = "none"
    DCT = "dct"  # of tiles, as DeMo does


class Support(StrEnum):
    """Choice of the values of each chunk that are sent."""

    LARGEST = "largest"  # by magnitude; each worker sends other indices
    SHARED = "shared"  # drawn from the window's name; all workers send the same indices


class Codec(RecordPart):
    """Settings of the compression of a gradient.

    Buffers are sent whole, as float32 values and not as changes. Of each chunk of 4096 values of
    another tensor, ``k`` values are sent. A value is sent as an index, a sign and one of
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
        return name in self.buffers or take_last_part(name) in self.buffers

    def select_for_tensor(self, name: str) -> "Codec":
        """Return the settings for one tensor. A buffer is sent whole, in float32."""
        if not self.is_buffer(name):
            return self
        whole = {
            "transform": Transform.NONE,
            "support": Support.SHARED,
            "k": CHUNK_SIZE,
            "bits": 32,
        }
        return self.model_copy(update=whole)


def take_last_part(name: str) -> str:
    """Return the last part of a tensor's name: ``running_var`` of ``layer.1.running_var``."""
    return name.rpartition(".")[2]


def find_buffer_range(name: str) -> tuple[float, float]:
    """Return the least and the largest value that a buffer may have, by the buffer's name."""
    return _BUFFER_RANGES.get(take_last_part(name), (-math.inf, math.inf))


class GradientHeader(RecordPart):
    """Header of a compressed gradient.

    Attributes:
        version: Version of the format.
        run: Name of the run.
        uid: Name of the worker.
        window: Number of the window.
        base: Step of the weights that the gradient changes.
        model: Digest of the names and shapes of the model's tensors.
        codec: Settings of the compression.
        shapes: Shapes of the tensors, in the order of their names.
        tokens: Number of tokens in the worker's batches; the weight, if the merge uses one.
        samples: Digest of the worker's samples, as the run defines it.
        body: Digest of the tensors' digests, joined as text in the order of their names.
        digest: Digest of all other fields, in canonical JSON.
    """

    version: Literal[4] = 4
    run: str
    uid: str
    window: int = Field(ge=0)
    base: int = Field(ge=0)
    model: str
    codec: Codec
    shapes: tuple[tuple[int, ...], ...]
    tokens: int = Field(default=0, ge=0, le=1 << 53)
    samples: str = Field(default="", max_length=100)
    body: str
    digest: str = ""


ABSENT_WINDOWS = 10
"""Number of windows in a row without a worker's gradient that count as one missed window.

These windows did not wait for the worker, since enough others had sent."""


class ExclusionReason(StrEnum):
    """Reason why a worker is excluded from a window, or why its gradient is refused.

    Other workers are not affected.
    """

    MISSING = "missing"  # there was no gradient at the deadline
    EARLY = "early"  # written before the window began: stale or guessed
    LATE = "late"  # written after the deadline
    DUPLICATE = "duplicate"  # the same content as another worker's earlier gradient
    TOO_LARGE = "too large"  # larger than its tensors need; not read
    UNAVAILABLE = "unavailable"  # the bucket does not answer, or refuses
    CHANGED = "changed"  # replaced during the read
    OVERWRITTEN = "overwritten"  # replaced after the last read that a window allows
    FORMAT = "format"  # not a safetensors file of this format, or an object that nobody can read
    HEADER = "header"  # the header is incomplete, or contradicts itself
    RUN = "run"  # of another run
    UID = "uid"  # of another worker
    WINDOW = "window"  # of another window: stale or replayed
    BASE = "base"  # for other weights
    MODEL = "model"  # of another model
    CODEC = "codec"  # compressed with other settings
    DIGEST = "digest"  # the bytes do not have the digest of the header
    TENSORS = "tensors"  # tensors are missing or unknown
    CODES = "codes"  # the bytes are not a compressed tensor
    NORM = "norm"  # the norm is above the limit
    INDICES = "places"  # other indices than most workers, where the rule needs equal ones
    QUORUM = "quorum"  # the gradient is valid, but too few workers sent one
    WARM_UP = "warm up"  # the gradient is valid, and its worker warms up

    @property
    def is_of_valid_gradient(self) -> bool:
        """True if the gradient passed all checks, and was left out for another reason."""
        return self in {ExclusionReason.QUORUM, ExclusionReason.WARM_UP}

    def is_missed(self, *, is_awaited: bool, is_readable: bool = False) -> bool:
        """Decide whether the worker missed the window, by its own fault.

        Args:
            is_awaited: Whether the window waited for the worker.
            is_readable: Whether gradients of others in the worker's bucket could be read.
        """
        if self is ExclusionReason.MISSING:
            return is_awaited
        if self is ExclusionReason.UNAVAILABLE:
            return is_awaited and is_readable
        return not self.is_of_valid_gradient

    @property
    def label(self) -> str:
        """Words for people: the reason's name. The records of runs name `INDICES` ``places``."""
        return self.name.lower().replace("_", " ")


class StartWindow(Record):
    """Report of a worker at the begin of a window: its weights, and their metrics.

    Attributes:
        uid: Name of the worker.
        window: Number of the window; one past the last window at the end of the run.
        step: Step of the weights.
        measured: Metrics of the weights by the worker, such as ``loss``. They are not verified.
    """

    record_kind: ClassVar[str] = "start-window"

    uid: str
    window: JsonInt = Field(ge=1)
    step: JsonInt = Field(ge=0)
    measured: dict[str, FiniteFloat] = Field(default_factory=dict[str, float], max_length=32)
