"""The chain of a run: one link a window, each naming the one before, none ever left out.

Merged gradients are put under the digests of their bytes, and then the link is committed, once: of
two aggregators one is the window's. Whoever comes late begins with the checkpoint that the chain
begins with, or a later one of its weights, and applies link after link. What is missing or broken
is an error that names its window, for whoever would go on without it would have other weights.
"""

import io
import zipfile
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np

from millrace import errors
from millrace.digest import compute_sha256, dump_canonical_json
from millrace.gradients.codec.chunks import Chunks, make_chunks
from millrace.gradients.state import WeightState
from millrace.gradients.sync.merge import MergedRun
from millrace.keys.gradients import ChainKeys
from millrace.keys.names import is_plain
from millrace.progress import Event, Progress, ignore_event
from millrace.records import commit_once, fetch
from millrace.schemas.chain import ChainLink, ChainStart, Update
from millrace.schemas.gradient import Codec
from millrace.storage import Store, create, list_objects, read

_VALUE = 8  # bytes that a value takes at most: its place, itself, and the count of its chunk
_ARRAYS = 4096  # bytes of the headers of a tensor's arrays, at most
_UNREADABLE = (
    ValueError,
    KeyError,
    OSError,
    EOFError,
    RuntimeError,  # encrypted
    MemoryError,  # an array that says that it is larger than memory
    zipfile.BadZipFile,
)

MergedTensors = Mapping[str, tuple[MergedRun, ...]]


class ChainError(errors.CorruptError):
    """A link is missing or broken: nothing after it can be applied."""


def start_chain(store: Store, keys: ChainKeys, start: ChainStart) -> ChainStart:
    """Commit the first link of a run, or find it.

    Raises:
        ConflictError: The run began with other weights.
    """
    commit = commit_once(store, keys.link(0), start)
    # The same weights may have been saved in other files.
    same = commit.record.model_copy(update={"root": start.root}) if start.state else commit.record
    if same != start:
        raise errors.ConflictError(
            f"{store.make_url(keys.link(0))} begins with step {commit.record.step} of "
            f"{commit.record.job}: give this run another name, or begin with that."
        )
    return commit.record


def encode_update(merged: MergedTensors) -> bytes:
    """Encode merged gradients as an ``.npz`` file. Equal ones make equal bytes.

    Its arrays are named by the tensor's place and what they are: ``0.counts``, ``0.places``,
    ``0.values``, each of all runs of chunks one behind the other.
    """
    arrays: dict[str, Any] = {}
    for number, runs in enumerate(merged.values()):
        for part in ("counts", "places", "values"):
            pieces = [getattr(run, part) for run in runs]
            empty = np.empty(0, np.float32 if part == "values" else np.uint16)
            arrays[f"{number}.{part}"] = np.concatenate(pieces) if pieces else empty
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def store_update(store: Store, keys: ChainKeys, step: int, body: bytes, tensors: int) -> Update:
    """Put merged gradients where a link can name them, unless they are there.

    Args:
        store: The aggregator's bucket.
        keys: Of the run.
        step: That the weights are at after it.
        body: Of `update_bytes`.
        tensors: How many are in it.
    """
    digest = compute_sha256(body)
    key = keys.update(step, digest)
    with suppress(errors.ExistsError):
        create(store, key, body, sha256=digest)
    return Update(key=key, sha256=digest, size=len(body), tensors=tensors)


def digest_update(link: ChainStart | ChainLink) -> str:
    """Return the digest by which the next link names this one."""
    return compute_sha256(dump_canonical_json(link.model_dump(mode="json")))


def find_newest_window(store: Store, keys: ChainKeys) -> int:
    """Return the number of the newest committed window; -1 if there is none. One listing."""
    numbers = (keys.parse_link(stat.key) for stat in list_objects(store, keys.links))
    return max((number for number in numbers if number is not None), default=-1)


def iterate_links(store: Store, keys: ChainKeys, *, after: int = 0) -> Iterator[ChainLink]:
    """Yield the links of a run, in order, each checked against the one before.

    Args:
        store: The aggregator's bucket.
        keys: Of the run.
        after: Begin with the window behind this one.

    Raises:
        ChainError: One is missing, or does not name the one before.
        NotFoundError: The run has not begun.
    """
    before = read_link(store, keys, after)
    last = find_newest_window(store, keys)
    for window in range(after + 1, last + 1):
        before = read_link_after(store, keys, window, before)
        yield before


