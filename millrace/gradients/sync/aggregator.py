"""Aggregator of a run: a lease makes it the only one, and it continues from a checkpoint."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from datetime import timedelta
from types import TracebackType

from millrace import errors
from millrace.checkpoints.find import VerifyDepth
from millrace.checkpoints.retention import apply_retention, plan_retention
from millrace.checkpoints.settings import RetentionSettings
from millrace.gradients.backends.local import allocate_locally
from millrace.gradients.backends.ray_cluster import allocate_on_ray
from millrace.gradients.backends.sharded_weights import AllocateWeights, ShardedWeights
from millrace.gradients.gather_window import Sender
from millrace.gradients.merging.links import find_newest_window
from millrace.gradients.settings import AggregationSettings, AggregatorSettings
from millrace.gradients.sync.windows import catch_up_weights, merge_windows
from millrace.gradients.templar.settings import TemplarImportSettings
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
    """Merge all windows of a run until its end. After a kill, call this function again.

    The weights are those of the chain's newest checkpoint, with the links after it applied.

    Args:
        settings: Settings of the aggregator.
        progress: Receives the events of `merge_windows`. If the weights are in this process, it
            also receives those of `Saver`, from other threads.

    Yields:
        Link of each merged window.

    Raises:
        HeldError: Another aggregator holds the run's lease, or has taken it since.
        NotFoundError: The run has not begun, and the settings have no initial weights.
        ChainError: The chain is broken.
        ConflictError: Another aggregator merged a window differently. Call this function again.
        WorkerError: A node with some of the weights is lost. Call this function again.
    """
    run, keys, options = settings.run, settings.run.chain_keys, settings.aggregation
    shared = settings.gradients_store or settings.store
    opened = {"": open_store(shared)}  # workers that share a bucket are listed together
    opened |= {
        uid: open_store(spec, is_foreign=True) for uid, spec in settings.worker_stores.items()
    }
    store = open_store(settings.store)

    def make_sender(uid: str) -> Sender:
        run.gradient_keys.make_worker_prefix(uid)  # raises an error for an invalid name
        return Sender(uid, opened.get(uid, opened[""]))

    workers = [make_sender(uid) for uid in settings.workers]
    reserves = [make_sender(uid) for uid in settings.reserves]
    with ExitStack() as stack:
        heartbeat = stack.enter_context(Heartbeat(options.lease_timeout))
        lease = acquire_run_lease(store, keys, options.lease_timeout)
        heartbeat.keep(lease)
        allocate = stack.enter_context(_choose_allocation(settings, progress))
        weights, window = load_or_begin_run(settings, store, allocate, progress=progress)
        saver = stack.enter_context(_CheckpointSaver(store, keys, weights, options))
        applied = catch_up_weights(
            store, run, weights, after=window, until=settings.last_window, progress=progress
        )
        if applied is not None:  # an aggregator that was killed has not saved these weights
            saver.note_unsaved(applied)
        merged = merge_windows(
            store,
            run,
            workers,
            weights,
            reserves=reserves,
            gradients_store=opened[""],
            lease=lease,
            after=applied.window if applied else window,
            until=settings.last_window,
            progress=progress,
        )
        idle_windows = 0
        for count, link in enumerate(merged, start=1):
            saver.note_link(link)
            yield link
            idle_windows = 0 if link.taken else idle_windows + 1
            if count == settings.max_windows or idle_windows == options.idle:
                return


def ensure_run_begun(settings: AggregatorSettings, *, progress: Progress = ignore_event) -> int:
    """Begin a run with the initial weights, unless it has begun. No window is opened.

    Args:
        settings: Settings of the aggregator, with the initial weights.
        progress: Receives `CheckpointDamaged` for each skipped checkpoint.

    Returns:
        Number of the newest merged window; 0 before the first.

    Raises:
        NotFoundError: The run has not begun, and the settings have no initial weights.
    """
    store = open_store(settings.store)
    last = find_newest_window(store, settings.run.chain_keys)
    if last < 0:
        with _choose_allocation(settings, progress) as allocate:
            weights, last = load_or_begin_run(settings, store, allocate, progress=progress)
            weights.close()
    return last


def _choose_allocation(
    settings: AggregatorSettings, progress: Progress
) -> AbstractContextManager[AllocateWeights]:
    run, options = settings.run, settings.aggregation
    if options.ray is None:
        return nullcontext(allocate_locally(threads=options.threads, progress=progress))
    # `GradientReader` reads this many gradients at once if all workers but one stall.
    reads = run.gather.concurrency + len(settings.workers) + len(settings.reserves)
    reads += run.registration.most if run.registration else 0
    return allocate_on_ray(
        options.ray,
        weights_per_object=run.merge.weights_per_object,
        reads=reads,
        threads=options.threads,
    )


def acquire_run_lease(store: Store, keys: ChainKeys, ttl: timedelta) -> Lease:
    """Acquire the run's lease, or wait until its holder sends a heartbeat.

    Raises:
        HeldError: The holder of the lease is alive.
    """
    holder = Holder.describe_this_process()
    clock = StoreClock.read(store, keys.job, holder)
    held = await_lease(store, LeaseKeys(keys.job, "aggregator"), holder, ttl, clock)
    if isinstance(held, HeldLease):
        raise errors.HeldError(
            f"{keys.run} is aggregated by process {held.holder.pid} on {held.holder.host}, "
            "which is alive: let it continue, or stop it first."
        )
    return held


def load_or_begin_run(
    settings: AggregatorSettings | TemplarImportSettings,
    store: Store,
    allocate: AllocateWeights | None = None,
    *,
    progress: Progress = ignore_event,
) -> tuple[ShardedWeights, int]:
    """Load the newest weights of a run, or begin the run with the initial weights.

    Beginning a run saves the initial weights as a checkpoint, and commits the first link.

    Args:
        settings: Settings of the aggregator, or of an import.
        store: Bucket of the aggregator.
        allocate: Function that allocates weights; by default in this process.
        progress: Receives `CheckpointDamaged` for each skipped checkpoint.

    Returns:
        Weights, and the number of their window; 0 for those that the run begins with.

    Raises:
        NotFoundError: The run has not begun, and the settings have no initial weights.
        ConfigurationError: An initial weight is NaN, or a buffer of BatchNorm is not finite.
        ChainError: The chain has no undamaged checkpoint.
    """
    allocate = allocate or allocate_locally()
    keys, initial = settings.run.chain_keys, settings.initial_weights
    if find_newest_window(store, keys) >= 0:
        return load_newest_weights(store, keys, allocate, progress=progress)
    if initial is None:
        raise errors.NotFoundError(
            f"{store.make_url(keys.links)} has no link: the run has not begun. Set "
            "`initial_weights` to begin it."
        )
    origin = settings.initial_weights_store
    weights, step = load_checkpoint_weights(
        store if origin is None else open_store(origin, make_folder=False),
        initial.job,
        allocate,
        step=initial.step,
        tensors=initial.tensors,
    )
    begin_run(store, keys, weights, step=step)
    return weights, 0


class _CheckpointSaver:
    """Context that saves the weights regularly and at its end, and removes old checkpoints."""

    def __init__(
        self, store: Store, keys: ChainKeys, weights: ShardedWeights, options: AggregationSettings
    ) -> None:
        self._store, self._job, self._weights = store, keys.job, weights
        self._every, self._rules = options.every, RetentionSettings(last=options.keep)
        self._unsaved: ChainLink | None = None

    def note_unsaved(self, link: ChainLink) -> None:
        """Note that the weights are those after a link, and are saved at the end."""
        self._unsaved = link

    def note_link(self, link: ChainLink) -> None:
        """Save the weights after a new link, if a checkpoint is due."""
        self.note_unsaved(link)
        if link.window % self._every == 0:
            self._save(link)

    def __enter__(self) -> "_CheckpointSaver":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, errors.WorkerError):
            return  # a save would wait for the lost node
        if error is not None:  # this error is more important than one of the save
            with suppress(errors.MillraceError):
                self._weights.close()
            return
        try:
            if self._unsaved is not None:
                self._save(self._unsaved)
            self._clear()
        finally:
            self._weights.close()

    def _save(self, link: ChainLink) -> None:
        self._clear()
        self._weights.save(self._store, self._job, step=link.step, window=link.window)
        self._unsaved = None

    def _clear(self) -> None:
        """Wait for the last save, and remove checkpoints that are no longer needed."""
        if self._weights.wait_for_save() is not None:
            plan = plan_retention(self._store, self._job, self._rules, check=VerifyDepth.SIZES)
            apply_retention(self._store, plan)
