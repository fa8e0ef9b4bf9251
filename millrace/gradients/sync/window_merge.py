"""Merge of one window, from its gathered gradients to its link."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from millrace import errors
from millrace.gradients.backends.local import make_single_shard
from millrace.gradients.backends.sharded_weights import ShardedWeights
from millrace.gradients.codec.gradient_object import CheckedGradient
from millrace.gradients.gather_window import GatherWindow
from millrace.gradients.merging.links import list_names_and_shapes
from millrace.gradients.merging.merge import (
    MergeRequest,
    WorkerFactors,
    compute_worker_factors,
    find_deviating_workers,
)
from millrace.gradients.merging.scores import read_newest_scores
from millrace.gradients.progress_events import UpdateStored, WindowMerged
from millrace.gradients.settings import RunSettings
from millrace.gradients.state import WeightState
from millrace.gradients.sync.gather_results import GatherOutcome
from millrace.keys.gradients import ChainKeys
from millrace.progress import Progress, ignore_event
from millrace.records import commit_once, digest_record
from millrace.schemas.chain import (
    ChainLink,
    ChainStart,
    ExcludedWorker,
    OuterOptimizer,
    TakenGradient,
    UpdateEntry,
)
from millrace.schemas.gradient import ExclusionReason
from millrace.schemas.merge import COORDINATE_WISE_RULES, MergeRule, MergeSettings
from millrace.storage import Store


@dataclass(frozen=True, slots=True)
class ChainStep:
    """Settings of the step from one link to the next.

    Attributes:
        before: Previous link.
        step: Step of the weights after the merge.
        outer: Optimizer that applies the merged values.
        merge: Settings of the merge.
    """

    before: ChainStart | ChainLink
    step: int
    outer: OuterOptimizer
    merge: MergeSettings


def merge_gathered(
    store: Store,
    settings: RunSettings,
    gather_window: GatherWindow,
    gathered: GatherOutcome,
    before: ChainStart | ChainLink,
    weights: WeightState | ShardedWeights,
    *,
    quorum: int,
    threads: int = 1,
    progress: Progress = ignore_event,
) -> ChainLink:
    """Merge a window by the settings of its run, see `merge_window`.

    Gradients that are fewer than the quorum change no weights. `progress` also receives
    `WindowMerged`.
    """
    if len(gathered.taken) < quorum:
        gathered = gathered.exclude_all()
    step = ChainStep(before, before.step + settings.steps, settings.outer, settings.merge)
    link = merge_window(
        store, gather_window, gathered, step, weights, threads=threads, progress=progress
    )
    taken, excluded = len(link.taken), len(link.excluded)
    progress(WindowMerged(run=settings.name, window=link.window, taken=taken, excluded=excluded))
    return link


def merge_window(
    store: Store,
    gather_window: GatherWindow,
    gathered: GatherOutcome,
    step: ChainStep,
    weights: WeightState | ShardedWeights,
    *,
    threads: int = 1,
    progress: Progress = ignore_event,
) -> ChainLink:
    """Merge the gathered gradients, apply them to the weights, and commit the window's link.

    If there are no gradients, or too few for the rule, the link changes no weights. So the chain
    has no gap. After any error, do not use the weights: catch up from the chain.

    Args:
        store: Bucket of the aggregator.
        gather_window: Window to merge.
        gathered: Gathered gradients, on the machines of the weights.
        step: Settings of the step.
        weights: Weights before the merge, which are changed in place.
        threads: Number of threads, if the weights are in this process.
        progress: Receives `UpdateStored` for each update, before the commit of the link.

    Raises:
        ConflictError: Another aggregator merged this window differently.
        ChainError: The weights are not those of the previous link.
        CorruptError: The scores by which the rule weighs workers cannot be read.
    """
    if isinstance(weights, WeightState):
        tensors = {uid: gradient.tensors for uid, gradient in gathered.taken.items()}
        weights = make_single_shard(weights, tensors, threads=threads)
    weights.check(step.before)
    keys = ChainKeys(gather_window.keys.run, gather_window.keys.version)
    excluded = dict(gathered.excluded)
    gradients = dict(gathered.taken)
    if step.merge.rule in COORDINATE_WISE_RULES:
        for uid in find_deviating_workers(weights.list_index_digests(sorted(gradients))):
            sentence = "Its indices differ from those of most workers, and the rule needs the same."
            excluded[uid] = ExcludedWorker(reason=ExclusionReason.INDICES, sentence=sentence)
            del gradients[uid]
    scores = read_newest_scores(store, keys) if step.merge.rule is MergeRule.SCORES else None
    worker_factors: WorkerFactors | None = None
    updates: tuple[UpdateEntry, ...] = ()
    try:
        if gradients:
            products = partial(weights.compute_products, codec=gather_window.codec)
            worker_factors = compute_worker_factors(
                gradients,
                step.merge,
                scores=scores and {uid: one.weight for uid, one in scores.standings.items()},
                products=products,
            )
    except errors.ConfigurationError as error:  # the next window may have more gradients
        for uid in gradients:
            excluded[uid] = ExcludedWorker(reason=ExclusionReason.QUORUM, sentence=str(error))
    if worker_factors is not None:
        request = MergeRequest(gather_window.codec, step.merge, worker_factors.select_used())
        updates = weights.merge_and_apply(store, keys, step.step, request, step.outer)
    for update in updates:
        progress(UpdateStored(key=update.key, window=gather_window.number, size=update.size))
    names, shapes = list_names_and_shapes(gather_window.shapes)
    link = ChainLink(
        run=gather_window.keys.run,
        window=gather_window.number,
        step=step.step,
        updates=updates,
        codec=gather_window.codec,
        names=names,
        shapes=shapes,
        outer=step.outer,
        merge=step.merge,
        scores=digest_record(scores) if scores else "",
        taken=_list_taken_gradients(gradients, worker_factors, gathered.written),
        excluded=excluded,
        seconds=gathered.seconds,
        previous=digest_record(step.before),
        state=weights.digest(),
    )
    commit = commit_once(store, keys.make_link_key(gather_window.number), link)
    if commit.record.state != link.state or commit.record.previous != link.previous:
        raise errors.ConflictError(
            f"Another aggregator merged window {link.window} of {link.run} differently: start this "
            "aggregator again."
        )
    return commit.record


def _list_taken_gradients(
    gradients: Mapping[str, CheckedGradient],
    worker_factors: WorkerFactors | None,
    written: Mapping[str, datetime],
) -> dict[str, TakenGradient]:
    """Return the taken gradients with their factors, by the workers' names."""
    if worker_factors is None:
        return {}
    return {
        uid: TakenGradient(
            scale=float(worker_factors.scales[number]),
            sum_factor=float(worker_factors.sum_factors[number]),
            share=float(worker_factors.shares[number]),
            norm=gradients[uid].norm,
            digest=gradients[uid].digest,
            size=gradients[uid].size,
            tokens=gradients[uid].header.tokens,
            samples=gradients[uid].header.samples,
            written=written[uid],
        )
        for number, uid in enumerate(worker_factors.workers)
    }
