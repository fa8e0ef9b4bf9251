"""Weights of a run as checkpoints: the initial ones, and those from which late workers continue.

The first link of a run names a checkpoint. Each link has the digest of the weights after it. A
later checkpoint is valid if its weights have the digest of its window's link. So a late worker need
not apply all links, and need not trust the process that saved the checkpoint.
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
from millrace.checkpoints.progress_events import CheckpointDamaged
from millrace.checkpoints.retention import pin
from millrace.checkpoints.tree import parse_own_name
from millrace.gradients.backends.local import allocate_locally, make_single_shard
from millrace.gradients.backends.rank_group import RankGroup
from millrace.gradients.backends.sharded_weights import AllocateWeights, ShardedWeights
from millrace.gradients.backends.weight_shard import KINDS, WINDOW
from millrace.gradients.codec.gradient_object import Shapes
from millrace.gradients.merging.links import ChainError, commit_first_link, read_link
from millrace.gradients.state import WeightState
from millrace.keys.gradients import ChainKeys
from millrace.progress import Progress, ignore_event
from millrace.schemas.chain import ChainLink, ChainStart
from millrace.schemas.checkpoint import Checkpoint
from millrace.schemas.gradient import BUFFER_NAMES, take_last_part
from millrace.storage import Store

S = TypeVar("S", bound=ShardedWeights)


def begin_run(
    store: Store, keys: ChainKeys, weights: WeightState | ShardedWeights, *, step: int = 0
) -> ChainStart:
    """Save the initial weights of a run as a checkpoint, and commit its first link.

    After a kill, call this function again. Concurrent calls with the same weights are safe.

    Args:
        store: Bucket of the aggregator.
        keys: Keys of the run's chain.
        weights: Initial weights, with moments of zero.
        step: Step of the training that the weights come from.

    Raises:
        ConfigurationError: A weight is NaN, or a buffer of BatchNorm is not finite.
        ConflictError: The run began with other weights, or at another step.
    """
    with _open_weights(weights) as sharded:
        sharded.check_values()
        digest = sharded.digest()
        try:
            root = save_weights(sharded, store, keys.job, step=step, window=0).root
        except errors.ConflictError:  # other files may have the same weights
            sharded.load_state(store, keys.job, step)
            if sharded.digest() != digest:
                raise
            root = read_checkpoint(store, keys.job, step).root
    pin(store, keys.job, step, "The chain begins with this checkpoint.")
    return commit_first_link(
        store, keys, ChainStart(run=keys.run, job=keys.job, step=step, root=root, state=digest)
    )


def save_weights(
    weights: WeightState | ShardedWeights, store: Store, job: str, *, step: int, window: int
) -> Checkpoint:
    """Save the weights after a window, and wait for the end of the save.

    Args:
        weights: Weights to save.
        store: Store to save to.
        job: Job of the checkpoint.
        step: Step of the weights.
        window: Number of the window.

    Raises:
        ConflictError: The job has another checkpoint of this step.
    """
    with _open_weights(weights) as sharded:
        sharded.save(store, job, step=step, window=window)
        saved = sharded.wait_for_save()
    assert saved is not None
    return saved


@contextmanager
def _open_weights(weights: WeightState | ShardedWeights) -> Generator[ShardedWeights]:
    """Yield weights as `ShardedWeights`. Those that this function makes are closed at the end."""
    if isinstance(weights, ShardedWeights):
        yield weights
        return
    sharded = make_single_shard(weights)
    try:
        yield sharded
    finally:
        sharded.close()


def load_newest_state(
    store: Store, keys: ChainKeys, *, progress: Progress = ignore_event
) -> tuple[WeightState, int]:
    """Return the verified weights of the chain's newest checkpoint.

    Args:
        store: Bucket of the aggregator.
        keys: Keys of the run's chain.
        progress: Receives `CheckpointDamaged` for each skipped checkpoint.

    Returns:
        Weights, and the number of their window. `catch_up` applies the later links.

    Raises:
        NotFoundError: The run has not begun.
        ChainError: The chain has no undamaged checkpoint.
    """
    weights, window = load_newest_weights(store, keys, allocate_locally(), progress=progress)
    return weights.collect_state(), window


def load_newest_weights(
    store: Store,
    keys: ChainKeys,
    allocate: Callable[[Shapes], S],
    *,
    ranks: RankGroup | None = None,
    until: int | None = None,
    progress: Progress = ignore_event,
) -> tuple[S, int]:
    """Load the verified weights of the chain's newest checkpoint into allocated memory.

    Args:
        store: Bucket of the aggregator.
        keys: Keys of the run's chain.
        allocate: Function that allocates weights from their shapes.
        ranks: Group of ranks with some weights each. All of them call this function.
        until: Number of the last window whose checkpoint may be loaded; by default any.
        progress: Receives `CheckpointDamaged` for each skipped checkpoint.

    Returns:
        Weights, and the number of their window.

    Raises:
        NotFoundError: The run has not begun.
        ChainError: The chain has no undamaged checkpoint.
    """
    ranks = ranks or RankGroup()

    def report_skipped(step: int, error: errors.MillraceError) -> None:
        progress(CheckpointDamaged(job=keys.job, step=step, damage=str(error)))

    ranks.run_on_each(lambda: read_link(store, keys, 0))
    weights: S | None = None
    for step in reversed(ranks.run_on_first(lambda: list_steps(store, keys.job))):
        try:
            found = ranks.run_on_each(partial(read_checkpoint, store, keys.job, step))
        except errors.NotFoundError:
            continue  # an incomplete checkpoint
        except errors.CorruptError as error:
            report_skipped(step, error)
            continue
        try:
            link = ranks.run_on_each(partial(_read_checkpoint_link, store, keys, found))
            if until is not None and isinstance(link, ChainLink) and link.window > until:
                continue
            shapes = _read_shapes(found, f"{KINDS[0]}.")
            if weights is None or weights.shapes != shapes:
                weights = allocate(shapes)
            weights.load_state(store, keys.job, step)
            weights.check(link)
            return weights, link.window if isinstance(link, ChainLink) else 0
        except (errors.CorruptError, errors.NotFoundError) as error:
            report_skipped(step, error)
    raise ChainError(
        f"The chain of {keys.run} has no undamaged checkpoint below {store.make_url(keys.job)}: "
        "restore the checkpoint that its first link names."
    )


def load_checkpoint_state(
    store: Store, job: str, *, step: int | None = None, tensors: str = ""
) -> tuple[WeightState, int]:
    """Return the weights of any checkpoint as the initial weights of a run, and their step.

    Args:
        store: Store of the checkpoint.
        job: Job of the checkpoint.
        step: Step of the checkpoint; by default the newest.
        tensors: Prefix of the weights' names in the checkpoint, such as ``model.``. The run's names
            lack it.

    Raises:
        NotFoundError: There is no such checkpoint.
        ConfigurationError: The checkpoint has no tensors with this prefix.
    """
    weights, step = load_checkpoint_weights(
        store, job, allocate_locally(), step=step, tensors=tensors
    )
    return weights.collect_state(), step


def load_checkpoint_weights(
    store: Store, job: str, allocate: AllocateWeights, *, step: int | None = None, tensors: str = ""
) -> tuple[ShardedWeights, int]:
    """Load the weights of any checkpoint into allocated memory.

    Args:
        store: Store of the checkpoint.
        job: Job of the checkpoint.
        allocate: Function that allocates weights from their shapes.
        step: Step of the checkpoint; by default the newest.
        tensors: Prefix of the weights' names in the checkpoint. The run's names lack it.

    Returns:
        Weights, and their step.

    Raises:
        NotFoundError: There is no such checkpoint.
        ConfigurationError: The checkpoint has no tensors with this prefix.
    """
    weights: ShardedWeights | None = None
    for found in _find_requested(store, job, step):
        shapes = _read_shapes(found, tensors)
        if not shapes:
            raise _make_mismatch_error(found, tensors)
        if weights is None or weights.shapes != shapes:
            weights = allocate(shapes)
        try:
            weights.load_weights(store, job, found.step, tensors)
        except errors.CorruptError:  # not moved away, as it belongs to another job
            if step is not None:
                raise
            continue
        return weights, found.step
    raise errors.NotFoundError(
        f"{store.make_url(job)} has no undamaged checkpoint: save one, or name another job."
    )


def check_weights(
    store: Store, job: str, *, step: int | None = None, tensors: str = ""
) -> Checkpoint:
    """Return the checkpoint that `load_checkpoint_weights` would load first, without a load.

    Only the metadata and the sizes of the files are read.

    Args:
        store: Store of the checkpoint.
        job: Job of the checkpoint.
        step: Step of the checkpoint; by default the newest.
        tensors: Prefix of the weights' names in the checkpoint.

    Raises:
        NotFoundError: There is no such checkpoint.
        CorruptError: The metadata cannot be read, or a file is missing or truncated.
        ConfigurationError: The checkpoint has no tensors with this prefix.
    """
    for found in _find_requested(store, job, step):
        if not _read_shapes(found, tensors):
            raise _make_mismatch_error(found, tensors)
        damage = verify(store, found, check=VerifyDepth.SIZES)
        if not damage:
            return found
        if step is not None:
            raise errors.CorruptError(f"Step {step} of {job}: {next(iter(damage.values()))}")
    raise errors.NotFoundError(
        f"{store.make_url(job)} has no undamaged checkpoint: save one, or name another job."
    )


def _make_mismatch_error(found: Checkpoint, tensors: str) -> errors.ConfigurationError:
    return errors.ConfigurationError(
        f"Step {found.step} of {found.job} has no weights whose names begin with {tensors!r}: "
        f"one of its tensors is {next(iter(found.tensors), None)!r}. Correct `tensors`."
    )


def _find_requested(store: Store, job: str, step: int | None) -> Iterable[Checkpoint]:
    return iterate_checkpoints(store, job) if step is None else [read_checkpoint(store, job, step)]


def _read_shapes(found: Checkpoint, prefix: str) -> Shapes:
    """Return the shapes of a checkpoint's weights, by their names without a prefix.

    Weights are the floating-point tensors with the prefix, and BatchNorm's counts.
    """
    return {
        name.removeprefix(prefix): record.shape
        for name, record in found.tensors.items()
        if name.startswith(prefix)
        and parse_own_name(name) is None
        and (parse_dtype(record.dtype).is_floating_point or take_last_part(name) in BUFFER_NAMES)
    }


def _read_checkpoint_link(
    store: Store, keys: ChainKeys, found: Checkpoint
) -> ChainStart | ChainLink:
    """Return the link of the window that a checkpoint names."""
    window = found.position.get(WINDOW)
    if not isinstance(window, int):
        raise errors.CorruptError(f"Step {found.step} of {keys.job} names no window.")
    link = read_link(store, keys, window)
    if link.step != found.step:
        raise errors.CorruptError(f"Step {found.step} of {keys.job} is none of the chain's.")
    return link
