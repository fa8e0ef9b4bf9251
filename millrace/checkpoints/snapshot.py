"""Copies of a state, as the bytes of the files that are saved."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from mmap import mmap
from typing import Any

import torch

from millrace.checkpoints.contents import Content, PartContent, make_content
from millrace.checkpoints.parts import PartLayout, get_dtype_name, lay_out_parts, read_boxes
from millrace.checkpoints.pinned_memory import map_pinned
from millrace.checkpoints.tensor_copies import copy_tensors, find_gpus, wait_for_gpus
from millrace.checkpoints.tensor_shards import TensorShard, find_local_shard, is_distributed
from millrace.checkpoints.tree import flatten_state, is_skeleton, make_own_name
from millrace.digest import combine_blocks, hash_blocks
from millrace.errors import ConfigurationError, CorruptError
from millrace.memory import map_anonymous
from millrace.schemas.checkpoint import Chunk, Part, TensorRecord
from millrace.threads import count_processors, map_slices

_COPY_THREADS = 16  # more are limited by the bandwidth of the memory


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copy of a state, as the bytes of its files.

    Attributes:
        layouts: Layouts of the files.
        tensors: Descriptions of the tensors by their names, with their positions in the files.
        buffers: Buffers that begin with the bytes of each file.
    """

    layouts: tuple[PartLayout, ...]
    tensors: dict[str, TensorRecord]
    buffers: tuple[mmap, ...] = field(repr=False)

    @property
    def files(self) -> Iterator[memoryview]:
        """Bytes of each file."""
        for layout, buffer in zip(self.layouts, self.buffers, strict=True):
            yield memoryview(buffer)[: layout.size]

    def make_content(self, step: int) -> Content:
        """Return the content to save at a step. Hashes all files on all processors."""
        files = tuple(self.files)
        blocks = map_slices(
            lambda one: hash_blocks(files[one][0]), len(files), step=1, threads=count_processors()
        )
        contents = tuple(map(PartContent, files, blocks))
        parts = tuple(
            Part(step=step, digest=combine_blocks(each.blocks), size=len(each.body))
            for each in contents
        )
        return make_content(step, parts, self.tensors, contents.__getitem__)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Layout of a state in files.

    Attributes:
        layouts: Layouts of the files.
        tensors: Descriptions of the tensors by their names, with their positions in the files.
        shards: Shards of tensors to copy, by the tensors' names.
        gpus: GPUs that have some of them.
    """

    layouts: tuple[PartLayout, ...]
    tensors: dict[str, TensorRecord]
    shards: Mapping[str, TensorShard] = field(repr=False)
    gpus: Set[torch.device]

    def check_head(self, layout: PartLayout, buffer: mmap) -> None:
        """Write the header of a file into a buffer, and read it back as `load` does.

        Raises:
            ConfigurationError: The file could not be loaded.
        """
        buffer[: len(layout.head)] = layout.head
        _check_readable(layout, memoryview(buffer)[: layout.size])

    def allocate(self, size: int) -> mmap:
        """Allocate memory for files of the state."""
        return map_pinned(size) if self.gpus else map_anonymous(size)

    def copy_file(self, layout: PartLayout, buffer: mmap) -> memoryview:
        """Copy a file of the state into a buffer on one thread, and return its bytes."""
        copy_tensors(self.shards, [(layout, buffer)], threads=1, on_copied=lambda _: None)
        return memoryview(buffer)[: layout.size]


class SnapshotBuffers:
    """Memory for snapshots, which is reused because new memory is slow."""

    def __init__(self) -> None:
        self._buffers: list[mmap] = []

    @property
    def size(self) -> int:
        """Size of the memory in bytes."""
        return sum(map(len, self._buffers))

    def snapshot(
        self,
        state: Mapping[str, Any],
        part_bytes: int,
        *,
        rank: int | None = None,
        mine: Callable[[str], bool] | None = None,
        own: Mapping[str, Any] | None = None,
        on_copied: Callable[[memoryview], None] = lambda _: None,
    ) -> Snapshot:
        """Copy a state, and overwrite the previous copy.

        The headers of the files are read back before the first copy.

        Args:
            state: Nested dicts, lists and tuples of tensors, numpy arrays and plain values.
            part_bytes: Largest size of a file in bytes. Only a single larger row exceeds it.
            rank: Number of this rank, if several ranks save together. Each rank then saves its
                shards of distributed tensors, and the first rank saves everything else.
            mine: Function that selects by path the other tensors that this rank saves.
            own: State of this rank alone, such as that of its generators.
            on_copied: Function that is called with the bytes of each file after their copy, in
                the order of the files, and by one thread at a time.

        Raises:
            ConfigurationError: A value cannot be saved. The message has its path. No file was
                copied.
        """
        plan = lay_out_state(state, part_bytes, rank=rank, mine=mine, own=own)
        for number, layout in enumerate(plan.layouts):
            if number == len(self._buffers):
                self._buffers.append(plan.allocate(layout.size))
            elif len(self._buffers[number]) < layout.size:
                self._buffers[number] = plan.allocate(layout.size)
            plan.check_head(layout, self._buffers[number])
        del self._buffers[len(plan.layouts) :]
        copy_tensors(
            plan.shards,
            zip(plan.layouts, self._buffers, strict=True),
            threads=min(_COPY_THREADS, count_processors()),
            on_copied=on_copied,
        )
        return Snapshot(plan.layouts, plan.tensors, tuple(self._buffers))

    def open_files(
        self, plan: StateLayout, count: int
    ) -> list[Callable[[], AbstractContextManager[memoryview]]]:
        """Return a function for each file of a state, which copies the file when it is called.

        The result of the function is a context with the bytes of the file. At most ``count``
        contexts may be open at once, in any threads. The memory is that of so many files.

        Args:
            plan: Layout of the state. The state must not change before the last context ends.
            count: Number of contexts that are open at once.

        Raises:
            ConfigurationError: A file could not be loaded.
        """
        count = min(count, len(plan.layouts))
        largest = max(layout.size for layout in plan.layouts)
        kept = [buffer for buffer in self._buffers if len(buffer) >= largest][:count]
        self._buffers = kept + [plan.allocate(largest) for _ in range(count - len(kept))]
        for layout in plan.layouts:
            plan.check_head(layout, self._buffers[0])
        wait_for_gpus(plan.gpus)  # other threads, with other streams, make the copies
        free = deque(self._buffers)

        @contextmanager
        def open_file(layout: PartLayout) -> Generator[memoryview]:
            buffer = free.popleft()
            try:
                yield plan.copy_file(layout, buffer)
            finally:
                free.append(buffer)

        return [partial(open_file, layout) for layout in plan.layouts]

    def clear(self) -> None:
        """Free the memory."""
        self._buffers.clear()


def lay_out_state(
    state: Mapping[str, Any],
    part_bytes: int,
    *,
    rank: int | None = None,
    mine: Callable[[str], bool] | None = None,
    own: Mapping[str, Any] | None = None,
) -> StateLayout:
    """Lay a state out in files, without a copy: see `SnapshotBuffers.snapshot`.

    Raises:
        ConfigurationError: A value cannot be saved. The message has its path.
    """
    held = {
        name: _select_shard(name, tensor, rank, mine)
        for name, tensor in flatten_state(state).items()
    }
    for name, tensor in flatten_state(own).items() if own else ():
        held[make_own_name(rank or 0, name)] = find_local_shard(name, tensor)
    shards = {name: shard for name, shard in held.items() if shard.mine}
    # A skeleton has a file of its own, since a partial load reads it whole.
    small = {name: shard for name, shard in shards.items() if is_skeleton(name)}
    large = {name: shard for name, shard in shards.items() if name not in small}
    layouts = (*lay_out_parts(large, part_bytes), *lay_out_parts(small, part_bytes))
    records = _make_tensor_records(layouts, held)
    return StateLayout(layouts, records, shards, find_gpus(shards.values()))


def _select_shard(
    name: str, tensor: torch.Tensor, rank: int | None, mine: Callable[[str], bool] | None
) -> TensorShard:
    """Return the part of a tensor that this process holds, marked if this process saves it."""
    shard = find_local_shard(name, tensor)
    if not is_distributed(tensor):
        its = not rank if mine is None or is_skeleton(name) else mine(name)
        if its and tensor.is_meta:
            raise ConfigurationError(
                f"{name} is on the device meta, without content: give a tensor with content."
            )
        return replace(shard, mine=its)
    if rank is None:
        raise ConfigurationError(
            f"{name} is distributed over several ranks: let each of them save with a "
            "Saver(ranks=Ranks.from_group())."
        )
    return shard


def _check_readable(layout: PartLayout, file: memoryview) -> None:
    """Read the header of a file as `load` does, and compare it with the layout.

    Raises:
        ConfigurationError: The file could not be loaded.
    """
    try:
        found = read_boxes(file)
    except CorruptError as error:
        raise ConfigurationError(
            f"The file with {layout.boxes[0].tensor} could not be loaded again: {error} Rename "
            "the tensors of this state, or save with smaller files."
        ) from error
    for box in layout.boxes:
        there = found.get(box.name)
        if there is None or (there.dtype, tuple(there.shape)) != (box.dtype, box.shape):
            raise ConfigurationError(
                f"{box.tensor} could not be found again in its file: give it another name."
            )


def _make_tensor_records(
    layouts: tuple[PartLayout, ...], held: Mapping[str, TensorShard]
) -> dict[str, TensorRecord]:
    chunks: dict[str, list[Chunk]] = {name: [] for name in held}
    for number, layout in enumerate(layouts):
        for box in layout.boxes:
            chunk = Chunk(
                part=number, name=box.name, offset=box.offset, start=box.start, shape=box.shape
            )
            chunks[box.tensor].append(chunk)
    return {
        name: TensorRecord(
            dtype=get_dtype_name(shard.local.dtype), shape=shard.shape, chunks=tuple(chunks[name])
        )
        for name, shard in held.items()
    }
