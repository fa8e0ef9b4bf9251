"""Cut a tensor into chunks, from its shape and the codec alone, so that all cut alike."""

from dataclasses import dataclass
from math import prod

from millrace.schemas.gradient import CHUNK_SIZE, Codec, Transform

TILE = 64
"""Rows and columns that a tile has at most."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks of a tensor that are of one size, one behind the other.

    Attributes:
        first: Where the first one begins among the tensor's values, in the order of its chunks.
        count: How many there are.
        size: Values of each.
        k: Values of each that are sent.
    """

    first: int
    count: int
    size: int
    k: int

    @property
    def values(self) -> int:
        """Values of all of them."""
        return self.count * self.size

    @property
    def sent(self) -> int:
        """Values of all of them that are sent."""
        return self.count * self.k


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of a matrix that are of one shape: a rectangle of them.

    Attributes:
        row: Where the rectangle begins.
        column: And where in each row.
        rows: Tiles in each column of the rectangle.
        columns: Tiles in each row of it.
        height: Of a tile.
        width: Of a tile.
    """

    row: int
    column: int
    rows: int
    columns: int
    height: int
    width: int


def make_chunks(shape: tuple[int, ...], codec: Codec) -> tuple[Chunks, ...]:
    """Cut a tensor into chunks.

    Every value is in one; no size is padded, so that nothing is wasted.

    Chunks are runs of at most 4096 values, as equal as they can be; with a transform, of whole
    tiles.
    """
    if codec.transform is Transform.DCT:
        sizes = [
            (count, run * tiles.height * tiles.width)
            for tiles in make_tiles(shape)
            for count, run in _even(
                tiles.rows * tiles.columns, CHUNK_SIZE // (tiles.height * tiles.width)
            )
        ]
    else:
        sizes = _even(prod(shape), CHUNK_SIZE)
    found: list[Chunks] = []
    first = 0
    for count, size in sizes:
        k = max(1, min(size, round(codec.k * size / CHUNK_SIZE)))
        found.append(Chunks(first, count, size, k))
        first += count * size
    return tuple(found)


def make_tiles(shape: tuple[int, ...]) -> tuple[Tiles, ...]:
    """Cut a tensor into tiles, as a matrix: its first dimension by all others.

    Rows and columns are cut as evenly as can be, into at most two lengths each: a prime or odd
    dimension makes tiles of two sizes, and none of 1 by 1.
    """
    height, width = view_as_matrix(shape)
    found: list[Tiles] = []
    row = 0
    for rows, tall in _even(height, TILE):
        column = 0
        for columns, wide in _even(width, TILE):
            found.append(Tiles(row, column, rows, columns, tall, wide))
            column += columns * wide
        row += rows * tall
    return tuple(found)


def view_as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns of a tensor as a matrix; of a vector, one row."""
    if len(shape) < 2:
        return 1, prod(shape)
    return shape[0], prod(shape[1:])


def _even(length: int, most: int) -> list[tuple[int, int]]:
    """Cut a length into as few pieces as can be, none longer than ``most``: counts and lengths."""
    if not length:
        return []
    pieces = -(-length // most)
    short, longer = divmod(length, pieces)
    return [(n, size) for n, size in ((longer, short + 1), (pieces - longer, short)) if n]
