"""Settings of a run: how pseudo-gradients are gathered and merged, and how a run is followed.

This module imports neither numba nor torch, so that forms and settings files can be
read without them.
"""

from datetime import timedelta
from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from millrace.keys import ChainKeys, GradientKeys
from millrace.models.chain import Outer
from millrace.models.gradient import CHUNK, Codec, Support
from millrace.settings import Duration
from millrace.storage import StoreSettings, StoreSpec


class Rule(StrEnum):
    """How gradients are merged."""

    MEAN = "mean"  # over all workers: who does not send a value sends zero
    SENDERS = "senders"  # over those that sent the value (Templar)
    TOKENS = "tokens"  # over all, by the tokens that they saw (Decoupled DiLoCo)
    SIGN = "sign"  # the sign that more of them have (signSGD with majority vote, 1810.05291)
    CENTERED_CLIP = "centered clip"  # Karimireddy et al. 2021, 2012.10333
    MULTI_KRUM = "multi-krum"  # Blanchard et al. 2017, 1703.02757
    MEDIAN = "median"  # of each coordinate (Yin et al. 2018, 1803.01498)
    TRIMMED = "trimmed mean"  # of each coordinate (Yin et al. 2018)


BY_PLACE = frozenset({Rule.MEDIAN, Rule.TRIMMED})
"""Rules that judge each place by itself: all workers must have sent it."""


class MergeSettings(BaseModel):
    """How the gradients of a window are merged."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rule: Rule = Field(
        default=Rule.MEAN,
        description="`mean` over all workers; over the `senders` of each value; by `tokens`; the "
        "`sign` of most; `centered clip` and `multi-krum` bear liars; `median` and `trimmed mean` "
        "only where all workers send the same places.",
    )
    clip: bool = Field(
        default=True,
        description="Before the rule, scale whoever's norm is above the median down to it.",
    )
    faulty: int = Field(
        default=0, ge=0, description="How many workers may lie, for the rules that bear it."
    )
    radius: float | None = Field(
        default=None,
        gt=0,
        description="Of `centered clip`: how far from the centre a worker counts wholly; left out, "
        "the median distance.",
    )
    steps: int = Field(default=20, ge=1, le=1000, description="Of `centered clip`: how often.")
    values: int = Field(
        default=1 << 28,
        ge=1,
        description="Of the weights, whose merged gradients are one object: a larger model's have "
        "several.",
    )

    @property
    def fewest(self) -> int:
        """Number of workers that the rule needs at least."""
        match self.rule:
            case Rule.MULTI_KRUM:
                return 2 * self.faulty + 3
            case Rule.TRIMMED:
                return 2 * self.faulty + 1
            case _:
                return 1

    def too_few(self, taken: int) -> str:
        """Return why the rule cannot merge the gradients of so many workers; empty if it can."""
        if taken >= self.fewest:
            return ""
        return (
            f"{self.rule} bears {self.faulty} Byzantine workers (`faulty`) among at least "
            f"{self.fewest}"
        )


class GatherSettings(BaseModel):
    """How a window's gradients are gathered."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    wanted: int | None = Field(
        default=None,
        ge=1,
        description="How many gradients make a window whole; left out, one of each worker that is "
        "no reserve.",
    )
    quorum: int = Field(
        default=1,
        ge=0,
        description="With fewer at the deadline nobody's is taken; 0 lets a window be empty.",
    )
    hedge: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="The share of the time after which reserves are read too; before it, if nobody "
        "else is to come.",
    )
    look: Duration = Field(
        default=timedelta(seconds=2),
        gt=timedelta(0),
        description="How often the buckets are listed.",
    )
    grace: Duration = Field(
        default=timedelta(seconds=10),
        ge=timedelta(0),
        description="How long, when time is up or the window is whole, answers that are on their "
        "way are waited for: once, all of them together.",
    )
    at_once: int = Field(default=8, ge=1, le=256, description="Gradients that are read at once.")


