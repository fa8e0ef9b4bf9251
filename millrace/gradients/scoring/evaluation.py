"""Evaluation of the gradients that a window merged: what each does to the loss."""

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Protocol

import numpy as np
import torch

from millrace import errors
from millrace.gradients.codec.tensors import SparseChunks
from millrace.gradients.merging.links import make_merge_request
from millrace.gradients.merging.merge import (
    GradientsByWorker,
    MergeRequest,
    WorkerFactors,
    merge_tensor,
)
from millrace.gradients.merging.updates import StoredTensor
from millrace.gradients.state import WeightState
from millrace.schemas.chain import ChainLink, OuterKind, OuterOptimizer
from millrace.schemas.merge import MergeRule, MergeSettings
from millrace.schemas.scores import Evaluation, LossPair

_WEIGHTED_SUMS = {
    MergeRule.MEAN,
    MergeRule.TOKENS,
    MergeRule.SCORES,
    MergeRule.CENTERED_CLIP,
    MergeRule.MULTI_KRUM,
}
"""Rules whose factors add up to 1 before the scales."""


class ComputeLoss(Protocol):
    """Function that computes the loss of a model's weights on the pages of a window."""

    def __call__(self, weights: Mapping[str, torch.Tensor], window: int, uid: str | None) -> float:
        """Return the mean loss.

        Args:
            weights: Weights and buffers of the model by their names. They are changed after the
                call, and must not be changed by it.
            window: Number of the window.
            uid: Worker on whose own pages of the window the loss is computed; None for random
                pages, which are the same for each call of the window.
        """
        ...


def collect_gradients(
    link: ChainLink, updates: Iterable[Mapping[str, StoredTensor]]
) -> GradientsByWorker | None:
    """Collect the gradients that a link has merged from its updates, which nobody can change.

    Args:
        link: Link of the window.
        updates: Tensors of its updates, from `iterate_updates`.

    Returns:
        Gradients by the workers' names, without those of workers that had no share in the merge,
        and without buffers. None if an update has merged values, since these are shorter.
    """
    gradients: dict[str, dict[str, tuple[SparseChunks, ...]]] = {}
    for stored in updates:
        for name, tensor in stored.items():
            if link.codec.is_buffer(name):
                continue
            if not tensor.gradients:
                return None
            for uid, groups in tensor.gradients.items():
                gradients.setdefault(uid, {})[name] = groups
    return gradients


class WindowEvaluator:
    """Evaluator of the gradients of one window.

    Memory: the weights a second time, one merged tensor, and the gradients.

    Args:
        state: Weights before the window. They are not changed.
        link: Link of the window.
        gradients: Gradients from `collect_gradients`.
        compute_loss: Function that computes losses.
        step_size: Factor of a gradient that is applied alone, besides the learning rate of the
            run's outer optimizer.
        threads: Number of threads.
    """

    def __init__(
        self,
        state: WeightState,
        link: ChainLink,
        gradients: GradientsByWorker,
        compute_loss: ComputeLoss,
        *,
        step_size: float = 1.0,
        threads: int = 1,
    ) -> None:
        self._state, self._link, self._gradients = state, link, gradients
        self._compute_loss, self._threads = compute_loss, threads
        self._request = make_merge_request(link)
        outer = link.outer
        kind = OuterKind.SIGN if outer.kind is OuterKind.SIGN else OuterKind.SGD
        self._alone = outer.model_copy(update={"kind": kind, "lr": outer.lr * step_size})
        self._trial = WeightState(
            {name: np.empty_like(values) for name, values in state.weights.items()}
        )
        self._random_before: float | None = None
        self._merged: float | None = None  # loss after the window

    def evaluate(self, uid: str, *, with_value: bool = False) -> Evaluation:
        """Evaluate the gradient of a worker.

        Args:
            uid: Name of the worker.
            with_value: Whether to measure what the merge loses without the worker, too.

        Raises:
            ConfigurationError: The loss of the weights before the window is not a finite number
                above 0.
        """
        own_before = self._compute_before(uid)
        if self._random_before is None:
            self._random_before = self._compute_before(None)
        self._restore()
        self._apply(_select_alone(self._request, uid), self._alone)
        own, random = self._compute(uid), self._compute(None)
        return Evaluation(
            digest=self._link.taken[uid].digest,
            written=self._link.taken[uid].written,
            own=LossPair(before=own_before, after=own),
            random=LossPair(before=self._random_before, after=random),
            value=self._compute_value(uid) if with_value else None,
        )

    def _compute_before(self, uid: str | None) -> float:
        self._restore()
        loss = self._compute(uid)
        if loss is None or loss <= 0:
            pages = "random pages" if uid is None else f"the pages of {uid}"
            raise errors.ConfigurationError(
                f"The loss on {pages} before window {self._link.window} is {loss}, and "
                "improvements are relative to it: let the function return a finite loss above 0."
            )
        return loss

    def _compute_value(self, uid: str) -> float | None:
        """Return by how much the loss on the random pages grows without a worker in the merge."""
        if self._merged is None:
            self._merged = self._compute_merged(self._request)
        rest = _leave_out(self._request, uid)
        without = self._compute_merged(rest) if rest.factors.workers else self._random_before
        return None if self._merged is None or without is None else without - self._merged

    def _compute_merged(self, request: MergeRequest) -> float | None:
        self._restore()
        self._apply(request, self._link.outer)
        return self._compute(None)

    def _restore(self) -> None:
        for name, values in self._state.weights.items():
            np.copyto(self._trial.weights[name], values)
        self._trial.moments = {name: moment.copy() for name, moment in self._state.moments.items()}

    def _apply(self, request: MergeRequest, outer: OuterOptimizer) -> None:
        """Apply a merge of some gradients to the trial. Its buffers stay as before the window."""
        for name in self._trial.weights:
            if request.codec.is_buffer(name):
                continue
            groups = merge_tensor(name, self._gradients, request, threads=self._threads)
            self._trial.step_tensor(name, groups, request.codec, outer)

    def _compute(self, uid: str | None) -> float | None:
        weights = {
            name: torch.from_numpy(values)  # pyright: ignore[reportUnknownMemberType]
            for name, values in self._trial.weights.items()
        }
        loss = float(self._compute_loss(weights, self._link.window, uid))
        return loss if isfinite(loss) else None


def _select_alone(request: MergeRequest, uid: str) -> MergeRequest:
    """Return the merge of one worker alone, whose norm is clipped as in the merge of all."""
    scale = request.factors.scales[[request.factors.workers.index(uid)]]
    factors = WorkerFactors((uid,), scale, scale, np.ones(1))
    return MergeRequest(request.codec, MergeSettings(rule=MergeRule.MEAN), factors)


def _leave_out(request: MergeRequest, uid: str) -> MergeRequest:
    """Return the merge without a worker, whose share the others get in proportion to theirs."""
    factors = request.factors
    left = [number for number, one in enumerate(factors.workers) if one != uid]
    workers = tuple(factors.workers[number] for number in left)
    grow = 1.0 / factors.shares[left].sum() if left else 1.0
    sum_factors = factors.sum_factors[left]
    if request.settings.rule in _WEIGHTED_SUMS:
        sum_factors = sum_factors * grow
    scales, shares = factors.scales[left], factors.shares[left] * grow
    return MergeRequest(
        request.codec, request.settings, WorkerFactors(workers, scales, sum_factors, shares)
    )
