"""Records of the open windows of a run, with the options that may change between windows."""

from datetime import timedelta
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from millrace.records import Record
from millrace.schemas.registration import RosterEntry
from millrace.settings import Duration, Size


class GatherSettings(BaseModel):
    """Settings of gathering a window's gradients."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    wanted: int | None = Field(
        title="Wanted gradients",
        default=None,
        ge=1,
        description="Number of gradients that complete a window; by default the number of workers "
        "that are no reserves.",
    )
    quorum: int = Field(
        default=1,
        ge=0,
        description="Least number of gradients at the deadline. With fewer, none is merged. 0 "
        "allows an empty window.",
    )
    reserves_after: float = Field(
        title="Share before reserves",
        default=0.5,
        ge=0,
        le=1,
        description="Share of the window after which reserves are read, too, and workers that "
        "warm up are no longer waited for. Reserves are read earlier if all other workers have "
        "sent.",
    )
    poll_interval: Duration = Field(
        default=timedelta(seconds=2),
        gt=timedelta(0),
        description="Interval between two listings of the buckets.",
    )
    grace_period: Duration = Field(
        default=timedelta(seconds=10),
        ge=timedelta(0),
        description="Longest wait for pending answers, once, when the window is over or complete.",
    )
    concurrency: int = Field(
        title="Concurrent reads",
        default=8,
        ge=1,
        le=256,
        description="Number of gradients that are read at once.",
    )
    max_norm: float | None = Field(
        title="Largest norm",
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Largest L2 norm of a gradient, without its buffers. A gradient with a larger "
        "norm is refused. By default, only norms that overflow float32 are refused.",
    )
    max_stored: Size | None = Field(
        title="Largest storage per worker",
        default=None,
        gt=0,
        description="Most bytes that a worker should store below its prefix, its gradients "
        "included. A warning names workers that store more. By default there is no "
        "warning.",
    )
    max_objects: int | None = Field(
        title="Most objects per worker",
        default=None,
        ge=1,
        description="Most objects that a worker should store below its prefix. A warning names "
        "workers that store more. By default there is no warning.",
    )


class WindowOptions(BaseModel):
    """Options that may change between windows: the length of a window, and its gathering.

    The merged gradients depend only on the objects that a link names, not on these settings. So a
    run that continues with other settings is the same run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    window_length: Duration = Field(
        title="Length of a window",
        default=timedelta(minutes=20),
        gt=timedelta(0),
        description="Time between the opening of a window and its merge, in which the workers "
        "train and upload their gradients.",
    )
    gather: GatherSettings = Field(
        title="Gathering",
        default=GatherSettings(),
        description="Settings of the gathering of gradients.",
    )


class WindowOpening(Record, WindowOptions):
    """Record of an open window, with the options that hold until the merge.

    Attributes:
        run: Name of the run.
        number: Number of the window.
        roster: Registered workers of the window by their names; empty if workers do not register.
    """

    record_kind: ClassVar[str] = "window-opening"
    record_version: ClassVar[int] = 4  # with `reserves_after`

    run: str
    number: int
    roster: dict[str, RosterEntry] = Field(default_factory=dict[str, RosterEntry])
