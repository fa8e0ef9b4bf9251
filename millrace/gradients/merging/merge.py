"""Merge of the sparse gradients of many workers, with the same result on every machine.

A rule gives each worker a factor, and the result is the weighted sum. Rules that judge a worker by
its distance to others need only inner products, which are added chunk by chunk without dense
copies. Workers are in the order of their names. Sums are of float64, in an order that does not
depend on arrival, threads or machines. So equal gradients give equal bytes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import fsum, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace import errors
from millrace.digest import compute_stream_digest
from millrace.gradients.codec import kernels
from millrace.gradients.codec.gradient_object import CheckedGradient, Shapes
from millrace.gradients.codec.merged_chunks import MergedChunks
from millrace.gradients.codec.tensors import BLOCK, SparseChunks, decode_values, map_blocks
from millrace.schemas.gradient import Codec
from millrace.schemas.merge import COORDINATE_WISE_RULES, MergeRule, MergeSettings

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class WorkerFactors:
    """Factors of the workers' gradients in a merge.

    Attributes:
        workers: Sorted names of the workers.
        scales: Factor of each worker's gradient before the rule.
        sum_factors: Factor of each worker in the sum, with its scale. For `MergeRule.SIGN`,
            `MEDIAN` and `TRIMMED`, which are not weighted sums, this is the scale.
        shares: Share of each worker in the average of a buffer. The sum is 1.
    """

    workers: tuple[str, ...]
    scales: Vector
    sum_factors: Vector
    shares: Vector

    def select_used(self) -> "WorkerFactors":
        """Return the workers that have a share. The gradients of the others change no value."""
        used = np.flatnonzero(self.shares)
        workers = tuple(self.workers[number] for number in used)
        return WorkerFactors(workers, self.scales[used], self.sum_factors[used], self.shares[used])


@dataclass(frozen=True, slots=True)
class MergeRequest:
    """Merge of the gradients of several workers.

    Attributes:
        codec: Codec of all gradients.
        settings: Settings of the rule.
        factors: Factors of the workers by the rule.
    """

    codec: Codec
    settings: MergeSettings
    factors: WorkerFactors


def group_tensors(shapes: Shapes, weights_per_object: int) -> list[tuple[str, ...]]:
    """Group tensors whose merged gradients are one object, in the order of their names.

    Args:
        shapes: Shapes of the tensors by their names.
        weights_per_object: Largest number of weights of an object. Only a single larger tensor
            exceeds it.
    """
    found: list[tuple[str, ...]] = []
    now: list[str] = []
    size = 0
    for name in sorted(shapes):
        each = prod(shapes[name])
        if now and size + each > weights_per_object:
            found.append(tuple(now))
            now, size = [], 0
        now.append(name)
        size += each
    return [*found, tuple(now)] if now else found


GradientsByWorker = Mapping[str, Mapping[str, tuple[SparseChunks, ...]]]
"""Sparse tensors of each worker's gradient, by the names of the workers and of the tensors."""

Products = Callable[[Sequence[str]], Iterable[Vector]]
"""Function that yields the inner products of workers' gradients for each tensor in order."""


def compute_worker_factors(  # noqa: C901 - one branch for each rule
    gradients: Mapping[str, CheckedGradient],
    settings: MergeSettings,
    *,
    scores: Mapping[str, float] | None = None,
    products: Products | None = None,
    threads: int = 1,
) -> WorkerFactors:
    """Return the factors of each worker by a rule.

    Args:
        gradients: Checked gradients by the workers' names.
        settings: Settings of the merge.
        scores: Weights of the workers by their scores, for `MergeRule.SCORES`. A worker that is
            missing has 0.
        products: Function that returns the results of `compute_products` for all tensors, if the
            tensors are on other machines.
        threads: Number of threads.

    Raises:
        ConfigurationError: There are too few workers for the number of Byzantine ones, or no worker
            reports its number of tokens.
    """
    workers = tuple(sorted(gradients))
    if not workers:
        raise errors.ConfigurationError(
            "No gradient was gathered, so there is nothing to merge: wait for workers."
        )
    norms = np.array([gradients[name].norm for name in workers])
    scales = np.ones(len(workers))
    if settings.clip:
        limit = _compute_norm_limit(norms, settings.faulty)
        above = norms > limit
        scales[above] = limit / norms[above]

    def compute_gram() -> Vector:
        of_each = products or partial(_iterate_products, gradients, threads=threads)
        total = np.zeros((len(workers), len(workers)))
        for part in of_each(workers):
            total += part
        whole = total + np.tril(total, -1).T
        return whole * scales[:, None] * scales[None, :]

    worker_count = len(workers)
    match settings.rule:
        case MergeRule.TOKENS:
            tokens = np.array([gradients[name].header.tokens for name in workers], np.float64)
            if not tokens.sum():
                raise errors.ConfigurationError(
                    "No worker reports its number of tokens: choose another rule than `tokens`."
                )
            share = tokens / tokens.sum()
        case MergeRule.SCORES:
            share = _share_by_scores(workers, scores or {}, settings.even_share)
        case MergeRule.CENTERED_CLIP:
            share = _clip_to_center(compute_gram(), settings)
        case MergeRule.MULTI_KRUM:
            _check_bound(settings, worker_count)
            share = _select_multi_krum(compute_gram(), settings.faulty)
        case MergeRule.TRIMMED:
            _check_bound(settings, worker_count)
            share = np.ones(worker_count)
        case MergeRule.SENDERS | MergeRule.SIGN | MergeRule.MEDIAN:
            share = np.ones(worker_count)
        case MergeRule.MEAN:
            share = np.full(worker_count, 1.0 / worker_count)
    return WorkerFactors(workers, scales, share * scales, share / fsum(share))


