"""Overlap of the indices that workers send: a gradient with those of another is its copy.

Equal bytes are refused as duplicates before. A copy with other values still has the indices of the
original, and honest workers share few of them.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.gradients.codec.tensors import SparseChunks, decode_values
from millrace.gradients.merging.merge import GradientsByWorker
from millrace.schemas.gradient import Codec, Support
from millrace.schemas.scores import CopiedGradient


def compute_overlaps(
    gradients: GradientsByWorker, workers: Sequence[str], codec: Codec
) -> npt.NDArray[np.float64]:
    """Return the share of each worker's indices that each other worker sent, beyond chance.

    The share is of the indices of the worker that may be a copy, as all of a copy's indices are
    those of its original. A share of the indices of the other one would let it frame honest
    workers: one index that they probably send would be all of its indices.

    By chance, a worker sent each index of a chunk with the probability ``k / size``. The share is 0
    if no more indices are equal than by chance, and 1 if all are (Cohen's kappa).

    Only indices of values that are not 0 count: where a tensor did not change, all workers send the
    same indices of zeros. Each index is looked at once for each worker that sent it, so the time
    grows with the number of values that were sent, not with the number of pairs. Buffers, and
    tensors of which every value is sent, say nothing and are left out.

    Args:
        gradients: Gradients of the workers.
        workers: Names of the workers, in the order of the result.
        codec: Codec of the gradients.

    Returns:
        Shares from 0 to 1 of the indices of the second worker that the first one sent too:
        (workers, workers). All are 0 if the codec prescribes the indices.
    """
    worker_count = len(workers)
    equal = np.zeros(worker_count * worker_count, np.int64)
    sent = np.zeros(worker_count, np.int64)
    by_chance = np.zeros(worker_count)
    if not workers or codec.support is Support.SHARED:
        return np.zeros((worker_count, worker_count))
    for name in gradients[workers[0]]:
        if codec.is_buffer(name):
            continue
        for groups in zip(*(gradients[worker][name] for worker in workers), strict=True):
            chunks = groups[0].chunks
            if chunks.k < chunks.size:
                places = [_list_places(one, codec.select_for_tensor(name)) for one in groups]
                lengths = np.array([len(one) for one in places])
                sent += lengths
                by_chance += lengths * (chunks.k / chunks.size)
                equal += _count_equal(places)
    counts = equal.reshape(worker_count, worker_count)
    above = np.maximum(counts + counts.T - by_chance, 0.0)
    return np.divide(above, sent - by_chance, out=np.zeros_like(above), where=sent > 0)


def find_copies(
    overlaps: npt.NDArray[np.float64],
    workers: Sequence[str],
    written: Mapping[str, datetime],
    max_overlap: float,
) -> dict[str, CopiedGradient]:
    """Return the copies, by the names of the workers that sent them.

    Of two gradients, the later one is the copy; of two at the same time, that of the later name.
    A copy may hide behind indices that its original lacks. With an original that sends all values
    of its chunks, it has to give up ``1 - max_overlap`` of the original's indices for them. Chunks
    in which the original has fewer values than `k` have room for more.

    Args:
        overlaps: Result of `compute_overlaps`.
        workers: Names of the workers, in the order of ``overlaps``.
        written: Times of the uploads, by the store's clock.
        max_overlap: Share of its indices, beyond chance, from which a gradient is a copy.
    """
    order = sorted(range(len(workers)), key=lambda one: (written[workers[one]], workers[one]))
    copies: dict[str, CopiedGradient] = {}
    for place, later in enumerate(order):
        shares = [(float(overlaps[earlier, later]), earlier) for earlier in order[:place]]
        share, earlier = max(shares, key=lambda one: one[0], default=(0.0, 0))
        if share >= max_overlap:
            copies[workers[later]] = CopiedGradient(earlier=workers[earlier], overlap=share)
    return copies


def _list_places(sparse: SparseChunks, codec: Codec) -> npt.NDArray[np.int64]:
    """Return the places of the values that are not 0, within the group of chunks."""
    rows = np.arange(len(sparse.indices), dtype=np.int64)[:, None] * sparse.chunks.size
    return (rows + sparse.indices)[decode_values(sparse, codec) != 0]


def _count_equal(groups: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Return, for each pair of workers, how many places both have: (workers * workers,)."""
    worker_count = len(groups)
    places: Any = np.concatenate(groups)
    senders = np.repeat(np.arange(worker_count, dtype=np.int64), [len(one) for one in groups])
    order = np.argsort(places, kind="stable")  # within a place, in the order of the workers
    places, senders = places[order], senders[order]
    equal = np.zeros(worker_count * worker_count, np.int64)
    for apart in range(1, worker_count):
        same = places[apart:] == places[:-apart]
        if not same.any():
            break
        pairs = senders[:-apart][same] * worker_count + senders[apart:][same]
        equal += np.bincount(pairs, minlength=worker_count * worker_count)
    return equal
