"""The aggregator of a run as a person starts it: one by a lease, from the newest checkpoint on."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from millrace import errors
from millrace.checkpoints.find import Check
from millrace.checkpoints.retention import plan_retention, retain
from millrace.checkpoints.saving import Saver, Saving
from millrace.checkpoints.settings import Retention
from millrace.gradients.chain import newest
from millrace.gradients.gathering import Worker
from millrace.gradients.running import RunSettings, follow
from millrace.gradients.state import State
from millrace.gradients.weights import begin_run, newest_state, save_state, state_of_checkpoint
from millrace.keys import ChainKeys, LeaseKeys
from millrace.lease import Heartbeat, Held, Holder, Lease, StoreClock, acquire
from millrace.models.chain import Link
from millrace.progress import Progress, silent
from millrace.storage import Store, StoreSpec, open_store

_LOOK = 1.0  # seconds between two looks at a lease that another has


class Beginning(BaseModel):
    """The checkpoint whose weights a run begins with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: StoreSpec | None = Field(
        default=None, description="Where it is; left out, in the aggregator's bucket."
    )
    job: str = Field(description="Whose it is.")
    step: int | None = Field(default=None, description="Which; left out, the newest.")
    tensors: str = Field(
        default="",
        description="What the names of the weights begin with there, such as `model.`; workers "
        "call them by what follows.",
    )


class AggregatorSettings(BaseModel):
    """A run, where its gradients come from, and how long it is followed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    windows: int | None = Field(
        default=None, ge=1, description="How many to merge; left out, until the run is over."
    )
    until: int | None = Field(
        default=None, ge=1, description="The number of the last window to merge."
    )
    idle: int = Field(
        default=3,
        ge=1,
        description="The run is over when nobody's gradient was taken in so many windows on end.",
    )
    every: int = Field(default=10, ge=1, description="Windows from one checkpoint to the next.")
    keep: int = Field(
        default=3, ge=1, description="Checkpoints that are kept; that of the beginning always is."
    )
    lease: timedelta = Field(
        default=timedelta(minutes=1),
        ge=timedelta(seconds=3),
        description="After this long without a sign of life another aggregator takes over.",
    )
    threads: int = Field(default=2, ge=1, le=64, description="How many work side by side.")

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
        return self


def aggregate_run(settings: AggregatorSettings, *, progress: Progress = silent) -> Iterator[Link]:
    """Merge window after window of a run, until it is over. Killed at any moment, call it again.

    The weights are those of the newest checkpoint that the chain names, and of the links after it.

    Args:
        settings: Which run, and how.
        progress: Told what `follow` and, in other threads, `Saver` tell.

    Yields:
        The link of each window that it has merged.

    Raises:
        HeldError: Another aggregator has the run.
        NotFoundError: The run has not begun, and nothing says with which weights.
        ChainError: The chain is broken.
        ConflictError: Another aggregator has merged a window otherwise: call it again.
    """
    run, keys = settings.run, settings.run.chain
    shared = settings.gradients or settings.store
    opened = {"": open_store(shared)}  # many in one bucket are listed as one
    opened |= {uid: open_store(spec) for uid, spec in settings.buckets.items()}
    store = open_store(settings.store)

    def worker(uid: str) -> Worker:
        run.gradients.worker(uid)  # refuses what cannot be a name
        return Worker(uid, opened.get(uid, opened[""]))

    workers = [worker(uid) for uid in settings.workers]
    reserves = [worker(uid) for uid in settings.reserves]
    with ExitStack() as stack:
        heart = stack.enter_context(Heartbeat(settings.lease))
        heart.keep(_leased(store, keys, settings.lease))
        state, window = beginning(settings, store, progress=progress)
        keeper = stack.enter_context(_Keeper(store, keys, state, settings, progress))
        merged = follow(
            store,
            run,
            workers,
            state,
            reserves=reserves,
            after=window,
            until=min(filter(None, (run.windows, settings.until)), default=None),
            threads=settings.threads,
            progress=progress,
        )
        alone = 0
        for count, link in enumerate(merged, start=1):
            keeper.keep(link)
            yield link
            alone = 0 if link.taken else alone + 1
            if count == settings.windows or alone == settings.idle:
                return


def _leased(store: Store, keys: ChainKeys, ttl: timedelta) -> Lease:
    """The run's lease: waited for until it is free, or whoever has it is heard of."""
    holder = Holder.this_process()
    clock = StoreClock.read(store, keys.job, holder)
    names = LeaseKeys(keys.job, "aggregator")
    first: Held | None = None
    while True:
        held = acquire(store, names, holder, ttl, clock)
        if isinstance(held, Lease):
            return held
        first = first or held
        if held.holder.id != first.holder.id or held.until > first.until:
            raise errors.HeldError(
                f"{keys.run} is aggregated by process {held.holder.pid} on {held.holder.host}, "
                "which lives: leave it to that, or stop it first."
            )
        time.sleep(_LOOK)


def beginning(
    settings: AggregatorSettings, store: Store, *, progress: Progress = silent
) -> tuple[State, int]:
    """The newest weights of a run that a checkpoint has, and their window; it may begin now.

    Args:
        settings: Which run.
        store: The aggregator's bucket.
        progress: As of `begin_run` and `newest_state`.

    Raises:
        NotFoundError: It has not begun, and nothing says with which weights.
        ChainError: No checkpoint of the chain is there and undamaged.
    """
    keys, begin = settings.run.chain, settings.begin
    if newest(store, keys) >= 0:
        return newest_state(store, keys, progress=progress)
    if begin is None:
        raise errors.NotFoundError(
            f"{store.url_of(keys.links)} has no link: the run has not begun. Say with which "
            "checkpoint it begins."
        )
    origin = open_store(begin.store, make_folder=False) if begin.store else store
    state, step = state_of_checkpoint(origin, begin.job, step=begin.step, tensors=begin.tensors)
    begin_run(store, keys, state, step=step, progress=progress)
    return state, 0


class _Keeper:
    """Saves the weights now and then, and at the end, and removes old ones."""

    def __init__(
        self,
        store: Store,
        keys: ChainKeys,
        state: State,
        settings: AggregatorSettings,
        progress: Progress,
    ) -> None:
        self._store, self._job, self._state = store, keys.job, state
        self._every, self._rules = settings.every, Retention(last=settings.keep)
        self._saver = Saver(store, keys.job, progress=progress)
        self._saving: Saving | None = None
        self._unsaved: Link | None = None

    def keep(self, link: Link) -> None:
        self._unsaved = link
        if link.window % self._every == 0:
            self._save(link)

    def __enter__(self) -> "_Keeper":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:  # which says more than what a save might come to
            self._saver.__exit__(kind, error, trace)
            return
        with self._saver:
            if self._unsaved is not None:
                self._save(self._unsaved)
            self._clear()

    def _save(self, link: Link) -> None:
        self._clear()
        self._saving = save_state(self._saver, self._state, step=link.step, window=link.window)
        self._unsaved = None

    def _clear(self) -> None:
        """Remove what the last checkpoint, once it is there, makes needless."""
        if self._saving is not None:
            self._saving.result()
            self._saving = None
            plan = plan_retention(self._store, self._job, self._rules, check=Check.SIZES)
            retain(self._store, plan)
