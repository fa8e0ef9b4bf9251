"""Parts of tensors that one process holds: whole tensors, or shards of DTensors."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

import numpy as np
import torch

from millrace.errors import ConfigurationError
from millrace.schemas.checkpoint import Chunk


@dataclass(frozen=True, slots=True)
class TensorShard:
    """Box of a tensor that this process holds.

    Attributes:
        local: Content of the box.
        shape: Shape of the whole tensor.
        start: First index of the box in each dimension of the tensor.
        mine: Whether this process saves the box, among all processes that hold it.
    """

    local: torch.Tensor = field(repr=False)
    shape: tuple[int, ...]
    start: tuple[int, ...]
    mine: bool = True


def find_local_shard(name: str, tensor: torch.Tensor) -> TensorShard:
    """Return the part of a tensor that this process holds: of a DTensor, its local shard.

    Among processes with replicas, the first one in each dimension of the mesh saves the shard.
    There is no communication.

    Args:
        name: Name of the tensor, for error messages.
        tensor: Plain tensor, or DTensor.

    Raises:
        ConfigurationError: The shard is not a box, its rows are not known, or the DTensor is a
            pending sum (`Partial`).
    """
    if not is_distributed(tensor):
        shape = tuple(tensor.shape)
        return TensorShard(tensor, shape, (0,) * len(shape))
    spread = cast("Any", tensor)
    try:
        (box,) = spread.__create_chunk_list__()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise _make_layout_error(name, spread) from error
    place = spread.device_mesh.get_coordinate()
    copies = zip(spread.placements, place or (), strict=False)
    first = all(at == 0 for placement, at in copies if placement.is_replicate())
    local = spread.to_local()
    start, sizes = tuple(box.offsets), tuple(box.sizes)
    if place is not None and any(hasattr(one, "split_factor") for one in spread.placements):
        start, sizes = _locate_strided_shard(name, spread, place)
    if tuple(local.shape) != sizes:
        raise _make_layout_error(name, spread)
    return TensorShard(local, tuple(spread.shape), start, place is not None and first)


def _locate_strided_shard(
    name: str, spread: Any, place: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the first indices and the sizes of a local shard of FSDP2 with tensor parallelism.

    ``_StridedShard`` cuts the chunks of later dimensions of the mesh: FSDP2 cuts what tensor
    parallelism has left. For uneven chunks, torch's own list names another box.

    Args:
        name: Name of the tensor, for error messages.
        spread: DTensor.
        place: Coordinate of this process in the mesh.

    Raises:
        ConfigurationError: No order of the cuts has the strides of the placements.
    """
    counts, placements = spread.device_mesh.shape, cast("tuple[Any, ...]", spread.placements)
    order: dict[int, list[int]] = {}  # dimensions of the mesh that cut each one of the tensor
    for number, placement in reversed(list(enumerate(placements))):
        if placement.is_replicate():
            continue
        cuts = order.setdefault(placement.dim, [])
        strides = [prod(counts[one] for one in cuts[:before]) for before in range(len(cuts) + 1)]
        stride = getattr(placement, "split_factor", 1)
        if stride not in strides:
            raise _make_layout_error(name, spread)
        cuts.insert(strides.index(stride), number)
    start, sizes = [0] * spread.ndim, list(spread.shape)
    for axis, cuts in order.items():
        for number in cuts:
            chunk = -(-sizes[axis] // counts[number])  # as `torch.chunk` cuts
            before = min(chunk * place[number], sizes[axis])
            start[axis] += before
            sizes[axis] = min(chunk, sizes[axis] - before)
    return tuple(start), tuple(sizes)


def _make_layout_error(name: str, spread: Any) -> ConfigurationError:
    return ConfigurationError(
        f"{name} is distributed as {spread.placements}, in a layout that a checkpoint does not "
        "hold: redistribute it to Shard or Replicate."
    )


def is_distributed(tensor: torch.Tensor) -> bool:
    """Decide whether a tensor is a DTensor, such as those of FSDP2 and tensor parallelism."""
    module = sys.modules.get("torch.distributed.tensor")  # every DTensor needs it
    return module is not None and isinstance(tensor, module.DTensor)


def is_on_several_ranks(tensor: torch.Tensor) -> bool:
    """Decide whether a tensor is a DTensor of a mesh with more than one rank."""
    return is_distributed(tensor) and cast("Any", tensor).device_mesh.size() > 1


def is_covered_once(shape: tuple[int, ...], chunks: tuple[Chunk, ...]) -> bool:
    """Decide whether boxes cover each element of a tensor exactly once."""
    chunks = tuple(chunk for chunk in chunks if 0 not in chunk.shape)
    if 0 in shape:
        return not chunks
    if not shape:
        return len(chunks) == 1
    if sum(prod(chunk.shape) for chunk in chunks) != prod(shape):
        return False
    # The edges of all boxes cut the tensor into cells. Each cell must be in exactly one box.
    cuts = [
        sorted({0, shape[axis]} | {edge for chunk in chunks for edge in _find_edges(chunk, axis)})
        for axis in range(len(shape))
    ]
    if any(axis[0] != 0 or axis[-1] != size for axis, size in zip(cuts, shape, strict=True)):
        return False
    cells = np.zeros([len(axis) - 1 for axis in cuts], dtype=np.uint8)
    for chunk in chunks:
        box = tuple(
            slice(*(cuts[axis].index(edge) for edge in _find_edges(chunk, axis)))
            for axis in range(len(shape))
        )
        if cells[box].any():
            return False
        cells[box] = 1
    return bool(cells.all())


def _find_edges(chunk: Chunk, axis: int) -> tuple[int, int]:
    return chunk.start[axis], chunk.start[axis] + chunk.shape[axis]
