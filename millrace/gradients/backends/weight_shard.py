"""Shard of the weights of a run, which reads, merges and applies the gradients of its tensors.

One machine holds all weights in one shard. On a cluster, each node holds some tensors. Decisions
about a window need digests, sums and inner products of all shards, which `sharded_weights`
combines. The results do not depend on the number of shards.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from millrace import errors
from millrace.checkpoints.loading import load
from millrace.checkpoints.ranks import Ranks
from millrace.checkpoints.saving import PendingSave, Saver
from millrace.checkpoints.tree import flatten_state, is_skeleton
from millrace.gradients.codec.byte_tensors import encode_byte_tensors
from millrace.gradients.codec.gradient_object import (
    CheckedHeader,
    CheckedTensors,
    ExpectedGradient,
    Shapes,
    read_tensors,
)
from millrace.gradients.merging.links import apply_update, iterate_updates, store_update
from millrace.gradients.merging.merge import (
    GradientsByWorker,
    MergeRequest,
    compute_products,
    digest_indices,
    group_tensors,
    merge_tensor,
)
from millrace.gradients.merging.updates import (
    EncodedTensor,
    StoredTensor,
    choose_forms,
    encode_tensor,
)
from millrace.gradients.state import Array, WeightState, copy_state
from millrace.keys.gradients import ChainKeys
from millrace.progress import Progress, ignore_event
from millrace.schemas.chain import ChainLink, OuterOptimizer, UpdateEntry
from millrace.schemas.checkpoint import Checkpoint
from millrace.schemas.gradient import BUFFER_NAMES, Codec, take_last_part
from millrace.storage import Stat, Store
from millrace.threads import count_processors

KINDS = ("weights", "moments")
"""Keys of a checkpoint's state: the dicts of tensors of a `WeightState`."""

WINDOW = "window"
"""Key of the window's number in a checkpoint's position."""


