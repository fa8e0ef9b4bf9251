"""Windows of a run, which the aggregator opens and merges one after another.

A window begins with the commit of the previous link. The aggregator opens the window with a record
of its options. It merges the window when the gradients are complete, or at the end of the window's
time. The time begins with that record, by the store's clock. Workers read only the chain.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress

from millrace import errors
from millrace.gradients.backends.local import make_single_shard
from millrace.gradients.backends.sharded_weights import ShardedWeights
from millrace.gradients.codec.gradient_object import Shapes
from millrace.gradients.gather_window import GatherWindow, Sender
from millrace.gradients.merging.links import find_newest_window, read_link, read_link_after
from millrace.gradients.progress_events import LinkApplied
from millrace.gradients.settings import RunSettings
from millrace.gradients.state import WeightState
from millrace.gradients.sync.gather import count_wanted_gradients, gather
from millrace.gradients.sync.gather_results import QuorumError
from millrace.gradients.sync.registrations import Registrar
from millrace.gradients.sync.window_merge import merge_gathered
from millrace.lease import Holder, Lease, StoreClock
from millrace.progress import Progress, ignore_event
from millrace.records import commit_once
from millrace.schemas.chain import ChainLink
from millrace.schemas.registration import RosterEntry
from millrace.schemas.window import GatherSettings, WindowOpening
from millrace.storage import Store, head


def merge_windows(
    store: Store,
    settings: RunSettings,
    workers: Sequence[Sender],
    weights: WeightState | ShardedWeights,
    *,
    reserves: Sequence[Sender] = (),
    gradients_store: Store | None = None,
    lease: Lease | None = None,
    after: int = 0,
    until: int | None = None,
    threads: int = 1,
    progress: Progress = ignore_event,
) -> Iterator[ChainLink]:
    """Merge the windows of a run, one after another. After a kill, call this function again.

    Windows that are already merged are applied from the chain. A window with fewer gradients than
    the quorum has a link that changes no weights. So has an open window whose earlier quorum is
    larger than the number of the present workers. A window whose time ended without an aggregator
    gets its time again.

    Args:
        store: Bucket of the aggregator. The chain has begun.
        settings: Settings of the run.
        workers: Workers that are read first in each window.
        weights: Weights after window ``after``, which are changed in place.
        reserves: Workers that replace missing ones.
        gradients_store: Bucket of the workers that register, which has their registrations; by
            default that of the aggregator.
        lease: Lease of the run, which another aggregator may have taken since.
        after: Number of the window of ``weights``.
        until: Number of the last window; by default there is no end.
        threads: Number of threads, if the weights are in this process.
        progress: Receives the events of `gather` and `merge_window`, `LinkApplied`,
            `WindowMerged`, and those of `Registrar`.

    Yields:
        Link of each merged window.

    Raises:
        ConfigurationError: A worker is named twice, or the settings need more gradients than there
            are workers, and no others register. No window is opened.
        HeldError: Another aggregator has the lease. No window is opened, and no link committed.
        ConflictError: Another aggregator merged a window differently: catch up from the chain.
        ChainError: The chain is broken.
        WorkerError: A node with some of the weights is lost.
    """
    if isinstance(weights, WeightState):
        weights = make_single_shard(weights, threads=threads)
    if settings.registration is None:
        count_wanted_gradients(settings.gather, workers, reserves)
    shared = gradients_store or store
    fixed = [worker.uid for worker in (*workers, *reserves)]
    registrar = Registrar(settings, store, shared, fixed, progress)
    clock = StoreClock.read(store, settings.chain_keys.job, Holder.describe_this_process())
    applied = catch_up_weights(
        store, settings, weights, after=after, until=until, progress=progress
    )
    window = applied.window if applied else after
    before = applied or read_link(store, settings.chain_keys, window)
    while until is None or window < until:
        window += 1
        roster = registrar.await_roster(window, before)
        _refuse_if_superseded(lease, settings)
        opening, gather_window = _open(
            store, settings, weights.shapes, window, before.step, roster, clock
        )
        active = [
            (Sender(uid, shared), entry.counts)
            for uid, entry in opening.roster.items()
            if entry.is_active and uid not in fixed
        ]
        counting = [*workers, *(sender for sender, counts in active if counts)]
        weights.begin_window(gather_window)
        try:
            gathered = gather(
                gather_window,
                counting,
                _limit_wanted(opening.gather, len(counting) + len(reserves)),
                reserves=reserves,
                observed=[sender for sender, counts in active if not counts],
                read_gradient=weights.read_gradient,
                clock=clock,
                progress=progress,
            )
        except QuorumError as error:
            gathered = error.gathered  # the window has ended, with a link that changes no weights
        _refuse_if_superseded(lease, settings)
        quorum = opening.gather.quorum
        before = merge_gathered(
            store, settings, gather_window, gathered, before, weights, quorum=quorum,
            progress=progress,
        )  # fmt: skip
        yield before


def _refuse_if_superseded(lease: Lease | None, settings: RunSettings) -> None:
    """Refuse to continue after another aggregator has taken the run's lease. One listing.

    This happens if this process was suspended, or could not renew its lease. While the store does
    not answer, nothing is refused.

    Raises:
        HeldError: Another aggregator has the lease.
    """
    with suppress(errors.UnavailableError):
        if lease is not None and lease.is_superseded():
            raise errors.HeldError(
                f"Another process has taken over the aggregation of {settings.name}, since this "
                "one did not renew its lease: let that one continue."
            )


def catch_up_weights(
    store: Store,
    settings: RunSettings,
    weights: ShardedWeights,
    *,
    after: int = 0,
    until: int | None = None,
    progress: Progress = ignore_event,
) -> ChainLink | None:
    """Apply the windows that are already merged from the chain.

    Args:
        store: Bucket of the aggregator. The chain has begun.
        settings: Settings of the run.
        weights: Weights after window ``after``, which are changed in place.
        after: Number of the window of ``weights``.
        until: Number of the last window; by default the newest.
        progress: Receives `LinkApplied`.

    Returns:
        Link of the last window that was applied; None if the weights were up to date.

    Raises:
        ChainError: The chain is broken.
        WorkerError: A node with some of the weights is lost.
    """
    last = find_newest_window(store, settings.chain_keys)
    if until is not None:
        last = min(last, until)
    applied = None
    for window in range(after + 1, last + 1):
        before = applied or read_link(store, settings.chain_keys, after)
        applied = read_link_after(store, settings.chain_keys, window, before)
        weights.apply_link(store, applied)
        progress(LinkApplied(run=settings.name, window=window, step=applied.step))
    return applied


def _limit_wanted(options: GatherSettings, most: int) -> GatherSettings:
    """Return options that all workers can meet, if those of an open window need more gradients."""
    wanted = None if options.wanted is None else min(options.wanted, most)
    return options.model_copy(update={"wanted": wanted, "quorum": min(options.quorum, most)})


def _open(
    store: Store,
    settings: RunSettings,
    shapes: Shapes,
    window: int,
    base: int,
    roster: dict[str, RosterEntry],
    clock: StoreClock,
) -> tuple[WindowOpening, GatherWindow]:
    """Open a window; return its record, and the window to gather.

    A window that is open already keeps its options and its roster. If its time is over, no
    aggregator was running, and its time begins again.
    """
    keys = settings.chain_keys
    ours = WindowOpening(
        run=settings.name,
        number=window,
        window_length=settings.window_length,
        gather=settings.gather,
        roster=roster,
    )
    opening = commit_once(store, keys.make_opening_key(window), ours).record
    # Workers may send from this time on.
    began = head(store, keys.make_link_key(window - 1)).last_modified
    opened = head(store, keys.make_opening_key(window)).last_modified
    now = clock.now()
    over = opened + opening.window_length <= now
    return opening, GatherWindow(
        keys=settings.gradient_keys,
        number=window,
        base=base,
        codec=settings.codec,
        shapes=shapes,
        opens=began,
        closes=(now if over else opened) + opening.window_length,
        max_norm=opening.gather.max_norm,
    )
