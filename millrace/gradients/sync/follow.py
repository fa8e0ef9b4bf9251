"""A run as its aggregator does it: window after window.

A window begins when the link before it was committed. The aggregator opens it by a record of its
rules, and merges it when it is whole or its time is up, counted from that record by the store's
clock. The workers know it from the chain alone.
"""

from collections.abc import Iterator, Sequence

from millrace.gradients.backends.sharded_weights import ShardedWeights, hold_here
from millrace.gradients.codec.payload import Shapes
from millrace.gradients.settings import RunSettings, WindowOpening
from millrace.gradients.state import WeightState
from millrace.gradients.sync.chain import find_newest_window, read_link, read_link_after
from millrace.gradients.sync.gather import QuorumError, Sender, Window, gather
from millrace.gradients.sync.window import ChainStep, aggregate
from millrace.lease import Holder, StoreClock
from millrace.progress import Event, Progress, ignore_event
from millrace.records import commit_once
from millrace.schemas.chain import ChainLink
from millrace.storage import Store, head


def follow(
    store: Store,
    settings: RunSettings,
    workers: Sequence[Sender],
    model: WeightState | ShardedWeights,
    *,
    reserves: Sequence[Sender] = (),
    after: int = 0,
    until: int | None = None,
    threads: int = 1,
    progress: Progress = ignore_event,
) -> Iterator[ChainLink]:
    """Aggregate window after window. Killed at any moment, it can be called again.

    Windows that are merged already are applied from the chain. One to which fewer than the quorum
    came has a link too, which changes nothing. One whose time was over before anybody looked
    is opened anew.

    Args:
        store: The aggregator's bucket, whose chain has begun.
        settings: Of the run.
        workers: Who is asked first in each window.
        model: The weights after window ``after``; changed in place.
        reserves: Who stands in.
        after: The window that ``model`` is of.
        until: The last window; by default it goes on for ever.
        threads: How many work side by side, if the weights are here.
        progress: As `gather` and `aggregate` tell, and ``chain.applied`` and ``window.merged``
            with ``window``, ``taken`` and ``out``.

    Yields:
        The link of each window that it has merged.

    Raises:
        ConflictError: Another aggregator has merged a window otherwise: catch up from the chain.
        ChainError: The chain is broken.
        WorkerError: A node that had some of the weights is gone.
    """
    if isinstance(model, WeightState):
        model = hold_here(model, threads=threads)
    clock = StoreClock.read(store, settings.chain.job, Holder.this_process())
    number, last = after, find_newest_window(store, settings.chain)
    before = read_link(store, settings.chain, number)
    while until is None or number < until:
        number += 1
        if number <= last:
            before = read_link_after(store, settings.chain, number, before)
            model.replay(store, before)
            figures = {"window": number, "step": before.step}
            progress(Event("chain.applied", settings.run, figures))
            continue
        rules, window = _open(store, settings, model.shapes, number, before.step, clock)
        model.open(window)
        try:
            gathered = gather(
                window,
                workers,
                rules.gather,
                reserves=reserves,
                reading=model.read,
                clock=clock,
                progress=progress,
            )
        except QuorumError as error:
            gathered = error.gathered  # the window is over all the same, and its link says so
        step = ChainStep(before, before.step + settings.steps, settings.outer, settings.merge)
        before = aggregate(store, window, gathered, step, model, progress=progress)
        figures = {"window": number, "taken": len(before.taken), "out": len(before.out)}
        progress(Event("window.merged", settings.run, figures))
        yield before


def _open(
    store: Store,
    settings: RunSettings,
    shapes: Shapes,
    number: int,
    base: int,
    clock: StoreClock,
) -> tuple[WindowOpening, Window]:
    """Open a window, or find it open: then the rules hold that it was opened with."""
    keys = settings.chain
    ours = WindowOpening(
        run=settings.run, number=number, window=settings.window, gather=settings.gather
    )
    rules = commit_once(store, keys.opening(number), ours).record
    began = head(store, keys.link(number - 1)).last_modified  # workers send from then on
    opened = head(store, keys.opening(number)).last_modified
    now = clock.now()
    over = opened + rules.window <= now  # while there was no aggregator: it is opened anew
    return rules, Window(
        keys=settings.gradients,
        number=number,
        base=base,
        codec=settings.codec,
        shapes=shapes,
        opens=began,
        closes=(now if over else opened) + rules.window,
        norm=rules.gather.max_norm,
    )
