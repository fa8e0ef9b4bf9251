"""The weights of a run as checkpoints: what it begins with, and what a late one goes on from.

A run's first link names a checkpoint, and each link the digest of the weights after it. A later
checkpoint is the chain's if its weights have the digest of the window that it says; so whoever
comes late need not replay all, and need not trust whoever saved it.
"""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from millrace import errors
from millrace.checkpoints.find import checkpoints, survey
from millrace.checkpoints.loading import Loaded, load
from millrace.checkpoints.retention import pin
from millrace.checkpoints.saving import Saver, Saving
from millrace.checkpoints.tree import is_skeleton, taken_apart
from millrace.gradients.chain import ChainError, begin, check_state, link_at
from millrace.gradients.state import State, state_of
from millrace.keys import ChainKeys
from millrace.models.chain import Start
from millrace.models.checkpoint import Checkpoint
from millrace.progress import Event, Progress, silent
from millrace.storage import Store

_WINDOW = "window"


def begin_run(
    store: Store, keys: ChainKeys, state: State, *, step: int = 0, progress: Progress = silent
) -> Start:
    """Save the weights that a run begins with, and commit its first link.

    Killed at any moment, or called by several with the same weights, it can be called again.

    Args:
        store: The aggregator's bucket.
        keys: Of the run.
        state: The weights.
        step: Of the training that they come from.
        progress: As of `Saver`.

    Raises:
        ConflictError: The run began with other weights, or at another step.
    """
    with Saver(store, keys.job, progress=progress) as saver:
        saved = save_state(saver, state, step=step, window=0).result()
    pin(store, keys.job, step, "The chain begins with it.")
    digest = state.digest()
    start = Start(run=keys.run, job=keys.job, step=step, root=saved.root, state=digest)
    return begin(store, keys, start)


def save_state(saver: Saver, state: State, *, step: int, window: int) -> Saving:
    """Save the weights after a window; returns as soon as they are copied.

    Args:
        saver: Of the job `ChainKeys.job`.
        state: The weights.
        step: That they are at.
        window: Which.
    """
    content = {"weights": dict(state.weights), "moments": dict(state.moments)}
    return saver.save(content, step=step, position={_WINDOW: window})


def newest_state(
    store: Store, keys: ChainKeys, *, progress: Progress = silent
) -> tuple[State, int]:
    """The newest weights that a checkpoint of the chain has, all of them verified.

    Args:
        store: The aggregator's bucket.
        keys: Of the run.
        progress: Told ``checkpoint.damaged`` of each that was passed over.

    Returns:
        The weights, and the window that they are after; `catch_up` goes on from there.

    Raises:
        NotFoundError: The run has not begun.
        ChainError: No checkpoint of the chain is there and undamaged.
    """
    link_at(store, keys, 0)
    for step, found in survey(store, keys.job):
        try:
            if isinstance(found, errors.CorruptError):
                raise found
            return _verified(store, keys, found)
        except (errors.CorruptError, errors.NotFoundError) as error:
            figures = {"step": step, "damage": str(error)}
            progress(Event("checkpoint.damaged", keys.job, figures))
    raise ChainError(
        f"No checkpoint that the chain of {keys.run} names is there and undamaged, below "
        f"{store.url_of(keys.job)}: bring back that of its first link."
    )


def state_of_checkpoint(
    store: Store, job: str, *, step: int | None = None, tensors: str = ""
) -> tuple[State, int]:
    """The weights of any checkpoint of `Saver`'s, to begin a run with; and their step.

    Args:
        store: Where it is.
        job: Whose.
        step: Which; by default the newest.
        tensors: What the names of the weights begin with there, such as ``model.``; it is cut off.

    Raises:
        NotFoundError: There is no such checkpoint.
        ConfigurationError: It has no such tensors.
    """
    loaded = _newest(store, job, tensors) if step is None else _some(store, job, step, tensors)
    found = {
        name.removeprefix(tensors): tensor
        for name, tensor in taken_apart(loaded.state).items()
        if not is_skeleton(name) and name.startswith(tensors) and tensor.is_floating_point()
    }
    if not found:
        raise errors.ConfigurationError(
            f"Step {loaded.checkpoint.step} of {job} has no weights whose names begin with "
            f"{tensors!r}: one of its tensors is {next(iter(loaded.checkpoint.tensors))!r}."
        )
    return state_of(found), loaded.checkpoint.step


def _newest(store: Store, job: str, tensors: str) -> Loaded:
    """The newest one that is undamaged; damaged ones stay where they are: they are not ours."""
    for found in checkpoints(store, job):
        try:
            return _some(store, job, found.step, tensors)
        except errors.CorruptError:
            continue
    raise errors.NotFoundError(f"{store.url_of(job)} has no checkpoint that is undamaged.")


def _some(store: Store, job: str, step: int, tensors: str) -> Loaded:
    return load(store, job, step=step, only=lambda name: name.startswith(tensors))


def _arrays(content: Mapping[str, Any], kind: str) -> dict[str, Any]:
    found = content.get(kind)
    arrays = cast("dict[str, Any]", found) if isinstance(found, dict) else {"": None}
    if any(getattr(array, "dtype", None) != np.float32 for array in arrays.values()):
        raise errors.CorruptError(f"It has no {kind} as a run's are.")
    return arrays


def _verified(store: Store, keys: ChainKeys, found: Checkpoint) -> tuple[State, int]:
    window = found.position.get(_WINDOW)
    if not isinstance(window, int):
        raise errors.CorruptError(f"Step {found.step} of {keys.job} names no window.")
    link = link_at(store, keys, window)
    if link.step != found.step:
        raise errors.CorruptError(f"Step {found.step} of {keys.job} is none of the chain's.")
    content = load(store, keys.job, step=found.step).state
    state = State(_arrays(content, "weights"), _arrays(content, "moments"))
    check_state(link, state)
    return state, window