def _share_by_scores(
    workers: Sequence[str], scores: Mapping[str, float], even_share: float
) -> Vector:
    """Divide a share evenly, and the rest by scores. If no worker has a score, all are even."""
    even = np.full(len(workers), 1.0 / len(workers))
    weights = np.array([scores.get(name, 0.0) for name in workers])
    total = fsum(weights)
    return even * even_share + weights / total * (1.0 - even_share) if total else even


def merge(
    gradients: Mapping[str, CheckedGradient],
    settings: MergeSettings,
    factors: WorkerFactors | None = None,
    *,
    threads: int = 1,
) -> Iterator[tuple[str, tuple[MergedChunks, ...]]]:
    """Merge gradients, tensor by tensor.

    Memory: the gradients, and one merged tensor.

    Args:
        gradients: Checked gradients by the workers' names, with the same codec and shapes.
        settings: Settings of the merge.
        factors: Factors of the workers; by default those of `compute_worker_factors`.
        threads: Number of threads.

    Yields:
        Name and merged values of each tensor.

    Raises:
        ConfigurationError: The rule cannot merge these gradients.
    """
    factors = factors or compute_worker_factors(gradients, settings, threads=threads)
    tensors, codec = _get_tensors(gradients)
    request = MergeRequest(codec, settings, factors)
    for name in tensors[factors.workers[0]]:
        yield name, merge_tensor(name, tensors, request, threads=threads)


def merge_tensor(
    name: str, gradients: GradientsByWorker, request: MergeRequest, *, threads: int = 1
) -> tuple[MergedChunks, ...]:
    """Merge one tensor.

    Args:
        name: Name of the tensor.
        gradients: Gradients of the workers.
        request: Merge that the tensor belongs to.
        threads: Number of threads.

    Raises:
        ConfigurationError: The rule cannot merge these gradients.
    """
    if request.codec.is_buffer(name):
        return _merge_buffer(name, gradients, request)
    groups = zip(*(gradients[worker][name] for worker in request.factors.workers), strict=True)
    return tuple(_merge_group(name, sent, request, threads) for sent in groups)


def compute_products(
    name: str,
    gradients: GradientsByWorker,
    workers: Sequence[str],
    codec: Codec,
    *,
    threads: int = 1,
) -> Vector:
    """Return the lower triangle of the inner products of a tensor's gradients.

    Args:
        name: Name of the tensor.
        gradients: Gradients of the workers.
        workers: Names of the workers, in the order of the result.
        codec: Settings of the compression.
        threads: Number of threads.

    Returns:
        Inner products: (workers, workers), float64.
    """
    worker_count = len(workers)
    total = np.zeros((worker_count, worker_count))
    for sent in zip(*(gradients[worker][name] for worker in workers), strict=True):
        chunks = sent[0].chunks

        def process_rows(rows: slice, sent: Any = sent, size: int = chunks.size) -> Vector:
            indices, values = _stack(sent, rows, codec)
            part = np.zeros((worker_count, worker_count))
            kernels.compute_inner_products(indices, values, size, part)
            return part

        for part in map_blocks(process_rows, chunks.count, threads, BLOCK):
            total += part
    return total


def digest_indices(name: str, gradients: GradientsByWorker, worker: str) -> str:
    """Return the digest of the indices that a worker sent of a tensor."""
    return compute_stream_digest(sparse.indices.tobytes() for sparse in gradients[worker][name])[0]


