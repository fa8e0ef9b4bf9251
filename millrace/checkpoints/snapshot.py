"""A state, copied into the bytes of the files that it is saved as, while the trainer waits."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any

import torch

from millrace.checkpoints.contents import Content, content
from millrace.checkpoints.parts import Box, Layout, laid_out, name_of
from millrace.checkpoints.tree import SKELETON, taken_apart
from millrace.digest import sha256
from millrace.memory import anonymous
from millrace.models.checkpoint import Chunk, Part, TensorRecord

_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a state, as the files that it will be.

    Attributes:
        layouts: The files.
        tensors: Its tensors, by their names, and where they lie in the files.
        buffers: The bytes of each file, and perhaps more behind them.
    """

    layouts: tuple[Layout, ...]
    tensors: dict[str, TensorRecord]
    buffers: tuple[mmap, ...] = field(repr=False)

    @property
    def files(self) -> Iterator[memoryview]:
        """The bytes of each file."""
        for layout, buffer in zip(self.layouts, self.buffers, strict=True):
            yield memoryview(buffer)[: layout.size]

    def content(self, step: int) -> Content:
        """What will be saved of it at a step. Every file is hashed, four at a time."""
        files = tuple(self.files)
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="digest") as pool:
            digests = list(pool.map(sha256, files))
        parts = tuple(
            Part(step=step, sha256=digest, size=len(body))
            for digest, body in zip(digests, files, strict=True)
        )
        return content(step, parts, self.tensors, files.__getitem__)


class Memory:
    """Where snapshots are taken to: kept from one to the next, as new memory costs most."""

    def __init__(self) -> None:
        self._buffers: list[mmap] = []

    def snapshot(self, state: Mapping[str, Any], part_bytes: int) -> Snapshot:
        """Copy a state; what was copied here before is overwritten.

        Args:
            state: Nested dicts, lists and tuples of tensors, numpy arrays and plain values.
            part_bytes: A file is closed before it would be larger.

        Raises:
            ConfigurationError: Something in the state cannot be saved; its path is named.
        """
        tensors = taken_apart(state)
        content = {name: tensor for name, tensor in tensors.items() if name != SKELETON}
        # The skeleton in a file of its own: whoever loads a part of the state reads all of it.
        layouts = (
            *laid_out(content, part_bytes),
            *laid_out({SKELETON: tensors[SKELETON]}, part_bytes),
        )
        for number, layout in enumerate(layouts):
            if number == len(self._buffers):
                self._buffers.append(anonymous(layout.size))
            elif len(self._buffers[number]) < layout.size:
                self._buffers[number] = anonymous(layout.size)
            buffer = self._buffers[number]
            buffer[: len(layout.head)] = layout.head
            for box in layout.boxes:
                _copy_box(tensors[box.tensor], box, buffer)
        del self._buffers[len(layouts) :]
        return Snapshot(layouts, _recorded(layouts, tensors), tuple(self._buffers))

    def clear(self) -> None:
        """Let go of it."""
        self._buffers.clear()


def _copy_box(tensor: torch.Tensor, box: Box, buffer: mmap) -> None:
    if not box.size:
        return
    whole = tuple(tensor.shape) == box.shape
    source = tensor if whole else tensor.narrow(0, box.start[0], box.shape[0])
    count = box.size // box.dtype.itemsize
    place = torch.frombuffer(buffer, dtype=box.dtype, count=count, offset=box.offset)
    place.view(box.shape).copy_(source)


def _recorded(
    layouts: tuple[Layout, ...], tensors: Mapping[str, torch.Tensor]
) -> dict[str, TensorRecord]:
    chunks: dict[str, list[Chunk]] = {name: [] for name in tensors}
    for number, layout in enumerate(layouts):
        for box in layout.boxes:
            chunk = Chunk(part=number, name=box.name, start=box.start, shape=box.shape)
            chunks[box.tensor].append(chunk)
    return {
        name: TensorRecord(
            dtype=name_of(tensor.dtype), shape=tuple(tensor.shape), chunks=tuple(chunks[name])
        )
        for name, tensor in tensors.items()
    }
