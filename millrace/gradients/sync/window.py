"""One window of a run, from what was gathered to its link."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from millrace import errors
from millrace.gradients.backends.sharded_weights import ShardedWeights, hold_here
from millrace.gradients.codec.payload import Payload
from millrace.gradients.settings import BY_PLACE, MergeSettings
from millrace.gradients.state import WeightState
from millrace.gradients.sync.chain import digest_update, list_names_and_shapes
from millrace.gradients.sync.gather import GatheredWindow, Window
from millrace.gradients.sync.merge import (
    MergeRequest,
    MergeWeights,
    compute_merge_weights,
    find_deviating_workers,
)
from millrace.keys import ChainKeys
from millrace.progress import Event, Progress, ignore_event
from millrace.records import commit_once
from millrace.schemas.chain import (
    ChainLink,
    ChainStart,
    ExcludedWorker,
    MergedWorker,
    OuterOptimizer,
    Update,
)
from millrace.schemas.gradient import Refusal
from millrace.storage import Store


@dataclass(frozen=True, slots=True)
class ChainStep:
    """Changes that lead from one link to the next.

    Attributes:
        before: The link before.
        step: That the weights are at after it.
        outer: How what is merged is applied.
        merge: By which rule it is merged.
    """

    before: ChainStart | ChainLink
    step: int
    outer: OuterOptimizer
    merge: MergeSettings


def aggregate(
    store: Store,
    window: Window,
    gathered: GatheredWindow,
    step: ChainStep,
    model: WeightState | ShardedWeights,
    *,
    threads: int = 1,
    progress: Progress = ignore_event,
) -> ChainLink:
    """Merge what was gathered, apply it to the weights, and commit the window's link.

    If nobody's gradient was taken, or the rule cannot merge so few, the link says so and the
    weights stay as they are: the chain has no gap.

    Args:
        store: The aggregator's bucket.
        window: Which.
        gathered: What came.
        step: What follows from the run.
        model: The weights before it, changed in place. What was gathered is where they are.
        threads: How many work side by side, if the weights are here.
        progress: Told ``update.stored`` of each, with ``window`` and ``bytes``, before the link is
            committed.

    Raises:
        ConflictError: Another aggregator has merged this window otherwise.
        ChainError: The weights are not those of the link before.

    After any error the weights are of no use any more: catch up from the chain.
    """
    if isinstance(model, WeightState):
        tensors = {uid: payload.tensors for uid, payload in gathered.taken.items()}
        model = hold_here(model, tensors, threads=threads)
    model.check(step.before)
    keys = ChainKeys(window.keys.run, window.keys.version)
    out = {
        uid: ExcludedWorker(reason=one.reason, sentence=one.sentence)
        for uid, one in gathered.out.items()
    }
    payloads = dict(gathered.taken)
    if step.merge.rule in BY_PLACE:
        for uid in find_deviating_workers(model.places(sorted(payloads))):
            sentence = "It has other places than most, and the rule needs the same of all."
            out[uid] = ExcludedWorker(reason=Refusal.PLACES, sentence=sentence)
            del payloads[uid]
    weights: MergeWeights | None = None
    updates: tuple[Update, ...] = ()
    try:
        if payloads:
            products = partial(model.products, codec=window.codec)
            weights = compute_merge_weights(payloads, step.merge, products=products)
    except errors.ConfigurationError as error:  # the window is over; the next may have more
        for uid in payloads:
            out[uid] = ExcludedWorker(reason=Refusal.QUORUM, sentence=str(error))
    if weights is not None:
        request = MergeRequest(window.codec, step.merge, weights)
        updates = model.merge(store, keys, step.step, request, step.outer)
    for update in updates:
        figures = {"window": window.number, "bytes": update.size}
        progress(Event("update.stored", update.key, figures))
    names, shapes = list_names_and_shapes(window.shapes)
    link = ChainLink(
        run=window.keys.run,
        window=window.number,
        step=step.step,
        updates=updates,
        codec=window.codec,
        names=names,
        shapes=shapes,
        outer=step.outer,
        rule=step.merge.rule,
        taken=_list_merged_workers(payloads, weights),
        out=out,
        seconds=gathered.seconds,
        previous=digest_update(step.before),
        state=model.digest(),
    )
    commit = commit_once(store, keys.link(window.number), link)
    if commit.record.state != link.state or commit.record.previous != link.previous:
        raise errors.ConflictError(
            f"Another aggregator has merged window {window.number} of {window.keys.run} otherwise: "
            "catch up from the chain."
        )
    return commit.record


def _list_merged_workers(
    payloads: Mapping[str, Payload], weights: MergeWeights | None
) -> dict[str, MergedWorker]:
    """Return the workers that are in, with the weight of each."""
    if weights is None:
        return {}
    return {
        uid: MergedWorker(
            weight=float(weight),
            norm=payloads[uid].norm,
            sha256=payloads[uid].sha256,
            size=payloads[uid].size,
            tokens=payloads[uid].header.tokens,
        )
        for uid, weight in zip(weights.workers, weights.weights, strict=True)
    }
