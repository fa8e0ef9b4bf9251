"""Chain of a run: one link per window, each with the digest of the previous link.

The updates of a window are stored under the digests of their bytes. Then the link is committed,
once per window. A late worker loads the chain's first checkpoint, or a later one, and
applies the links after it. A missing or broken link is an error, since a worker that skips it would
have other weights.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np

from millrace import errors
from millrace.digest import compute_digest
from millrace.gradients.codec.byte_tensors import PARSE_ERRORS
from millrace.gradients.codec.gradient_object import Shapes
from millrace.gradients.codec.shared_indices import Mask
from millrace.gradients.codec.tensors import CodeError
from millrace.gradients.merging.merge import MergeRequest, WorkerFactors
from millrace.gradients.merging.updates import StoredTensor, compute_largest_update, parse_update
from millrace.gradients.progress_events import LinkApplied
from millrace.gradients.state import WeightState
from millrace.keys.gradients import ChainKeys
from millrace.keys.names import is_plain
from millrace.progress import Progress, ignore_event
from millrace.records import commit_once, digest_record, fetch, list_numbers
from millrace.schemas.chain import ChainLink, ChainStart, UpdateEntry
from millrace.schemas.window import WindowOpening
from millrace.storage import Store, create, read


class ChainError(errors.CorruptError):
    """A link is missing or broken, so no later link can be applied."""


class ChainGapError(ChainError):
    """A link or an update is missing, as after a cleaning."""


def commit_first_link(store: Store, keys: ChainKeys, start: ChainStart) -> ChainStart:
    """Commit the first link of a run, or return the existing equal one.

    Raises:
        ConflictError: The run began with other weights.
    """
    commit = commit_once(store, keys.make_link_key(0), start)
    # Other files may have the same weights.
    same = commit.record.model_copy(update={"root": start.root}) if start.state else commit.record
    if same != start:
        raise errors.ConflictError(
            f"{store.make_url(keys.make_link_key(0))} begins with step {commit.record.step} of "
            f"{commit.record.job}: give this run another name, or begin it with those weights."
        )
    return commit.record


def store_update(
    store: Store, keys: ChainKeys, step: int, body: bytes, tensors: int
) -> UpdateEntry:
    """Store an update under its digest, and return its entry for a link.

    Args:
        store: Bucket of the aggregator.
        keys: Keys of the run's chain.
        step: Step of the weights after the merge.
        body: Bytes of the update.
        tensors: Number of tensors in the update.
    """
    digest = compute_digest(body)
    key = keys.make_update_key(step, digest)
    with suppress(errors.ExistsError):
        create(store, key, body)
    return UpdateEntry(key=key, digest=digest, size=len(body), tensors=tensors)


def find_newest_window(store: Store, keys: ChainKeys) -> int:
    """Return the number of the newest committed window; -1 if there is none. One listing."""
    return max(list_numbers(store, keys.links, keys.parse_link), default=-1)


def iterate_links(
    store: Store, keys: ChainKeys, *, after: int = 0, until: int | None = None
) -> Iterator[ChainLink]:
    """Yield the links of a run, in order, each checked against the one before.

    Args:
        store: Bucket of the aggregator.
        keys: Keys of the run's chain.
        after: Number of the window after which the links begin.
        until: Number of the last window; by default the newest.

    Raises:
        ChainError: A link is missing, or does not have the digest of the previous one.
        NotFoundError: The run has not begun.
    """
    before = read_link(store, keys, after)
    last = find_newest_window(store, keys) if until is None else until
    yield from _follow_links(store, keys, before, range(after + 1, last + 1))


def iterate_kept_links(store: Store, keys: ChainKeys) -> Iterator[ChainLink]:
    """Yield the links of a run that a cleaning has left: the newest ones without a gap, in order.

    A cleaning may delete the links before the newest checkpoint, except the first one.

    Raises:
        ChainError: A link does not have the digest of the previous one.
        NotFoundError: The run has not begun.
    """
    kept = find_kept_windows(store, keys)
    oldest = read_link(store, keys, kept.start)
    if isinstance(oldest, ChainLink):
        yield oldest
    yield from _follow_links(store, keys, oldest, kept[1:])


def find_kept_windows(store: Store, keys: ChainKeys) -> range:
    """Return the windows whose links a cleaning has left: the newest ones without a gap."""
    numbers = set(list_numbers(store, keys.links, keys.parse_link))
    newest = first = max(numbers, default=0)
    while first - 1 in numbers:
        first -= 1
    return range(first, newest + 1)


def _follow_links(
    store: Store, keys: ChainKeys, before: ChainStart | ChainLink, windows: range
) -> Iterator[ChainLink]:
    for window in windows:
        before = read_link_after(store, keys, window, before)
        yield before


def find_opening(store: Store, keys: ChainKeys, window: int) -> WindowOpening | None:
    """Return the opening of a window; None if there is none, or it cannot be read."""
    try:
        return fetch(store, keys.make_opening_key(window), WindowOpening)
    except (errors.NotFoundError, errors.CorruptError):
        return None


def read_link(store: Store, keys: ChainKeys, window: int) -> ChainStart | ChainLink:
    """Return the link of a window, without a check against the previous one.

    Raises:
        NotFoundError: The run has not begun.
        ChainGapError: The link is missing.
        ChainError: The window is not merged yet.
        CorruptError: The link cannot be read.
    """
    try:
        return fetch(store, keys.make_link_key(window), ChainLink if window else ChainStart)
    except errors.NotFoundError:
        newest = find_newest_window(store, keys)
        if newest >= window:
            raise _make_missing_error(store, keys, window) from None
        if newest >= 0:
            raise ChainError(
                f"Window {window} of {keys.run} is not merged yet, the newest is {newest}: begin "
                "after a window that is merged."
            ) from None
        where = store.make_url(keys.links)
        raise errors.NotFoundError(f"{where} has no link: the run has not begun.") from None


def read_link_after(
    store: Store, keys: ChainKeys, window: int, before: ChainStart | ChainLink
) -> ChainLink:
    """Return the link of a window, checked against the previous one.

    Raises:
        ChainGapError: The link is missing.
        ChainError: The link does not have the digest of the previous one.
    """
    try:
        link = fetch(store, keys.make_link_key(window), ChainLink)
    except errors.NotFoundError:
        raise _make_missing_error(store, keys, window) from None
    except errors.CorruptError as error:
        raise ChainError(f"Window {window} of {keys.run}: {error}") from error
    if (link.run, link.window, link.previous) != (keys.run, window, digest_record(before)):
        raise ChainError(
            f"Window {window} of {keys.run} does not follow the previous one: "
            f"{store.make_url(keys.make_link_key(window))} was changed, or copied from another "
            f"run. Restore "
            "it."
        )
    return link


def check_link_tensors(link: ChainLink, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a link has the same tensors as the weights, before its updates are read.

    Args:
        link: Link to check.
        shapes: Shapes of the weights by their names.

    Raises:
        ChainError: The link has other tensors.
    """
    if len(link.names) != len(link.shapes) or dict(zip(link.names, link.shapes, strict=True)) != {
        name: tuple(shape) for name, shape in shapes.items()
    }:
        raise ChainError(
            f"Window {link.window} of {link.run} has other tensors than the weights. Nothing of it "
            "was applied. Use weights of this run."
        )


