"""The weights of a run as checkpoints: what it begins with, and what a late one goes on from.

A run's first link names a checkpoint, and each link the digest of the weights after it. A later
checkpoint is the chain's if its weights have the digest of the window that it says; so whoever
comes late need not replay all, and need not trust whoever saved it.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from millrace import errors
from millrace.checkpoints.find import (
    VerifyDepth,
    iterate_checkpoints,
    list_steps,
    read_checkpoint,
    verify,
)
from millrace.checkpoints.parts import parse_dtype
from millrace.checkpoints.retention import pin
from millrace.checkpoints.tree import parse_own_name
from millrace.gradients.backends.rank_group import RankGroup
from millrace.gradients.backends.sharded_weights import (
    Placing,
    ShardedWeights,
    hold_here,
    place_here,
)
from millrace.gradients.backends.weight_shard import KINDS, WINDOW
from millrace.gradients.codec.payload import Shapes
from millrace.gradients.state import WeightState
from millrace.gradients.sync.chain import ChainError, read_link, start_chain
from millrace.keys.gradients import ChainKeys
from millrace.progress import Event, Progress, ignore_event
from millrace.schemas.chain import ChainLink, ChainStart
from millrace.schemas.checkpoint import Checkpoint
from millrace.schemas.gradient import BUFFER_NAMES, last_part_of
from millrace.storage import Store

S = TypeVar("S", bound=ShardedWeights)


def begin_run(
    store: Store, keys: ChainKeys, weights: WeightState | ShardedWeights, *, step: int = 0
) -> ChainStart:
    """Save the weights that a run begins with, and commit its first link.

    Killed at any moment, or called by several with the same weights, it can be called again.

    Args:
        store: The aggregator's bucket.
        keys: Of the run.
        weights: With no moments yet.
        step: Of the training that they come from.

    Raises:
        ConflictError: The run began with other weights, or at another step.
    """
    with _open_weights(weights) as model:
        digest = model.digest()
        try:
            root = save_weights(model, store, keys.job, step=step, window=0).root
        except errors.ConflictError:  # the same weights may be there in other files
            model.load_state(store, keys.job, step)
            if model.digest() != digest:
                raise
            root = read_checkpoint(store, keys.job, step).root
    pin(store, keys.job, step, "The chain begins with it.")
    return start_chain(
        store, keys, ChainStart(run=keys.run, job=keys.job, step=step, root=root, state=digest)
    )


def save_weights(
    weights: WeightState | ShardedWeights, store: Store, job: str, *, step: int, window: int
) -> Checkpoint:
    """Save the weights after a window, and wait until they are there.

    Args:
        weights: Which.
        store: Where to.
        job: Whose checkpoint it is.
        step: That they are at.
        window: That they are after.

    Raises:
        ConflictError: The job has another checkpoint of this step.
    """
    with _open_weights(weights) as model:
        model.save(store, job, step=step, window=window)
        saved = model.saved()
    assert saved is not None
    return saved


@contextmanager
def _open_weights(weights: WeightState | ShardedWeights) -> Generator[ShardedWeights]:
    """Weights wherever they are; what is made of them for the block is closed at its end."""
    if isinstance(weights, ShardedWeights):
        yield weights
        return
    model = hold_here(weights)
    try:
        yield model
    finally:
        model.close()


def load_newest_state(
    store: Store, keys: ChainKeys, *, progress: Progress = ignore_event
) -> tuple[WeightState, int]:
    """Return the newest weights that a checkpoint of the chain has, all of them verified.

    Args:
        store: The aggregator's bucket.
        keys: Of the run.
        progress: As of `newest_weights`.

    Returns:
        The weights, and the window that they are after; `catch_up` goes on from there.

    Raises:
        NotFoundError: The run has not begun.
        ChainError: No checkpoint of the chain is there and undamaged.
    """
    model, window = load_newest_weights(store, keys, place_here(), progress=progress)
    return model.state(), window


def load_newest_weights(
    store: Store,
    keys: ChainKeys,
    place: Callable[[Shapes], S],
    *,
    ranks: RankGroup | None = None,
    progress: Progress = ignore_event,
) -> tuple[S, int]:
    """As `load_newest_state`, with the weights where there is room for them.

    Args:
        store: The aggregator's bucket.
        keys: Of the run.
        place: Makes room.
        ranks: Where several ranks have some of the weights each: all of them call it.
        progress: Told ``checkpoint.damaged`` of each that was passed over.
    """
    ranks = ranks or RankGroup()

    def passed(step: int, error: errors.MillraceError) -> None:
        figures = {"step": step, "damage": str(error)}
        progress(Event("checkpoint.damaged", keys.job, figures))

    ranks.run_on_each(lambda: read_link(store, keys, 0))
    model: S | None = None
    for step in reversed(ranks.run_on_first(lambda: list_steps(store, keys.job))):
        try:
            found = ranks.run_on_each(partial(read_checkpoint, store, keys.job, step))
        except errors.NotFoundError:
            continue  # on its way, or what is left of one
        except errors.CorruptError as error:
            passed(step, error)
            continue
        try:
            link = ranks.run_on_each(partial(_read_checkpoint_link, store, keys, found))
            shapes = _read_shapes(found, f"{KINDS[0]}.")
            if model is None or model.shapes != shapes:
                model = place(shapes)
            model.load_state(store, keys.job, step)
            model.check(link)
            return model, link.window if isinstance(link, ChainLink) else 0
        except (errors.CorruptError, errors.NotFoundError) as error:
            passed(step, error)
    raise ChainError(
        f"No checkpoint that the chain of {keys.run} names is there and undamaged, below "
        f"{store.make_url(keys.job)}: bring back that of its first link."
    )


def load_checkpoint_state(
    store: Store, job: str, *, step: int | None = None, tensors: str = ""
) -> tuple[WeightState, int]:
    """Return the weights of any checkpoint of `Saver`, to begin a run with, and their step.

    Args:
        store: Where it is.
        job: Whose.
        step: Which; by default the newest.
        tensors: What the names of the weights begin with there, such as ``model.``; it is cut off.

    Raises:
        NotFoundError: There is no such checkpoint.
        ConfigurationError: It has no such tensors.
    """
    model, step = load_checkpoint_weights(store, job, place_here(), step=step, tensors=tensors)
    return model.state(), step


def load_checkpoint_weights(
    store: Store, job: str, place: Placing, *, step: int | None = None, tensors: str = ""
) -> tuple[ShardedWeights, int]:
    """As `load_checkpoint_state`, with the weights where there is room for them.

    Args:
        store: Where it is.
        job: Whose.
        place: Makes room.
        step: Which; by default the newest.
        tensors: What the names of the weights begin with there; it is cut off.
    """
    model: ShardedWeights | None = None
    for found in _find_requested(store, job, step):
        shapes = _read_shapes(found, tensors)
        if not shapes:
            raise _make_mismatch_error(found, tensors)
        if model is None or model.shapes != shapes:
            model = place(shapes)
        try:
            model.load_weights(store, job, found.step, tensors)
        except errors.CorruptError:  # it stays where it is: it is not ours
            if step is not None:
                raise
            continue
        return model, found.step
    raise errors.NotFoundError(f"{store.make_url(job)} has no checkpoint that is undamaged.")


def check_weights(
    store: Store, job: str, *, step: int | None = None, tensors: str = ""
) -> Checkpoint:
    """Find the checkpoint that `load_checkpoint_weights` would take first; read its metadata only.

    Args:
        store: Where it is.
        job: Whose.
        step: Which; by default the newest.
        tensors: What the names of the weights begin with there.

    Raises:
        NotFoundError: There is no such checkpoint.
        CorruptError: Its metadata cannot be read, or one of its files is missing or cut.
        ConfigurationError: It has no such tensors.
    """
    for found in _find_requested(store, job, step):
        if not _read_shapes(found, tensors):
            raise _make_mismatch_error(found, tensors)
        damage = verify(store, found, check=VerifyDepth.SIZES)
        if not damage:
            return found
        if step is not None:
            raise errors.CorruptError(f"Step {step} of {job}: {next(iter(damage.values()))}")
    raise errors.NotFoundError(f"{store.make_url(job)} has no checkpoint that is undamaged.")


def _make_mismatch_error(found: Checkpoint, tensors: str) -> errors.ConfigurationError:
    return errors.ConfigurationError(
        f"Step {found.step} of {found.job} has no weights whose names begin with {tensors!r}: "
        f"one of its tensors is {next(iter(found.tensors), None)!r}."
    )


def _find_requested(store: Store, job: str, step: int | None) -> Iterable[Checkpoint]:
    return iterate_checkpoints(store, job) if step is None else [read_checkpoint(store, job, step)]


def _read_shapes(found: Checkpoint, prefix: str) -> Shapes:
    """Return the shapes of a checkpoint's weights, by their names without a prefix.

    Weights are the tensors that have the prefix and are floating, and BatchNorm's counts.
    """
    return {
        name.removeprefix(prefix): record.shape
        for name, record in found.tensors.items()
        if name.startswith(prefix)
        and parse_own_name(name) is None
        and (parse_dtype(record.dtype).is_floating_point or last_part_of(name) in BUFFER_NAMES)
    }


def _read_checkpoint_link(
    store: Store, keys: ChainKeys, found: Checkpoint
) -> ChainStart | ChainLink:
    """Return the link that a checkpoint names as that of its weights."""
    window = found.position.get(WINDOW)
    if not isinstance(window, int):
        raise errors.CorruptError(f"Step {found.step} of {keys.job} names no window.")
    link = read_link(store, keys, window)
    if link.step != found.step:
        raise errors.CorruptError(f"Step {found.step} of {keys.job} is none of the chain's.")
    return link
