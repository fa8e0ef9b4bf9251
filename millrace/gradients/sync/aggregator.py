"""The aggregator of a run as a person starts it: one by a lease, from the newest checkpoint on."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from datetime import timedelta
from types import TracebackType

from millrace import errors
from millrace.checkpoints.find import VerifyDepth
from millrace.checkpoints.retention import apply_retention, plan_retention
from millrace.checkpoints.settings import RetentionSettings
from millrace.gradients.backends.sharded_weights import (
    Placing,
    ShardedWeights,
    place_here,
    place_on_ray,
)
from millrace.gradients.settings import AggregatorSettings
from millrace.gradients.sync.chain import find_newest_window
from millrace.gradients.sync.follow import follow
from millrace.gradients.sync.gather import Sender
from millrace.gradients.weights import begin_run, load_checkpoint_weights, load_newest_weights
from millrace.keys.gradients import ChainKeys
from millrace.keys.leases import LeaseKeys
from millrace.lease import Heartbeat, HeldLease, Holder, Lease, StoreClock, await_lease
from millrace.progress import Progress, ignore_event
from millrace.schemas.chain import ChainLink
from millrace.storage import Store, open_store


def aggregate_run(
    settings: AggregatorSettings, *, progress: Progress = ignore_event
) -> Iterator[ChainLink]:
    """Merge window after window of a run, until it is over. Killed at any moment, call it again.

    The weights are those of the newest checkpoint that the chain names, and of the links after it.

    Args:
        settings: Which run, and how.
        progress: Told what `follow` tells and, if the weights are here, in other threads, `Saver`.

    Yields:
        The link of each window that it has merged.

    Raises:
        HeldError: Another aggregator has the run.
        NotFoundError: The run has not begun, and nothing says with which weights.
        ChainError: The chain is broken.
        ConflictError: Another aggregator has merged a window otherwise: call it again.
        WorkerError: A node that had some of the weights is gone: call it again.
    """
    run, keys = settings.run, settings.run.chain
    shared = settings.gradients or settings.store
    opened = {"": open_store(shared)}  # many in one bucket are listed as one
    opened |= {uid: open_store(spec) for uid, spec in settings.buckets.items()}
    store = open_store(settings.store)

    def worker(uid: str) -> Sender:
        run.gradients.worker(uid)  # refuses what cannot be a name
        return Sender(uid, opened.get(uid, opened[""]))

    workers = [worker(uid) for uid in settings.workers]
    reserves = [worker(uid) for uid in settings.reserves]
    with ExitStack() as stack:
        heart = stack.enter_context(Heartbeat(settings.lease))
        heart.keep(_acquire_run_lease(store, keys, settings.lease))
        place = stack.enter_context(_choose_placing(settings, progress))
        model, window = open_newest_weights(settings, store, place, progress=progress)
        keeper = stack.enter_context(_Keeper(store, keys, model, settings))
        merged = follow(
            store,
            run,
            workers,
            model,
            reserves=reserves,
            after=window,
            until=settings.last,
            progress=progress,
        )
        alone = 0
        for count, link in enumerate(merged, start=1):
            keeper.keep(link)
            yield link
            alone = 0 if link.taken else alone + 1
            if count == settings.windows or alone == settings.idle:
                return


def begin_chain(settings: AggregatorSettings, *, progress: Progress = ignore_event) -> int:
    """Commit the first link of a run if the run has not begun; no window is opened.

    Args:
        settings: Which run, and with which weights it begins.
        progress: As of `newest_weights`.

    Returns:
        Number of the newest window that is merged; 0 before the first.

    Raises:
        NotFoundError: The run has not begun, and nothing says with which weights.
    """
    store = open_store(settings.store)
    last = find_newest_window(store, settings.run.chain)
    if last < 0:
        with _choose_placing(settings, progress) as place:
            model, last = open_newest_weights(settings, store, place, progress=progress)
            model.close()
    return last


def _choose_placing(
    settings: AggregatorSettings, progress: Progress
) -> AbstractContextManager[Placing]:
    if settings.ray is None:
        return nullcontext(place_here(threads=settings.threads, progress=progress))
    values = settings.run.merge.values
    return place_on_ray(settings.ray, values=values, threads=settings.threads)


def _acquire_run_lease(store: Store, keys: ChainKeys, ttl: timedelta) -> Lease:
    """Acquire the run's lease: wait until it is free, or its holder is heard of."""
    holder = Holder.this_process()
    clock = StoreClock.read(store, keys.job, holder)
    held = await_lease(store, LeaseKeys(keys.job, "aggregator"), holder, ttl, clock)
    if isinstance(held, HeldLease):
        raise errors.HeldError(
            f"{keys.run} is aggregated by process {held.holder.pid} on {held.holder.host}, "
            "which lives: leave it to that, or stop it first."
        )
    return held


def open_newest_weights(
    settings: AggregatorSettings,
    store: Store,
    place: Placing | None = None,
    *,
    progress: Progress = ignore_event,
) -> tuple[ShardedWeights, int]:
    """Return the newest weights of a run that a checkpoint has, and their window.

    Begin it if it is new.

    Args:
        settings: Which run.
        store: The aggregator's bucket.
        place: Makes room for the weights; by default here.
        progress: As of `newest_weights`.

    Raises:
        NotFoundError: It has not begun, and nothing says with which weights.
        ChainError: No checkpoint of the chain is there and undamaged.
    """
    place = place or place_here()
    keys, initial = settings.run.chain, settings.initial_weights
    if find_newest_window(store, keys) >= 0:
        return load_newest_weights(store, keys, place, progress=progress)
    if initial is None:
        raise errors.NotFoundError(
            f"{store.make_url(keys.links)} has no link: the run has not begun. Say with which "
            "checkpoint it begins."
        )
    origin = open_store(initial.store, make_folder=False) if initial.url else store
    model, step = load_checkpoint_weights(
        origin, initial.job, place, step=initial.step, tensors=initial.tensors
    )
    begin_run(store, keys, model, step=step)
    return model, 0


class _Keeper:
    """Saves the weights now and then, and at the end, and removes old ones."""

    def __init__(
        self, store: Store, keys: ChainKeys, model: ShardedWeights, settings: AggregatorSettings
    ) -> None:
        self._store, self._job, self._model = store, keys.job, model
        self._every, self._rules = settings.every, RetentionSettings(last=settings.keep)
        self._unsaved: ChainLink | None = None

    def keep(self, link: ChainLink) -> None:
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
        if isinstance(error, errors.WorkerError):
            return  # a save would wait for the node that is gone
        if error is not None:  # which says more than what a save might come to
            with suppress(errors.MillraceError):
                self._model.close()
            return
        try:
            if self._unsaved is not None:
                self._save(self._unsaved)
            self._clear()
        finally:
            self._model.close()

    def _save(self, link: ChainLink) -> None:
        self._clear()
        self._model.save(self._store, self._job, step=link.step, window=link.window)
        self._unsaved = None

    def _clear(self) -> None:
        """Remove what the last checkpoint, once it is there, makes needless."""
        if self._model.saved() is not None:
            plan = plan_retention(self._store, self._job, self._rules, check=VerifyDepth.SIZES)
            apply_retention(self._store, plan)