def have_same_indices(sent: Sequence[SparseChunks]) -> bool:
    """Decide whether workers sent the same indices of a group of chunks."""
    return all(np.array_equal(sent[0].indices, one.indices) for one in sent[1:])


def find_deviating_workers(indices: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the workers whose indices differ from those of the largest group of workers.

    Of groups of equal size, the first one decides.

    Args:
        indices: Digests of each worker's indices, from `digest_indices` for each tensor.
    """
    sent: dict[tuple[str, ...], list[str]] = {}
    for worker in sorted(indices):
        sent.setdefault(tuple(indices[worker]), []).append(worker)
    most = max(sent.values(), key=len) if sent else []
    return [worker for worker in sorted(indices) if worker not in most]


def _get_tensors(gradients: Mapping[str, CheckedGradient]) -> tuple[GradientsByWorker, Codec]:
    first = next(iter(gradients.values()))
    return {worker: gradient.tensors for worker, gradient in gradients.items()}, first.header.codec


def _iterate_products(
    gradients: Mapping[str, CheckedGradient], workers: Sequence[str], *, threads: int
) -> Iterator[Vector]:
    tensors, codec = _get_tensors(gradients)
    for name in sorted(tensors[workers[0]]):
        if codec.is_buffer(name):
            continue
        yield compute_products(name, tensors, workers, codec, threads=threads)


def _merge_group(
    name: str, sent: Sequence[SparseChunks], request: MergeRequest, threads: int
) -> MergedChunks:
    codec, settings, factors = request.codec, request.settings, request.factors.sum_factors
    chunks = sent[0].chunks
    by_index = settings.rule in COORDINATE_WISE_RULES
    if by_index and not have_same_indices(sent):
        raise errors.ConfigurationError(
            f"The workers send different indices of {name}, so that most have one sender, and "
            f"`{settings.rule}` cannot judge one value: choose `mean`, `centered clip` or "
            "`multi-krum`, or let all workers send the same indices (`support: shared`)."
        )

    def process_rows(rows: slice) -> tuple[Any, Any, Any]:
        indices, values = _stack(sent, rows, codec)
        if by_index:
            scaled = values * factors[:, None, None]
            made = _sum_by_index(scaled, settings).astype(np.float32)
            return np.full(len(made), chunks.k, np.uint16), indices[0].ravel(), made.ravel()
        voting = settings.rule is MergeRule.SIGN
        if voting:
            values = np.sign(values)
        out = np.empty((2, values.size), np.float32)
        counts = np.empty(values.shape[1], np.uint16)
        each = np.ones(len(sent)) if voting else factors
        by_senders = settings.rule is MergeRule.SENDERS
        found = kernels.compute_weighted_sums(
            indices, values, each, chunks.size, by_senders, counts, out
        )
        sums = out[1, :found]
        sums = np.sign(sums) if voting else sums.copy()
        return counts, out[0, :found].astype(np.uint16), sums

    blocks = map_blocks(process_rows, chunks.count, threads, BLOCK)
    counts, indices, values = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    return MergedChunks(chunks, counts, indices, values)


def _merge_buffer(
    name: str, gradients: GradientsByWorker, request: MergeRequest
) -> tuple[MergedChunks, ...]:
    """Average a buffer, after values far from the coordinate-wise median are moved towards it.

    The largest distance that is kept is the lower median distance, or the one at the sorted
    position `faulty` if that is less. An honest worker's distance is at least as large. A worker's
    share is that of its gradient. Buffers do not change the factor of a gradient. Every
    average is between the least and the largest sent value, so a variance stays non-negative.
    `MergeRule.MEDIAN` and `TRIMMED` judge each value by itself. The median of two workers is their
    mean, so the influence of one of them has no bound.
    """
    codec, settings, factors = (
        request.codec.select_for_tensor(name),
        request.settings,
        request.factors,
    )
    counted = np.flatnonzero(factors.shares)
    senders = [gradients[factors.workers[number]][name] for number in counted]
    groups = [sparse.chunks for sparse in senders[0]]
    empty = np.empty(0, np.float32)  # for a tensor without values
    values = np.array(
        [
            np.concatenate([empty, *(decode_values(sparse, codec).ravel() for sparse in one)])
            for one in senders
        ],
        np.float64,
    )
    if settings.rule in COORDINATE_WISE_RULES:
        merged = _sum_by_index(values, settings)
    else:
        center = np.median(values, axis=0)
        apart = np.array([kernels.sum_squares(one - center) for one in values]) ** 0.5
        middle = (len(apart) - 1) // 2
        radius = np.sort(apart)[min(settings.faulty or middle, middle)]
        merged = np.zeros_like(center)
        for one, far, share in zip(values, apart, factors.shares[counted], strict=True):
            near = radius / far if far > radius else 1.0
            merged += share * (near * one + (1.0 - near) * center)
    made = merged.astype(np.float32)
    return tuple(
        MergedChunks(
            chunks,
            np.full(chunks.count, chunks.size, np.uint16),
            np.tile(np.arange(chunks.size, dtype=np.uint16), chunks.count),
            made[chunks.first : chunks.first + chunks.values],
        )
        for chunks in groups
    )


def _stack(
    sent: Sequence[SparseChunks], rows: slice, codec: Codec
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.float32]]:
    """Return the indices and the values of all workers for some chunks: (workers, chunks, k)."""
    parts = [_slice_sparse(one, rows) for one in sent]
    indices = np.stack([part.indices for part in parts])
    return indices, np.stack([decode_values(part, codec) for part in parts])


def _slice_sparse(sparse: SparseChunks, rows: slice) -> SparseChunks:
    return replace(
        sparse,
        indices=sparse.indices[rows],
        high=sparse.high[rows],
        ratio=sparse.ratio[rows] if sparse.ratio.size else sparse.ratio,
        codes=sparse.codes[rows],
    )


def _sum_by_index(values: Vector, settings: MergeSettings) -> Vector:
    if settings.rule is MergeRule.MEDIAN:
        return np.median(values, axis=0)
    faulty, worker_count = settings.faulty, len(values)
    return np.sort(values, axis=0)[faulty : worker_count - faulty].mean(axis=0)


def _check_bound(settings: MergeSettings, worker_count: int) -> None:
    if few := settings.explain_too_few(worker_count):
        raise errors.ConfigurationError(
            f"{few}, and there are {worker_count}: wait for more workers, declare fewer Byzantine "
            "ones, or choose `centered clip`."
        )


# -- rules that judge workers by their distances


def _compute_norm_limit(norms: Vector, faulty: int) -> float:
    """Return the norm to which gradients with a larger norm are scaled before the rule.

    Without `faulty` workers the limit is the lower median of the norms, which neither of two
    workers can raise. Otherwise it is the larger of the least norm and half of the norm at the
    sorted position `faulty`. An honest norm is at that position or below. So `faulty` huge norms
    are scaled to at most an honest one, and `faulty` tiny norms leave the others at least half of
    the least honest norm. Norms of 0 set no limit.

    Args:
        norms: L2 norms: (workers,).
        faulty: Number of Byzantine workers.
    """
    counted = np.sort(norms[norms > 0])
    if not counted.size:
        return 0.0
    middle = (counted.size - 1) // 2
    if not faulty:
        return float(counted[middle])
    return float(max(counted[0], counted[min(faulty, middle)] / 2))


def _clip_to_center(gram: Vector, settings: MergeSettings) -> Vector:
    """Return the factors after the iterations of centred clipping.

    Each iteration is ``v <- v + mean((x_i - v) * min(1, radius / |x_i - v|))``. The first ``v`` is
    the gradient that is nearest to all others. As ``v`` is always a weighted sum of the gradients,
    the inner products give all distances.
    """
    worker_count = len(gram)
    squares = np.diag(gram)
    apart = np.sqrt(np.maximum(squares[:, None] + squares[None, :] - 2 * gram, 0.0))
    factors = np.zeros(worker_count)
    factors[np.argmin(np.median(apart, axis=1))] = 1.0
    for _ in range(settings.iterations):
        # The sums are exact, since those of a library depend on the machine.
        cross = np.array([fsum(row * factors) for row in gram])
        far = np.sqrt(np.maximum(squares - 2 * cross + fsum(factors * cross), 0.0))
        radius = float(np.median(far)) if settings.radius is None else settings.radius
        ones = np.ones(worker_count)
        shares = np.minimum(1.0, np.divide(radius, far, out=ones, where=far > radius))
        step = shares / worker_count
        factors = factors * (1.0 - fsum(step)) + step
    return factors


def _select_multi_krum(gram: Vector, faulty: int) -> Vector:
    """Return equal factors for the workers with the nearest neighbours: all but ``faulty``."""
    worker_count = len(gram)
    squares = np.diag(gram)
    apart = squares[:, None] + squares[None, :] - 2 * gram
    np.fill_diagonal(apart, np.inf)
    scores = [fsum(row[: worker_count - faulty - 2]) for row in np.sort(apart, axis=1)]
    chosen = np.argsort(scores, kind="stable")[: worker_count - faulty]
    factors = np.zeros(worker_count)
    factors[chosen] = 1.0 / len(chosen)
    return factors
