"""Weights of a run, in the shards of a backend.

`ShardedWeights` calls all shards and combines their results.
"""

import secrets
from collections.abc import Callable, Sequence
from math import prod

from millrace import errors
from millrace.gradients.backends.interface import WeightBackend
from millrace.gradients.backends.weight_shard import WeightShard
from millrace.gradients.codec.gradient_object import (
    CheckedGradient,
    ExpectedGradient,
    GradientError,
    Shapes,
    assemble_gradient,
    read_header,
)
from millrace.gradients.gather_window import GatherWindow
from millrace.gradients.merging.links import check_link_tensors, check_state
from millrace.gradients.merging.merge import MergeRequest, Vector
from millrace.gradients.state import WeightState, combine_tensor_digests
from millrace.keys.gradients import ChainKeys
from millrace.schemas.chain import ChainLink, ChainStart, OuterOptimizer, UpdateEntry
from millrace.schemas.checkpoint import Checkpoint
from millrace.schemas.gradient import Codec
from millrace.storage import Stat, Store


class ShardedWeights:
    """Weights of a run, in one shard or several.

    Args:
        shapes: Shapes of all tensors by their names.
        backend: Shards, each with some of the tensors.
    """

    def __init__(self, shapes: Shapes, backend: WeightBackend) -> None:
        self.shapes = {name: shapes[name] for name in sorted(shapes)}
        self._backend = backend
        self._attempt = secrets.token_hex(8)

    # -- the weights

    def load_state(self, store: Store, job: str, step: int) -> None:
        """Load all tensors from a checkpoint of the run: see `WeightShard.load_state`."""
        self._backend.call_all(WeightShard.load_state, store, job, step)

    def load_weights(self, store: Store, job: str, step: int, prefix: str) -> None:
        """Load all tensors from any checkpoint: see `WeightShard.load_weights`."""
        self._backend.call_all(WeightShard.load_weights, store, job, step, prefix)

    def collect_state(self) -> WeightState:
        """Return a state with the tensors of all shards."""
        whole = WeightState({})
        for part in self._backend.call_all(WeightShard.get_state):
            whole.weights.update(part.weights)
            whole.moments.update(part.moments)
        return whole

    def digest(self) -> str:
        """Return the digest of the weights: see `WeightState.digest`."""
        digests = self._backend.call_all(WeightShard.compute_digests)
        return combine_tensor_digests({name: one for part in digests for name, one in part.items()})

    def check_values(self) -> None:
        """Check that workers can send changes of all tensors.

        Raises:
            ConfigurationError: A tensor has values that workers cannot send.
        """
        found = self._backend.call_all(WeightShard.find_unusable_tensors)
        if names := sorted(name for part in found for name in part):
            more = f" (and {len(names) - 1:,} more)" if len(names) > 1 else ""
            raise errors.ConfigurationError(
                f"The tensor {names[0]}{more} has values that are not finite, so no worker could "
                "send a gradient: begin the run with other weights."
            )

    def check(self, link: ChainStart | ChainLink) -> None:
        """Check that the weights have the digest of a link.

        Raises:
            ChainError: The weights have another digest.
        """
        if link.state:
            check_state(link, self.digest())

    def apply_link(self, store: Store, link: ChainLink) -> None:
        """Apply a link, and check that the weights then have its digest.

        Raises:
            ChainError: The link is missing or broken, or the weights have another digest.
        """
        check_link_tensors(link, self.shapes)
        self._backend.call_all(WeightShard.fetch_updates, store, link)
        self._backend.call_all(WeightShard.apply, link)
        self.check(link)

    # -- a window

    def begin_window(self, gather_window: GatherWindow) -> None:
        """Begin a window, and drop the gradients of other windows."""
        self._backend.call_all(WeightShard.begin_window, gather_window.number)

    def read_gradient(
        self, uid: str, store: Store, stat: Stat, expected: ExpectedGradient
    ) -> CheckedGradient:
        """Read a worker's gradient. Each shard reads and keeps its own tensors.

        Raises:
            GradientError: The gradient does not meet the conditions.
        """
        checked = read_header(store, stat, expected)
        try:
            parts = self._backend.call_all(
                WeightShard.receive_gradient, uid, store, stat, checked, expected
            )
            return assemble_gradient(checked, parts, expected)
        except GradientError:
            self._backend.call_all(WeightShard.forget, uid, expected.window)
            raise

    def list_index_digests(self, workers: Sequence[str]) -> dict[str, list[str]]:
        """Return the digests of the indices that each worker sent, in the order of the tensors."""
        answers = self._backend.call_all(WeightShard.list_index_digests, workers)
        return {worker: [one for part in answers for one in part[worker]] for worker in workers}

    def compute_products(self, workers: Sequence[str], codec: Codec) -> list[Vector]:
        """Return inner products of the gradients for each tensor: see `merge.compute_products`."""
        return [
            one
            for part in self._backend.call_all(WeightShard.compute_products, workers, codec)
            for one in part
        ]

    def merge_and_apply(
        self,
        store: Store,
        keys: ChainKeys,
        step: int,
        request: MergeRequest,
        outer: OuterOptimizer,
    ) -> tuple[UpdateEntry, ...]:
        """Merge, apply and store the gradients of all shards: see `WeightShard.merge_and_apply`."""
        parts = self._backend.call_all(
            WeightShard.merge_and_apply, store, keys, step, request, outer
        )
        return tuple(update for part in parts for update in part)

    # -- checkpoints

    def save(self, store: Store, job: str, *, step: int, window: int) -> None:
        """Begin to save the weights after a window. The next merge waits until they are read.

        Args:
            store: Store to save to, the same in all calls.
            job: Job of the checkpoint, the same in all calls.
            step: Step of the weights.
            window: Number of the window.
        """
        self._backend.call_all(
            WeightShard.save, store, job, self._attempt, step, window, self.shapes
        )

    def wait_for_save(self) -> Checkpoint | None:
        """Wait for the save in progress, and return its checkpoint; None without a save."""
        return next(
            (found for found in self._backend.call_all(WeightShard.wait_for_save) if found), None
        )

    def close(self) -> None:
        """Wait for the save in progress, and free its memory."""
        self._backend.call_all(WeightShard.close)


AllocateWeights = Callable[[Shapes], ShardedWeights]
"""Function that allocates weights from their shapes."""


def divide_tensors(
    shapes: Shapes, objects: Sequence[tuple[str, ...]], count: int
) -> list[list[str]]:
    """Divide tensors between at most ``count`` nodes, with about equal numbers of values.

    Args:
        shapes: Shapes of the tensors by their names.
        objects: Groups of tensors from `group_tensors`, which are not divided.
        count: Number of nodes.

    Returns:
        Names of the tensors of each node, in the order of ``objects``.
    """
    sizes = [sum(prod(shapes[name]) for name in names) for names in objects]
    whole, before = max(sum(sizes), 1), 0
    shares: list[list[str]] = [[] for _ in range(count)]
    for names, size in zip(objects, sizes, strict=True):
        middle = before + size / 2
        shares[min(count - 1, int(middle * count / whole))] += names
        before += size
    return [share for share in shares if share]
