"""Part of a tensor that one process holds: all of it, or its shard of a distributed one."""

import sys
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

import numpy as np
import torch

from millrace.errors import ConfigurationError
from millrace.schemas.checkpoint import Chunk


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A box of a tensor.

    Attributes:
        local: Its content, here.
        shape: Of the whole tensor.
        start: Where the box begins in the tensor, in each dimension.
        mine: Whether it is this process that saves the box, of all that hold it.
    """

    local: torch.Tensor = field(repr=False)
    shape: tuple[int, ...]
    start: tuple[int, ...]
    mine: bool = True


def local_shard_of(name: str, tensor: torch.Tensor) -> TensorShard:
    """Return the part of a tensor that this process holds.

    Of a DTensor: its shard; nothing is sent.

    Of the processes that hold a replica, the first in each dimension of the mesh saves it.

    Raises:
        ConfigurationError: The shard is no box of the tensor, or the sum over ranks is not done.
    """
    if not is_distributed(tensor):
        shape = tuple(tensor.shape)
        return TensorShard(tensor, shape, (0,) * len(shape))
    spread = cast("Any", tensor)
    try:
        (box,) = spread.__create_chunk_list__()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise ConfigurationError(
            f"{name} is distributed as {spread.placements}, which a checkpoint does not hold: "
            "redistribute it to Shard or Replicate."
        ) from error
    place = spread.device_mesh.get_coordinate()
    copies = zip(spread.placements, place or (), strict=False)
    first = all(at == 0 for placement, at in copies if placement.is_replicate())
    local = spread.to_local()
    if tuple(local.shape) != tuple(box.sizes):
        local = local[tuple(slice(size) for size in box.sizes)]
    mine = place is not None and first
    return TensorShard(local, tuple(spread.shape), tuple(box.offsets), mine)


def is_distributed(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is a DTensor, as FSDP2 and tensor parallelism make them."""
    module = sys.modules.get("torch.distributed.tensor")  # who has one has imported it
    return module is not None and isinstance(tensor, module.DTensor)


def is_covered_once(shape: tuple[int, ...], chunks: tuple[Chunk, ...]) -> bool:
    """Tell whether boxes cover a tensor of a shape, each element once."""
    chunks = tuple(chunk for chunk in chunks if 0 not in chunk.shape)
    if 0 in shape:
        return not chunks
    if not shape:
        return len(chunks) == 1
    if sum(prod(chunk.shape) for chunk in chunks) != prod(shape):
        return False
    # The tensor, cut wherever a box begins or ends: each cell is in one box, or it is not right.
    cuts = [
        sorted({0, shape[axis]} | {edge for chunk in chunks for edge in _edges_of(chunk, axis)})
        for axis in range(len(shape))
    ]
    if any(axis[0] != 0 or axis[-1] != size for axis, size in zip(cuts, shape, strict=True)):
        return False
    cells = np.zeros([len(axis) - 1 for axis in cuts], dtype=np.uint8)
    for chunk in chunks:
        box = tuple(
            slice(*(cuts[axis].index(edge) for edge in _edges_of(chunk, axis)))
            for axis in range(len(shape))
        )
        if cells[box].any():
            return False
        cells[box] = 1
    return bool(cells.all())


def _edges_of(chunk: Chunk, axis: int) -> tuple[int, int]:
    return chunk.start[axis], chunk.start[axis] + chunk.shape[axis]