def read_link(store: Store, keys: ChainKeys, window: int) -> ChainStart | ChainLink:
    """Return the link of a window, by itself; of window 0 the first.

    Raises:
        NotFoundError: The run has not begun.
        ChainError: It is missing.
        CorruptError: It is none.
    """
    try:
        return fetch(store, keys.link(window), ChainLink if window else ChainStart)
    except errors.NotFoundError:
        if find_newest_window(store, keys) >= 0:
            raise _make_missing_error(store, keys, window) from None
        where = store.make_url(keys.links)
        raise errors.NotFoundError(f"{where} has no link: the run has not begun.") from None


def read_link_after(
    store: Store, keys: ChainKeys, window: int, before: ChainStart | ChainLink
) -> ChainLink:
    """Return the link of a window, checked against the one before.

    Raises:
        ChainError: It is missing, or does not name the one before.
    """
    try:
        link = fetch(store, keys.link(window), ChainLink)
    except errors.NotFoundError:
        raise _make_missing_error(store, keys, window) from None
    except errors.CorruptError as error:
        raise ChainError(f"Window {window} of {keys.run}: {error}") from error
    if (link.run, link.window, link.previous) != (keys.run, window, digest_update(before)):
        raise ChainError(
            f"Window {window} of {keys.run} does not follow the one before: "
            f"{store.make_url(keys.link(window))} was changed, or copied there."
        )
    return link


