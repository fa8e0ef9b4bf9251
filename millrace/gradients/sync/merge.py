"""Merge the gradients of many workers into one: by a rule, sparse throughout, the same everywhere.

A rule gives each worker a weight, and what is merged is their weighted sum. Those that judge a
worker by its distance to the others need nothing of the gradients but their inner products, which
are added up chunk by chunk: twenty workers never make twenty dense copies. Workers are taken in the
order of their names, and sums are of float64 in an order that neither the order of arrival nor the
number of threads or machines changes: the same set of gradients makes the same bytes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import fsum, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace import errors
from millrace.digest import compute_stream_sha256
from millrace.gradients.codec import kernels
from millrace.gradients.codec.chunks import Chunks
from millrace.gradients.codec.payload import Payload, Shapes
from millrace.gradients.codec.tensors import BLOCK, Sparse, decode_values, map_blocks
from millrace.gradients.settings import BY_PLACE, MergeRule, MergeSettings
from millrace.schemas.gradient import Codec

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MergedRun:
    """The values of a run of equal chunks after a merge.

    Attributes:
        chunks: The run; its ``k`` says nothing here.
        counts: (count,), uint16: how many values each chunk has.
        places: uint16: where they stand, chunk by chunk, ascending in each.
        values: float32.
    """

    chunks: Chunks
    counts: npt.NDArray[np.uint16]
    places: npt.NDArray[np.uint16] = field(repr=False)
    values: npt.NDArray[np.float32] = field(repr=False)

    def fill(self, out: npt.NDArray[np.float32]) -> None:
        """Put them into all values of their tensor, in the order of its chunks, and zeros."""
        part = out[self.chunks.first : self.chunks.first + self.chunks.values]
        part[:] = 0.0
        starts = np.repeat(np.arange(self.chunks.count) * self.chunks.size, self.counts)
        part[starts + self.places] = self.values


@dataclass(frozen=True, slots=True)
class MergeWeights:
    """Weights of the workers in a merge.

    Attributes:
        workers: Their names, sorted.
        scales: What each is scaled by before the rule.
        weights: Weight of each in the weighted sum, its scale included; of `MergeRule.SIGN`,
            `MEDIAN` and `TRIMMED`, which are no weighted sums, its scale.
        shares: What each counts in the average of a buffer: they add up to 1.
    """

    workers: tuple[str, ...]
    scales: Vector
    weights: Vector
    shares: Vector


@dataclass(frozen=True, slots=True)
class MergeRequest:
    """Merge of the gradients of several workers.

    Attributes:
        codec: Codec of all gradients.
        settings: Settings of the rule.
        weights: Weights of the workers by the rule.
    """

    codec: Codec
    settings: MergeSettings
    weights: MergeWeights


def group_tensors(shapes: Shapes, values: int) -> list[tuple[str, ...]]:
    """Group tensors whose merged gradients are one object: neighbours by name, so many values.

    Args:
        shapes: Of the tensors, by their names.
        values: That an object is for at most, if it is not for one tensor alone.
    """
    found: list[tuple[str, ...]] = []
    now: list[str] = []
    size = 0
    for name in sorted(shapes):
        each = prod(shapes[name])
        if now and size + each > values:
            found.append(tuple(now))
            now, size = [], 0
        now.append(name)
        size += each
    return [*found, tuple(now)] if now else found


Gradients = Mapping[str, Mapping[str, tuple[Sparse, ...]]]
"""Tensors of several workers, by the workers' names and theirs."""

Products = Callable[[Sequence[str]], Iterable[Vector]]
"""The inner products of workers' gradients: of each tensor, in the order of their names."""


