"""Scorer of a run: it follows the chain, and commits the scores after each window.

The chain is the only source: the links name the workers, the updates have their gradients, and the
openings of the windows say for how many gradients each waited. So a scorer may run at any time and
anywhere, and nobody can change what it judges.
"""

import logging
import math
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta

from millrace import errors
from millrace.gradients.backends.local import allocate_locally
from millrace.gradients.merging.links import (
    ChainError,
    ChainGapError,
    apply_link,
    catch_up,
    find_kept_windows,
    find_newest_window,
    find_opening,
    iterate_updates,
    read_link,
    read_link_after,
)
from millrace.gradients.merging.merge import GradientsByWorker
from millrace.gradients.merging.scores import read_newest_scores
from millrace.gradients.merging.updates import StoredTensor
from millrace.gradients.progress_events import WindowScored
from millrace.gradients.scoring.evaluation import (
    ComputeLoss,
    WindowEvaluator,
    collect_gradients,
)
from millrace.gradients.scoring.overlap import compute_overlaps, find_copies
from millrace.gradients.scoring.settings import ScorerOptions
from millrace.gradients.scoring.standings import choose_workers, update_standings
from millrace.gradients.state import WeightState
from millrace.gradients.weights import load_newest_weights
from millrace.keys.gradients import ChainKeys
from millrace.progress import Progress, ignore_event
from millrace.records import commit_once, digest_record, fetch, list_numbers
from millrace.schemas.chain import ChainLink, ChainStart
from millrace.schemas.gradient import ExclusionReason
from millrace.schemas.scores import (
    CopiedGradient,
    Evaluation,
    Standing,
    WindowEvidence,
    WindowScores,
)
from millrace.storage import Store

log = logging.getLogger(__name__)


def score_run(
    store: Store,
    keys: ChainKeys,
    compute_loss: ComputeLoss,
    options: ScorerOptions | None = None,
    *,
    follow: timedelta | None = None,
    progress: Progress = ignore_event,
) -> Iterator[WindowScores]:
    """Score the merged windows of a run that have no scores yet. After a kill, call it again.

    Several scorers of one run agree: the first one's scores of a window are those of all. Windows
    whose links or updates were cleaned are left out: the scores go on after a newer checkpoint.

    Args:
        store: Bucket of the aggregator. The scores are written there.
        keys: Keys of the run's chain.
        compute_loss: Function that computes the loss of weights.
        options: Options of the evaluation.
        follow: Interval between two looks for a new window; by default the newest one is the last.
        progress: Receives `LinkApplied` and `WindowScored`.

    Yields:
        Scores after each window.

    Raises:
        NotFoundError: The run has not begun.
        ChainGapError: A link or an update is missing, and no newer checkpoint is verified.
        ChainError: The chain, or the scores of an earlier window, are broken.
        ConfigurationError: A loss before a window is not a finite number above 0.
    """
    options = options or ScorerOptions()
    before = read_newest_scores(store, keys)
    state, window = _load_state(store, keys, _get_window(before), options, progress)
    link = read_link(store, keys, window)
    while options.until is None or window < options.until:
        newest = find_newest_window(store, keys)
        if newest <= window:
            if follow is None:
                return
            time.sleep(follow.total_seconds())
            continue
        try:
            link, updates = _read_window(store, keys, window + 1, link, options)
        except ChainGapError as gap:
            before = read_newest_scores(store, keys)
            if (scored := _get_window(before)) > window:  # by another scorer
                state, window = _load_state(store, keys, scored, options, progress)
            else:
                state, window = _load_newer_state(store, keys, window, gap, options, progress)
            link = read_link(store, keys, window)
            continue
        window = link.window
        gradients = collect_gradients(link, updates)
        if gradients is None:
            log.warning(
                "Nobody is evaluated in window %d of %s: it stores merged values, since these are "
                "shorter than the gradients of its workers. If most windows do, begin a run whose "
                "codec has fewer bits or a smaller `k`.", window, keys.run,
            )  # fmt: skip
        standings = before.standings if before else {}
        wanted = _read_wanted(store, keys, window)
        evidence = _evaluate_window(
            link, gradients or {}, state, compute_loss, options, standings, wanted
        )
        before = _commit_scores(store, keys, link, evidence, before, options)
        apply_link(store, link, state, progress, updates=updates)
        progress(
            WindowScored(
                run=link.run,
                window=window,
                evaluated=len(before.evidence.evaluations),
                copies=len(before.evidence.copies),
            )
        )
        yield before


def iterate_scores(store: Store, keys: ChainKeys) -> Iterator[WindowScores]:
    """Yield the scores of a run, in order. Each is computed again from its evidence.

    Raises:
        ChainError: The scores of a window are missing, or do not follow from its evidence and from
            the scores before.
    """
    before: WindowScores | None = None
    for window in list_numbers(store, keys.scores, keys.parse_scores):
        scores = fetch(store, keys.make_scores_key(window), WindowScores)
        if before is not None and scores.previous != digest_record(before):
            raise ChainError(
                f"The scores of window {window} of {keys.run} do not follow those before: restore "
                f"{store.make_url(keys.scores)}."
            )
        first = before is None and not scores.previous
        if before is not None or first:  # else older scores were cleaned
            known = before.standings if before else {}
            if update_standings(known, scores.evidence, scores.rules) != scores.standings:
                raise ChainError(
                    f"The scores of window {window} of {keys.run} do not follow from their "
                    f"evidence: restore {store.make_url(keys.make_scores_key(window))}."
                )
        yield scores
        before = scores


