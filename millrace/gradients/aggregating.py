"""One window of a run, from what was gathered to its link."""

from dataclasses import dataclass

from millrace import errors
from millrace.gradients.chain import (
    Update,
    append,
    check_state,
    digest_of,
    names_and_shapes,
    update_bytes,
)
from millrace.gradients.gathering import Gathered, Window
from millrace.gradients.merging import BY_PLACE, MergeSettings, apart, merge, weights_of
from millrace.gradients.state import State
from millrace.keys import ChainKeys
from millrace.models.chain import LeftOut, Link, Outer, Start, Taken
from millrace.models.gradient import Refusal
from millrace.progress import Progress, silent
from millrace.storage import Store


@dataclass(frozen=True, slots=True)
class Step:
    """What leads from one link to the next.

    Attributes:
        before: The link before.
        step: That the weights are at after it.
        outer: How what is merged is applied.
        merge: By which rule it is merged.
    """

    before: Start | Link
    step: int
    outer: Outer
    merge: MergeSettings


def aggregate(
    store: Store,
    window: Window,
    gathered: Gathered,
    step: Step,
    state: State,
    *,
    threads: int = 1,
    progress: Progress = silent,
) -> Link:
    """Merge what was gathered, apply it to the weights, and commit the window's link.

    If nobody's gradient was taken, or the rule cannot merge so few, the link says so and the
    weights stay as they are: the chain has no gap.

    Args:
        store: The aggregator's bucket.
        window: Which.
        gathered: What came.
        step: What follows from the run.
        state: The weights before it; changed in place.
        threads: How many work side by side.
        progress: Told ``update.stored``, before the link is committed.

    Raises:
        ConflictError: Another aggregator has merged this window otherwise.
        ChainError: The weights are not those of the link before.

    After any error the weights are of no use any more: catch up from the chain.
    """
    check_state(step.before, state)
    out = {
        uid: LeftOut(reason=one.reason, sentence=one.sentence) for uid, one in gathered.out.items()
    }
    payloads = dict(gathered.taken)
    if step.merge.rule in BY_PLACE:
        for uid in apart(payloads):
            sentence = "It has other places than most, and the rule needs the same of all."
            out[uid] = LeftOut(reason=Refusal.PLACES, sentence=sentence)
            del payloads[uid]
    taken: dict[str, Taken] = {}
    update: Update = {}
    try:
        if payloads:
            weights = weights_of(payloads, step.merge, threads=threads)
            merged = dict(merge(payloads, step.merge, weights, threads=threads))
            update = {name: merged[name] for name in sorted(merged)}
            for uid, weight in zip(weights.workers, weights.weights, strict=True):
                payload = payloads[uid]
                taken[uid] = Taken(
                    weight=float(weight),
                    norm=payload.norm,
                    sha256=payload.sha256,
                    size=payload.size,
                    tokens=payload.header.tokens,
                )
    except errors.ConfigurationError as error:  # the window is over; the next may have more
        for uid in payloads:
            out[uid] = LeftOut(reason=Refusal.QUORUM, sentence=str(error))
    for name, runs in update.items():
        state.apply(name, runs, window.codec, step.outer)
    names, shapes = names_and_shapes(window.shapes)
    link = Link(
        run=window.keys.run,
        window=window.number,
        step=step.step,
        key="",
        sha256="",
        size=0,
        codec=window.codec,
        names=names,
        shapes=shapes,
        outer=step.outer,
        rule=step.merge.rule,
        taken=taken,
        out=out,
        seconds=gathered.seconds,
        previous=digest_of(step.before),
        state=state.digest(),
    )
    keys = ChainKeys(window.keys.run, window.keys.version)
    commit = append(store, keys, link, update_bytes(update) if update else b"", progress)
    if commit.record.state != link.state or commit.record.previous != link.previous:
        raise errors.ConflictError(
            f"Another aggregator has merged window {window.number} of {window.keys.run} otherwise: "
            "catch up from the chain."
        )
    return commit.record