def check_state(link: ChainStart | ChainLink, digest: str) -> None:
    """Check the digest of weights against that of a link.

    Args:
        link: Link that was applied to the weights.
        digest: Digest of the weights, from `WeightState.digest`.

    Raises:
        ChainError: The digests differ.
    """
    if link.state and digest != link.state:
        where = f"After window {link.window}" if isinstance(link, ChainLink) else "At the beginning"
        raise ChainError(
            f"{where} of {link.run} the weights do not match the digest of the link, so they "
            "differed before. Load the checkpoint that the chain begins with."
        )


def make_merge_request(link: ChainLink) -> MergeRequest:
    """Return the merge of a link, by which its updates are merged again.

    Raises:
        ChainError: The link has too few workers for its rule.
    """
    taken = sorted(link.taken)
    if link.merge.explain_too_few(len(taken)) or (link.updates and not taken):
        raise ChainError(
            f"Window {link.window} of {link.run} has fewer workers than its rule needs. Restore "
            "the link."
        )
    its = [link.taken[uid] for uid in taken]
    factors = WorkerFactors(
        tuple(taken),
        np.array([one.scale for one in its], np.float64),
        np.array([one.sum_factor for one in its], np.float64),
        np.array([one.share for one in its], np.float64),
    )
    return MergeRequest(link.codec, link.merge, factors.select_used())


def iterate_updates(
    store: Store, link: ChainLink, names: Container[str] | None = None, *, threads: int = 1
) -> Iterator[dict[str, StoredTensor]]:
    """Yield the checked tensors of a link's updates, one object at a time.

    Args:
        store: Bucket of the aggregator.
        link: Link whose updates are read.
        names: Names of tensors; by default all. Objects without these tensors are not read.
        threads: Number of threads.

    Raises:
        ChainGapError: An update is missing.
        ChainError: An update has other bytes than were committed.
    """
    if not link.updates:
        return
    tensors = list(zip(link.names, link.shapes, strict=True))
    if sum(update.tensors for update in link.updates) != len(tensors):
        raise ChainError(
            f"Window {link.window} of {link.run}: its updates do not have its "
            "tensors. Restore the link."
        )
    request = make_merge_request(link)
    at = 0
    for update in link.updates:
        shapes = dict(tensors[at : at + update.tensors])
        at += update.tensors
        its = [name for name in shapes if names is None or name in names]
        if its:
            yield _read_update(store, link, update, shapes, request, names=its, threads=threads)


