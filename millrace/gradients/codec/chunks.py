"""Division of tensors into chunks, which depends only on the shape and the codec."""

from dataclasses import dataclass
from math import prod

from millrace.schemas.gradient import CHUNK_SIZE, Codec, Transform

TILE = 64
"""Largest number of rows and of columns of a tile."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Group of equal chunks: consecutive chunks of a tensor that have one size.

    Attributes:
        first: Index of the first value among the tensor's values, in the order of the chunks.
        count: Number of chunks.
        size: Number of values of each chunk.
        k: Number of values of each chunk that are sent.
    """

    first: int
    count: int
    size: int
    k: int

    @property
    def values(self) -> int:
        """Number of values of all chunks."""
        return self.count * self.size

    @property
    def sent(self) -> int:
        """Number of values of all chunks that are sent."""
        return self.count * self.k


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rectangle of a matrix that consists of tiles of one shape.

    Attributes:
        row: First row of the rectangle.
        column: First column of the rectangle.
        rows: Number of tiles in each column of the rectangle.
        columns: Number of tiles in each row of the rectangle.
        height: Rows of a tile.
        width: Columns of a tile.
    """

    row: int
    column: int
    rows: int
    columns: int
    height: int
    width: int


def make_chunks(shape: tuple[int, ...], codec: Codec) -> tuple[Chunks, ...]:
    """Divide a tensor into chunks, without padding.

    Chunks are at most 4096 consecutive values, of nearly equal sizes. With a transform, chunks are
    tiles.
    """
    if codec.transform is Transform.DCT:
        sizes = [
            (count, length * tiles.height * tiles.width)
            for tiles in make_tiles(shape)
            for count, length in _cut_evenly(
                tiles.rows * tiles.columns, CHUNK_SIZE // (tiles.height * tiles.width)
            )
        ]
    else:
        sizes = _cut_evenly(prod(shape), CHUNK_SIZE)
    found: list[Chunks] = []
    first = 0
    for count, size in sizes:
        k = max(1, min(size, round(codec.k * size / CHUNK_SIZE)))
        found.append(Chunks(first, count, size, k))
        first += count * size
    return tuple(found)


def make_tiles(shape: tuple[int, ...]) -> tuple[Tiles, ...]:
    """Divide a tensor into tiles, as a matrix of its first dimension by all others.

    Rows and columns are divided evenly, into at most two lengths each. So an odd or prime dimension
    gives tiles of two sizes instead of very small tiles.
    """
    height, width = view_as_matrix(shape)
    found: list[Tiles] = []
    row = 0
    for rows, tall in _cut_evenly(height, TILE):
        column = 0
        for columns, wide in _cut_evenly(width, TILE):
            found.append(Tiles(row, column, rows, columns, tall, wide))
            column += columns * wide
        row += rows * tall
    return tuple(found)


def view_as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the numbers of rows and columns of a tensor as a matrix. A vector has one row."""
    if len(shape) < 2:
        return 1, prod(shape)
    return shape[0], prod(shape[1:])


def _cut_evenly(length: int, most: int) -> list[tuple[int, int]]:
    """Divide a length evenly into the fewest pieces of at most ``most``.

    Returns:
        Pairs of a number of pieces and their length.
    """
    if not length:
        return []
    pieces = -(-length // most)
    short, longer = divmod(length, pieces)
    return [(n, size) for n, size in ((longer, short + 1), (pieces - longer, short)) if n]
