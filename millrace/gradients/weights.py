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
from millrace.checkpoints.parts import dtype_of
from millrace.checkpoints.retention import pin
from millrace.checkpoints.tree import parse_own_name
from millrace.gradients.backends.rank_group import Together
from millrace.gradients.backends.sharded_weights import Placing, Spread, here, placed_here
from millrace.gradients.backends.weight_shard import KINDS, WINDOW
from millrace.gradients.codec.payload import Shapes
from millrace.gradients.state import State
from millrace.gradients.sync.chain import ChainError, begin, link_at
from millrace.keys import ChainKeys
from millrace.progress import Event, Progress, silent
from millrace.schemas.chain import ChainLink, ChainStart
from millrace.schemas.checkpoint import Checkpoint
from millrace.schemas.gradient import BUFFER_NAMES, last_part_of
from millrace.storage import Store

S = TypeVar("S", bound=Spread)


def begin_run(
    store: Store, keys: ChainKeys, weights: State | Spread, *, step: int = 0
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
    with _spread(weights) as model:
        digest = model.digest()
        try:
            root = save_weights(model, store, keys.job, step=step, window=0).root
        except errors.ConflictError:  # the same weights may be there in other files
            model.load_state(store, keys.job, step)
            if model.digest() != digest:
                raise
            root = read_checkpoint(store, keys.job, step).root
    pin(store, keys.job, step, "The chain begins with it.")
    return begin(
        store, keys, ChainStart(run=keys.run, job=keys.job, step=step, root=root, state=digest)
    )


def save_weights(
    weights: State | Spread, store: Store, job: str, *, step: int, window: int
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
    with _spread(weights) as model:
        model.save(store, job, step=step, window=window)
        saved = model.saved()
    assert saved is not None
    return saved


@contextmanager
def _spread(weights: State | Spread) -> Generator[Spread]:
    """Weights wherever they are; what is made of them for the block is closed at its end."""
    if isinstance(weights, Spread):
        yield weights
        return
    model = here(weights)
    try:
        yield model
    finally:
        model.close()


def newest_state(
    store: Store, keys: ChainKeys, *, progress: Progress = silent
) -> tuple[State, int]:
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
    model, window = newest_weights(store, keys, placed_here(), progress=progress)
    return model.state(), window


def newest_weights(
    store: Store,
    keys: ChainKeys,
    place: Callable[[Shapes], S],
    *,
    ranks: Together | None = None,
    progress: Progress = silent,
) -> tuple[S, int]:
    """As `newest_state`, with the weights where there is room for them.

    Args:
        store: The aggregator's bucket.
        keys: Of the run.
        place: Makes room.
        ranks: Where several ranks have some of the weights each: all of them call it.
        progress: Told ``checkpoint.damaged`` of each that was passed over.
    """
    ranks = ranks or Together()

    def passed(step: int, error: errors.MillraceError) -> None:
        figures = {"step": step, "damage": str(error)}
        progress(Event("checkpoint.damaged", keys.job, figures))

    ranks.each(lambda: link_at(store, keys, 0))
    model: S | None = None
    for step in reversed(ranks.first(lambda: list_steps(store, keys.job))):
        try:
            found = ranks.each(partial(read_checkpoint, store, keys.job, step))
        except errors.NotFoundError:
            continue  # on its way, or what is left of one
        except errors.CorruptError as error:
            passed(step, error)
            continue
        try:
            link = ranks.each(partial(_link_of, store, keys, found))
            shapes = _shapes(found, f"{KINDS[0]}.")
            if model is None or model.shapes != shapes:
                model = place(shapes)
            model.load_state(store, keys.job, step)
            model.check(link)
            return model, link.window if isinstance(link, ChainLink) else 0
        except (errors.CorruptError, errors.NotFoundError) as error:
            passed(step, error)
    raise ChainError(
        f"No checkpoint that the chain of {keys.run} names is there and undamaged, below "
        f"{store.url_of(keys.job)}: bring back that of its first link."
    )


def state_of_checkpoint(
    store: Store, job: str, *, step: int | None = None, tensors: str = ""
) -> tuple[State, int]:
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
    model, step = weights_of_checkpoint(store, job, placed_here(), step=step, tensors=tensors)
    return model.state(), step


def weights_of_checkpoint(
    store: Store, job: str, place: Placing, *, step: int | None = None, tensors: str = ""
) -> tuple[Spread, int]:
    """As `state_of_checkpoint`, with the weights where there is room for them.

    Args:
        store: Where it is.
        job: Whose.
        place: Makes room.
        step: Which; by default the newest.
        tensors: What the names of the weights begin with there; it is cut off.
    """
    model: Spread | None = None
    for found in _asked(store, job, step):
        shapes = _shapes(found, tensors)
        if not shapes:
            raise _unlike(found, tensors)
        if model is None or model.shapes != shapes:
            model = place(shapes)
        try:
            model.load_weights(store, job, found.step, tensors)
        except errors.CorruptError:  # it stays where it is: it is not ours
            if step is not None:
                raise
            continue
        return model, found.step
    raise errors.NotFoundError(f"{store.url_of(job)} has no checkpoint that is undamaged.")


def check_weights(
    store: Store, job: str, *, step: int | None = None, tensors: str = ""
) -> Checkpoint:
    """Find the checkpoint that `weights_of_checkpoint` would take first; read its metadata only.

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
    for found in _asked(store, job, step):
        if not _shapes(found, tensors):
            raise _unlike(found, tensors)
        damage = verify(store, found, check=VerifyDepth.SIZES)
        if not damage:
            return found
        if step is not None:
            raise errors.CorruptError(f"Step {step} of {job}: {next(iter(damage.values()))}")
    raise errors.NotFoundError(f"{store.url_of(job)} has no checkpoint that is undamaged.")


def _unlike(found: Checkpoint, tensors: str) -> errors.ConfigurationError:
    return errors.ConfigurationError(
        f"Step {found.step} of {found.job} has no weights whose names begin with {tensors!r}: "
        f"one of its tensors is {next(iter(found.tensors), None)!r}."
    )


def _asked(store: Store, job: str, step: int | None) -> Iterable[Checkpoint]:
    return iterate_checkpoints(store, job) if step is None else [read_checkpoint(store, job, step)]


def _shapes(found: Checkpoint, prefix: str) -> Shapes:
    """Return the shapes of a checkpoint's weights, by their names without a prefix.

    Weights are the tensors that have the prefix and are floating, and BatchNorm's counts.
    """
    return {
        name.removeprefix(prefix): record.shape
        for name, record in found.tensors.items()
        if name.startswith(prefix)
        and parse_own_name(name) is None
        and (dtype_of(record.dtype).is_floating_point or last_part_of(name) in BUFFER_NAMES)
    }


def _link_of(store: Store, keys: ChainKeys, found: Checkpoint) -> ChainStart | ChainLink:
    """Return the link that a checkpoint names as that of its weights."""
    window = found.position.get(WINDOW)
    if not isinstance(window, int):
        raise errors.CorruptError(f"Step {found.step} of {keys.job} names no window.")
    link = link_at(store, keys, window)
    if link.step != found.step:
        raise errors.CorruptError(f"Step {found.step} of {keys.job} is none of the chain's.")
    return link