def _read_update(
    store: Store,
    link: ChainLink,
    update: UpdateEntry,
    shapes: Shapes,
    request: MergeRequest,
    *,
    names: Sequence[str],
    threads: int,
) -> dict[str, StoredTensor]:
    """Read tensors of an update.

    Args:
        store: Bucket of the aggregator.
        link: Link that names the update.
        update: Entry of the update in the link.
        shapes: Shapes of all tensors in the update by their names.
        request: Merge of the link.
        names: Names of the tensors to read.
        threads: Number of threads.
    """
    where = f"Window {link.window} of {link.run}"
    if not is_plain(update.key):
        raise ChainError(
            f"{where} names an update {update.key[:100]!r}, which cannot be a key: restore "
            "the link."
        )
    most = compute_largest_update(shapes, link.codec, len(request.factors.workers))
    if update.size > most:
        raise ChainError(
            f"{where}: {store.make_url(update.key)} has {update.size:,} bytes according to its "
            f"link, and its tensors need at most {most:,}. It was not read. Restore the link."
        )
    try:
        body = read(store, update.key, max_size=update.size)
    except errors.NotFoundError:
        raise ChainGapError(
            f"{where}: {store.make_url(update.key)} is missing: restore it."
        ) from None
    except errors.CorruptError:  # the object is larger than the committed one
        body = None
    if body is None or compute_digest(body) != update.digest:
        raise ChainError(
            f"{where}: {store.make_url(update.key)} has other bytes than were committed: "
            "restore it."
        )
    mask = Mask(link.run, link.window)
    try:
        return parse_update(body, shapes, request, mask, names=names, threads=threads)
    except (CodeError, *PARSE_ERRORS) as error:
        raise ChainError(
            f"{where}: {store.make_url(update.key)} is not an update: {errors.format_error(error)}"
        ) from error


def apply_update(
    link: ChainLink, stored: dict[str, StoredTensor], state: WeightState, *, threads: int = 1
) -> None:
    """Merge and apply the tensors of an update in place, one after another.

    Args:
        link: Link of the update.
        stored: Tensors from `iterate_updates`. Each is removed after it was applied.
        state: Weights to change.
        threads: Number of threads.
    """
    request = make_merge_request(link)
    for name in tuple(stored):
        groups = stored.pop(name).merge(name, request, threads=threads)
        state.step_tensor(name, groups, link.codec, link.outer)


def apply_link(
    store: Store,
    link: ChainLink,
    state: WeightState,
    progress: Progress = ignore_event,
    *,
    updates: Iterable[dict[str, StoredTensor]] | None = None,
) -> None:
    """Apply one link to the weights in place, and check their digest.

    Scorers and `catch_up` hold whole weights. Workers and aggregators, whose weights have several
    shards, call `ShardedWeights.apply_link`.

    Args:
        store: Bucket of the aggregator.
        link: Link of the window after that of the weights.
        state: Weights to change.
        progress: Receives `LinkApplied`.
        updates: Result of `iterate_updates`, if the caller has read them. They are emptied.

    Raises:
        ChainError: An update is missing or broken, or the weights have another digest afterwards.
            In the latter case, do not use them.
    """
    check_link_tensors(link, {name: weight.shape for name, weight in state.weights.items()})
    if updates is None:
        updates = list(iterate_updates(store, link))  # all are read before one is applied
    for stored in updates:
        apply_update(link, stored, state)
    check_state(link, state.digest())
    progress(LinkApplied(run=link.run, window=link.window, step=link.step))


def catch_up(
    store: Store,
    keys: ChainKeys,
    state: WeightState,
    *,
    after: int = 0,
    until: int | None = None,
    progress: Progress = ignore_event,
) -> ChainLink | None:
    """Apply all links after a window.

    Args:
        store: Bucket of the aggregator.
        keys: Keys of the run's chain.
        state: Weights after window ``after``, which are changed in place.
        after: Number of the window.
        until: Number of the last window; by default the newest.
        progress: Receives `LinkApplied` for each link.

    Returns:
        Last link; None if there was none.

    Raises:
        ChainError: A link is missing or broken. The weights are those of the window before it,
            unless their digest differs.
    """
    last: ChainLink | None = None
    for link in iterate_links(store, keys, after=after, until=until):
        apply_link(store, link, state, progress)
        last = link
    return last


def _make_missing_error(store: Store, keys: ChainKeys, window: int) -> ChainGapError:
    return ChainGapError(
        f"Window {window} of {keys.run} is missing "
        f"({store.make_url(keys.make_link_key(window))}), and "
        "later ones exist: restore it, since later windows need it."
    )


def list_names_and_shapes(
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Return the names and shapes of the tensors in a link, in the order of their names."""
    names: Sequence[str] = sorted(shapes)
    return tuple(names), tuple(tuple(shapes[name]) for name in names)
