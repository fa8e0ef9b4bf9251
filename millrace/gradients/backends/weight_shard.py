"""A portion of a run's weights: where it is kept, its gradients are read, merged and applied.

One machine holds all weights in one shard; on a cluster, each node holds some tensors. A decision
about a window needs all shards, and `sharded_weights` asks them: each shard answers with digests,
sums and inner products of its tensors. The answers do not depend on the number of shards.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from millrace import errors
from millrace.checkpoints.loading import load
from millrace.checkpoints.ranks import Ranks
from millrace.checkpoints.saving import PendingSave, Saver
from millrace.checkpoints.tree import flatten_state, is_skeleton
from millrace.gradients.codec.payload import Expected, Opened, Shapes, Tensors, read_tensors
from millrace.gradients.state import Array, WeightState, copy_state
from millrace.gradients.sync.chain import encode_update, iterate_merged, store_update
from millrace.gradients.sync.merge import (
    Gradients,
    MergedRun,
    MergeRequest,
    compute_products,
    digest_indices,
    group_tensors,
    merge_tensor,
)
from millrace.keys import ChainKeys
from millrace.progress import Progress, ignore_event
from millrace.schemas.chain import ChainLink, OuterOptimizer, Update
from millrace.schemas.checkpoint import Checkpoint
from millrace.schemas.gradient import Codec
from millrace.storage import Stat, Store

KINDS = ("weights", "moments")
"""What a checkpoint of a run has of its `WeightState`, each a dict of tensors by their names."""

WINDOW = "window"
"""What its position calls the window that it is after."""


class WeightShard:
    """Some tensors of a run.

    Args:
        names: Which, sorted.
        state: Of them; by default nothing, until it is loaded.
        gradients: Of them, by the workers' names, if they were read already.
        rank: Which portion it is, of how many.
        threads: How many work side by side; by default one a processor.
        progress: As of `Saver`.
    """

    def __init__(
        self,
        names: Sequence[str],
        state: WeightState | None = None,
        gradients: Gradients | None = None,
        *,
        rank: tuple[int, int] = (0, 1),
        threads: int | None = None,
        progress: Progress = ignore_event,
    ) -> None:
        self._names, self._state = tuple(names), state or WeightState({})
        self._rank = rank
        self._threads = threads or os.cpu_count() or 1
        self._progress = progress
        self._window = -1
        self._received = dict(gradients or {})
        self._fetched: list[dict[str, tuple[MergedRun, ...]]] = []
        self._lock = threading.Lock()
        self._saver: Saver | None = None
        self._saving: PendingSave | None = None

    # -- the weights

    def load_state(self, store: Store, job: str, step: int) -> None:
        """Take these tensors from a checkpoint of the run.

        Raises:
            CorruptError: It is damaged, or none of a run's.
            NotFoundError: It is not there.
        """
        wanted = {f"{kind}.{name}" for kind in KINDS for name in self._names}
        content = load(store, job, step=step, only=wanted.__contains__).state
        state = WeightState(*(_arrays(content, kind) for kind in KINDS))
        if [sorted(state.weights), sorted(state.moments or self._names)] != [list(self._names)] * 2:
            raise errors.CorruptError(f"Step {step} of {job} has other tensors than the run.")
        self._state = state

    def load_weights(self, store: Store, job: str, step: int, prefix: str) -> None:
        """Take these tensors from any checkpoint, where their names begin with something else.

        Raises:
            CorruptError: It is damaged.
            NotFoundError: It is not there.
        """
        wanted = {f"{prefix}{name}" for name in self._names}
        loaded = load(store, job, step=step, only=wanted.__contains__)
        found = {
            name.removeprefix(prefix): tensor
            for name, tensor in flatten_state(loaded.state).items()
            if not is_skeleton(name)
        }
        self._state = copy_state(found)

    def state(self) -> WeightState:
        """Return the tensors themselves."""
        return self._state

    def digests(self) -> dict[str, str]:
        """As `WeightState.digests`."""
        return self._state.digests()

    def fetch(self, store: Store, link: ChainLink) -> None:
        """Read what a link has of these tensors, to be applied when all portions have read theirs.

        Raises:
            ChainError: It is missing or broken.
        """
        self._fetched = list(iterate_merged(store, link, self._names))

    def apply(self, link: ChainLink) -> None:
        """Apply what was fetched."""
        fetched, self._fetched = self._fetched, []
        for merged in fetched:
            for name, runs in merged.items():
                self._state.apply(name, runs, link.codec, link.outer)

    # -- a window

    def open(self, window: int) -> None:
        """Forget the gradients of other windows than this one."""
        with self._lock:
            self._window = window
            self._received.clear()

    def receive(
        self, uid: str, store: Store, stat: Stat, opened: Opened, want: Expected
    ) -> Tensors:
        """Read these tensors of a worker's gradient and keep them; what is returned has none.

        Several may be read at once, in threads.

        Raises:
            PayloadError: They cannot be read.
        """
        found = read_tensors(store, stat, opened, self._names, want)
        with self._lock:
            if not found.fault and want.window == self._window:  # else it came too late
                self._received[uid] = found.sparse
        return replace(found, sparse={})

    def forget(self, uid: str) -> None:
        """Let go of a worker's gradient."""
        with self._lock:
            self._received.pop(uid, None)

    def places(self, workers: Sequence[str]) -> dict[str, list[str]]:
        """Return the digests of the indices that each worker has sent of each tensor."""
        return {
            worker: [digest_indices(name, self._received, worker) for name in self._names]
            for worker in workers
        }

    def products(self, workers: Sequence[str], codec: Codec) -> list[Any]:
        """Return inner products of workers' gradients for each tensor: see `compute_products`."""
        return [
            compute_products(name, self._received, workers, codec, threads=self._threads)
            for name in self._names
            if not codec.is_buffer(name)
        ]

    def merge(
        self,
        store: Store,
        keys: ChainKeys,
        step: int,
        request: MergeRequest,
        outer: OuterOptimizer,
    ) -> list[Update]:
        """Merge what was received, store it, and apply it: one object's tensors at a time.

        Args:
            store: The aggregator's bucket.
            keys: Of the run.
            step: That the weights are at after it.
            request: Merge of the received gradients.
            outer: How what is merged is applied.
        """
        shapes = {name: self._state.weights[name].shape for name in self._names}
        made: list[Update] = []
        for names in group_tensors(shapes, request.settings.values):
            merged = {
                name: merge_tensor(name, self._received, request, threads=self._threads)
                for name in names
            }
            made.append(store_update(store, keys, step, encode_update(merged), len(names)))
            for name, runs in merged.items():
                self._state.apply(name, runs, request.codec, outer)
        return made

    # -- checkpoints

    def save(
        self, store: Store, job: str, attempt: str, step: int, window: int, whole: Shapes
    ) -> None:
        """Begin to save these tensors, with those of the other portions.

        What was begun before is waited for.

        Args:
            store: The aggregator's bucket.
            job: Whose checkpoint it is: always the same.
            attempt: As of `Ranks`: always the same.
            step: That the weights are at.
            window: That they are after.
            whole: The shapes of all tensors of the run.
        """
        self.saved()
        if self._saver is None:
            ranks = Ranks(*self._rank, attempt) if self._rank[1] > 1 else None
            self._saver = Saver(store, job, ranks=ranks, progress=self._progress)
        kinds = KINDS if self._state.moments else KINDS[:1]
        mine = {f"{kind}.{name}" for kind in kinds for name in self._names}
        content: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in KINDS}
        for kind in kinds:
            held: dict[str, Array] = getattr(self._state, kind)
            for name, shape in sorted(whole.items()):
                content[kind][name] = (
                    torch.from_numpy(held[name])  # pyright: ignore[reportUnknownMemberType]
                    if name in held
                    else torch.empty(shape, device="meta")
                )
        self._saving = self._saver.save(
            content, step=step, position={WINDOW: window}, mine=mine.__contains__
        )

    def saved(self) -> Checkpoint | None:
        """Return the checkpoint whose save was begun, once it is there.

        None if none was since the last time.
        """
        saving, self._saving = self._saving, None
        return saving and saving.result()

    def close(self) -> None:
        """Wait for what is being saved, and let go of its memory."""
        if self._saver is not None:
            self._saver.close()


def _arrays(content: Mapping[str, Any], kind: str) -> dict[str, Array]:
    """Return the arrays of a checkpoint of `Portion.save`."""
    arrays: dict[str, Array] = {}
    found = content.get(kind)
    for name, tensor in (
        cast("dict[str, Any]", found) if isinstance(found, dict) else {"": None}
    ).items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
            raise errors.CorruptError(f"It has no {kind} as a run's are.")
        arrays[name] = tensor.numpy()
    return arrays