class WindowRules(BaseModel):
    """How long a window lasts, and how it is gathered: may change from one window to the next.

    What was merged follows from what a link names, whatever these rules were. So a run that goes
    on with other ones is the same run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    window: Duration = Field(
        default=timedelta(minutes=20), gt=timedelta(0), description="How long a window lasts."
    )
    gather: GatherSettings = Field(default=GatherSettings(), description="How they are gathered.")


class Opening(WindowRules):
    """Record of a window that was opened: the rules that hold for it until it is merged.

    Attributes:
        run: Name of the run.
        number: Number of the window.
    """

    run: str
    number: int


class RunRules(WindowRules):
    """How the windows of a run go, whatever it is called, and however many they are."""

    version: str = Field(default="1", description="Of what the workers run; others are not heard.")
    codec: Codec = Field(default=Codec(), description="How gradients are compressed.")
    decay: float = Field(
        default=1.0, ge=0, le=1, description="Of what a worker has not sent, from window to window."
    )
    outer: Outer = Field(default=Outer(), description="How what is merged changes the weights.")
    merge: MergeSettings = Field(default=MergeSettings(), description="How they are merged.")
    steps: int = Field(default=30, ge=1, description="Steps of a worker in each window.")

    @model_validator(mode="after")
    def _merge_can_work(self) -> Self:
        codec = self.codec
        own_places = codec.support is Support.LARGEST and codec.k < CHUNK
        if self.merge.rule in BY_PLACE and own_places:
            raise ValueError(
                f"{self.merge.rule} judges each place by itself, and the workers send different "
                "places: set `codec` to `support: shared`, or choose `mean`, `centered clip` or "
                "`multi-krum`"
            )
        return self

    def check_workers(self, workers: int) -> None:
        """Refuse rules that can merge no window.

        Args:
            workers: Number of workers that are no reserves.

        Raises:
            ValueError: A window takes fewer gradients than the merge needs.
        """
        gather = self.gather
        taken = max(workers if gather.wanted is None else gather.wanted, gather.quorum)
        if few := self.merge.too_few(taken):
            raise ValueError(
                f"{few}, and a window takes {taken}: name more workers, declare fewer Byzantine "
                "ones, or choose `centered clip`"
            )


class RunSettings(RunRules):
    """What all who take part in a run have alike."""

    run: str = Field(description="Its name: a prefix below the buckets' URLs.")
    windows: int | None = Field(
        default=None, ge=1, description="After so many the run is over; left out, it never is."
    )

    @property
    def gradients(self) -> GradientKeys:
        return GradientKeys(self.run, self.version)

    @property
    def chain(self) -> ChainKeys:
        return ChainKeys(self.run, self.version)


class WeightsOf(BaseModel):
    """A checkpoint's weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: str = Field(description="Whose it is.")
    step: int | None = Field(default=None, description="Which; left out, the newest.")
    tensors: str = Field(
        default="",
        description="What the names of the weights begin with there, such as `model.`; workers "
        "call them by what follows.",
    )


class Beginning(WeightsOf, StoreSettings):
    """The checkpoint whose weights a run begins with, and the store that it is in."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(
        default="",
        description="URL of the store that has the checkpoint; left out, the aggregator's bucket.",
    )

    @model_validator(mode="after")
    def _store_is_whole(self) -> Self:
        fields = StoreSpec.model_fields
        given = [
            name
            for name in fields
            if name != "url"
            and getattr(self, name) != fields[name].get_default(call_default_factory=True)
        ]
        if given and not self.url:
            raise ValueError(f"{' and '.join(given)} belong to another store: write its url, too")
        return self


class FollowRules(BaseModel):
    """How a run is followed, and what is kept of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    idle: int = Field(
        default=3,
        ge=1,
        description="The run is over when nobody's gradient was taken in so many windows on end.",
    )
    every: int = Field(default=10, ge=1, description="Windows from one checkpoint to the next.")
    keep: int = Field(
        default=3, ge=1, description="Checkpoints that are kept; that of the beginning always is."
    )
    lease: Duration = Field(
        default=timedelta(minutes=1),
        ge=timedelta(seconds=3),
        description="After this long without a sign of life another aggregator takes over.",
    )
    threads: int = Field(default=2, ge=1, le=64, description="How many work side by side.")
    ray: str | None = Field(
        default=None,
        description="The address of a Ray cluster, `auto` for the one that this machine is in: "
        "weights and merging are spread over its nodes. Left out, this machine does it all.",
    )


class FollowSettings(FollowRules):
    """How long a run is followed, and what is kept of it."""

    windows: int | None = Field(
        default=None, ge=1, description="How many to merge; left out, until the run is over."
    )
    until: int | None = Field(
        default=None, ge=1, description="The number of the last window to merge."
    )


class AggregatorSettings(FollowSettings):
    """A run, where its gradients come from, and how long it is followed."""

    run: RunSettings = Field(description="What all who take part have alike.")
    store: StoreSpec = Field(description="The aggregator's bucket: the chain is written there.")
    gradients: StoreSpec | None = Field(
        default=None,
        description="The bucket that the workers share, to be read; left out, the aggregator's.",
    )
    workers: tuple[str, ...] = Field(min_length=1, description="Who is asked first in each window.")
    reserves: tuple[str, ...] = Field(default=(), description="Who stands in, in this order.")
    buckets: dict[str, StoreSpec] = Field(
        default_factory=dict[str, StoreSpec], description="Of workers that have one of their own."
    )
    begin: Beginning | None = Field(
        default=None,
        description="If the run has not begun: with which weights. Left out, it must have.",
    )

    @property
    def last(self) -> int | None:
        """The number of the last window, if that is known."""
        ends = [end for end in (self.run.windows, self.until) if end is not None]
        return min(ends, default=None)

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        names = [*self.workers, *self.reserves]
        twice = sorted({uid for uid in names if names.count(uid) > 1})
        if twice:
            raise ValueError(f"the worker {twice[0]!r} is named twice")
        strange = sorted(set(self.buckets) - set(names))
        if strange:
            raise ValueError(f"{strange[0]!r} has a bucket, and is neither worker nor reserve")
        gather = self.run.gather
        most = max(gather.quorum, gather.wanted or 0)
        if most > len(names):
            raise ValueError(f"{most} gradients are wanted of {len(names)} workers and reserves")
        self.run.check_workers(len(self.workers))
        return self
