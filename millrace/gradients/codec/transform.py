"""Discrete cosine transform of a tensor's tiles, and its inverse.

The transform is the orthonormal DCT-II of tiles of at most 64 by 64 (DeMo, arXiv 2411.19870, §3).
It is computed as two matrix products for some rows of tiles at a time. On the processor these are
few, so that intermediate values stay in its cache. On a GPU they are many, since each step takes
some microseconds to start.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from millrace.gradients.codec.chunks import TILE, Tiles, make_tiles, view_as_matrix
from millrace.schemas.gradient import Transform

_AT_ONCE = 1 << 17  # values at once on the processor
_AT_ONCE_ON_DEVICE = 1 << 24  # and on a GPU


def forward(
    tensor: torch.Tensor, transform: Transform, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a tensor's values in the order of its chunks, transformed.

    Args:
        tensor: Contiguous float32 values of any shape.
        transform: Transform to apply.
        out: Memory for the float32 result in one dimension. New memory would take as long as the
            transform.

    Returns:
        Float32 values in one dimension. Without a transform, this is the tensor's own memory.
    """
    if transform is Transform.NONE:
        return tensor.reshape(-1)
    matrix = tensor.reshape(view_as_matrix(tuple(tensor.shape)))
    if out is None:
        out = torch.empty(tensor.numel(), dtype=torch.float32, device=tensor.device)
    for tiles, target, band in _iterate_bands(out, matrix, make_tiles(tuple(tensor.shape))):
        down, across = (
            _compute_basis(tiles.height, out.device),
            _compute_basis(tiles.width, out.device),
        )
        if len(band) == 1:  # one row of tiles needs only a plain product, without a copy
            half = torch.mm(down, band[0]).view(tiles.height, -1, tiles.width)
            torch.matmul(half.transpose(0, 1), across.T, out=target[0])
        else:
            half = torch.matmul(down, band).view(-1, tiles.width)
            done = torch.mm(half, across.T).view(len(band), tiles.height, -1, tiles.width)
            target.copy_(done.transpose(1, 2))
    return out


def backward(
    values: torch.Tensor,
    shape: tuple[int, ...],
    transform: Transform,
    out: torch.Tensor | None = None,
    tiles: Sequence[Tiles] | None = None,
) -> torch.Tensor:
    """Return the tensor of which `forward` returned these values.

    Args:
        values: Float32 values in one dimension.
        shape: Shape of the tensor.
        transform: Transform to invert.
        out: Contiguous float32 tensor of this shape, which is filled.
        tiles: Tiles of the tensor, if the values are of other tiles than those of `make_tiles`.
    """
    if transform is Transform.NONE:
        return values.view(shape) if out is None else out.copy_(values.view(shape))
    if out is None:
        out = torch.empty(shape, dtype=torch.float32, device=values.device)
    groups = make_tiles(shape) if tiles is None else tiles
    for group, target, band in _iterate_bands(values, out.view(view_as_matrix(shape)), groups):
        down, across = (
            _compute_basis(group.height, values.device),
            _compute_basis(group.width, values.device),
        )
        half = torch.mm(target.reshape(-1, group.width), across)
        half = half.view(len(band), -1, group.height, group.width).transpose(1, 2)
        half = half.reshape(len(band), group.height, -1)
        if len(band) == 1:
            band[0].copy_(torch.mm(down.T, half[0]))
        else:
            band.copy_(torch.matmul(down.T, half))
    return out


def _iterate_bands(
    values: torch.Tensor, matrix: torch.Tensor, groups: Sequence[Tiles]
) -> Iterator[tuple[Tiles, torch.Tensor, torch.Tensor]]:
    """Yield some rows of tiles at a time, as views of the values and of the matrix.

    The view of the values has the shape ``(rows, columns, height, width)``, with consecutive tiles.
    The view of the matrix has the shape ``(rows, height, columns * width)``.
    """
    first, at_once = 0, _AT_ONCE if values.is_cpu else _AT_ONCE_ON_DEVICE
    for tiles in groups:
        size, wide = tiles.height * tiles.width, tiles.columns * tiles.width
        high = tiles.rows * tiles.height
        target = values[first : first + high * wide]
        target = target.view(tiles.rows, tiles.columns, tiles.height, tiles.width)
        part = matrix.narrow(0, tiles.row, high).narrow(1, tiles.column, wide)
        part = part.view(tiles.rows, tiles.height, wide)
        columns = max(1, min(tiles.columns, at_once // size))
        rows = max(1, at_once // (columns * size))
        for row in range(0, tiles.rows, rows):
            for column in range(0, tiles.columns, columns):
                yield (
                    tiles,
                    target[row : row + rows, column : column + columns],
                    part[
                        row : row + rows,
                        :,
                        column * tiles.width : (column + columns) * tiles.width,
                    ],
                )
        first += high * wide


@lru_cache(maxsize=TILE)
def get_basis(size: int) -> npt.NDArray[np.float32]:
    """Return the orthonormal basis of the DCT-II, (coefficients, values), rounded from float64."""
    n = np.arange(size, dtype=np.float64)
    basis = np.cos(np.pi / size * (n[None, :] + 0.5) * n[:, None]) * np.sqrt(2.0 / size)
    basis[0] /= np.sqrt(2.0)
    return basis.astype(np.float32)


@lru_cache(maxsize=512)
def _compute_basis(size: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(get_basis(size), device=device)