def compute_merge_weights(
    payloads: Mapping[str, Payload],
    settings: MergeSettings,
    *,
    products: Products | None = None,
    threads: int = 1,
) -> MergeWeights:
    """Return the weight of each worker by a rule.

    Args:
        payloads: By the workers' names; each was checked.
        settings: The rule.
        products: Function that returns the result of `compute_products` for a tensor, for
            tensors that are held elsewhere.
        threads: How many work side by side.

    Raises:
        ConfigurationError: The rule cannot bear so many liars among so few workers, or no worker
            says of how many tokens its gradient is.
    """
    workers = tuple(sorted(payloads))
    if not workers:
        raise errors.ConfigurationError("There is nothing to merge: no gradient was taken.")
    norms = np.array([payloads[name].norm for name in workers])
    scales = np.ones(len(workers))
    if settings.clip:
        limit = _compute_norm_limit(norms, settings.faulty)
        above = norms > limit
        scales[above] = limit / norms[above]

    def gram() -> Vector:
        of_each = products or partial(_iterate_products, payloads, threads=threads)
        total = np.zeros((len(workers), len(workers)))
        for part in of_each(workers):
            total += part
        whole = total + np.tril(total, -1).T
        return whole * scales[:, None] * scales[None, :]

    every = len(workers)
    match settings.rule:
        case MergeRule.TOKENS:
            tokens = np.array([payloads[name].header.tokens for name in workers], np.float64)
            if not tokens.sum():
                raise errors.ConfigurationError(
                    "No worker says of how many tokens its gradient is: merge by another rule."
                )
            share = tokens / tokens.sum()
        case MergeRule.CENTERED_CLIP:
            share = _clip_to_center(gram(), settings)
        case MergeRule.MULTI_KRUM:
            _check_bound(settings, every)
            share = _select_multi_krum(gram(), settings.faulty)
        case MergeRule.TRIMMED:
            _check_bound(settings, every)
            share = np.ones(every)
        case MergeRule.SENDERS | MergeRule.SIGN | MergeRule.MEDIAN:
            share = np.ones(every)
        case MergeRule.MEAN:
            share = np.full(every, 1.0 / every)
    return MergeWeights(workers, scales, share * scales, share / fsum(share))


def merge(
    payloads: Mapping[str, Payload],
    settings: MergeSettings,
    weights: MergeWeights | None = None,
    *,
    threads: int = 1,
) -> Iterator[tuple[str, tuple[MergedRun, ...]]]:
    """Merge gradients, tensor by tensor.

    Memory: one merged tensor, and of each worker what its payload holds.

    Args:
        payloads: By the workers' names; each was checked, all have the same codec and shapes.
        settings: The rule.
        weights: As of `weights_of`, which is called if they are left out.
        threads: How many work side by side.

    Yields:
        The name and the merged values of each tensor.

    Raises:
        ConfigurationError: The rule cannot merge these; the message says why.
    """
    weights = weights or compute_merge_weights(payloads, settings, threads=threads)
    gradients, codec = _get_tensors(payloads)
    request = MergeRequest(codec, settings, weights)
    for name in gradients[weights.workers[0]]:
        yield name, merge_tensor(name, gradients, request, threads=threads)


def merge_tensor(
    name: str, gradients: Gradients, request: MergeRequest, *, threads: int = 1
) -> tuple[MergedRun, ...]:
    """Merge one tensor.

    Args:
        name: Which.
        gradients: The workers'.
        request: Merge that the tensor belongs to.
        threads: How many work side by side.

    Raises:
        ConfigurationError: The rule cannot merge these; the message says why.
    """
    if request.codec.is_buffer(name):
        return _merge_buffer(name, gradients, request)
    runs = zip(*(gradients[worker][name] for worker in request.weights.workers), strict=True)
    return tuple(_merge_run(name, run, request, threads) for run in runs)


def compute_products(
    name: str, gradients: Gradients, workers: Sequence[str], codec: Codec, *, threads: int = 1
) -> Vector:
    """Return the inner products of a tensor's gradients: (workers, workers), lower triangle.

    Args:
        name: Of the tensor.
        gradients: The workers'.
        workers: Which, in their order.
        codec: How they are compressed.
        threads: How many work side by side.
    """
    every = len(workers)
    total = np.zeros((every, every))
    for run in zip(*(gradients[worker][name] for worker in workers), strict=True):
        chunks = run[0].chunks

        def block(rows: slice, run: Any = run, size: int = chunks.size) -> Vector:
            places, values = _stack(run, rows, codec)
            part = np.zeros((every, every))
            kernels.compute_inner_products(places, values, size, part)
            return part

        for part in map_blocks(block, chunks.count, threads, BLOCK):
            total += part
    return total


def digest_indices(name: str, gradients: Gradients, worker: str) -> str:
    """Return the digest of the places that a worker has sent of a tensor."""
    return compute_stream_sha256(run.places.tobytes() for run in gradients[worker][name])[0]