def check_tensors(link: ChainLink, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a link is of the tensors that the weights have, before any of it is read.

    Args:
        link: The link.
        shapes: Shapes of the weights, by their names.

    Raises:
        ChainError: It is of other tensors.
    """
    if len(link.names) != len(link.shapes) or dict(zip(link.names, link.shapes, strict=True)) != {
        name: tuple(shape) for name, shape in shapes.items()
    }:
        raise ChainError(
            f"Window {link.window} of {link.run} is of other tensors than the weights have. "
            "Nothing of it was applied."
        )


def check_state(link: ChainStart | ChainLink, digest: str) -> None:
    """Prove that weights are those that a link leads to.

    Args:
        link: Which.
        digest: Of the weights, as of `WeightState.digest`.

    Raises:
        ChainError: They are not.
    """
    if link.state and digest != link.state:
        where = f"After window {link.window}" if isinstance(link, ChainLink) else "At the beginning"
        raise ChainError(
            f"{where} of {link.run} the weights are not those it records: they were others before. "
            "Load the checkpoint that the chain begins with."
        )


def iterate_merged(
    store: Store, link: ChainLink, names: Container[str] | None = None
) -> Iterator[dict[str, tuple[MergedRun, ...]]]:
    """Yield the merged gradients of a link, one object at a time, all of it checked.

    Args:
        store: The aggregator's bucket.
        link: Which.
        names: Of these tensors only, and only the objects that have some are read; by default all.

    Raises:
        ChainError: One is missing, or is not what was committed.
    """
    tensors = list(zip(link.names, link.shapes, strict=True))
    if link.updates and sum(update.tensors for update in link.updates) != len(tensors):
        raise ChainError(f"Window {link.window} of {link.run}: its updates are not of its tensors.")
    at = 0
    for update in link.updates:
        some = tensors[at : at + update.tensors]
        its = {
            name: (number, shape)
            for number, (name, shape) in enumerate(some)
            if names is None or name in names
        }
        at += update.tensors
        if its:
            most = sum(_VALUE * prod(shape) + _ARRAYS for _, shape in some) + _ARRAYS
            yield _read_update(store, link, update, its, most)


def _read_update(
    store: Store,
    link: ChainLink,
    update: Update,
    tensors: Mapping[str, tuple[int, tuple[int, ...]]],
    most: int,
) -> dict[str, tuple[MergedRun, ...]]:
    """Read tensors of an update.

    Args:
        store: The aggregator's bucket.
        link: Link that names the update.
        update: The update.
        tensors: The index within the update and the shape of each tensor, by its name.
        most: Most bytes that the update may have.
    """
    where = f"Window {link.window} of {link.run}"
    if not is_plain(update.key):
        raise ChainError(f"{where} names an update {update.key[:100]!r}, which cannot be a key.")
    if update.size > most:
        raise ChainError(
            f"{where}: {store.make_url(update.key)} has {update.size:,} bytes by its link, and its "
            f"tensors take at most {most:,}. It was not read."
        )
    try:
        body = read(store, update.key, max_size=update.size)
    except errors.NotFoundError:
        raise ChainError(f"{where}: {store.make_url(update.key)} is missing.") from None
    except errors.CorruptError:  # more than was committed
        body = None
    if body is None or compute_sha256(body) != update.sha256:
        raise ChainError(f"{where}: {store.make_url(update.key)} is not what was committed.")
    try:
        with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
            if any(one.compress_type != zipfile.ZIP_STORED for one in arrays.zip.infolist()):
                raise ValueError("it is compressed")
            return {
                name: _parse_runs(arrays, number, shape, link.codec.for_tensor(name))
                for name, (number, shape) in tensors.items()
            }
    except _UNREADABLE as error:
        raise ChainError(f"{where}: {store.make_url(update.key)} is no update: {error}.") from error


def apply_link(
    store: Store, link: ChainLink, state: WeightState, progress: Progress = ignore_event
) -> None:
    """Change the weights by one link, in place, and prove that they are what they should be.

    Args:
        store: The aggregator's bucket.
        link: Which; it follows what the weights are of.
        state: The weights.
        progress: Told ``chain.applied``, with ``window`` and ``step``.

    Raises:
        ChainError: The update is missing or broken, or the weights are others than they should be
            after it: then they are of no use any more.
    """
    check_tensors(link, {name: weight.shape for name, weight in state.weights.items()})
    for merged in list(iterate_merged(store, link)):  # all or nothing
        for name, runs in merged.items():
            state.apply(name, runs, link.codec, link.outer)
    check_state(link, state.digest())
    progress(Event("chain.applied", link.run, {"window": link.window, "step": link.step}))


def catch_up(
    store: Store,
    keys: ChainKeys,
    state: WeightState,
    *,
    after: int = 0,
    progress: Progress = ignore_event,
) -> ChainLink | None:
    """Apply all links behind a window.

    Args:
        store: The aggregator's bucket.
        keys: Of the run.
        state: The weights after window ``after``; changed in place.
        after: Which.
        progress: Told ``chain.applied`` of each, with ``window`` and ``step``.

    Returns:
        The last one; None if there was none.

    Raises:
        ChainError: One is missing or broken. The weights are those of the window before it, unless
            it says otherwise.
    """
    last: ChainLink | None = None
    for link in iterate_links(store, keys, after=after):
        apply_link(store, link, state, progress)
        last = link
    return last


def _make_missing_error(store: Store, keys: ChainKeys, window: int) -> ChainError:
    return ChainError(
        f"Window {window} of {keys.run} is missing ({store.make_url(keys.link(window))}), and "
        "later ones are there: nothing can be applied until it is back."
    )


def _parse_runs(
    arrays: Any, number: int, shape: tuple[int, ...], codec: Codec
) -> tuple[MergedRun, ...]:
    counts, places, values = (arrays[f"{number}.{part}"] for part in ("counts", "places", "values"))
    types = (counts.dtype, places.dtype, values.dtype)
    if types != (np.uint16, np.uint16, np.float32):
        raise ValueError("an array is of another type")
    found: list[MergedRun] = []
    at = row = 0
    for chunks in make_chunks(shape, codec):
        its = counts[row : row + chunks.count]
        size = int(its.sum())
        run = MergedRun(chunks, its, places[at : at + size], values[at : at + size])
        _check(run, chunks)
        found.append(run)
        at, row = at + size, row + chunks.count
    if (at, at, row) != (len(places), len(values), len(counts)):
        raise ValueError("its arrays do not fit the tensors")
    return tuple(found)


def _check(run: MergedRun, chunks: Chunks) -> None:
    size = int(run.counts.sum())
    if (len(run.counts), len(run.places), len(run.values)) != (chunks.count, size, size):
        raise ValueError("its arrays do not fit the tensors")
    ascends = np.diff(run.places.astype(np.int32)) > 0
    begins = np.cumsum(run.counts.astype(np.int64))[:-1]
    ascends[begins[(begins > 0) & (begins < size)] - 1] = True
    if (run.places >= chunks.size).any() or not ascends.all() or not np.isfinite(run.values).all():
        raise ValueError("a place is beyond its chunk or there twice, or a value is not finite")


def list_names_and_shapes(
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Return the names and shapes of the tensors in a link, in the order of their names."""
    names: Sequence[str] = sorted(shapes)
    return tuple(names), tuple(tuple(shapes[name]) for name in names)
