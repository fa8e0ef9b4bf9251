"""Selection of values on another device, such as a GPU.

Only selected values are copied to the host. By default, these are 1/64 of a tensor, so the copy and
the processor do not limit the speed. The selection equals that of the processor: magnitudes are
compared as integers, and the first of equal ones is selected.
"""

from collections.abc import Sequence

import numpy as np
import torch

from millrace.gradients.codec.chunks import make_chunks
from millrace.gradients.codec.shared_indices import Mask
from millrace.gradients.codec.tensors import (
    SparseChunks,
    decode_values,
    find_shared_indices,
    make_not_finite_error,
    quantise_sparse,
)
from millrace.schemas.gradient import Codec

_AT_ONCE = 1 << 24  # values at once: the selection needs eight more bytes per value
_MAGNITUDE = 0x7FFFFFFF


def select_on_device(
    values: torch.Tensor,
    shape: tuple[int, ...],
    codec: Codec,
    threads: int = 1,
    mask: Mask | None = None,
) -> tuple[SparseChunks, ...]:
    """Select and quantise values on another device, as `tensors.select_values` does.

    Args:
        values: Values of the tensor in float32, in one dimension and in the order of its chunks.
        shape: Shape of the tensor.
        codec: Settings of the compression.
        threads: Number of threads on the processor.
        mask: Mask of the window, if all workers send the same indices.

    Raises:
        ConfigurationError: A value is not finite, or the mask is missing.
    """
    if not torch.isfinite(values).all():
        raise make_not_finite_error()
    found: list[SparseChunks] = []
    for chunks in make_chunks(shape, codec):
        table = values[chunks.first : chunks.first + chunks.values].view(torch.int32)
        table = table.view(chunks.count, chunks.size)
        shared = find_shared_indices(chunks, codec, mask)
        indices = np.empty((chunks.count, chunks.k), np.uint16)
        picked = np.empty((chunks.count, chunks.k), np.int32)
        step = max(1, _AT_ONCE // chunks.size)
        for row in range(0, chunks.count, step):
            part = table[row : row + step]
            if shared is None:
                at = _select_largest(part, chunks.k)
            else:
                at = torch.from_numpy(shared.astype(np.int64)).to(values.device)  # pyright: ignore[reportUnknownMemberType]
                at = at.expand(len(part), -1)
            indices[row : row + step] = at.to(torch.int16).cpu().numpy()
            picked[row : row + step] = part.gather(1, at).cpu().numpy()
        found.append(quantise_sparse(chunks, indices, picked, codec, threads))
    return tuple(found)


def fill_dense_on_device(groups: Sequence[SparseChunks], codec: Codec, out: torch.Tensor) -> None:
    """Fill values on another device, as `tensors.fill_dense` does."""
    out.zero_()
    for sparse in groups:
        chunks = sparse.chunks
        table = out[chunks.first : chunks.first + chunks.values].view(chunks.count, chunks.size)
        # torch has few operations for uint16. An index has 12 bits, so int16 has the same values.
        narrow = torch.from_numpy(sparse.indices.view(np.int16))  # pyright: ignore[reportUnknownMemberType]
        indices = narrow.to(out.device).long()
        sent = torch.from_numpy(decode_values(sparse, codec)).to(out.device)  # pyright: ignore[reportUnknownMemberType]
        table.scatter_(1, indices, sent)


def _select_largest(chunks: torch.Tensor, k: int) -> torch.Tensor:
    """Return the indices of the ``k`` largest magnitudes of each chunk, in ascending order.

    Of equal magnitudes, the first ones are selected.
    """
    sizes = chunks & _MAGNITUDE
    least = torch.topk(sizes, k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    found = (sizes >= least).nonzero()
    if len(found) == k * len(chunks):
        return found[:, 1].view(-1, k)
    return _select_among_equal(sizes, k)


def _select_among_equal(sizes: torch.Tensor, k: int) -> torch.Tensor:
    """Select as `_select_largest` does, where some magnitudes are equal.

    The sort key of a value is its magnitude, then its distance from the end. No two keys are equal,
    so the result is the same on every device.
    """
    size = sizes.shape[1]
    behind = torch.arange(size - 1, -1, -1, device=sizes.device)
    top = torch.topk(sizes.long() << 12 | behind, k, dim=1, sorted=False).values
    return (size - 1 - (top & 0xFFF)).sort(dim=1).values
