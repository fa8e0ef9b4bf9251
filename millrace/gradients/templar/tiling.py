"""Division of a parameter into tiles, as Templar's workers do it.

Each dimension is divided by its largest divisor of at most 64. So a prime dimension has tiles of
one row or column, and a parameter of 4096 by 4096 values has 64 by 64 tiles of 4096 values.
"""

import numpy as np
import numpy.typing as npt
import torch

from millrace.errors import ConfigurationError
from millrace.gradients.codec.chunks import TILE, Tiles
from millrace.gradients.codec.transform import backward
from millrace.schemas.gradient import Transform


def find_tile_length(length: int) -> int:
    """Return the largest divisor of a length that is at most 64."""
    return next(size for size in range(min(length, TILE), 0, -1) if length % size == 0)


def make_templar_tiles(shape: tuple[int, ...]) -> Tiles:
    """Return the tiles of a parameter: those of a matrix, or those of a vector as a single row.

    Raises:
        ConfigurationError: Templar cannot send a parameter of this shape.
    """
    if len(shape) not in {1, 2} or min(shape) < 1:
        raise ConfigurationError(
            f"Templar sends no parameter of the shape {list(shape)}: give the shapes of vectors "
            "and matrices."
        )
    height, width = (1, *shape)[-2:]
    tall = 1 if len(shape) == 1 else find_tile_length(height)
    wide = find_tile_length(width)
    return Tiles(0, 0, height // tall, width // wide, tall, wide)


def restore_from_tiles(
    values: npt.NDArray[np.float32], shape: tuple[int, ...], transform: Transform
) -> torch.Tensor:
    """Return a parameter's change from the values of its tiles.

    Args:
        values: Values of all tiles, or their coefficients: ``(tiles, height * width)``.
        shape: Shape of the parameter.
        transform: Transform to invert. The coefficients are those of the orthonormal DCT-II
            (DeMo, arXiv 2411.19870, §3).

    Raises:
        ConfigurationError: Templar cannot send a parameter of this shape.
    """
    tiles = make_templar_tiles(shape)
    flat = torch.from_numpy(values).reshape(-1)  # pyright: ignore[reportUnknownMemberType]
    if transform is Transform.DCT:
        return backward(flat, shape, transform, tiles=(tiles,))
    grid = flat.view(tiles.rows, tiles.columns, tiles.height, tiles.width)
    return grid.transpose(1, 2).reshape(shape)