class WeightShard:
    """Shard of the weights of a run: some of their tensors.

    Args:
        names: Sorted names of the tensors.
        state: Weights of these tensors; by default none until they are loaded.
        gradients: Gradients of these tensors by the workers' names, if they were read before.
        rank: Number of this shard, and number of shards.
        threads: Number of threads; by default one per processor.
        progress: Receives the events of `Saver`.
    """

    def __init__(
        self,
        names: Sequence[str],
        state: WeightState | None = None,
        gradients: GradientsByWorker | None = None,
        *,
        rank: tuple[int, int] = (0, 1),
        threads: int | None = None,
        progress: Progress = ignore_event,
    ) -> None:
        self._names, self._state = tuple(names), state or WeightState({})
        self._rank = rank
        self._threads = threads or count_processors()
        self._progress = progress
        self._window = -1
        self._received = dict(gradients or {})
        self._fetched: list[dict[str, StoredTensor]] = []
        self._lock = threading.Lock()
        self._saver: Saver | None = None
        self._saving: PendingSave | None = None

    # -- the weights

    def load_state(self, store: Store, job: str, step: int) -> None:
        """Load the tensors from a checkpoint of the run.

        Raises:
            CorruptError: The checkpoint is damaged, or has other tensors than the run.
            NotFoundError: There is no such checkpoint.
        """
        wanted = {f"{kind}.{name}" for kind in KINDS for name in self._names}
        content = load(store, job, step=step, only=wanted.__contains__).state
        state = WeightState(*(_get_arrays(content, kind) for kind in KINDS))
        if [sorted(state.weights), sorted(state.moments or self._names)] != [list(self._names)] * 2:
            raise errors.CorruptError(f"Step {step} of {job} has other tensors than the run.")
        self._state = state

    def load_weights(self, store: Store, job: str, step: int, prefix: str) -> None:
        """Load the tensors from any checkpoint, in which their names have a prefix.

        Raises:
            CorruptError: The checkpoint is damaged.
            NotFoundError: There is no such checkpoint.
        """
        wanted = {f"{prefix}{name}" for name in self._names}
        loaded = load(store, job, step=step, only=wanted.__contains__)
        found = {
            name.removeprefix(prefix): tensor
            for name, tensor in flatten_state(loaded.state).items()
            if not is_skeleton(name)
        }
        self._state = copy_state(found)

    def get_state(self) -> WeightState:
        """Return the weights, without a copy."""
        return self._state

    def compute_digests(self) -> dict[str, str]:
        """Return the digest of each tensor: see `WeightState.compute_digests`."""
        return self._state.compute_digests()

    def find_unusable_tensors(self) -> list[str]:
        """Return the names of tensors with NaN, and of BatchNorm's buffers with infinite values."""
        return [
            name
            for name, values in self._state.weights.items()
            if np.isnan(values).any()
            or (take_last_part(name) in BUFFER_NAMES and np.isinf(values).any())
        ]

    def fetch_updates(self, store: Store, link: ChainLink) -> None:
        """Read the updates of a link for these tensors. `apply` merges and applies them later.

        Raises:
            ChainError: An update of the link is missing or broken.
        """
        self._fetched = list(iterate_updates(store, link, self._names, threads=self._threads))

    def apply(self, link: ChainLink) -> None:
        """Merge and apply the fetched updates of a link."""
        self._wait_for_state()
        fetched, self._fetched = self._fetched, []
        for stored in fetched:
            apply_update(link, stored, self._state, threads=self._threads)

    # -- a window

    def begin_window(self, window: int) -> None:
        """Begin a window, and drop the gradients of other windows."""
        with self._lock:
            self._window = window
            self._received.clear()

    def receive_gradient(
        self, uid: str, store: Store, stat: Stat, checked: CheckedHeader, want: ExpectedGradient
    ) -> CheckedTensors:
        """Read and keep these tensors of a worker's gradient. Several threads may call this method.

        Returns:
            Result of the check, without the values.

        Raises:
            GradientError: The gradient cannot be read.
        """
        found = read_tensors(store, stat, checked, self._names, want)
        with self._lock:
            if not found.fault and want.window == self._window:  # a late gradient is dropped
                self._received[uid] = found.sparse
        return replace(found, sparse={})

    def forget(self, uid: str, window: int) -> None:
        """Drop a worker's gradient of a window, unless a later window is open."""
        with self._lock:
            if window == self._window:
                self._received.pop(uid, None)

    def list_index_digests(self, workers: Sequence[str]) -> dict[str, list[str]]:
        """Return the digests of the indices that each worker sent, in the order of the tensors."""
        return {
            worker: [digest_indices(name, self._received, worker) for name in self._names]
            for worker in workers
        }

    def compute_products(self, workers: Sequence[str], codec: Codec) -> list[Any]:
        """Return inner products of the gradients for each tensor: see `merge.compute_products`."""
        return [
            compute_products(name, self._received, workers, codec, threads=self._threads)
            for name in self._names
            if not codec.is_buffer(name)
        ]

    def merge_and_apply(
        self,
        store: Store,
        keys: ChainKeys,
        step: int,
        request: MergeRequest,
        outer: OuterOptimizer,
    ) -> list[UpdateEntry]:
        """Merge, apply and store the received gradients.

        Memory: the gradients, one merged tensor, and one object.

        Args:
            store: Bucket of the aggregator.
            keys: Keys of the run's chain.
            step: Step of the weights after the merge.
            request: Merge of the received gradients.
            outer: Optimizer that applies the merged values.
        """
        self._wait_for_state()
        shapes = {name: self._state.weights[name].shape for name in self._names}
        made: list[UpdateEntry] = []
        for names in group_tensors(shapes, request.settings.weights_per_object):
            encoded: dict[str, EncodedTensor] = {}
            for name in names:
                merged = merge_tensor(name, self._received, request, threads=self._threads)
                encoded[name] = encode_tensor(
                    name, merged, self._received, request, threads=self._threads
                )
                self._state.step_tensor(name, merged, request.codec, outer)
            body = encode_byte_tensors(choose_forms(encoded, request.codec))
            made.append(store_update(store, keys, step, body, len(names)))
        return made

    # -- checkpoints

    def save(
        self, store: Store, job: str, attempt: str, step: int, window: int, whole: Shapes
    ) -> None:
        """Begin to save these tensors, together with the other shards.

        An earlier save is awaited first. The save reads the weights themselves, not a copy. So
        methods that change them wait until it has read all of them.

        Args:
            store: Bucket of the aggregator.
            job: Job of the checkpoint, the same in all calls.
            attempt: Attempt of `Ranks`, the same in all calls.
            step: Step of the weights.
            window: Number of the window.
            whole: Shapes of all tensors of the run.
        """
        self.wait_for_save()
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
                    else torch.empty(shape, dtype=torch.float32, device="meta")
                )
        self._saving = self._saver.save(
            content,
            step=step,
            position={WINDOW: window},
            mine=mine.__contains__,
            in_place=True,
        )

    def wait_for_save(self) -> Checkpoint | None:
        """Wait for the save in progress, and return its checkpoint; None without a save."""
        saving, self._saving = self._saving, None
        return saving and saving.result()

    def _wait_for_state(self) -> None:
        """Wait until the save in progress no longer reads the weights. Its error is not raised."""
        if self._saving is not None:
            self._saving.wait_for_state()

    def close(self) -> None:
        """Wait for the save in progress, and free its memory."""
        if self._saver is not None:
            self._saver.close()


def _get_arrays(content: Mapping[str, Any], kind: str) -> dict[str, Array]:
    """Return the arrays of one kind from a checkpoint that `WeightShard.save` saved.

    Raises:
        CorruptError: The checkpoint has no such arrays, or arrays of another type.
    """
    arrays: dict[str, Array] = {}
    found = content.get(kind)
    for name, tensor in (
        cast("dict[str, Any]", found) if isinstance(found, dict) else {"": None}
    ).items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
            raise errors.CorruptError(f"The checkpoint has no float32 {kind} of a run.")
        arrays[name] = tensor.numpy()
    return arrays
