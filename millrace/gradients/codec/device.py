"""Tensors on another device, such as a GPU: what is sent is chosen there, and only that comes here.

It is a sixty-fourth of a tensor by default, so that neither the way to the processor nor the
processor is what encoding waits for. What is chosen is what the processor would have chosen:
magnitudes are compared as integers, and of equals the first counts.
"""

from collections.abc import Sequence

import numpy as np
import torch

from millrace.gradients.codec.chunks import make_chunks
from millrace.gradients.codec.shared_indices import Mask
from millrace.gradients.codec.tensors import (
    Sparse,
    decode_values,
    find_shared_indices,
    make_not_finite_error,
    quantise_sparse,
)
from millrace.schemas.gradient import Codec

_AT_ONCE = 1 << 24  # values: choosing takes eight bytes more of each
_MAGNITUDE = 0x7FFFFFFF


def select_on_device(
    values: torch.Tensor,
    shape: tuple[int, ...],
    codec: Codec,
    threads: int = 1,
    mask: Mask | None = None,
) -> tuple[Sparse, ...]:
    """As `tensors.select_values`, of values that are on another device.

    Args:
        values: Of the tensor, in the order of its chunks, float32, in one dimension.
        shape: Of the tensor.
        codec: How.
        threads: How many work side by side on the processor.
        mask: Of the window, if all workers send the same places.

    Raises:
        ConfigurationError: A value is not finite, or the mask is missing.
    """
    if not torch.isfinite(values).all():
        raise make_not_finite_error()
    found: list[Sparse] = []
    for run in make_chunks(shape, codec):
        table = values[run.first : run.first + run.values].view(torch.int32)
        table = table.view(run.count, run.size)
        shared = find_shared_indices(run, codec, mask)
        places = np.empty((run.count, run.k), np.uint16)
        picked = np.empty((run.count, run.k), np.int32)
        step = max(1, _AT_ONCE // run.size)
        for row in range(0, run.count, step):
            part = table[row : row + step]
            if shared is None:
                at = _select_largest(part, run.k)
            else:
                at = torch.from_numpy(shared.astype(np.int64)).to(values.device)  # pyright: ignore[reportUnknownMemberType]
                at = at.expand(len(part), -1)
            places[row : row + step] = at.to(torch.int16).cpu().numpy()
            picked[row : row + step] = part.gather(1, at).cpu().numpy()
        found.append(quantise_sparse(run, places, picked, codec, threads))
    return tuple(found)


def fill_dense_on_device(runs: Sequence[Sparse], codec: Codec, out: torch.Tensor) -> None:
    """As `tensors.fill_dense`, into values that are on another device."""
    out.zero_()
    for run in runs:
        chunks = run.chunks
        table = out[chunks.first : chunks.first + chunks.values].view(chunks.count, chunks.size)
        places = torch.from_numpy(run.places.astype(np.int64)).to(out.device)  # pyright: ignore[reportUnknownMemberType]
        sent = torch.from_numpy(decode_values(run, codec)).to(out.device)  # pyright: ignore[reportUnknownMemberType]
        table.scatter_(1, places, sent)


def _select_largest(chunks: torch.Tensor, k: int) -> torch.Tensor:
    """Return the places of the ``k`` largest magnitudes of each chunk, ascending.

    Of equals the first.

    Each value's key is its magnitude, and below it how far from the end it stands: no two are
    equal, so that there is one answer on every device.
    """
    size = chunks.shape[1]
    behind = torch.arange(size - 1, -1, -1, device=chunks.device)
    keys = (chunks & _MAGNITUDE).long() << 12 | behind
    top = torch.topk(keys, k, dim=1, sorted=False).values
    return (size - 1 - (top & 0xFFF)).sort(dim=1).values