def _get_window(scores: WindowScores | None) -> int:
    """Return the number of the window of scores; 0 if there are none."""
    return scores.evidence.window if scores else 0


def _read_window(
    store: Store,
    keys: ChainKeys,
    window: int,
    before: ChainStart | ChainLink,
    options: ScorerOptions,
) -> tuple[ChainLink, list[dict[str, StoredTensor]]]:
    """Return the link of a window, and the tensors of its updates."""
    link = read_link_after(store, keys, window, before)
    return link, list(iterate_updates(store, link, threads=options.threads))


def _load_state(
    store: Store, keys: ChainKeys, window: int, options: ScorerOptions, progress: Progress
) -> tuple[WeightState, int]:
    """Return the weights after a window, or after a later one if objects were cleaned."""
    weights, loaded = load_newest_weights(
        store, keys, allocate_locally(threads=options.threads), until=window, progress=progress
    )
    state = weights.collect_state()
    try:
        catch_up(store, keys, state, after=loaded, until=window, progress=progress)
    except ChainGapError as gap:
        return _load_newer_state(store, keys, window, gap, options, progress)
    return state, window


def _load_newer_state(
    store: Store,
    keys: ChainKeys,
    window: int,
    gap: ChainGapError,
    options: ScorerOptions,
    progress: Progress,
) -> tuple[WeightState, int]:
    """Return the weights of a checkpoint after a window, and its window.

    A cleaning keeps the links from the newest checkpoint of its time. So the checkpoint of the
    first kept link leaves out the fewest windows. Otherwise, it is the newest checkpoint.

    Raises:
        ChainGapError: There is no such checkpoint.
    """
    first = find_kept_windows(store, keys).start
    for until in (first, None):
        if until is not None and until <= window:
            continue
        weights, loaded = load_newest_weights(
            store, keys, allocate_locally(threads=options.threads), until=until, progress=progress
        )
        if loaded > window:
            log.warning(
                "The windows %d to %d of %s get no scores, and the next scores follow from the "
                "standings before: the objects of these windows were deleted. Score a run before "
                "it is cleaned. (%s)", window + 1, loaded, keys.run, gap,
            )  # fmt: skip
            return weights.collect_state(), loaded
    raise gap


def _evaluate_window(
    link: ChainLink,
    gradients: GradientsByWorker,
    state: WeightState,
    compute_loss: ComputeLoss,
    options: ScorerOptions,
    standings: Mapping[str, Standing],
    wanted: float,
) -> WindowEvidence:
    """Evaluate the gradients of a window. The state is that before the window.

    Copies are not evaluated: they would take the places of other workers, and are not rated.
    A window that took as many gradients as it wanted did not wait for other workers.
    """
    workers = sorted(gradients)
    written = {uid: link.taken[uid].written for uid in workers}
    overlaps = compute_overlaps(gradients, workers, link.codec)
    copies = find_copies(overlaps, workers, written, options.rules.max_overlap)
    reasons = {uid: excluded.reason for uid, excluded in link.excluded.items()}
    for uid, reason in reasons.items():
        if reason is ExclusionReason.DUPLICATE:
            copies[uid] = CopiedGradient(earlier="", overlap=1.0)
    valid = {uid for uid, reason in reasons.items() if reason is ExclusionReason.QUORUM}
    is_awaited = len(link.taken) < wanted
    missed = {uid for uid, reason in reasons.items() if reason.is_missed(is_awaited=is_awaited)}
    absent = {uid for uid, reason in reasons.items() if reason.is_missed(is_awaited=True)} - missed
    own = [uid for uid in workers if uid not in copies]
    chosen = choose_workers(standings, own, link.window, options.count, digest_record(link))
    evaluations = dict[str, Evaluation]()
    if chosen:
        evaluator = WindowEvaluator(
            state, link, gradients, compute_loss,
            step_size=options.step_size, threads=options.threads,
        )  # fmt: skip
        for uid in chosen:
            evaluations[uid] = evaluator.evaluate(uid, with_value=options.with_values)
    return WindowEvidence(
        window=link.window,
        evaluations=evaluations,
        copies=copies,
        valid=tuple(sorted({*link.taken, *copies, *valid})),
        missing=tuple(sorted(missed - {*copies})),
        absent=tuple(sorted(absent)),
    )


def _read_wanted(store: Store, keys: ChainKeys, window: int) -> float:
    """Return the number of gradients for which a window waited; infinity for those of all."""
    opening = find_opening(store, keys, window)
    wanted = opening.gather.wanted if opening else None
    return math.inf if wanted is None else wanted


def _commit_scores(
    store: Store,
    keys: ChainKeys,
    link: ChainLink,
    evidence: WindowEvidence,
    before: WindowScores | None,
    options: ScorerOptions,
) -> WindowScores:
    """Commit the scores of a window, and return those that are committed."""
    made = WindowScores(
        run=keys.run,
        rules=options.rules,
        link=digest_record(link),
        previous=digest_record(before) if before else "",
        evidence=evidence,
        standings=update_standings(before.standings if before else {}, evidence, options.rules),
    )
    found = commit_once(store, keys.make_scores_key(link.window), made).record
    if (found.link, found.previous) != (made.link, made.previous):
        raise errors.ConflictError(
            f"Window {link.window} of {keys.run} has scores of another chain: remove "
            f"{store.make_url(keys.make_scores_key(link.window))}, and score it again."
        )
    return found