def find_deviating_workers(places: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the workers that have not sent the indices that most have.

    Of equally many the first's.

    Args:
        places: Of each worker, what `places_of` says of each tensor.
    """
    sent: dict[tuple[str, ...], list[str]] = {}
    for worker in sorted(places):
        sent.setdefault(tuple(places[worker]), []).append(worker)
    most = max(sent.values(), key=len) if sent else []
    return [worker for worker in sorted(places) if worker not in most]


def _get_tensors(payloads: Mapping[str, Payload]) -> tuple[Gradients, Codec]:
    first = next(iter(payloads.values()))
    return {worker: payload.tensors for worker, payload in payloads.items()}, first.header.codec


def _iterate_products(
    payloads: Mapping[str, Payload], workers: Sequence[str], *, threads: int
) -> Iterator[Vector]:
    gradients, codec = _get_tensors(payloads)
    for name in sorted(gradients[workers[0]]):
        if codec.is_buffer(name):
            continue
        yield compute_products(name, gradients, workers, codec, threads=threads)


def _merge_run(name: str, run: Sequence[Sparse], request: MergeRequest, threads: int) -> MergedRun:
    codec, settings, weights = request.codec, request.settings, request.weights.weights
    chunks = run[0].chunks
    by_place = settings.rule in BY_PLACE
    if by_place and any(not np.array_equal(run[0].places, one.places) for one in run[1:]):
        raise errors.ConfigurationError(
            f"The workers send different places of {name}, so that most have one sender, and the "
            f"{settings.rule} of one value is that value: choose `mean`, `centered clip` or "
            "`multi-krum`, or let all workers send the same places (`support: shared`)."
        )

    def block(rows: slice) -> tuple[Any, Any, Any]:
        places, values = _stack(run, rows, codec)
        if by_place:
            scaled = values * weights[:, None, None]
            made = _sum_by_index(scaled, settings).astype(np.float32)
            return np.full(len(made), chunks.k, np.uint16), places[0].ravel(), made.ravel()
        voting = settings.rule is MergeRule.SIGN
        if voting:
            values = np.sign(values)
        out = np.empty((2, values.size), np.float32)
        counts = np.empty(values.shape[1], np.uint16)
        each = np.ones(len(run)) if voting else weights
        by_senders = settings.rule is MergeRule.SENDERS
        found = kernels.compute_weighted_sums(
            places, values, each, chunks.size, by_senders, counts, out
        )
        sums = out[1, :found]
        sums = np.sign(sums) if voting else sums.copy()
        return counts, out[0, :found].astype(np.uint16), sums

    blocks = map_blocks(block, chunks.count, threads, BLOCK)
    counts, places, values = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    return MergedRun(chunks, counts, places, values)


def _merge_buffer(name: str, gradients: Gradients, request: MergeRequest) -> tuple[MergedRun, ...]:
    """Average a buffer, after moving values far from the coordinate-wise median towards it.

    The largest distance that is kept is the lower median distance, or the one at the sorted
    position `faulty` if that is less: an honest worker's distance is as large. The buffers of a
    worker do not change how the rule weighs its gradient. A worker's share is that of its
    gradient. Every average is between the least and the largest value that was sent, so a variance
    stays non-negative. `MergeRule.MEDIAN` and `TRIMMED` judge each value by itself. Of two workers
    the median is their mean: what one of them sends cannot be bounded.
    """
    codec, settings, weights = request.codec.for_tensor(name), request.settings, request.weights
    counted = np.flatnonzero(weights.shares)
    senders = [gradients[weights.workers[number]][name] for number in counted]
    runs = [run.chunks for run in senders[0]]
    empty = np.empty(0, np.float32)  # of a tensor without values
    values = np.array(
        [
            np.concatenate([empty, *(decode_values(run, codec).ravel() for run in one)])
            for one in senders
        ],
        np.float64,
    )
    if settings.rule in BY_PLACE:
        merged = _sum_by_index(values, settings)
    else:
        center = np.median(values, axis=0)
        apart = np.array([kernels.sum_squares(one - center) for one in values]) ** 0.5
        middle = (len(apart) - 1) // 2
        radius = np.sort(apart)[min(settings.faulty or middle, middle)]
        merged = np.zeros_like(center)
        for one, far, share in zip(values, apart, weights.shares[counted], strict=True):
            near = radius / far if far > radius else 1.0
            merged += share * (near * one + (1.0 - near) * center)
    made = merged.astype(np.float32)
    return tuple(
        MergedRun(
            run,
            np.full(run.count, run.size, np.uint16),
            np.tile(np.arange(run.size, dtype=np.uint16), run.count),
            made[run.first : run.first + run.values],
        )
        for run in runs
    )


def _stack(
    run: Sequence[Sparse], rows: slice, codec: Codec
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.float32]]:
    """Return the places and the values of some chunks of all workers: (workers, chunks, k)."""
    parts = [_slice_sparse(one, rows) for one in run]
    places = np.stack([part.places for part in parts])
    return places, np.stack([decode_values(part, codec) for part in parts])


def _slice_sparse(sparse: Sparse, rows: slice) -> Sparse:
    return replace(
        sparse,
        places=sparse.places[rows],
        high=sparse.high[rows],
        ratio=sparse.ratio[rows] if sparse.ratio.size else sparse.ratio,
        codes=sparse.codes[rows],
    )


def _sum_by_index(values: Vector, settings: MergeSettings) -> Vector:
    if settings.rule is MergeRule.MEDIAN:
        return np.median(values, axis=0)
    faulty, every = settings.faulty, len(values)
    return np.sort(values, axis=0)[faulty : every - faulty].mean(axis=0)


def _check_bound(settings: MergeSettings, every: int) -> None:
    if few := settings.explain_too_few(every):
        raise errors.ConfigurationError(
            f"{few}, and there are {every}: wait for more, declare fewer, or choose `centered "
            "clip`."
        )


# -- rules that judge workers by their distances


def _compute_norm_limit(norms: Vector, faulty: int) -> float:
    """Return the norm that larger gradients are scaled down to before the rule.

    Without `faulty` workers the limit is the lower median of the norms: of two workers, neither
    one can lift it. With them, it is the least norm, or half of the norm at the sorted position
    `faulty` if that is larger. An honest norm is at that position or below. So `faulty` huge norms
    are scaled down to at most an honest one, and `faulty` tiny norms leave the others at least
    half of the least honest norm. Norms of 0 set no limit.

    Args:
        norms: (workers,): L2 norms.
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
    """Return the weights that centred clipping ends with.

    ``v <- v + mean((x_i - v) * min(1, radius / |x_i - v|))``. As v stays a weighted sum of the
    gradients, from the one that is nearest to all others on, distances follow from the inner
    products alone.
    """
    every = len(gram)
    squares = np.diag(gram)
    apart = np.sqrt(np.maximum(squares[:, None] + squares[None, :] - 2 * gram, 0.0))
    weights = np.zeros(every)
    weights[np.argmin(np.median(apart, axis=1))] = 1.0
    for _ in range(settings.steps):
        # Exact sums: those of a library depend on the machine.
        cross = np.array([fsum(row * weights) for row in gram])
        far = np.sqrt(np.maximum(squares - 2 * cross + fsum(weights * cross), 0.0))
        radius = float(np.median(far)) if settings.radius is None else settings.radius
        shares = np.minimum(1.0, np.divide(radius, far, out=np.ones(every), where=far > radius))
        step = shares / every
        weights = weights * (1.0 - fsum(step)) + step
    return weights


def _select_multi_krum(gram: Vector, faulty: int) -> Vector:
    """Return the same weight for those whose nearest are nearest: all but ``faulty``."""
    every = len(gram)
    squares = np.diag(gram)
    apart = squares[:, None] + squares[None, :] - 2 * gram
    np.fill_diagonal(apart, np.inf)
    scores = [fsum(row[: every - faulty - 2]) for row in np.sort(apart, axis=1)]
    chosen = np.argsort(scores, kind="stable")[: every - faulty]
    weights = np.zeros(every)
    weights[chosen] = 1.0 / len(chosen)
    return weights


def make_dense(
    runs: Sequence[MergedRun], shape: tuple[int, ...], out: npt.NDArray[np.float32] | None = None
) -> npt.NDArray[np.float32]:
    """All merged values of a tensor in the order of its chunks."""
    values = np.empty(prod(shape), np.float32) if out is None else out
    for run in runs:
        run.fill(values)
    return values
